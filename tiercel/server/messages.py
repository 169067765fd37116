"""What travels between a server and the engine's process: plain frozen objects, pickled over one pipe."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.core.batch import StepRecord
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.logprobs import TokenLogprobs
from tiercel.core.sampling_params import SamplingParams
from tiercel.observability.metrics import Load
from tiercel.observability.records import RequestRecord


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine's process is started with."""

    engine: EngineConfig
    spec: SpecConfig
    trace: TraceConfig


@dataclass(frozen=True, slots=True)
class Add:
    """Run a request; ``trace_headers`` and ``timeout_s`` as in ``Engine.add_request``."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    trace_headers: dict[str, str] | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Withdraw a request; one that has just ended is no mistake."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """Abort what runs, flush traces and records, and exit with code 0."""


@dataclass(frozen=True, slots=True)
class Watch:
    """From now on tell of the steps themselves, or no longer."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Ask for the metrics in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class SetTraceLevel:
    """See ``LLM.set_trace_level``."""

    level: int


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Have PyTorch's profiler watch the engine's thread."""


@dataclass(frozen=True, slots=True)
class StopProfile:
    """End it, and write a Chrome trace into a folder; its path is the answer."""

    folder: str


Question = ReadMetrics | SetTraceLevel | StartProfile | StopProfile


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, with the number that its answer carries."""

    number: int
    question: Question


Command = Add | Abort | Watch | Ask | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded.

    Args:
        model_name: the engine's name for it.
        max_model_len: context in tokens.
        max_request_len: tokens of a prompt and its answer at most, by context and KV pool.
        vocab_size: token ids are below.
        num_slots: requests that run at once.
        drafting: who drafts, how deep, and why, in words.
        method: who drafts.
        num_steps: drafts per round at most.
    """

    model_name: str
    max_model_len: int
    max_request_len: int
    vocab_size: int
    num_slots: int
    drafting: str
    method: str
    num_steps: int


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The model, the draft or a setting cannot work; the process exits."""

    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request cannot run; nothing was queued or recorded."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request's new tokens of one step, and where each came from; the last of a request carries its ``record``."""

    request_id: str
    token_ids: list[int]
    sources: list[int]
    record: RequestRecord | None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """The loop has turned once, idle or not. ``step`` is there while somebody watches, if the turn played a step."""

    tokens: list[Tokens]
    load: Load
    step: StepRecord | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an ``Ask``; ``mistake`` in its place where the user asked for what cannot be."""

    number: int
    text: str = ""
    mistake: str | None = None


Event = Ready | CannotStart | Refused | Stepped | Reply
