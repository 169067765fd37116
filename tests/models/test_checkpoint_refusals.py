"""Checkpoints with wrong values inside: always one clear line, never a traceback."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_checkpoints import write_gguf
from tiercel.core.errors import UserError
from tiercel.models.loading import load_decoder
from tiercel.models.opening import open_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def copy(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "copy"))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]


@pytest.mark.parametrize("name", [*SIZES, "num_attention_heads", "rms_norm_eps"])
@pytest.mark.parametrize("value", [None, "x", -1, 0, [], {}], ids=repr)
def test_a_setting_that_cannot_be(copy: Path, name: str, value: object) -> None:
    edit(copy, **{name: value})
    with pytest.raises(UserError, match=r"config\.json") as error:
        open_checkpoint(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": 32.5, "head_dim": 8}, "hidden_size"),
        ({"rope_parameters": "x"}, "must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_conventions_that_are_not_ours(copy: Path, changes: dict[str, Any], named: str) -> None:
    edit(copy, **changes)
    with pytest.raises(UserError, match=named):
        open_checkpoint(copy)


@pytest.mark.parametrize("eos", [259, -1, "x", [2, None]], ids=repr)
def test_an_eos_that_is_no_token(copy: Path, eos: object) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match="EOS"):
        open_checkpoint(copy)


def test_old_and_new_places_of_the_rope_base(copy: Path) -> None:
    edit(copy, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert open_checkpoint(copy).description.rope_theta == 5e5
    edit(copy, rope_parameters=None, rope_theta=2e4)
    assert open_checkpoint(copy).description.rope_theta == 2e4


def test_shards(copy: Path) -> None:
    whole = load_file(copy / "model.safetensors")
    names = sorted(whole)
    (copy / "model.safetensors").unlink()
    index = copy / "model.safetensors.index.json"

    def shard(first: list[str], second: list[str]) -> None:
        save_file({n: whole[n] for n in first}, copy / "a.safetensors")
        save_file({n: whole[n] for n in second}, copy / "b.safetensors")
        places = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
        index.write_text(json.dumps({"weight_map": places}))

    shard(names[:5], names[5:])
    got = dict(open_checkpoint(copy).tensors())
    assert {f"model.{name}" for name in got} == set(names)
    assert all(torch.equal(got[name.removeprefix("model.")], whole[name]) for name in names)
    shard(names[:6], names[5:])
    with pytest.raises(UserError, match="given twice"):
        load_decoder(open_checkpoint(copy), torch.float32, CPU)
    (copy / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks b\.safetensors"):
        open_checkpoint(copy)
    for wrong in ([], {"x": 1}, None):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(UserError, match="weight_map"):
            open_checkpoint(copy)


def test_random_damage_to_a_gguf_header_is_one_line_or_harmless(toy_model: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    write_gguf(good, toy_model, "Q8_0")
    data, generator, refusals = good.read_bytes(), random.Random(0), []
    for _ in range(120):
        damaged = bytearray(data)
        damaged[generator.randrange(9000)] = generator.randrange(256)
        bad.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(bad)
            checkpoint.tokenizer.encode("hi")
            load_decoder(checkpoint, torch.float32, CPU)
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert not any("\n" in text for text in refusals)
