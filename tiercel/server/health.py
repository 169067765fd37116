"""``/health``, ``/ready``, ``/v1/models``, ``/version``."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from tiercel.server.service import Service, Serving

router = APIRouter()


@router.get("/health")
async def health(service: Serving) -> JSONResponse:
    """200 while the engine's loop turns; an idle one turns too. 503 when it is dead, being started, or stuck."""
    state = _state(service)
    return _answer(service, state, state == "ok")


@router.get("/ready")
async def ready(service: Serving) -> JSONResponse:
    """200 while new requests are welcome: alive, and not shutting down."""
    state = _state(service)
    if state == "ok" and service.gate.is_draining:
        state = "draining"
    return _answer(service, state, state == "ok")


def _state(service: Service) -> str:
    if not service.supervisor.engine.is_alive:
        return "dead"
    return "stuck" if service.supervisor.engine.step_age_s > service.config.stuck_s else "ok"


def _answer(service: Service, state: str, is_well: bool) -> JSONResponse:
    age = round(service.supervisor.engine.step_age_s, 3)
    content = {"status": state, "last_step_age_s": age, "engine_deaths": service.supervisor.num_deaths}
    return JSONResponse(content, 200 if is_well else 503)


@router.get("/v1/models")
async def models(service: Serving) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{model:path}")
async def model(model: str, service: Serving) -> dict[str, Any]:
    """The same, by name."""
    service.check_model(model)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    facts = service.supervisor.facts
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "tiercel",
        "root": facts.model_name,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "speculation": {"method": facts.method, "num_steps": facts.num_steps},
    }
