"""The two sides of the line protocol, with drivers that need no engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.bench.peer_process import (
    PEERS,
    PEERS_FOLDER,
    Peer,
    PeerContender,
    PeerSettings,
    batching_peers,
    chosen_peers,
    interpreter,
    make_environment,
    peer_settings,
)
from tiercel.bench.samples import BenchPrompt
from tiercel.core.errors import UserError

SETTINGS = PeerSettings("m.gguf", "plain", 1, 256, 2, 1)
PEER = Peer("fake", "Fake", ("plain",))
DRIVER = """
import sys
from bench.peers.protocol import FirstToken, alone, serve, timed_stream

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
    return alone(answer)

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


def test_a_way_that_takes_one_prompt_says_so(folder: Path) -> None:
    prompts = [BenchPrompt("p", (1,)), BenchPrompt("q", (2,))]
    with PeerContender(PEER, SETTINGS, folder) as peer, pytest.raises(UserError, match="2 prompts at once"):
        peer.answer_together(prompts, 2)


def test_a_peer_that_cannot_load_says_why_in_one_line(folder: Path) -> None:
    settings = PeerSettings("broken.gguf", "plain", 1, 256, 2, 1)
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


def test_an_environment_is_made_and_a_failing_step_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    requirements = tmp_path / "fake" / "requirements.txt"
    requirements.write_text("# nothing\n")
    make_environment(PEER, tmp_path)
    (tmp_path / "fake" / "driver.py").touch()
    python = interpreter(PEER, tmp_path)
    assert (
        subprocess.run([python, "-c", "import sys; sys.exit(sys.prefix == sys.base_prefix)"], check=False).returncode
        == 0
    )
    requirements.write_text("./no-such-folder\n")
    with pytest.raises(UserError, match="could not be made"):
        make_environment(PEER, tmp_path)


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in chosen_peers(["openvino", "llama_cpp", "openvino"])] == ["openvino", "llama_cpp"]
    assert batching_peers([]) == []
    assert [peer.name for peer in batching_peers(["llama_cpp"])] == ["llama_cpp"]
    with pytest.raises(UserError, match="openvino takes one prompt"):
        batching_peers(["openvino"])
    with pytest.raises(UserError, match="llama_cpp, openvino, transformers"):
        chosen_peers(["vllm"])


@pytest.mark.parametrize(("length", "context"), [(10, 256), (245, 256), (247, 512)])
def test_the_context_has_room_for_the_longest_prompt_and_its_answer(length: int, context: int) -> None:
    prompts = [BenchPrompt("short", (1,)), BenchPrompt("long", (1,) * length)]
    assert peer_settings(Path("m.gguf"), "lookup", 1, prompts, 8, lookup_tokens=2).max_context == context
    with pytest.raises(UserError, match="gguf"):
        peer_settings(Path("folder"), "plain", 1, prompts, 8)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_driver_and_pinned_requirements(peer: Peer) -> None:
    assert (PEERS_FOLDER / peer.name / "driver.py").is_file()
    lines = (PEERS_FOLDER / peer.name / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
