"""Every Prometheus family that Tiercel exports: one table, from which the exposition is built and docs/metrics.md is held."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tiercel.core.request import FinishReason


class Kind(StrEnum):
    """Prometheus' types, as far as they are in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed by identity: counting is frequent
class Family:
    """One metric family.

    Args:
        name: as it is queried; counters end in ``_total``, times in ``_seconds``.
        kind: its type.
        help: one sentence; it is the HELP line and the documentation.
        labels: beside ``model_name``, which every family has.
        buckets: upper bounds of a histogram, ascending, ``+Inf`` left out.
        vllm: name of the family that means the same in vLLM, exported on demand.
        vllm_labels: vLLM's names of ``labels``, where they differ.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str | None = None
    vllm_labels: tuple[str, ...] | None = None


STAGES = ("draft", "verify", "draft_extend", "other")
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
DRAFTERS = ("layers", "lookup", "plain", "unknown")
"""Who drafted in a round: MTP layers, prompt lookup, nobody; unknown where its step record was dropped."""
ITEM_KINDS = ("mark", "step", "request")
"""What travels through the trace pipeline's queue."""

_STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_REQUEST_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)

ENGINE_INFO = Family(
    "tiercel:engine_info",
    Kind.GAUGE,
    "Always 1; the labels say who drafts, and how deep at most.",
    ("method", "num_steps"),
)
ROUNDS = Family(
    "tiercel:spec_decode_num_rounds_total",
    Kind.COUNTER,
    "Decode rounds, counted once per request in them, with or without drafts (num_spec_steps of the response).",
)
DRAFTS = Family(
    "tiercel:spec_decode_num_drafts_total",
    Kind.COUNTER,
    "Rounds that proposed at least one draft token.",
    vllm="vllm:spec_decode_num_drafts_total",
)
DRAFT_TOKENS = Family(
    "tiercel:spec_decode_num_draft_tokens_total",
    Kind.COUNTER,
    "Draft tokens really proposed.",
    vllm="vllm:spec_decode_num_draft_tokens_total",
)
ACCEPTED_TOKENS = Family(
    "tiercel:spec_decode_num_accepted_tokens_total",
    Kind.COUNTER,
    "Correct drafts: proposed tokens that verification accepted, bonus tokens left out.",
    vllm="vllm:spec_decode_num_accepted_tokens_total",
)
ACCEPTED_PER_POS = Family(
    "tiercel:spec_decode_num_accepted_tokens_per_pos_total",
    Kind.COUNTER,
    "Correct drafts by position, counted from 0; over all rounds: the unconditional acceptance of a position.",
    ("position",),
    vllm="vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
REACHED_PER_POS = Family(
    "tiercel:spec_decode_num_reached_tokens_per_pos_total",
    Kind.COUNTER,
    "Drafts by position whose drafts before were all correct; the denominator of the conditional acceptance.",
    ("position",),
)
EMITTED_TOKENS = Family(
    "tiercel:spec_decode_emitted_tokens_total",
    Kind.COUNTER,
    "Tokens that rounds delivered, after any stop; the first token, which prefill gives, is left out.",
)
DRAFTER_ROUNDS = Family(
    "tiercel:spec_decode_drafter_rounds_total",
    Kind.COUNTER,
    "Rounds by who drafted (by the first draft): layers, lookup (prompt lookup), plain (nobody); unknown: its step was dropped.",
    ("drafter",),
)
DRAFTER_DRAFT_TOKENS = Family(
    "tiercel:spec_decode_drafter_draft_tokens_total",
    Kind.COUNTER,
    "Draft tokens really proposed, by who drafted in that round.",
    ("drafter",),
)
DRAFTER_ACCEPTED_TOKENS = Family(
    "tiercel:spec_decode_drafter_accepted_tokens_total",
    Kind.COUNTER,
    "Correct drafts, by who drafted in that round.",
    ("drafter",),
)
DEPTH_STEPS = Family(
    "tiercel:spec_decode_depth_steps",
    Kind.GAUGE,
    "Depth table in force: MTP layers in use (K) up to so many requests at once (more: with any number), whether prompt lookup "
    "drafts too, and which rule or file says so.",
    ("requests", "lookup", "source"),
)
DEPTH_ROUNDS = Family(
    "tiercel:spec_decode_depth_rounds_total",
    Kind.COUNTER,
    "Decode steps by the MTP layers that their draft extend could use (K), and why: the depth table says so, or it was chosen "
    "while running (docs/drafters.md).",
    ("num_steps", "reason"),
)
STAGE_SECONDS = Family(
    "tiercel:spec_decode_stage_seconds",
    Kind.HISTOGRAM,
    "Exclusive time of a stage in one decode step, whatever the number of requests in it.",
    ("stage",),
    _STEP_BUCKETS,
)
LAYER_SECONDS = Family(
    "tiercel:spec_decode_layer_seconds",
    Kind.HISTOGRAM,
    "Time of one MTP layer, counted from 0, in the draft extend of one decode step.",
    ("layer",),
    _STEP_BUCKETS,
)
PREFILL_SECONDS = Family(
    "tiercel:prefill_step_seconds",
    Kind.HISTOGRAM,
    "Wall time of one extend step: prompts, or chunks of them.",
    buckets=_STEP_BUCKETS,
)
REQUESTS = Family(
    "tiercel:requests_total",
    Kind.COUNTER,
    "Requests that ended, by reason.",
    ("finish_reason",),
    vllm="vllm:request_success_total",
    vllm_labels=("finished_reason",),
)
RUNNING = Family(
    "tiercel:requests_running",
    Kind.GAUGE,
    "Requests that hold KV slots: in prefill or decoding.",
    vllm="vllm:num_requests_running",
)
WAITING = Family(
    "tiercel:requests_waiting",
    Kind.GAUGE,
    "Requests that wait for a first forward, or again after a preemption.",
    vllm="vllm:num_requests_waiting",
)
PREEMPTIONS = Family(
    "tiercel:preemptions_total",
    Kind.COUNTER,
    "Times that a request had to give its KV slots back, counted when the request ends.",
    vllm="vllm:num_preemptions_total",
)
KV_SLOTS_USED = Family(
    "tiercel:kv_slots_used", Kind.GAUGE, "KV slots of pages that requests own; one slot is one token."
)
KV_SLOTS = Family("tiercel:kv_slots", Kind.GAUGE, "KV slots of the pool.")
KV_USAGE = Family(
    "tiercel:kv_usage_ratio", Kind.GAUGE, "Share of the KV slots in use, 0 to 1.", vllm="vllm:kv_cache_usage_perc"
)
PROMPT_TOKENS = Family(
    "tiercel:prompt_tokens_total",
    Kind.COUNTER,
    "Prompt tokens, counted with a request's first token, or with its end if it had none.",
    vllm="vllm:prompt_tokens_total",
)
GENERATION_TOKENS = Family(
    "tiercel:generation_tokens_total",
    Kind.COUNTER,
    "Completion tokens delivered, the first one included.",
    vllm="vllm:generation_tokens_total",
)
TTFT = Family(
    "tiercel:time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Arrival to first token; once per request that had one, observed when the request ends.",
    buckets=_REQUEST_BUCKETS,
    vllm="vllm:time_to_first_token_seconds",
)
INTER_TOKEN = Family(
    "tiercel:inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Time per token after the first: a round that delivers n tokens counts n times with an n-th of the time since the last.",
    buckets=_TOKEN_BUCKETS,
    vllm="vllm:inter_token_latency_seconds",
)
E2E = Family(
    "tiercel:e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "Arrival to end, for every reason to end.",
    buckets=_REQUEST_BUCKETS,
    vllm="vllm:e2e_request_latency_seconds",
)
QUEUE = Family(
    "tiercel:request_queue_time_seconds",
    Kind.HISTOGRAM,
    "Arrival to first forward; requests that never came so far are left out.",
    buckets=_REQUEST_BUCKETS,
    vllm="vllm:request_queue_time_seconds",
)
SPANS_EXPORTED = Family(
    "tiercel:trace_spans_exported_total", Kind.COUNTER, "Spans that the exporter delivered.", ("exporter",)
)
SPANS_FAILED = Family(
    "tiercel:trace_spans_failed_total", Kind.COUNTER, "Spans that the exporter could not deliver.", ("exporter",)
)
SPANS_DROPPED = Family(
    "tiercel:trace_spans_dropped_total",
    Kind.COUNTER,
    "Spans that never reached the exporter: its queue was full, or it was closed.",
    ("exporter",),
)
ITEMS_DROPPED = Family(
    "tiercel:trace_items_dropped_total",
    Kind.COUNTER,
    "Marks, step records and request ends that found the trace pipeline's queue full or closed.",
    ("kind",),
)
QUEUE_ITEMS = Family("tiercel:trace_queue_items", Kind.GAUGE, "Items that wait in the trace pipeline's queue.")
SINK_FAILURES = Family(
    "tiercel:trace_sink_failures_total", Kind.COUNTER, "Calls of a trace sink that raised.", ("sink", "call")
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""All of the above, in that order."""


def markdown_table(families: Sequence[Family] = FAMILIES) -> str:
    """Families as the documentation shows them."""
    rows = ["| family | type | labels | meaning | in vLLM |", "|---|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        vllm = f"`{family.vllm}`" if family.vllm else "–"
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} | {vllm} |")
    return "\n".join(rows)
