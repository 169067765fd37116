"""The limit of this machine: how fast it reads memory and multiplies, and what that allows a step to take."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from tiercel.models.native_step import NativeTarget
from tiercel.models.step import Target
from tiercel.native.library import bound
from tiercel.native.matrix import Blocks, Format, Matrix

RESIDENT_ROWS, RESIDENT_COLUMNS, RESIDENT_INPUTS = 512, 1024, 32
"""A matrix and inputs that stay in a core's second-level cache: 320 KB in Q4_1."""
TRIES = 7


@dataclass(frozen=True, slots=True)
class Work:
    """What a target's matrices demand of one step: bytes read once per step, multiplications and additions per row."""

    weight_bytes: int
    operations_per_row: int
    format: Format


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured limits of the machine, and a model's demands.

    Args:
        bytes_per_s: reading as many bytes as the weights have, every thread at it.
        operations_per_s: multiplications and additions of the CPU library on a cached matrix of the model's format.
        work: the model's.
    """

    bytes_per_s: float
    operations_per_s: float
    work: Work

    def limit_ms(self, rows: float) -> float:
        """No step of so many rows can be faster: the slower of reading the weights and multiplying with them."""
        reading = self.work.weight_bytes / self.bytes_per_s
        multiplying = rows * self.work.operations_per_row / self.operations_per_s
        return max(reading, multiplying) * 1e3

    def to_json(self) -> dict[str, Any]:
        """Measured numbers and demands."""
        return asdict(self) | {"work": asdict(self.work) | {"format": self.work.format.name}}


def measure(target: Target, bits: int, threads: int) -> Roofline | None:
    """The roofline under ``target``; None where it does not run in the CPU library.

    Args:
        target: whose matrices are counted.
        bits: ``activation_bits`` of the engine.
        threads: at work together.
    """
    if not isinstance(target, NativeTarget):
        return None
    work = demands(target)
    return Roofline(read_bandwidth(work.weight_bytes, threads), matrix_throughput(work.format, bits, threads), work)


def demands(target: NativeTarget) -> Work:
    """Every matrix that a step multiplies with: layers and head (the embedding is looked up, a row per token)."""
    _, layers, _, head, _ = target.model.kept
    matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [head]
    return Work(
        weight_bytes=sum(m.num_bytes for m in matrices),
        operations_per_row=sum(2 * m.rows * m.columns for m in matrices),
        format=layers[0].gate_up.format,
    )


def read_bandwidth(size: int, threads: int) -> float:
    """Bytes per second of adding up an array of ``size`` bytes; best of several.

    As large as what a step reads: where a large cache holds some of the weights from step to step, it holds as much of the array.
    """
    words = np.ones(max(size // 64, 1) * 8, np.uint64)
    bound().tc_set_threads(threads)
    return words.nbytes / _best_s(lambda: bound().tc_read(words.ctypes.data, len(words)))


def matrix_throughput(kind: Format, bits: int, threads: int) -> float:
    """Operations per second (2 per weight and row) of the CPU library on a matrix in the cache; best of several."""
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((RESIDENT_ROWS, RESIDENT_COLUMNS), np.float32)
    packed = quantize(weights, GGMLQuantizationType(int(kind))).view(np.uint8)
    matrix = Matrix(Blocks(kind, RESIDENT_COLUMNS, packed))
    inputs = generator.standard_normal((RESIDENT_INPUTS, RESIDENT_COLUMNS), np.float32)
    repeats = 20

    def multiply() -> None:
        for _ in range(repeats):
            matrix.apply(inputs, threads, bits)

    return 2 * repeats * RESIDENT_ROWS * RESIDENT_COLUMNS * RESIDENT_INPUTS / _best_s(multiply)


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
