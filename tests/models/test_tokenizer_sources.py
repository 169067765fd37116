"""What a tokenizer takes from its source: BOS, limits, splits, templates. References: ``transformers``, spelled-out ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from tiercel.core.errors import UserError
from tiercel.models.opening import open_checkpoint
from tiercel.models.tokenizer import StreamDecoder, Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

SPECIAL = ("<unk>", "<s>", "</s>")


def write_folder(folder: Path, fast: FastTokenizer, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_fallback(*, bos: bool = True) -> FastTokenizer:
    """A tokenizer as Llama 2 has it: spaces as ▁, unknown characters as single bytes."""
    pieces = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abehtr.", "▁a", "th", "the", "▁the"]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if bos:
        fast.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return fast


FALLBACK_TEXTS = ["the theatre", "a  b. the", "日本 😀 the", "", " the"]


def test_bos_comes_from_the_post_processor_as_in_transformers(tmp_path: Path) -> None:
    ours = tokenizer_from_folder(write_folder(tmp_path, byte_fallback()))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in FALLBACK_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ids[0] == 1


def test_bos_follows_the_settings_where_they_speak(tmp_path: Path) -> None:
    never = tokenizer_from_folder(write_folder(tmp_path / "never", byte_fallback(), add_bos_token=False))
    assert never.encode("the") == [never.fast.token_to_id("▁the")]
    asked = tokenizer_from_folder(write_folder(tmp_path / "asked", byte_fallback(bos=False), add_bos_token=True))
    assert asked.encode("the") == [1, asked.fast.token_to_id("▁the")]
    nameless = write_folder(tmp_path / "nameless", byte_fallback(bos=False), add_bos_token=True, bos_token=None)
    with pytest.raises(UserError, match="names none"):
        tokenizer_from_folder(nameless)


def test_limits_stored_for_training_do_not_cut_a_prompt(tmp_path: Path) -> None:
    fast = byte_fallback()
    fast.enable_truncation(2)
    fast.enable_padding(length=9)
    ours = tokenizer_from_folder(write_folder(tmp_path, fast))
    assert ours.decode(ours.encode("the theatre a b")) == "the theatre a b"
    assert len(ours.encode("the")) == 2


@pytest.mark.parametrize("text", [*FALLBACK_TEXTS, "👩‍👩‍👧‍👦é", "a</s> the</s></s>b"])
def test_streams_of_a_byte_fallback_tokenizer_add_up(text: str, tmp_path: Path) -> None:
    ours = tokenizer_from_folder(write_folder(tmp_path, byte_fallback()))
    ids, stream = ours.encode(text), StreamDecoder(ours)
    pieces = [stream.push(i) for i in ids]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == ours.decode(ids)


class GgufFields:
    """Key/value pairs given as a dict, without the ``tokenizer.ggml.`` in front."""

    def __init__(self, **values: Any) -> None:
        self.values = {f"tokenizer.ggml.{name}": value for name, value in values.items()}

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def need(self, name: str) -> Any:
        return self.values[name]


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_fields(pre: str, words: list[str], joins: list[str], **changes: Any) -> GgufFields:
    tokens = [*ALPHABET, *words, "<s>", "</s>"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": joins,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    return GgufFields(**{**values, **changes})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ĠĠ", "7", "5", "x"]),  # digits are cut off first, so both spaces stay together
        ("gpt-2", ["Ġ", "Ġ", "75", "x"]),
        ("qwen2", ["Ġ", "Ġ", "7", "5", "x"]),
        ("llama-bpe", ["<s>", "Ġ", "Ġ", "75", "x"]),
    ],
)
def test_each_split_cuts_digits_its_own_way(pre: str, pieces: list[str]) -> None:
    ours = tokenizer_from_gguf("here", gguf_fields(pre, ["ĠĠ", "75"], ["Ġ Ġ", "7 5"]))
    assert [ours.fast.id_to_token(i) for i in ours.encode("  75x")] == pieces


def test_smollm_agrees_with_the_published_pre_tokenizer(smollm2: Path) -> None:
    ours = open_checkpoint(smollm2).tokenizer
    published = FastTokenizer.from_str(ours.fast.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in ["up.  75%", "below.\n\n23 October", "1234", "a1b22 c333"]:
        assert ours.encode(text) == published.encode(text).ids


def test_llama3_takes_whole_words_that_no_merge_reaches() -> None:
    ours = tokenizer_from_gguf("here", gguf_fields("llama-bpe", ["abc"], [], add_bos_token=False))
    assert [ours.fast.id_to_token(i) for i in ours.encode("abc")] == ["abc"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"merges": ["a zz"]}, "merges"),
        ({"merges": ["a"]}, "merges"),
        ({"token_type": [1]}, "token types"),
        ({"bos_token_id": 99999}, "bos token 99999"),
        ({"model": "llama"}, "'llama'"),
        ({"add_bos_token": True, "bos_token_id": None}, "names none"),
    ],
)
def test_damaged_gguf_tokenizers(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        tokenizer_from_gguf("here", gguf_fields("gpt-2", [], [], **changes))
    assert "\n" not in str(error.value)


def with_template(template: str) -> Tokenizer:
    return Tokenizer("here", byte_fallback(), "<s>", "</s>", False, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{%- if tools is not none %}tools{% endif %}{% if not documents %}plain{% endif %}{{ messages | tojson }}",
        "{% for m in messages %}\n    {% if loop.index0 > 0 %}{% break %}{% endif %}\n{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% if add_generation_prompt %}answer:{% endif %}{{ strftime_now('%Y') | length }}",
    ],
)
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_fallback(), chat_template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": " <b>Grüße</b> "}, {"role": "assistant", "content": "the"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer_from_folder(folder).render_chat(messages) == expected


def test_a_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from the list"}]
    folder = write_folder(tmp_path, byte_fallback(), chat_template=listed)
    assert tokenizer_from_folder(folder).render_chat([]) == "from the list"
    (folder / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_folder(folder).render_chat([]) == "from the file"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",  # a fault of the template: its message has several lines
        "{{ 'x' + messages[0]['content'] }}",
        "{{ messages[0]['content'].strip() }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
    ],
)
def test_what_a_template_cannot_render_is_one_line(template: str) -> None:
    with pytest.raises(UserError, match="chat template of here") as error:
        with_template(template).render_chat([{"role": "user", "content": None}])
    assert "\n" not in str(error.value)
