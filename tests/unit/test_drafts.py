"""Drafts from replies to the same prompt: where they come from, when they pay, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.rollout.torch import drafts as module
from runtime.rollout.torch.drafts import CONTEXT, LONGEST, Drafts, Following, PromptReplies

PROMPT = np.array([50, 51, 52, 53], np.int32)
TEXT = list(range(10, 40))


def array(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def sure(fixed: int = 100, rate: float = 0.99) -> Drafts:
    """As if places had been right that often so far."""
    drafts = Drafts(fixed)
    drafts.rates, drafts._seen = [rate] * len(drafts.rates), [10**6] * len(drafts.rates)
    return drafts


def propose(drafts: Drafts, running: Sequence[Following], texts: Sequence[list[int]], room: int = 99) -> list[list[int]]:
    found = drafts.propose(running, [len(text) for text in texts], [room] * len(texts), lambda row, read: texts[row][read:])
    return [list(each) for each in found]


def test_a_reply_is_drafted_from_a_finished_one_to_the_same_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BESIDE", 0.0)
    drafts = sure()
    first, second, third = drafts.begin(PROMPT, 3)
    drafts.finish(first, array(TEXT))
    (elsewhere,) = drafts.begin(PROMPT[::-1].copy(), 1)
    assert propose(drafts, [second, elsewhere], [TEXT[:1], TEXT[:1]]) == [TEXT[1 : 1 + LONGEST], []]
    assert propose(drafts, [third], [[99, *TEXT[5 : 5 + CONTEXT]]]) == [TEXT[5 + CONTEXT :][:LONGEST]]
    assert propose(drafts, [second], [TEXT[:3]], room=2) == [TEXT[3:5]]
    (later,) = drafts.begin(PROMPT, 1)
    assert propose(drafts, [later], [TEXT[:1]]) == [TEXT[1 : 1 + LONGEST]]


def test_a_running_reply_is_a_source_as_far_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BESIDE", 0.0)
    drafts = sure()
    ahead, behind = drafts.begin(PROMPT, 2)
    assert propose(drafts, [ahead, behind], [TEXT[:5], TEXT[:2]]) == [[], TEXT[2:5]]


def test_replies_in_step_have_nothing_to_draft_from_and_count_nothing() -> None:
    drafts = sure()
    group = drafts.begin(PROMPT, 4)
    for length in range(1, 20):
        assert propose(drafts, group, [TEXT[:length]] * 4) == []
    assert drafts.rates == [0.99] * len(drafts.rates)


def test_a_reply_that_turns_off_finds_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BESIDE", 0.0)
    drafts = sure()
    first, second = drafts.begin(PROMPT, 2)
    drafts.finish(first, array(TEXT))
    assert propose(drafts, [second], [[10, 11, 77]]) == []
    assert propose(drafts, [second], [[10, 11, 77, *TEXT[20:23]]]) == [TEXT[23:30]]


def test_rates_are_those_at_which_places_are_right() -> None:
    drafts = Drafts(100)
    for _ in range(40):
        (reply,) = drafts.begin(PROMPT, 1)
        texts = [[*TEXT[:k]] for k in range(1, len(TEXT) + 1)]
        for text in texts:
            propose(drafts, [reply], [text])
        drafts.finish(reply, array(TEXT))
    assert min(drafts.rates) > 0.9
    before = list(drafts.rates)
    (other,) = drafts.begin(PROMPT, 1)
    for length in (1, 2):
        propose(drafts, [other], [[TEXT[0], 99][:length]])
    assert drafts.rates[0] < before[0]
    assert drafts.rates[1:] == before[1:]


@pytest.mark.parametrize(("running", "drafted"), [(1, True), (4, True), (40, False)])
def test_what_pays_depends_on_how_many_run(running: int, drafted: bool) -> None:
    """A token more costs 1 / 11 of a step's one reply, 4 / 14 of four, and 40 / 50 of forty."""
    drafts = sure(fixed=10, rate=0.7)
    first, *others = drafts.begin(PROMPT, running + 1)
    drafts.finish(first, array(TEXT))
    assert bool(propose(drafts, others, [TEXT[:1]] * running)) == drafted


def test_following_ends_where_it_does_not_pay_and_is_tried_again() -> None:
    drafts, steps = Drafts(10), 0
    group = drafts.begin(PROMPT, 20)
    while drafts.follows(20):
        steps += 1
        assert propose(drafts, group, [[steps]] * 20) == []
    assert steps == 32
    pause = 1
    while not drafts.follows(20):
        pause += 1
    assert pause == 16 * steps


def test_a_pause_ends_where_fewer_run() -> None:
    drafts = Drafts(10)
    group = drafts.begin(PROMPT, 20)
    while drafts.follows(20):
        propose(drafts, group, [[1]] * 20)
    assert not drafts.follows(20)
    assert not drafts.follows(2)
    assert drafts.follows(2)


def test_following_goes_on_where_it_pays() -> None:
    drafts = sure(fixed=100)
    (first,) = drafts.begin(PROMPT, 1)
    drafts.finish(first, array(TEXT))
    for _ in range(2000):
        assert drafts.follows(1)
        (reply,) = drafts.begin(PROMPT, 1)
        assert propose(drafts, [reply], [TEXT[:1]])


def test_a_reply_that_was_skipped_is_read_once_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BESIDE", 0.0)
    drafts = sure()
    first, second = drafts.begin(PROMPT, 2)
    propose(drafts, [first], [TEXT[:25]])  # too many at once: only the last tokens lead to a place
    assert propose(drafts, [second], [TEXT[:2]]) == []
    drafts.finish(first, array(TEXT))
    assert propose(drafts, [second], [TEXT[:3]]) == [TEXT[3 : 3 + LONGEST]]


def test_only_the_newest_replies_and_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = PromptReplies(PROMPT)
    for number in range(40):
        replies.add(array([number] * 5), read=False)
    assert [each[0] for each in replies.recent] == list(range(8, 40))
    assert replies.tokens == len(PROMPT) + 32 * 5

    monkeypatch.setattr(module, "REMEMBERED", 100)
    monkeypatch.setattr(module, "_BESIDE", 0.0)
    drafts = sure()
    prompts = [array([number] * 4) for number in range(4)]
    for prompt in prompts:
        drafts.finish(*drafts.begin(prompt, 1), array(TEXT))
    found = [propose(drafts, drafts.begin(prompt, 1), [TEXT[:1]]) for prompt in prompts]
    assert [bool(each) for each in found] == [False, False, True, True]


def test_texts_that_are_remembered_no_longer_lead_nowhere() -> None:
    drafts = Drafts(10)
    for number in range(66):
        drafts.finish(*drafts.begin(PROMPT, 1), array([number, number, number, 1000 + number]))
    (reply,) = drafts.begin(PROMPT, 1)
    assert reply.replies.place([0, 0, 0]) is None
    assert reply.replies.place([60, 60, 60]) is not None
