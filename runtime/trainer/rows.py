"""Decode groups into the arrays of a training step. numpy on the host.

B rows (replies; an episode's are its branches, in order), R reply tokens of one row. `flat`: all rows' tokens back to back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from runtime import types
from runtime.errors import InvalidMessage
from runtime.models.forward import ramps, spans, starts
from runtime.trainer.routes import GroupRoutes
from runtime.types import GroupPayload, LogprobRequest, Logprobs, TokenSets, TrainGroup, ValueRequest, Values, fed


@dataclass(frozen=True)
class Rows:
    """The rows of some groups. `reference` and `values` are None if the algorithm does not use them."""

    prompts: np.ndarray  # int32, flat over groups
    prompt_start: np.ndarray  # int64 [groups]
    prompt_length: np.ndarray  # int64 [groups]
    group_id: np.ndarray  # int64 [groups]
    mini_batch: np.ndarray  # int64 [groups]
    group: np.ndarray  # int64 [B], from 0
    sample: np.ndarray  # int64 [B], index of the row's episode within its group
    episode: np.ndarray  # int64 [B], from 0 over all groups
    start: np.ndarray  # int64 [B], index of the reply's first token in the flat arrays
    length: np.ndarray  # int64 [B], R
    tokens: np.ndarray  # int32 flat
    mask: np.ndarray  # bool flat, the trained tokens; false in all of an invalid episode
    behaviour: np.ndarray  # float32 flat
    steps: np.ndarray  # int64 flat, step of the version that sampled the token
    reference: np.ndarray | None  # float32 flat
    values: np.ndarray | None  # float32 flat
    turn_tokens: np.ndarray  # int64 [K], flat index of the token at which a turn was rewarded
    turn_rewards: np.ndarray  # float64 [K]
    rewards: np.ndarray  # float32 [B], reward of the row's episode
    truncated: np.ndarray  # bool [B], whether the reply was cut off by length
    valid: np.ndarray  # bool [B], whether the row's episode is valid
    kept: TokenSets | None  # flat; None: all tokens were sampled from the whole vocabulary
    proximal: np.ndarray | None = None  # float32 flat, under the weights at the step's start; None: use the loss's own pass
    routes: GroupRoutes | None = None  # the experts that the tokens took; None: not replayed

    def grid(self, flat: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return `flat` as [len(rows), longest reply of `rows`], 0 beyond each reply."""
        lengths = self.length[rows]
        out = np.zeros((len(rows), int(lengths.max(initial=0))), np.float32)
        out[np.repeat(np.arange(len(rows)), lengths), ramps(lengths)] = flat[spans(self.start[rows], lengths)]
        return out

    def by_group(self, flat: np.ndarray) -> list[np.ndarray]:
        """Split `flat` into the parts of each group's replies."""
        sizes = np.bincount(self.group, weights=self.length, minlength=len(self.group_id)).astype(np.int64)
        return [flat[begin : begin + size] for begin, size in zip(starts(sizes), sizes, strict=True)]

    def trained(self) -> np.ndarray:
        """Return whether each row has a token to train on, bool [B]."""
        return self.trained_tokens() > 0

    def trained_tokens(self) -> np.ndarray:
        """Return the number of trained tokens of each row, int64 [B]."""
        totals = np.concatenate(([0], np.cumsum(self.mask, dtype=np.int64)))
        return totals[self.start + self.length] - totals[self.start]

    def turn_begins(self) -> np.ndarray:
        """Return the first tokens of turns, bool flat. A turn is a run of trained tokens in a row."""
        begins = self.mask.copy()
        begins[1:] &= ~self.mask[:-1]
        first = self.start[self.length > 0]
        begins[first] = self.mask[first]
        return begins

    def first_of_episode(self, among: np.ndarray) -> np.ndarray:
        """Return the first of the rows `among` (bool [B]) of each episode, bool [B]."""
        found = np.zeros(len(among), bool)
        chosen = np.flatnonzero(among)
        found[chosen[np.unique(self.episode[chosen], return_index=True)[1]]] = True
        return found

    @property
    def leads(self) -> np.ndarray:
        """Whether the row is the first of its episode, bool [B]."""
        return np.diff(self.episode, prepend=-1) > 0

    @property
    def last(self) -> np.ndarray:
        """Index of the last row of the row's episode, int64 [B]."""
        return (np.cumsum(np.bincount(self.episode)) - 1)[self.episode]


Routes = tuple[int, int, int]  # number of layers with experts, of experts that a token takes, and of experts in a layer


class Needs(NamedTuple):
    """What the algorithm needs besides rows and rewards."""

    reference: bool = False
    values: bool = False
    experts: Routes | None = None  # the experts that tokens took in the rollout


class DecodedGroup(NamedTuple):
    group: TrainGroup
    payload: GroupPayload
    reference: Logprobs | None = None
    values: Values | None = None


def check_groups(groups: Sequence[TrainGroup], vocab_size: int, needs: Needs) -> list[DecodedGroup]:
    """Decode and check `groups`, before anything is computed. Raises InvalidMessage, which names the group."""
    found = []
    for group in groups:
        reference = _given(Logprobs, group, group.reference, NO_REFERENCE) if needs.reference else None
        values = _given(Values, group, group.values, NO_VALUES) if needs.values else None
        found.append(DecodedGroup(group, types.decode(GroupPayload, group.payload), reference, values))
        _check(found[-1], vocab_size, needs.experts)
    return found


def decode_samples(requests: Sequence[ValueRequest | LogprobRequest], vocab_size: int, experts: Routes | None = None) -> Rows:
    """Return the rows of groups without scores: rewards 0, all episodes valid. `experts`: as in `Needs`."""
    decoded = []
    for request in requests:
        payload = types.decode(GroupPayload, request.payload)
        group = TrainGroup(
            group_id=request.group_id,
            tokens=0,  # not used
            payload=request.payload,
            rewards=np.zeros(payload.n, np.float32),
            valid=np.ones(payload.n, np.uint8),
        )
        decoded.append(DecodedGroup(group, payload))
        _check(decoded[-1], vocab_size, experts)
    return rows_of(decoded, Needs(experts=experts))


def rows_of(decoded: Sequence[DecodedGroup], needs: Needs) -> Rows:
    """Return the rows of groups that `check_groups` has decoded."""
    groups, payloads = [each.group for each in decoded], [each.payload for each in decoded]
    references = [each.reference.values for each in decoded if each.reference is not None]
    values = [each.values.values for each in decoded if each.values is not None]
    columns = [payload.columns() for payload in payloads]
    episodes = np.array([payload.n for payload in payloads], np.int64)
    branches = _concatenate([payload.rows for payload in payloads], np.uint32).astype(np.int64)  # number in each episode
    length = _concatenate([payload.lengths for payload in payloads], np.uint32).astype(np.int64)
    first_row = starts(np.array([len(payload.lengths) for payload in payloads], np.int64))
    turns = [
        (first + turn.row, turn) for first, payload in zip(first_row, payloads, strict=True) for turn in payload.turn_rewards
    ]
    start = starts(length)
    prompt_length = np.array([len(payload.prompt) for payload in payloads], np.int64)
    valid = np.repeat(_concatenate([group.valid for group in groups], np.uint8) != 0, branches)
    return Rows(
        prompts=_concatenate([payload.prompt for payload in payloads], np.int32),
        prompt_start=starts(prompt_length),
        prompt_length=prompt_length,
        group_id=np.array([group.group_id for group in groups], np.int64),
        mini_batch=np.array([group.mini_batch for group in groups], np.int64),
        group=np.repeat(np.repeat(np.arange(len(payloads)), episodes), branches),
        sample=np.repeat(ramps(episodes), branches),
        episode=np.repeat(np.arange(len(branches)), branches),
        start=start,
        length=length,
        tokens=_concatenate([column.tokens for column in columns], np.int32),
        mask=(_concatenate([column.loss_mask for column in columns], np.uint8) != 0) & np.repeat(valid, length),
        behaviour=_concatenate([column.logprobs for column in columns], np.float32),
        steps=_concatenate([column.versions for column in columns], np.int64) & 0xFFFFFFFF,
        reference=_concatenate(references, np.float32) if needs.reference else None,
        values=_concatenate(values, np.float32) if needs.values else None,
        turn_tokens=np.array([start[row] + turn.token for row, turn in turns], np.int64),
        turn_rewards=np.array([turn.value for _, turn in turns], np.float64),
        rewards=np.repeat(_concatenate([group.rewards for group in groups], np.float32), branches),
        truncated=np.array([reason == "length" for payload in payloads for reason in payload.finish_reasons], bool),
        valid=valid,
        kept=TokenSets.joined([payload.kept_sets() for payload in payloads], [len(payload.tokens) for payload in payloads]),
        routes=None if needs.experts is None or not payloads else GroupRoutes(payloads, needs.experts[2]),
    )


def share_prompts(rows: Rows) -> Rows:
    """Return the rows with rows of equal prompts in one group, so that their prompt is computed once."""
    spans = zip(rows.prompt_start, rows.prompt_length, strict=True)
    prompts = [rows.prompts[start : start + length].tobytes() for start, length in spans]
    return replace(rows, group=np.array([prompts.index(prompt) for prompt in prompts], np.int64)[rows.group])


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


NO_REFERENCE = "has no reference log-probabilities, but algorithm.kl_coefficient is not 0"
NO_VALUES = "has no values, but algorithm.advantage needs a critic's"
Given = TypeVar("Given", Logprobs, Values)


def _given(kind: type[Given], group: TrainGroup, encoded: bytes | None, missing: str) -> Given:
    if encoded is None:
        raise InvalidMessage(f"group {group.group_id}: {missing}")
    return types.decode(kind, encoded)


def _check(decoded: DecodedGroup, vocab_size: int, experts: Routes | None) -> None:
    group, payload, *given = decoded
    where, n = f"group {group.group_id}", payload.n
    if payload.group_id != group.group_id or not n or len(group.rewards) != n or len(group.valid) != n:
        raise InvalidMessage(
            f"{where}: the payload is of group {payload.group_id} with {n} samples, "
            f"with {len(group.rewards)} rewards and {len(group.valid)} flags"
        )
    payload.check(vocab_size)
    payload.check_sets(vocab_size)
    tokens = len(payload.prompt) + sum(map(fed, payload.lengths.tolist()))
    if experts is not None and (payload.experts is None or not payload.experts.fit(tokens, *experts)):
        raise InvalidMessage(f"{where}: its experts do not fit {tokens} tokens of this model; moe.router_replay needs them")
    if payload.turn_rewards:
        mask, begins = payload.loss_mask.expand(), starts(payload.lengths.astype(np.int64))
        for turn in payload.turn_rewards:
            if not mask[begins[turn.row] + turn.token]:
                raise InvalidMessage(f"{where}: {turn} is of a token that is not trained in this row")
    for part in given:
        if part is not None and len(part.values) != len(payload.tokens):
            raise InvalidMessage(f"{where}: {len(part.values)} {type(part).__name__.lower()} do not match its replies")


# ---- Which rows run together. Pure functions.


SLACK = 0.0003  # `balance` exchanges items until the largest part exceeds the lower bound by at most this fraction


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Distribute items over `parts` so that the largest sum of costs is small: each item, the most expensive first, goes to the
    part with the smallest sum, and then items are exchanged. Deterministic. A part's indices ascend, and it may be empty."""
    cost, owner, sums = np.array(costs, np.float64), np.zeros(len(costs), np.int64), np.zeros(parts)
    for item in np.argsort(-cost, kind="stable"):
        owner[item] = sums.argmin()
        sums[owner[item]] += cost[item]
    # No distribution is better than the larger of the mean and the most expensive item.
    aim = max(cost.sum() / parts, cost.max(initial=0)) * (1 + SLACK)
    while sums.max() > aim and _exchange(cost, owner, sums):
        pass
    return [np.flatnonzero(owner == part).tolist() for part in range(parts)]


def _exchange(cost: np.ndarray, owner: np.ndarray, sums: np.ndarray) -> bool:
    """Move an item of the heaviest part to another part, or swap two items: make the change that lowers the heavier of the two
    parts most. Return false, and change nothing, if none lowers it. `owner`: the part of each item."""
    heavy, highest = sums.argmax(), sums.max()
    given = np.flatnonzero(owner == heavy)
    # What is taken for it: an item, or nothing of a part.
    taken, part = np.append(cost, np.zeros(len(sums))), np.append(owner, np.arange(len(sums)))
    moved = cost[given, None] - taken
    heavier = np.where(part == heavy, np.inf, np.maximum(highest - moved, sums[part] + moved))
    give, take = np.unravel_index(heavier.argmin(), heavier.shape)
    if heavier[give, take] >= highest:
        return False
    sums[heavy] -= moved[give, take]
    sums[part[take]] += moved[give, take]
    owner[given[give]] = part[take]
    if take < len(cost):
        owner[take] = heavy
    return True


def balance_each(costs: Sequence[float], kinds: Sequence[int], parts: int) -> list[list[int]]:
    """Do `balance` for the items of each kind separately, if all parts process the kinds one after the other, together."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    for kind in sorted(set(kinds)):
        items = [index for index, own in enumerate(kinds) if own == kind]
        for share, chosen in zip(shares, balance([costs[index] for index in items], parts), strict=True):
            share += [items[index] for index in chosen]
    return [sorted(share) for share in shares]
