"""The common parts of OpenAI's APIs. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from runtime.gateway.conversation import Completion, PolicyReply, Tool, ToolCall
from runtime.gateway.dialects.fields import (
    Asked,
    Count,
    Events,
    MinP,
    NonNegative,
    Replies,
    Seed,
    Share,
    StopText,
    StopTexts,
    Strict,
    TopK,
    event,
    one_of,
    read,
    wrong,
)

A = TypeVar("A", bound="ChoicesAsked")
S = TypeVar("S", bound=Strict)

# One model is served under any name. Fields about storing, caching and billing do not change the answer.
UNUSED = "model user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention"
PENALTIES: dict[str, tuple[Any, ...]] = {"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,)}


class StreamOptions(Strict, frozen=True):
    include_usage: bool = False
    include_obfuscation: Any = None


class Sampled(Strict, frozen=True, kw_only=True):
    """How to sample. top_k and min_p are vLLM's."""

    n: Replies = 1
    max_tokens: Count | None = None
    stop: StopText | StopTexts = ()
    temperature: NonNegative | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling as arguments of PolicyCall."""
        same = {name: getattr(self, name) for name in ("n", "max_tokens", "temperature", "top_p", "min_p", "seed")}
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return {**same, "stop": stop, "top_k": self.top_k and max(0, self.top_k)}


class Streamed(Sampled, frozen=True, kw_only=True):
    """Fields of chat completions and completions that concern streaming."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def streaming(self) -> dict[str, bool]:
        """Return the streaming options as arguments of ChoicesAsked."""
        return {"stream": self.stream, "include_usage": self.stream_options.include_usage}


class ChoicesAsked(Asked, frozen=True, kw_only=True):
    """A request answered with one choice per reply; if streamed, with chunks of choices."""

    kind: ClassVar[str]  # of the answer
    include_usage: bool = False
    logprobs: bool

    def answer(self, completion: Completion) -> dict[str, Any]:
        choices = [self.choice(index, reply) for index, reply in enumerate(completion.replies)]
        start = head(self.kind, completion.id, completion.model, completion.created)
        return {**start, "choices": choices, "usage": usage(completion)}

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        raise NotImplementedError


class _Function(Strict, frozen=True):
    """A function. `strict` has no effect: the model is trained on what it writes, so no schema constrains its output."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    type: Any = None
    allowed_callers: Any = None
    output_schema: Any = None
    defer_loading: None = None


_WORDS = {"auto": "auto", "none": "none", "required": "required"}


class _NamedFunction(Strict, frozen=True):
    name: str


def functions(tools: Sequence[Any], choice: str | dict[str, Any], within: str = "") -> dict[str, Any]:
    """Return the tools and the tool choice of a request as arguments of PolicyCall. `within`: the field of each tool that holds
    the function; "": the tool itself. Raises Refused, 400, for tools that are not functions: the API's own servers run those
    tools."""

    def function(struct: type[S], given: Any, where: str) -> S:
        if not isinstance(given, dict):
            raise wrong(where, given, "an object")
        one_of(f"{where}.type", given.get("type"), ("function",))
        if within:
            return read(struct, given.get(within), f"{where}.{within}")
        return read(struct, {name: value for name, value in given.items() if name != "type"}, where)

    found = [function(_Function, tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    given = tuple(Tool(each.name, each.description or "", each.parameters or {}) for each in found)
    named = None if isinstance(choice, str) else function(_NamedFunction, choice, "tool_choice").name
    return {"tools": given, "tool_choice": choice_of(choice, named, given, _WORDS)}


def choice_of(choice: Any, named: str | None, tools: Sequence[Tool], words: dict[str, str]) -> str:
    """Return PolicyCall's `tool_choice`. `named`: the tool that the choice names. `words`: PolicyCall's word for each word of
    the API. Raises Refused, 400, for other words or an unknown tool."""
    if named is not None:
        one_of("tool_choice", named, [tool.name for tool in tools])
        return f"function:{named}"
    if (ours := words[one_of("tool_choice", choice, words)]) == "required" and not tools:
        raise wrong("tool_choice", choice, "possible without tools")
    return ours


def called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def head(kind: str, id: str, model: str, created: float) -> dict[str, Any]:
    """Return the first fields of an answer or of a chunk."""
    return {"id": id, "object": kind, "created": int(created), "model": model}


def usage(completion: Completion) -> dict[str, int]:
    prompt, replies = len(completion.prompt), sum(len(reply.tokens) for reply in completion.replies)
    return {"prompt_tokens": prompt, "completion_tokens": replies, "total_tokens": prompt + replies}


def token_logprobs(reply: PolicyReply) -> dict[str, Any]:
    """Return the log-probability of each sampled token. Each token is named by its id, since it may have no text of its own.
    vLLM's token route and `return_tokens_as_token_ids` do the same."""
    pairs = zip(reply.tokens.tolist(), reply.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in pairs
        ]
    }


class ChunkEvents(Events, Generic[A]):
    """Chunks of choices; the last chunk has the token usage if it was requested."""

    kind: ClassVar[str]  # of a chunk

    def __init__(self, asked: A, model: str, created: float):
        super().__init__(model, created)
        self._asked = asked

    def end(self, completion: Completion) -> bytes:
        chunks = [self.rest(completion.id, index, reply) for index, reply in enumerate(completion.replies)]
        if self._asked.include_usage:
            chunks.append(self.chunk(completion.id, [], usage(completion)))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        """Return the unsent rest of a reply, and its end."""
        raise NotImplementedError

    def chunk(self, id: str, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> bytes:
        chunk = {**head(self.kind, id, self._model, self._created), "choices": choices}
        return event({**chunk, "usage": used} if self._asked.include_usage else chunk)
