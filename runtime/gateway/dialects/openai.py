"""OpenAI's chat completions and completions: POST /v1/chat/completions, POST /v1/completions, as in the Python package 3.57
(https://platform.openai.com/docs/api-reference). vLLM's token route: POST /inference/v1/generate, as in `GenerateRequest` and
`SamplingParams` of vLLM 0.30."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Tool, ToolCall
from runtime.gateway.dialects import fields
from runtime.gateway.dialects.fields import Asked, Events, S, Strict, TokenId, decode, event, one_of, read, text_of, wrong

ROLES = ("system", "developer", "user", "assistant", "tool")
# One model is served under any name. Fields about storing, caching and billing do not change the answer.
UNUSED = "model user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention"
_PENALTIES: dict[str, tuple[Any, ...]] = {"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,)}
_TEXT_ALONE = {"modalities": (["text"],), "response_format": ({"type": "text"},), "verbosity": ("medium",)}
_WORDS = {"auto": "auto", "none": "none", "required": "required"}


class StreamOptions(Strict, frozen=True):
    include_usage: bool = False
    include_obfuscation: Any = None


class Sampled(Strict, frozen=True, kw_only=True):
    """How to sample. top_k and min_p are vLLM's."""

    n: fields.Replies = 1
    max_tokens: fields.Count | None = None
    stop: fields.StopText | fields.StopTexts = ()
    temperature: fields.NonNegative | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    seed: fields.Seed | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling as arguments of PolicyCall."""
        same = {name: getattr(self, name) for name in ("n", "max_tokens", "temperature", "top_p", "min_p", "seed")}
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return {**same, "stop": stop, "top_k": self.top_k and max(0, self.top_k)}


class Streamed(Sampled, frozen=True, kw_only=True):
    """Fields of chat completions and completions that concern streaming."""

    unused = UNUSED
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
        start = _head(self.kind, completion.id, completion.model, completion.created)
        return {**start, "choices": choices, "usage": _usage(completion)}

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        raise NotImplementedError

    def token_logprobs(self, reply: PolicyReply) -> dict[str, Any] | None:
        """Return the log-probability of each sampled token if the request wants it. Each token is named by its id, since it may
        have no text of its own. vLLM's token route and `return_tokens_as_token_ids` do the same."""
        if not self.logprobs:
            return None
        pairs = zip(reply.tokens.tolist(), reply.logprobs.tolist(), strict=True)
        return {"content": [{"token": f"token_id:{id}", "logprob": x, "bytes": None, "top_logprobs": []} for id, x in pairs]}


class ChunkEvents(Events):
    """Chunks of choices; at the end the usage, if asked for."""

    kind: ClassVar[str]  # of a chunk

    def end(self, completion: Completion) -> bytes:
        chunks = [self.rest(completion.id, index, reply) for index, reply in enumerate(completion.replies)]
        if self._asked.include_usage:
            chunks.append(self.chunk(completion.id, [], _usage(completion)))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        """Return the unsent rest of a reply, and its end."""
        raise NotImplementedError

    def chunk(self, id: str, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> bytes:
        chunk = {**_head(self.kind, id, self._model, self._created), "choices": choices}
        return event({**chunk, "usage": used} if self._asked.include_usage else chunk)


def _head(kind: str, id: str, model: str, created: float) -> dict[str, Any]:
    """Return the first fields of an answer or of a chunk."""
    return {"id": id, "object": kind, "created": int(created), "model": model}


def _usage(completion: Completion) -> dict[str, int]:
    prompt, replies = len(completion.prompt), sum(len(reply.tokens) for reply in completion.replies)
    return {"prompt_tokens": prompt, "completion_tokens": replies, "total_tokens": prompt + replies}


# ---- Tools


class _Function(Strict, frozen=True):
    """A function. `strict` has no effect: the model is trained on what it writes, so no schema constrains its output."""

    unused = "strict type allowed_callers output_schema"
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


class _NamedFunction(Strict, frozen=True):
    unused = "type"
    name: str


def functions(tools: Sequence[Any], choice: str | dict[str, Any], within: str = "") -> dict[str, Any]:
    """Return the tools and the tool choice of a request as arguments of PolicyCall. `within`: the field of each tool that holds
    the function; "": the tool itself. Raises Refused, 400, for tools that are not functions: the API's own servers run them."""

    def function(struct: type[S], given: Any, where: str) -> S:
        if not isinstance(given, dict):
            raise wrong(where, given, "an object")
        one_of(f"{where}.type", given.get("type"), ("function",))
        return read(struct, given.get(within), f"{where}.{within}") if within else read(struct, given, where)

    found = [function(_Function, tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    given = tuple(Tool(each.name, each.description, each.parameters) for each in found)
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


def _called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


# ---- Chat completions


class _ChatRequest(Streamed, frozen=True, kw_only=True):
    neutral: ClassVar = {**_PENALTIES, **_TEXT_ALONE, "logit_bias": ({},), "top_logprobs": (0,)}
    messages: list[Any]
    max_completion_tokens: fields.Count | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False


class _ChatFunction(Strict, frozen=True):
    name: str
    arguments: str
    parsed_arguments: Any = None  # like `parsed`: added by the client's helpers for streams


class _ChatToolCall(Strict, frozen=True):
    id: str
    function: _ChatFunction
    type: str = "function"
    index: Any = None  # this and the next field come back with answers of this API, others, and litellm
    provider_specific_fields: Any = None


class _ChatMessage(Strict, frozen=True):
    unused = "annotations provider_specific_fields cache_control parsed"
    role: str
    content: Any = None
    name: str = ""
    tool_calls: tuple[_ChatToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""
    reasoning: str = ""  # vLLM's current name of `reasoning_content`


class _ChatEvents(ChunkEvents):
    """The chunks of each reply: its role, its reasoning and its text as they grow, its calls, its end."""

    kind = "chat.completion.chunk"

    def progress(self, id: str, index: int, message: Message) -> bytes:
        deltas: list[dict[str, Any]] = []
        if index not in self._sent:
            self._sent[index] = 0
            deltas.append({"role": "assistant", "content": "" if message.content else None})
        if thought := self._new((index, "reasoning"), message.reasoning):
            deltas.append(_thought(thought))
        if text := self._new((index, "text"), message.content):
            deltas.append({"content": text})
        for number, call in enumerate(message.tool_calls):
            if (index, call.id) not in self._sent:
                self._sent[index, call.id] = 0
                deltas.append({"tool_calls": [{"index": number, **_called(call)}]})
        return b"".join(self._delta(id, index, **delta) for delta in deltas)

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        end = self.chunk(id, [{"index": index, "delta": {}, **self._asked.end(reply)}])
        return self.progress(id, index, reply.message) + end

    def _delta(self, id: str, index: int, **delta: Any) -> bytes:
        return self.chunk(id, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])


class ChatAsked(ChoicesAsked, frozen=True):
    kind = "chat.completion"
    streamed = _ChatEvents

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        message = reply.message
        content = message.content or (None if message.tool_calls else "")
        answered: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **_thought(message.reasoning)}
        if message.tool_calls:
            answered["tool_calls"] = [_called(call) for call in message.tool_calls]
        return {"index": index, "message": answered, **self.end(reply)}

    def end(self, reply: PolicyReply) -> dict[str, Any]:
        return {"logprobs": self.token_logprobs(reply), "finish_reason": reply.end}


def _thought(reasoning: str) -> dict[str, str]:
    """Return the reasoning, if any, under both names that clients look for."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def parse_chat(body: bytes) -> ChatAsked:
    """Parse a request for chat completions. Raises Refused, 400."""
    request = read(_ChatRequest, decode(body))
    if not request.messages:
        raise wrong("messages", [], "a conversation")
    sampling = request.sampling()
    if (limit := request.max_completion_tokens) is not None:
        if request.max_tokens not in (None, limit):
            raise wrong("max_tokens", request.max_tokens, f"equal to max_completion_tokens, {limit}")
        sampling["max_tokens"] = limit
    call = PolicyCall(
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)),
        parallel_tool_calls=request.parallel_tool_calls,
        **functions(request.tools, request.tool_choice, "function"),
        **sampling,
    )
    return ChatAsked(call=call, logprobs=request.logprobs, **request.streaming())


def _message(given: Any, where: str) -> Message:
    message = read(_ChatMessage, given, where)
    role, calls = one_of(f"{where}.role", message.role, ROLES), message.tool_calls
    thought = message.reasoning_content or message.reasoning
    if role != "assistant" and (calls or thought):
        raise wrong(f"{where}.role", role, '"assistant": no other role has tool_calls or reasoning_content')
    if (role == "tool") != bool(message.tool_call_id):
        raise wrong(f"{where}.tool_call_id", message.tool_call_id, 'allowed: only role "tool" has it, and must have it')
    for index, call in enumerate(calls):
        one_of(f"{where}.tool_calls[{index}].type", call.type, ("function",))
    return Message(
        role="system" if role == "developer" else role,
        content=text_of(message.content, f"{where}.content"),
        tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=thought,
    )


# ---- Completions

Tokens = Annotated[tuple[TokenId, ...], Meta(min_length=1)]


class _CompletionRequest(Streamed, frozen=True, kw_only=True):
    neutral: ClassVar = {**_PENALTIES, "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",)}
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None  # only of the sampled tokens: no others are kept


class _CompletionEvents(ChunkEvents):
    kind = "text_completion"

    def progress(self, id: str, index: int, message: Message) -> bytes:
        new = self._new(index, message.content)
        return self.chunk(id, [self._asked.part(index, new, None)]) if new else b""

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        return self.chunk(id, [self._asked.part(index, self._new(index, reply.message.content), reply)])


class CompletionAsked(ChoicesAsked, frozen=True):
    kind = "text_completion"
    streamed = _CompletionEvents

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        return self.part(index, reply.message.content, reply)

    def part(self, index: int, text: str, reply: PolicyReply | None) -> dict[str, Any]:
        """Return a choice with a part of the text. `reply`: None before its end."""
        logprobs = None
        if reply is not None and (found := self.token_logprobs(reply)):
            names = {"tokens": "token", "token_logprobs": "logprob"}
            logprobs = {key: [one[name] for one in found["content"]] for key, name in names.items()}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None if reply is None else _end(reply)}


def parse_completion(body: bytes) -> CompletionAsked:
    """Parse a request for completions. Raises Refused, 400."""
    request = read(_CompletionRequest, decode(body))
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise wrong("prompt", prompt, "one prompt; one request may not have several")
        (prompt,) = prompt
    asked = {"text": prompt} if isinstance(prompt, str) else {"tokens": fields.converted(Tokens, prompt, "prompt")}
    call = PolicyCall(**asked, **request.sampling())
    return CompletionAsked(call=call, logprobs=request.logprobs is not None, **request.streaming())


# ---- The token route


_PLAIN_TOKENS = {"ignore_eos": (False,), "min_tokens": (0,), "bad_words": ([],)}


class _GenerateRequest(Strict, frozen=True):
    unused = "model cache_salt assistant_tokens_mask token_offsets stream_options"
    neutral: ClassVar = {"stream": (False,), "priority": (0,), "content_parts": ([],)}
    token_ids: Tokens
    sampling_params: dict[str, Any]
    request_id: str = ""
    return_token_ids: bool = False


class _SamplingParams(Sampled, frozen=True, kw_only=True):
    # The answer is tokens without a text. The unused fields control how vLLM computes.
    unused = (
        "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
        "output_kind stream_interval flat_logprobs skip_clone skip_reading_prefix_cache"
    )
    neutral: ClassVar = {**_PENALTIES, **_PLAIN_TOKENS, "extra_args": ({},), "watermarking": (True,)}
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None  # 1 gives only the sampled token's, like 0, also in vLLM


class GenerateAsked(ChoicesAsked, frozen=True, kw_only=True):
    kind = ""
    request_id: str
    prompt: bool

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Return an answer like vLLM's, with an `id` that a reward may name."""
        answer = ChoicesAsked.answer(self, completion)
        del answer["object"]
        answer["request_id"] = self.request_id or completion.id
        answer["prompt_token_ids"] = completion.prompt.tolist() if self.prompt else None
        return answer

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        choice = {"index": index, "token_ids": reply.tokens.tolist()}
        return {**choice, "logprobs": self.token_logprobs(reply), "finish_reason": _end(reply)}


def parse_generate(body: bytes) -> GenerateAsked:
    """Parse a request for tokens. Raises Refused, 400."""
    request = read(_GenerateRequest, decode(body))
    params = read(_SamplingParams, request.sampling_params, "sampling_params")
    call = PolicyCall(tokens=request.token_ids, stop_token_ids=params.stop_token_ids, **params.sampling())
    logprobs, prompt = params.logprobs is not None, request.return_token_ids
    return GenerateAsked(call=call, request_id=request.request_id, logprobs=logprobs, prompt=prompt)


def _end(reply: PolicyReply) -> str:
    return "length" if reply.end == "length" else "stop"
