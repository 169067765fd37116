"""Reading GGUF files (ggml-org/llama.cpp) with the ``gguf`` package: description, tensors, tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint, check_description
from tiercel.models.description import ModelDescription
from tiercel.models.tokenizer import tokenizer_from_gguf
from tiercel.native.matrix import Blocks, Format

Value = TypeVar("Value", bound=np.generic)

ARCHITECTURES = ("llama",)
TENSOR_TYPES = ("Q4_1", "Q4_0", "Q8_0", "F16", "BF16", "F32")
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        UserError: not a GGUF file, cut short, or of an architecture or quantisation that is not supported.
    """
    reader = read_gguf_header(path)
    fields = _Fields(path, reader)
    description = _description(fields, {tensor.name for tensor in reader.tensors})
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in TENSOR_TYPES:
            raise UserError(
                f"{path}: tensor {tensor.name!r} is {tensor.tensor_type.name}; supported are {', '.join(TENSOR_TYPES)}"
            )
    return Checkpoint(
        path,
        description,
        lambda: _tensors(path, reader, description),
        lambda: tokenizer_from_gguf(str(path), fields),
        lambda: _weights(path, reader, description),
    )


def read_gguf_header(path: Path) -> GGUFReader:
    """Fields and tensor places of a GGUF file; values stay on disk, mapped.

    Raises:
        UserError: not a GGUF file, or cut short.
    """
    try:
        return _Reader(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise UserError(f"{path} is no readable GGUF file ({error}): it may be cut short; get it again") from error


class _Reader(GGUFReader):
    """The package's reader, three times as fast: it cuts out every string as an array, and ``numpy.memmap`` is slow at that."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        """The file's bytes: a plain array over the same mapping."""
        return self._bytes

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._bytes = np.asarray(mapped)


class _Fields:
    """The file's key/value pairs by name; one that cannot be decoded is a ``UserError``."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self.reader = path, reader

    def get(self, name: str, default: Any = None) -> Any:
        found = self.reader.get_field(name)
        try:
            return default if found is None else found.contents()
        except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
            raise UserError(f"{self.path}: the GGUF field {name} is damaged ({error}); get the file again") from error

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{self.path}: the GGUF field {name} is missing")
        return value


def _description(fields: _Fields, tensor_names: set[str]) -> ModelDescription:
    arch = fields.need("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{fields.path}: architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if fields.get(f"{arch}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensor_names:
        raise UserError(f"{fields.path}: RoPE scaling is not supported")
    if fields.get(f"{arch}.expert_count", 0):
        raise UserError(f"{fields.path}: mixture-of-experts models are not supported")
    num_heads, hidden_size = fields.need(f"{arch}.attention.head_count"), fields.need(f"{arch}.embedding_length")
    if not (isinstance(num_heads, int) and isinstance(hidden_size, int) and num_heads > 0):
        raise UserError(f"{fields.path}: {num_heads!r} heads over a hidden size of {hidden_size!r} are not supported")
    head_dim = fields.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if fields.get(f"{arch}.{name}", head_dim) != head_dim:
            raise UserError(f"{fields.path}: {arch}.{name} differs from the head size {head_dim}: not supported")
    eos = {fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.eot_token_id")} - {None}
    description = ModelDescription(
        family=arch,
        vocab_size=len(fields.need("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=fields.need(f"{arch}.feed_forward_length"),
        num_layers=fields.need(f"{arch}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.get(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope_theta=float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        rms_norm_eps=float(fields.need(f"{arch}.attention.layer_norm_rms_epsilon")),
        max_position=fields.need(f"{arch}.context_length"),
        tie_word_embeddings="output.weight" not in tensor_names,
        eos_token_ids=tuple(sorted(int(e) for e in eos)),
    )
    return check_description(description, fields.path)


def _tensors(path: Path, reader: GGUFReader, description: ModelDescription) -> Iterator[tuple[str, Tensor]]:
    for tensor in reader.tensors:
        name = published_name(path, tensor.name)
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        values = np.array(_half_split(values, name, description), dtype=np.float32, order="C")
        yield name, torch.from_numpy(values)


def _weights(path: Path, reader: GGUFReader, description: ModelDescription) -> Iterator[tuple[str, Tensor | Blocks]]:
    kept = {GGMLQuantizationType(int(f)): f for f in Format}
    for tensor in reader.tensors:
        name, kind = published_name(path, tensor.name), GGMLQuantizationType(tensor.tensor_type)
        if kind in kept and len(tensor.shape) == 2:
            data = tensor.data.view(np.uint8).reshape(len(tensor.data), -1)
            yield name, Blocks(kept[kind], int(tensor.shape[0]), _half_split(data, name, description))
        else:
            yield name, torch.from_numpy(np.array(dequantize(tensor.data, kind), dtype=np.float32, order="C"))


def published_name(path: Path, name: str) -> str:
    """Hugging Face's name, without ``model.``, of a tensor of a GGUF file.

    Raises:
        UserError: no tensor of a model that is supported.
    """
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        index, _, stem = stem.removeprefix("blk.").partition(".")
        layer = f"layers.{index}."
    if stem not in NAMES:
        raise UserError(f"{path}: tensor {name!r} is unknown; the file needs a feature that is not supported")
    return f"{layer}{NAMES[stem]}.{kind}"


def _half_split(rows: NDArray[Value], name: str, description: ModelDescription) -> NDArray[Value]:
    """Undo llama.cpp's row order: its converter interleaves the two halves of every head of q and k for RoPE."""
    heads = {"q_proj": description.num_heads, "k_proj": description.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or len(rows) != heads * description.head_dim:
        return rows  # of another shape it is not touched: whoever loads it refuses it
    return rows.reshape(heads, description.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(len(rows), -1)
