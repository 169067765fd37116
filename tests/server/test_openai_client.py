"""The `openai` package against a live server; tokens against ``LLM.generate`` in this process."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.server.conftest import TOY_CONTEXT
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.sampling_params import SamplingParams
from tiercel.engine.engine import LoadedTarget
from tiercel.engine.llm import LLM

PROMPT = [72, 101, 108, 108, 111]
MESSAGES = [{"role": "user", "content": "Say the thing."}]


@pytest.fixture(scope="module")
def llm(toy_model: Path, toy_native: LoadedTarget) -> Iterator[LLM]:
    """Plain decoding: what the server must say, however it drafts."""
    engine = EngineConfig(model=str(toy_model), dtype="float32")
    with LLM(engine=engine, spec=SpecConfig(method="none"), target=toy_native) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_completion_equals_plain_decoding(client: OpenAI, llm: LLM, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=7)
    expected = llm.generate([PROMPT], sampling)[0]
    found = client.completions.create(model="toy", prompt=PROMPT, max_tokens=20, temperature=temperature, seed=7)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage is not None
    assert found.usage.to_dict() == expected.usage


def test_a_batch_answers_in_the_prompts_order_and_n_draws_differ(client: OpenAI, llm: LLM) -> None:
    texts = ["one", "two two", "three three three"]
    sampling = [SamplingParams(max_tokens=8, temperature=1.0, seed=3 + draw) for _ in texts for draw in range(2)]
    expected = [out.text for out in llm.generate([t for t in texts for _ in range(2)], sampling, chat=False)]
    found = client.completions.create(model="toy", prompt=texts, max_tokens=8, temperature=1.0, seed=3, n=2)
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(len(llm.encode(text, chat=False)) for text in texts)


def test_a_chat_streams_what_it_answers_whole(client: OpenAI, llm: LLM) -> None:
    expected = llm.generate([MESSAGES], SamplingParams(max_tokens=30))[0]
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=30, temperature=0)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == expected.text
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="toy",
        messages=MESSAGES,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.to_dict() == whole.usage.to_dict() == expected.usage
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_are_those_of_the_library(client: OpenAI, llm: LLM) -> None:
    expected = llm.generate([MESSAGES], SamplingParams(max_tokens=12, logprobs=2))[0].logprobs
    assert expected is not None
    wish = {"model": "toy", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**wish, top_logprobs=2).choices[0].logprobs  # type: ignore[call-overload]
    assert [one.logprob for one in whole.content] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    found = [top.logprob for one in whole.content for top in one.top_logprobs]
    assert found == pytest.approx([p for one in expected for _, p in one.top], abs=1e-4)
    chunks = client.chat.completions.create(**wish, top_logprobs=2, stream=True)  # type: ignore[call-overload]
    streamed = [one for c in chunks if c.choices and c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in whole.content]
    text = client.completions.create(model="toy", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=1)
    shown = text.choices[0].logprobs
    assert shown is not None
    expected = llm.generate([PROMPT], SamplingParams(max_tokens=12, logprobs=1))[0].logprobs
    assert expected is not None
    assert shown.token_logprobs == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert shown.text_offset is not None
    assert shown.text_offset[0] == 0


def test_stops_are_those_of_the_library_whole_and_streamed(client: OpenAI, llm: LLM) -> None:
    printable = list(range(1, 90))
    text = llm.generate([PROMPT], SamplingParams(max_tokens=20, allowed_token_ids=printable))[0].text
    expected = text[: text.index(text[9:11])]
    wish = {"model": "toy", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop": [text[9:11], "never"]}
    extra = {"allowed_token_ids": printable, "ignore_eos": True}
    whole = client.completions.create(**wish, extra_body=extra).choices[0]  # type: ignore[call-overload]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (expected, "stop", text[9:11])
    kept = client.completions.create(**wish, extra_body=extra | {"include_stop_str_in_output": True})  # type: ignore[call-overload]
    assert kept.choices[0].text == expected + text[9:11]
    chunks = list(client.completions.create(**wish, extra_body=extra, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].stop_reason == text[9:11]


def test_acceptance_is_in_the_response_as_vllm_has_it(client: OpenAI) -> None:
    def ask(**extra: object) -> dict[str, object]:
        found = client.completions.create(
            model="toy", prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"ignore_eos": True, **extra}
        )
        return found.to_dict().get("metrics")  # type: ignore[return-value]

    assert ask(spec_metrics="off") is None
    summary, detailed = ask()["speculative_decoding"], ask(spec_metrics="detailed")["speculative_decoding"]
    assert isinstance(summary, dict)
    assert isinstance(detailed, dict)
    assert "per_step_accepted" not in summary
    assert sum(detailed["per_step_accepted"]) == detailed["num_accepted_draft_tokens"]
    assert sum(detailed["per_step_drafted"]) == detailed["num_draft_tokens"]
    assert sum(detailed["acceptance_histogram"]) == detailed["num_spec_steps"] == len(detailed["per_step_accepted"])
    assert detailed["num_emitted_tokens"] == 19


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("wish", "most"), [({"enabled": False}, 0), ({"num_steps": 0}, 0), ({"num_steps": 1}, 1)])
def test_a_request_limits_its_own_drafts(
    client: OpenAI, wish: dict[str, object], most: int, temperature: float
) -> None:
    def ask(**extra: object) -> tuple[str, list[int]]:
        body = {"ignore_eos": True, "spec_metrics": "detailed", **extra}
        found = client.completions.create(
            model="toy", prompt=PROMPT, max_tokens=20, temperature=temperature, seed=7, extra_body=body
        )
        return found.choices[0].text, found.to_dict()["metrics"]["speculative_decoding"]["per_step_drafted"]  # type: ignore[index]

    free, limited = ask(), ask(speculative=wish)
    assert limited[0] == free[0]
    assert max(free[1]) == 2
    assert max(limited[1]) == most


@pytest.mark.parametrize(
    ("wish", "place"),
    [({"num_steps": -1}, ".num_steps"), ({"enabled": 1}, ".enabled"), ({"depth": 1}, ".depth"), (3, "")],
)
def test_a_wrong_wish_for_drafts_is_named(http: httpx2.Client, wish: object, place: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "speculative": wish})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"speculative{place}"


def test_models_and_ids(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").to_dict()["max_model_len"] == TOY_CONTEXT
    raw = client.completions.with_raw_response.create(
        model="toy", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"


WRONG = {
    "temperature": -1,
    "top_p": 0,
    "n": 0,
    "max_tokens": "8",
    "seed": 0.5,
    "stop": 3,
    "nonsense": 1,
    "suffix": "x",
    "prompt": [],
    "stream_options": {"include_usage": True},
    "timeout_s": 0,
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_named(http: httpx2.Client, field: str) -> None:
    body = {"model": "toy", "prompt": "x", "max_tokens": 2, field: WRONG[field]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("length", [TOY_CONTEXT - 1, TOY_CONTEXT, TOY_CONTEXT + 1, 10 * TOY_CONTEXT])
def test_a_prompt_that_fills_the_context(client: OpenAI, length: int) -> None:
    if length < TOY_CONTEXT:
        assert client.completions.create(model="toy", prompt=[1] * length, max_tokens=50).usage.completion_tokens == 1  # type: ignore[union-attr]
        return
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="toy", prompt=[1] * length, max_tokens=50)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * length}])
    assert refused.value.code == "context_length_exceeded"


def test_other_mistakes_are_openais_too(client: OpenAI, http: httpx2.Client) -> None:
    with pytest.raises(openai.NotFoundError) as lost:
        client.completions.create(model="other", prompt="x")
    assert (lost.value.param, lost.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content") as refused:
        client.chat.completions.create(  # type: ignore[call-overload]
            model="toy", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        )
    assert refused.value.param.startswith("messages[0].content")
    for path, body in (("/nothing", "{}"), ("/v1/completions", "{"), ("/v1/completions", '{"prompt": "\\ud800"}')):
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 404)
        assert json.loads(answer.content)["error"]["message"]
