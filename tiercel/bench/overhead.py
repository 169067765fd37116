"""What looking costs: decoding with tracing off, at each level, and with records to files."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiercel.bench.engines import Bench
from tiercel.bench.samples import Answer, BenchPrompt, Sample, Samples, Spread, decode_ms
from tiercel.bench.turns import Contender, TiercelContender
from tiercel.core.config import TraceConfig
from tiercel.engine.llm import LLM
from tiercel.observability.trace import set_global_trace_level

OFF, CONTROL, RECORDS = "off", "off again", "records"
LEVELS = (1, 2, 3)
DRAIN_S = 0.25
"""After an answer the exporter thread makes spans and lines of it: its time belongs to this turn, not to the next."""


class Watched:
    """An engine at a trace level; also counts the CPU time of this process, exporter thread included."""

    def __init__(self, name: str, llm: LLM, level: int) -> None:
        self.name, self._inner, self._level = name, TiercelContender(name, llm), level

    def answer(self, prompt: BenchPrompt, max_tokens: int) -> Answer:
        """See ``Contender``."""
        set_global_trace_level(self._level)
        start = time.process_time()
        try:
            found = self._inner.answer(prompt, max_tokens)
            time.sleep(DRAIN_S)
        finally:
            set_global_trace_level(0)
        cpu_ms = (time.process_time() - start) * 1e3
        return Answer(found.token_ids, found.first_token_ms, found.total_ms, found.spec, cpu_ms)


def contenders(bench: Bench, stack: ExitStack, num_steps: int | None, folder: Path) -> list[Contender]:
    """Off twice (the second is the control: what differs between them is noise), each level to a file, records to files."""
    traces = {f"level {n}": (n, TraceConfig(True, n, otlp_file=folder / f"level{n}.jsonl")) for n in LEVELS}
    ways = {OFF: (0, TraceConfig()), CONTROL: (0, TraceConfig())} | traces
    ways[RECORDS] = (0, TraceConfig(records_out=folder / "records"))
    return [Watched(name, bench.open(stack, num_steps, trace), level) for name, (level, trace) in ways.items()]


def cpu_ms(samples: Sequence[Sample]) -> float:
    """CPU time of this process in all."""
    return sum(s.answer.cpu_ms or 0.0 for s in samples)


def summary(samples: Samples) -> dict[str, Any]:
    """By contender: speeds, decoding time and CPU time against off, and whether the former stands out of the noise."""
    noise = samples.ratio(CONTROL, OFF, decode_ms)
    return {
        name: samples.speeds(name)
        | {
            "decode_time_ratio_to_off": asdict(ratio := samples.ratio(name, OFF, decode_ms)),
            "cpu_time_ratio_to_off": asdict(samples.ratio(name, OFF, cpu_ms)),
            "below_noise": is_noise(ratio, noise),
        }
        for name in samples.contenders
    }


def is_noise(ratio: Spread, noise: Spread) -> bool:
    """Whether a ratio's median lies where the control's ratios (and 1) lie."""
    return min(noise.least, 1.0) <= ratio.median <= max(noise.most, 1.0)
