"""What one engine step hands to the worker, and what it gets back. One type per hand-off."""

from dataclasses import dataclass, field
from enum import StrEnum

from tiercel.core.request import Request
from tiercel.core.tree import depth_of


class ForwardMode(StrEnum):
    """Extend reads known tokens (prefill, a chunk of it, or a resume); decode plays one round."""

    EXTEND = "extend"
    DECODE = "decode"


@dataclass(slots=True)
class Batch:
    """One step's work, made by the scheduler.

    ``extend_ends[i]`` (extend only): the target reads tokens ``num_computed .. extend_ends[i]`` of request i.
    Where that reaches the last known token of a request that has no output yet, the step also samples its first token.
    """

    mode: ForwardMode
    reqs: list[Request]
    extend_ends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What the target said about one round, on the host, request by request.

    ``num_correct_drafts_per_req_cpu[i]`` counts accepted drafts (no bonus); ``bonus_token_ids[i]`` is the target's token
    after the last of them; ``draft_token_ids[i]`` are the drafts as they were proposed, and
    ``accepted[i]`` says which were right.
    """

    draft_token_ids: list[list[int]]
    num_correct_drafts_per_req_cpu: list[int]
    bonus_token_ids: list[int]
    accepted: list[list[int]]


@dataclass(frozen=True, slots=True)
class RequestRound:
    """One request's part in one round. ``born_step`` is the engine step whose draft extend made the drafts (None: there are
    none, or they were looked up in the round itself).

    Drafts that form a tree have ``draft_parents`` (see ``core.tree``); the accepted path comes first, so that the leading
    ``num_correct_drafts`` are the correct ones in any case. ``bonus_token_id`` is -1 where the target's logits were NaN; it is
    then not emitted.
    """

    request_id: str
    round: int
    context_len: int
    draft_token_ids: tuple[int, ...]
    draft_layers: tuple[int, ...]
    born_step: int | None
    num_correct_drafts: int
    bonus_token_id: int
    num_emitted_tokens: int
    draft_parents: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Positions that the drafts reach: their number, unless they form a tree."""
        return depth_of(self.draft_parents, len(self.draft_token_ids))


@dataclass(frozen=True, slots=True)
class RequestExtend:
    """One request's part in one extend step: target rows ``start .. end`` were read."""

    request_id: str
    start: int
    end: int
    sampled_token_id: int | None


@dataclass(slots=True)
class StepRecord:
    """One engine step, in nanoseconds of ``time.perf_counter_ns`` (monotonic, one process).

    Decode: ``start <= draft_start <= draft_end <= verify_start <= verify_end <= draft_extend_start <= draft_extend_end <= end``.
    Extend: the draft stage is empty and "verify" holds the target's forward. ``start_ns``/``end_ns`` are set by the engine
    loop around scheduling and output handling, so that wall = draft + verify + draft extend + other.
    ``layer_end_ns[i]`` closes MTP layer i inside the draft extend; empty when no layer ran or one graph fused them.
    ``num_steps`` MTP layers could draft in this step's draft extend (K), and ``depth_reason`` says why (``core.depths.REASONS``).
    ``clock`` says what the times are: ``host`` (the device is the host) or ``host-synchronized`` (the host's clock after
    waiting for the device, so that launch times are never passed off as device times).
    """

    step: int
    mode: ForwardMode
    method: str
    clock: str = "host"
    start_ns: int = 0
    draft_start_ns: int = 0
    draft_end_ns: int = 0
    verify_start_ns: int = 0
    verify_end_ns: int = 0
    draft_extend_start_ns: int = 0
    draft_extend_end_ns: int = 0
    end_ns: int = 0
    layer_end_ns: list[int] = field(default_factory=list)
    num_steps: int = 0
    depth_reason: str = "fixed"
    rounds: list[RequestRound] = field(default_factory=list)
    extends: list[RequestExtend] = field(default_factory=list)
    num_waiting: int = 0
    kv_slots_used: int = 0
    kv_slots_total: int = 0

    @property
    def stage_ns(self) -> dict[str, int]:
        """Exclusive nanoseconds per stage, ``other`` included; they sum to ``end_ns - start_ns``."""
        stages = {
            "draft": self.draft_end_ns - self.draft_start_ns,
            "verify": self.verify_end_ns - self.verify_start_ns,
            "draft_extend": self.draft_extend_end_ns - self.draft_extend_start_ns,
        }
        stages["other"] = self.end_ns - self.start_ns - sum(stages.values())
        return stages


@dataclass(frozen=True, slots=True)
class GenerationBatchResult:
    """What one step produced. Tokens are already appended to the requests; ``num_emitted[i]`` of them are new.

    ``num_correct_drafts_per_req_cpu`` is always there, tracing on or off (empty for an extend step).
    """

    num_emitted: list[int]
    num_correct_drafts_per_req_cpu: list[int]
    can_run_graph: bool
    record: StepRecord
