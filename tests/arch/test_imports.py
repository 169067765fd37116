"""The rooms of the house, and who may import whom (docs/design.md)."""

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
ROOT = CHECKOUT / "tiercel"
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "observability": {"core"},
    "device": {"core"},
    "native": {"core"},
    "kvcache": {"core", "device"},
    "models": {"core", "device", "kvcache", "native"},
    "speculative": {"core", "device", "kvcache", "models"},
    "engine": {"core", "observability", "device", "kvcache", "models", "speculative"},
    "server": {"core", "observability", "models", "engine"},
    "train": {"core", "device", "kvcache", "models"},
    "report": {"core", "observability", "models"},
    "bench": {"core", "observability", "device", "kvcache", "models", "native", "speculative", "engine"},
    "cli": {
        "core",
        "observability",
        "device",
        "kvcache",
        "models",
        "speculative",
        "engine",
        "train",
        "report",
        "bench",
        "server",
    },
}
FRONT_DOOR = "__init__.py"
"""``tiercel`` itself hands out the engine: a room that imports it imports everything."""
EXTRA = {
    "speculative/base_worker.py": {"observability"},
    "cli/main.py": {FRONT_DOOR, "importlib"},
    "bench/hardware.py": {"importlib"},
    "server/app.py": {"importlib"},
    "server/control.py": {"importlib"},
}
"""Files that may do more than their room: the round holds the trace hooks; the command line finds its commands by name; results
and the API name the installed version."""
MAX_LINES = 500


def sources() -> dict[str, str]:
    return {str(p.relative_to(ROOT)): p.read_text() for p in sorted(ROOT.rglob("*.py"))}


SOURCES = sources()
IN_ROOMS = [path for path in SOURCES if path != FRONT_DOOR]


def imported_names(source: str) -> set[str]:
    """Dotted names that a file imports, at its top or inside a function; relative ones keep their dots."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def violations(path: str, source: str) -> set[str]:
    """What a file imports against the matrix: rooms, the front door, relative names, or ``importlib``."""
    found = set()
    for name in imported_names(source):
        first, *rest = name.split(".")
        if first == "tiercel":
            found.add(rest[0] if rest and rest[0] in ROOMS else FRONT_DOOR)
        elif first in ("", "importlib"):
            found.add(first or name)
    room = path.split("/")[0]
    return found - ROOMS[room] - {room} - EXTRA.get(path, set())


def import_graph(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Per file, the files of ours that it imports."""
    targets = {path: {_file_of(name, files) for name in imported_names(source)} for path, source in files.items()}
    return {path: {other for other in others if other is not None} for path, others in targets.items()}


def _file_of(name: str, files: Collection[str]) -> str | None:
    """``tiercel.a.b.C`` lies in ``a/b.py``, or else in the ``__init__.py`` of the innermost package that exists."""
    first, *parts = name.split(".")
    if first != "tiercel":
        return None
    stems = ["/".join(parts[:length]) for length in range(len(parts), -1, -1)]
    candidates = [path for stem in stems for path in (f"{stem}.py", f"{stem}/{FRONT_DOOR}".lstrip("/"))]
    return next((path for path in candidates if path in files), None)


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A chain of imports that ends where it began; empty if there is none."""
    done: set[str] = set()

    def visit(path: str, above: list[str]) -> list[str]:
        if path in above:
            return [*above[above.index(path) :], path]
        if path not in done:
            for other in sorted(graph[path]):
                if circle := visit(other, [*above, path]):
                    return circle
            done.add(path)
        return []

    return next((circle for path in graph if (circle := visit(path, []))), [])


def unknown_folders(files: Collection[str]) -> set[str]:
    """Folders with code that are no room, and files that lie in none."""
    return {path.split("/")[0] for path in files} - set(ROOMS) - {FRONT_DOOR}


def too_long(files: Mapping[str, str]) -> dict[str, int]:
    lengths = {path: len(source.splitlines()) for path, source in files.items()}
    return {path: length for path, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize("path", IN_ROOMS)
def test_imports_follow_the_matrix(path: str) -> None:
    assert violations(path, SOURCES[path]) == set()


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("kvcache/x.py", "from tiercel.models.mtp import MtpDraft", {"models"}),
        ("kvcache/x.py", "from tiercel import models", {"models"}),
        ("kvcache/x.py", "from tiercel import LLM", {FRONT_DOOR}),
        ("kvcache/x.py", "import tiercel", {FRONT_DOOR}),
        ("kvcache/x.py", "from ..models import mtp", {"..models.mtp"}),
        ("kvcache/x.py", "import importlib", {"importlib"}),
        ("models/x.py", "import tiercel.observability.trace as t", {"observability"}),
        ("train/x.py", "from tiercel.observability import trace", {"observability"}),
        ("train/x.py", "from tiercel.engine.llm import LLM", {"engine"}),
        ("speculative/x.py", "import tiercel.observability.trace", {"observability"}),
        ("speculative/base_worker.py", "from tiercel.observability import trace", set()),
        ("speculative/base_worker.py", "from tiercel.engine import llm", {"engine"}),
        ("core/x.py", "def f():\n    from tiercel.device.placement import place", {"device"}),
        ("engine/x.py", "import torch\nfrom tiercel.core.errors import UserError\nimport tiercel.kvcache.rows", set()),
    ],
)
def test_a_violation_is_seen(path: str, source: str, found: set[str]) -> None:
    assert violations(path, source) == found


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = import_graph(SOURCES)
    assert "kvcache/rows.py" in graph["speculative/target_runner.py"]
    assert find_circle(graph) == []


@pytest.mark.parametrize("way", ["from tiercel.b.y import f", "from tiercel.b import y", "import tiercel.b.y"])
def test_a_circle_is_seen(way: str) -> None:
    files = {"a/x.py": f"def late():\n    {way}", "b/y.py": "import tiercel.c.z", "c/z.py": "from tiercel.a import x"}
    assert find_circle(import_graph(files)) == ["a/x.py", "b/y.py", "c/z.py", "a/x.py"]
    assert find_circle(import_graph(files | {"c/z.py": "import torch"})) == []


def test_a_circle_through_a_package_is_seen() -> None:
    files = {"__init__.py": "from tiercel.a.x import f", "a/__init__.py": "", "a/x.py": "from tiercel import f"}
    assert find_circle(import_graph(files)) == ["__init__.py", "a/x.py", "__init__.py"]


def test_every_folder_is_a_room_that_says_what_it_is() -> None:
    assert unknown_folders(SOURCES) == set()
    for room in ROOMS:
        assert ast.get_docstring(ast.parse(SOURCES[f"{room}/__init__.py"])), f"{room}/__init__.py has no docstring"


def test_an_unknown_folder_is_seen() -> None:
    assert unknown_folders(["__init__.py", "core/x.py", "utils/x.py", "helpers.py"]) == {"utils", "helpers.py"}


def test_files_stay_small() -> None:
    others = {
        str(p.relative_to(CHECKOUT)): p.read_text()
        for room in ("tests", "bench")
        for p in (CHECKOUT / room).rglob("*.py")
        if ".venv" not in p.parts
    }
    assert too_long(SOURCES | others) == {}
    assert too_long({"core/x.py": "x = 1\n" * MAX_LINES, "core/y.py": "x = 1\n" * (MAX_LINES + 1)}) == {
        "core/y.py": 501
    }


def test_import_tiercel_is_light() -> None:
    code = "import sys, tiercel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_round_is_final() -> None:
    from tiercel.speculative.base_worker import SpecWorker

    with pytest.raises(TypeError, match="forward_batch_generation"):
        type("Sly", (SpecWorker,), {"forward_batch_generation": lambda self, batch: None})
