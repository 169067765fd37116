import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_draft
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget
from tiercel.models.mtp_checkpoint import load_draft, resolve_draft, save_draft


def test_a_draft_survives_saving_up_to_bfloat16(toy_target: LoadedTarget, tmp_path: Path) -> None:
    draft = random_draft(toy_target)
    save_draft(draft, tmp_path, {"note": "kept"})
    back = load_draft(tmp_path, toy_target.checkpoint, toy_target.model.decoder)
    assert back.description == draft.description
    assert torch.equal(back.target_ids, draft.target_ids)
    for (name, ours), theirs in zip(back.layers.named_parameters(), draft.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16).float()), name
    assert json.loads((tmp_path / "config.json").read_text())["provenance"] == {"note": "kept"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_embedding_is_shared_and_the_head_cut_to_the_draft_vocabulary(
    toy_target: LoadedTarget, toy_draft: Path
) -> None:
    draft = load_draft(toy_draft, toy_target.checkpoint, toy_target.model.decoder)
    weight = toy_target.model.decoder.embed_tokens.weight
    assert draft.embedding is not None
    assert draft.head is not None
    assert draft.embedding.data_ptr() == weight.data_ptr()
    assert torch.equal(draft.head, weight[draft.target_ids])


def test_d2t_holds_offsets(toy_target: LoadedTarget) -> None:
    draft = random_draft(toy_target)
    offset = int(draft.d2t[5])
    assert int(draft.target_ids[5]) == 5 + offset


@pytest.fixture
def copy(toy_draft: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_draft, tmp_path / "draft"))


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        body = {**old["body"], **changes.pop("body", {})}
        (folder / "config.json").write_text(json.dumps({**old, "body": body, **changes}))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        loaded = load_file(folder / "model.safetensors")
        edit(loaded)
        save_file(loaded, folder / "model.safetensors")

    return change


NORM = "model.mtp.layers.1.enorm.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (config(target_hidden_size=64), "hidden size"),
        (config(body={"vocab_size": 99}), "vocabulary"),
        (config(target_fingerprint="0123456789abcdef"), "tokenizer"),
        (config(hidden_before_final_norm=False), "final norm"),
        (config(format="other"), "format"),
        (config(num_layers=4), "missing"),
        (config(num_layers=2), "unknown"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "model.safetensors"),
        (tensors(lambda t: t.pop("d2t")), "d2t"),
        (tensors(lambda t: t["d2t"].add_(1000)), "d2t"),
        (tensors(lambda t: t["d2t"].neg_()), "d2t"),
        (tensors(lambda t: t.pop(NORM)), "enorm"),
        (tensors(lambda t: t[NORM].fill_(torch.nan)), "NaN"),
        (tensors(lambda t: t.update(stray=torch.zeros(1))), "stray"),
    ],
)
def test_a_draft_that_does_not_fit_is_named_in_one_line(
    copy: Path, toy_target: LoadedTarget, damage: Callable[[Path], None], named: str
) -> None:
    damage(copy)
    with pytest.raises(UserError) as error:
        load_draft(copy, toy_target.checkpoint, toy_target.model.decoder)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_names(toy_target: LoadedTarget, toy_draft: Path) -> None:
    assert resolve_draft(str(toy_draft), toy_target.checkpoint) == toy_draft
    with pytest.raises(UserError, match="no draft is known"):
        resolve_draft("auto", toy_target.checkpoint)
    with pytest.raises(UserError, match="smollm2-135m-mtp3"):
        resolve_draft("no-such-draft", toy_target.checkpoint)


def test_every_setting_of_the_description_is_stored(toy_draft: Path, toy_target: LoadedTarget) -> None:
    stored = json.loads((toy_draft / "config.json").read_text())
    names = {f.name for f in dataclasses.fields(random_draft(toy_target).description)}
    assert names <= stored.keys()
