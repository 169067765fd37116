"""Text to token ids and back: the ``tokenizers`` library, fed from a GGUF file or a Hugging Face folder, and chat templates."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from tiercel.core.errors import UserError

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types: special tokens, and added tokens that are plain text."""

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Word pattern of Llama 3 and Qwen 2, which differ only in how many digits stay together."""


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_SPLIT % digits), behavior="isolated")
    return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "gpt-2": _byte_level,
    "qwen2": lambda: _split(r"\p{N}"),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
}
"""Word splitting by GGUF's ``tokenizer.ggml.pre``."""

LLAMA3 = "llama-bpe"
"""Takes whole words from the vocabulary before it merges, and begins raw text with BOS unless the file says no."""


class Fields(Protocol):
    """Key/value pairs of a GGUF file."""

    def get(self, name: str, default: Any = None) -> Any: ...

    def need(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its chat template.

    Special tokens written out in a text become the special tokens, as with Hugging Face: whoever renders text from
    strangers must escape them.

    Args:
        where: file or folder, for messages.
        fast: the ``tokenizers`` object; its post-processor puts BOS before raw text.
        bos_token: given to templates.
        eos_token: given to templates.
        add_bos: raw text goes through the post-processor; a rendered chat never does.
        chat_template: Jinja source, or None.
    """

    where: str
    fast: FastTokenizer
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        return int(self.fast.get_vocab_size(with_added_tokens=True))

    def vocabulary_in_order(self) -> list[str]:
        """Every token's text by ascending id."""
        return [token for token, _ in sorted(self.fast.get_vocab(with_added_tokens=True).items(), key=lambda x: x[1])]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that ``decode`` leaves out."""
        return frozenset(i for i, token in self.fast.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with BOS in front where the model wants one.

        Raises:
            UserError: the text is not Unicode.
        """
        return self._ids(text, self.add_bos)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a piece of text, as it stands inside an answer: nothing is put around it."""
        return self._ids(text, False)

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 shows as U+FFFD."""
        return str(self.fast.decode(token_ids, skip_special_tokens=skip_special))

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant begins to answer.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,  # templates tell "none given" from "not known to the caller"
                documents=None,
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except (TemplateError, TypeError, ValueError) as error:  # a template may add None to a text, for one
            raise UserError(
                f"the chat template of {self.where} refuses these messages: {_first_line(error)}"
            ) from error

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise UserError(f"{self.where} has no chat template: give raw text instead of chat messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        return environment.from_string(self.chat_template)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of ``render_chat``; the template itself writes the special tokens.

        Raises:
            UserError: as ``render_chat``, or the text is not Unicode.
        """
        return self._ids(self.render_chat(messages), False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, or what Python makes of bytes that are not UTF-8
            raise UserError(
                f"a prompt holds {text[error.start]!a}, which is no character: give valid UTF-8 or JSON escapes"
            ) from error
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML and every character beyond ASCII, which no model was trained on."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


class StreamDecoder:
    """Text of tokens as they come: never half a character, and all pieces together equal ``decode`` of all tokens.

    A token costs the decoding of two or three; bytes that complete no character are held until one is complete.
    Tokenizers that fall back to single bytes judge a whole run of them: there the pieces add up if the bytes are valid
    UTF-8, while an invalid byte can no longer take back the characters shown before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is incomplete."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith("�"):
            return ""
        fresh = text[len(self._shown_text) :]
        # Keep the last shown piece as left context: some decoders treat the first token of a text differently.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._shown_text = self._tokenizer.decode(self._window)
        return fresh

    def finish(self) -> str:
        """What is left when no token follows: an incomplete character shows as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        return text[len(self._shown_text) :]


def tokenizer_from_gguf(where: str, fields: Fields) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes (byte-level BPE).

    Raises:
        UserError: a kind of tokenizer that is not supported, by name.
    """
    model, pre = fields.need("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{where}: tokenizer {model!r}/{pre!r} is not supported; supported are gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    fast = _byte_level_bpe(where, fields, tokens, ignore_merges=pre == LLAMA3)
    fast.pre_tokenizer = PRE_TOKENIZERS[pre]()
    fast.decoder = decoders.ByteLevel()

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise UserError(f"{where}: {name} token {index} is no token of a vocabulary of {len(tokens)}")
        return None if index is None else tokens[index]

    bos = token("bos")
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", pre == LLAMA3))
    if add_bos:
        _begin_with(fast, bos, where)
    return Tokenizer(where, fast, bos, token("eos"), add_bos, fields.get("tokenizer.chat_template"))


def _byte_level_bpe(where: str, fields: Fields, tokens: list[str], *, ignore_merges: bool) -> FastTokenizer:
    types: list[int] = fields.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    if len(types) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} tokens but {len(types)} token types; get the file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # `tokenizers` raises bare Exception for merges that do not fit the vocabulary
        raise UserError(
            f"{where}: its tokenizer merges are damaged ({_first_line(error)}); get the file again"
        ) from error
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [t for t, found in zip(tokens, types, strict=True) if found == kind]
        fast.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    return fast


def _begin_with(fast: FastTokenizer, bos_token: str | None, where: str) -> None:
    """Have raw text begin with ``bos_token``."""
    if bos_token is None:
        raise UserError(f"{where}: its text must begin with a BOS token but names none")
    special = [(bos_token, fast.token_to_id(bos_token))]
    fast.post_processor = processors.TemplateProcessing(single=[bos_token, "$A"], special_tokens=special)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer of a Hugging Face folder from ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises:
        UserError: a file is missing or unreadable.
    """
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        fast = FastTokenizer.from_file(str(path))
        config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several named templates: the default one is meant
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        bos, eos = (_token_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
    except Exception as error:  # `tokenizers` raises bare Exception for a missing or broken file
        raise UserError(f"model folder {folder}: cannot read its tokenizer files ({_first_line(error)})") from error
    fast.no_truncation()  # limits that were set for training must not cut a prompt
    fast.no_padding()
    add_bos = config.get("add_bos_token")
    if add_bos and not fast.encode("").ids:  # asked for, but tokenizer.json itself does not do it
        _begin_with(fast, bos, str(folder))
    return Tokenizer(str(folder), fast, bos, eos, add_bos is not False, template)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _token_text(value: Any) -> str | None:
    text = value["content"] if isinstance(value, dict) else value
    return None if text is None else str(text)
