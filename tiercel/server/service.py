"""What every route works with: the engine, the tokenizer, the settings, and who is being served."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tiercel.models.tokenizer import Tokenizer
from tiercel.server.admission import Gate
from tiercel.server.bodies import Wishes
from tiercel.server.config import ServerConfig
from tiercel.server.engine_client import EngineClient
from tiercel.server.errors import ApiError, invalid
from tiercel.server.feed import Feed
from tiercel.server.generation import Job
from tiercel.server.metrics import ServerMetrics
from tiercel.server.sampling import sampling_params
from tiercel.server.supervisor import Supervisor

REQUEST_ID = "X-Request-Id"
_ID_FORM = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(slots=True)
class Service:
    """One server's state."""

    config: ServerConfig
    supervisor: Supervisor
    tokenizer: Tokenizer
    gate: Gate
    feed: Feed
    metrics: ServerMetrics
    started: int
    """Unix seconds."""

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.supervisor.facts.model_name

    @property
    def engine(self) -> EngineClient:
        """The engine in force.

        Raises:
            ApiError: it is being started again.
        """
        if not self.supervisor.engine.is_alive:
            raise ApiError(503, "the engine is being started again", code="engine_dead", headers={"Retry-After": "5"})
        return self.supervisor.engine

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served.

        Raises:
            ApiError: 404, as OpenAI does.
        """
        if name is not None and name != self.model_name:
            message = f"model: {name!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, "model", "model_not_found")

    def jobs(self, body: Wishes, prompts: Sequence[list[int]], answer_id: str, headers: Request) -> list[Job]:
        """The requests to the engine: ``n`` for each prompt, in OpenAI's order.

        Raises:
            ApiError: a prompt is too long, holds tokens that there are not, or a field is not supported.
        """
        facts, count = self.supervisor.facts, body.n or 1
        timeout_s = min(body.timeout_s or self.config.request_timeout_s, self.config.request_timeout_s)
        trace_headers = {name: headers.headers[name] for name in _TRACE_HEADERS if name in headers.headers}
        jobs: list[Job] = []
        for prompt in prompts:
            room = facts.max_request_len - len(prompt)
            self._check_prompt(prompt, room)
            for sampling in sampling_params(body, room, facts.vocab_size).samples():
                request_id = answer_id if len(prompts) * count == 1 else f"{answer_id}-{len(jobs)}"
                jobs.append(Job(len(jobs), request_id, prompt, sampling, trace_headers, timeout_s))
        return jobs

    def _check_prompt(self, prompt: list[int], room: int) -> None:
        facts = self.supervisor.facts
        if not prompt:
            raise invalid("prompt", "it holds no token")
        if room < 1:
            limit = facts.max_request_len
            message = f"{len(prompt)} tokens leave no room for an answer in {limit}; shorten the prompt"
            raise invalid("prompt", message, "context_length_exceeded")
        if not all(0 <= token < facts.vocab_size for token in prompt):
            raise invalid("prompt", f"token ids go from 0 to {facts.vocab_size - 1}")


def get_service(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(get_service)]


def request_id_of(request: Request) -> str:
    """The caller's name for the request, else one of ours; chosen once.

    Raises:
        ApiError: the name is none that logs and files can carry.
    """
    given = request.headers.get(REQUEST_ID)
    if given is None:
        return secrets.token_hex(12)
    if not _ID_FORM.fullmatch(given):
        raise invalid(REQUEST_ID, "give 1 to 128 letters, digits, '.', '_', ':' or '-'")
    return given
