"""The application: routes, errors, and what stands before them."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from tiercel.server import chat, completions, control, health, live, tokenizing
from tiercel.server.edge import Edge
from tiercel.server.errors import handle_errors
from tiercel.server.service import Service

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    completions.router,
    tokenizing.router,
    health.router,
    control.router,
    live.router,
)


class ErrorContent(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorContent


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A parameter is wrong; `param` names it."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "The queue is full; `Retry-After` says when to try again."},
    503: {"model": ErrorBody, "description": "The engine is dead or being started, or the server is shutting down."},
}


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a server."""
    config = service.config
    app = FastAPI(
        title="Tiercel",
        version=version("tiercel"),
        docs_url=None,  # its page would come from the network
        redoc_url=None,
        responses=PROBLEMS,
        max_body_size=config.max_body_mb * 10**6,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    handle_errors(app)
    app.add_middleware(Edge, api_key=config.api_key, count=service.metrics.count_response)
    if config.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"])
    _describe_400(app)
    return app


def _describe_400(app: FastAPI) -> None:
    """The description promises what is sent: 400 where FastAPI by itself would send 422."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
