"""Before any route: the request's name comes back in ``X-Request-Id``, and whoever has no key is sent away."""

import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.server.errors import ApiError, error_response
from tiercel.server.service import REQUEST_ID

OPEN_PATHS = ("/health", "/ready", "/metrics", "/version")
"""For probes and scrapers, which have no key; the live page's files are open too, since it is there that people type theirs."""


class Edge:
    """ASGI middleware.

    Args:
        app: what comes after.
        api_key: None lets everybody in.
        count: told the route and the status of each response.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, count: Callable[[str, int], None]) -> None:
        self._count = count
        self._app, self._key = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID) or secrets.token_hex(12)
        if REQUEST_ID not in headers:
            scope["headers"] = [*scope["headers"], (REQUEST_ID.lower().encode(), name.encode())]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
                route = scope.get("route")
                self._count(route.path if isinstance(route, Route) else "other", message["status"])
            await send(message)

        if self._is_welcome(scope, headers):
            await self._app(scope, receive, named)
        else:
            denial = ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
            denial.code, denial.headers = "invalid_api_key", {"WWW-Authenticate": "Bearer"}
            await error_response(denial)(scope, receive, named)

    def _is_welcome(self, scope: Scope, headers: Headers) -> bool:
        if self._key is None or _is_open(scope["path"]) or scope["method"] == "OPTIONS":
            return True
        return secrets.compare_digest(headers.get("authorization", "").encode(), self._key)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == "/" or path.startswith("/page/")
