"""What a checkpoint holds and what would become of it, from headers alone: no weight is read."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercel.core.errors import UserError
from tiercel.models.decoder import Decoder
from tiercel.models.description import ModelDescription
from tiercel.models.gguf_checkpoint import published_name, read_gguf_header
from tiercel.models.hf_checkpoint import read_json, weight_files
from tiercel.models.loading import published_tensors
from tiercel.models.mtp import MtpLayer
from tiercel.models.mtp_checkpoint import FORMAT, read_description
from tiercel.models.opening import open_checkpoint

DECLARED_DEPTHS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
WINDOWS = ("sliding_window", "sliding_window_size")


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names under which a family publishes its MTP layers.

    Args:
        family: who publishes so.
        pattern: of a tensor's name without ``model.``; its group is the layer, counted from 0.
        embedding_first: the projection reads ``[embedding; hidden]`` (True) or the reverse.
        chained: layer i > 0 reads layer i-1's output; None: published implementations differ, or there is one layer.
    """

    family: str
    pattern: re.Pattern[str]
    embedding_first: bool
    chained: bool | None


def mtp_layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """The layouts known; in DeepSeek's, MTP layers are numbered on from the target's ``num_layers``."""
    return (
        MtpLayout("MiMo-7B", re.compile(r"mtp_layers\.(\d+)\."), False, None),
        MtpLayout("MiMo-V2", re.compile(r"mtp\.layers\.(\d+)\.(?=enorm|hnorm|eh_proj)"), True, None),
        MtpLayout("Qwen3-Next", re.compile(r"mtp\.(?:layers\.(\d+)|fc|norm|pre_fc_norm_\w+)\."), True, None),
        MtpLayout("llama.cpp", re.compile(r"blk\.(\d+)\.nextn\."), True, None),
        MtpLayout("DeepSeek-V3", re.compile(rf"layers\.({_from(num_layers)})\."), True, None),
    )


def _from(first: int) -> str:
    """An expression for the numbers ``first`` to ``first + 15``."""
    return "|".join(str(first + i) for i in range(16))


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor as a file announces it."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MtpFound:
    """MTP layers in a checkpoint. None stands for what the checkpoint does not say.

    Args:
        layout: whose names they have.
        num_layers: layers really held.
        declared: layers that the config promises.
        chained: layer i > 0 reads layer i-1's output, or again the target's hidden state.
        embedding_first: the projection reads ``[embedding; hidden]``, or the reverse.
        hidden_before_final_norm: where the target's hidden state is taken.
        holds_head: head rows of their own are stored; else they use the target's.
        holds_embedding: likewise an embedding.
        num_bytes: in the files.
    """

    layout: str
    num_layers: int
    declared: int | None
    chained: bool | None
    embedding_first: bool | None
    hidden_before_final_norm: bool | None
    holds_head: bool
    holds_embedding: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that go the same way: how many, their bytes in the files, and where they are loaded."""

    name: str
    goes_to: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What ``tiercel inspect`` says. Sizes are bytes.

    Args:
        path: what was looked at.
        kind: ``model folder``, ``GGUF file``, ``MTP draft`` or ``EAGLE head``.
        family: ``model_type`` or architecture.
        num_layers: decoder layers that the config promises.
        window: sliding window in tokens.
        mtp: its MTP layers.
        parts: tensors by where they go.
        num_parameters: of what would be loaded.
        memory: of what would be loaded, by how it is held: ``file`` (as stored), ``bfloat16``, ``float32``.
        kv_bytes_per_token: of a float16 KV cache; None where the model is not supported.
        unused: names of tensors that nothing here reads.
        missing: names of tensors that it lacks.
        refusal: why it would be refused, in the words of the first thing wrong; None: it runs.
    """

    path: str
    kind: str
    family: str
    num_layers: int | None
    window: int | None
    mtp: MtpFound | None
    parts: tuple[Part, ...]
    num_parameters: int
    memory: dict[str, int]
    kv_bytes_per_token: int | None
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    refusal: str | None


def inspect_checkpoint(path: Path) -> Inspection:
    """Look at a model folder, a GGUF file, or a draft folder.

    Raises:
        UserError: nothing there, or its headers cannot be read.
    """
    if path.is_dir() and (path / "config.json").is_file():
        config = read_json(path / "config.json")
        headers = _folder_headers(path)
        if config.get("format") == FORMAT:
            return _inspect_draft(path, headers)
        return _inspect_model(path, "model folder", config, headers)
    inside = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(inside) != 1 or inside[0].suffix != ".gguf" or not inside[0].is_file():
        raise UserError(f"{path} is no checkpoint: give a folder with config.json, a draft folder, or a .gguf file")
    return _inspect_gguf(inside[0])


def read_safetensors_header(path: Path) -> dict[str, Header]:
    """Every tensor that a safetensors file announces, by name.

    Raises:
        UserError: it cannot be read, or is shorter or longer than it announces.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise UserError(f"{path} is no safetensors file, or cut short: get it again")
            announced = json.loads(file.read(length))
        announced.pop("__metadata__", None)
        found = {}
        for name, one in announced.items():
            begin, end = one["data_offsets"]
            found[name] = Header(one["dtype"], tuple(one["shape"]), end - begin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read the header of {path} ({error}): get it again") from error
    if 8 + length + sum(header.num_bytes for header in found.values()) != size:
        raise UserError(f"{path} is not as long as its header says: get it again")
    return found


def _folder_headers(folder: Path) -> dict[str, Header]:
    found: dict[str, Header] = {}
    for file in weight_files(folder):
        for name, header in read_safetensors_header(file).items():
            if name in found:
                raise UserError(f"{file}: tensor {name!r} is given twice; the checkpoint does not fit its index")
            found[name] = header
    return found


def _inspect_gguf(path: Path) -> Inspection:
    reader = read_gguf_header(path)
    headers = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        try:
            name = published_name(path, tensor.name)
        except UserError:
            name = tensor.name
        headers[name] = Header(tensor.tensor_type.name, shape, int(tensor.n_bytes))
    architecture = reader.get_field("general.architecture")
    family = str(architecture.contents()) if architecture else "unknown"
    blocks = reader.get_field(f"{family}.block_count")
    config: dict[str, Any] = {"model_type": family, "num_hidden_layers": blocks.contents() if blocks else None}
    if depth := reader.get_field(f"{family}.nextn_predict_layers"):
        config["num_nextn_predict_layers"] = depth.contents()
    return _inspect_model(path, "GGUF file", config, headers)


def _inspect_model(path: Path, kind: str, config: Mapping[str, Any], headers: dict[str, Header]) -> Inspection:
    headers = {name.removeprefix("model."): header for name, header in headers.items()}
    named = f"{config.get('speculators_model_type')} {config.get('architectures')}".lower()
    if "eagle" in named:
        return _finish(path, "EAGLE head", config, headers, expected=None)
    description, refusal = None, None
    try:
        description = open_checkpoint(path).description
    except UserError as error:
        refusal = str(error)
    expected = None if description is None else _shapes_of(description)
    return _finish(path, kind, config, headers, expected, description, refusal)


def _shapes_of(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in published_tensors(Decoder(description)).items()}


def _finish(
    path: Path,
    kind: str,
    config: Mapping[str, Any],
    headers: dict[str, Header],
    expected: Mapping[str, tuple[int, ...]] | None,
    description: ModelDescription | None = None,
    refusal: str | None = None,
) -> Inspection:
    depth = config.get("num_hidden_layers")
    num_layers = depth if type(depth) is int else None
    mtp, theirs = _find_mtp(config, headers, num_layers) if kind != "EAGLE head" else (None, set[str]())
    tied = {"lm_head.weight"} & headers.keys() if description and description.tie_word_embeddings else set()
    # Where no description says what is read, everything beside MTP layers counts as the model's.
    wanted = headers.keys() - theirs if expected is None else expected.keys() & headers.keys()
    unused = sorted(headers.keys() - wanted - tied)
    missing = sorted(expected.keys() - headers.keys()) if expected is not None else []
    if refusal is None and expected is not None:
        refusal = _first_problem(headers, expected, unused, missing)
    is_head = kind == "EAGLE head"
    parts = (
        _part("head" if is_head else "target", "draft" if is_head else "target", headers, wanted),
        _part("copy of the tied head", "nowhere", headers, tied),
        _part("MTP layers", "nowhere: not read from a target's own checkpoint", headers, theirs - wanted),
        _part("others", "nowhere", headers, set(unused) - theirs),
    )
    size = sum(math.prod(headers[name].shape) for name in wanted)
    stored = sum(headers[name].num_bytes for name in wanted)
    window = next((config[name] for name in WINDOWS if type(config.get(name)) is int), None)
    return Inspection(
        path=str(path),
        kind=kind,
        family=str(config.get("model_type") or config.get("speculators_model_type")),
        num_layers=num_layers,
        window=window if config.get("use_sliding_window", True) else None,
        mtp=mtp,
        parts=tuple(part for part in parts if part.num_tensors),
        num_parameters=size,
        memory={"file": stored, "bfloat16": 2 * size, "float32": 4 * size},
        kv_bytes_per_token=None if description is None else _kv_bytes(description, description.num_layers),
        unused=tuple(unused),
        missing=tuple(missing),
        refusal=refusal,
    )


def _first_problem(
    headers: Mapping[str, Header], expected: Mapping[str, tuple[int, ...]], unused: list[str], missing: list[str]
) -> str | None:
    """What the loader would refuse."""
    for name in expected.keys() & headers.keys():
        if headers[name].shape != expected[name]:
            return f"tensor {name!r} is {list(headers[name].shape)}, its config asks for {list(expected[name])}"
    if missing:
        return f"{len(missing)} tensors are missing, {missing[0]!r} among them"
    if unused:
        return f"{len(unused)} tensors are unknown, {unused[0]!r} among them"
    return None


def _find_mtp(
    config: Mapping[str, Any], headers: Mapping[str, Header], num_layers: int | None
) -> tuple[MtpFound | None, set[str]]:
    """The MTP layers among ``headers``, and the names of their tensors."""
    declared = next((config[name] for name in DECLARED_DEPTHS if type(config.get(name)) is int), None)
    for layout in mtp_layouts(num_layers if num_layers is not None else len(headers)):
        matches = {name: match for name in headers if (match := layout.pattern.match(name))}
        if not matches:
            continue
        layers = {match.group(1) for match in matches.values() if match.group(1) is not None}
        prefix = "mtp_layers." if layout.family == "MiMo-7B" else "mtp."
        names = {n for n in headers if n in matches or n.startswith(prefix)}
        found = MtpFound(
            layout.family,
            len(layers),
            declared,
            layout.chained,
            layout.embedding_first,
            None,
            holds_head=any("shared_head.head" in n or "shared_head.output" in n or "lm_head" in n for n in names),
            holds_embedding=any("embed_tokens" in n for n in names),
            num_bytes=sum(headers[n].num_bytes for n in names),
        )
        return found, names
    if declared:
        nothing = MtpFound(
            "none found", 0, declared, None, None, None, holds_head=False, holds_embedding=False, num_bytes=0
        )
        return nothing, set()
    return None, set()


def _inspect_draft(folder: Path, headers: dict[str, Header]) -> Inspection:
    description = read_description(folder)
    with torch.device("meta"):
        layer = {name: tuple(t.shape) for name, t in published_tensors(MtpLayer(description)).items()}
    expected = {
        f"model.mtp.layers.{i}.{name.removeprefix('body.')}": shape
        for i in range(description.num_layers)
        for name, shape in layer.items()
    }
    is_cut = description.draft_vocab_size != description.body.vocab_size
    if is_cut or "d2t" in headers:
        expected["d2t"] = (description.draft_vocab_size,)
    unused, missing = sorted(headers.keys() - expected.keys()), sorted(expected.keys() - headers.keys())
    wanted = expected.keys() & headers.keys()
    size = sum(math.prod(headers[name].shape) for name in wanted - {"d2t"})
    stored = sum(headers[name].num_bytes for name in wanted)
    return Inspection(
        path=str(folder),
        kind="MTP draft",
        family=description.body.family,
        num_layers=None,
        window=None,
        mtp=MtpFound(
            FORMAT,
            len({name.split(".")[3] for name in headers if name.startswith("model.mtp.layers.")}),
            description.num_layers,
            description.chained,
            description.embedding_first,
            description.hidden_before_final_norm,
            holds_head=False,
            holds_embedding=False,
            num_bytes=stored,
        ),
        parts=(_part("MTP layers", "draft", headers, wanted),),
        num_parameters=size,
        memory={"file": stored, "bfloat16": 2 * size, "float32": 4 * size},
        kv_bytes_per_token=_kv_bytes(description.body, description.num_layers),
        unused=tuple(unused),
        missing=tuple(missing),
        refusal=_first_problem(headers, expected, unused, missing),
    )


def _kv_bytes(description: ModelDescription, num_layers: int) -> int:
    return num_layers * 2 * description.num_kv_heads * description.head_dim * torch.float16.itemsize


def _part(name: str, goes_to: str, headers: Mapping[str, Header], names: set[str]) -> Part:
    return Part(name, goes_to, len(names), sum(headers[one].num_bytes for one in names))
