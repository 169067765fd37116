"""Reading folders in Hugging Face layout: ``config.json``, safetensors (one file or indexed shards), tokenizer files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.description import ModelDescription
from tiercel.models.tokenizer import tokenizer_from_folder

FAMILIES = {"llama": False, "qwen2": True}
"""Supported ``model_type`` values, and whether q, k and v have a bias."""


def open_hf_folder(folder: Path) -> Checkpoint:
    """Open a folder.

    Raises:
        UserError: a file is missing or unreadable, or the model needs what is not supported.
    """
    config = read_json(folder / "config.json")
    description = _description(folder, config)
    files = _weight_files(folder)
    return Checkpoint(folder, description, lambda: _tensors(files, description), lambda: tokenizer_from_folder(folder))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        UserError: missing, unreadable, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _description(folder: Path, config: dict[str, Any]) -> ModelDescription:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{folder}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{folder}: RoPE scaling {kind!r} is not supported")
    if config.get("use_sliding_window") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder}: sliding windows, MLP biases and activations other than silu are not supported")
    if config.get("attention_bias"):
        raise UserError(f"{folder}: attention_bias is not supported for model_type {family!r}")
    try:
        heads = config["num_attention_heads"]
        return ModelDescription(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            rms_norm_eps=config["rms_norm_eps"],
            max_position=config["max_position_embeddings"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            eos_token_ids=_eos_token_ids(folder, config),
            attention_bias=FAMILIES[family],
        )
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} lacks {error}") from error


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map", {}) if index.is_file() else {"": "model.safetensors"}
    names = sorted(set(shards.values()))
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"model folder {folder} lacks {name}: get the checkpoint again (only safetensors are read)")
    return [folder / name for name in names]


def _tensors(files: list[Path], description: ModelDescription) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                    if name == "lm_head.weight" and description.tie_word_embeddings:
                        continue  # some exporters store the tied head a second time
                    yield name.removeprefix("model."), file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {path}: {error}; it may be cut short, get it again") from error
