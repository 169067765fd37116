"""OpenVINO GenAI, which reads the .gguf file itself."""

from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as ov_genai

from bench.peers.protocol import AnswerMany, FirstToken, Reply, Settings, alone, serve


def open_model(settings: Settings) -> AnswerMany:
    scheduler = ov_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # it would otherwise keep a prompt that it has seen before
    scheduler.max_num_batched_tokens = settings.max_context
    pipeline = ov_genai.LLMPipeline(
        settings.model, "CPU", INFERENCE_NUM_THREADS=settings.threads, scheduler_config=scheduler
    )

    def answer(prompt_token_ids: list[int], max_tokens: int) -> Reply:
        config = ov_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = max_tokens, True
        config.do_sample = False
        prompt = ov.Tensor(np.array([prompt_token_ids], np.int64))
        clock = FirstToken()
        found = pipeline.generate(
            ov_genai.TokenizedInputs(prompt, ov.Tensor(np.ones_like(prompt.data))), config, Listener(clock)
        )
        return clock.reply([int(token) for token in found.tokens[0]])

    return alone(answer)


class Listener(ov_genai.StreamerBase):  # type: ignore[misc] # the package has no types
    """Hears of every token; does nothing else, so that no time goes into text."""

    def __init__(self, clock: FirstToken) -> None:
        super().__init__()
        self.clock = clock

    def write(self, token: int | list[int]) -> ov_genai.StreamingStatus:
        """One token, or several."""
        self.clock.seen()
        return ov_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """All have come."""


if __name__ == "__main__":
    serve(lambda: f"openvino-genai {version('openvino-genai')}", open_model)
