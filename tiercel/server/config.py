"""Settings of the HTTP side: where it listens, whom it lets in, how much may wait, and what happens when the engine dies."""

from dataclasses import dataclass
from typing import Literal, get_args

from tiercel.core.config import at_least, one_of
from tiercel.core.errors import UserError

SpecMetrics = Literal["off", "summary", "detailed"]
"""How much of a request's speculation goes into its response (docs/server.md)."""
OnEngineDeath = Literal["restart", "exit"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server meets its clients.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        api_key: clients must send it as a bearer token, on every path but ``/health``, ``/ready``, ``/metrics``, ``/version``
            and the files of the live page; None lets everybody in.
        cors_origins: web pages of these origins may call; ``*`` means all.
        served_model_name: name of the model in the API; None takes the engine's.
        max_queue: requests that may wait beyond those that run; more are refused with 429.
        request_timeout_s: a request ends after so many seconds with what it has; a body's ``timeout_s`` may ask for less.
        drain_s: after SIGTERM, running requests have so many seconds to end; the rest are aborted.
        stuck_s: ``/health`` fails when the engine's loop has not turned for so long.
        on_engine_death: start the engine's process again, or end with exit code 1.
        spec_metrics: what responses say of speculation where the body's ``spec_metrics`` does not choose.
        max_body_mb: larger request bodies (10**6 bytes) are refused with 413.
        events: offer ``/events``, which shows the tokens of every request.
        profile_dir: where ``/stop_profile`` writes; None refuses to profile.

    Raises:
        UserError: a value is outside its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_queue: int = 1024
    request_timeout_s: float = 600.0
    drain_s: float = 30.0
    stuck_s: float = 30.0
    on_engine_death: OnEngineDeath = "restart"
    spec_metrics: SpecMetrics = "summary"
    max_body_mb: int = 16
    events: bool = True
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        at_least("port", self.port, 0)
        if self.port > 65535:
            raise UserError(f"port={self.port} is no port: give 0 (a free one) to 65535")
        at_least("max_queue", self.max_queue, 0)
        at_least("max_body_mb", self.max_body_mb, 1)
        for name in ("request_timeout_s", "drain_s", "stuck_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} is not allowed: give seconds above 0")
        one_of("on_engine_death", self.on_engine_death, get_args(OnEngineDeath))
        one_of("spec_metrics", self.spec_metrics, get_args(SpecMetrics))
        if self.api_key == "":
            raise UserError("api_key is empty: give a key, or leave it out to let everybody in")
