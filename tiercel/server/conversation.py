"""A conversation as OpenAI's API has it, as chat templates take it."""

import json
from collections.abc import Sequence
from typing import Any

from tiercel.server.bodies import Message
from tiercel.server.errors import invalid


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: text contents, ``developer`` as ``system``, arguments of calls as objects.

    Raises:
        ApiError: the arguments of a call are no JSON object.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid(f"{where}.function.arguments", "give a JSON object as text")
    return found
