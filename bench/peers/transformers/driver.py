"""Transformers in bfloat16, which reads the .gguf file itself: plain, or with its own prompt lookup."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.generation.streamers import BaseStreamer

from bench.peers.protocol import AnswerMany, FirstToken, Reply, Settings, alone, serve


def open_model(settings: Settings) -> AnswerMany:
    torch.set_num_threads(settings.threads)
    file = Path(settings.model)
    how_to_load: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how_to_load)
    model.generation_config.eos_token_id = None  # answers do not end before the number of tokens asked for
    model.generation_config.pad_token_id = 0
    how: dict[str, Any] = {"do_sample": False}
    if settings.variant == "lookup":
        how["prompt_lookup_num_tokens"] = settings.lookup_tokens

    def answer(prompt_token_ids: list[int], max_tokens: int) -> Reply:
        clock = FirstToken()
        prompt = torch.tensor([prompt_token_ids])
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, streamer=Listener(clock), **how
        )
        return clock.reply(found[0, len(prompt_token_ids) :].tolist())

    return alone(answer)


class Listener(BaseStreamer):
    """Hears of every token; does nothing else."""

    def __init__(self, clock: FirstToken) -> None:
        self.clock, self.is_prompt = clock, True

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then tokens as they come."""
        if not self.is_prompt:
            self.clock.seen()
        self.is_prompt = False

    def end(self) -> None:
        """All have come."""


if __name__ == "__main__":
    serve(lambda: f"transformers {version('transformers')}, torch {version('torch')}", open_model)
