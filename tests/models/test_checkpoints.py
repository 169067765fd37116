"""Reading checkpoints: right values from every supported type, one clear line for everything else."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tiercel.core.errors import UserError
from tiercel.models.loading import load_decoder
from tiercel.models.opening import open_checkpoint

CPU = torch.device("cpu")
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def write_gguf(path: Path, folder: Path, kind: str, arch: str = "llama", pre: str = "gpt-2") -> dict[str, torch.Tensor]:
    """Write the toy model as llama.cpp would; returns the values a reader must see, by published name."""
    model = LlamaForCausalLM.from_pretrained(folder)
    config, tokens = model.config, json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    names = [*sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].__getitem__), "<|im_end|>", "<|im_start|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    quantisation = gguf.GGMLQuantizationType[kind]
    seen = {}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    parts |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
        f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")
    }
    for name, tensor in model.state_dict().items():
        short = name.removeprefix("model.").removesuffix(".weight")
        if short == "lm_head":
            continue
        stored = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(short)
        if stored is None:
            _, layer, part = short.split(".", 2)
            stored = f"blk.{layer}.{parts[part]}"
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        found = next((h for p, h in heads.items() if short.endswith(p)), None)
        values = tensor.numpy().astype(np.float32)
        if found:  # the converter's row order: pairs of the two halves of each head
            rows, columns = values.shape
            values = values.reshape(found, 2, rows // found // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        kind_here = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = quantize(values, kind_here)
        back = dequantize(data, kind_here)
        if found:
            back = back.reshape(found, rows // found // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        seen[name.removeprefix("model.")] = torch.from_numpy(np.ascontiguousarray(back, dtype=np.float32))
        writer.add_tensor(f"{stored}.weight", data, raw_dtype=kind_here)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_values_of_every_type(kind: str, toy_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    expected = write_gguf(path, toy_model, kind)
    checkpoint = open_checkpoint(path)
    got = dict(checkpoint.tensors())
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
    load_decoder(checkpoint, torch.float32, CPU)


def test_a_gguf_file_and_its_folder_share_a_fingerprint(toy_model: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", toy_model, "F32")
    assert open_checkpoint(tmp_path / "toy.gguf").fingerprint == open_checkpoint(toy_model).fingerprint
    assert open_checkpoint(tmp_path).path == tmp_path / "toy.gguf"


def one_line(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_gguf_files_that_cannot_be_read(toy_model: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    write_gguf(good, toy_model, "F32")
    cut = tmp_path / "cut.gguf"
    for share in (0.0, 0.1, 0.5, 0.95):
        cut.write_bytes(good.read_bytes()[: int(share * good.stat().st_size)])
        with pytest.raises(UserError) as error:
            list(open_checkpoint(cut).tensors())
        one_line(error, "cut.gguf")
    write_gguf(tmp_path / "arch.gguf", toy_model, "F32", arch="mamba")
    with pytest.raises(UserError, match="architecture 'mamba'"):
        open_checkpoint(tmp_path / "arch.gguf")
    write_gguf(tmp_path / "pre.gguf", toy_model, "F32", pre="tekken")
    with pytest.raises(UserError, match="tekken"):
        _ = open_checkpoint(tmp_path / "pre.gguf").tokenizer


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    for name in ("missing", "empty", "file.bin", "missing.gguf"):
        with pytest.raises(UserError) as error:
            open_checkpoint(tmp_path / name)
        one_line(error, name)


@pytest.fixture
def copy(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "copy"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "config.json"),
    ],
)
def test_folders_that_need_what_we_lack(copy: Path, changes: dict[str, object], named: str) -> None:
    if changes.get("hidden_size", 1) is None:
        config = json.loads((copy / "config.json").read_text())
        del config["hidden_size"]
        (copy / "config.json").write_text(json.dumps(config))
    else:
        edit_config(copy, **changes)
    with pytest.raises(UserError) as error:
        open_checkpoint(copy)
    one_line(error, named)


def test_every_tensor_exactly_once(copy: Path) -> None:
    weights = copy / "model.safetensors"
    good = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"

    def expect(tensors: dict[str, torch.Tensor], *parts: str) -> None:
        save_file(tensors, weights)
        with pytest.raises(UserError) as error:
            load_decoder(open_checkpoint(copy), torch.float32, CPU)
        one_line(error, *parts)

    expect({k: v for k, v in good.items() if k != name}, "missing", "up_proj")
    expect({**good, "model.layers.9.stray": torch.zeros(1)}, "stray", "unknown")
    expect({**good, name: torch.zeros(2, 2)}, "up_proj", "[2, 2]")
    expect({**good, name: torch.full_like(good[name], torch.nan)}, "up_proj", "NaN")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError) as error:
        load_decoder(open_checkpoint(copy), torch.float32, CPU)
    one_line(error, "model.safetensors")
    weights.unlink()
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        open_checkpoint(copy)


def test_eos_ids_from_the_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    assert open_checkpoint(copy).description.eos_token_ids == (256, 7)
