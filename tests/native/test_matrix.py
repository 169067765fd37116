"""Packed matrices against the gguf package's dequantisation and float64 products, on every code path of this processor."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tiercel.native.library import CODE_PATHS, code_path, library, set_code_path
from tiercel.native.matrix import Blocks, Format, Matrix, stacked

needs_library = pytest.mark.skipif(library() is None, reason="no C++ compiler when the package was installed")
pytestmark = needs_library


@pytest.fixture(params=CODE_PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = code_path()
    try:
        set_code_path(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    set_code_path(before)


def made(kind: Format, rows: int, columns: int, seed: int = 0) -> tuple[Blocks, np.ndarray]:
    """A random matrix in ``kind``, and what it holds."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    data = quantize(values, GGMLQuantizationType(int(kind))).view(np.uint8).reshape(rows, -1)
    return Blocks(kind, columns, data), dequantize(data, GGMLQuantizationType(int(kind)))


BITS = [8, 16]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (1, 64), (37, 96), (160, 576)])
def test_products(path: str, kind: Format, rows: int, columns: int, bits: int) -> None:
    blocks, values = made(kind, rows, columns)
    x = np.random.default_rng(1).standard_normal((11, columns)).astype(np.float32)
    x[2] *= 1e4
    x[3] *= 1e-4
    x[:, 5] *= 300  # an outlier channel costs its own block precision, no other
    wide, weights = x.astype(np.float64), values.T.astype(np.float64)
    # Half a step of the block's integers times the weights it meets, and float32 rounding of so many sums.
    half_steps = np.abs(wide).reshape(11, -1, 32).max(-1) / (2 ** (bits - 1) - 1) / 2 * kind.is_quantised
    bound = half_steps @ np.abs(weights).reshape(-1, 32, rows).sum(1) + columns * 6e-8 * (
        np.abs(wide) @ np.abs(weights)
    )
    assert (np.abs(Matrix(blocks).apply(x, bits=bits) - wide @ weights) <= bound).all()


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", BITS)
def test_a_rows_result_is_its_own(path: str, kind: Format, threads: int, bits: int) -> None:
    blocks, _ = made(kind, 100, 64)
    matrix, x = Matrix(blocks), np.random.default_rng(2).standard_normal((150, 64)).astype(np.float32)
    alone = np.concatenate([matrix.apply(row[None], threads, bits) for row in x])
    for count in (2, 3, 4, 5, 7, 8, 9, 33, 150):
        assert np.array_equal(matrix.apply(x[:count], threads, bits), alone[:count])
    assert np.array_equal(matrix.apply(x[::-1], threads, bits), alone[::-1])


@pytest.mark.parametrize("kind", Format)
def test_rows_come_back_as_the_file_holds_them(kind: Format) -> None:
    blocks, values = made(kind, 35, 64)
    matrix = Matrix(blocks)
    assert np.array_equal(np.stack([matrix.row(i) for i in range(35)]), values)
    with pytest.raises(IndexError):
        matrix.row(35)


def test_extreme_scales_are_read_exactly() -> None:
    """fp16 scales: the smallest subnormal, the largest number, both zeros."""
    for bits in (0x0001, 0x03FF, 0x0400, 0x7BFF, 0x0000, 0x8000, 0xFBFF, 0x8001):
        data = np.zeros((1, 34), np.uint8)
        data[0, :2] = np.array([bits], np.uint16).view(np.uint8)
        data[0, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
        expected = np.array([bits], np.uint16).view(np.float16).astype(np.float32)[0] * np.arange(-16, 16)
        matrix = Matrix(Blocks(Format.Q8_0, 32, data))
        assert np.array_equal(matrix.row(0), expected.astype(np.float32))
        got = matrix.apply(np.eye(32, dtype=np.float32))[:, 0]
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(path: str, kind: Format, bad: float, bits: int) -> None:
    blocks, _ = made(kind, 48, 64)
    x = np.ones((3, 64), np.float32)
    clean = Matrix(blocks).apply(x, bits=bits)
    x[1, 40] = bad
    got = Matrix(blocks).apply(x, bits=bits)
    assert not np.isfinite(got[1]).any()
    assert np.array_equal(got[[0, 2]], clean[[0, 2]])


def test_zeros_and_tiny_inputs(path: str) -> None:
    blocks, values = made(Format.Q4_1, 16, 32)
    x = np.zeros((2, 32), np.float32)
    x[1] = 1e-42  # subnormal: its block scale is too
    got = Matrix(blocks).apply(x)
    assert np.array_equal(got[0], np.zeros(16, np.float32))
    assert np.abs(got[1] - x[1].astype(np.float64) @ values.T).max() < 1e-39


def test_shapes_are_checked() -> None:
    blocks, _ = made(Format.Q4_0, 16, 64)
    with pytest.raises(ValueError, match="float32"):
        Matrix(blocks).apply(np.zeros((1, 32), np.float32))
    with pytest.raises(ValueError, match="float32"):
        Matrix(blocks).apply(np.zeros((1, 64)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot take"):
        Matrix(Blocks(Format.Q4_1, 64, blocks.data))
    with pytest.raises(ValueError, match="blocks of 32"):
        Matrix(Blocks(Format.Q8_0, 16, np.zeros((2, 17), np.uint8)))
    with pytest.raises(ValueError, match="code path"):
        set_code_path("sse2")


def test_stacking_and_taking_rows() -> None:
    (a, first), (b, second) = made(Format.Q8_0, 20, 32, 1), made(Format.Q8_0, 12, 32, 2)
    both = Matrix(stacked([a, b]))
    assert both.rows == 32
    assert np.array_equal(both.row(25), second[5])
    assert np.array_equal(Matrix(a.take(np.array([7, 3]))).row(1), first[3])


@pytest.mark.parametrize("kind", Format)
def test_damage_is_found(kind: Format) -> None:
    blocks, _ = made(kind, 4, 64)
    assert blocks.is_finite()
    data = blocks.data.copy()
    width = kind.row_bytes(32)
    data[2, width : width + 4] = np.array([0x7FC0, 0x7FC0], np.uint16).view(np.uint8)
    if kind is Format.F32:
        data[2, width : width + 4] = np.array([np.nan], np.float32).view(np.uint8)
    elif kind is not Format.BF16:
        data[2, width : width + 2] = np.array([np.nan], np.float16).view(np.uint8)
    assert not Blocks(kind, 64, data).is_finite()


@pytest.mark.parametrize("kind", [Format.Q4_1, Format.Q4_0, Format.Q8_0])
def test_packed_size_is_the_files(kind: Format) -> None:
    blocks, _ = made(kind, 64, 256)
    sums = 64 * 256 // 32 * 2 if kind is Format.Q8_0 else 0
    assert Matrix(blocks).num_bytes == blocks.data.nbytes + sums


def test_the_largest_products_do_not_overflow(path: str) -> None:
    """Every weight and every input at its extreme, in both signs."""
    for weight in (-128, 127):
        data = np.full((16, 34), weight & 255, np.uint8)
        data[:, :2] = np.array([1.0], np.float16).view(np.uint8)
        for sign in (1.0, -1.0):
            for bits in BITS:
                got = Matrix(Blocks(Format.Q8_0, 32, data)).apply(np.full((9, 32), sign, np.float32), bits=bits)
                np.testing.assert_allclose(got, 32 * weight * sign, rtol=1e-6)
