"""Text to token ids and back: the ``tokenizers`` library, fed from a GGUF file or a Hugging Face folder, and chat templates."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tiercel.core.errors import UserError

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types: special tokens, and added tokens that are plain text."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "gpt-2": _byte_level,
    "qwen2": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"), _byte_level(use_regex=False)]
    ),
}
"""Word splitting by GGUF's ``tokenizer.ggml.pre``."""


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
        fast: the ``tokenizers`` object; it adds no special tokens by itself.
        bos_token: put before raw text if ``add_bos``; templates get it too.
        eos_token: given to templates.
        add_bos: raw text begins with ``bos_token``.
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

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with BOS in front where the model wants one."""
        prefix = self.bos_token if self.add_bos and self.bos_token else ""
        return list(self.fast.encode(prefix + text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 shows as U+FFFD."""
        return str(self.fast.decode(token_ids, skip_special_tokens=skip_special))

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant begins to answer.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(f"{self.where} has no chat template: give raw text instead of chat messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except TemplateError as error:
            raise UserError(f"the chat template of {self.where} refuses these messages: {error}") from error

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of ``render_chat``; the template itself writes the special tokens."""
        return list(self.fast.encode(self.render_chat(messages), add_special_tokens=False).ids)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class StreamDecoder:
    """Text of tokens as they come: never half a character, and all pieces together equal ``decode`` of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is incomplete."""
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
    types: list[int] = fields.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = PRE_TOKENIZERS[pre]()
    fast.decoder = decoders.ByteLevel()
    added = [
        (token, kind == CONTROL) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)
    ]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, special in added if special])
    fast.add_tokens([AddedToken(t, special=False, normalized=False) for t, special in added if not special])

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    return Tokenizer(where, fast, token("bos"), token("eos"), add_bos, fields.get("tokenizer.chat_template"))


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
    except Exception as error:  # `tokenizers` raises bare Exception for a missing or broken file
        raise UserError(f"model folder {folder}: cannot read its tokenizer files ({error})") from error
    if isinstance(template, list):  # several named templates: the default one is meant
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    bos, eos = (_token_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
    return Tokenizer(str(folder), fast, bos, eos, bool(config.get("add_bos_token", False)), template)


def _token_text(value: Any) -> str | None:
    text = value["content"] if isinstance(value, dict) else value
    return None if text is None else str(text)
