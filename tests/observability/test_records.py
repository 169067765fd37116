"""Record files: schema, rotation, and reading what was written."""

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.scripted import scripted_engine
from tiercel.core.batch import ForwardMode, RequestExtend, RequestRound, StepRecord
from tiercel.core.config import TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.observability.record_files import RotatingFile, record_files
from tiercel.observability.records import (
    SCHEMAS,
    RecordsSink,
    RequestRecord,
    holds_requests,
    read_requests,
    read_rounds,
)


def step(number: int, *, emitted: int = 1) -> StepRecord:
    part = RequestRound("a", number, 9 + number, (5, 6), (0, 1), number - 1 if number else None, 1, 7, emitted)
    times = dict(zip(TIMES, range(100, 900, 100), strict=True))
    return StepRecord(number, ForwardMode.DECODE, "multi-layer-eagle", rounds=[part], layer_end_ns=[650, 690], **times)


TIMES = [
    f"{name}_ns"
    for name in (
        *("start", "draft_start", "draft_end", "verify_start", "verify_end"),
        *("draft_extend_start", "draft_extend_end", "end"),
    )
]


@pytest.fixture
def records(toy_target: LoadedTarget, tmp_path: Path) -> Path:
    """What a run leaves: requests that end by length, one aborted in the middle, one that never began."""
    trace = TraceConfig(records_out=tmp_path / "records")
    engine = scripted_engine(toy_target, lambda r, d: r.token_ids[-1:] * d, 3, trace=trace)
    for name, count in (("a", 9), ("b", 1), ("c", 40)):
        engine.add_request(name, [7, 30, 99, 12], SamplingParams(max_tokens=count, temperature=0.5))
    for _ in range(3):
        engine.step()
    engine.abort("c")
    engine.add_request("waits", [7], SamplingParams())
    engine.close()
    return tmp_path / "records"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.parametrize(("kind", "stem"), [("request", "requests"), ("step", "rounds")])
def test_real_output_is_what_the_published_schema_says(kind: str, stem: str, records: Path) -> None:
    schema = json.loads(SCHEMAS[kind].read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    written = rows(records / f"{stem}.jsonl")
    assert len(written) >= 3
    for row in written:
        validator.validate(row)
    for name in schema["required"]:
        assert not validator.is_valid({k: v for k, v in written[0].items() if k != name}), name
    assert not validator.is_valid(written[0] | {"schema_version": 2})


def test_the_schemas_describe_every_field_that_is_written(records: Path) -> None:
    def described(schema: dict[str, Any], value: Any, where: str) -> Iterator[str]:
        if isinstance(value, dict):
            assert set(schema["properties"]) == set(schema["required"]) == set(value), where
            for name, inner in value.items():
                yield from described(schema["properties"][name], inner, f"{where}.{name}")
        elif isinstance(value, list) and value:
            yield from described(schema["items"], value[0], f"{where}[]")
        else:
            yield where

    for kind, stem in (("request", "requests"), ("step", "rounds")):
        schema = json.loads(SCHEMAS[kind].read_text())
        assert [where for row in rows(records / f"{stem}.jsonl") for where in described(schema, row, kind)]
    step_schema = json.loads(SCHEMAS["step"].read_text())["properties"]
    for name, part in (("rounds", RequestRound), ("extends", RequestExtend)):
        assert set(step_schema[name]["items"]["properties"]) == {f.name for f in fields(part)}


def test_every_object_reads_back_as_it_was(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    written = [step(0), step(1, emitted=2)]
    extend = StepRecord(2, ForwardMode.EXTEND, "none", extends=[RequestExtend("a", 0, 4, None)], num_waiting=3)
    for record in (*written, extend):
        sink.on_step(record)
    sink.close()
    assert list(read_rounds(tmp_path)) == [*written, extend]


def test_requests_read_back_with_their_types(records: Path) -> None:
    found = {r.request_id: r for r in read_requests(records)}
    assert set(found) == {"a", "b", "c", "waits"}
    for record in found.values():
        assert isinstance(record, RequestRecord)
        assert isinstance(record.token_ids, tuple)
        assert len(record.token_ids) == len(record.token_sources) == record.completion_tokens
    assert found["waits"].time_to_first_token_ms is None
    assert found["c"].finish_reason == "abort"
    assert found["a"].sampling["temperature"] == 0.5


def test_rotation_splits_no_line_and_loses_none(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path, max_bytes=2000)
    for number in range(40):
        sink.on_step(step(number))
    sink.close()
    files = record_files(tmp_path, "rounds")
    assert [path.name for path in files[:3]] == ["rounds.jsonl", "rounds.1.jsonl", "rounds.2.jsonl"]
    assert len(files) > 10  # so that 10 must come after 9, not after 1
    for path in files:
        assert path.stat().st_size <= 2000
        assert path.read_bytes().endswith(b"}\n")
    assert [r.step for r in read_rounds(tmp_path)] == list(range(40))
    assert [r.step for r in read_rounds(files[3])] == [r["step"] for r in rows(files[3])]


def test_a_line_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    lines = ["a" * 10, "b" * 100, "c" * 10, "d" * 10]
    file = RotatingFile(tmp_path, "x", max_bytes=30)
    for line in lines:
        file.append(line)
    file.close()
    assert [p.read_text().split() for p in record_files(tmp_path, "x")] == [lines[:1], lines[1:2], lines[2:]]


def test_a_second_run_goes_on_in_the_newest_file(tmp_path: Path) -> None:
    for run in range(3):
        sink = RecordsSink(tmp_path, max_bytes=1500)
        for number in range(5):
            sink.on_step(step(run * 5 + number))
        sink.close()
    assert [r.step for r in read_rounds(tmp_path)] == list(range(15))
    unlimited = RecordsSink(tmp_path)
    newest = record_files(tmp_path, "rounds")[-1]
    unlimited.on_step(step(15))
    unlimited.close()
    assert record_files(tmp_path, "rounds")[-1] == newest
    assert [r.step for r in read_rounds(newest)][-1] == 15


def test_deleted_old_files_are_no_gap(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path, max_bytes=1)
    for number in range(6):
        sink.on_step(step(number))
    sink.close()
    for name in ("rounds.jsonl", "rounds.2.jsonl"):
        (tmp_path / name).unlink()
    (tmp_path / "rounds.old.jsonl").write_text("no record")
    assert [r.step for r in read_rounds(tmp_path)] == [1, 3, 4, 5]


def test_a_truncated_last_line_is_named_or_left_out(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    for number in range(3):
        sink.on_step(step(number))
    sink.close()
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    reader = read_rounds(tmp_path)
    assert [next(reader).step, next(reader).step] == [0, 1]  # line by line: what comes before the cut is read
    with pytest.raises(UserError, match=r"rounds\.jsonl:3: the last line is cut off.*the 2 lines before it are whole"):
        next(reader)
    heard: list[str] = []
    assert [r.step for r in read_rounds(tmp_path, heard.append)] == [0, 1]
    assert len(heard) == 1
    assert "rounds.jsonl:3" in heard[0]


def test_what_follows_a_crash_is_not_appended_to_half_a_line(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    sink.on_step(step(0))
    sink.close()
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"half')
    sink = RecordsSink(tmp_path)
    sink.on_step(step(1))
    sink.close()
    heard: list[str] = []
    assert [r.step for r in read_rounds(tmp_path, heard.append)] == [0, 1]
    assert len(heard) == 1


def test_a_whole_last_line_needs_no_line_end(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    sink.on_step(step(0))
    sink.close()
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert [r.step for r in read_rounds(path)] == [0]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path, "x")
    file.append("first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append("second, which has no room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.append("third")
    file.close()
    assert (tmp_path / "x.jsonl").read_text() == "first\nthird\n"


Change = Callable[[dict[str, Any]], object]
MISFITS: list[tuple[Change, str]] = [
    (lambda row: row.update(step="7"), "step: '7' is no int"),
    (lambda row: row.update(step=True), "step: True is no int"),
    (lambda row: row.update(mode="sideways"), "mode: 'sideways' is none of extend, decode"),
    (lambda row: row.update(rounds={}), "rounds: {} is no list"),
    (lambda row: row["rounds"].append(3), "rounds: 3 is no object"),
    (lambda row: row["rounds"][0].pop("round"), "rounds: round is missing"),
    (lambda row: row["rounds"][0].update(draft_token_ids=[1, None]), "draft_token_ids: None is no int"),
    (lambda row: row.update(schema_version=99), "schema version 99, this reader knows 1"),
    (lambda row: row.pop("schema_version"), "schema version None"),
]


@pytest.mark.parametrize(("change", "named"), MISFITS, ids=[named for _, named in MISFITS])
def test_a_misfit_is_named_by_file_line_and_field(change: Change, named: str, tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    sink.on_step(step(0))
    sink.on_step(step(1))
    sink.close()
    path = tmp_path / "rounds.jsonl"
    first, second = rows(path)
    change(second)
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    with pytest.raises(UserError) as caught:
        list(read_rounds(path))
    assert f"{path}:2: " in str(caught.value)
    assert named in str(caught.value)


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    sink = RecordsSink(tmp_path)
    sink.on_step(step(0))
    sink.close()
    path = tmp_path / "rounds.jsonl"
    path.write_text(json.dumps(rows(path)[0] | {"from_the_future": [1]}) + "\n")
    assert list(read_rounds(path)) == [step(0)]


def test_a_file_says_which_kind_it_holds(records: Path, tmp_path: Path) -> None:
    assert holds_requests(records / "requests.jsonl")
    assert not holds_requests(records / "rounds.jsonl")
    (tmp_path / "empty").write_text("")
    assert not holds_requests(tmp_path / "empty")


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no requests\.jsonl: give the folder that --records-out named"):
        read_requests(tmp_path)


def test_the_limit_needs_records() -> None:
    with pytest.raises(UserError, match="add --records-out"):
        TraceConfig(records_max_mb=5)
    with pytest.raises(UserError, match="records_max_mb=0"):
        TraceConfig(records_max_mb=0, records_out=Path("x"))


def test_the_setting_reaches_the_files(toy_target: LoadedTarget, tmp_path: Path) -> None:
    trace = TraceConfig(records_out=tmp_path, records_max_mb=1)
    engine = scripted_engine(toy_target, lambda r, d: [], 3, trace=trace)
    engine.pipeline.on_step(big := StepRecord(0, ForwardMode.DECODE, "x" * 600_000))
    engine.pipeline.on_step(big)
    engine.close()
    assert len(record_files(tmp_path, "rounds")) == 2
