"""The figures of hand-made records, counted again here."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest
from tokenizers import Tokenizer

from tests.report.records import HandMade
from tiercel.core.errors import UserError
from tiercel.core.request import SOURCE_NGRAM
from tiercel.report.analysis import make_report

ROUNDS = [(3, 0, 1), (3, 1, 2), (3, 3, 4), (2, 2, 3), (3, 2, 3), (1, 0, 1), (3, 3, 2)]
"""(proposed, correct, emitted) of one request; its last round is cut by a stop."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = HandMade(tmp_path / "run")
    made.extend("a", 60, ms=25)
    for index, (proposed, correct, emitted) in enumerate(ROUNDS):
        layers = (1.0, 0.5, 0.25) if index < 6 else ()
        tail = 0.125 if layers else 0
        made.decode([("a", proposed, correct, emitted)], draft=0.5, verify=8 + index, layers=layers, tail=tail, other=1)
    made.finish("a", e2e_ms=170.0)
    return made.close()


def test_totals(run: Path) -> None:
    totals = make_report([run]).totals
    proposed, correct, emitted = (sum(r[i] for r in ROUNDS) for i in range(3))
    assert (totals.proposed, totals.correct, totals.emitted) == (proposed, correct, emitted) == (18, 11, 16)
    assert totals.acceptance_rate == 11 / 18
    assert totals.acceptance_length == 1 + 11 / 7
    assert totals.emitted_per_round == 16 / 7
    assert (totals.requests, totals.unfinished, totals.finish_reasons) == (1, 0, {"length": 1})
    assert (totals.prompt_tokens, totals.completion_tokens) == (60, 17)
    walls = [1.5 + 8 + i + (1.875 if i < 6 else 0) for i in range(7)]
    assert totals.decode_ms == pytest.approx(sum(walls))
    assert totals.decode_tok_s == pytest.approx(16 / sum(walls) * 1000)
    assert totals.extend_ms == pytest.approx(25)
    assert totals.token_ms is not None
    assert totals.token_ms.p50 == pytest.approx(150 / 16)


def test_acceptance_by_position_and_layer(run: Path) -> None:
    report = make_report([run])
    for i, position in enumerate(report.positions):
        reached = [c for p, c, _ in ROUNDS if p > i and c >= i]
        assert position.proposed == sum(p > i for p, _, _ in ROUNDS)
        assert position.reached == len(reached)
        assert position.unconditional == sum(c > i for _, c, _ in ROUNDS) / len(ROUNDS)
        assert position.conditional == sum(c > i for c in reached) / len(reached)
    assert len(report.positions) == 3
    assert [d.name for d in report.drafters] == ["MTP layer 1", "MTP layer 2", "MTP layer 3"]
    assert [(d.proposed, d.reached, d.correct) for d in report.drafters] == [(7, 7, 5), (6, 5, 4), (5, 3, 2)]


def test_times_sum_to_the_wall_time(run: Path) -> None:
    report = make_report([run])
    stages = {stage.name: stage for stage in report.stages}
    assert sum(stage.total_ms for stage in report.stages) == pytest.approx(report.totals.decode_ms)
    assert sum(stage.share for stage in report.stages) == pytest.approx(1)
    assert stages["verify"].total_ms == pytest.approx(sum(8 + i for i in range(7)))
    assert stages["draft"].total_ms == pytest.approx(7 * 0.5)
    assert stages["other"].total_ms == pytest.approx(7 * 1)
    assert stages["draft_extend"].total_ms == pytest.approx(6 * 1.875)
    assert [part.total_ms for part in report.layers] == pytest.approx([6, 3, 1.5, 0.75])
    assert sum(part.total_ms for part in report.layers) == pytest.approx(stages["draft_extend"].total_ms)


def test_over_time_by_context_and_histogram(run: Path) -> None:
    report = make_report([run])
    assert [part.rounds for part in report.over_time] == [1] * 7
    assert [part.acceptance_length for part in report.over_time] == [1 + c for _, c, _ in ROUNDS]
    assert report.over_time[0].last - report.over_time[0].first == pytest.approx(0.011375)
    assert report.over_time[0].first == pytest.approx(0.025)  # after the prefill
    assert report.over_time[2].tok_s == pytest.approx(4 / 13.375 * 1000)
    contexts = [61]
    for _, _, emitted in ROUNDS[:-1]:
        contexts.append(contexts[-1] + emitted)
    short = [r for r, context in zip(ROUNDS, contexts, strict=True) if context < 64]
    found = report.by_context
    assert [(part.first, part.last, part.rounds) for part in found] == [(0, 63, len(short)), (64, 127, 7 - len(short))]
    assert found[0].acceptance_rate == sum(c for _, c, _ in short) / sum(p for p, _, _ in short)
    assert report.emitted_histogram == [sum(e == n for _, _, e in ROUNDS) for n in (1, 2, 3, 4)]


def test_worst_rounds_show_what_was_proposed_and_what_came_before(run: Path) -> None:
    worst = make_report([run]).worst_rounds
    per_token = sorted(((1.5 + 8 + i + (1.875 if i < 6 else 0)) / e, i) for i, (_, _, e) in enumerate(ROUNDS))[::-1]
    assert [one.round for one in worst] == [i for _, i in per_token[:5]]
    assert [one.ms_per_token for one in worst] == pytest.approx([ms for ms, _ in per_token[:5]])
    slowest = worst[0]
    assert (slowest.round, slowest.step, slowest.num_requests) == (5, 6, 1)
    assert [(t.token_id, t.source, t.is_correct) for t in slowest.drafts] == [(40, 0, False)]
    assert slowest.bonus is not None
    assert (slowest.bonus.token_id, slowest.bonus.is_correct) == (66, True)
    assert [t.source for t in slowest.before][-3:] == [0, 1, -1]
    last = next(one for one in worst if one.round == 6)  # cut by a stop: the bonus token was not delivered
    assert last.bonus is not None
    assert not last.bonus.is_correct


def test_the_worst_request_has_the_fewest_tokens_per_round(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    for name, correct in (("good", 3), ("bad", 0), ("middling", 1), ("short", 0)):
        made.extend(name, 5)
        for _ in range(3 if name == "short" else 5):
            made.decode([(name, 3, correct, correct + 1)], verify=5)
        made.finish(name)
    worst = make_report([made.close()]).worst_requests
    assert [(one.request_id, one.emitted_per_round) for one in worst] == [("bad", 1), ("middling", 2), ("good", 4)]
    assert [token.source for token in worst[1].tokens] == [-2] + 5 * [0, -1]


def test_a_batch_counts_its_wall_time_once_and_one_worst_round(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    for name in ("a", "b"):
        made.extend(name, 5)
    made.decode([("a", 2, 2, 3), ("b", 2, 0, 1)], verify=10)
    for name in ("a", "b"):
        made.finish(name)
    report = make_report([made.close()])
    assert report.totals.decode_ms == 10
    assert report.totals.decode_tok_s == 400
    assert [(one.request_id, one.num_requests) for one in report.worst_rounds] == [("b", 2)]


def test_prompt_lookup_is_a_source_of_its_own(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    made.extend("a", 5)
    made.decode([("a", 5, 4, 5)], verify=10, source=SOURCE_NGRAM)
    made.decode([("a", 2, 1, 2)], verify=10, layers=(1, 1))
    made.finish("a")
    report = make_report([made.close()])
    assert [(d.name, d.proposed, d.correct) for d in report.drafters] == [
        ("MTP layer 1", 1, 1),
        ("MTP layer 2", 1, 0),
        ("prompt lookup", 5, 4),
    ]
    assert report.costs.acceptance == [1.0, 0.0]  # of what the layers drafted


def test_runs_are_laid_one_after_another(tmp_path: Path) -> None:
    folders = []
    for number in range(2):
        made = HandMade(tmp_path / str(number), clock_ns=10**9 * (7 - number))  # the second clock began again
        made.extend("a", 5, ms=10)
        made.decode([("a", 1, 1, 2)], verify=10)
        made.finish("a")
        folders.append(made.close())
    report = make_report(folders)
    assert [(part.first, part.last) for part in report.over_time] == [
        pytest.approx((0.01, 0.02)),
        pytest.approx((0.03, 0.04)),
    ]
    assert report.totals.requests == 2
    assert all(len(one.before) == 1 for one in report.worst_rounds)  # each "a" is found in its own folder


def test_whose_round_it_was_cannot_be_told_where_runs_in_one_folder_share_ids(tmp_path: Path) -> None:
    for _ in range(2):
        made = HandMade(tmp_path)
        made.extend("a", 5, ms=10)
        made.decode([("a", 1, 1, 2)], verify=10)
        made.finish("a")
        made.close()
    assert all(one.before == [] for one in make_report([tmp_path]).worst_rounds)


def test_plain_decoding_beside_speculation_is_no_worst_request(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    for name, proposed in (("plain", 0), ("drafted", 2)):
        made.extend(name, 5)
        for _ in range(5):
            made.decode([(name, proposed, proposed // 2, proposed // 2 + 1)], verify=5)
        made.finish(name)
    assert [one.request_id for one in make_report([made.close()]).worst_requests] == ["drafted", "plain"]


def test_files_and_folders_give_the_same(run: Path) -> None:
    whole, parts = make_report([run]), make_report([run / "requests.jsonl", run / "rounds.jsonl"])
    assert asdict(whole) | {"sources": []} == asdict(parts) | {"sources": []}
    json.dumps(asdict(whole), allow_nan=False)


def test_one_kind_alone_says_what_is_missing(run: Path) -> None:
    assert any("no decode step" in note for note in make_report([run / "requests.jsonl"]).notes)
    steps_only = make_report([run / "rounds.jsonl"])
    assert any("no request records" in note for note in steps_only.notes)
    assert steps_only.totals.unfinished == 1


def test_other_runs_teach_the_cost_model_alone(run: Path, tmp_path: Path) -> None:
    plain = HandMade(tmp_path / "plain", method="none")
    plain.extend("p", 5)
    for _ in range(30):
        plain.decode([("p", 0, 0, 1)], verify=6, other=1)
    plain.finish("p")
    alone, helped = make_report([run]), make_report([run], costs_from=[plain.close()])
    assert asdict(helped) | {"costs": None} == asdict(alone) | {"costs": None}
    step = helped.costs.batches[0].depths[0]
    assert (step.measured_steps, step.measured_round_ms) == (30, pytest.approx(7))


def test_lost_steps_failures_and_mixtures_are_noted(run: Path, tmp_path: Path) -> None:
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(lines[:-2]))
    other = HandMade(tmp_path / "other", method="none")
    other.extend("z", 5)
    other.finish("z", reason="error", error="out of KV", model="another")
    notes = "\n".join(make_report([run, other.close()]).notes)
    assert "count 7 rounds, the step records hold 5 of theirs" in notes
    assert "1 requests failed: out of KV" in notes
    assert "another, made-up, multi-layer-eagle, none" in notes
    assert "tokens of made-up are shown as ids" in notes


def test_a_cut_off_line_is_an_error_or_a_note(run: Path) -> None:
    path = run / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"rounds\.jsonl:8: the last line is cut off"):
        make_report([run])
    report = make_report([run], skip_truncated=True)
    assert report.totals.rounds == 6
    assert "rounds.jsonl:8" in report.notes[0]


def test_wrong_paths(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for paths, named in (
        ([tmp_path / "nowhere"], "nowhere"),
        ([tmp_path / "empty"], "holds no records"),
        ([run, run / "rounds.jsonl"], "named twice"),
    ):
        with pytest.raises(UserError, match=named):
            make_report(paths)
    damaged = (run / "rounds.jsonl").read_text().replace('"num_correct_drafts": 3', '"num_correct_drafts": 9')
    (run / "rounds.jsonl").write_text(damaged)
    with pytest.raises(UserError, match="does not add up; the records are damaged"):
        make_report([run])


def test_texts_come_from_the_model_and_wrong_models_are_refused(run: Path, toy_model: Path) -> None:

    vocabulary = Tokenizer.from_file(str(toy_model / "tokenizer.json"))
    report = make_report([run], model=str(toy_model))
    (request,) = report.worst_requests
    assert "".join(token.text or "" for token in request.tokens) == vocabulary.decode(
        [t.token_id for t in request.tokens]
    )
    assert report.notes == []
    with pytest.raises(UserError, match="no-such-model"):
        make_report([run], model="no-such-model")


def test_medians_are_those_of_the_requests(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    times = [100.0, 500.0, 120.0, 130.0, 90.0]
    for index, ms in enumerate(times):
        made.extend(str(index), 5)
        made.finish(str(index), e2e_ms=ms)
    totals = make_report([made.close()]).totals
    assert totals.e2e_ms is not None
    assert totals.e2e_ms.p50 == median(times)
    assert totals.token_ms is None  # one token each: there is none after the first
