"""Tuned depths: found by an engine like the one they were measured on, by no other, and never against a user's wish."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.depths import Depth, DepthTable
from tiercel.core.errors import UserError
from tiercel.core.request import SOURCE_NGRAM
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.engine.llm import LLM
from tiercel.speculative.tuned import TuneKey, read_tuned, tune_folder, tune_key, write_tuned

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
TWO = DepthTable("test", (Depth(1, 2), Depth(2, 0, False)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERCEL_TUNE_DIR", str(tmp_path / "tune"))
    return tmp_path / "tune"


@pytest.fixture(params=["toy_modules", "toy_native"])
def target(request: pytest.FixtureRequest) -> LoadedTarget:
    found: LoadedTarget = request.getfixturevalue(request.param)
    return found


def open_llm(target: LoadedTarget, draft: Path, config: EngineConfig | None = None, **spec: Any) -> LLM:
    spec = {"adaptive": False} | spec
    return LLM(
        engine=config or EngineConfig(), spec=SpecConfig(draft=str(draft), min_confidence=0, **spec), target=target
    )


def key_of(target: LoadedTarget, draft: Path, config: EngineConfig | None = None) -> TuneKey:
    return tune_key(target.checkpoint, target.model, target.placement, config or EngineConfig(), draft)


def proposed(llm: LLM, requests: int) -> set[int]:
    """Drafts per round of so many requests at once; the last rounds, which may need fewer, are left out."""
    outputs = llm.generate([[7 + i, 30, 99] for i in range(requests)], SAMPLING)
    return {n for output in outputs for n in output.record.spec["per_step_drafted"][:4]}


def test_an_engine_picks_up_what_was_tuned_for_it(target: LoadedTarget, toy_draft: Path) -> None:
    usual = open_llm(target, toy_draft, ngram_match=0)
    assert proposed(usual, 1) != {2}
    path = write_tuned(key_of(target, toy_draft), TWO, {"note": "by hand"})
    llm = open_llm(target, toy_draft, ngram_match=0)
    assert llm.depths is not None
    assert llm.depths.source == path
    assert llm.depths.depths == TWO.depths
    assert proposed(llm, 1) == {2}
    assert proposed(llm, 2) == {0}
    plain = LLM(engine=EngineConfig(), spec=SpecConfig(method="none"), target=target)
    prompts = [[5, 9, 1], [8] * 9]
    texts = [[o.token_ids for o in one.generate(prompts, SAMPLING)] for one in (llm, plain)]
    assert texts[0] == texts[1]
    assert plain.depths is None
    assert open_llm(target, toy_draft, ngram_match=0, tuned=False).depths == usual.depths


@pytest.mark.parametrize("wish", [{"num_steps": 3}, {"max_verify_rows": 8}, {"depths": DepthTable.fixed(3)}])
def test_what_the_user_says_wins(target: LoadedTarget, toy_draft: Path, wish: dict[str, Any]) -> None:
    write_tuned(key_of(target, toy_draft), TWO, {})
    llm = open_llm(target, toy_draft, ngram_match=0, **wish)
    assert proposed(llm, 1) == {3}
    assert llm.depths is not None
    assert not isinstance(llm.depths.source, Path)


def test_prompt_lookup_is_left_out_where_the_table_says_so_unless_it_is_asked_for(
    toy_native: LoadedTarget, toy_draft: Path
) -> None:
    table = DepthTable("test", (Depth(1, 0, False),))
    write_tuned(key_of(toy_native, toy_draft), table, {})
    repeating = [[3, 4, 5, 6] * 8]

    def sources(**spec: Any) -> Iterator[int]:
        for step in open_llm(toy_native, toy_draft, **spec).generate(repeating, SAMPLING):
            yield from (source for source in step.sources if source >= 0 or source == SOURCE_NGRAM)
            yield from step.record.spec["per_step_drafted"]

    assert set(sources()) == {0}
    assert max(sources(ngram_match=1)) > 0


def test_the_key_tells_apart_what_changes_speed_or_acceptance(
    toy_native: LoadedTarget, toy_modules: LoadedTarget, toy_draft: Path, tmp_path: Path
) -> None:
    other_draft = tmp_path / "other"
    shutil.copytree(toy_draft, other_draft)
    same = key_of(toy_native, other_draft)
    assert same == key_of(toy_native, toy_draft)  # content counts, not the folder
    config = json.loads((other_draft / "config.json").read_text())
    (other_draft / "config.json").write_text(json.dumps({**config, "provenance": {"steps": 1}}))
    keys = [
        same,
        key_of(toy_native, other_draft),
        key_of(toy_modules, toy_draft),
        key_of(toy_native, toy_draft, EngineConfig(activation_bits=16)),
        key_of(toy_native, toy_draft, EngineConfig(quantization="none")),
        key_of(toy_native, toy_draft, EngineConfig(kv_dtype="float32")),
        dataclasses.replace(same, processor="another"),
        dataclasses.replace(same, weights_bytes=1),
    ]
    torch.set_num_threads(2)
    keys.append(key_of(toy_native, toy_draft))
    assert len({key.path for key in keys}) == len(keys)
    assert all(key.path.parent == tune_folder() for key in keys)
    assert same.weights_bytes == (toy_native.checkpoint.path / "model.safetensors").stat().st_size


def test_no_file_is_nothing_tuned_and_a_file_is_read_as_it_was_written(
    toy_native: LoadedTarget, toy_draft: Path
) -> None:
    key = key_of(toy_native, toy_draft)
    assert read_tuned(key.path) is None
    path = write_tuned(key, TWO, {"runs": 3})
    found = read_tuned(path)
    assert found is not None
    assert found.depths == TWO.depths
    content = json.loads(path.read_text())
    assert content["key"] == key.to_json()
    assert content["measured"] == {"runs": 3}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "tiercel-depths-0", "depths": []}', "\udcff"])
def test_a_broken_file_is_an_error_that_names_the_remedy(toy_native: LoadedTarget, toy_draft: Path, text: str) -> None:
    path = write_tuned(key_of(toy_native, toy_draft), TWO, {})
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        open_llm(toy_native, toy_draft)
    for part in (str(path), "tiercel tune"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    open_llm(toy_native, toy_draft, num_steps=2)  # not read, so not in the way


def test_depths_beyond_the_layers_in_use_are_refused(toy_native: LoadedTarget, toy_draft: Path) -> None:
    with pytest.raises(UserError, match="4 MTP layers, but 3"):
        open_llm(toy_native, toy_draft, depths=DepthTable.fixed(4))


def test_a_folder_that_cannot_be_written_is_named(
    toy_native: LoadedTarget, toy_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCEL_TUNE_DIR", "/dev/null/tune")
    with pytest.raises(UserError, match="TIERCEL_TUNE_DIR"):
        write_tuned(key_of(toy_native, toy_draft), TWO, {})


def test_the_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune_folder().name == "tune"
    monkeypatch.delenv("TIERCEL_TUNE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert tune_folder() == Path("/state/tiercel/tune")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert tune_folder() == Path("/home/x/.local/state/tiercel/tune")
