"""Greedy output equals plain decoding's for every drafter, depth, shape, batch and chunk.

On a real model: ``bench/greedy_identity.py``.
"""

import itertools
from pathlib import Path

import pytest

from tests.conformance.conftest import Drafts
from tests.conftest import random_draft
from tiercel.bench.planted import plant
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine, LoadedTarget
from tiercel.models.mtp_checkpoint import save_draft

PROMPTS = [[(5 * i + 3 * j) % 250 for j in range(1 + 5 * i)] for i in range(8)]
WISH = SamplingParams(max_tokens=10, ignore_eos=True)
SHAPES = list(itertools.product((1, 3, 8), (7, 16, 512)))
DRAFTERS = ("multi-layer-eagle", "unchained", "with-ngram", "eagle", "eagle3", "standalone")


def answers(
    target: LoadedTarget, config: EngineConfig, spec: SpecConfig, planted: dict[str, list[int]] | None
) -> tuple[dict[str, list[int]], int]:
    engine = Engine(config, spec, TraceConfig(), target)
    if planted is not None:
        plant(engine.worker, planted)
    reqs = [engine.add_request(str(i), prompt, WISH) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    engine.kv.check()
    return {r.request_id: r.output_token_ids for r in reqs}, sum(sum(r.spec.correct) for r in reqs)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize(("drafter", "topk"), [*itertools.product(DRAFTERS, (1, 2)), ("ngram", 1)])
def test_greedy_output_is_that_of_plain_decoding(
    toy_modules: LoadedTarget,
    toy_native: LoadedTarget,
    drafts: Drafts,
    tmp_path: Path,
    drafter: str,
    topk: int,
    num_steps: int,
) -> None:
    method = {"unchained": "multi-layer-eagle", "with-ngram": "multi-layer-eagle"}.get(drafter, drafter)
    draft = drafts.get(method, "auto")
    if drafter == "unchained":
        save_draft(random_draft(toy_modules, chained=False), tmp_path, {})
        draft = str(tmp_path)
    given = {"draft": draft, "num_steps": num_steps, "topk": topk}
    if drafter == "ngram":
        given = {"ngram_match": 1, "ngram_tokens": num_steps}
    elif method == "multi-layer-eagle":
        given["ngram_match"] = 1 if drafter == "with-ngram" else 0
    spec = SpecConfig(method=method, max_verify_rows=999, min_confidence=0, **given)  # type: ignore[arg-type]
    plain, _ = answers(toy_native, EngineConfig(), SpecConfig(method="none"), None)
    for at_once, chunk in SHAPES:
        config = EngineConfig(max_batch_size=at_once, max_prefill_tokens=chunk, page_size=4)
        ours, correct = answers(toy_native, config, spec, plain)
        assert ours == plain
        assert correct > 0
