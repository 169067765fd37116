from pathlib import Path
from typing import Any

import pytest

from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (SamplingParams, {"max_tokens": 0}, "max_tokens"),
        (SamplingParams, {"max_tokens": 2.5}, "max_tokens"),
        (SamplingParams, {"top_k": 1.5}, "top_k"),
        (SamplingParams, {"seed": 1.5}, "seed"),
        (SamplingParams, {"temperature": "hot"}, "temperature"),
        (SamplingParams, {"temperature": -1.0}, "temperature"),
        (SamplingParams, {"temperature": float("nan")}, "temperature"),
        (SamplingParams, {"top_p": 0.0}, "top_p"),
        (SamplingParams, {"top_p": 1.5}, "top_p"),
        (SamplingParams, {"top_k": -1}, "top_k"),
        (SamplingParams, {"seed": 2**64}, "seed"),
        (EngineConfig, {"dtype": "float16"}, "dtype"),
        (EngineConfig, {"device": "tpu"}, "device"),
        (EngineConfig, {"kv_tokens": 8}, "kv_tokens"),
        (EngineConfig, {"max_batch_size": 0}, "max_batch_size"),
        (EngineConfig, {"num_threads": 0}, "num_threads"),
        (SpecConfig, {"method": "eagle9"}, "spec method"),
        (SpecConfig, {"num_steps": -1}, "num_steps"),
        (SpecConfig, {"method": "none", "num_steps": 2}, "num_steps"),
        (TraceConfig, {"trace_level": 4}, "trace_level"),
        (TraceConfig, {"otlp_file": Path("x")}, "--enable-trace"),
    ],
)
def test_wrong_values_are_named_in_one_line(kind: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        kind(**wrong)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("temperature", "top_k", "greedy"), [(0.0, 0, True), (0.7, 1, True), (0.7, 0, False)])
def test_greedy_is_an_argmax(temperature: float, top_k: int, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature, top_k=top_k).is_greedy is greedy
