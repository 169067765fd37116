"""Reading folders in Hugging Face layout: ``config.json``, safetensors (one file or indexed shards), tokenizer files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint, check_description
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
    description = describe(folder, config)
    files = weight_files(folder)
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


def describe(folder: Path, config: dict[str, Any]) -> ModelDescription:
    """The decoder that ``config``, found in ``folder``, describes.

    Raises:
        UserError: it lacks a setting, or needs what is not supported.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"{folder}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise UserError(f"{folder}: quantised weights are not supported in this layout; take a .gguf file instead")
    rope_theta = _rope_theta(folder, config)
    if config.get("use_sliding_window") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder}: sliding windows, MLP biases and activations other than silu are not supported")
    if config.get("attention_bias"):
        raise UserError(f"{folder}: attention_bias is not supported for model_type {family!r}")
    try:
        heads = config["num_attention_heads"]
        description = ModelDescription(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=rope_theta,
            rms_norm_eps=float(config["rms_norm_eps"]),
            max_position=config["max_position_embeddings"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            eos_token_ids=_eos_token_ids(folder, config),
            attention_bias=FAMILIES[family],
        )
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} lacks {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{folder / 'config.json'} holds a value that cannot be ({error}); correct it") from error
    return check_description(description, folder / "config.json")


def _rope_theta(folder: Path, config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{folder / 'config.json'}: the RoPE parameters are {rope!r}, they must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{folder}: RoPE scaling {kind!r} is not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{folder}: RoPE over a part of each head is not supported")
    theta = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float):
        raise UserError(f"{folder / 'config.json'}: rope_theta is {theta!r}, it must be a number")
    return float(theta)


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model in ``folder``.

    Raises:
        UserError: one is missing, or the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map") if index.is_file() else {"": "model.safetensors"}
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: weight_map must map tensor names to file names; get the checkpoint again")
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
