"""One walk over the records: what the analysis needs is kept, the rest of each line is let go."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Generic, TypeVar

from tiercel.core.acceptance import SpecCounts
from tiercel.core.batch import ForwardMode, RequestRound, StepRecord
from tiercel.core.errors import UserError
from tiercel.core.tree import parent_of
from tiercel.observability.record_files import REQUESTS, ROUNDS, OnTruncated, record_files
from tiercel.observability.records import RequestRecord, holds_requests, read_requests, read_rounds

NUM_WORST = 5
MIN_ROUNDS = 4
"""A request of fewer rounds says too little about its drafts to be called one of the worst."""

Item = TypeVar("Item")
Name = tuple[Path, str]
"""A request by folder and id: runs in different folders use the same ids."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step. ``end_s`` counts engine time from the first record on; ``depth`` is the number of drafts that MTP layers
    proposed for each request, None where requests differ or prompt lookup drafted.
    """

    end_s: float
    stage_ms: dict[str, float]
    wall_ms: float
    num_requests: int
    rows: int
    depth: int | None
    emitted: int
    layer_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One request's round: its step (an index), context and counts; ``source`` is that of its first draft,
    ``depth`` the positions that were drafted for.
    """

    step: int
    context_len: int
    proposed: int
    correct: int
    emitted: int
    source: int | None
    depth: int


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The numbers of a finished request that totals need."""

    first_token_ms: float | None
    token_ms: float | None
    e2e_ms: float


class Worst(Generic[Item]):
    """Keeps the few items of the highest badness."""

    def __init__(self, size: int) -> None:
        self._size, self._order = size, count()
        self._heap: list[tuple[tuple[float, ...], int, Item]] = []

    def offer(self, badness: tuple[float, ...], item: Item) -> None:
        """Keep ``item`` if it is among the worst so far; of equally bad ones the first stays."""
        heapq.heappush(self._heap, (badness, -next(self._order), item))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def items(self) -> list[Item]:
        """The worst first."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


@dataclass(slots=True)
class Gathered:
    """What a walk found."""

    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[DecodeStep] = field(default_factory=list)
    rounds: list[RoundFacts] = field(default_factory=list)
    requests: list[RequestFacts] = field(default_factory=list)
    counts: SpecCounts = field(default_factory=SpecCounts)
    drafters: dict[int, Counter[str]] = field(default_factory=dict)
    extend_ms: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    clocks: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    rounds_by_name: Counter[Name] = field(default_factory=Counter)
    records_by_name: Counter[Name] = field(default_factory=Counter)
    claimed_rounds: int = 0
    worst_requests: Worst[RequestRecord] = field(default_factory=lambda: Worst(NUM_WORST))
    worst_rounds: Worst[tuple[Name, StepRecord, RequestRound]] = field(default_factory=lambda: Worst(NUM_WORST))
    records_of_worst_rounds: dict[Name, RequestRecord] = field(default_factory=dict)


def gather(paths: Sequence[Path], skip_truncated: bool = False) -> Gathered:
    """Walk record folders and files; several runs are laid one after another.

    Args:
        paths: folders that ``--records-out`` named, or files of either kind.
        skip_truncated: leave out a last line that is cut off, with a note, instead of raising.

    Raises:
        UserError: a path holds no records, or a line is broken.
    """
    found = Gathered(sources=[str(path) for path in paths])
    on_truncated = found.notes.append if skip_truncated else None
    files = [file for path in paths for file in _files(path)]
    if len(set(files)) < len(files):
        raise UserError("the same record file is named twice: name each folder or file once")
    of_requests = [holds_requests(file) for file in files]
    _walk_steps(found, [f for f, is_requests in zip(files, of_requests, strict=True) if not is_requests], on_truncated)
    _walk_requests(found, [f for f, is_requests in zip(files, of_requests, strict=True) if is_requests], on_truncated)
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for stem in (ROUNDS, REQUESTS) for file in record_files(path, stem)]
    if not files:
        raise UserError(f"{path} holds no records: give the folder that --records-out named, or a .jsonl file of it")
    return [file for file in files if file.stat().st_size]


def _walk_steps(found: Gathered, files: list[Path], on_truncated: OnTruncated | None) -> None:
    offset_ns, last = 0, None
    for file in files:
        for record in read_rounds(file, on_truncated):
            if last is None or record.step <= last.step or record.start_ns < last.end_ns:  # another run begins
                offset_ns = (last.end_ns + offset_ns if last else 0) - record.start_ns
            last = record
            _take_step(found, record, file.parent, (record.end_ns + offset_ns) / 1e9)


def _take_step(found: Gathered, record: StepRecord, folder: Path, end_s: float) -> None:
    found.clocks[record.clock] += 1
    found.methods[record.method] += 1
    wall_ms = (record.end_ns - record.start_ns) / 1e6
    if record.mode is ForwardMode.EXTEND:
        found.extend_ms += wall_ms
        return
    emitted = sum(part.num_emitted_tokens for part in record.rounds)
    ends = [record.draft_extend_start_ns, *record.layer_end_ns]
    found.steps.append(
        DecodeStep(
            end_s=end_s,
            stage_ms={stage: ns / 1e6 for stage, ns in record.stage_ns.items()},
            wall_ms=wall_ms,
            num_requests=len(record.rounds),
            rows=sum(len(part.draft_token_ids) + 1 for part in record.rounds),
            depth=_common_depth(record.rounds),
            emitted=emitted,
            layer_ms=tuple((end - start) / 1e6 for start, end in pairwise(ends)),
        )
    )
    for part in record.rounds:
        found.rounds_by_name[folder, part.request_id] += 1
        _take_round(found, record, part)
    if record.rounds:  # of a step's rounds one stands for all
        worst = min(record.rounds, key=lambda part: part.num_emitted_tokens)
        found.worst_rounds.offer((wall_ms / worst.num_emitted_tokens,), ((folder, worst.request_id), record, worst))


def _common_depth(rounds: Sequence[RequestRound]) -> int | None:
    depths = {len(part.draft_token_ids) for part in rounds}
    from_layers = all(layer >= 0 for part in rounds for layer in part.draft_layers)
    chains = not any(part.draft_parents for part in rounds)
    return depths.pop() if len(depths) == 1 and from_layers and chains else None


def _take_round(found: Gathered, record: StepRecord, part: RequestRound) -> None:
    proposed, correct, emitted = len(part.draft_token_ids), part.num_correct_drafts, part.num_emitted_tokens
    try:
        found.counts.add_round(proposed, correct, emitted, part.depth)
    except ValueError as error:
        raise UserError(f"step {record.step}, request {part.request_id}: {error}; the records are damaged") from error
    source = part.draft_layers[0] if part.draft_layers else None
    found.rounds.append(
        RoundFacts(len(found.steps) - 1, part.context_len, proposed, correct, emitted, source, part.depth)
    )
    for draft, layer in enumerate(part.draft_layers):
        drafter = found.drafters.setdefault(layer, Counter())
        drafter["proposed"] += 1
        drafter["reached"] += parent_of(part.draft_parents, draft) < correct
        drafter["correct"] += draft < correct


def _walk_requests(found: Gathered, files: list[Path], on_truncated: OnTruncated | None) -> None:
    wanted = {name for name, _, _ in found.worst_rounds.items()}
    for file in files:
        for record in read_requests(file, on_truncated):
            name = (file.parent, record.request_id)
            found.records_by_name[name] += 1
            if name in wanted:
                found.records_of_worst_rounds[name] = record
            _take_request(found, record)


def token_ms(record: RequestRecord) -> float | None:
    """Milliseconds per token after the first; None below two tokens."""
    if record.time_to_first_token_ms is None or record.completion_tokens < 2:
        return None
    return (record.e2e_ms - record.time_to_first_token_ms) / (record.completion_tokens - 1)


def _take_request(found: Gathered, record: RequestRecord) -> None:
    found.requests.append(RequestFacts(record.time_to_first_token_ms, token_ms(record), record.e2e_ms))
    found.models[record.model] += 1
    found.finish_reasons[record.finish_reason] += 1
    found.tokens["prompt"] += record.prompt_tokens
    found.tokens["completion"] += record.completion_tokens
    found.tokens["preemptions"] += record.num_preemptions
    if record.error:
        found.errors[record.error] += 1
    try:
        rounds, proposed, emitted = (
            record.spec[f"num_{what}"] for what in ("spec_steps", "draft_tokens", "emitted_tokens")
        )
    except KeyError as error:
        raise UserError(
            f"request {record.request_id}: its record's spec lacks {error}; the records are damaged"
        ) from error
    found.claimed_rounds += rounds
    if rounds >= MIN_ROUNDS:
        # Plain decoding recorded beside speculation is no bad speculation.
        found.worst_requests.offer((proposed > 0, -emitted / rounds, token_ms(record) or 0.0), record)
