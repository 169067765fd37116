"""``inspect_checkpoint`` against what the loader does, and without reading what it cannot read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_checkpoints import write_gguf
from tiercel.core.errors import UserError
from tiercel.models.inspection import inspect_checkpoint, read_safetensors_header
from tiercel.models.loading import load_decoder
from tiercel.models.opening import open_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def copy(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "copy"))


def configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def add(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.ones(2, 3) for name in names}, folder / "model.safetensors")


def test_a_model_that_runs(toy_model: Path) -> None:
    found = inspect_checkpoint(toy_model)
    decoder = load_decoder(open_checkpoint(toy_model), torch.float32, CPU)
    assert found.num_parameters == sum(p.numel() for p in decoder.parameters())
    assert found.memory["float32"] == found.memory["file"] == 4 * found.num_parameters
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert (found.family, found.num_layers, found.mtp, found.refusal) == ("llama", 2, None, None)
    assert (found.unused, found.missing) == ((), ())


def test_a_gguf_file(toy_model: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", toy_model, "Q8_0")
    found = inspect_checkpoint(tmp_path / "toy.gguf")
    assert found.refusal is None
    assert found.num_parameters == inspect_checkpoint(toy_model).num_parameters
    assert found.memory["file"] < found.memory["bfloat16"]


def test_a_draft(toy_draft: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(toy_draft)
    assert found.kind == "MTP draft"
    assert found.refusal is None
    assert found.mtp is not None
    assert (found.mtp.num_layers, found.mtp.chained, found.mtp.embedding_first) == (3, True, True)
    folder = Path(shutil.copytree(toy_draft, tmp_path / "less"))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.mtp.layers.1.enorm.weight")
    save_file(tensors, folder / "model.safetensors")
    assert inspect_checkpoint(folder).missing == ("model.mtp.layers.1.enorm.weight",)


@pytest.mark.parametrize("damage", ["missing", "unknown", "misshapen", "none"])
def test_its_verdict_is_the_loaders(copy: Path, damage: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    if damage == "missing":
        tensors.pop("model.norm.weight")
    elif damage == "unknown":
        tensors["stray.weight"] = torch.ones(1)
    elif damage == "misshapen":
        tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, copy / "model.safetensors")
    found = inspect_checkpoint(copy)
    if damage == "none":
        assert found.refusal is None
        load_decoder(open_checkpoint(copy), torch.float32, CPU)
        return
    with pytest.raises(UserError, match="stray" if damage == "unknown" else r"norm\.weight"):
        load_decoder(open_checkpoint(copy), torch.float32, CPU)
    assert found.refusal is not None
    assert ("stray" if damage == "unknown" else "norm.weight") in found.refusal


def test_a_model_that_is_not_supported_says_why(copy: Path) -> None:
    configure(copy, model_type="mamba")
    found = inspect_checkpoint(copy)
    assert found.refusal is not None
    assert "mamba" in found.refusal
    assert found.num_parameters > 0
    assert found.kv_bytes_per_token is None


LAYOUTS: Mapping[str, tuple[list[str], bool, bool]] = {
    "MiMo-7B": (["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"], False, False),
    "MiMo-V2": (["model.mtp.layers.0.enorm.weight", "model.mtp.layers.0.mlp.up_proj.weight"], True, False),
    "Qwen3-Next": (["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"], True, False),
    "DeepSeek-V3": (["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.head.weight"], True, True),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_mtp_layers_as_they_are_published(copy: Path, family: str) -> None:
    names, embedding_first, holds_head = LAYOUTS[family]
    add(copy, *names)
    configure(copy, num_nextn_predict_layers=3)
    found = inspect_checkpoint(copy)
    assert found.mtp is not None
    assert (found.mtp.layout, found.mtp.num_layers, found.mtp.declared) == (family, 1, 3)
    assert (found.mtp.embedding_first, found.mtp.holds_head) == (embedding_first, holds_head)
    assert found.mtp.num_bytes == 24 * len(names)
    assert set(found.unused) == {name.removeprefix("model.") for name in names}
    assert {part.name: part.num_tensors for part in found.parts}["MTP layers"] == len(names)
    assert found.refusal is not None


def test_layers_that_are_only_promised(copy: Path) -> None:
    configure(copy, num_nextn_predict_layers=1)
    found = inspect_checkpoint(copy)
    assert found.mtp is not None
    assert (found.mtp.num_layers, found.mtp.declared) == (0, 1)


def test_weights_are_not_read(copy: Path) -> None:
    """A checkpoint far larger than memory, all holes."""
    rows, hidden = 1_000_000, 32_768
    header = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, hidden], "data_offsets": [0, 4 * rows * hidden]}
    }
    raw = json.dumps(header).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 4 * rows * hidden)
    configure(copy, vocab_size=rows, hidden_size=hidden, head_dim=8)
    found = inspect_checkpoint(copy)
    assert found.memory["file"] == 4 * rows * hidden
    assert "norm.weight" in found.missing


@pytest.mark.parametrize("damage", [b"", b"short", (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"])
def test_a_damaged_header_is_one_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(damage)
    with pytest.raises(UserError, match=r"x\.safetensors") as error:
        read_safetensors_header(path)
    assert "\n" not in str(error.value)


def test_a_file_that_was_cut_short(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="as long as its header"):
        inspect_checkpoint(copy)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        inspect_checkpoint(tmp_path)
