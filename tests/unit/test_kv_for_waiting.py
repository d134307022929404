"""What the embedded engine keeps of conversations that wait: a turn costs its own tokens, and is what it would be without."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime import config
from runtime.commands import Level, Priority, SetLevel
from runtime.config.loading import resolve
from runtime.errors import InvalidMessage
from runtime.models.experts import join_experts
from runtime.rollout.engine import EngineGroup, EngineStats
from runtime.rollout.torch import engine as rollout_torch
from runtime.rollout.torch.engine import SHORTEST, TorchRolloutEngine, TurnCache
from runtime.rollout.vllm import engine as rollout_vllm
from runtime.rollout.vllm.shim import CoreLoad, Output
from runtime.types import GroupRequest, PolicyVersion, Sample
from services.rollout import RolloutService, make_engine
from tests.closeness import LOGITS, assert_close, forward_terms, gamma
from tests.unit import actor_desk
from tests.unit.config_cases import checked
from tests.unit.rollout_cases import Make, begin, drain, engines, from_scratch, request, run, samples, update
from tests.unit.tiny_models import VOCABULARY, saved

pytestmark = pytest.mark.numeric

OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)
BEGIN = [7, 3] * (SHORTEST // 2)  # what all conversations begin with is long enough to be worth keeping


@cache
def doubled(family: str, seed: int) -> Any:
    model = copy.deepcopy(saved(family, seed)[1]).double()
    join_experts(model)  # transformers' DeepSeek-V3 adds up its experts in float32
    return model


class TwoModels:
    """The engine's model, and another for swaps, in float64."""

    def __init__(self, family: str):
        self.family, self.path = family, saved(family)[0]

    @property
    def old(self) -> Any:
        return doubled(self.family, 0)

    @property
    def new(self) -> Any:
        return doubled(self.family, 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(saved(self.family, 1)[0] / "model.safetensors")


@pytest.fixture(params=["qwen2"])
def models(request: pytest.FixtureRequest) -> TwoModels:
    return TwoModels(request.param)


@pytest.fixture
def make(models: TwoModels) -> Iterator[Make]:
    with engines(models.path, max_model_len=256) as build:
        yield build


def turn(group_id: int, prompt: list[int], n: int = 1, limit: int = 9, keep: bool = True, **sampling: Any) -> GroupRequest:
    return replace(request(group_id, n, tuple(prompt), limit, **sampling), keep=keep)


def words(*shape: int, seed: int = 0) -> list[Any]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape).tolist()  # type: ignore[no-any-return]


def converse(engine: TorchRolloutEngine, said: list[list[int]], **sampling: Any) -> list[tuple[GroupRequest, Sample]]:
    """Each turn's prompt is all that was said before, and the next of `said`."""
    turns, text = [], list[int]()
    for number, each in enumerate(said):
        asked = turn(number, text + each, **sampling)
        (sample,) = run(engine, asked)[number]
        turns.append((asked, sample))
        text = after(asked, sample)
    return turns


def assert_of(model: Any, asked: GroupRequest, sample: Sample) -> None:
    """The log-probabilities are those of a model of float64 that computes the whole text."""
    expected = from_scratch(model, asked.prompt, sample)
    assert_close(sample.logprobs, expected, terms=forward_terms(256), scale=LOGITS, what=f"{asked.group_id}")


def after(asked: GroupRequest, sample: Sample, *more: int) -> list[int]:
    """What the next turn's prompt begins with."""
    return [*asked.prompt.tolist(), *sample.tokens.tolist(), *more]


# ---------------------------------------------------------------------------------------------- the store


def fake(text: list[int]) -> torch.Tensor:
    """Keys and values, 8 bytes a token, that tell everything before them: [1, 1, 1, length, 1]."""
    made, before = [], 0
    for token in text:
        before = (before * 31 + token + 1) % 1_000_003
        made.append(float(before))
    return torch.tensor(made, dtype=torch.float64).view(1, 1, 1, -1, 1)


def common(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


texts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda tail: BEGIN + tail)


@given(put=st.lists(texts, max_size=12), prompt=texts, room=st.sampled_from([1 << 20, 70 * 8, 20 * 8]))
def test_what_is_found_is_the_longest_common_beginning_and_belongs_to_it(
    put: list[list[int]], prompt: list[int], room: int
) -> None:
    cache = TurnCache(room)
    for text in put:
        cache.put(np.array(text, np.int32), fake(text))
        assert cache.bytes == sum(each.nbytes for each in cache._held.values()) <= room
        assert len(cache) == len(cache._held)
    found = cache.longest(np.array(prompt, np.int32))
    length = 0 if found is None else found.shape[3]
    if found is not None:
        assert torch.equal(found, fake(prompt[:length]))
    if room == 1 << 20:
        assert length == min(len(prompt) - 1, max((common(text, prompt) for text in put), default=0))


def test_what_was_not_used_for_the_longest_time_leaves_first() -> None:
    first, second, third, fourth = (np.array([each, *BEGIN], np.int32) for each in range(4))
    size = fake(first.tolist()).nbytes
    cache = TurnCache(3 * size)
    for text in (first, second, third):
        cache.put(text, fake(text.tolist()))
    assert cache.longest(np.append(first, 5)) is not None
    cache.put(second, fake(second.tolist()))  # once more
    cache.put(fourth, fake(fourth.tolist()))
    held = [cache.longest(np.append(text, 5)) is not None for text in (first, second, third, fourth)]
    assert held == [True, True, False, True]
    assert cache.bytes == 3 * size


def test_a_text_that_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    small, large = BEGIN, [*BEGIN, 1]
    cache = TurnCache(fake(small).nbytes)
    cache.put(np.array(small, np.int32), fake(small))
    cache.put(np.array(large, np.int32), fake(large))
    assert len(cache) == 1
    found = cache.longest(np.array(large, np.int32))
    assert found is not None
    assert torch.equal(found, fake(small))


def test_what_is_kept_is_a_copy_and_a_beginning_that_is_short_is_not_worth_it() -> None:
    cache, source = TurnCache(1 << 20), fake(BEGIN)
    cache.put(np.array(BEGIN, np.int32), source)
    source.zero_()
    found = cache.longest(np.array([*BEGIN, 1], np.int32))
    assert found is not None
    assert torch.equal(found, fake(BEGIN))
    assert cache.longest(np.array([*BEGIN[:-1], 1], np.int32)) is None
    cache.clear()
    assert (cache.bytes, len(cache), cache.longest(np.array([*BEGIN, 1], np.int32))) == (0, 0, None)


# ---------------------------------------------------------------------------------------------- conversations

SAID = [BEGIN + words(9), words(4, seed=1), words(1, seed=2), words(30, seed=3)]


@pytest.mark.parametrize("models", ["qwen2", "qwen3_moe", "mistral", "gemma3", "gpt_oss", "deepseek_v3"], indirect=True)
def test_a_turn_costs_its_own_tokens_and_is_the_same(models: TwoModels, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same greedy tokens, up to the first that another rounding may change."""
    with_store = make()
    monkeypatch.setattr(rollout_torch, "KV_FOR_WAITING", 0)
    without = make()
    turns = converse(with_store, SAID, temperature=0.0)
    bound, compared = 2 * LOGITS * gamma(forward_terms(256)), 0
    for asked, sample in turns:
        assert_of(models.old, asked, sample)
        (expected,) = run(without, asked)[asked.group_id]
        text = torch.tensor([[*asked.prompt.tolist(), *expected.tokens.tolist()]])
        with torch.no_grad():
            best, second = models.old(text).logits[0, len(asked.prompt) - 1 : -1].topk(2).values.T
        clear = int(((best - second) > 2 * bound).cumprod(0).sum())
        assert sample.tokens.tolist()[:clear] == expected.tokens.tolist()[:clear]
        compared += clear
    assert compared >= 20
    # Each later turn: what was said, and the newest token of the reply before, which the cache did not hold.
    stats, other = with_store.stats(), without.stats()
    assert stats.prefill_tokens == len(SAID[0]) + sum(len(each) + 1 for each in SAID[1:])
    assert other.prefill_tokens == sum(len(asked.prompt) for asked, _ in turns)
    assert (stats.kv_hits, stats.kv_misses) == (3, 1)
    assert (other.kv_hits, other.kv_misses, other.kv_waiting_bytes) == (0, 4, 0)
    # The conversation is held once, in its latest state.
    length = len(turns[-1][0].prompt) + len(turns[-1][1].tokens) - 1
    each = with_store._cache.data[:, :, 0, :, 0].nbytes
    assert (stats.kv_waiting_texts, stats.kv_waiting_bytes) == (1, length * each)


@pytest.mark.parametrize(("slots", "together"), [(64, 8192), (64, 100), (2, 8192)])
def test_many_continue_side_by_side(
    models: TwoModels, make: Make, monkeypatch: pytest.MonkeyPatch, slots: int, together: int
) -> None:
    """Conversations of different lengths, n samples of one prompt, and prompts of which nothing is kept, in one queue; in one
    batch or in several."""
    monkeypatch.setattr(rollout_torch, "_PREFILL_TOKENS", together)
    computed, batches = rollout_torch.prefill, []

    def noted(decoder: Any, texts: Any, begun: Any) -> Any:
        if begun:
            batches.append((len(texts), sum(map(len, texts))))
        return computed(decoder, texts, begun)

    monkeypatch.setattr(rollout_torch, "prefill", noted)
    engine = make(slots)
    begun = [turn(i, words(16 + 9 * i, seed=i), n=1 + i % 3, limit=3 + 2 * i) for i in range(6)]
    kept = run(engine, *begun)
    before = engine.stats().prefill_tokens
    requests, new = [], 0
    for each in begun:
        for sample in kept[each.group_id]:
            more = words(1 + len(requests) * 3, seed=len(requests))
            requests.append(turn(100 + len(requests), after(each, sample, *more), keep=False, n=2))
            new += 1 + len(more)
            requests.append(turn(100 + len(requests), words(20, seed=50 + len(requests)), keep=False))
            new += 20
    done = run(engine, *requests)
    for each in requests:
        for sample in done[each.group_id]:
            assert_of(models.old, each, sample)
    assert engine.stats().prefill_tokens - before == new
    assert (engine.stats().kv_hits, engine.stats().kv_misses) == (len(requests) // 2, len(begun))
    assert sum(size for size, _ in batches) == len(requests) // 2
    assert all(size == 1 or tokens <= together for size, tokens in batches)
    assert engine.stats().kv_waiting_texts == len(requests) // 2  # those that do not say `keep` leave the store as it is


def test_a_prompt_of_which_nothing_is_kept_is_computed_as_without_a_store(make: Make) -> None:
    """To the bit, among others that are continued."""
    engine, alone = make(slots=32), make(slots=32)
    begun = [turn(i, words(20 + i, seed=i)) for i in range(4)]
    kept = run(engine, *begun)
    later = [turn(10 + i, after(each, kept[i][0], 4, 5)) for i, each in enumerate(begun)]
    fresh = [turn(20 + i, words(8 + i, seed=90 + i), limit=1) for i in range(4)]
    done = run(engine, *(each for pair in zip(later, fresh, strict=True) for each in pair))
    for group_id, (expected,) in run(alone, *fresh).items():
        (sample,) = done[group_id]
        assert (sample.tokens.tolist(), sample.logprobs.tolist()) == (expected.tokens.tolist(), expected.logprobs.tolist())


def test_a_conversation_near_the_end_of_the_context_continues_beside_one_that_is_told_much(
    models: TwoModels, make: Make
) -> None:
    engine = make()
    begun = [turn(0, words(230)), turn(1, words(18, seed=1))]
    kept = run(engine, *begun)
    later = [turn(2, after(begun[0], kept[0][0], 4)), turn(3, after(begun[1], kept[1][0], *words(100, seed=2)))]
    done = run(engine, *later)
    for each in later:
        assert_of(models.old, each, done[each.group_id][0])
    assert engine.stats().kv_hits == 2


def test_a_reply_of_one_token_leaves_its_prompt(models: TwoModels, make: Make) -> None:
    engine = make()
    asked = turn(1, BEGIN, limit=1, n=2)
    first = run(engine, asked)[1]
    assert engine.stats().kv_waiting_texts == 1
    later = turn(2, [*BEGIN, int(first[0].tokens[0]), 8])
    assert_of(models.old, later, run(engine, later)[2][0])
    assert engine.stats().prefill_tokens == len(BEGIN) + 2


# ---------------------------------------------------------------------------------------------- versions


async def collected(engine: TorchRolloutEngine, *requests: GroupRequest) -> dict[int, Sample]:
    engine.submit(requests)
    return {group.group_id: samples(group)[0] async for group in drain(engine)}


@pytest.mark.parametrize("recompute", [False, True])
def test_no_turn_goes_on_from_keys_and_values_of_other_weights(models: TwoModels, make: Make, recompute: bool) -> None:
    """One conversation waits at the swap, and one is in the middle of a reply: what it leaves is of two versions, unless it
    was recomputed."""
    engine = make()
    waits, talks = turn(0, BEGIN + words(5)), turn(1, [*words(5, seed=1), *BEGIN], limit=30)

    async def session() -> tuple[list[GroupRequest], dict[int, Sample]]:
        before = await collected(engine, waits)
        assert await begin(engine, [talks], 9) == []
        assert engine.stats().kv_waiting_texts == 1
        await update(engine, models.tensors, NEW, recompute)
        assert (engine.stats().kv_waiting_texts, engine.stats().kv_waiting_bytes) == (0, 0)
        before |= await collected(engine)
        assert sorted(set(before[1].versions.tolist())) == [OLD.pack(), NEW.pack()]
        assert engine.stats().kv_waiting_texts == recompute
        computed = engine.stats().prefill_tokens
        later = [turn(5 + i, after(each, before[each.group_id], 2, 1)) for i, each in enumerate((waits, talks))]
        found = await collected(engine, *later)
        new = len(later[0].prompt) + (3 if recompute else len(later[1].prompt))
        assert engine.stats().prefill_tokens - computed == new
        return later, found

    later, found = asyncio.run(session())
    for each in later:
        assert_of(models.new, each, found[each.group_id])


def test_a_conversation_goes_on_with_the_store_after_a_swap(models: TwoModels, make: Make) -> None:
    """As does one whose prompt was prefilled under the old weights, and whose sample had no slot before the swap."""
    engine = make(slots=1)
    first, second = turn(0, BEGIN, limit=20), turn(1, BEGIN + words(3))

    async def session() -> None:
        await begin(engine, [first, second], 4)
        await update(engine, models.tensors, NEW)
        done = await collected(engine)
        assert engine.stats().kv_waiting_texts == 1
        later = turn(2, after(second, done[1], 6))
        before = engine.stats().prefill_tokens
        again = await collected(engine, later)
        assert engine.stats().prefill_tokens - before == 2
        for asked, sample in ((second, done[1]), (later, again[2])):
            assert_of(models.new, asked, sample)

    asyncio.run(session())


def test_an_aborted_conversation_leaves_nothing(make: Make) -> None:
    engine = make()

    async def session() -> None:
        await begin(engine, [turn(0, BEGIN, limit=30), turn(1, words(20), keep=False)], 4)
        engine.abort([0])
        assert set(await collected(engine)) == {1}
        assert engine.stats().kv_waiting_texts == 0

    asyncio.run(session())


# ---------------------------------------------------------------------------------------------- service and configuration


def test_the_service_tells_what_waits_and_sleep_gives_it_back(models: TwoModels, make: Make) -> None:
    """Of requests as a gateway makes them, whose group ids are negative."""

    async def test() -> None:
        service = RolloutService(config.Config(run=config.Run(name="test")), "rollout-0", 0)
        service.use(make())
        async with actor_desk.running(service._actor):
            ask = service._actor.send
            ids = [-(1 << 62), -(1 << 61) - 1, -12345678901234567]
            (first,) = samples(await ask(turn(ids[0], BEGIN)))
            second, third = turn(ids[1], [*BEGIN, *first.tokens.tolist(), 5]), turn(ids[2], words(20))
            later = await asyncio.gather(ask(second), ask(third))
            assert [each.group_id for each in later] == ids[1:]
            gauges = service.gauges()
            assert (gauges["kv_hits_total"], gauges["kv_misses_total"], gauges["kv_waiting_texts"]) == (1, 2, 2)
            assert gauges["kv_waiting_bytes"] == service._engine._turn_cache.bytes > 0  # type: ignore[attr-defined]
            await ask(SetLevel(Level.ASLEEP), priority=Priority.CONTROL)
            assert service.gauges()["kv_waiting_bytes"] == 0
            await ask(SetLevel(Level.AWAKE), priority=Priority.CONTROL)
            (again,) = samples(await ask(turn(ids[0], BEGIN)))
            assert again.tokens.tolist() == first.tokens.tolist()
            assert service.gauges()["kv_misses_total"] == 3

    actor_desk.run(test())


def test_vllm_tells_which_conversations_went_on() -> None:
    engine = object.__new__(rollout_vllm.VLLMRolloutEngine)
    engine._stats, engine.version, engine._running = EngineStats(), OLD, {}
    for name, keep, cached in (("a", True, 48), ("b", True, 0), ("c", False, 48)):
        group = EngineGroup(turn(1, words(60), keep=keep))
        engine._running[name] = rollout_vllm._Sequence(group, 0)
        for tokens in ([1], [2]):
            engine._record([Output(name, tokens, np.zeros(1, np.float32), "", cached)])
    assert (engine._stats.kv_hits, engine._stats.kv_misses, engine._stats.prefill_tokens) == (1, 1, 12 + 60 + 12)


def test_vllm_tells_who_lost_its_memory_to_others_and_not_to_a_swap() -> None:
    engine = object.__new__(rollout_vllm.VLLMRolloutEngine)
    engine._stats, engine.version = EngineStats(slots=8), OLD
    engine._waiting, engine._slots, engine._context = deque(), 8, 100
    engine._core = SimpleNamespace(reported=CoreLoad(room=799, kv_use=0.9, waiting=3))  # type: ignore[assignment]
    group = EngineGroup(turn(1, words(60)))
    engine._running = {name: rollout_vllm._Sequence(group, 0, forgotten=name == "b") for name in ("a", "b", "c")}
    for name, preemptions in (("a", 1), ("b", 1), ("c", 0), ("b", 2)):
        engine._record([Output(name, [1], np.zeros(1, np.float32), "", 0, preemptions)])
    stats = engine.stats()
    assert stats.preemptions == 1 + 2
    assert (stats.running, stats.waiting, stats.kv_use, stats.kv_shared) == (3, 3, 0.9, True)
    engine._running, engine._core.reported.room = {}, 800
    stats = engine.stats()
    assert (stats.waiting, stats.kv_use, stats.kv_shared) == (0, 0, False)


def test_a_slot_holds_the_context_of_the_gateway(models: TwoModels) -> None:
    raw = {
        "run": {"name": "a"},
        "model": {"path": str(models.path)},
        "data": {"max_prompt_tokens": 20},
        "sampling": {"max_new_tokens": 20},
        "gateway": {"context": 200},
        "services": {"rollout": {"max_num_seqs": 2}},
    }
    found = resolve(msgspec.convert(raw, config.Config))
    engine = make_engine(found, "rollout-0")
    try:
        engine.submit([turn(1, BEGIN, limit=200 - len(BEGIN))])
        with pytest.raises(InvalidMessage, match="are 201 tokens, at most 200 fit"):
            engine.submit([turn(2, BEGIN, limit=201 - len(BEGIN))])
    finally:
        asyncio.run(engine.close())


def test_the_context_of_the_gateway_is_compared_with_memory_and_model(sound: dict[str, Any]) -> None:
    (fault,) = checked(sound, gateway={"context": 129})
    assert fault == "gateway.context: 129 exceeds the model's 128 positions"
    shorter = {"data": {"max_prompt_tokens": 10}, "sampling": {"max_new_tokens": 10}}
    for context in (0, 100):
        faults = checked(sound, 1000, **shorter, gateway={"context": context})
        assert [fault for fault in faults if f"64 slots of {context or 20} tokens" in fault]
