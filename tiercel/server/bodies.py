"""What clients may send: OpenAI's fields and vLLM's, checked by type and range. A field that is not here is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiercel.server.config import SpecMetrics

Text = Annotated[str, Field(max_length=16_000_000)]
TokenIds = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    """Types are as JSON has them: ``"1"`` is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """See docs/server.md."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Speculative(Body):
    """How this request is drafted for; the answer does not depend on it."""

    enabled: bool = True
    num_steps: Annotated[int | None, Field(ge=0)] = None


class Wishes(Body):
    """What chat and text completions have in common. ``sampling.py`` says which fields go to the engine."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    typical_p: Annotated[float | None, Field(gt=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    ignore_eos: bool | None = None
    speculative: Speculative | None = None
    spec_metrics: SpecMetrics | None = None
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    user: str | None = None


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """A call that the assistant made; ``arguments`` is JSON in a text."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """One of the assistant's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class FunctionDescription(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """OpenAI's envelope around a function."""

    type: Literal["function"]
    function: FunctionDescription


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """Its envelope."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Wishes):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionBody(Wishes):
    """``POST /v1/completions``."""

    prompt: (
        Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    suffix: str | None = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    response_format: dict[str, Any] | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
