"""OpenAI's completions, POST /v1/completions (https://platform.openai.com/docs/api-reference/completions/create); and vLLM's
token route, POST /inference/v1/generate, as in `GenerateRequest` and `SamplingParams` of vLLM 0.30."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from runtime.gateway.conversation import Completion, PolicyCall, PolicyReply
from runtime.gateway.dialects.fields import Asked, Events, FieldTable, TokenId, decode, read, wrong
from runtime.gateway.dialects.openai import (
    PENALTIES,
    UNUSED,
    ChoicesAsked,
    ChunkEvents,
    Sampled,
    Streamed,
    token_logprobs,
    usage,
)

Tokens = Annotated[tuple[TokenId, ...], Meta(min_length=1)]


class _CompletionRequest(Streamed, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None  # only of the sampled tokens: no others are kept


_REQUEST = FieldTable(
    _CompletionRequest, UNUSED, {**PENALTIES, "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",)}
)


class CompletionAsked(ChoicesAsked, frozen=True):
    kind: ClassVar[str] = "text_completion"

    def choice(self, index: int, reply: PolicyReply) -> dict[str, Any]:
        return self.part(index, reply.message.content, reply)

    def events(self, model: str, created: float) -> Events:
        return _CompletionEvents(self, model, created)

    def part(self, index: int, text: str, reply: PolicyReply | None) -> dict[str, Any]:
        """Return a choice with a part of the text. `reply`: None before its end."""
        logprobs = None
        if self.logprobs and reply is not None:
            each = token_logprobs(reply)["content"]
            logprobs = {key: [one[name] for one in each] for key, name in (("tokens", "token"), ("token_logprobs", "logprob"))}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None if reply is None else _end(reply)}


class _CompletionEvents(ChunkEvents[CompletionAsked]):
    kind: ClassVar[str] = "text_completion"

    def progress(self, id: str, index: int, text: str) -> bytes:
        new = self._new(index, text)
        return self.chunk(id, [self._asked.part(index, new, None)]) if new else b""

    def rest(self, id: str, index: int, reply: PolicyReply) -> bytes:
        return self.chunk(id, [self._asked.part(index, self._new(index, reply.message.content), reply)])


def parse(body: bytes) -> CompletionAsked:
    """Parse a request. Raises Refused, 400."""
    request = _REQUEST.read(decode(body))
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise wrong("prompt", prompt, "one prompt; one request may not have several")
        (prompt,) = prompt
    asked = {"text": prompt} if isinstance(prompt, str) else {"tokens": read(Tokens, prompt, "prompt")}
    call = PolicyCall(**asked, **request.sampling())
    return CompletionAsked(call=call, logprobs=request.logprobs is not None, **request.streaming())


# ----------------------------------------------------------------------------------------------------------------------
# The token route


class _GenerateRequest(Struct, frozen=True):
    token_ids: Tokens
    sampling_params: dict[str, Any]
    request_id: str = ""
    return_token_ids: bool = False


class _SamplingParams(Sampled, frozen=True, kw_only=True):
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None  # 1 gives only the sampled token's, like 0, also in vLLM


_GENERATE = FieldTable(
    _GenerateRequest,
    "model cache_salt assistant_tokens_mask token_offsets stream_options",
    {"stream": (False,), "priority": (0,), "content_parts": ([],)},
)
# The answer is tokens without a text. The unused fields control how vLLM computes.
_SAMPLING = FieldTable(
    _SamplingParams,
    "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
    "output_kind stream_interval flat_logprobs skip_clone skip_reading_prefix_cache",
    {**PENALTIES, "ignore_eos": (False,), "min_tokens": (0,), "extra_args": ({},), "bad_words": ([],), "watermarking": (True,)},
)


class GenerateAsked(Asked, frozen=True, kw_only=True):
    request_id: str
    logprobs: bool
    prompt: bool

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Return an answer like vLLM's, with an `id` that a reward may name."""
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


def parse_generate(body: bytes) -> GenerateAsked:
    """Parse a request. Raises Refused, 400."""
    request = _GENERATE.read(decode(body))
    params = _SAMPLING.read(request.sampling_params, "sampling_params")
    call = PolicyCall(tokens=request.token_ids, stop_token_ids=params.stop_token_ids, **params.sampling())
    logprobs, prompt = params.logprobs is not None, request.return_token_ids
    return GenerateAsked(call=call, request_id=request.request_id, logprobs=logprobs, prompt=prompt)


def _end(reply: PolicyReply) -> str:
    return "length" if reply.end == "length" else "stop"
