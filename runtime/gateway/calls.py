"""Answer one call of the policy: build its prompt from the graph, get replies from a rollout, add them to the graph.

    PolicyCall ── extend (thread) ──► prompt ── generate ──► tokens ── parse (thread) ──► graph.add ──► Completion

A reply is generated in pieces if its client streams it, or if a stop text must be found. Each piece continues the piece before
it, from the KV cache that the rollout kept.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from runtime import timeouts, types
from runtime.errors import DeadlineExceeded, InvalidMessage, Unreachable
from runtime.gateway.conversation import TOO_LONG, Completion, Message, OnText, PolicyCall, PolicyReply, Refused, ReplyEnd
from runtime.gateway.episodes import GatewayEpisode, mixed
from runtime.gateway.graph import Extension
from runtime.gateway.rendering import TemplateRenderer
from runtime.gateway.tool_calls import without_start_of
from runtime.types import GroupRequest, PolicyVersion, RoutedExperts, RunEpisodesRequest, Sample, SamplingParams, TokenSets

T = TypeVar("T")

BRIEF = 1024  # tokens; up to so many parse in less than a millisecond, which is faster than a thread
PIECES = (16, 32, 64, 128)  # tokens of the first pieces of a reply; all further pieces have the last size


Rollouts = Callable[[GroupRequest, str, PolicyVersion], Awaitable[tuple[list[Sample], str]]]
"""Returns the replies and the rollout that made them: where they cost least, of equal rollouts the named one. No token is older
than the version. Raises DeadlineExceeded; raises Unreachable if no rollout serves."""


class PolicyCalls:
    """Answers calls, both of episodes and outside any episode."""

    def __init__(self, *, model: str, renderer: TemplateRenderer, rollouts: Rollouts, context: int, run: SamplingParams | None):
        """Set the limits. `context`: tokens that a conversation may have. `run`: the sampling of the run. The loss is computed
        for it, so a call cannot override it. None without a run: each call chooses its own sampling."""
        self._model, self._renderer, self._rollouts, self._context, self._run = model, renderer, rollouts, context, run
        self._threads = ThreadPoolExecutor(2, "conversations")
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def answer(self, episode: GatewayEpisode, call: PolicyCall, on_text: OnText | None = None) -> Completion:
        """Return the replies. Raises Refused: 400 for an invalid call, 408 at the deadline, 503 if no rollout serves."""
        began, call_id, task = time.time(), f"call-{secrets.token_hex(12)}", episode.request
        # Rendering a long conversation takes milliseconds: a thread does it, and the event loop stays free.
        extension: Extension = await self._in_thread(episode.graph.extend, call)
        request = GroupRequest(
            group_id=0,
            prompt=extension.prompt,
            n=call.n,
            seed=mixed(episode.seed if call.seed is None or task or self._run else call.seed, episode.calls),
            sampling=self._sampling(task, call, len(extension.prompt), len(extension.given)),
            purpose="train" if task is None else task.purpose,
            keep=True,
        )
        episode.calls += 1
        closing = "" if call.parallel_tool_calls else self._renderer.form.closing
        stops = (*call.stop, closing) if closing else call.stop
        try:
            if stops or on_text is not None:
                each = partial(on_text, call_id) if on_text is not None else None
                read = partial(self._message, call, extension, call_id)
                reply = partial(self._in_pieces, episode, read=read, stops=stops, on_text=each)
                # The replies run beside each other. Each wait ends with a piece from a rollout, or at the deadline.
                replies = await asyncio.gather(*(reply(replace(request, n=1, first=i)) for i in range(call.n)))
            else:
                samples = await self._generate(episode, request)
                replies = [(sample, "") for sample in samples]
        except InvalidMessage as error:  # the engine refuses the call's parameters
            raise Refused(400, str(error).partition(": ")[2]) from None  # cut off the group; callers do not know groups
        except DeadlineExceeded as error:
            raise Refused(408, str(error)) from None
        except Unreachable as error:
            raise Refused(503, f"no rollout serves: {error.reason}", retry_after=timeouts.GATEWAY_RETRY) from None
        reading = [partial(self._reply, call, extension, call_id, i, *each) for i, each in enumerate(replies)]
        if sum(len(sample.tokens) for sample, _ in replies) <= BRIEF:
            made = [work() for work in reading]
        else:
            made = await asyncio.gather(*map(self._in_thread, reading))  # parse long replies in threads
        completion = Completion(id=call_id, created=began, model=self._model, prompt=extension.prompt, replies=tuple(made))
        self.counts["malformed_calls"] += sum(reply.malformed for reply in made)
        if not episode.over:
            episode.graph.add(extension, completion.id, made)
        return completion

    def _sampling(self, task: RunEpisodesRequest | None, call: PolicyCall, prompt: int, given: int) -> SamplingParams:
        """Return the sampling of one call. `given`: new tokens in `prompt`. Raises Refused if the conversation is too long."""
        room = self._context - prompt
        if room < 1:
            why = f"this model's maximum context length is {self._context} tokens, reply included; the messages have {prompt}"
            raise Refused(400, why, "messages", code=TOO_LONG)
        run = self._run if task is None else task.sampling
        wishes = {name: getattr(call, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        asked = {name: value for name, value in wishes.items() if value is not None}
        if run is None:
            run = SamplingParams(max_new_tokens=self._context, **asked)
        else:
            self.counts["overridden"] += any(value != getattr(run, name) for name, value in asked.items())
        most = min(room, run.max_new_tokens, room if call.max_tokens is None else call.max_tokens)
        stop = (*self._renderer.stop_ids, *call.stop_token_ids)
        stops, begin = tuple(dict.fromkeys(stop)), _unfed(run, prompt - given)
        return replace(run, max_new_tokens=most, stop_token_ids=stops, experts_from=begin)

    async def _generate(self, episode: GatewayEpisode, request: GroupRequest) -> list[Sample]:
        """Generate under a unique group id. Such ids are below the ids of evaluations and above the ids of probes."""
        own = replace(request, group_id=types.GATEWAY_GROUPS - 1 - secrets.randbits(60))
        least = PolicyVersion() if episode.request is None else episode.request.version
        samples, episode.rollout = await self._rollouts(own, episode.rollout, least)
        return samples

    async def _in_pieces(
        self,
        episode: GatewayEpisode,
        request: GroupRequest,
        read: Callable[[int, Sample, bool], tuple[Message, bool]],
        stops: Sequence[str],
        on_text: Callable[[int, Message], None] | None,
    ) -> tuple[Sample, str]:
        """Return one reply and the stop text that ended it."""
        index, left, parts = request.first, request.sampling.max_new_tokens, list[Sample]()
        for number, size in enumerate(chain(PIECES, repeat(PIECES[-1]))):
            grown = np.concatenate([request.prompt, *(part.tokens for part in parts)])
            sampling = replace(request.sampling, max_new_tokens=min(size, left))
            if parts:
                sampling = replace(sampling, experts_from=_unfed(sampling, len(grown)))
            piece = replace(request, prompt=grown, seed=mixed(request.seed, number), sampling=sampling)
            (part,) = await self._generate(episode, piece)
            parts.append(part)
            left -= len(part.tokens)
            whole = _joined(parts)
            cut, stop = (await self._in_thread(self._cut, whole, stops)) if stops else (whole, "")
            if on_text is not None:
                message, _ = await self._in_thread(read, index, cut, False)
                content = message.content.partition(stop)[0] if stop else without_start_of(stops, message.content)
                on_text(index, replace(message, content=content))
            if stop or part.finish_reason == "stop" or not left:
                return cut, stop
        raise AssertionError("pieces have no end")

    def _cut(self, sample: Sample, stops: Sequence[str]) -> tuple[Sample, str]:
        """Cut the sample behind the first token that completes a stop text. Return the sample and the stop text, or ""."""
        text = self._renderer.decode(sample.tokens)
        found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
        if not found:
            return sample, ""
        _, stop = min(found)

        def has_it(size: int) -> bool:  # monotonic: more tokens keep the stop text
            return stop in self._renderer.decode(sample.tokens[:size])

        least = bisect_left(range(len(sample.tokens)), True, lo=1, key=has_it)
        return replace(sample.part(slice(least)), finish_reason="stop"), stop

    def _message(
        self, call: PolicyCall, extension: Extension, id: str, index: int, sample: Sample, ended: bool
    ) -> tuple[Message, bool]:
        """Return the message of a reply, and whether a call in it is malformed. If not `ended`: the part that is settled."""
        tools = () if call.tool_choice == "none" else call.tools
        message, malformed = self._renderer.parse(extension.forced, sample.tokens, tools, f"{id} {index}", ended)
        calls = message.tool_calls if call.parallel_tool_calls else message.tool_calls[:1]
        return replace(message, tool_calls=calls), malformed

    def _reply(self, call: PolicyCall, extension: Extension, id: str, index: int, sample: Sample, stop: str) -> PolicyReply:
        message, malformed = self._message(call, extension, id, index, sample, True)
        if stop and stop in call.stop:
            message = replace(message, content=message.content.partition(stop)[0])
        end: ReplyEnd = "length" if sample.finish_reason == "length" else "tool_calls" if message.tool_calls else "stop"
        own = sample.tokens, sample.logprobs, sample.versions
        malformed &= end != "length"  # not a call that is cut off
        return PolicyReply(message, *own, end, stop, sample.kept, sample.experts, malformed)


def _unfed(sampling: SamplingParams, known: int) -> int:
    """Return the prompt position from which a continued request returns its experts: that of the last of the `known` tokens,
    the only one that the model has not read yet. -1 if the request returns no experts."""
    return max(known - 1, 0) if sampling.experts_from >= 0 else -1


def _joined(parts: Sequence[Sample]) -> Sample:
    names = ("tokens", "loss_mask", "logprobs", "versions")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    kept = TokenSets.joined([part.kept for part in parts], [len(part.tokens) for part in parts])
    experts = RoutedExperts.joined([part.experts for part in parts])
    return Sample(**columns, finish_reason=parts[-1].finish_reason, kept=kept, experts=experts)
