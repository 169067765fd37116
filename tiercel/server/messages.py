"""What travels between a server and the engine's process: plain frozen objects, pickled over one pipe."""

from dataclasses import dataclass

from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
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


Command = Add | Abort | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    model_name: str
    max_model_len: int


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


@dataclass(frozen=True, slots=True)
class Stepped:
    """The loop has turned once, idle or not."""

    tokens: list[Tokens]
    load: Load


Event = Ready | CannotStart | Refused | Stepped
