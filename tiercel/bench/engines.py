"""Our own contenders: plain decoding and multi-layer EAGLE at several depths, on one target in memory."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tiercel.bench.samples import BenchPrompt
from tiercel.bench.turns import TiercelContender
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.engine.engine import LoadedTarget, load_target
from tiercel.engine.llm import LLM

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Bench:
    """What a benchmark starts from: a target in memory and its prompts.

    Args:
        engine: what runs.
        draft: see ``SpecConfig``.
        target: the model, loaded once for every contender.
    """

    engine: EngineConfig
    draft: str
    target: LoadedTarget

    def open(self, stack: ExitStack, num_steps: int | None, trace: TraceConfig | None = None) -> LLM:
        """An engine, plain for ``num_steps`` 0, closed with ``stack``; None takes every MTP layer of the draft."""
        spec = SpecConfig(method="none") if num_steps == 0 else SpecConfig(draft=self.draft, num_steps=num_steps)
        return stack.enter_context(LLM(engine=self.engine, spec=spec, trace=trace, target=self.target))

    def contenders(self, stack: ExitStack, depths: Sequence[int | None]) -> list[TiercelContender]:
        """Plain decoding, then multi-layer EAGLE at each depth, named by it."""
        plain = TiercelContender(PLAIN, self.open(stack, 0))
        drafting = [self.open(stack, depth) for depth in depths]
        return [plain, *(TiercelContender(depth_name(llm.engine.worker.num_layers), llm) for llm in drafting)]


def depth_name(num_steps: int) -> str:
    """The contender that drafts ``num_steps`` tokens."""
    return f"K={num_steps}"


def open_bench(engine: EngineConfig, draft: str, depths: Sequence[int | None]) -> Bench:
    """Refuse a draft or depth that cannot work, then load the target.

    Raises:
        UserError: see ``load_target``.
    """
    deepest = max((depth for depth in depths if depth is not None), default=None)
    return Bench(engine, draft, load_target(engine, SpecConfig(draft=draft, num_steps=deepest)))


def encode(llm: LLM, texts: dict[str, str]) -> list[BenchPrompt]:
    """Named texts through the chat template: every contender gets the same ids."""
    return [BenchPrompt(name, tuple(llm.encode(text))) for name, text in texts.items()]
