"""Contenders take turns: A, B, C, A, B, C, …, so that a machine's ups and downs meet all of them alike."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tiercel.bench.samples import Answer, BenchPrompt, Sample, Samples, check_answer
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.llm import LLM
from tiercel.engine.outputs import RequestOutput

SETTLE_S = 0.05
"""Pause before every turn: threads of the contender before it have gone to sleep by then."""

Report = Callable[[str], None]
"""Takes a line that says how far a measurement has come."""


class Contender(Protocol):
    """Somebody who can answer a prompt greedily."""

    name: str

    def answer(self, prompt: BenchPrompt, max_tokens: int) -> Answer:
        """Exactly ``max_tokens`` tokens, past the end token if need be.

        Raises:
            UserError: it cannot.
        """
        ...


class TiercelContender:
    """An engine of ours in this process."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm = name, llm

    def answer(self, prompt: BenchPrompt, max_tokens: int) -> Answer:
        """See ``Contender``."""
        return self.answer_together([prompt], max_tokens)[0]

    def answer_together(self, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Answer]:
        """See ``tiercel.bench.throughput.GroupContender``."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate([list(prompt.token_ids) for prompt in prompts], sampling)
        return [_answer(output.checked()) for output in outputs]


def _answer(output: RequestOutput) -> Answer:
    record = output.record
    assert record.time_to_first_token_ms is not None  # it gave a token
    return Answer(record.token_ids, record.time_to_first_token_ms, record.e2e_ms, record.spec)


def take_turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    runs: int,
    report: Report = lambda _: None,
) -> Samples:
    """Time every contender on every prompt, ``runs`` times over; a first answer each is not counted (warm-up).

    Args:
        contenders: in the order of their turns.
        prompts: at least one.
        max_tokens: tokens of every answer, at least 2 (with one there is no decoding to time).
        runs: how often the prompts are gone through.
        report: hears what is being done.

    Raises:
        UserError: a contender failed, or gave another number of tokens.
    """
    for contender in contenders:
        report(f"warming up {contender.name}")
        check_answer(contender.answer(prompts[0], max_tokens), contender.name, prompts[0], max_tokens)
    samples = []
    for run in range(runs):
        for number, prompt in enumerate(prompts, start=1):
            for contender in contenders:
                report(f"run {run + 1} of {runs}, prompt {number} of {len(prompts)}: {contender.name}")
                time.sleep(SETTLE_S)
                answer = check_answer(contender.answer(prompt, max_tokens), contender.name, prompt, max_tokens)
                samples.append(Sample(contender.name, run, prompt.name, answer))
    return Samples(samples)
