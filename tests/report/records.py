"""Records made by hand: a run is a list of rounds with given times, written as the engine would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiercel.core.acceptance import SpecCounts
from tiercel.core.batch import ForwardMode, RequestExtend, RequestRound, StepRecord
from tiercel.observability.records import RecordsSink, RequestRecord

MS = 1_000_000


@dataclass
class HandMade:
    """Steps one after another on one clock; ``rounds`` of a step are (request, drafts, correct, emitted)."""

    folder: Path
    method: str = "multi-layer-eagle"
    clock_ns: int = 5_000 * MS
    steps: int = 0
    spec: dict[str, SpecCounts] = field(default_factory=dict)
    output: dict[str, list[int]] = field(default_factory=dict)
    sources: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sink = RecordsSink(self.folder)

    def extend(self, request_id: str, prompt: int, ms: float = 20, token: int = 65) -> None:
        """A prefill that gives the first token."""
        start = self.clock_ns
        self.clock_ns += round(ms * MS)
        record = StepRecord(
            self.steps,
            ForwardMode.EXTEND,
            self.method,
            start_ns=start,
            **dict.fromkeys(("draft_start_ns", "draft_end_ns", "verify_start_ns"), start),
            **dict.fromkeys(("verify_end_ns", "draft_extend_start_ns", "draft_extend_end_ns", "end_ns"), self.clock_ns),
            extends=[RequestExtend(request_id, 0, prompt, token)],
        )
        self.steps += 1
        self.spec[request_id] = SpecCounts()
        self.output[request_id], self.sources[request_id] = [token], [-2]
        self.prompts[request_id] = prompt
        self.sink.on_step(record)

    def decode(
        self,
        rounds: Sequence[tuple[str, int, int, int]],
        *,
        draft: float = 0,
        verify: float,
        layers: Sequence[float] = (),
        tail: float = 0,
        other: float = 0,
        source: int | None = None,
    ) -> None:
        """A decode step with stage times in milliseconds; ``layers`` is each MTP layer's share of the draft extend."""
        edges = [self.clock_ns]
        for ms in (other, draft, verify, *layers, tail):
            edges.append(edges[-1] + round(ms * MS))
        parts = []
        for name, proposed, correct, emitted in rounds:
            ids = tuple(40 + i for i in range(proposed))
            sources = tuple(range(proposed)) if source is None else (source,) * proposed
            context = self.prompts[name] + len(self.output[name])
            number = self.spec[name].num_rounds
            born = self.steps - 1 if proposed else None
            parts.append(RequestRound(name, number, context, ids, sources, born, correct, 66, emitted))
            self.spec[name].add_round(proposed, correct, emitted)
            self.output[name] += [*ids[:correct], 66][:emitted]
            self.sources[name] += [*sources[:correct], -1][:emitted]
        record = StepRecord(
            self.steps,
            ForwardMode.DECODE,
            self.method,
            start_ns=edges[0],
            draft_start_ns=edges[1],
            draft_end_ns=edges[2],
            verify_start_ns=edges[2],
            verify_end_ns=edges[3],
            draft_extend_start_ns=edges[3],
            draft_extend_end_ns=edges[-1],
            end_ns=edges[-1],
            layer_end_ns=edges[4:-1],
            rounds=parts,
        )
        self.steps += 1
        self.clock_ns = edges[-1]
        self.sink.on_step(record)

    def finish(self, request_id: str, *, reason: str = "length", **changes: Any) -> None:
        """The record of a request's end."""
        spec = self.spec.get(request_id, SpecCounts())
        ids, sources = self.output.get(request_id, []), self.sources.get(request_id, [])
        values: dict[str, Any] = {
            "request_id": request_id,
            "model": "made-up",
            "method": self.method,
            "num_steps": 3,
            "sampling": {},
            "arrival_unix_s": 1e9,
            "prompt_tokens": self.prompts.get(request_id, 3),
            "completion_tokens": len(ids),
            "finish_reason": reason,
            "error": None,
            "queue_ms": 1.0 if ids else None,
            "time_to_first_token_ms": 20.0 if ids else None,
            "e2e_ms": 120.0,
            "num_preemptions": 0,
            "token_ids": tuple(ids),
            "token_sources": tuple(sources),
            "spec": spec.to_metrics(max(3, spec.max_depth), detailed=True),
        }
        self.sink.on_request(RequestRecord(**values | changes), SimpleNamespace())  # type: ignore[arg-type]

    def close(self) -> Path:
        """The folder, complete."""
        self.sink.close()
        return self.folder
