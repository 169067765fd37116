"""The rooms of the house, and who may import whom (docs/design.md)."""

import ast
from pathlib import Path

import pytest

import tiercel

ROOT = Path(tiercel.__file__).parent
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "observability": {"core"},
    "device": {"core"},
    "kvcache": {"core", "device"},
    "models": {"core", "device", "kvcache"},
    "speculative": {"core", "device", "kvcache", "models"},
    "engine": {"core", "observability", "device", "kvcache", "models", "speculative"},
    "train": {"core", "device", "kvcache", "models"},
    "cli": {"core", "observability", "device", "kvcache", "models", "speculative", "engine", "train"},
}
TRACED = {"speculative/base_worker.py"}
"""Where the round's hooks live: the only drafting file that may import observability."""


def imported_rooms(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("tiercel.") and n.split(".")[1] in ROOMS}
    return found


def violations(path: str, source: str) -> set[str]:
    room = path.split("/")[0]
    allowed = ROOMS[room] | {room} | ({"observability"} if path in TRACED else set())
    return imported_rooms(source) - allowed


def files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if p.parent != ROOT)


@pytest.mark.parametrize("path", files())
def test_imports_follow_the_matrix(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == set()


def test_a_violation_is_seen() -> None:
    assert violations("kvcache/x.py", "from tiercel.models.mtp import MtpDraft") == {"models"}
    assert violations("speculative/x.py", "import tiercel.observability.trace") == {"observability"}
    assert violations("speculative/base_worker.py", "from tiercel.observability import trace") == set()
    assert violations("core/x.py", "def f():\n    from tiercel.device.placement import place") == {"device"}


def modules_imported(source: str) -> set[str]:
    """Paths of our own modules that a file imports, at its top or inside a function."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)]
    names = {str(n.module) for n in nodes} | {f"{n.module}.{a.name}" for n in nodes for a in n.names}
    return {name.removeprefix("tiercel.").replace(".", "/") + ".py" for name in names if name.startswith("tiercel.")}


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {path: modules_imported((ROOT / path).read_text()) & set(files()) for path in files()}
    done: set[str] = set()

    def visit(path: str, above: tuple[str, ...]) -> None:
        assert path not in above, " -> ".join((*above, path))
        if path not in done:
            for other in graph[path]:
                visit(other, (*above, path))
            done.add(path)

    for path in graph:
        visit(path, ())
    assert "kvcache/rows.py" in graph["speculative/target_runner.py"]


def test_every_folder_is_a_room_that_says_what_it_is() -> None:
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert folders == set(ROOMS)
    for room in ROOMS:
        assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))


@pytest.mark.parametrize("path", files())
def test_files_stay_small(path: str) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= 500


def test_import_tiercel_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, tiercel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_round_is_final() -> None:
    from tiercel.speculative.base_worker import SpecWorker

    with pytest.raises(TypeError, match="forward_batch_generation"):
        type("Sly", (SpecWorker,), {"forward_batch_generation": lambda self, batch: None})
