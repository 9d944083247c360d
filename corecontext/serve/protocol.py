"""Define requests and answers: the OpenAI protocol's fields that are served, and ours; every other
field is refused by name."""

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_LOGPROBS = 20
_shown = reprlib.Repr()  # short, however large the value is
_shown.maxlevel = 2


def _is_unicode(text: str) -> str:
    """Refuse half a character (an unpaired surrogate), which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "must be valid Unicode, got half a character (an unpaired surrogate)"
        ) from None
    return text


def _is_off(value: bool) -> bool:
    """Refuse true."""
    if value:
        raise ValueError
    return value


def _none_for_empty(value: Any) -> Any:
    """Replace a value that changes nothing by None."""
    return None if _is_empty(value) else value


def _is_empty(value: Any) -> bool:
    """Whether a field's value changes nothing, whatever the field means."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _rule(rule: str) -> WrapValidator:
    """Return a validator that refuses a field with a single error, which states its rule.

    Pydantic would write an error for each member of a union, with names of Python code.
    """

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            got = ascii(_shown.repr(value))[1:-1][:100]
            text = f"must be {rule}, got {got}"
            raise PydanticCustomError("rule", "{text}", {"text": text}) from None

    return WrapValidator(check)


Text = Annotated[str, AfterValidator(_is_unicode)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, le=2**31)]
# A list's first invalid element ends its check: an error for each takes seconds to build.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
# Fields with one value, the one that has no effect.
Off = (
    Annotated[
        bool,
        AfterValidator(_is_off),
        Field(json_schema_extra={"const": False}),
        _rule("false: it is not supported"),
    ]
    | None
)
Zero = Annotated[float, Field(ge=0, le=0), _rule("0: it is not supported")] | None
One = Annotated[float, Field(ge=1, le=1), _rule("1: it is not supported")] | None
Single = Annotated[int, Field(ge=1, le=1), _rule("1: a prompt gets one answer")] | None
Empty = Annotated[
    None, BeforeValidator(_none_for_empty), _rule("null or empty: it is not supported")
]
Ignored = Annotated[Any, Field(description="Ignored.")]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None


class Fields(BaseModel):
    """A body of known fields only, whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, body: Any) -> Any:
        """Drop unknown fields that are empty; of the others keep the first, so that one error is
        built, not one for each."""
        if not isinstance(body, dict):
            return body
        unknown = [name for name in body if name not in cls.model_fields]
        filled = [name for name in unknown if not _is_empty(body[name])]
        dropped = set(unknown) - set(filled[:1])
        return {name: value for name, value in body.items() if name not in dropped}


class StreamOptions(Fields):
    """Contents of a stream besides the text."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class GenerateRequest(Fields):
    """Fields of both kinds of request. None is always the default."""

    model: Text = Field(max_length=1000, description="As GET /v1/models names it.")
    max_tokens: int | None = Field(
        None, ge=0, le=2**31, description="Most tokens to make; 0 only with echo."
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 takes the likeliest token. Default: 1."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Sample among the likeliest that reach this."
    )
    top_k: int | None = Field(
        None, ge=1, le=2**31, description="Sample among so many likeliest (an extension)."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Of the sampling; random where left out."
    )
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None,
        _rule(f"a text of 1 to 1000 characters or a list of at most {MAX_STOPS} of them"),
    ] = Field(None, description="Texts before which the answer ends.")
    stream: bool | None = Field(
        None, description="Send the answer piece by piece as server-sent events."
    )
    stream_options: StreamOptions | None = None
    group_size: int | None = Field(
        None, ge=1, le=2**20, description="This request's g (an extension)."
    )
    window_size: int | None = Field(
        None, ge=1, le=2**24, description="This request's s (an extension)."
    )
    fetch_groups: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="This request's k, at most the server's; 0 fetches nothing (an extension).",
    )
    ignore_eos: bool | None = Field(
        None, description="Go on after an end-of-text token (an extension)."
    )
    # Fields that clients send by themselves, and that change no answer:
    user: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    # Accepted with the value that has no effect, for clients that send every field:
    store: Off = None
    n: Single = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    min_p: Zero = None
    repetition_penalty: One = None
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=0), _rule("empty: it is not supported")] | None
    ) = None

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
        _rule(
            "a text without unpaired surrogates, a list of token numbers from 0 on, or a list of 1 "
            f"to {MAX_PROMPTS} of either"
        ),
    ] = Field(description="A text, its token numbers, or several of either: a choice for each.")
    best_of: Single = None
    echo: bool | None = Field(None, description="Send the prompt before the answer.")
    logprobs: Logprobs = Field(
        None, description="Log-probabilities, with those of so many likeliest tokens."
    )
    suffix: Empty = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]

    @property
    def top(self) -> int | None:
        """How many likeliest tokens to send beside each; None sends no log-probabilities."""
        return self.logprobs


class Part(Fields):
    """A piece of a message; text only."""

    type: Literal["text"]
    text: Text


class Message(Fields):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[Part], Field(min_length=1, fail_fast=True)],
        _rule(
            "a text without unpaired surrogates or a list of parts such as "
            "{'type': 'text', 'text': '...'}"
        ),
    ]
    name: Text | None = None
    # Added by the official client to an answer that it sends back as part of the next chat:
    refusal: Empty = None
    annotations: Empty = None
    audio: Empty = None
    function_call: Empty = None
    tool_calls: Empty = None

    @property
    def text(self) -> str:
        """The content in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(piece.text for piece in self.content)


class TextFormat(Fields):
    """The format of every answer."""

    type: Literal["text"]


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    # mutant serve: an error for each invalid message
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31, description="As max_tokens.")
    max_tokens: int | None = Field(None, ge=1, le=2**31, description="Most tokens to make.")
    logprobs: bool | None = Field(None, description="Send log-probabilities.")
    top_logprobs: Logprobs = Field(
        None, description="With those of so many likeliest tokens; needs logprobs."
    )
    # Accepted with the value that has no effect:
    parallel_tool_calls: Ignored = None
    tool_choice: (
        Annotated[Literal["none", "auto"], _rule("none or auto: tools are not supported")] | None
    ) = None
    response_format: (
        Annotated[TextFormat, _rule("{'type': 'text'}: JSON mode and schemas are not supported")]
        | None
    ) = None
    modalities: (
        Annotated[list[Literal["text"]], Field(fail_fast=True), _rule("['text'], the only one")]
        | None
    ) = None
    echo: ClassVar[bool] = False

    @property
    def top(self) -> int | None:
        """How many likeliest tokens to send beside each; None sends no log-probabilities."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


class ErrorBody(BaseModel):
    """The rule that was broken, and the way out."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorBody


class Settings(BaseModel):
    """The g, s and k that a request got; all null under full attention, g also where each layer has
    its own."""

    group_size: int | None
    window_size: int | None
    fetch_groups: int | None


class UsedBytes(BaseModel):
    """Bytes of the cache of a request's tokens; of one process where several share a model."""

    device: int
    host: int
    full_attention: int = Field(description="Of full attention's cache of these tokens.")


class Usage(BaseModel):
    """Tokens of a request, and the bytes of their cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    cache_bytes: UsedBytes


class Answer(BaseModel):
    """A whole answer; choices are as in the OpenAI protocol."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    corecontext: Settings


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "corecontext"
    max_model_len: int
    has_chat_template: bool


class Models(BaseModel):
    """The list of all models, which has one entry."""

    object: str = "list"
    data: list[Model]


class Status(BaseModel):
    """State of the server."""

    status: str
