"""Drafts from replies to the same prompt: where they come from, when they pay, and what is remembered; and the embedded engine
with drafts: the same tokens and log-probabilities as without, in fewer steps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime.rollout.torch import slots as module
from runtime.rollout.torch import slots as rollout_slots
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.rollout.torch.slots import CONTEXT, LONGEST, Drafts, Following, PromptReplies
from runtime.types import GroupRequest, PolicyVersion, Sample
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.rollout_cases import Make, begin, drain, engines, from_scratch, request, run, samples, tokens_of, update
from tests.unit.tiny_models import saved

pytestmark = pytest.mark.numeric

NEW = PolicyVersion(0, 1)

PROMPT = np.array([50, 51, 52, 53], np.int32)
TEXT = list(range(10, 40))


def array(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def sure(fixed: int = 100, rate: float = 0.99) -> Drafts:
    """As if places had been right that often so far."""
    drafts = Drafts(fixed)
    drafts.rates, drafts._seen = [rate] * len(drafts.rates), [10**6] * len(drafts.rates)
    return drafts


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token more costs nothing beside a step."""
    monkeypatch.setattr(module, "_BESIDE", 0.0)


def propose(drafts: Drafts, running: Sequence[Following], texts: Sequence[list[int]], room: int = 99) -> list[list[int]]:
    found = drafts.propose(running, [len(text) for text in texts], [room] * len(texts), lambda row, read: texts[row][read:])
    return [list(each) for each in found]


def test_a_reply_is_drafted_from_a_finished_one_to_the_same_prompt(free: None) -> None:
    drafts = sure()
    first, second, third = drafts.begin(PROMPT, 3)
    drafts.finish(first, array(TEXT))
    (elsewhere,) = drafts.begin(PROMPT[::-1].copy(), 1)
    assert propose(drafts, [second, elsewhere], [TEXT[:1], TEXT[:1]]) == [TEXT[1 : 1 + LONGEST], []]
    assert propose(drafts, [third], [[99, *TEXT[5 : 5 + CONTEXT]]]) == [TEXT[5 + CONTEXT :][:LONGEST]]
    assert propose(drafts, [second], [TEXT[:3]], room=2) == [TEXT[3:5]]
    (later,) = drafts.begin(PROMPT, 1)
    assert propose(drafts, [later], [TEXT[:1]]) == [TEXT[1 : 1 + LONGEST]]


def test_a_running_reply_is_a_source_as_far_as_it_is_read(free: None) -> None:
    drafts = sure()
    ahead, behind = drafts.begin(PROMPT, 2)
    assert propose(drafts, [ahead, behind], [TEXT[:5], TEXT[:2]]) == [[], TEXT[2:5]]


def test_replies_in_step_have_nothing_to_draft_from_and_count_nothing() -> None:
    drafts = sure()
    group = drafts.begin(PROMPT, 4)
    for length in range(1, 20):
        assert propose(drafts, group, [TEXT[:length]] * 4) == []
    assert drafts.rates == [0.99] * len(drafts.rates)


def test_a_reply_that_turns_off_finds_another_place(free: None) -> None:
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
    while drafts.follows(20):
        propose(drafts, group, [[1]] * 20)
    assert [drafts.follows(running) for running in (20, 2, 2)] == [False, False, True]  # fewer end the pause


def test_following_goes_on_where_it_pays() -> None:
    drafts = sure(fixed=100)
    (first,) = drafts.begin(PROMPT, 1)
    drafts.finish(first, array(TEXT))
    for _ in range(2000):
        assert drafts.follows(1)
        (reply,) = drafts.begin(PROMPT, 1)
        assert propose(drafts, [reply], [TEXT[:1]])


def test_a_reply_that_was_skipped_is_read_once_it_has_finished(free: None) -> None:
    drafts = sure()
    first, second = drafts.begin(PROMPT, 2)
    propose(drafts, [first], [TEXT[:25]])  # too many at once: only the last tokens lead to a place
    assert propose(drafts, [second], [TEXT[:2]]) == []
    drafts.finish(first, array(TEXT))
    assert propose(drafts, [second], [TEXT[:3]]) == [TEXT[3 : 3 + LONGEST]]


def test_only_the_newest_replies_and_prompts_are_remembered(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = PromptReplies(PROMPT)
    for number in range(40):
        replies.add(array([number] * 5), read=False)
    assert [each[0] for each in replies.recent] == list(range(8, 40))
    assert replies.tokens == len(PROMPT) + 32 * 5

    monkeypatch.setattr(module, "REMEMBERED", 100)
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


# ---------------------------------------------------------------------------------------------- the engine


@pytest.fixture
def model() -> Any:
    return saved()[1]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines that draft whatever they can, whether it pays or not."""
    monkeypatch.setattr(module, "_BESIDE", -1e9)
    monkeypatch.setattr(module, "_PACE", 0.0)
    with engines(saved()[0]) as plain:

        def build(drafts: bool = True, slots: int = 6, **options: Any) -> TorchRolloutEngine:
            engine = plain(slots, drafts=drafts, **options)
            if engine._drafts is not None:
                buckets = len(engine._drafts.rates)
                engine._drafts.rates, engine._drafts._seen = [0.999] * buckets, [10**9] * buckets
            return engine

        yield build


def epoch(number: int, **sampling: Any) -> list[GroupRequest]:
    """Groups of three prompts, which later epochs have again."""
    limits = (30, 17, 40)
    return [
        request(10 * number + index, 4, (5, 9, 2 + index), limit, stop_token_ids=(3, 4), **sampling)
        for index, limit in enumerate(limits)
    ]


def compared(with_drafts: TorchRolloutEngine, without: TorchRolloutEngine, epochs: int, **sampling: Any) -> None:
    scale = LOGITS / (sampling["temperature"] or 1)
    for number in range(epochs):
        requests = epoch(number, **sampling)
        found, expected = run(with_drafts, *requests), run(without, *requests)
        for each in requests:
            assert tokens_of(found[each.group_id]) == tokens_of(expected[each.group_id])
            for one, other in zip(found[each.group_id], expected[each.group_id], strict=True):
                assert_close(one.logprobs, other.logprobs, terms=forward_terms(64), scale=scale)
                assert one.finish_reason == other.finish_reason
                assert (one.kept is None) == (not sampling.get("keep_sets"))
                if one.kept is not None and other.kept is not None:
                    assert one.kept.sizes.tolist() == other.kept.sizes.tolist()
                    assert one.kept.data.tolist() == other.kept.data.tolist()


@pytest.mark.parametrize(
    ("sampling", "worth_splitting"),
    [
        ({"temperature": 0.0}, 0),
        ({"temperature": 0.4}, 10**9),
        ({"temperature": 0.7, "top_k": 3, "top_p": 0.9, "keep_sets": True}, 0),
    ],
)
def test_replies_are_those_of_an_engine_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], worth_splitting: int
) -> None:
    """Whether long and short sequences are attended apart or not."""
    monkeypatch.setattr(rollout_slots, "_WORTH_SPLITTING", worth_splitting)
    with_drafts, without = make(), make(drafts=False)
    compared(with_drafts, without, 2, **sampling)
    drafted, plain = with_drafts.stats(), without.stats()
    assert (drafted.decode_tokens, plain.drafted_tokens) == (plain.decode_tokens, 0)
    assert 0 < drafted.accepted_tokens < drafted.drafted_tokens
    assert drafted.decode_steps < plain.decode_steps


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_families_with_windows_and_sinks_check_several_tokens_at_once(make: Make, family: str) -> None:
    folder, _ = saved(family)
    with_drafts = make(path=folder)
    compared(with_drafts, make(drafts=False, path=folder), 2, temperature=0.4)
    assert with_drafts.stats().accepted_tokens > 0


def test_replies_are_drawn_as_often_as_the_model_has_them(make: Make, model: Any) -> None:
    """Of four tokens out of the three most probable ones each, against all that there are (chi-square)."""
    prompt, count, length = (5, 9, 2), 1000, 4
    engine = make(slots=8)
    requests = [request(number, 5, prompt, length, top_k=3, temperature=1.0) for number in range(count // 5)]
    drawn: Counter[tuple[int, ...]] = Counter()
    for done in run(engine, *requests).values():
        drawn.update(tuple(tokens) for tokens in tokens_of(done))
    expected = {text: count * chance for text, chance in enumerated(model, prompt, length).items()}
    assert drawn.keys() <= expected.keys()
    often = {text for text, times in expected.items() if times >= 5}
    cells = [(drawn[text], expected[text]) for text in often]
    rest = sum(times for text, times in expected.items() if text not in often)
    cells.append((sum(times for text, times in drawn.items() if text not in often), rest))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert engine.stats().accepted_tokens > count // 10


@torch.no_grad()
def enumerated(model: Any, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text when each token is one of the three most probable."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1].double()
            best = logits.topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
                longer[(*text, token)] = chance * share
        texts = longer
    return texts


@pytest.mark.parametrize("recompute", [False, True])
def test_a_swap_in_flight_leaves_versions_and_log_probabilities_as_they_are(make: Make, model: Any, recompute: bool) -> None:
    folder, newer = saved(seed=1)
    tensors = load_file(folder / "model.safetensors")
    engine = make(slots=4)
    run(engine, request(0, 4, limit=50, temperature=0.3))

    async def session() -> list[Sample]:
        assert await begin(engine, [request(1, 4, limit=50, temperature=0.3)], 4) == []
        await update(engine, tensors, NEW, recompute)
        return [sample for group in [group async for group in drain(engine)] for sample in samples(group)]

    before = engine.stats().accepted_tokens
    for sample in asyncio.run(session()):
        assert sorted(set(sample.versions.tolist())) == [0, NEW.pack()]
        assert (np.diff(sample.versions) >= 0).all()
        old = sample.versions == 0
        prompt = request(1).prompt
        for holds, weights in ((old, model), (~old & recompute, newer)):
            expected = np.array(from_scratch(weights, prompt, sample, 0.3))[holds]
            assert_close(sample.logprobs[holds], expected, terms=forward_terms(64), scale=LOGITS / 0.3)
    assert engine.stats().accepted_tokens > before


def test_what_is_kept_for_the_next_turn_is_what_was_accepted(make: Make, model: Any) -> None:
    engine = make(kv_for_waiting=1 << 20)
    prompt = tuple(range(5, 25))
    run(engine, request(9, 2, prompt, 20, temperature=0.0))
    done = run(engine, replace(request(0, 2, prompt, 20, temperature=0.0), keep=True))[0]
    assert engine.stats().accepted_tokens > 0
    turn = request(1, 1, (*prompt, *done[0].tokens.tolist(), 7, 8), 10, temperature=0.0)
    (sample,) = run(engine, turn)[1]
    assert engine.stats().kv_hits == 1
    assert_close(sample.logprobs, from_scratch(model, turn.prompt, sample), terms=forward_terms(64), scale=LOGITS)


def test_aborted_groups_leave_nothing_that_runs(make: Make) -> None:
    engine = make(slots=4)
    run(engine, request(0, 4, limit=50, temperature=0.3))

    async def session() -> None:
        await begin(engine, [request(number, 2, limit=50, temperature=0.3) for number in (1, 2)], 3)
        engine.abort([1])
        done = [group async for group in drain(engine)]
        assert [group.group_id for group in done] == [2]

    asyncio.run(session())


def test_drafts_that_are_never_right_are_given_up() -> None:
    """At temperature 3 no two replies go on alike."""
    with engines(saved()[0]) as plain:
        engine = plain(6, drafts=True)
        for number in range(4):
            run(engine, *epoch(number, temperature=3.0))
        stats = engine.stats()
    assert stats.drafted_tokens < stats.decode_tokens / 50
