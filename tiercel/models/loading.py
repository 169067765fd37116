"""Copy named checkpoint tensors into modules: every parameter exactly once, every tensor used or named."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.decoder import Decoder, empty_decoder
from tiercel.native.matrix import Blocks

Weight = TypeVar("Weight", Tensor, Tensor | Blocks)

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Our fused projections and the published parts they hold, in row order."""


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the target of ``checkpoint`` in ``dtype`` on ``device``.

    Raises:
        UserError: a tensor is missing, unknown, of the wrong shape, or holds NaN or infinity.
    """
    decoder = empty_decoder(checkpoint.description, dtype, device)
    fill(decoder, checkpoint.tensors(), str(checkpoint.path))
    return decoder


def fill(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Copy ``tensors`` (published names) into the parameters of ``module``; values are cast to each parameter's dtype.

    Raises:
        UserError: see ``matched``.
    """
    targets = published_tensors(module)
    for name, tensor in matched(tensors, {name: tuple(t.shape) for name, t in targets.items()}, where):
        targets[name].copy_(tensor)


def matched(
    weights: Iterable[tuple[str, Weight]], expected: Mapping[str, tuple[int, ...]], where: str
) -> Iterator[tuple[str, Weight]]:
    """Pass ``weights`` on, once it is sure that each is expected, comes once, and has its shape, and that none is missing.

    Raises:
        UserError: naming the tensor and ``where`` it came from; also where a value is NaN or infinite.
    """
    missing = dict(expected)
    for name, weight in weights:
        shape = missing.pop(name, None)
        if shape is None:
            raise UserError(
                f"{where}: tensor {name!r} is unknown or given twice; the checkpoint does not fit its config"
            )
        if shape != tuple(weight.shape):
            raise UserError(f"{where}: tensor {name!r} is {list(weight.shape)}, its config asks for {list(shape)}")
        if not (weight.is_finite() if isinstance(weight, Blocks) else bool(torch.isfinite(weight).all())):
            raise UserError(f"{where}: tensor {name!r} holds NaN or infinity; get the checkpoint again")
        yield name, weight
    if missing:
        raise UserError(f"{where}: {len(missing)} tensors are missing, {next(iter(missing))!r} among them")


def published_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter under its published names (fused projections cut into their parts); views, not copies."""
    sizes = dict(module.named_modules())
    targets: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():  # a tied head is listed once, as the embedding
        owner, _, kind = name.rpartition(".")
        fused = next((key for key in FUSED if owner.endswith(key)), None)
        if fused is None:
            targets[name] = parameter.data
            continue
        parent = owner.removesuffix(fused)
        rows = _part_rows(sizes[owner.rpartition(".")[0]], fused, parameter.shape[0])
        for part, piece in zip(FUSED[fused], torch.split(parameter.data, rows), strict=True):
            targets[f"{parent}{part}.{kind}"] = piece
    return targets


def _part_rows(owner: nn.Module, fused: str, total: int) -> list[int]:
    if fused == "mlp.gate_up_proj":
        return [total // 2, total // 2]
    heads, kv_heads, head_dim = int(owner.num_heads), int(owner.num_kv_heads), int(owner.head_dim)  # type: ignore[arg-type]
    return [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
