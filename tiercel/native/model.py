"""A model whose whole step is one native call: decoder layers, and what stands before and after them."""

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercel.native.library import Chain, Layer, Shape, Step, bound
from tiercel.native.matrix import Matrix

Vector = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer: norms float32 ``[hidden]``, fused projections (gate over up; q over k over v)."""

    attn_norm: Vector
    mlp_norm: Vector
    qkv: Matrix
    qkv_bias: Vector | None
    out: Matrix
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class CombineWeights:
    """What an MTP layer does before its decoder layer: ``eh_proj`` over normed embedding and normed hidden state."""

    enorm: Vector
    hnorm: Vector
    eh_proj: Matrix


class NativeModel:
    """Layers with their embedding, an optional combination of embedding and hidden state, and a head.

    Args:
        shape: sizes; ``target_hidden`` and ``embedding_first`` matter with ``combine`` only.
        embedding: ``[vocab, hidden]``.
        layers: at least one.
        norm: final norm, float32 ``[hidden]``.
        head: ``[vocab or draft vocab, hidden]``.
        combine: for MTP layers.
        bits: width of the integers that quantised matrices read their input as, 8 or 16.
    """

    def __init__(
        self,
        shape: Shape,
        embedding: Matrix,
        layers: list[LayerWeights],
        norm: Vector,
        head: Matrix,
        combine: CombineWeights | None = None,
        bits: int = 16,
    ) -> None:
        self.kept = (embedding, layers, norm, head, combine)  # the library borrows their memory
        self.shape, self.norm, self.head, self.bits = shape, norm, head, bits
        self.library = bound()
        self.handle = self.library.tc_model_new(ctypes.byref(shape), bits, embedding.handle)
        for weights in layers:
            layer = Layer(
                attn_norm=weights.attn_norm.ctypes.data,
                mlp_norm=weights.mlp_norm.ctypes.data,
                qkv_bias=None if weights.qkv_bias is None else weights.qkv_bias.ctypes.data,
                qkv=weights.qkv.handle,
                out=weights.out.handle,
                gate_up=weights.gate_up.handle,
                down=weights.down.handle,
            )
            self.library.tc_model_add_layer(self.handle, ctypes.byref(layer))
        if combine is not None:
            enorm, hnorm = combine.enorm.ctypes.data, combine.hnorm.ctypes.data
            self.library.tc_model_set_combine(self.handle, enorm, hnorm, combine.eh_proj.handle)
        self.library.tc_model_set_head(self.handle, norm.ctypes.data, head.handle)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.library.tc_model_free(self.handle)

    def run(self, step: Step, threads: int) -> None:
        """Play one step; everything that ``step`` points at stays the caller's, and lives until this returns."""
        self.library.tc_set_threads(threads)
        self.library.tc_model_run(self.handle, ctypes.byref(step))


def run_chain(chain: Chain, step: Step, threads: int) -> None:
    """Play MTP layers one after the other; as for ``NativeModel.run``, the caller keeps everything alive."""
    bound().tc_set_threads(threads)
    bound().tc_chain_run(ctypes.byref(chain), ctypes.byref(step))
