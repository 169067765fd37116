"""Other engines as contenders: each a process in its own environment that speaks ``bench/peers/protocol.py``."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiercel.bench.samples import Answer, BenchPrompt
from tiercel.core.errors import UserError

CHECKOUT = Path(__file__).parents[2]
PEERS_FOLDER = CHECKOUT / "bench" / "peers"
REPLY_TIMEOUT_S = 600.0
CONTEXT_STEP = 256
"""Contexts are rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with.

    Args:
        name: of its folder.
        title: the name people know.
        variants: ways it runs in, one prompt at a time.
        batches: whether its driver has the variant ``batch`` too, many prompts at once.
    """

    name: str
    title: str
    variants: tuple[str, ...]
    batches: bool = False


PEERS = (
    Peer("llama_cpp", "llama.cpp", ("plain", "lookup"), batches=True),
    Peer("openvino", "OpenVINO GenAI", ("plain",)),
    Peer("transformers", "Transformers bf16", ("plain", "lookup")),
)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """``Settings`` of ``bench/peers/protocol.py``, which says what they mean."""

    model: str
    variant: str
    threads: int
    max_context: int
    lookup_tokens: int
    max_prompts: int


def chosen_peers(names: Sequence[str]) -> list[Peer]:
    """Peers by name.

    Raises:
        UserError: an unknown name.
    """
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise UserError(f"peer {name!r} is unknown: choose from {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def batching_peers(names: Sequence[str]) -> list[Peer]:
    """Peers by name that take many prompts at once.

    Raises:
        UserError: an unknown name, or a peer that takes one.
    """
    chosen = chosen_peers(names)
    able = ", ".join(peer.name for peer in PEERS if peer.batches)
    for peer in chosen:
        if not peer.batches:
            raise UserError(f"the driver of {peer.name} takes one prompt at a time: choose from {able}")
    return chosen


def peer_settings(
    model: Path,
    variant: str,
    threads: int,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    *,
    lookup_tokens: int = 0,
    max_prompts: int = 1,
) -> PeerSettings:
    """With room for the longest prompt, its answer, and drafts that go beyond it.

    Raises:
        UserError: the model is no .gguf file.
    """
    if model.suffix != ".gguf":
        raise UserError(f"peers read the same .gguf file as Tiercel, and {model} is none: choose another --model")
    need = max(len(prompt.token_ids) for prompt in prompts) + max_tokens + lookup_tokens
    context = -(-need // CONTEXT_STEP) * CONTEXT_STEP
    return PeerSettings(str(model.resolve()), variant, threads, context, lookup_tokens, max_prompts)


def interpreter(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's environment.

    Raises:
        UserError: no drivers here, or the environment was not made; names the command that makes it.
    """
    if not (folder / peer.name / "driver.py").is_file():
        raise UserError(f"{folder} holds no driver of {peer.name}: run in a checkout of Tiercel's sources")
    python = folder / peer.name / ".venv" / "bin" / "python"
    if not python.is_file():
        raise UserError(
            f"the environment of {peer.title} is missing: make it with `tiercel bench peers --setup {peer.name}`, "
            "or choose others with --peer"
        )
    return python


def make_environment(peer: Peer, folder: Path) -> None:
    """Make (or complete) a peer's environment from its pinned requirements.

    Raises:
        UserError: no drivers here, or a step failed.
    """
    place = folder / peer.name
    if not (place / "requirements.txt").is_file():
        raise UserError(f"{folder} holds no requirements of {peer.name}: run in a checkout of Tiercel's sources")
    environment = place / ".venv"
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    for step in ([sys.executable, "-m", "venv", str(environment)], [*pip, "-r", str(place / "requirements.txt")]):
        done = subprocess.run(step, check=False, stdout=sys.stderr)
        if done.returncode:
            raise UserError(f"the environment of {peer.title} could not be made: `{' '.join(step)}` failed (see above)")


class PeerContender:
    """A peer's process; ``version`` is what its driver says it runs.

    Args:
        peer: who.
        settings: how.
        folder: of the drivers.

    Raises:
        UserError: it cannot be started, or fails to load the model.
    """

    def __init__(self, peer: Peer, settings: PeerSettings, folder: Path = PEERS_FOLDER) -> None:
        self.name = f"{peer.title} {settings.variant}"
        python = interpreter(peer, folder)
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": str(settings.threads)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process; `close` closes it
        self._process = subprocess.Popen(
            [str(python), str(folder / peer.name / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        try:
            self.version = str(self._ask(asdict(settings))["version"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, prompt: BenchPrompt, max_tokens: int) -> Answer:
        """See ``Contender``."""
        return self.answer_together([prompt], max_tokens)[0]

    def answer_together(self, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Answer]:
        """See ``tiercel.bench.throughput.GroupContender``; for the variant ``batch``."""
        reply = self._ask({"prompts": [list(prompt.token_ids) for prompt in prompts], "max_tokens": max_tokens})
        return [
            Answer(tuple(answer["token_ids"]), answer["first_token_s"] * 1e3, answer["total_s"] * 1e3)
            for answer in reply["answers"]
        ]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(json.dumps(message).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            raise UserError(f"{self.name} has ended: {self._last_words()}") from None
        if not select.select([replies], [], [], REPLY_TIMEOUT_S)[0]:
            raise UserError(f"{self.name} gave no answer within {REPLY_TIMEOUT_S:.0f} s")
        line = replies.readline()
        if not line:
            raise UserError(f"{self.name} has ended: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise UserError(f"{self.name} failed: {' '.join(str(reply['error']).split())}")
        return reply

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.wait()}"
