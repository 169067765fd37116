from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiercel.core.errors import UserError
from tiercel.models.opening import open_checkpoint
from tiercel.models.tokenizer import StreamDecoder, Tokenizer, tokenizer_from_folder

TEXTS = [
    "Hello, world!",
    "  two  spaces\tand\ttabs\n\nand lines ",
    "1234567890 12,345.67",
    "def f(x):\n    return {'a': x ** 2}",
    "Grüße aus Köln – schöne Maße",
    "👩‍👩‍👧‍👦 family 😀🇩🇪",
    "日本語のテキスト、中文文本。",
    "she's they'll I'd we've",
    "a<|im_end|>b<|im_start|>c",
    "",
]


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Tokenizer:
    return open_checkpoint(smollm2).tokenizer


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_ids_and_text_equal_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_chat_ids_equal_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    chats = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C\n"}],
    ]
    for chat in chats:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.encode_chat(chat) == expected


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.finish()]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_a_stream_never_shows_half_a_character(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    pieces = stream(ours, ids)
    assert "".join(pieces) == ours.decode(ids)
    if "�" not in text and ours.decode(ids, skip_special=False) == text:  # a few rare bytes are not in the vocabulary
        assert not any("�" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_a_stream_of_any_tokens_adds_up(ours: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(ours, ids)) == ours.decode(ids)


def test_an_emoji_cut_short_shows_as_a_replacement_at_the_end(ours: Tokenizer) -> None:
    ids = ours.encode("😀")
    assert len(ids) > 1
    pieces = stream(ours, ids[:-1])
    assert set(pieces[:-1]) == {""}
    assert set(pieces[-1]) == {"�"}


def test_a_template_that_refuses_is_a_users_error(toy_model: Path) -> None:
    good = tokenizer_from_folder(toy_model)
    refusing = Tokenizer("here", good.fast, None, None, False, "{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="no system role"):
        refusing.render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer("here", good.fast, None, None, False, None).render_chat([])


def test_missing_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        tokenizer_from_folder(tmp_path)
