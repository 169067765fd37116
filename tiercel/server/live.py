"""The live page at ``/``: its files, all inside the package, and the headers that hold the browser to them."""

from pathlib import Path

from fastapi import APIRouter, Request, Response

from tiercel.core.palette import PALETTE
from tiercel.server.errors import ApiError

router = APIRouter()

FOLDER = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {path.name: path for path in (*sorted(FOLDER.iterdir()), PALETTE) if path.suffix in KINDS}
"""What may be asked for, by name."""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page runs its own scripts, talks to its own server, and shows in no other page's frame."""


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """A chat whose rounds can be watched (docs/server.md)."""
    return _sent("index.html", request)


@router.get("/page/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    """What the page is made of."""
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    path = FILES.get(name)
    if path is None:
        raise ApiError(404, f"the page has no file {name!r}")
    seen = path.stat()
    tag = f'"{seen.st_mtime_ns:x}-{seen.st_size:x}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=HEADERS | {"ETag": tag})
    return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS | {"ETag": tag})
