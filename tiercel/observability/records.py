"""Records: one JSON line per request, and one per engine step with its rounds. Written by a sink, read back as objects."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tiercel.core.batch import StepRecord
from tiercel.core.errors import UserError
from tiercel.core.request import Request
from tiercel.observability.record_files import REQUESTS, ROUNDS, OnTruncated, RotatingFile, read_rows, record_files
from tiercel.observability.req_time_stats import ReqTimeStats
from tiercel.observability.trace import to_epoch_ns
from tiercel.observability.typed_json import MisfitError, decoder

SCHEMA_VERSION = 1
"""Counts up when a field goes or changes its meaning; readers pass over fields that they do not know."""

SCHEMAS = {
    kind: Path(__file__).parent / "schema" / f"{kind}.v{SCHEMA_VERSION}.schema.json" for kind in ("request", "step")
}
"""The published JSON schemas (draft 2020-12) of a line of ``requests.jsonl`` and of ``rounds.jsonl``."""

Record = TypeVar("Record")


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
    stop_reason: int | str | None = None
    """The stop text or stop token that ended it; None for EOS and any other end."""

    @property
    def generation_ms(self) -> float | None:
        """Milliseconds from the first token to the end."""
        first = self.time_to_first_token_ms
        return None if first is None else self.e2e_ms - first

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, per second of generation (prefill left out); None below two tokens."""
        if self.generation_ms is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.generation_ms * 1e3


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
        sampling=req.sampling.to_json() | {"seed": req.seed},
        arrival_unix_s=to_epoch_ns(stats.created_ns) / 1e9,
        prompt_tokens=req.num_prompt_tokens,
        completion_tokens=len(req.output_token_ids),
        finish_reason=req.finish_reason.value,
        stop_reason=req.stop_reason,
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
    """Appends to ``requests.jsonl`` and ``rounds.jsonl`` in a folder, or to the files that follow them.

    Args:
        folder: made if it is not there.
        max_bytes: see ``RotatingFile``.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._requests = RotatingFile(folder, REQUESTS, max_bytes)
            self._rounds = RotatingFile(folder, ROUNDS, max_bytes)
        except OSError as error:
            raise UserError(f"cannot write records to {folder}: {error.strerror}") from error

    def on_step(self, record: StepRecord) -> None:
        stage_ms = {stage: ns / 1e6 for stage, ns in record.stage_ns.items()}
        rounds, extends = ([_row(part) for part in parts] for parts in (record.rounds, record.extends))
        line = {"schema_version": SCHEMA_VERSION, **_row(record), "rounds": rounds, "extends": extends}
        self._rounds.append(json.dumps(line | {"stage_ms": stage_ms}))

    def on_request(self, record: RequestRecord, _: ReqTimeStats) -> None:
        self._requests.append(json.dumps(_row(record)))

    def close(self) -> None:
        self._requests.close()
        self._rounds.close()


def _row(record: Any) -> dict[str, Any]:
    """Fields as they are: ``asdict`` would copy every list first."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def read_requests(path: Path, on_truncated: OnTruncated | None = None) -> Iterator[RequestRecord]:
    """Typed request records, one line at a time.

    Args:
        path: a file, or a folder whose ``requests*.jsonl`` are walked from the oldest on.
        on_truncated: is told of a last line that is cut off, which is then left out; None raises.

    Raises:
        UserError: naming file and line, for a broken or truncated line or another schema version.
    """
    return _records(_files(path, REQUESTS), RequestRecord, on_truncated)


def read_rounds(path: Path, on_truncated: OnTruncated | None = None) -> Iterator[StepRecord]:
    """Typed step records of a file, or of a folder's ``rounds*.jsonl``; else as ``read_requests``."""
    return _records(_files(path, ROUNDS), StepRecord, on_truncated)


def holds_requests(path: Path) -> bool:
    """Whether a file's first line is a request record (else it holds step records, or nothing that can be read)."""
    _, row = next(read_rows(path, lambda _: None), ("", {}))
    return "finish_reason" in row


def _files(path: Path, stem: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = record_files(path, stem)
    if not found:
        raise UserError(f"{path} holds no {stem}.jsonl: give the folder that --records-out named, or a file")
    return found


def _records(files: Iterable[Path], kind: type[Record], on_truncated: OnTruncated | None) -> Iterator[Record]:
    decode = decoder(kind)
    for path in files:
        for where, row in read_rows(path, on_truncated):
            version = row.get("schema_version")
            if version != SCHEMA_VERSION:
                raise UserError(f"{where}: schema version {version}, this reader knows {SCHEMA_VERSION}")
            try:
                yield decode(row)
            except MisfitError as error:
                raise UserError(f"{where}: not a {kind.__name__} ({error})") from error
