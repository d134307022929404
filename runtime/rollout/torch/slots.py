"""What the embedded rollout engine knows of its running sequences: plain arrays on the host.

The device holds only the key-value cache. A step sends two small arrays there and fetches one back, and everything else
is host arithmetic, so that a slot can be refilled or moved without asking the device.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.rollout.engine import make_sample
from runtime.rollout.torch.decoder import LENGTH_STEP, KVCache, Span, round_up
from runtime.types import EncodedSet, FinishReason, GroupRequest, KeptSets, Sample, SamplingParams, encode_set

# ---- Sampling
#
# Sampling by inverse CDF: one uniform number a token, from a stream that depends on (seed, sample) alone.
#
# So a reply does not depend on which other sequences share the batch, on its slot, or on the replica.


class Kept(NamedTuple):
    """What filters left of m rows."""

    rows: torch.Tensor  # int64 [m], which rows these are
    sizes: torch.Tensor  # int64 [m], tokens that are left
    order: torch.Tensor  # int64 [m, vocabulary], of which they are the first


class DrawnTokens(NamedTuple):
    tokens: torch.Tensor  # int64 [n]
    logprobs: torch.Tensor  # float32 [n]
    kept: Kept | None = None  # of the rows that keep their sets


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """The first `count` numbers of the stream of (seed, sample): float32 [count], multiples of 2**-23 in [0, 1).

    Philox (Salmon et al. 2011) is counter-based: streams of different keys are independent. 23 bits, because then
    u * total < total holds in float32 too, for every total.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], np.uint64)
    bits = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def as_row(params: SamplingParams) -> tuple[float, float, float, float, float]:
    """A row of the array that `RowSampling` takes: 1/temperature (0: greedy), top-p and top-k (infinite: off), min-p; 1 to keep
    the set that they leave."""
    inverse = 1.0 / params.temperature if params.temperature else 0.0
    top_p = params.top_p if params.top_p < 1 else math.inf
    return inverse, top_p, params.top_k or math.inf, params.min_p, float(params.keep_sets)


class RowSampling:
    """The sampling parameters of n rows, prepared for `sample`; rebuilt only when the rows change."""

    def __init__(self, params: np.ndarray, device: torch.device):
        """`params` is float32 [n, 5], rows from `as_row`."""
        inverse, top_p, top_k, min_p, keeps = params.T
        greedy = inverse == 0
        filtered = ~greedy & ((top_p < 1) | (top_k < math.inf) | (min_p > 0))
        plain = ~(greedy | filtered)
        # Always a tensor when there is a temperature: a scalar might round otherwise than a mixed batch does.
        inverse = np.where(greedy, np.float32(1), inverse)
        self.inverse_temperature = None if (inverse == 1).all() else torch.from_numpy(inverse[:, None]).to(device)
        self.parts: list[tuple[Callable[[torch.Tensor, torch.Tensor], DrawnTokens], torch.Tensor]] = []
        if plain.all():
            return
        filters = torch.from_numpy(params[filtered, 1:4]).to(device)
        keeping = torch.from_numpy(np.flatnonzero(keeps[filtered])).to(device)
        draws = ((_draw, plain), (_draw_greedy, greedy), (partial(_draw_filtered, filters, keeping), filtered))
        for draw, own in draws:
            if own.any():
                self.parts.append((draw, torch.from_numpy(np.flatnonzero(own)).to(device)))


def sample(logits: torch.Tensor, u: torch.Tensor, rows: RowSampling) -> DrawnTokens:
    """Draw a token for each row of float32 `logits` [n, vocab] with the uniform numbers `u` float32 [n].

    The log-probability is that of the distribution drawn from: after temperature and filters. Greedy rows report the
    untempered log-softmax. Filters come in the order min-p, top-k, top-p, each on what the one before left.
    """
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature
    logp = torch.log_softmax(logits, -1)
    if not rows.parts:
        return _draw(logp, u)
    tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
    logprobs, kept = torch.empty_like(u), None
    for draw, indices in rows.parts:
        part = draw(logp.index_select(0, indices), u.index_select(0, indices))
        tokens.index_copy_(0, indices, part.tokens)
        logprobs.index_copy_(0, indices, part.logprobs)
        if part.kept is not None:
            kept = part.kept._replace(rows=indices.index_select(0, part.kept.rows))
    return DrawnTokens(tokens, logprobs, kept)


def sets_of(kept: Kept | None) -> dict[int, EncodedSet]:
    """On the host: by row the set that its token was drawn from."""
    if kept is None:
        return {}
    sizes, vocabulary = kept.sizes.tolist(), kept.order.shape[1]
    order = kept.order[:, : max(sizes)].int().cpu().numpy()
    return {row: encode_set(ids[:size], vocabulary) for row, size, ids in zip(kept.rows.tolist(), sizes, order, strict=True)}


def _draw(logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """The first token whose cumulative probability exceeds u times the total."""
    cumulative = logp.exp().cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # A parallel prefix sum need not be monotone to the last bit, hence the clamp.
    token = torch.searchsorted(cumulative, target, right=True).clamp_(max=logp.shape[-1] - 1)
    return DrawnTokens(token.squeeze(1), logp.gather(1, token).squeeze(1))


def _draw_greedy(logp: torch.Tensor, _: torch.Tensor) -> DrawnTokens:
    best = logp.max(-1)
    return DrawnTokens(best.indices, best.values)


def _draw_filtered(filters: torch.Tensor, keeping: torch.Tensor, logp: torch.Tensor, u: torch.Tensor) -> DrawnTokens:
    """`filters` is [n, 3]: top-p, top-k, min-p. Each keeps the most probable tokens, so a prefix of the sorted row is left.
    `keeping`: int64, the rows whose sets are kept."""
    logp, order = torch.sort(logp, dim=-1, descending=True, stable=True)
    top_p, top_k, min_p = filters.split(1, 1)
    rank = torch.arange(logp.shape[-1], device=logp.device)
    probability = logp.exp()
    kept = (probability >= min_p * probability[:, :1]) & (rank < top_k)
    probability = probability * kept
    before = probability.cumsum(-1) - probability
    kept &= before < top_p * probability.sum(-1, keepdim=True)
    kept[:, 0] = True
    logp = logp.masked_fill(~kept, -math.inf)
    logp = logp - logp.logsumexp(-1, keepdim=True)
    cumulative = logp.exp().cumsum(-1)
    place = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True)
    sizes = kept.sum(-1, keepdim=True)
    place = torch.minimum(place, sizes - 1)
    sets = Kept(keeping, sizes[keeping, 0], order[keeping]) if len(keeping) else None
    return DrawnTokens(order.gather(1, place).squeeze(1), logp.gather(1, place).squeeze(1), sets)


def to_host(drawn: DrawnTokens) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities in one transfer, as each would wait for the device."""
    both = torch.stack((drawn.tokens.int(), drawn.logprobs.view(torch.int32))).cpu().numpy()
    return both[0].astype(np.int64), both[1].view(np.float32)


def streams(request: GroupRequest) -> np.ndarray:
    """float32 [n, max_new_tokens]: the uniform numbers of each sample's tokens."""
    limit, first = request.sampling.max_new_tokens, request.first
    return np.stack([uniforms(request.seed, index, limit) for index in range(first, first + request.n)])


# ---- Drafts
#
# Drafts of how replies go on, taken from other replies to the same prompt: running ones, finished ones, and those of
# earlier groups. Pure: a decode step computes a draft's tokens beside the newest ones, and keeps those that it samples
# anyway.
#
# A running reply follows another one. Its last few tokens lead to a place there, and as long as both go on alike, the
# tokens at that place are its draft. How often they are right is counted, by the number of tokens that were alike already,
# whether they are drafted or not. What is worth drafting follows from that and from the number of replies that run, never
# from the clock.

CONTEXT = 3  # tokens that lead to a place
LONGEST = 8  # tokens of a draft
REMEMBERED = 1 << 19  # tokens of prompts and their finished replies, at most

_REPLIES = 32  # of a prompt that are remembered, the newest
_ALIKE = 4  # rates are counted for 0, 1, ... and for so many or more tokens alike
_PACE = 1 / 128  # at which a rate follows what is counted; the first ones are averaged
_MISSED = 2 * LONGEST  # tokens that are read where a reply was not followed for so long; more are skipped
_BESIDE = 4.0  # what a step with drafts costs beside their tokens, in tokens

# Replies are followed for a while, and then for a longer one only if that has paid: at least so many steps and tokens.
_STEPS, _TOKENS = 32, 512
_PAUSE = 16  # times as many steps
_LEAST_GAIN = 0.05  # of the cost of the steps
_CHEAPER = 0.7  # a price that fell to this share ends a pause

_Place = tuple[list[int], int]  # a text, and the index of the token that comes next


class PromptReplies:
    """Replies to one prompt, and the place that any `CONTEXT` tokens in them lead to: the first that was found."""

    def __init__(self, prompt: np.ndarray, recent: Sequence[np.ndarray] = ()):
        """`recent`: finished replies, int32, the newest last."""
        self.prompt = prompt
        self.tail = ([-1] * CONTEXT + prompt[-CONTEXT:].tolist())[-CONTEXT:]  # which every text begins with
        self.recent = deque(recent)
        self.tokens = len(prompt) + sum(map(len, recent))
        self.added = 0
        self._unread = list(recent)
        self._places: dict[tuple[int, ...], _Place] = {}

    def add(self, reply: np.ndarray, read: bool) -> None:
        """A finished reply. `read`: its tokens have led to places already."""
        self.added += 1
        self.recent.append(reply)
        self.tokens += len(reply)
        if len(self.recent) > _REPLIES:
            self.tokens -= len(self.recent.popleft())
        if not read:
            self._unread.append(reply)

    def place(self, text: list[int]) -> _Place | None:
        """Where the last tokens of `text` lead to. If nowhere yet, then to its own end from now on."""
        while self._unread:
            self._read(self._unread.pop())
        own = text, len(text)
        found = self._places.setdefault(tuple(text[-CONTEXT:]), own)
        return None if found is own else found

    def _read(self, reply: np.ndarray) -> None:
        text = self.tail + reply.tolist()
        for at in range(CONTEXT, len(text)):
            self._places.setdefault(tuple(text[at - CONTEXT : at]), (text, at))


class Following:
    """One running reply, as far as it was read, and its place in another text."""

    gaps = True  # whether places were left out, as the reply was not followed for a while
    source: Sequence[int] = ()
    at = 0  # in `source`, of the token that comes next
    known = 0  # the length of `source` when the newest token was read
    alike = 0  # tokens that were alike, up to here

    def __init__(self, replies: PromptReplies):
        self.replies = replies
        self.text = replies.tail  # and the reply, once something is read of it

    @property
    def read(self) -> int:
        """Tokens of the reply."""
        return len(self.text) - CONTEXT

    def go_on(self, token: int) -> bool:
        """Read the next token; returns whether it was that of the place, which is another one if not."""
        if not self.read:
            self.text, self.gaps = list(self.replies.tail), False
        right = self.at < len(self.source) and self.source[self.at] == token
        self.text.append(token)
        if right:
            self.at += 1
            self.alike += 1
        else:
            self._look_up()
        return right

    def skip(self, tokens: list[int]) -> None:
        """Have read all `tokens` of the reply so far."""
        self.text, self.gaps = self.replies.tail + tokens, True
        self._look_up()

    def _look_up(self) -> None:
        self.source, self.at = self.replies.place(self.text) or ((), 0)
        self.known = self.alike = 0


class Drafts:
    """The texts of an engine, and what is worth drafting from them."""

    def __init__(self, fixed: int):
        """`fixed`: what a step costs beside its tokens, in tokens."""
        self.rates = [0.0] * (_ALIKE + 1)  # of tokens that were as another text had them, by tokens alike before
        self._seen = [0] * len(self.rates)  # tokens that were counted
        self._fixed = fixed
        self._prompts: OrderedDict[bytes, PromptReplies] = OrderedDict()  # the least recently used first
        self._remembered = 0  # tokens
        self._steps = self._tokens = 0  # since replies are followed, or of a pause (below 0) to come
        self._gain = self._cost = 0.0  # of these steps, in tokens
        self._price = 1.0  # at which the pause began

    def begin(self, prompt: np.ndarray, n: int) -> list[Following]:
        """For `n` replies to `prompt` [P] int32."""
        key = prompt.tobytes()
        replies = self._prompts.pop(key, None)
        if replies is None:
            replies = PromptReplies(prompt)
            self._remembered += replies.tokens
        elif replies.added > 2 * _REPLIES:  # texts that are remembered no longer leave its places
            replies = PromptReplies(prompt, replies.recent)
        self._prompts[key] = replies
        return [Following(replies) for _ in range(n)]

    def finish(self, following: Following, reply: np.ndarray) -> None:
        """`reply`: all its tokens, int32."""
        replies = following.replies
        read = not following.gaps and len(reply) - following.read <= _MISSED
        if read:
            self._follow(following, reply[following.read :].tolist())
        before = replies.tokens
        replies.add(reply, read)
        if self._prompts.get(replies.prompt.tobytes()) is replies:
            self._remembered += replies.tokens - before
        while self._remembered > REMEMBERED:
            self._remembered -= self._prompts.popitem(last=False)[1].tokens

    def follows(self, running: int) -> bool:
        """Whether a step of so many replies is one for `propose`."""
        if self._steps >= 0:
            return True
        self._steps += 1
        if self._price_of(running) < _CHEAPER * self._price:
            self._steps = 0
        return False

    def propose(
        self, running: Sequence[Following], lengths: Sequence[int], rooms: Sequence[int], since: Callable[[int, int], list[int]]
    ) -> list[Sequence[int]]:
        """The drafts of a step, one for each of the `running` replies, none longer than its of `rooms`; [] where none pays.

        `lengths`: tokens that each reply has; `since(i, k)`: those of the i-th from its k-th on.
        """
        price = self._price_of(len(running))
        drafts: list[Sequence[int]] = []
        gain = -_BESIDE
        for row, following in enumerate(running):
            missed = lengths[row] - following.read
            if missed > _MISSED:
                following.skip(since(row, 0))
            elif missed:
                self._follow(following, since(row, following.read))
            draft, worth = self._draft(following, rooms[row], price)
            drafts.append(draft)
            gain += worth
        self._count(len(running), max(gain, 0.0), price)
        return drafts if gain > 0 else []

    def _price_of(self, running: int) -> float:
        """What one more token costs in a step of so many, as a share of what a token costs there."""
        return running / (self._fixed + running)

    def _follow(self, following: Following, tokens: Iterable[int]) -> None:
        """Read on in a reply, and count whether its tokens are those of the place that it is at."""
        for token in tokens:
            counts, alike = following.at < following.known, min(following.alike, _ALIKE)
            right = following.go_on(token)
            if counts:
                self._seen[alike] += 1
                self.rates[alike] += (right - self.rates[alike]) * max(_PACE, 1 / (self._seen[alike] + 1))
        following.known = len(following.source)

    def _draft(self, following: Following, room: int, price: float) -> tuple[Sequence[int], float]:
        """As many tokens as are worth it, and what they save, in tokens of a step."""
        at, right, worth, longest = following.at, 1.0, 0.0, min(LONGEST, room, len(following.source) - following.at)
        for ahead in range(longest):
            right *= self.rates[min(following.alike + ahead, _ALIKE)]
            if right <= price:
                return following.source[at : at + ahead], worth
            worth += right / price - 1
        return following.source[at : at + longest], worth

    def _count(self, running: int, gain: float, price: float) -> None:
        """A step, at whose end replies may have been followed long enough to tell whether it pays."""
        self._steps += 1
        self._tokens += running
        self._gain += gain
        self._cost += self._fixed + running
        if self._steps < _STEPS or self._tokens < _TOKENS:
            return
        pays = self._gain > _LEAST_GAIN * self._cost
        self._steps = 0 if pays else -_PAUSE * self._steps
        self._tokens, self._gain, self._cost, self._price = 0, 0.0, 0.0, price


class StepInputs(NamedTuple):
    """What a decode step takes: m tokens."""

    tokens: np.ndarray  # and positions, int64 [2, m]
    uniforms: np.ndarray  # float32 [m]
    params: np.ndarray  # of sampling, float32 [m, 5]
    counts: np.ndarray | None  # tokens of each slot, int64 [n]; None: one


_BOUNDARY_RANGE = 0.35, 0.65  # of the longest length: where the boundary may stay, as each change of it moves sequences
_WORTH_SPLITTING = 512  # positions of attention spared a layer, for which a second call pays


class FirstToken(NamedTuple):
    token: int
    logprob: float
    version: int
    kept: EncodedSet | None  # None: sets are not kept

    def alone(self, reason: FinishReason, vocabulary: int) -> Sample:
        """A reply that is this token."""
        arrays = np.array([self.token], np.int32), np.array([self.logprob], np.float32), np.array([self.version], np.int64)
        return make_sample(*arrays, reason, None if self.kept is None else KeptSets.of([self.kept], vocabulary))


@dataclass
class Prefilled:
    """A prompt that is ready to be continued, under the weights of `version`."""

    keys_values: torch.Tensor  # [layers, parts, heads, P, width]
    uniforms: np.ndarray  # float32 [n, max_new_tokens]
    tokens: np.ndarray  # int64 [n], the first token of each sample
    logprobs: np.ndarray  # float32 [n]
    version: int
    kept: list[EncodedSet | None]  # [n]
    experts: np.ndarray | None  # [P, L, k], as of `RoutingRecord`: 0 of what was computed before

    def first(self, index: int) -> FirstToken:
        return FirstToken(int(self.tokens[index]), self.logprobs[index], self.version, self.kept[index])


class Slots:
    """Which sequence is in which slot of the cache, and each sequence's own record, which does not move with it.

    Invariants: between steps, slots 0..count-1 are active; within one, finished sequences leave holes. `position[s]` is the
    number of tokens of sequence s whose keys and values the cache holds, and the position of its newest token, which the
    next step feeds. Records are indexed by sequence and position.
    """

    def __init__(self, cache: KVCache, slots: int, vocabulary: int):
        self._cache, self._vocabulary = cache, vocabulary
        self._length = cache.max_length
        self._top = 0  # slots beyond are free; below, all but the holes are active
        self._holes: list[int] = []
        self._boundary = 0  # between short and long sequences, in tokens
        self.size = slots
        self._sequence = np.arange(slots)  # of each slot: always a permutation
        self.owner: list[Any] = [None] * slots
        self._start = np.zeros(slots, np.int64)  # the position of the first generated token
        self._end = np.zeros(slots, np.int64)  # and where the reply must have ended
        self._position = np.zeros(slots, np.int64)
        self._computed = np.zeros(slots, np.int64)  # by which version, the oldest where there are several
        self._stop = np.full((slots, 1), -1, np.int64)
        self._params = np.zeros((slots, 5), np.float32)
        self._uniforms = np.empty((slots, self._length), np.float32)
        self._tokens = np.empty((slots, self._length), np.int64)
        self._logprobs = np.empty((slots, self._length), np.float32)
        self._versions = np.empty((slots, self._length), np.int64)
        self._kept: list[list[EncodedSet]] = [[] for _ in range(slots)]  # of each token, where sets are kept

    @property
    def count(self) -> int:
        """Active slots."""
        return self._top - len(self._holes)

    @property
    def free(self) -> int:
        return self.size - self.count

    @property
    def tokens(self) -> int:
        """That the cache holds, of all active slots."""
        return int(self._position[self._sequence[self.active()]].sum())

    def active(self) -> list[int]:
        holes = set(self._holes)
        return [slot for slot in range(self._top) if slot not in holes]

    def sequences(self, counts: np.ndarray | None = None) -> np.ndarray:
        """int64 [m]: of each token of a step's inputs its sequence; `counts` as of those."""
        own = self._sequence[: self._top]
        return own if counts is None else np.repeat(own, counts)

    def owner_of(self, slot: int) -> Any:
        return self.owner[self._sequence[slot]]

    def start(self, owner: Any, position: int, first: FirstToken, sampling: SamplingParams, uniforms: np.ndarray) -> int:
        """Take a slot for a sequence whose first token is at `position`."""
        if self._holes:
            slot = self._holes.pop()
        else:
            slot, self._top = self._top, self._top + 1
        s = self._sequence[slot]
        self.owner[s] = owner
        end = position + sampling.max_new_tokens
        self._start[s], self._position[s], self._end[s] = position, position, end
        self._tokens[s, position], self._logprobs[s, position], self._versions[s, position] = first[:3]
        self._computed[s] = first.version
        self._kept[s] = [] if first.kept is None else [first.kept]
        self._uniforms[s, position:end] = uniforms
        self._params[s] = as_row(sampling)
        stops = sampling.stop_token_ids
        if len(stops) > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, len(stops) - self._stop.shape[1])), constant_values=-1)
        self._stop[s] = -1
        self._stop[s, : len(stops)] = stops
        return slot

    @property
    def owners(self) -> list[Any]:
        """Of slots 0..n-1, where there are no holes."""
        return [self.owner[s] for s in self._sequence[: self._top].tolist()]

    def lengths(self) -> tuple[list[int], list[int]]:
        """For slots 0..n-1: the tokens of each reply, and how many there may be after the next one."""
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        return (position - self._start[sequences] + 1).tolist(), (self._end[sequences] - position - 2).tolist()

    def generated(self, slot: int, since: int) -> list[int]:
        """The tokens of a slot's reply, but for the first `since`."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] + since : self._position[s] + 1].tolist()

    def inputs(self, drafts: Sequence[Sequence[int]] = ()) -> StepInputs:
        """For slots 0..n-1, their newest tokens, and behind each one its draft if there are any: none leaves less room than for
        one more token."""
        if drafts:
            return self._drafted(drafts)
        sequences = self._sequence[: self._top]
        position = self._position[sequences]
        newest = sequences * self._length + position
        return StepInputs(
            np.stack((self._tokens.take(newest), position)), self._uniforms.take(newest + 1), self._params[sequences], None
        )

    def record(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        sets: Mapping[int, EncodedSet],
        counts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Append a step's tokens, with the `sets` of some of them, to slots 0..n-1; returns the slots that are done, whether
        each met a stop token, and how many tokens were appended. `counts`: those of the step's inputs; of what was sampled in
        a slot, all is appended as far as it is the draft, and one token more."""
        if counts is not None:
            return self._record_drafted(tokens, logprobs, version, sets, counts)
        sequences = self._sequence[: self._top]
        position = self._position[sequences] + 1
        self._position[sequences] = position
        newest = sequences * self._length + position
        self._tokens.put(newest, tokens)
        self._logprobs.put(newest, logprobs)
        self._versions.put(newest, version)
        for slot, found in sets.items():
            self._kept[sequences[slot]].append(found)
        stopped = (tokens[:, None] == self._stop[sequences]).any(1)
        done = np.flatnonzero(stopped | (position + 1 >= self._end[sequences]))
        return done, stopped[done], len(tokens)

    def _drafted(self, drafts: Sequence[Sequence[int]]) -> StepInputs:
        counts = np.array([len(draft) + 1 for draft in drafts])
        sequences, _, position = self._rows(counts)
        place = sequences * self._length + position
        # A draft lies where its tokens will be, until others are recorded there.
        is_draft = position > self._position[sequences]
        self._tokens.put(place[is_draft], np.concatenate([np.array(draft, np.int64) for draft in drafts]))
        inputs = np.stack((self._tokens.take(place), position))
        return StepInputs(inputs, self._uniforms.take(place + 1), self._params[sequences], counts)

    def _record_drafted(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, sets: Mapping[int, EncodedSet], counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        sequences, offset, position = self._rows(counts)
        place = sequences * self._length + position + 1
        last = offset == np.repeat(counts, counts) - 1
        stops = (tokens[:, None] == self._stop[sequences]).any(1)
        starts = counts.cumsum() - counts
        # The first token of each slot after which nothing holds: it stops the reply, or it is not the draft's.
        ends = last | stops | (tokens != self._tokens.take(place))
        kept = np.minimum.reduceat(np.where(ends, offset, LONGEST), starts) + 1
        held = offset < np.repeat(kept, counts)
        self._tokens.put(place[held], tokens[held])
        self._logprobs.put(place[held], logprobs[held])
        self._versions.put(place[held], version)
        for row, found in sets.items():
            if held[row]:
                self._kept[sequences[row]].append(found)
        own = self._sequence[: self._top]
        self._position[own] += kept
        stopped = stops[starts + kept - 1]
        done = np.flatnonzero(stopped | (self._position[own] + 1 >= self._end[own]))
        return done, stopped[done], int(kept.sum())

    def _rows(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each of `counts` tokens of slots 0..n-1: its sequence, which one it is of those, and its position: int64 [m]."""
        offset = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        sequences = self.sequences(counts)
        return sequences, offset, self._position[sequences] + offset

    def cached(self, slot: int) -> np.ndarray:
        """int64: the generated tokens of a slot's sequence whose keys and values the cache holds, all but its newest."""
        s = self._sequence[slot]
        return self._tokens[s, self._start[s] : self._position[s]]

    def computed(self, slot: int) -> int:
        """The version of a slot's keys and values, the oldest where there are several."""
        return int(self._computed[self._sequence[slot]])

    def recomputed(self, slot: int, version: int) -> None:
        """Note that all keys and values of a slot are of `version` now."""
        self._computed[self._sequence[slot]] = version

    def release(self, slot: int) -> None:
        """Free a slot; a hole until it is refilled or closed."""
        self.owner[self._sequence[slot]] = None
        self._holes.append(slot)

    def take(self, slot: int, stopped: bool) -> Sample:
        """The finished sequence of a slot, which is released."""
        s = self._sequence[slot]
        reply = slice(self._start[s], self._position[s] + 1)
        sample = make_sample(
            self._tokens[s, reply].astype(np.int32),
            self._logprobs[s, reply].copy(),
            self._versions[s, reply].copy(),
            "stop" if stopped else "length",
            KeptSets.of(self._kept[s], self._vocabulary) if self._kept[s] else None,
        )
        self._kept[s] = []
        self.release(slot)
        return sample

    def close_holes(self) -> None:
        """Move the last slots into the holes, so that the active slots are a prefix again."""
        holes = sorted(self._holes)
        self._holes.clear()
        while holes:
            self._top -= 1
            if holes[-1] == self._top:
                holes.pop()
            else:
                hole = holes.pop(0)
                self._cache.move(self._top, hole, int(self._position[self._sequence[self._top]]))
                self._exchange(self._top, hole)

    def _exchange(self, one: int, other: int) -> None:
        self._sequence[one], self._sequence[other] = self._sequence[other], self._sequence[one]

    def spans(self) -> list[Span]:
        """Put the long sequences before the short ones where that spares much attention; returns the slots of each.

        Lengths are long-tailed: without it, every sequence is attended over the length of the longest.
        """
        n = self._top
        positions = self._position[self._sequence[:n]]
        longest = int(positions.max()) + 1
        if not longest * _BOUNDARY_RANGE[0] <= self._boundary <= longest * _BOUNDARY_RANGE[1]:
            self._boundary = round_up(longest // 2, LENGTH_STEP)
        long = positions >= self._boundary
        m = int(np.count_nonzero(long))
        if (n - m) * (longest - self._boundary) < _WORTH_SPLITTING:
            return [Span(0, n, longest)]
        short_slots, long_slots = np.flatnonzero(~long[:m]), m + np.flatnonzero(long[m:])
        for one, other in zip(short_slots.tolist(), long_slots.tolist(), strict=True):
            self._cache.swap(one, other, int(positions[other]))
            self._exchange(one, other)
        return [Span(0, m, longest), Span(m, n, self._boundary)]
