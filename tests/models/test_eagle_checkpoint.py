"""EAGLE heads in every published layout, against the same head built from transformers' parts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eagle_heads import Head, Llama
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.eagle_checkpoint import check_eagle, load_eagle, resolve_eagle
from tiercel.models.step import StepInput

TEXT = [7, 30, 99, 12, 200, 45, 8, 61, 5, 77, 140, 9]
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
LAYOUTS = (
    "safeailab",
    "safeailab-bias",
    "speculators",
    "eagle3",
    "eagle3-pickled",
    "eagle3-sglang",
    "eagle3-speculators",
)


def written(layout: str, target: Llama, folder: Path) -> tuple[Head, str]:
    """A head, its files in ``folder``, and the method that reads it."""
    if layout == "eagle3-sglang":
        head = Head(target, (1, 2, 1), own_embedding=True)
        head.save_flat(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 0]})
    elif layout == "eagle3-speculators":
        head = Head(target, (0, 1, 2), norm_before_residual=True)
        head.save_speculators(folder, **TAPS)
    elif layout.startswith("eagle3"):
        head = Head(target, (0, 1, 2), norm_output=layout == "eagle3-pickled")
        head.save_flat(folder, norm_output=head.norm_output, **TAPS)
        if layout == "eagle3-pickled":
            (folder / "model.safetensors").unlink()
            torch.save(head.state_dict(), folder / "pytorch_model.bin")
    elif layout == "speculators":
        head = Head(target, bias=True)
        head.save_speculators(folder, layernorms=False, fusion_bias=True)
    else:
        head = Head(target, bias=layout == "safeailab-bias", own_embedding=layout == "safeailab")
        head.save_flat(folder)
    return head, "eagle3" if head.taps else "eagle"


@pytest.fixture(scope="module")
def llama(toy_model: Path) -> Llama:
    return Llama(toy_model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recorded", [True, False])
def test_every_layout_computes_what_the_reference_does(
    toy_modules: LoadedTarget, toy_native: LoadedTarget, llama: Llama, tmp_path: Path, layout: str, recorded: bool
) -> None:
    target = toy_native if recorded else toy_modules
    head, method = written(layout, llama, tmp_path)
    check_eagle(tmp_path, target.checkpoint, method)
    model = load_eagle(tmp_path, target.checkpoint, target.model, method)
    count = len(TEXT) - 1
    rows = Rows([Segment(0, count, torch.arange(count))], torch.device("cpu"))
    shape = target.model.description
    kept = [KvStorage(count, shape.num_kv_heads, shape.head_dim, torch.float32, rows.device) for _ in range(2)]
    read = target.model.run(StepInput(rows, torch.tensor(TEXT[:-1]), torch.tensor([0]), taps=model.taps), kept)
    prepared = model.prepare(read.hidden if read.tapped is None else read.tapped)
    torch.testing.assert_close(prepared, head.prepared(TEXT[:-1]), atol=1e-4, rtol=1e-4)
    own = [KvStorage(count, 4, 8, torch.float32, rows.device)]
    step = StepInput(rows, torch.tensor(TEXT[1:]), torch.arange(count), True, prepared, with_confidence=True)
    found = model.layer.run(step, own)
    expected, logits = head.run(TEXT[1:], prepared)
    torch.testing.assert_close(found.hidden, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.logits, logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found.confidence, logits.softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)
    assert model.target_ids.tolist() == head.target_ids.tolist()


def changed(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


def test_where_hidden_states_are_taken_is_said_by_the_config(
    toy_native: LoadedTarget, llama: Llama, tmp_path: Path
) -> None:
    head = Head(llama, (0, 1, 2))
    for settings, taps in (
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}}, (1, 2, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "aux_hidden_state_convention": "after"}, (1, 2, 2)),
        (
            {
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
                "aux_hidden_state_convention": "before",
            },
            (0, 1, 2),
        ),
    ):
        head.save_flat(tmp_path, **settings)
        assert load_eagle(tmp_path, toy_native.checkpoint, toy_native.model, "eagle3").taps == taps


def test_a_head_without_its_own_parts_shares_the_targets(
    toy_modules: LoadedTarget, llama: Llama, tmp_path: Path
) -> None:
    Head(llama).save_flat(tmp_path)
    shared = load_eagle(tmp_path, toy_modules.checkpoint, toy_modules.model, "eagle").layer.head  # type: ignore[attr-defined]
    decoder = toy_modules.model.decoder  # type: ignore[attr-defined]
    assert shared.embed.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    assert shared.head.weight.data_ptr() == decoder.lm_head.weight.data_ptr()
    Head(llama, (0, 1, 2), own_embedding=True).save_flat(tmp_path, **TAPS)
    owned = load_eagle(tmp_path, toy_modules.checkpoint, toy_modules.model, "eagle3").layer.head  # type: ignore[attr-defined]
    assert not torch.equal(owned.embed.weight, decoder.embed_tokens.weight)
    assert owned.head.weight.shape == (200, 32)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "the target has 2"),
        ({"aux_hidden_state_convention": "input"}, "aux_hidden_state_convention"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"target_hidden_size": 64}, "target hidden size"),
        ({"vocab_size": 300}, "vocabulary"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    toy_checkpoint: Checkpoint, llama: Llama, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    Head(llama, (0, 1, 2)).save_flat(tmp_path, **TAPS)
    (tmp_path / "model.safetensors").unlink()
    changed(tmp_path, **settings)
    with pytest.raises(UserError, match=named):
        check_eagle(tmp_path, toy_checkpoint, "eagle3")


def test_tensors_that_are_missing_unknown_or_wrong_are_named(
    toy_native: LoadedTarget, llama: Llama, tmp_path: Path
) -> None:
    checkpoint, model = toy_native.checkpoint, toy_native.model
    for name, change, named in (
        ("d2t", None, "no d2t"),
        ("d2t", torch.zeros(200, dtype=torch.int64) + 100, "d2t points outside"),
        ("midlayer.hidden_norm.weight", None, "hidden_norm"),
        ("lm_head.weight", torch.zeros(7, 32), "lm_head"),
        ("extra.weight", torch.zeros(1), "extra"),
        ("fc.weight", torch.full((32, 96), torch.nan), "NaN"),
    ):
        head = Head(llama, (0, 1, 2))
        tensors = head.state_dict()
        tensors.pop(name, None)
        if change is not None:
            tensors[name] = change
        head.save_flat(tmp_path, **TAPS)
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=named):
            load_eagle(tmp_path, checkpoint, model, "eagle3")


def test_the_right_method_is_named(toy_checkpoint: Checkpoint, toy_draft: Path, llama: Llama, tmp_path: Path) -> None:
    Head(llama, (0, 1, 2)).save_flat(tmp_path / "three", **TAPS)
    Head(llama).save_flat(tmp_path / "one")
    for folder, method in ((tmp_path / "three", "eagle"), (tmp_path / "one", "eagle3"), (toy_draft, "eagle3")):
        with pytest.raises(UserError, match="choose --spec"):
            check_eagle(folder, toy_checkpoint, method)
    with pytest.raises(UserError, match="--draft"):
        resolve_eagle("auto", toy_checkpoint, "eagle3")
