"""Draft checkpoints: a folder with ``config.json`` and ``model.safetensors``.

Tensors follow MiMo-V2's published names (``model.mtp.layers.{i}.enorm.weight`` …, the decoder layer's parts unprefixed);
``d2t`` (int64 offsets) follows EAGLE-3's. Embedding and head are the target's and are not stored.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.decoder import Decoder
from tiercel.models.description import ModelDescription, MtpDescription
from tiercel.models.loading import fill, published_tensors
from tiercel.models.mtp import MtpDraft
from tiercel.models.native_step import NativeChain, NativeTarget, native_mtp_layers
from tiercel.models.step import DraftModel, EagerTarget, Target, eager_draft

FORMAT = "tiercel-mtp-1"
PREFIX = "model.mtp."
SHIPPED = {"smollm2-135m-mtp3": Path(__file__).parent / "shipped" / "smollm2-135m-mtp3"}


def save_draft(draft: MtpDraft, folder: Path, provenance: dict[str, Any]) -> None:
    """Write ``draft`` in bfloat16 to ``folder``; each file appears whole or not at all.

    Args:
        draft: the layers to keep.
        folder: made if missing.
        provenance: how the draft came about (training settings, data, acceptance); stored under ``provenance``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_published(name): t.to(torch.bfloat16).contiguous().clone() for name, t in _tensors(draft.layers)}
    tensors["d2t"] = draft.d2t
    config = {"format": FORMAT, **asdict(draft.description), "provenance": provenance}
    (folder / "model.safetensors.part").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json.part").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        os.replace(folder / f"{name}.part", folder / name)


def read_description(folder: Path) -> MtpDescription:
    """The description in ``folder/config.json``.

    Raises:
        UserError: no such folder, or not a draft of this format.
    """
    config = _read_config(folder)
    try:
        body = dict(config["body"], eos_token_ids=tuple(config["body"]["eos_token_ids"]))
        fields = {name: config[name] for name in MtpDescription.__dataclass_fields__ if name != "body"}
        return MtpDescription(body=ModelDescription(**body), **fields)
    except (KeyError, TypeError) as error:
        raise UserError(f"draft {folder}: config.json lacks or misnames a setting ({error})") from error


def read_provenance(folder: Path) -> dict[str, Any]:
    """How the draft in ``folder`` came about, as ``save_draft`` was told.

    Raises:
        UserError: no such folder, or not a draft of this format.
    """
    found: dict[str, Any] = _read_config(folder).get("provenance", {})
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"draft {folder}: cannot read {path.name} ({error}); give a folder made by `tiercel train`"
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(
            f"draft {folder}: config.json does not say format {FORMAT!r}; give a folder made by `tiercel train`"
        )
    return config


def resolve_draft(name: str, target: Checkpoint) -> Path:
    """Folder of the draft called ``name``; ``auto`` is the shipped draft that was trained for ``target``.

    Raises:
        UserError: no such draft, or ``auto`` finds none.
    """
    if name == "auto":
        for folder in SHIPPED.values():
            if read_description(folder).target_fingerprint == target.fingerprint:
                return folder
        raise UserError(
            f"no draft is known for {target.path}: no shipped one ({', '.join(SHIPPED)}) was trained for it, and MTP layers "
            "inside a target's own checkpoint are not read yet; give a draft folder (`tiercel train` makes one) or --spec none"
        )
    if name in SHIPPED:
        return SHIPPED[name]
    if not Path(name).is_dir():
        raise UserError(
            f"draft {name!r} is no folder and no shipped draft: choose auto, {', '.join(SHIPPED)}, or a folder"
        )
    return Path(name)


def load_draft(folder: Path, target: Checkpoint, decoder: Decoder) -> MtpDraft:
    """Load the draft in ``folder`` beside its target, in the target's dtype and on its device.

    Raises:
        UserError: the draft does not fit the target, or a tensor is missing, unknown, misshapen or not finite.
    """
    description, d2t, tensors = _read(folder, target)
    weight = decoder.embed_tokens.weight
    with torch.device("meta"):
        draft = MtpDraft(description, d2t)
    draft = draft.to(weight.dtype).to_empty(device=weight.device)
    draft.d2t = d2t.to(weight.device)
    fill(draft.layers, tensors.items(), f"draft {folder}")
    draft.share(decoder)
    return draft.requires_grad_(False).eval()


def load_draft_model(folder: Path, checkpoint: Checkpoint, target: Target) -> DraftModel:
    """Load the draft in ``folder`` to run beside ``target``, the same way: as modules, or as recorded steps.

    Raises:
        UserError: see ``load_draft``.
    """
    if isinstance(target, EagerTarget):
        return eager_draft(load_draft(folder, checkpoint, target.decoder))
    assert isinstance(target, NativeTarget)
    description, d2t, tensors = _read(folder, checkpoint)
    target_ids = d2t + torch.arange(len(d2t))
    layers = native_mtp_layers(description, tensors.items(), target_ids, target, f"draft {folder}")
    chain = NativeChain(layers, description.chained, target_ids)
    return DraftModel(description, list(layers), target_ids, chain)


def _read(folder: Path, target: Checkpoint) -> tuple[MtpDescription, Tensor, dict[str, Tensor]]:
    description = read_description(folder)
    check_fit(description, target, folder)
    tensors = dict(_read_tensors(folder))
    d2t = checked_d2t(tensors.pop("d2t", None), description.draft_vocab_size, target.description.vocab_size, folder)
    return description, d2t, {_ours(name): tensor for name, tensor in tensors.items()}


def check_fit(description: MtpDescription, target: Checkpoint, folder: Path) -> None:
    """Refuse a draft that was not made for ``target``.

    Raises:
        UserError: hidden size, vocabulary or tokenizer differ, or it wants hidden states that we do not hand out.
    """
    ours = target.description
    if not description.hidden_before_final_norm:
        raise UserError(f"draft {folder} reads hidden states after the target's final norm, which is not supported yet")
    for what, have, need in (
        ("target hidden size", description.target_hidden_size, ours.hidden_size),
        ("embedding width", description.body.hidden_size, ours.hidden_size),
        ("vocabulary", description.body.vocab_size, ours.vocab_size),
    ):
        if have != need:
            raise UserError(f"draft {folder} does not fit {target.path}: its {what} is {have}, the target's is {need}")
    if description.target_fingerprint and description.target_fingerprint != target.fingerprint:
        raise UserError(
            f"draft {folder} does not fit {target.path}: it was trained for another model or tokenizer "
            f"(fingerprint {description.target_fingerprint}, the target's is {target.fingerprint})"
        )


def checked_d2t(d2t: Tensor | None, size: int, vocab_size: int, folder: Path) -> Tensor:
    """Offsets of a draft vocabulary of ``size`` tokens into the target's, zeros where the two are one.

    Raises:
        UserError: they are missing, or no such table.
    """
    if d2t is None:
        if size != vocab_size:
            raise UserError(
                f"draft {folder}: its vocabulary is {size} of {vocab_size} tokens, but it holds no d2t table"
            )
        return torch.zeros(size, dtype=torch.int64)
    ids = d2t + torch.arange(len(d2t))
    if d2t.dtype != torch.int64 or len(d2t) != size or not bool((ids[1:] > ids[:-1]).all()):
        raise UserError(f"draft {folder}: d2t must be {size} int64 offsets to ascending target ids")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise UserError(f"draft {folder}: d2t points outside the target's vocabulary of {vocab_size}")
    return d2t


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"draft {folder}: cannot read model.safetensors ({error})") from error


def _tensors(layers: nn.ModuleList) -> Iterator[tuple[str, Tensor]]:
    # Layer by layer: while training, several entries may be one shared module, which a walk over the list names once.
    for index, layer in enumerate(layers):
        for name, tensor in published_tensors(layer).items():
            yield f"{index}.{name}", tensor


def _published(name: str) -> str:
    return PREFIX + "layers." + name.replace(".body.", ".")


def _ours(name: str) -> str:
    index, _, part = name.removeprefix(PREFIX + "layers.").partition(".")
    own = part.startswith(("enorm.", "hnorm.", "eh_proj.", "final_layernorm."))
    return f"{index}.{part}" if own or not name.startswith(PREFIX) else f"{index}.body.{part}"
