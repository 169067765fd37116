"""Where answers stop by text or token: the same whatever is drafted, and nothing of the stop is shown before it is known."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import TOY_EOS
from tests.engine.test_engine import PROMPT, perfect, plain, wrong_from
from tests.scripted import run, scripted_engine
from tiercel import LLM, EngineConfig, SamplingParams, SpecConfig
from tiercel.core.request import FinishReason
from tiercel.engine.answer_text import AnswerText
from tiercel.engine.engine import LoadedTarget
from tiercel.engine.outputs import RequestOutput
from tiercel.models.opening import open_checkpoint
from tiercel.models.tokenizer import Tokenizer

LETTERS = "abé😀"


@pytest.fixture(scope="module")
def tokenizer(toy_model: Path) -> Tokenizer:
    return open_checkpoint(toy_model).tokenizer


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter: the text before the first stop that is complete, and the longest one that is complete there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_text_stops_where_reading_letter_by_letter_stops(tokenizer: Tokenizer) -> None:
    words = st.text(LETTERS, min_size=1, max_size=5)

    @settings(max_examples=300, deadline=None)
    @given(st.text(LETTERS, max_size=20), st.lists(words, min_size=1, max_size=4), st.booleans())
    def check(text: str, stops: list[str], keeps: bool) -> None:
        before, stop = expected(text, stops)
        whole = before + stop if keeps and stop else before
        answer = AnswerText(tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=keeps))
        shown = ""
        for token_id in tokenizer.encode(text):
            shown += answer.push(token_id)
            assert whole.startswith(shown)
            if answer.stopped is not None:
                break
        assert shown + answer.finish() == whole
        assert answer.stopped == stop

    check()


def test_nothing_is_held_back_that_cannot_become_a_stop(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer, SamplingParams(stop=["abc", "bd"]))
    assert [answer.push(token) for token in tokenizer.encode("xababcx")] == ["x", "", "", "ab", "", "", ""]
    kept = AnswerText(tokenizer, SamplingParams(stop=["abc"], include_stop_str_in_output=True))
    assert [kept.push(token) for token in tokenizer.encode("xabc")] == ["x", "a", "b", "c"]


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (7, 6), (8, 8)])
def test_a_stop_counts_if_it_ends_after_min_tokens(tokenizer: Tokenizer, min_tokens: int, shown: int) -> None:
    answer = AnswerText(tokenizer, SamplingParams(stop=["ab"], min_tokens=min_tokens))
    text = "".join(map(answer.push, tokenizer.encode("abababab"))) + answer.finish()
    assert text == "abababab"[:shown]


def right(count: int) -> Callable[[object], int]:
    return lambda _: count


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
@pytest.mark.parametrize("at", range(12))
def test_a_stop_inside_a_run_cuts_the_rest(
    toy_target: LoadedTarget, tokenizer: Tokenizer, at: int, num_right: int
) -> None:
    """Tokens up to the one that completes the stop, whatever was accepted behind it."""
    wish = SamplingParams(max_tokens=20, ignore_eos=True, allowed_token_ids=PRINTABLE)
    answer = plain(toy_target, PROMPT, wish)
    text = tokenizer.decode(answer)
    assert len(text) == 20
    stop = text[at : at + 3]
    end = text.index(stop) + 3
    engine = scripted_engine(toy_target, wrong_from({"a": answer}, right(num_right)), 5)
    stopping = SamplingParams(max_tokens=20, ignore_eos=True, allowed_token_ids=PRINTABLE, stop=[stop])
    req = engine.add_request("a", PROMPT, stopping)
    assert run(engine)["a"] == answer[:end] == req.output_token_ids
    assert (req.finish_reason, req.stop_reason) == (FinishReason.STOP, stop)
    assert sum(req.spec.emitted) == end - 1
    assert len(req.output_sources) == end


PRINTABLE = list(range(1, 90))
"""Toy tokens that are one ASCII character each."""


@pytest.mark.parametrize("at", range(1, 8))
def test_stop_tokens_end_an_answer_even_where_eos_does_not(toy_target: LoadedTarget, at: int) -> None:
    answer = plain(toy_target)
    first = answer.index(answer[at])
    engine = scripted_engine(toy_target, perfect({"a": answer}), 5)
    wish = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[answer[at]], logprobs=0)
    req = engine.add_request("a", PROMPT, wish)
    assert run(engine)["a"] == answer[: first + 1]
    assert (req.finish_reason, req.stop_reason) == (FinishReason.STOP, answer[at])
    assert [one.token_id for one in req.output_logprobs] == answer[: first + 1]


def test_a_stop_that_waits_for_half_a_character_is_found_at_the_last_token(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é")[0]
    for tokens in ([*tokenizer.encode("ab"), half], tokenizer.encode("ab")):
        answer = AnswerText(tokenizer, SamplingParams(stop=["b"]))
        shown = "".join(map(answer.push, tokens)) + answer.finish()
        assert (shown, answer.stopped) == ("a", "b")


@pytest.fixture(scope="module")
def llm(toy_model: Path, toy_draft: Path, toy_target: LoadedTarget) -> LLM:
    spec = SpecConfig(draft=str(toy_draft), min_confidence=0)
    return LLM(engine=EngineConfig(model=str(toy_model)), spec=spec, target=toy_target)


def ask(llm: LLM, **wishes: object) -> RequestOutput:
    common = {"max_tokens": 20, "ignore_eos": True, "allowed_token_ids": PRINTABLE}
    events = list(llm.stream([PROMPT], SamplingParams(**common | wishes)))  # type: ignore[arg-type]
    output = events[-1].output
    assert output is not None
    assert "".join(event.text for event in events) == output.text
    assert [event.token_id for event in events[:-1]] == output.token_ids
    return output


def test_what_stopped_an_answer_is_shown_only_on_request(llm: LLM) -> None:
    whole = ask(llm)
    stop = whole.text[7:10]
    end = whole.text.index(stop) + 3
    without, kept = ask(llm, stop=stop), ask(llm, stop=stop, include_stop_str_in_output=True)
    assert (without.text, kept.text) == (whole.text[: end - 3], whole.text[:end])
    assert without.token_ids == kept.token_ids == whole.token_ids[:end]
    assert without.to_json()["stop_reason"] == without.record.stop_reason == stop
    assert without.usage["completion_tokens"] == end
    token = whole.token_ids[6]
    first = whole.token_ids.index(token)
    without, kept = ask(llm, stop_token_ids=[token]), ask(llm, stop_token_ids=[token], include_stop_str_in_output=True)
    assert (without.text, kept.text) == (whole.text[:first], whole.text[: first + 1])
    assert without.token_ids == kept.token_ids == whole.token_ids[: first + 1]
    assert without.stop_reason == token


def test_eos_ends_with_stop_and_no_reason(llm: LLM) -> None:
    output = ask(llm, ignore_eos=False, allowed_token_ids=[TOY_EOS])
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("", [TOY_EOS], "stop", None)
