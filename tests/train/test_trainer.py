import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.test_objective import greedy
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget
from tiercel.models.loading import load_decoder
from tiercel.models.mtp_checkpoint import load_draft
from tiercel.train.data import (
    Conversation,
    draft_vocabulary,
    pad,
    read_conversations,
    split_held_out,
    token_batches,
)
from tiercel.train.hidden_states import HiddenStateCache
from tiercel.train.trainer import Progress, TrainConfig, Trainer

CONFIG = TrainConfig(
    tokens=3000, batch_tokens=120, draft_vocab_size=200, held_out=4, evaluate_every=10, learning_rate=2e-2, untie_at=0.5
)


@pytest.fixture(scope="module")
def conversations(toy_target: LoadedTarget) -> list[Conversation]:
    made = []
    for i in range(24):
        prompt = [(17 * i + 3 * j) % 250 for j in range(3)]
        made.append(Conversation(tuple(greedy(toy_target, prompt, 30)), 3, greedy=True))
    return made


def trainer(target: LoadedTarget, data: list[Conversation], out: Path, config: TrainConfig = CONFIG) -> Trainer:
    decoder = load_decoder(target.checkpoint, torch.bfloat16, torch.device("cpu"))
    return Trainer(target.checkpoint, decoder, data, out, out / "cache", config, ["toy"])


def test_training_learns_keeps_the_best_and_writes_its_settings(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    seen: list[Progress] = []
    run = trainer(toy_target, conversations, tmp_path, dataclasses.replace(CONFIG, tokens=6000))
    run.run(seen.append)
    assert sum(seen[-1].losses.cross_entropy) < 0.7 * sum(seen[0].losses.cross_entropy)
    assert not run.is_tied
    best = max(p.acceptance.length for p in seen if p.acceptance)
    assert run.best_length == best > 1.0
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    assert config["provenance"]["settings"] == dataclasses.asdict(run.config)
    assert config["provenance"]["held_out"]["acceptance_length"] == best
    draft = load_draft(tmp_path / "best", toy_target.checkpoint, toy_target.model.decoder)
    assert draft.description.num_layers == 3
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, run.step + 1))


def test_a_resumed_run_ends_where_an_unbroken_one_does(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    whole = trainer(toy_target, conversations, tmp_path / "whole")
    whole.run(lambda p: None)

    class Cut(Exception):
        pass

    def stop_after_20(progress: Progress) -> None:
        if progress.step == 20:
            raise Cut

    with pytest.raises(Cut):
        trainer(toy_target, conversations, tmp_path / "cut").run(stop_after_20)
    resumed = trainer(toy_target, conversations, tmp_path / "cut")
    assert resumed.step == 20
    resumed.run(lambda p: None)
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens)
    for ours, theirs in zip(resumed.draft.layers.parameters(), whole.draft.layers.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_folder_of_another_run_is_refused(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    trainer(toy_target, conversations, tmp_path, dataclasses.replace(CONFIG, tokens=200)).run(lambda p: None)
    with pytest.raises(UserError, match="other settings"):
        trainer(toy_target, conversations, tmp_path, dataclasses.replace(CONFIG, layers=2))


def test_hidden_states_are_found_again_by_their_tokens(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    def states(data: list[Conversation], folder: Path) -> torch.Tensor:
        decoder = load_decoder(toy_target.checkpoint, torch.bfloat16, torch.device("cpu"))
        return HiddenStateCache(folder, decoder, toy_target.checkpoint.fingerprint, data).batch(list(range(len(data))))

    first = states(conversations[:6], tmp_path / "kept")
    size = (tmp_path / "kept" / "hidden.bf16").stat().st_size
    assert size == sum(map(len, conversations[:6])) * toy_target.checkpoint.description.hidden_size * 2
    assert torch.equal(states(conversations[5::-1], tmp_path / "kept").flip(0), first)
    assert (tmp_path / "kept" / "hidden.bf16").stat().st_size == size
    # A run that died while it wrote leaves half a row and half a line.
    for name, rest in (("hidden.bf16", b"xyz"), ("index.jsonl", b'{"conv')):
        with (tmp_path / "kept" / name).open("ab") as file:
            file.write(rest)
    whole = states(conversations, tmp_path / "kept")
    assert torch.equal(whole, states(conversations, tmp_path / "fresh"))
    assert torch.equal(whole, states(conversations, tmp_path / "kept"))


def test_a_cache_damaged_or_of_another_target_is_refused(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    HiddenStateCache(tmp_path, toy_target.model.decoder, "a", conversations).batch([0])
    with pytest.raises(UserError, match="another target"):
        HiddenStateCache(tmp_path, toy_target.model.decoder, "b", conversations)
    (tmp_path / "hidden.bf16").write_bytes(b"")
    with pytest.raises(UserError, match="shorter than its index"):
        HiddenStateCache(tmp_path, toy_target.model.decoder, "a", conversations)


def test_a_run_goes_on_from_another_draft(
    toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    first = trainer(toy_target, conversations, tmp_path / "first")
    first.run(lambda p: None)
    config = dataclasses.replace(CONFIG, init=str(tmp_path / "first" / "best"), draft_vocab_size=150, tokens=600)
    second = trainer(toy_target, conversations, tmp_path / "second", config)
    assert not second.is_tied
    assert len(second.draft.d2t) == 150
    for ours, theirs in zip(
        second.draft.layers.parameters(),
        load_draft(tmp_path / "first" / "best", toy_target.checkpoint, toy_target.model.decoder).layers.parameters(),
        strict=True,
    ):
        assert torch.equal(ours, theirs.float())
    assert all(p.requires_grad for p in second.draft.layers.parameters())
    seen: list[Progress] = []
    second.run(seen.append)
    fresh: list[Progress] = []
    trainer(toy_target, conversations, tmp_path / "fresh", dataclasses.replace(CONFIG, tokens=200)).run(fresh.append)
    assert sum(seen[0].losses.cross_entropy) < 0.9 * sum(fresh[0].losses.cross_entropy)
    provenance = json.loads((tmp_path / "second" / "best" / "config.json").read_text())["provenance"]
    assert provenance["init"] == json.loads((tmp_path / "first" / "best" / "config.json").read_text())["provenance"]
    with pytest.raises(UserError, match="another shape"):
        trainer(toy_target, conversations, tmp_path / "third", dataclasses.replace(config, layers=2))


def test_reading_conversations(tmp_path: Path) -> None:
    row = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5], "temperature": 0}
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(json.dumps(row) + "\n")
    zipped.write_bytes(gzip.compress(json.dumps({**row, "temperature": 0.7}).encode()))
    first, second = read_conversations([plain, zipped], 10, 4)
    assert first == Conversation((1, 2, 3, 4), 2, True)
    assert second.greedy is False


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "a.jsonl:1"),
        ("[]", "prompt_token_ids"),
        ('{"prompt_token_ids": [1]}', "response_token_ids"),
        ('{"prompt_token_ids": 1, "response_token_ids": [1]}', "a.jsonl:1"),
        ('{"prompt_token_ids": [1], "response_token_ids": null}', "a.jsonl:1"),
        ('{"prompt_token_ids": [], "response_token_ids": [1]}', "a.jsonl:1"),
        ('{"prompt_token_ids": [1], "response_token_ids": [10]}', "vocabulary of 10"),
        ('{"prompt_token_ids": ["x"], "response_token_ids": [1]}', "integers"),
        ("", "no conversation"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n" if line else "")
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        read_conversations([path], 10, 100)


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a file"):
        read_conversations([tmp_path / "none.jsonl"], 10, 10)
    broken = gzip.compress(json.dumps({"prompt_token_ids": [1], "response_token_ids": [2] * 999}).encode())
    for content in (b"not gzip", broken[:-9], broken[:12] + b"\xff" * 4 + broken[16:]):
        (tmp_path / "bad.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            read_conversations([tmp_path / "bad.jsonl.gz"], 10, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decay": 0.0},
        {"warmup": 0.0},
        {"learning_rate": -1.0},
        {"untie_at": -0.1},
        {"tokens": 0},
        {"decay": float("nan")},
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        dataclasses.replace(CONFIG, **wrong)


def test_very_little_data_trains(toy_target: LoadedTarget, conversations: list[Conversation], tmp_path: Path) -> None:
    short = [Conversation((i, i + 1, i + 2), 2, greedy=True) for i in range(3)]  # no layer has anything to predict
    config = dataclasses.replace(CONFIG, tokens=200, held_out=1, batch_tokens=20)
    losses: list[float] = []
    run = trainer(toy_target, conversations[:3] + short, tmp_path / "a", config)
    run.run(lambda p: losses.extend(p.losses.cross_entropy))
    assert np.isfinite(losses).all()
    assert 0.0 in losses
    assert all(torch.isfinite(p).all() for p in run.draft.layers.parameters())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another --out"):
        trainer(toy_target, conversations, tmp_path / "file")


def test_held_out_prompts_leave_the_training_part() -> None:
    base = [Conversation((i, *range(20)), 1, greedy=i % 2 == 0) for i in range(40)]
    twins = [Conversation((i, *range(30)), 1, greedy=False) for i in range(40)]
    train, held = split_held_out(base + twins, 5)
    assert len(held) == 5
    assert all(c.greedy for c in held)
    assert not {c.token_ids[:1] for c in held} & {c.token_ids[:1] for c in train}
    with pytest.raises(UserError, match="greedy answers"):
        split_held_out(base, 15)
    with pytest.raises(UserError, match="none is left"):
        split_held_out([Conversation((1, *range(20)), 1, greedy=True)] * 4, 2)


def test_the_draft_vocabulary_holds_the_frequent_answer_tokens() -> None:
    data = [Conversation((9, 9, 9, 3, 3, 5), 3, True)]
    d2t = draft_vocabulary(data, 4, 20)
    assert (d2t + torch.arange(4)).tolist() == [0, 1, 3, 5]


def test_batches_cover_everything_once() -> None:
    data = [Conversation(tuple(range(n)), 1, True) for n in range(2, 60)]
    batches = token_batches(data, 150, seed=1)
    assert sorted(i for b in batches for i in b) == list(range(len(data)))
    assert all(len(b) == 1 or pad([data[i] for i in b]).numel() <= 150 for b in batches)
    assert token_batches(data, 150, seed=1) == batches
    assert token_batches(data, 150, seed=2) != batches
