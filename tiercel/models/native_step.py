"""Targets and drafts as recorded programs of the CPU library: weights stay in the file's own blocks.

Matrices that a checkpoint holds in a format of the library (Q4_0, Q4_1, Q8_0, bfloat16, float32) are packed as they are.
Between them everything is float32; a quantised matrix reads its input as 8- or 16-bit integers with a scale per 32 columns.
"""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor

from tiercel.kvcache.rows import Rows
from tiercel.kvcache.storage import KvStorage
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.decoder import Decoder
from tiercel.models.description import ModelDescription, MtpDescription
from tiercel.models.loading import matched, published_tensors
from tiercel.models.mtp import MtpLayer
from tiercel.models.step import DraftTokens, StepInput, StepOutput
from tiercel.native.library import Chain, Shape, Step
from tiercel.native.matrix import BLOCK, Blocks, Format, Matrix, stacked
from tiercel.native.model import CombineWeights, LayerWeights, NativeModel, Vector, run_chain


class NativeStep:
    """A recorded program: a whole target, or one MTP layer."""

    is_graph: ClassVar[bool] = True

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self._storages: tuple[list[KvStorage], Tensor, Tensor] | None = None

    def run(self, step: StepInput, storages: list[KvStorage]) -> StepOutput:
        """See ``StepModel``."""
        rows, wanted, tree = step.rows, step.wanted, step.rows.tree
        hidden = torch.empty(rows.num_rows, self.model.shape.hidden)
        best = torch.empty(wanted.shape[0], dtype=torch.int64)
        logits = torch.empty(wanted.shape[0], self.model.head.rows) if step.with_logits else None
        confidence = torch.empty(wanted.shape[0]) if step.with_confidence else None
        keys, values = self._addresses(storages)
        taps = torch.tensor(step.taps, dtype=torch.int64)
        tapped = torch.empty(rows.num_rows, len(step.taps) * self.model.shape.hidden) if step.taps else None
        target_hidden = None if step.target_hidden is None else step.target_hidden.contiguous()
        call = Step(
            rows=rows.num_rows,
            token_ids=step.token_ids.data_ptr(),
            positions=rows.positions.data_ptr(),
            target_hidden=None if target_hidden is None else target_hidden.data_ptr(),
            segments=len(rows.segments),
            segment_rows=rows.firsts.data_ptr(),
            slots=rows.slot_addresses.data_ptr(),
            bases=None if tree is None else tree.bases.data_ptr(),
            tails=None if tree is None else tree.tails.data_ptr(),
            tail_width=0 if tree is None else tree.width,
            pool=storages[0].keys.shape[1],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_is_half=storages[0].is_half,
            hidden=hidden.data_ptr(),
            num_taps=len(step.taps),
            taps=taps.data_ptr(),
            tapped=None if tapped is None else tapped.data_ptr(),
            wanted=wanted.shape[0],
            wanted_rows=wanted.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            best=best.data_ptr(),
            confidence=None if confidence is None else confidence.data_ptr(),
        )
        self.model.run(call, torch.get_num_threads())
        return StepOutput(hidden, best, logits, confidence, tapped)

    def _addresses(self, storages: list[KvStorage]) -> tuple[Tensor, Tensor]:
        if self._storages is None or self._storages[0] is not storages:
            keys = torch.tensor([s.keys.data_ptr() for s in storages])
            self._storages = (storages, keys, torch.tensor([s.values.data_ptr() for s in storages]))
        return self._storages[1:]


class NativeChain:
    """See ``DraftChain``."""

    def __init__(self, layers: list[NativeStep], is_chained: bool, target_ids: Tensor) -> None:
        self.layers, self.is_chained, self.target_ids = layers, is_chained, target_ids
        self.handles = torch.tensor([layer.model.handle for layer in layers])
        self._storages: tuple[list[list[KvStorage]], Tensor, Tensor] | None = None

    def __call__(
        self,
        rows: Rows,
        token_ids: Tensor,
        last: Tensor,
        known: Tensor,
        target_hidden: Tensor,
        storages: list[list[KvStorage]],
    ) -> DraftTokens:
        """See ``DraftChain``."""
        if self._storages is None or self._storages[0] is not storages:
            keys = torch.tensor([s.keys.data_ptr() for layer in storages for s in layer])
            self._storages = (storages, keys, torch.tensor([s.values.data_ptr() for layer in storages for s in layer]))
        tokens, source, wanted = token_ids.clone(), target_hidden.contiguous(), known.contiguous()
        drafts, confidence = torch.empty_like(wanted), torch.empty(wanted.shape)
        ends = torch.empty(wanted.shape[0], dtype=torch.int64)
        chain = Chain(
            depth=wanted.shape[0],
            layers=self.handles.data_ptr(),
            keys=self._storages[1].data_ptr(),
            values=self._storages[2].data_ptr(),
            is_chained=self.is_chained,
            token_ids=tokens.data_ptr(),
            known=wanted.data_ptr(),
            target_ids=self.target_ids.data_ptr(),
            drafts=drafts.data_ptr(),
            confidence=confidence.data_ptr(),
            end_ns=ends.data_ptr(),
        )
        step = Step(
            rows=rows.num_rows,
            positions=rows.positions.data_ptr(),
            target_hidden=source.data_ptr(),
            segments=len(rows.segments),
            segment_rows=rows.firsts.data_ptr(),
            slots=rows.slot_addresses.data_ptr(),
            pool=storages[0][0].keys.shape[1],
            kv_is_half=storages[0][0].is_half,
            wanted=last.shape[0],
            wanted_rows=last.data_ptr(),
        )
        run_chain(chain, step, torch.get_num_threads())
        return DraftTokens(drafts, confidence, ends.tolist())


class NativeTarget(NativeStep):
    """A target in the CPU library; ``head_blocks`` is the file's head, from which drafts take their rows."""

    def __init__(
        self, description: ModelDescription, model: NativeModel, embedding: Matrix, head_blocks: Blocks
    ) -> None:
        super().__init__(model)
        self.description, self.embedding, self.head_blocks = description, embedding, head_blocks
        is_rounded = model.bits == 8 and head_blocks.format.is_quantised
        self.kv_dtype = torch.float16 if is_rounded else torch.float32


def load_native_target(checkpoint: Checkpoint, quantization: str, bits: int) -> NativeTarget:
    """Pack the target of ``checkpoint``.

    Args:
        checkpoint: the model.
        quantization: see ``EngineConfig``.
        bits: ``activation_bits`` of ``EngineConfig``.

    Raises:
        UserError: a tensor is missing, unknown, of the wrong shape, or holds NaN or infinity.
    """
    description, where = checkpoint.description, str(checkpoint.path)
    with torch.device("meta"):
        expected = published_tensors(Decoder(description))
    weights = checkpoint.tensors() if quantization == "none" else checkpoint.weights()
    parts = dict(matched(weights, {name: tuple(t.shape) for name, t in expected.items()}, where))
    packer = Packer(parts, requantise=quantization == "q8_0")
    layers = [packer.layer(f"layers.{i}.", description) for i in range(description.num_layers)]
    embedding_blocks = packer.blocks("embed_tokens.weight")
    head_blocks = embedding_blocks if description.tie_word_embeddings else packer.blocks("lm_head.weight")
    embedding = Matrix(embedding_blocks)
    head = embedding if description.tie_word_embeddings else Matrix(head_blocks)
    model = NativeModel(_shape(description), embedding, layers, packer.vector("norm.weight"), head, bits=bits)
    return NativeTarget(description, model, embedding, head_blocks)


def native_mtp_layers(
    description: MtpDescription,
    tensors: Iterable[tuple[str, Tensor]],
    target_ids: Tensor,
    target: NativeTarget,
    where: str,
) -> list[NativeStep]:
    """Pack every MTP layer of a draft; its matrices become Q8_0 where the target's are quantised.

    Args:
        description: of the draft.
        tensors: ``{layer}.{name}`` as ``MtpLayer`` names them, fused projections in parts.
        target_ids: the rows of the target's head that the draft can propose.
        target: whose embedding and head the draft shares.
        where: named in errors.
    """
    with torch.device("meta"):
        layer = published_tensors(MtpLayer(description))
    expected = {f"{i}.{name}": tuple(t.shape) for i in range(description.num_layers) for name, t in layer.items()}
    packer = Packer(dict(matched(tensors, expected, where)), requantise=target.head_blocks.format.is_quantised)
    whole = len(target_ids) == len(target.head_blocks.data)
    head = target.model.head if whole else Matrix(_draft_head(target.head_blocks.take(target_ids.numpy())))
    shape = _shape(description.body)
    shape.target_hidden, shape.embedding_first = description.target_hidden_size, description.embedding_first
    return [
        NativeStep(
            NativeModel(
                shape,
                target.embedding,
                [packer.layer(f"{i}.body.", description.body)],
                packer.vector(f"{i}.final_layernorm.weight"),
                head,
                CombineWeights(
                    packer.vector(f"{i}.enorm.weight"),
                    packer.vector(f"{i}.hnorm.weight"),
                    Matrix(packer.blocks(f"{i}.eh_proj.weight")),
                ),
                target.model.bits,
            )
        )
        for i in range(description.num_layers)
    ]


class Packer:
    """Turns named parts of a checkpoint into what the library takes, letting go of each part as it is used."""

    def __init__(self, parts: dict[str, Tensor | Blocks], requantise: bool) -> None:
        self.parts, self.requantise = parts, requantise

    def layer(self, prefix: str, description: ModelDescription) -> LayerWeights:
        """One decoder layer."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        names = [f"{attention}{part}_proj" for part in "qkv"]
        bias = [self.vector(f"{name}.bias") for name in names] if description.attention_bias else []
        return LayerWeights(
            attn_norm=self.vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            qkv=self.matrix(*(f"{name}.weight" for name in names)),
            qkv_bias=np.concatenate(bias) if bias else None,
            out=self.matrix(f"{attention}o_proj.weight"),
            gate_up=self.matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            down=self.matrix(f"{mlp}down_proj.weight"),
        )

    def vector(self, name: str) -> Vector:
        """A norm or bias, float32."""
        part = self.parts.pop(name)
        tensor = torch.from_numpy(dequantised(part)) if isinstance(part, Blocks) else part
        vector: NDArray[np.float32] = tensor.float().contiguous().flatten().numpy()
        return vector

    def matrix(self, *names: str) -> Matrix:
        """Parts one below the other, in one format: where the file's formats differ, as float32."""
        parts = [self.blocks(name) for name in names]
        if len({part.format for part in parts}) > 1:
            parts = [_float_blocks(torch.from_numpy(dequantised(part))) for part in parts]
        return Matrix(stacked(parts))

    def blocks(self, name: str) -> Blocks:
        """One part, as the file holds it or requantised."""
        part = self.parts.pop(name)
        if isinstance(part, Blocks):
            return part
        if self.requantise and part.shape[1] % BLOCK == 0:
            values = quantize(part.float().contiguous().numpy(), GGMLQuantizationType.Q8_0)
            return Blocks(Format.Q8_0, part.shape[1], values)
        return _float_blocks(part)


def dequantised(blocks: Blocks) -> NDArray[np.float32]:
    """float32 ``[rows, columns]``."""
    values: NDArray[np.float32] = dequantize(blocks.data, GGMLQuantizationType(int(blocks.format)))
    return values


def _draft_head(blocks: Blocks) -> Blocks:
    """Most of what an MTP layer reads, and only drafts depend on it: an 8-bit head becomes Q4_0, at half the time."""
    if blocks.format is not Format.Q8_0:
        return blocks
    return Blocks(Format.Q4_0, blocks.columns, quantize(dequantised(blocks), GGMLQuantizationType.Q4_0))


def _float_blocks(tensor: Tensor) -> Blocks:
    kind, tensor = (Format.BF16, tensor) if tensor.dtype == torch.bfloat16 else (Format.F32, tensor.float())
    return Blocks(kind, tensor.shape[1], tensor.contiguous().view(torch.uint8).numpy())


def _shape(description: ModelDescription) -> Shape:
    return Shape(
        hidden=description.hidden_size,
        intermediate=description.intermediate_size,
        heads=description.num_heads,
        kv_heads=description.num_kv_heads,
        head_dim=description.head_dim,
        rope_theta=description.rope_theta,
        eps=description.rms_norm_eps,
    )
