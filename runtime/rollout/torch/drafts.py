"""Drafts of how replies go on, taken from other replies to the same prompt: running ones, finished ones, and those of earlier
groups. Pure: a decode step computes a draft's tokens beside the newest ones, and keeps those that it samples anyway.

A running reply follows another one. Its last few tokens lead to a place there, and as long as both go on alike, the tokens
at that place are its draft. How often they are right is counted, by the number of tokens that were alike already, whether
they are drafted or not. What is worth drafting follows from that and from the number of replies that run, never from the clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

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
