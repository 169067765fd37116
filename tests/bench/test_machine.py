"""The machine's description and limits."""

import numpy as np
import pytest

from tiercel.bench import hardware
from tiercel.bench.roofline import Roofline, Work, demands, measure
from tiercel.engine.engine import LoadedTarget
from tiercel.native.library import bound
from tiercel.native.matrix import Format


def test_the_limit_is_the_slower_of_reading_and_multiplying() -> None:
    roofline = Roofline(bytes_per_s=10e9, operations_per_s=100e9, work=Work(80_000_000, 270_000_000, Format.Q4_1))
    assert roofline.limit_ms(1) == pytest.approx(8.0)  # 80 MB at 10 GB/s; multiplying takes 2.7 ms
    assert roofline.limit_ms(4) == pytest.approx(10.8)  # now multiplying is slower


def test_demands_count_every_matrix_of_a_step(toy_native: LoadedTarget) -> None:
    # Two layers of width 32, MLP 64, heads 4 (2 for keys and values) of 8, and a head of 259 rows.
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    weights = 2 * layer + 259 * 32
    found = demands(toy_native.model)  # type: ignore[arg-type]
    assert found.operations_per_row == 2 * weights
    assert found.format is Format.F32
    assert 4 * weights <= found.weight_bytes < 4 * 1.1 * weights + 4096  # rows are padded to whole groups


def test_measured_limits_are_plausible(
    toy_native: LoadedTarget, toy_modules: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.bench.roofline.TRIES", 2)
    found = measure(toy_native.model, 8, 1)
    assert found is not None
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.operations_per_s < 1e14
    assert measure(toy_modules.model, 8, 1) is None  # PyTorch modules have no such limit to compare with


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reading_reads_everything_once(threads: int) -> None:
    words = np.arange(8 * 1001, dtype=np.uint64)
    bound().tc_set_threads(threads)
    assert bound().tc_read(words.ctypes.data, len(words)) == words.sum()


@pytest.mark.parametrize("kind", [Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.BF16])
def test_every_format_can_be_measured(kind: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercel.bench import roofline

    monkeypatch.setattr(roofline, "TRIES", 1)
    monkeypatch.setattr(roofline, "RESIDENT_ROWS", 32)
    assert roofline.matrix_throughput(kind, 8, 1) > 0


def test_the_description_names_what_a_reader_needs() -> None:
    found = hardware.describe()
    assert found["cores"] >= 1
    assert found["code_path"] in ("avx512vnni", "avx2", "portable")
    assert set(hardware.versions()) == {"tiercel", "torch", "python"}
