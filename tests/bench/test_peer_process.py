"""The two sides of the line protocol, with drivers that need no engine."""

import sys
from pathlib import Path

import pytest

from tiercel.bench.peer_process import (
    PEERS,
    PEERS_FOLDER,
    Peer,
    PeerContender,
    PeerSettings,
    chosen_peers,
    interpreter,
    make_environment,
)
from tiercel.bench.samples import BenchPrompt
from tiercel.core.errors import UserError

SETTINGS = PeerSettings("m.gguf", "plain", 1, 256, 2)
PEER = Peer("fake", "Fake", ("plain",))
DRIVER = """
import sys
from bench.peers.protocol import FirstToken, serve, timed_stream

def open_model(settings):
    print("noise on standard output")
    if settings.model == "broken.gguf":
        raise ValueError("no such\\nfile")
    def answer(prompt, count):
        if prompt == [99]:
            sys.exit("worn out")
        if prompt == [98]:
            clock = FirstToken()
            clock.seen()
            return clock.reply([5] * count)
        return timed_stream(lambda: iter(range(sum(prompt), 10**6)), count)
    return answer

serve(lambda: "fake 1.0", open_model)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A peer whose environment is the one that runs the tests."""
    (tmp_path / "fake" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "fake" / "driver.py").write_text(DRIVER)
    python = tmp_path / "fake" / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_a_peer_answers_and_noise_does_not_disturb(folder: Path) -> None:
    with PeerContender(PEER, SETTINGS, folder) as peer:
        assert (peer.name, peer.version) == ("Fake plain", "fake 1.0")
        answer = peer.answer(BenchPrompt("p", (3, 4)), 5)
        assert answer.token_ids == (7, 8, 9, 10, 11)
        assert 0 < answer.first_token_ms < answer.total_ms
        assert peer.answer(BenchPrompt("p", (98,)), 2).token_ids == (5, 5)


def test_a_peer_that_cannot_load_says_why_in_one_line(folder: Path) -> None:
    settings = PeerSettings("broken.gguf", "plain", 1, 256, 2)
    with pytest.raises(UserError, match="Fake plain failed: ValueError: no such file"):
        PeerContender(PEER, settings, folder)


def test_a_peer_that_dies_is_an_error(folder: Path) -> None:
    with PeerContender(PEER, SETTINGS, folder) as peer:
        for _ in range(2):  # at once, and when spoken to again
            with pytest.raises(UserError, match="Fake plain has ended: worn out"):
                peer.answer(BenchPrompt("p", (99,)), 2)


def test_a_missing_environment_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    with pytest.raises(UserError, match="checkout"):
        interpreter(PEER, tmp_path)
    (tmp_path / "fake" / "driver.py").touch()
    with pytest.raises(UserError, match="tiercel bench peers --setup fake"):
        interpreter(PEER, tmp_path)
    with pytest.raises(UserError, match="checkout"):
        make_environment(PEER, tmp_path)


def test_peers_are_chosen_by_name() -> None:
    assert chosen_peers([]) == list(PEERS)
    assert [peer.name for peer in chosen_peers(["openvino"])] == ["openvino"]
    with pytest.raises(UserError, match="llama_cpp, openvino, transformers"):
        chosen_peers(["vllm"])


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_driver_and_pinned_requirements(peer: Peer) -> None:
    assert (PEERS_FOLDER / peer.name / "driver.py").is_file()
    lines = (PEERS_FOLDER / peer.name / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
