"""Our own contenders: plain decoding, prompt lookup, MTP layers at several depths, and the default, on one target in memory."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tiercel.bench.samples import BenchPrompt
from tiercel.bench.turns import TiercelContender
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.depths import Depth, DepthTable
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget, load_target
from tiercel.engine.llm import LLM
from tiercel.models.mtp_checkpoint import resolve_draft
from tiercel.speculative.tuned import TuneKey, read_tuned, tune_key

PLAIN, LOOKUP, DEFAULT, TUNED = "plain", "lookup", "default", "tuned"


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
        """An engine closed with ``stack``: plain for ``num_steps`` 0, else so many MTP layers alone, in every round.

        None drafts as engines do where nothing is tuned. What ``tiercel tune`` has measured here never counts: results are to be
        compared with those of other machines.
        """
        if num_steps == 0:
            return self.open_with(stack, SpecConfig(method="none"), trace)
        if num_steps is None:
            return self.open_with(stack, SpecConfig(draft=self.draft, tuned=False), trace)
        spec = SpecConfig(
            draft=self.draft,
            num_steps=num_steps,
            depths=DepthTable.fixed(num_steps, lookup=False),
            ngram_match=0,
            min_confidence=0,
        )
        return self.open_with(stack, spec, trace)

    def open_with(self, stack: ExitStack, spec: SpecConfig, trace: TraceConfig | None = None) -> LLM:
        """An engine with these settings, closed with ``stack``."""
        return stack.enter_context(LLM(engine=self.engine, spec=spec, trace=trace, target=self.target))

    def contenders(self, stack: ExitStack, depths: Sequence[int | None]) -> list[TiercelContender]:
        """Plain decoding, prompt lookup alone, then MTP layers alone at each depth, named by it; None is the default engine."""
        lookup = TiercelContender(LOOKUP, self.open_with(stack, SpecConfig(method="ngram")))
        found = {depth: TiercelContender(_name(depth), self.open(stack, depth)) for depth in (0, *depths)}
        return [found.pop(0), lookup, *found.values()]

    def with_room(self, prompts: Sequence[BenchPrompt], max_tokens: int) -> "Bench":
        """The same with KV slots for every request at once, so that none has to wait for another's."""
        engine = self.engine
        longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
        whole_pages = -(-longest // engine.page_size) * engine.page_size
        kv_tokens = max(engine.kv_tokens, whole_pages * engine.max_batch_size)
        return replace(self, engine=replace(engine, kv_tokens=kv_tokens))

    def tuned(self, stack: ExitStack) -> TiercelContender:
        """The engine as ``tiercel tune`` has set it.

        Raises:
            UserError: nothing was tuned for this machine, model and draft.
        """
        table = read_tuned(self.tune_key().path)
        if table is None:
            raise UserError("nothing is tuned for this model, draft and machine: run `tiercel tune` first")
        return TiercelContender(TUNED, self.open_with(stack, SpecConfig(draft=self.draft, depths=table, adaptive=True)))

    def tune_key(self) -> TuneKey:
        """What depths measured here hold for."""
        target = self.target
        folder = resolve_draft(self.draft, target.checkpoint)
        return tune_key(target.checkpoint, target.model, target.placement, self.engine, folder)


def _name(num_steps: int | None) -> str:
    return DEFAULT if num_steps is None else Depth(None, num_steps, lookup=False).drafter


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
