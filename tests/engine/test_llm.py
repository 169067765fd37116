from pathlib import Path

import pytest

from tiercel import LLM, EngineConfig, SamplingParams, SpecConfig, UserError
from tiercel.engine.engine import LoadedTarget


@pytest.fixture
def llm(toy_model: Path, toy_draft: Path, toy_target: LoadedTarget) -> LLM:
    return LLM(
        engine=EngineConfig(model=str(toy_model)),
        spec=SpecConfig(draft=str(toy_draft), min_confidence=0),
        target=toy_target,
    )


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["one", "two", "three"], wishes)
    assert [len(o.token_ids) for o in outputs] == [9, 1, 5]
    assert [o.usage["completion_tokens"] for o in outputs] == [9, 1, 5]
    assert outputs[0].text == llm.tokenizer.decode(outputs[0].token_ids)
    again = llm.generate("one", wishes[0])[0]
    assert again.token_ids == outputs[0].token_ids
    assert again.request_id != outputs[0].request_id


def test_text_goes_through_the_chat_template_unless_raw(llm: LLM) -> None:
    chat = llm.encode("hi")
    assert llm.encode([{"role": "user", "content": "hi"}]) == chat
    assert llm.encode("hi", chat=False) == llm.tokenizer.encode("hi") != chat
    assert llm.encode([1, 2, 3]) == [1, 2, 3]


def test_streams_add_up_to_the_result(llm: LLM) -> None:
    events = list(llm.stream(["one", "two"], GREEDY))
    for request_id in {e.request_id for e in events}:
        mine = [e for e in events if e.request_id == request_id]
        output = mine[-1].output
        assert output is not None
        assert "".join(e.text for e in mine) == output.text
        assert [e.token_id for e in mine[:-1]] == output.token_ids
        assert [e.source for e in mine[:-1]] == output.sources


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    for _ in llm.stream(["one", "two"], GREEDY):
        break
    assert llm.engine.requests == {}
    assert llm.engine.kv.num_slots_used == 0
    assert len(llm.generate("three", GREEDY)[0].token_ids) == 12


def test_two_streams_at_once_are_refused(llm: LLM) -> None:
    first = llm.stream("one", GREEDY)
    next(first)
    with pytest.raises(UserError, match="still running"):
        llm.generate("two", GREEDY)
    assert sum(e.token_id is not None for e in first) == 11  # the first goes on unharmed
    assert len(llm.generate("two", GREEDY)[0].token_ids) == 12


def test_a_single_token_list_or_chat_must_be_wrapped(llm: LLM) -> None:
    for bare in ([1, 2, 3], [{"role": "user", "content": "hi"}]):
        with pytest.raises(UserError, match="list of its own"):
            llm.generate(bare, GREEDY)  # type: ignore[arg-type]
        assert len(llm.generate([bare], GREEDY)[0].token_ids) == 12  # type: ignore[list-item]


def test_request_ids_must_match_the_prompts(llm: LLM) -> None:
    for ids in (["a"], ["a", "a"]):
        with pytest.raises(UserError, match="request ids"):
            llm.generate(["one", "two"], GREEDY, request_ids=ids)


def test_one_bad_prompt_starts_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(llm.engine.pipeline, "on_request", lambda *args: ended.append(args))
    with pytest.raises(UserError, match="600 tokens"):
        llm.generate([[1, 2], [3] * 600], GREEDY)
    assert not llm.engine.has_work
    assert ended == []


def test_json_has_the_documented_keys(llm: LLM) -> None:
    row = llm.generate("one", GREEDY)[0].to_json()
    assert list(row) == ["request_id", "text", "token_ids", "finish_reason", "usage", "metrics"]
    spec = row["metrics"]["speculative_decoding"]
    assert spec["num_emitted_tokens"] == row["usage"]["completion_tokens"] - 1
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert sum(spec["stage_time_ms"].values()) > 0
    assert row["metrics"]["time_to_first_token_ms"] + row["metrics"]["generation_time_ms"] == pytest.approx(
        row["metrics"]["e2e_ms"]
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda m, d: LLM(str(m), engine=EngineConfig()), "model"),
        (lambda m, d: LLM(str(m / "nowhere")), "unknown"),
        (lambda m, d: LLM(str(m), spec=SpecConfig(draft=str(d), num_steps=4)), "3 MTP layers"),
        (lambda m, d: LLM(str(m), spec=SpecConfig(draft=str(d / "nowhere"))), "draft"),
        (lambda m, d: LLM(str(m)), "no draft is known"),
        (lambda m, d: LLM(engine=EngineConfig(str(m), max_model_len=999), spec=SpecConfig("none")), "512"),
        (lambda m, d: LLM(engine=EngineConfig(str(m), device="cuda"), spec=SpecConfig("none")), "cuda"),
    ],
)
def test_settings_that_cannot_work(make, named: str, toy_model: Path, toy_draft: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=named) as error:
        make(toy_model, toy_draft)
    assert "\n" not in str(error.value)


def test_a_misfit_is_refused_before_any_weight_is_read(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.engine.engine.load_model", lambda *_: pytest.fail("read the weights"))
    with pytest.raises(UserError, match="does not fit"):
        LLM(str(toy_model), spec=SpecConfig(draft="smollm2-135m-mtp3"))


def test_wishes_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(UserError, match="0 sampling parameters for 1 prompts"):
        llm.generate(["a"], [])
