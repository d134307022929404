"""OpenAI's completions, POST /v1/completions (https://platform.openai.com/docs/api-reference/completions/create); and vLLM's
route from token ids to token ids, POST /inference/v1/generate, as vLLM 0.30 has it in `GenerateRequest`, `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from runtime.gateway.conversation import Completion, PolicyCall, PolicyReply
from runtime.gateway.dialects.answers import Events
from runtime.gateway.dialects.fields import FieldTable, Strict, TokenId, decode, read, wrong
from runtime.gateway.dialects.openai import PENALTIES, UNUSED, ChunkEvents, Sampled, Streamed, head, token_logprobs, usage

Tokens = Annotated[tuple[TokenId, ...], Meta(min_length=1)]


class _CompletionRequest(Streamed, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None  # the sampled tokens' alone: no others' are kept


class _TokenPrompt(Strict, frozen=True):
    prompt: Tokens


_REQUEST = FieldTable(
    _CompletionRequest, UNUSED, {**PENALTIES, "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",)}
)


class CompletionAsked(Struct, frozen=True):
    call: PolicyCall
    stream: bool
    include_usage: bool
    logprobs: bool

    def answer(self, completion: Completion) -> dict[str, Any]:
        choices = [self.choice(index, reply.message.content, reply) for index, reply in enumerate(completion.replies)]
        start = head("text_completion", completion.id, completion.model, completion.created)
        return {**start, "choices": choices, "usage": usage(completion)}

    def events(self, model: str, created: float) -> Events:
        return _CompletionEvents(self, model, created)

    def choice(self, index: int, text: str, reply: PolicyReply | None) -> dict[str, Any]:
        """`reply`: None before its end."""
        logprobs = None
        if self.logprobs and reply is not None:
            each = token_logprobs(reply)["content"]
            logprobs = {key: [one[name] for one in each] for key, name in (("tokens", "token"), ("token_logprobs", "logprob"))}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None if reply is None else _end(reply)}


class _CompletionEvents(ChunkEvents):
    def __init__(self, asked: CompletionAsked, model: str, created: float):
        super().__init__("text_completion", asked.include_usage, model, created)
        self._asked = asked

    def told(self, id: str, index: int, text: str) -> bytes:
        new = self._new(index, text)
        return self.chunk(id, [self._asked.choice(index, new, None)]) if new else b""

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        return self.chunk(id, [self._asked.choice(index, self._new(index, reply.message.content), reply)])


def parse(body: bytes) -> CompletionAsked:
    """Raises Refused, 400."""
    request = _REQUEST.read(decode(body))
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise wrong("prompt", prompt, "one prompt; several in one request are not implemented")
    text = prompt if isinstance(prompt, str) else None
    tokens = None if isinstance(prompt, str) else read(_TokenPrompt, {"prompt": prompt}, "").prompt
    call = PolicyCall(text=text, tokens=tokens, **request.sampling())
    return CompletionAsked(call, request.stream, request.stream_options.include_usage, request.logprobs is not None)


# ----------------------------------------------------------------------------------------------------------------------
# The token route


class _GenerateRequest(Struct, frozen=True):
    token_ids: Tokens
    sampling_params: dict[str, Any]
    request_id: str = ""
    return_token_ids: bool = False


class _SamplingParams(Sampled, frozen=True, kw_only=True):
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None  # 1 gives the sampled token's alone, as 0, also in vLLM


_GENERATE = FieldTable(
    _GenerateRequest,
    "model cache_salt assistant_tokens_mask token_offsets stream_options",
    {"stream": (False,), "priority": (0,), "content_parts": ([],)},
)
# The answer is tokens, without a text. What is unused of the others says how vLLM computes.
_SAMPLING = FieldTable(
    _SamplingParams,
    "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
    "output_kind stream_interval flat_logprobs skip_clone skip_reading_prefix_cache",
    {**PENALTIES, "ignore_eos": (False,), "min_tokens": (0,), "extra_args": ({},), "bad_words": ([],), "watermarking": (True,)},
)


class GenerateAsked(Struct, frozen=True):
    call: PolicyCall
    request_id: str
    logprobs: bool
    prompt: bool
    stream: bool = False

    def answer(self, completion: Completion) -> dict[str, Any]:
        """As vLLM's, and `id`, by which a reward names it."""
        choices = [
            {
                "index": index,
                "token_ids": reply.tokens.tolist(),
                "logprobs": token_logprobs(reply) if self.logprobs else None,
                "finish_reason": _end(reply),
            }
            for index, reply in enumerate(completion.replies)
        ]
        return {
            "id": completion.id,
            "created": int(completion.created),
            "model": completion.model,
            "request_id": self.request_id or completion.id,
            "choices": choices,
            "usage": usage(completion),
            "prompt_token_ids": completion.prompt.tolist() if self.prompt else None,
        }

    def events(self, model: str, created: float) -> Events:
        raise NotImplementedError  # `stream` is never true


def parse_generate(body: bytes) -> GenerateAsked:
    """Raises Refused, 400."""
    request = _GENERATE.read(decode(body))
    params = _SAMPLING.read(request.sampling_params, "sampling_params")
    call = PolicyCall(tokens=request.token_ids, stop_token_ids=params.stop_token_ids, **params.sampling())
    return GenerateAsked(call, request.request_id, params.logprobs is not None, request.return_token_ids)


def _end(reply: PolicyReply) -> str:
    return "length" if reply.end == "length" else "stop"
