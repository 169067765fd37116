"""What a structured answer must look like; named as in vLLM's ``structured_outputs``."""

import json as json_module
from dataclasses import dataclass
from typing import Any

from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A grammar that the answer must follow: exactly one of the first five.

    Args:
        json: a JSON schema, as an object or as its text.
        json_object: any JSON object.
        regex: a regular expression that matches the whole answer.
        choice: the answer is one of these texts.
        grammar: EBNF (GBNF, as llama.cpp writes it); its first rule is ``root``.
        reasoning_end: text that ends a free part before the answer, such as ``</think>``: the grammar holds for what follows
            it. None: it holds from the first token on.

    Raises:
        UserError: none or several are given, or one has the wrong type; the message names it.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    reasoning_end: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise UserError(
                f"structured_outputs: {' and '.join(given) or 'nothing'} given: give exactly one of {', '.join(KINDS)}"
            )
        if isinstance(self.json, dict):  # as text, so that what was checked cannot change
            object.__setattr__(self, "json", json_module.dumps(self.json))
        if self.choice is not None:
            texts = tuple(self.choice) if isinstance(self.choice, list | tuple) else ()
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise UserError("structured_outputs.choice: give a list of at least one text, none of them empty")
            object.__setattr__(self, "choice", texts)
        for name in ("json", "regex", "grammar", "reasoning_end"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise UserError(f"structured_outputs.{name}={value!r} is not allowed: give a text that is not empty")
        if not isinstance(self.json_object, bool):
            raise UserError(f"structured_outputs.json_object={self.json_object!r} is not allowed: give true or false")

    @property
    def kind(self) -> str:
        """Which of the five was given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


KINDS = ("json", "json_object", "regex", "choice", "grammar")
