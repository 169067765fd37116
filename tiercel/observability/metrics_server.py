"""``/metrics`` over HTTP, for runs without a server of their own: ``prometheus_client``'s application on a thread."""

from collections.abc import Iterable
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tiercel.core.errors import UserError
from tiercel.observability.metric_store import MetricStore

HOST = "127.0.0.1"
"""Metrics are shown to this machine alone."""
POLL_S = 0.05
"""How long the end may have to wait for the server."""


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes leave no line on stderr."""


class MetricsServer:
    """Answers scrapes until it is closed.

    Args:
        store: what is shown.
        port: 0 takes a free one.

    Raises:
        UserError: the port cannot be used.
    """

    def __init__(self, store: MetricStore, port: int) -> None:
        answer: WSGIApplication = make_wsgi_app(store.registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            return answer({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)  # see MetricStore.exposition

        try:
            self._server = make_server(HOST, port, app, ThreadingWSGIServer, _Quiet)
        except OSError as error:
            raise UserError(
                f"metrics cannot be shown on {HOST}:{port} ({error.strerror}): choose another port, or 0 for a free one"
            ) from error
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="tiercel-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
