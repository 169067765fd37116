"""Records: one JSON line per request, and one per engine step with its rounds. Written by a sink, read back as objects."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiercel.core.batch import ForwardMode, RequestExtend, RequestRound, StepRecord
from tiercel.core.errors import UserError
from tiercel.core.request import Request
from tiercel.observability.req_time_stats import ReqTimeStats
from tiercel.observability.trace import to_epoch_ns

SCHEMA_VERSION = 1
REQUESTS_FILE, ROUNDS_FILE = "requests.jsonl", "rounds.jsonl"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Everything about one finished request. Times are milliseconds, None where the phase was not reached.

    ``token_sources`` tells where each output token came from: -2 prefill, -1 bonus token, i >= 0 MTP layer i.
    ``sampling`` holds the wishes in force, with the seed that was drawn where none was given.
    ``spec`` is ``SpecCounts.to_metrics(detailed=True)``.
    """

    request_id: str
    model: str
    method: str
    num_steps: int
    sampling: dict[str, Any]
    arrival_unix_s: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str | None
    queue_ms: float | None
    time_to_first_token_ms: float | None
    e2e_ms: float
    num_preemptions: int
    token_ids: tuple[int, ...]
    token_sources: tuple[int, ...]
    spec: dict[str, Any]
    schema_version: int = SCHEMA_VERSION


def request_record(req: Request, stats: ReqTimeStats, model: str, method: str, num_steps: int) -> RequestRecord:
    """The record of a request that has just finished."""
    if req.finish_reason is None or stats.completion_ns is None:
        raise RuntimeError(f"{req.request_id} has not finished")

    def since_arrival(moment: int | None) -> float | None:
        return None if moment is None else (moment - stats.created_ns) / 1e6

    return RequestRecord(
        request_id=req.request_id,
        model=model,
        method=method,
        num_steps=num_steps,
        sampling=asdict(req.sampling) | {"seed": req.seed},
        arrival_unix_s=to_epoch_ns(stats.created_ns) / 1e9,
        prompt_tokens=req.num_prompt_tokens,
        completion_tokens=len(req.output_token_ids),
        finish_reason=req.finish_reason.value,
        error=req.error,
        queue_ms=since_arrival(stats.forward_entry_ns),
        time_to_first_token_ms=since_arrival(stats.prefill_finished_ns),
        e2e_ms=(stats.completion_ns - stats.created_ns) / 1e6,
        num_preemptions=req.num_preemptions,
        token_ids=tuple(req.output_token_ids),
        token_sources=tuple(req.output_sources),
        spec=req.spec.to_metrics(num_steps, detailed=True),
    )


class RecordsSink:
    """Appends to ``requests.jsonl`` and ``rounds.jsonl`` in a folder; a line is written whole and flushed."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._requests = (folder / REQUESTS_FILE).open("a", encoding="utf-8")
            self._rounds = (folder / ROUNDS_FILE).open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write records to {folder}: {error.strerror}") from error

    def on_step(self, record: StepRecord) -> None:
        line = {
            "schema_version": SCHEMA_VERSION,
            **asdict(record),
            "stage_ms": {k: v / 1e6 for k, v in record.stage_ns.items()},
        }
        self._rounds.write(json.dumps(line) + "\n")

    def on_request(self, record: RequestRecord, _: ReqTimeStats) -> None:
        self._requests.write(json.dumps(asdict(record)) + "\n")
        self._requests.flush()
        self._rounds.flush()

    def close(self) -> None:
        self._requests.close()
        self._rounds.close()


def read_requests(path: Path) -> Iterator[RequestRecord]:
    """Typed request records of a file.

    Raises:
        UserError: naming file and line, for a broken line or another schema version.
    """
    for where, row in _lines(path):
        try:
            tuples = {name: tuple(row[name]) for name in ("token_ids", "token_sources")}
            yield RequestRecord(**{**row, **tuples})
        except (KeyError, TypeError) as error:
            raise UserError(f"{where}: not a request record ({error})") from error


def read_rounds(path: Path) -> Iterator[StepRecord]:
    """Typed step records of a file; raises as ``read_requests``."""
    for where, row in _lines(path):
        try:
            fields = {name: row[name] for name in StepRecord.__dataclass_fields__}
            rounds = [_round(r) for r in row["rounds"]]
            extends = [RequestExtend(**e) for e in row["extends"]]
            yield StepRecord(**{**fields, "mode": ForwardMode(row["mode"]), "rounds": rounds, "extends": extends})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a step record ({error})") from error


def _round(row: dict[str, Any]) -> RequestRound:
    tuples = {name: tuple(row[name]) for name in ("draft_token_ids", "draft_layers")}
    return RequestRound(**{**row, **tuples})


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read records {path}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            version = row["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: no record ({error})") from error
        if version != SCHEMA_VERSION:
            raise UserError(f"{where}: schema version {version}, this reader knows {SCHEMA_VERSION}")
        yield where, row
