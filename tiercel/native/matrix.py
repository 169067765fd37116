"""Matrices in the layouts that the CPU library multiplies with."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tiercel.native.library import bound

BLOCK = 32
"""Columns that share a scale in the quantised formats."""


class Format(IntEnum):
    """Formats of weights, with ggml's type numbers."""

    F32 = 0
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30

    @property
    def is_quantised(self) -> bool:
        return self in (Format.Q4_0, Format.Q4_1, Format.Q8_0)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row in a file."""
        per_block = {Format.Q4_0: 18, Format.Q4_1: 20, Format.Q8_0: 34, Format.F32: 4 * BLOCK, Format.BF16: 2 * BLOCK}
        return columns * per_block[self] // BLOCK


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as a file holds it.

    Args:
        format: how the bytes are to be read.
        columns: input width; a multiple of ``BLOCK`` in the quantised formats.
        data: uint8 ``[rows, format.row_bytes(columns)]``, possibly a view of a mapped file.
    """

    format: Format
    columns: int
    data: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    def take(self, rows: NDArray[np.int64]) -> "Blocks":
        """Some of the rows, in the order given."""
        return Blocks(self.format, self.columns, self.data[rows])

    def is_finite(self) -> bool:
        """Whether no scale, minimum or value is NaN or infinite."""
        if self.format is Format.F32:
            return bool(np.isfinite(self.data.view(np.float32)).all())
        if self.format is Format.BF16:
            return not bool((self.data.view(np.uint16) & 0x7F80 == 0x7F80).any())
        halves = 4 if self.format is Format.Q4_1 else 2
        by_block = self.data.reshape(-1, self.format.row_bytes(BLOCK))[:, :halves]
        return bool(np.isfinite(np.ascontiguousarray(by_block).view(np.float16)).all())


def stacked(parts: list[Blocks]) -> Blocks:
    """Matrices of one format, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Blocks(first.format, first.columns, np.concatenate([p.data for p in parts]))


class Matrix:
    """A packed matrix ``[rows, columns]`` in the library's memory."""

    def __init__(self, blocks: Blocks) -> None:
        self.format, (self.rows, self.columns) = blocks.format, blocks.shape
        if blocks.data.dtype != np.uint8 or blocks.data.shape[1] != blocks.format.row_bytes(blocks.columns):
            raise ValueError(f"{blocks.format.name} rows of {blocks.columns} columns cannot take {blocks.data.shape}")
        if blocks.format.is_quantised and blocks.columns % BLOCK:
            raise ValueError(f"{blocks.columns} columns cannot be cut into blocks of {BLOCK}")
        source = np.ascontiguousarray(blocks.data)
        self.handle: int = bound().tc_matrix_new(int(self.format), self.rows, self.columns, source.ctypes.data)
        self.free = bound().tc_matrix_free

    def __del__(self) -> None:
        if hasattr(self, "free"):
            self.free(self.handle)

    @property
    def num_bytes(self) -> int:
        """Memory that the packed form takes."""
        return int(bound().tc_matrix_bytes(self.handle))

    def row(self, index: int) -> NDArray[np.float32]:
        """One row, dequantised: float32 ``[columns]``."""
        out = np.empty(self.columns, np.float32)
        bound().tc_matrix_row(self.handle, range(self.rows)[index], out.ctypes.data)
        return out

    def apply(self, x: NDArray[np.float32], threads: int = 1, bits: int = 16) -> NDArray[np.float32]:
        """``x @ W.T``: float32 ``[n, columns]`` to ``[n, rows]``; every row's result is independent of the others.

        A quantised matrix reads ``x`` as integers of ``bits`` bits (8 or 16) with a scale per row and block of 32 columns.
        """
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != self.columns:
            raise ValueError(f"need float32 [n, {self.columns}], got {x.dtype} {list(x.shape)}")
        source = np.ascontiguousarray(x)
        out = np.empty((len(x), self.rows), np.float32)
        bound().tc_set_threads(threads)
        bound().tc_matrix_apply(self.handle, bits, source.ctypes.data, len(x), out.ctypes.data)
        return out
