"""What every checkpoint offers, whatever its file format."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.description import ModelDescription
from tiercel.models.tokenizer import Tokenizer
from tiercel.native.matrix import Blocks


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened but not read.

    Args:
        path: file or folder.
        description: sizes and conventions.
        open_tensors: streams ``(name, tensor)``; names are Hugging Face's without the leading ``model.``, values are
            dequantised (float32, or the file's own float type), q and k rows in the half-split RoPE order.
        open_tokenizer: builds the tokenizer.
        open_weights: streams the same names with the values as the file holds them: matrices in a format of the CPU library
            as ``Blocks``; None if ``open_tensors`` already gives what the file holds.
    """

    path: Path
    description: ModelDescription
    open_tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    open_tokenizer: Callable[[], Tokenizer]
    open_weights: Callable[[], Iterator[tuple[str, Tensor | Blocks]]] | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the tensors, one in memory at a time."""
        return self.open_tensors()

    def weights(self) -> Iterator[tuple[str, Tensor | Blocks]]:
        """Stream the weights as the file holds them."""
        return self.open_weights() if self.open_weights is not None else iter(self.open_tensors())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.open_tokenizer()

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what a draft must fit: the sizes it depends on and every token's text; 16 hex digits of SHA-256.

        Equal for a GGUF file and a Hugging Face folder of the same model; fine-tunes with the same tokenizer share it.
        """
        shape = self.description
        sizes = (shape.vocab_size, shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads)
        text = json.dumps([sizes, self.tokenizer.vocabulary_in_order()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_description(description: ModelDescription, where: Path) -> ModelDescription:
    """Hand ``description`` back once its values can be those of a model.

    Raises:
        UserError: naming the first setting that cannot be, its value, and ``where`` it was read.
    """
    whole = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in (*whole, "max_position"):
        value = getattr(description, name)
        _require(type(value) is int and value >= 1, where, f"{name} is {value!r}, it must be a positive integer")
    for name in ("rope_theta", "rms_norm_eps"):
        value = getattr(description, name)
        _require(math.isfinite(value) and value > 0, where, f"{name} is {value!r}, it must be a positive number")
    heads, kv_heads, head_dim = description.num_heads, description.num_kv_heads, description.head_dim
    _require(heads % kv_heads == 0, where, f"{heads} heads cannot share {kv_heads} key/value heads evenly")
    _require(head_dim % 2 == 0, where, f"head_dim is {head_dim}, RoPE rotates halves: it must be even")
    for token in description.eos_token_ids:
        fits = type(token) is int and 0 <= token < description.vocab_size
        _require(fits, where, f"EOS token {token!r} is no token of a vocabulary of {description.vocab_size}")
    return description


def _require(holds: bool, where: Path, problem: str) -> None:
    if not holds:
        raise UserError(f"{where}: {problem}; correct it, or get the checkpoint again")
