"""A live server on the toy model, in a process of its own, as users start it."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

COMMAND = [sys.executable, "-c", "from tiercel.cli.main import main; main()", "serve", "--port", "0"]
TOY_CONTEXT = 512


@dataclass
class LiveServer:
    """A server's process, its address, and what it has said so far."""

    process: "subprocess.Popen[str]"
    url: str
    lines: list[str]
    reader: threading.Thread

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.returncode


def start(*arguments: str) -> LiveServer:
    """Wait until it serves; what it says is read all along, so that it never waits for a reader."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    is_serving = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "serving" in line:
                is_serving.set()
        is_serving.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert is_serving.wait(60)
    found = re.search(r"http://\S+", lines[-1])
    assert found, "".join(lines)
    return LiveServer(process, found[0], lines, reader)


@pytest.fixture(scope="session")
def toy_options(toy_model: Path, toy_draft: Path) -> list[str]:
    """What starts the engine on the toy model, exactly."""
    return [
        "--model",
        str(toy_model),
        "--draft",
        str(toy_draft),
        "--num-steps",
        "2",
        "--dtype",
        "float32",
        "--no-tuned",
    ]


@pytest.fixture(scope="session")
def live(toy_options: list[str]) -> Iterator[LiveServer]:
    server = start(*toy_options, "--served-model-name", "toy", "--max-batch-size", "4", "--kv-tokens", "4096")
    yield server
    server.end()


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    """The `openai` package's client of the live server."""
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx2.Client]:
    """Plain HTTP to the live server."""
    with httpx2.Client(base_url=live.url, timeout=30) as http:
        yield http
