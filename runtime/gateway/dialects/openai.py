"""What OpenAI's APIs have in common. No I/O and no clock."""

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

# One model is served, by whatever name. What concerns keeping, caching and billing changes no answer.
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
        """As arguments of PolicyCall."""
        same = {name: getattr(self, name) for name in ("n", "max_tokens", "temperature", "top_p", "min_p", "seed")}
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return {**same, "stop": stop, "top_k": self.top_k and max(0, self.top_k)}


class Streamed(Sampled, frozen=True, kw_only=True):
    """Chat completions and completions."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def streaming(self) -> dict[str, bool]:
        """As arguments of ChoicesAsked."""
        return {"stream": self.stream, "include_usage": self.stream_options.include_usage}


class ChoicesAsked(Asked, frozen=True, kw_only=True):
    """One that is answered with a choice for each reply, and, where it is streamed, with chunks of choices."""

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
    """A model is not made to keep to a schema: what it writes is what it is trained on, also where `strict` asks for it."""

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
    """The tools of a request, and its choice of them, as arguments of PolicyCall. `within`: the field of each in which its
    function stands, if not in the tool itself. Raises Refused, 400, for one that is no function: those are run by the API's own
    servers."""

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
    """A PolicyCall's, of a `tool_choice`. `named`: the tool that it names; `words`: ours for each that the API has instead.
    Raises Refused, 400, for other words, and where no such tool is there."""
    if named is not None:
        one_of("tool_choice", named, [tool.name for tool in tools])
        return f"function:{named}"
    if (ours := words[one_of("tool_choice", choice, words)]) == "required" and not tools:
        raise wrong("tool_choice", choice, "possible without tools")
    return ours


def called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def head(kind: str, id: str, model: str, created: float) -> dict[str, Any]:
    """What each answer and each chunk of one begins with."""
    return {"id": id, "object": kind, "created": int(created), "model": model}


def usage(completion: Completion) -> dict[str, int]:
    prompt, replies = len(completion.prompt), sum(len(reply.tokens) for reply in completion.replies)
    return {"prompt_tokens": prompt, "completion_tokens": replies, "total_tokens": prompt + replies}


def token_logprobs(reply: PolicyReply) -> dict[str, Any]:
    """Of each sampled token. It is named by its id, as vLLM does on its token route and with `return_tokens_as_token_ids`: a
    token need not have a text of its own."""
    pairs = zip(reply.tokens.tolist(), reply.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in pairs
        ]
    }


class ChunkEvents(Events, Generic[A]):
    """Chunks of choices, at last one of the tokens where they are wanted."""

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
        """What has not been told of a reply, and its end."""
        raise NotImplementedError

    def chunk(self, id: str, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> bytes:
        chunk = {**head(self.kind, id, self._model, self._created), "choices": choices}
        return event({**chunk, "usage": used} if self._asked.include_usage else chunk)
