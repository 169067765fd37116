"""For operators: metrics, the events of the rounds, the trace level, the profiler, the version."""

import platform
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tiercel.core.errors import UserError
from tiercel.server.errors import ApiError, invalid
from tiercel.server.messages import SetTraceLevel, StartProfile, StopProfile
from tiercel.server.service import Serving
from tiercel.server.streaming import EventStream

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(service: Serving) -> Response:
    """Prometheus' text format (docs/metrics.md)."""
    body, content_type = await service.metrics.exposition()
    return Response(body, media_type=content_type)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Of Tiercel and Python."""
    return {"version": version("tiercel"), "python": platform.python_version()}


@router.get("/events", response_class=EventStream)
async def events(service: Serving, request_id: str | None = None) -> Response:
    """The rounds as they happen, of all requests or of one (docs/server.md)."""
    if not service.config.events:
        raise ApiError(403, "events are off: start the server with --events")
    return EventStream(service.feed.watch(request_id))


@router.api_route("/set_trace_level", methods=["GET", "POST"])
async def set_trace_level(service: Serving, level: Annotated[int, Query(ge=0, le=3)]) -> dict[str, int]:
    """Spans of requests that arrive from now on: 0 none, 1 important stages, 2 draft and verify, 3 everything."""
    try:
        await service.engine.ask(SetTraceLevel(level))
    except UserError as error:
        raise invalid("level", str(error)) from error
    return {"level": level}


@router.post("/start_profile")
async def start_profile(service: Serving) -> dict[str, str]:
    """Have PyTorch's profiler watch the engine."""
    _profile_dir(service.config.profile_dir)
    await service.engine.ask(StartProfile())
    return {"status": "profiling"}


@router.post("/stop_profile")
async def stop_profile(service: Serving) -> dict[str, Any]:
    """End the profile; the answer names the file, a Chrome trace."""
    path = await service.engine.ask(StopProfile(_profile_dir(service.config.profile_dir)))
    return {"status": "written", "path": path}


def _profile_dir(folder: str | None) -> str:
    if folder is None:
        raise ApiError(400, "profiling is off: start the server with --profile-dir DIR")
    return folder
