"""``tiercel serve``: the engine as a service with OpenAI's API."""

import logging
from typing import Annotated

import typer

from tiercel.cli.settings import Settings, takes_settings
from tiercel.server.config import ServerConfig
from tiercel.server.engine_client import EngineDied
from tiercel.server.messages import EngineSettings
from tiercel.server.service import Service
from tiercel.server.serving import serve


@takes_settings(metrics=True)
def command(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="TIERCEL_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    cors_origin: Annotated[
        list[str], typer.Option(help="Web pages of this origin may call; repeatable; * means all.")
    ] = [],  # noqa: B006 typer copies it
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused with 429.")] = 1024,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM.")] = 30.0,
    stuck: Annotated[
        float, typer.Option(help="/health fails when the engine stands still for so many seconds.")
    ] = 30.0,
    on_engine_death: Annotated[str, typer.Option(help="restart, or exit (with code 1).")] = "restart",
    spec_metrics: Annotated[str, typer.Option(help="Acceptance in responses: off, summary or detailed.")] = "summary",
    max_body_mb: Annotated[int, typer.Option(help="Larger request bodies are refused.")] = 16,
    events: Annotated[
        bool, typer.Option("--events/--no-events", help="Offer /events, which shows the tokens of every request.")
    ] = True,
    profile_dir: Annotated[str | None, typer.Option(help="Folder for /stop_profile; without it there is none.")] = None,
    *,
    settings: Settings,
) -> None:
    """Serve OpenAI's API until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key,
        cors_origins=tuple(cors_origin),
        served_model_name=served_model_name,
        max_queue=max_queue,
        request_timeout_s=request_timeout,
        drain_s=drain,
        stuck_s=stuck,
        on_engine_death=on_engine_death,  # type: ignore[arg-type]  # checked there
        spec_metrics=spec_metrics,  # type: ignore[arg-type]
        max_body_mb=max_body_mb,
        events=events,
        profile_dir=profile_dir,
    )
    try:
        serve(EngineSettings(*settings), config, _say_ready)
    except EngineDied as error:
        typer.echo(f"tiercel: {error}", err=True)
        raise typer.Exit(1) from error


def _say_ready(address: str, service: Service) -> None:
    typer.echo(f"drafting: {service.supervisor.facts.drafting}", err=True)
    typer.echo(f"serving {service.model_name} at {address}", err=True)
