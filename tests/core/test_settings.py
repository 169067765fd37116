import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.structured_outputs import StructuredOutputs


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
        (SamplingParams, {"ignore_eos": "yes"}, "ignore_eos"),
        (SamplingParams, {"min_p": 1.5}, "min_p"),
        (SamplingParams, {"typical_p": 0.0}, "typical_p"),
        (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty"),
        (SamplingParams, {"presence_penalty": 2.5}, "presence_penalty"),
        (SamplingParams, {"frequency_penalty": -2.5}, "frequency_penalty"),
        (SamplingParams, {"logit_bias": {3: 101.0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {"3": 1.0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": [3]}, "logit_bias"),
        (SamplingParams, {"bad_words": ["fine", " "]}, "bad_words"),
        (SamplingParams, {"bad_words": "fine"}, "bad_words"),
        (SamplingParams, {"allowed_token_ids": []}, "allowed_token_ids"),
        (SamplingParams, {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        (SamplingParams, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (SamplingParams, {"stop": [""]}, "stop"),
        (SamplingParams, {"stop": ["x"] * 17}, "stop"),
        (SamplingParams, {"stop_token_ids": ["x"]}, "stop_token_ids"),
        (SamplingParams, {"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        (SamplingParams, {"logits_processors": ["x"]}, "logits_processors"),
        (SamplingParams, {"logprobs": 21}, "logprobs"),
        (SamplingParams, {"prompt_logprobs": True}, "prompt_logprobs"),
        (SamplingParams, {"n": 0}, "n=0"),
        (SamplingParams, {"structured_outputs": {"json": "{}"}}, "structured_outputs"),
        (StructuredOutputs, {}, "nothing given"),
        (StructuredOutputs, {"regex": "a", "choice": ["b"]}, "regex and choice"),
        (StructuredOutputs, {"choice": []}, "choice"),
        (StructuredOutputs, {"regex": 5}, "regex"),
        (StructuredOutputs, {"json_object": "yes"}, "json_object"),
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


def test_lists_are_kept_as_they_were_checked() -> None:
    stops, bias = ["a"], {3: 1}
    params = SamplingParams(stop=stops, logit_bias=bias, allowed_token_ids={4})  # type: ignore[arg-type]
    stops.append("")
    bias[3] = 1000
    assert params.stop == ("a",)
    assert params.logit_bias == {3: 1}
    assert params.allowed_token_ids == (4,)
    assert SamplingParams(stop="end").stop == ("end",)
    assert pickle.loads(pickle.dumps(params)) == params


def test_samples_have_seeds_of_their_own() -> None:
    one = SamplingParams(n=3, seed=2**64 - 1)
    assert [(sample.n, sample.seed) for sample in one.samples()] == [(1, 2**64 - 1), (1, 0), (1, 1)]
    assert [sample.seed for sample in SamplingParams(n=2).samples()] == [None, None]


def test_a_record_holds_what_json_gives_back() -> None:
    grammar = StructuredOutputs(choice=["a", "b"])  # type: ignore[arg-type]
    params = SamplingParams(logits_processors=[max], logit_bias={3: 1.5}, stop=["a"], structured_outputs=grammar)
    row = params.to_json()
    assert json.loads(json.dumps(row)) == row
    assert row["logits_processors"] == ["max"]
    assert row["logit_bias"] == {"3": 1.5}
    assert row["structured_outputs"]["choice"] == ["a", "b"]
