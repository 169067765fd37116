"""The same tokens on a GPU as on a CPU, in float32."""

from pathlib import Path

import pytest

from tests.conformance.conftest import Drafts
from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import Engine
from tiercel.speculative.registry import WORKERS


@pytest.mark.gpu
@pytest.mark.parametrize("method", sorted(WORKERS))
def test_a_gpu_gives_the_cpus_tokens(method: str, toy_model: Path, drafts: Drafts) -> None:
    tokens = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(model=str(toy_model), device=device, dtype="float32")
        engine = Engine(config, SpecConfig(method=method, draft=drafts.get(method, "auto")), TraceConfig())
        req = engine.add_request("a", [7, 30, 99, 12], SamplingParams(max_tokens=16, ignore_eos=True))
        while engine.has_work:
            engine.step()
        tokens.append(req.output_token_ids)
    assert tokens[0] == tokens[1]
