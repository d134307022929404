"""The embedded rollout engine: right tokens and log-probabilities whatever the batching, versions, swaps, aborts; put to sleep,
it gives its memory of keys and values back, and goes on after it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime import types
from runtime.errors import InvalidMessage, InvariantViolated, UserError
from runtime.rollout.torch import engine as torch_engine
from runtime.rollout.torch import slots as rollout_slots
from runtime.rollout.torch.slots import uniforms
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.rollout_cases import Make, begin, drain, engines, from_scratch, never, request, run, tokens_of, update
from tests.unit.tiny_models import VOCABULARY, save_model, saved

pytestmark = pytest.mark.numeric


@pytest.fixture
def model() -> Any:
    return saved()[1]


@pytest.fixture
def make() -> Iterator[Make]:
    with engines(saved()[0]) as build:
        yield build


def many_requests() -> list[GroupRequest]:
    rng = np.random.default_rng(1)
    return [
        request(
            group_id,
            n=int(rng.integers(1, 6)),
            prompt=tuple(rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist()),
            limit=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.7, 1.0, 1.5])),
            stop_token_ids=(3, 4),
        )
        for group_id in range(9)
    ]


def test_replies_asked_for_in_parts_are_those_of_the_whole(make: Make) -> None:
    whole = run(make(), request(1, 5, temperature=1.0))[1]
    parts = [
        replace(request(1, n, temperature=1.0), group_id=group_id, first=first) for group_id, first, n in ((2, 0, 2), (3, 2, 3))
    ]
    done = run(make(), *parts)
    assert tokens_of(done[2] + done[3]) == tokens_of(whole)
    assert len({tuple(tokens) for tokens in tokens_of(whole)}) > 1
    with pytest.raises(InvalidMessage, match="first is -1"):
        make().submit([replace(request(1), first=-1)])


@pytest.mark.parametrize(("n", "alone"), [(1, True), (2, False)])
def test_a_group_waits_for_company_and_a_single_reply_does_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, n: int, alone: bool
) -> None:
    """And where nothing else is under way, no group waits."""
    monkeypatch.setattr(torch_engine, "_COMPANY_SECONDS", math.inf)
    monkeypatch.setattr(torch_engine, "_COMPANY_OF_ONE_SECONDS", 0.0)
    engine = make()
    engine.submit([request(1, n, limit=2), request(2, 2, limit=9)])
    first = asyncio.run(engine.advance(lambda: False))
    assert [group.group_id for group in first] == ([1] if alone else [1, 2])
    later = asyncio.run(engine.advance(lambda: False))
    assert [group.group_id for group in later] == ([2] if alone else [])


def test_greedy_replies_equal_generate(make: Make, model: Any) -> None:
    prompts = [(5, 9, 2), (7,), tuple(range(1, 18))]
    done = run(make(slots=2), *(request(i, 1, prompt, 20, temperature=0.0) for i, prompt in enumerate(prompts)))
    for index, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert done[index][0].tokens.tolist() == expected.tolist()


def test_what_all_prompts_begin_with_is_computed_once(make: Make, model: Any) -> None:
    """One prompt is what the others begin with; its last token is computed with theirs."""
    engine, first = make(), tuple(range(5, 25))
    requests = [request(index, prompt=(*first, *rest)) for index, rest in enumerate([(7,), (8, 9), ()])]
    done = run(engine, *requests)
    assert engine.stats().prefill_tokens == 19 + 2 + 3 + 1
    for each in requests:
        for sample in done[each.group_id]:
            assert_close(sample.logprobs, from_scratch(model, each.prompt, sample, 1.0), terms=forward_terms(64), scale=LOGITS)


def test_replies_do_not_depend_on_slots_or_company(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on whether long and short sequences are attended apart. Each ends by a stop token or its limit."""
    requests, one = many_requests(), make(slots=1)
    alone = {each.group_id: run(one, each)[each.group_id] for each in requests}
    for worth_splitting in (0, 10**9):
        monkeypatch.setattr(rollout_slots, "_WORTH_SPLITTING", worth_splitting)
        for slots in (64, 3):
            found = run(make(slots), *requests)
            assert {name: tokens_of(each) for name, each in found.items()} == {n: tokens_of(each) for n, each in alone.items()}
    reasons = set()
    for each in requests:
        assert len(alone[each.group_id]) == each.n
        for sample in alone[each.group_id]:
            stops = np.isin(sample.tokens, (3, 4))
            assert not stops[:-1].any()
            assert (sample.finish_reason == "stop") == stops[-1]
            reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def test_each_token_is_drawn_with_its_own_uniform_number(make: Make, model: Any) -> None:
    each = request(3, n=2, temperature=0.9)
    for index, sample in enumerate(run(make(), each)[3]):
        text = torch.tensor([[*each.prompt.tolist(), *sample.tokens.tolist()]])
        with torch.no_grad():
            p = torch.softmax(model(text).logits[0, len(each.prompt) - 1 : -1].double() / 0.9, -1).numpy()
        u = uniforms(each.seed, index, len(p))
        expected = [int(np.searchsorted(row.cumsum(), number, side="right")) for row, number in zip(p, u, strict=True)]
        assert sample.tokens.tolist() == expected


def test_a_reply_may_end_with_its_first_token(make: Make) -> None:
    first = [tokens[0] for tokens in tokens_of(run(make(), request(1, n=8))[1])]
    stopped = run(make(slots=2), request(1, n=8, stop_token_ids=(first[0],)))[1]
    assert [sample.tokens.tolist() for sample in stopped if len(sample.tokens) == 1] == [first[:1]] * first.count(first[0])
    assert stopped[0].finish_reason == "stop"


def test_a_slot_forgets_the_stop_tokens_of_the_one_before(make: Make) -> None:
    engine = make(slots=1)
    run(engine, request(1, n=6, stop_token_ids=tuple(range(20))))
    for sample in run(engine, request(2, n=6, limit=30, stop_token_ids=(60,)))[2]:
        assert sample.tokens[-1] == 60 if sample.finish_reason == "stop" else len(sample.tokens) == 30


def test_the_header_describes_the_payload(make: Make) -> None:
    engine = make()
    engine.version = PolicyVersion(2, 7)
    each = request(5, n=6, stop_token_ids=(3, 4), limit=15)
    (group,) = asyncio.run(begin(engine, [each], 99))
    payload = types.decode(GroupPayload, group.payload)
    assert payload.prompt.tolist() == each.prompt.tolist()
    assert (group.group_id, payload.group_id, group.prompt_tokens) == (5, 5, 3)
    assert group.response_tokens == [len(sample.tokens) for sample in payload.samples]
    assert group.truncated == sum(sample.finish_reason == "length" for sample in payload.samples)
    assert group.oldest == group.newest == PolicyVersion(2, 7)
    for sample in payload.samples:
        assert sample.versions.tolist() == [PolicyVersion(2, 7).pack()] * len(sample.tokens)
        assert sample.loss_mask.tolist() == [1] * len(sample.tokens)


def test_filters_and_greedy_rows_share_a_batch_with_plain_ones(make: Make) -> None:
    requests = [
        request(1),
        request(2, temperature=0.0),
        request(3, top_k=2, temperature=2.0),
        request(4, top_p=0.5),
        request(5, temperature=0.7),
    ]
    together = run(make(slots=15), *requests)
    for each in requests:
        assert tokens_of(together[each.group_id]) == tokens_of(run(make(), each)[each.group_id])
    assert tokens_of(together[2]) == tokens_of(together[2])[:1] * 3
    assert min(sample.logprobs.min() for sample in together[3]) > np.log(1e-3)


def test_a_swap_between_two_steps_marks_the_tokens_after_it(make: Make) -> None:
    folder, other = saved(seed=1)
    engine, each = make(slots=2), request(1, n=3, limit=20)

    async def swapped() -> GeneratedGroup:
        assert await begin(engine, [each], 6) == []
        await update(engine, load_file(folder / "model.safetensors"), PolicyVersion(0, 1))
        assert engine.version == PolicyVersion(0, 1)
        (group,) = [group async for group in drain(engine)]
        return group

    group = asyncio.run(swapped())
    assert (group.oldest, group.newest) == (PolicyVersion(0, 0), PolicyVersion(0, 1))
    samples = types.decode(GroupPayload, group.payload).samples
    # Six steps on the first token of the prefill; the third sample had no slot before the swap.
    assert [(sample.versions == 0).sum() for sample in samples] == [7, 7, 0]
    assert tokens_of(samples[:1])[0][:7] == tokens_of(run(make(), each)[1])[0][:7]
    assert_close(samples[2].logprobs, from_scratch(other, each.prompt, samples[2]), terms=forward_terms(64), scale=LOGITS)


@pytest.mark.parametrize("adopts", [True, False], ids=["in their memory", "copied"])
def test_swapped_weights_generate_what_loaded_ones_do_bit_for_bit(make: Make, adopts: bool) -> None:
    folder, other = saved(seed=1)
    stored = {name: each.detach() for name, each in other.named_parameters()}
    flat = torch.cat([each.flatten() for each in stored.values()])  # one after the other, as in a bucket
    parts = flat.split([each.numel() for each in stored.values()])
    tensors = {name: part.view(each.shape) for (name, each), part in zip(stored.items(), parts, strict=True)}
    engine, fresh = make(), make(path=folder)
    engine.adopts = engine._next.adopts = "float32" if adopts else ""
    asyncio.run(update(engine, tensors, PolicyVersion(0, 1)))
    found, expected = (run(each, *many_requests()) for each in (engine, fresh))
    assert (engine._decoder.weights.embedding.data_ptr() == flat.data_ptr()) == adopts
    for group_id, samples in expected.items():
        assert tokens_of(found[group_id]) == tokens_of(samples)
        assert [each.logprobs.tolist() for each in found[group_id]] == [each.logprobs.tolist() for each in samples]


def test_weights_of_another_dtype_are_copied_over_those_in_use_at_the_swap(make: Make, tmp_path: Path) -> None:
    engine = make()
    place = engine._decoder.weights.embedding.data_ptr()
    for step in range(1, 3):
        other = save_model(tmp_path / str(step), seed=step).bfloat16()
        tensors = {name: each.detach() for name, each in other.named_parameters()}
        before = engine._decoder.weights.embedding.clone()
        for _ in range(2):  # the first in vain
            asyncio.run(engine.stage(tensors))
        assert torch.equal(engine._decoder.weights.embedding, before), "it generates from what it has until the swap"
        asyncio.run(engine.swap(PolicyVersion(0, step)))
        found = engine._decoder.weights._views
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
        assert engine._decoder.weights.embedding.data_ptr() == place


def test_weights_of_which_some_have_its_dtype_are_taken_where_they_lie(make: Make, tmp_path: Path) -> None:
    engine, name = make(), "model.layers.0.self_attn.o_proj.weight"
    tensors = {name: each.detach() for name, each in save_model(tmp_path, seed=1).bfloat16().named_parameters()}
    tensors[name] = tensors[name].float()
    asyncio.run(update(engine, tensors, PolicyVersion(0, 1)))
    assert engine._decoder.weights.layers[0].output.data_ptr() == tensors[name].data_ptr()
    assert all(torch.equal(engine._decoder.weights._views[each], tensor.float()) for each, tensor in tensors.items())


def test_weights_that_do_not_fit_leave_the_engine_as_it_was(make: Make) -> None:
    engine = make()
    with pytest.raises(InvalidMessage, match="unknown nonsense"):
        asyncio.run(engine.stage({"nonsense": torch.zeros(1)}))
    with pytest.raises(InvariantViolated, match="must be staged before"):
        asyncio.run(engine.swap(PolicyVersion(0, 1)))
    assert engine.version == PolicyVersion(0, 0)


def test_aborted_groups_leave_and_the_others_are_untouched(make: Make) -> None:
    engine = make(slots=5)
    requests = [request(group_id, n=2, limit=30) for group_id in range(6)]
    alone = {each.group_id: tokens_of(run(make(), each)[each.group_id]) for each in requests[1::2]}

    async def aborted() -> dict[int, list[list[int]]]:
        await begin(engine, requests, 5)
        assert engine.abort([0, 2, 4, 99]) == [0, 2, 4]
        assert engine.abort([0]) == []
        assert engine.stats().running == 2
        return {each.group_id: tokens_of(types.decode(GroupPayload, each.payload).samples) async for each in drain(engine)}

    assert asyncio.run(aborted()) == alone
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_cancelled_advance_waits_for_its_step_and_loses_nothing(make: Make) -> None:
    engine = make(slots=2)
    gate = threading.Event()

    async def cancelled() -> list[GeneratedGroup]:
        engine.submit([request(group_id, n=2) for group_id in range(4)])
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def check() -> bool:
            loop.call_soon_threadsafe(started.set)
            return not gate.wait(60)

        task = asyncio.create_task(engine.advance(check))
        await asyncio.wait_for(started.wait(), 60)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().decode_steps <= 1
        return [group async for group in drain(engine)]

    assert {group.group_id for group in asyncio.run(cancelled())} == {0, 1, 2, 3}


def test_statistics_count_tokens(make: Make) -> None:
    engine = make(slots=4)
    done = run(engine, request(1, n=6), request(2, n=1, prompt=(1, 2, 3, 4, 5)))
    stats = engine.stats()
    assert stats.prefill_tokens == 8
    assert stats.decode_tokens == sum(len(sample.tokens) - 1 for samples in done.values() for sample in samples)
    assert stats.busy_seconds > 0
    assert (stats.running, stats.waiting, stats.slots) == (0, 0, 4)


def test_it_tells_what_runs_what_waits_and_how_full_the_cache_is(make: Make) -> None:
    engine = make(slots=2)
    assert asyncio.run(begin(engine, [request(1, n=3, limit=20)], 6)) == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_shared, stats.preemptions) == (2, 1, False, 0)
    assert stats.kv_use == 2 * (3 + 6) / (3 * 64), "prompts, and a token a step; a third slot is kept for a probe"
    asyncio.run(begin(engine, [], 99))
    assert engine.stats().kv_use == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 62}, "prompt and max_new_tokens are 65 tokens, at most 64 fit"),
        ({"n": 0}, "n is 0, must be at least 1"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (61,)}, r"token ids outside of 0\.\.60"),
        ({"limit": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_an_impossible_request_queues_nothing(make: Make, options: dict[str, Any], message: str) -> None:
    engine = make()
    with pytest.raises(InvalidMessage, match=f"group 2: .*{message}"):
        engine.submit([request(1), request(2, **options)])
    assert not engine.has_work
    with pytest.raises(InvalidMessage, match="group 1: group_id is already here"):
        engine.submit([request(1), request(1)])
    assert not engine.has_work


def test_a_context_beyond_the_model_is_a_user_error(make: Make) -> None:
    with pytest.raises(UserError, match="300 is more than the 256 positions"):
        make(max_model_len=300)


# ---------------------------------------------------------------------------------------------- sleep


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For an engine to take over, and to give back."""
    return {name: each.clone() for name, each in weights.items()}


def test_sleep_gives_the_cache_back_and_loses_no_group(make: Make) -> None:
    engine = make(slots=2)

    async def go() -> list[GeneratedGroup]:
        engine.submit([request(1)])
        plain = [group async for group in drain(engine)]
        assert await begin(engine, [request(2)], 1) == []
        again = [group async for group in drain(engine)]
        assert [group.group_id for group in again] == [2]
        await engine.sleep()
        assert engine._cache.data.untyped_storage().nbytes() == 0
        engine.submit([request(1)])
        assert not engine.has_work
        assert await engine.advance(never) == []
        with pytest.raises(InvariantViolated, match="asleep"):
            await engine.swap(PolicyVersion(0, 1))
        await engine.wake()
        after = [group async for group in drain(engine)]
        assert after == plain
        return after

    assert len(asyncio.run(go())) == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_are_taken_over_before_the_cache_is_back(make: Make, on_host: bool) -> None:
    """`on_host`: as on an accelerator, weights that are given back are kept on the host."""
    engine, weights = make(slots=2), saved(seed=1)[1].state_dict()
    engine.adopts = engine._next.adopts = "" if on_host else "float32"

    async def go() -> None:
        before = [tensor.clone() for tensor in engine._decoder.weights.tensors()]
        await engine.sleep()
        embedding = engine._decoder.weights.embedding
        assert (embedding.untyped_storage().nbytes() == 0) == on_host
        await engine.wake(cache=False)
        assert all(map(torch.equal, before, engine._decoder.weights.tensors()))
        engine.submit([request(1)])
        assert not engine.has_work
        await engine.stage(copied(weights))
        await engine.swap(PolicyVersion(0, 1))
        assert not engine.has_work
        await engine.sleep()
        await engine.wake()
        (group,) = [group async for group in drain(engine)]
        assert group.oldest == PolicyVersion(0, 1)
        assert torch.equal(engine._decoder.weights.embedding, weights["model.embed_tokens.weight"])

    asyncio.run(go())


def test_what_runs_as_it_goes_to_sleep_goes_on_with_the_next_weights(make: Make) -> None:
    """Bit for bit as where the keys and values are made anew at the swap, and nothing sleeps."""
    other = saved(seed=1)[1].state_dict()

    async def generated(sleeps: bool) -> list[GeneratedGroup]:
        engine = make(slots=2)
        assert await begin(engine, [request(1), request(2)], 3) == []
        assert engine.stats().running
        if sleeps:
            await engine.sleep()
            assert engine._cache.data.untyped_storage().nbytes() == 0
            assert not engine.has_work
            await engine.wake(cache=False)
        await engine.stage(copied(other))
        await engine.swap(PolicyVersion(0, 1), recompute=not sleeps)
        if sleeps:
            await engine.wake()
        return [group async for group in drain(engine)]

    plain, slept = (asyncio.run(generated(sleeps)) for sleeps in (False, True))
    assert slept == plain
    assert {(group.oldest.step, group.newest.step) for group in slept} == {(0, 1), (1, 1)}
