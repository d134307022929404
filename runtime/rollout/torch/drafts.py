"""Drafts of how replies go on, taken from other replies to the same prompt: running ones, finished ones, and those of earlier
groups. Pure: a decode step computes a draft's tokens beside the newest ones, and keeps those that it samples anyway.

A running reply follows another one. Its last few tokens lead to a place there, and as long as both go on alike, the tokens
at that place are its draft. How often they are right is counted, by the number of tokens that were alike already, whether
they are drafted or not. So drafts begin and end by what was counted alone, never by the clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

CONTEXT = 3  # tokens that lead to a place
LONGEST = 8  # tokens of a draft
REMEMBERED = 1 << 19  # tokens of prompts and their finished replies, at most

_REPLIES = 32  # of a prompt that are remembered, the newest
_ALIKE = 8  # rates are counted for 0, 1, ... and for so many or more tokens alike
_PACE = 1 / 128  # at which a rate follows what is counted
_SCOUTS = 8  # every so many-th group is followed where drafts do not pay
_BESIDE = 4.0  # what a step with drafts costs beside their tokens, in tokens

_Place = tuple[list[int], int]  # a text, and the index of the token that comes next


class PromptReplies:
    """Replies to one prompt, and the place that any `CONTEXT` tokens in them lead to: the first that was found."""

    def __init__(self, prompt: np.ndarray, recent: Sequence[np.ndarray] = ()):
        """`recent`: finished replies, int32, the newest last."""
        self.prompt = prompt
        self.tail = [-1] * CONTEXT + prompt[-CONTEXT:].tolist()
        self.tail = self.tail[-CONTEXT:]  # which every text begins with
        self.recent = deque(recent, _REPLIES)
        self.added = 0
        self._unread = list(recent)
        self._places: dict[tuple[int, ...], _Place] = {}

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.recent))

    def add(self, reply: np.ndarray, read: bool) -> None:
        """A finished reply. `read`: it has led to places already, as it was followed to its end."""
        self.added += 1
        self.recent.append(reply)
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

    __slots__ = ("alike", "at", "known", "replies", "scout", "source", "text")

    def __init__(self, replies: PromptReplies, scout: bool):
        """`scout`: it is always followed."""
        self.replies = replies
        self.scout = scout
        self.text = list(replies.tail)
        self.source: list[int] = []
        self.at = 0  # in `source`, of the token that comes next
        self.known = 0  # the length of `source` when the newest token was read
        self.alike = 0  # tokens gone on alike

    @property
    def read(self) -> int:
        """Tokens of the reply."""
        return len(self.text) - CONTEXT


class Drafts:
    """The texts of an engine, and the rates by which it drafts."""

    def __init__(self, fixed: int):
        """`fixed`: what a step costs beside its tokens, in tokens."""
        self.rates = [0.0] * (_ALIKE + 1)  # of tokens that were as another text had them, by tokens alike before
        self._fixed = fixed
        self._prompts: OrderedDict[bytes, PromptReplies] = OrderedDict()  # the least recently used first
        self._tokens = 0
        self._groups = 0

    def begin(self, prompt: np.ndarray, n: int) -> list[Following]:
        """For `n` replies to `prompt` [P] int32."""
        key = prompt.tobytes()
        replies = self._prompts.pop(key, None)
        if replies is None:
            replies = PromptReplies(prompt)
            self._tokens += replies.tokens
        elif replies.added > 2 * _REPLIES:  # texts that are remembered no longer leave here
            replies = PromptReplies(prompt, replies.recent)
        self._prompts[key] = replies
        scout = self._groups % _SCOUTS == 0
        self._groups += 1
        return [Following(replies, scout) for _ in range(n)]

    def finish(self, following: Following, reply: np.ndarray) -> None:
        """`reply`: all its tokens, int32."""
        replies = following.replies
        if following.read:
            self.follow(following, reply[following.read :].tolist())
        before = replies.tokens
        replies.add(reply, following.read > 0)
        if self._prompts.get(replies.prompt.tobytes()) is replies:
            self._tokens += replies.tokens - before
        while self._tokens > REMEMBERED:
            self._tokens -= self._prompts.popitem(last=False)[1].tokens

    def propose(
        self, running: Sequence[Following], lengths: Sequence[int], rooms: Sequence[int], since: Callable[[int, int], list[int]]
    ) -> list[list[int]]:
        """The drafts of a step, one for each of the `running` replies, none longer than its of `rooms`; [] where none pays.

        `lengths`: tokens that each reply has; `since(i, k)`: those of the i-th from its k-th on.
        """
        # What one more token costs, as a share of what a token costs in a step without drafts.
        price = len(running) / (self._fixed + len(running))
        pays = max(self.rates) > price
        drafts: list[list[int]] = [[]] * len(running)
        gain = -_BESIDE
        for row, following in enumerate(running):
            if not (pays or following.scout):
                continue
            if lengths[row] > following.read:
                self.follow(following, since(row, following.read))
            if pays and following.at < following.known:
                drafts[row], worth = self._draft(following, rooms[row], price)
                gain += worth
        return drafts if gain > 0 else []

    def _draft(self, following: Following, room: int, price: float) -> tuple[list[int], float]:
        """As many tokens as are worth it, and what they save, in tokens of a step."""
        at, right, worth, longest = following.at, 1.0, 0.0, min(LONGEST, room, len(following.source) - following.at)
        for ahead in range(longest):
            right *= self.rates[min(following.alike + ahead, _ALIKE)]
            if right <= price:
                return following.source[at : at + ahead], worth
            worth += right / price - 1
        return following.source[at : at + longest], worth

    def follow(self, following: Following, tokens: Iterable[int]) -> None:
        """Read on in a reply, and count whether its tokens are those of the place that it is at."""
        text = following.text
        for token in tokens:
            source, at = following.source, following.at
            right = at < len(source) and source[at] == token
            if at < following.known:
                alike = min(following.alike, _ALIKE)
                self.rates[alike] += (right - self.rates[alike]) * _PACE
            text.append(token)
            if right:
                following.at += 1
                following.alike += 1
            else:
                following.source, following.at = following.replies.place(text) or ([], 0)
                following.known = following.alike = 0
        following.known = len(following.source)
