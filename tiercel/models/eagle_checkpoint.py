"""EAGLE heads as they are published, and which layer a draft's name stands for.

A draft folder of ours (``models.mtp_checkpoint``) gives its first MTP layer to EAGLE, which drafts on from its own output, as
servers do with models that ship one MTP layer. Published heads are a flat Llama config with ``layers.0``/``midlayer`` tensors
(SafeAILab, SGLang's SpecForge), or vLLM's speculators, whose config nests the layer's. Where EAGLE-3's hidden states are taken:

- ``aux_hidden_state_convention`` ``"before"`` or ``"after"`` in the config says what an id means: the input of that layer
  (id layers have run) or its output (id + 1 have). Without it
- ``eagle_aux_hidden_state_layer_ids`` at the top level are inputs, as vLLM reads them,
- inside ``eagle_config`` they are outputs, as SGLang reads them,
- and where there are none the inputs of layers 2, n // 2 and n - 3 of n are taken, as EAGLE-3 was trained.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.eagle import EagerEagle, EagleDescription, EagleHead, EagleModel, target_parts
from tiercel.models.hf_checkpoint import describe, read_json
from tiercel.models.hub import HUB_NAME, resolve_model
from tiercel.models.loading import fill
from tiercel.models.mtp_checkpoint import (
    FORMAT,
    check_fit,
    checked_d2t,
    load_draft_model,
    read_description,
    resolve_draft,
)
from tiercel.models.step import EagerTarget, Target

IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "aux_hidden_state_convention"
REFUSED = ("layernorms", "fc_norm", "norm_before_fc", "parallel_drafting")
"""Variants of the layer whose settings change what it computes."""
RENAMED = (("midlayer.", "layer."), ("layers.0.", "layer."), ("transformer.", "layer."), ("fusion_fc.", "fc."))


def resolve_eagle(name: str, checkpoint: Checkpoint, method: str) -> Path:
    """Folder of the draft called ``name``.

    Raises:
        UserError: no such draft, or none is known for the target.
    """
    if HUB_NAME.fullmatch(name):
        return resolve_model(name)
    if name == "auto" and method == "eagle3":
        raise UserError("method 'eagle3' needs a head that was trained for the target: name its folder (--draft)")
    return resolve_draft(name, checkpoint)


def check_eagle(folder: Path, checkpoint: Checkpoint, method: str) -> None:
    """Refuse a draft that cannot work with the target, before its weights are read.

    Raises:
        UserError: says what does not fit.
    """
    if _is_ours(folder, method):
        check_fit(read_description(folder), checkpoint, folder)
    else:
        _described(folder, checkpoint, method, set())


def load_eagle(folder: Path, checkpoint: Checkpoint, target: Target, method: str) -> EagleModel:
    """The EAGLE layer in ``folder``, to run beside ``target``: an MTP layer as the target runs, a published head as modules.

    Raises:
        UserError: it does not fit, or a tensor is missing, unknown, misshapen or not finite.
    """
    if _is_ours(folder, method):
        draft = load_draft_model(folder, checkpoint, target)
        body = replace(draft.description.body, num_layers=1)
        return EagleModel(draft.layers[0], body, draft.target_ids, prepare=lambda hidden: hidden)
    tensors = {_ours(name): tensor for name, tensor in _read_tensors(folder)}
    tensors.pop("t2d", None)  # what d2t says already
    description = _described(folder, checkpoint, method, set(tensors))
    d2t = checked_d2t(tensors.pop("d2t", None), description.draft_vocab_size, description.body.vocab_size, folder)
    weight = target.decoder.norm.weight if isinstance(target, EagerTarget) else torch.empty(0)
    with torch.device("meta"):
        head = EagleHead(description)
    head = head.to(weight.dtype).to_empty(device=weight.device)
    fill(head, tensors.items(), f"draft {folder}")
    head.requires_grad_(False).eval().share(target_parts(target))
    eager = EagerEagle(head)
    target_ids = (d2t + torch.arange(len(d2t))).to(weight.device)
    return EagleModel(eager, description.body, target_ids, eager.prepare, description.taps)


def _is_ours(folder: Path, method: str) -> bool:
    if read_json(folder / "config.json").get("format") != FORMAT:
        return False
    if method == "eagle3":
        raise UserError(
            f"draft {folder} holds MTP layers, not an EAGLE-3 head: choose --spec multi-layer-eagle or eagle"
        )
    return True


def _described(folder: Path, target: Checkpoint, method: str, names: set[str]) -> EagleDescription:
    config = read_json(folder / "config.json")
    layer = config.get("transformer_layer_config", config)
    named = (config.get("speculators_model_type"), *(config.get("architectures") or ()))
    is_eagle3 = "draft_vocab_size" in config or any("eagle3" in str(name).lower() for name in named)
    if is_eagle3 != (method == "eagle3"):
        kind = "an EAGLE-3" if is_eagle3 else "an EAGLE"
        raise UserError(f"draft {folder} is {kind} head: choose --spec {'eagle3' if is_eagle3 else 'eagle'}")
    for name in REFUSED:
        if config.get(name):
            raise UserError(f"draft {folder}: {name}={config[name]} is not supported")
    body = describe(folder, layer)
    if body.num_layers != 1:
        raise UserError(f"draft {folder} has {body.num_layers} layers; EAGLE heads of one layer are supported")
    found = EagleDescription(
        is_eagle3,
        body,
        target_hidden_size=config.get("target_hidden_size") or body.hidden_size,
        draft_vocab_size=config.get("draft_vocab_size") or body.vocab_size,
        taps=_taps(folder, config, target.description.num_layers) if is_eagle3 else (),
        fc_bias="fc.bias" in names,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        owns_embedding="embed_tokens.weight" in names,
        owns_head="lm_head.weight" in names,
    )
    _check(found, folder, target, names)
    return found


def _taps(folder: Path, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UserError(
            f"draft {folder}: EAGLE-3 heads that read one hidden state (use_aux_hidden_state) are not supported"
        )
    ids, usual = (nested[IDS], "after") if nested.get(IDS) else (config.get(IDS), "before")
    convention = config.get(CONVENTION, usual)
    if convention not in ("before", "after"):
        raise UserError(f"draft {folder}: {CONVENTION} is {convention!r}: it must be 'before' or 'after'")
    if ids:
        taps = tuple(i + (convention == "after") for i in ids)
    else:
        taps = (2, num_layers // 2, num_layers - 3)
        if not taps[0] < taps[1] < taps[2]:
            raise UserError(
                f"draft {folder} does not say which hidden states it reads, and a target of {num_layers} layers is too shallow "
                f"for the usual ones: give {IDS} in its config.json"
            )
    if not all(type(tap) is int and 0 <= tap <= num_layers for tap in taps):
        raise UserError(f"draft {folder}: it reads hidden states after {taps} layers, the target has {num_layers}")
    return taps


def _check(found: EagleDescription, folder: Path, target: Checkpoint, names: set[str]) -> None:
    ours = target.description
    pairs = [("target hidden size", found.target_hidden_size, ours.hidden_size)]
    pairs += [("vocabulary", found.body.vocab_size, ours.vocab_size)]
    if (names and not found.owns_embedding) or not found.is_eagle3:
        pairs += [("embedding width", found.body.hidden_size, ours.hidden_size)]
    for what, have, need in pairs:
        if have != need:
            raise UserError(f"draft {folder} does not fit {target.path}: its {what} is {have}, the target's is {need}")


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    path = folder / "model.safetensors"
    pickled = folder / "pytorch_model.bin"
    try:
        if not path.exists() and pickled.exists():
            yield from torch.load(pickled, map_location="cpu", weights_only=True, mmap=True).items()
            return
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                yield name, file.get_tensor(name)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"draft {folder}: cannot read model.safetensors or pytorch_model.bin ({error})") from error
