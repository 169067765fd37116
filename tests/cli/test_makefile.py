"""``make demo PROMPT=…`` hands the prompt on as it was given."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "Why is the sky blue?",
    'it\'s $HOME $(whoami) `id` "quoted" \\back % # hash; & | é 😀\nsecond line',
    "100% of $5",
    "",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_prompt_survives_make_and_shell(prompt: str, tmp_path: Path) -> None:
    fake = tmp_path / "tiercel"
    fake.write_text(f'#!/bin/sh\n[ "$1" = demo ] && printf %s "$TIERCEL_DEMO_PROMPT" > {tmp_path}/got\nexit 0\n')
    fake.chmod(0o755)
    (tmp_path / "stamp").touch()
    command = ["make", "demo", f"BIN={tmp_path}", f"STAMP={tmp_path}/stamp", *([f"PROMPT={prompt}"] if prompt else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got").read_text() == prompt
