"""The engine over real vLLM: log-probabilities, versions, updates in flight, aborts, sampling, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from runtime.errors import DeadlineExceeded, InvalidMessage, ServiceFault
from runtime.types import GeneratedGroup, PolicyVersion, RolloutLoad, Sample
from tests.vllm.faulty_worker import BREAKS, HANGS
from tests.vllm.rig import PROMPT, SLOTS, TOLERANCE, Rig, interrupted_after

pytestmark = pytest.mark.timeout(900)  # the first test's includes the start of the engine


@pytest.fixture(scope="module")
def rig(model_path: Path) -> Iterator[Rig]:
    with Rig(model_path) as made:
        yield made


def test_log_probabilities_are_the_trainers_before_and_after_updates(rig: Rig) -> None:
    for _ in range(4):
        (samples,) = rig.generate(rig.request())
        assert [set(sample.versions.tolist()) for sample in samples] == [{rig.newest}] * 4
        rig.check_exact(samples)
        assert rig.engine.version == PolicyVersion(0, rig.newest)
        if rig.newest:  # the weights before would not do
            assert rig.error(rig.newest - 1, samples[0]) > 100 * TOLERANCE
        rig.run(rig.update())


def test_recompute_in_flight_is_exact_at_the_boundary(rig: Rig) -> None:
    request = rig.request(n=SLOTS + 4, tokens=60)
    rig.begin(request, tokens=300)
    rig.run(rig.update(recompute=True))
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert sum(len(set(sample.versions.tolist())) == 2 for sample in payload.samples) >= SLOTS // 2
    assert payload.samples[-1].versions[0] == rig.newest  # begun after the swap


def test_keep_in_flight_goes_on_but_begins_nothing_on_old_keys(rig: Rig) -> None:
    first, second = rig.request(n=SLOTS, tokens=60), rig.request(n=4, tokens=20)
    rig.begin(first, tokens=300)
    rig.run(rig.update())
    rig.engine.submit([second])
    payloads = {payload.group_id: payload.samples for payload in rig.run(rig.finish(2))}
    rig.check_exact(payloads[second.group_id])  # the same prompt as the first
    gaps = []
    for sample in payloads[first.group_id]:
        steps = sample.versions & 0xFFFFFFFF
        assert (np.diff(steps) >= 0).all()
        assert rig.error(rig.newest - 1, sample, steps == rig.newest - 1) < TOLERANCE
        gaps.append(rig.error(rig.newest, sample, steps == rig.newest))
    assert max(gaps) > 10 * TOLERANCE  # on the keys and values that they had


def test_what_has_no_token_at_a_swap_is_begun_under_the_new_version(rig: Rig) -> None:
    rig.generate(rig.request(n=1))  # its prompt is cached now
    rig.run(rig.engine._core.pause(forget=False))
    rig.engine.submit([rig.request(n=SLOTS)])
    rig.run(rig.engine._feed())
    rig.run(rig.update())
    payload = rig.finish_one()
    assert {version for sample in payload.samples for version in sample.versions.tolist()} == {rig.newest}
    rig.check_exact(payload.samples)


def test_prompts_are_shared_within_a_version(rig: Rig) -> None:
    rig.generate(rig.request(n=1, tokens=2))
    before = rig.engine.stats().prefill_tokens
    rig.generate(rig.request(n=2, tokens=2))
    assert rig.engine.stats().prefill_tokens - before < 2 * len(PROMPT) - 128


def test_a_kept_request_reports_what_the_cache_had_of_its_version(rig: Rig) -> None:
    async def load() -> RolloutLoad:
        rig.engine.submit([replace(rig.request(n=1, tokens=2), keep=True)])
        done = list[GeneratedGroup]()
        while not done:
            done += await rig.engine.advance(lambda: False)
        assert done[0].load is not None
        return done[0].load

    rig.generate(rig.request(n=1, tokens=2))
    rig.run(rig.update())
    first, second = rig.run(load()), rig.run(load())
    assert first.cached == 0 and 128 <= second.cached < len(PROMPT)
    assert 0 < second.prefill_seconds < 60 and 0 < first.prefill_seconds < 60


def test_updates_during_continuous_generation(rig: Rig) -> None:
    async def go() -> list[Sample]:
        done: list[Sample] = []
        sent = 0
        first = rig.newest
        tensors = [rig.next_weights(0.001), rig.next_weights(0.001)]
        for update in range(200):
            while sent - len(done) < 2 * SLOTS:
                rig.engine.submit([rig.request(n=1, tokens=20, prompt=PROMPT[:10])])
                sent += 1
            await rig.until_tokens(SLOTS, done)
            await rig.swap(tensors[update % 2], PolicyVersion(1, update), recompute=update % 3 == 0)
        while len(done) < sent:
            done += [payload.samples[0] for payload in await rig.finish(1)]
        assert first < rig.newest
        return done

    samples = rig.run(go(), 600.0)
    assert all(len(sample.tokens) == 20 and (np.diff(sample.versions) >= 0).all() for sample in samples)
    assert len({version for sample in samples for version in sample.versions.tolist()}) >= 150
    rig.run(rig.update())


def test_adapters_that_come_alone_are_added_to_the_folders_weights(rig: Rig, model_path: Path) -> None:
    """Twice, so that the second ones are not added to the first. The model's head is tied, and vLLM's layers are fused."""
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        generator, adapters = torch.Generator().manual_seed(seed), {}
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "o_proj.weight", "1.mlp.up_proj.weight")):
                down, up = (
                    torch.randn(size, generator=generator) * 0.1 for size in ((4, weight.shape[1]), (weight.shape[0], 4))
                )
                adapters.update({f"{name}.lora_A": down, f"{name}.lora_B": up})
                weight.data.add_(up @ down)
        rig.newest += 1
        rig.models = {rig.newest - 1: rig.models[rig.newest - 1], rig.newest: model}
        rig.run(rig.swap(adapters, PolicyVersion(0, rig.newest)))
        (samples,) = rig.generate(rig.request())
        rig.check_exact(samples)
        assert rig.error(rig.newest - 1, samples[0]) > 100 * TOLERANCE
    unfit = {name.replace("q_proj", "z_proj"): tensor for name, tensor in adapters.items()}
    with pytest.raises(InvalidMessage, match="adapters do not fit the model"):
        rig.run(rig.engine.stage(unfit))


def test_it_tells_how_full_its_memory_is_and_that_it_preempts_nobody(rig: Rig) -> None:
    """That of CPUs holds all slots' longest sequences. What a swap has computed anew is no preemption."""
    rig.begin(rig.request(n=SLOTS, tokens=100), tokens=30 * SLOTS)
    stats = rig.engine.stats()
    assert 0 < stats.kv_use <= 1 and not stats.kv_shared and stats.waiting == 0
    rig.run(rig.update(recompute=True))
    rig.run(rig.finish(1))
    stats = rig.engine.stats()
    assert (stats.kv_use, stats.preemptions) == (0, 0)


def test_an_aborted_group_is_forgotten_and_the_others_go_on(rig: Rig) -> None:
    gone, waiting, stays = rig.request(n=SLOTS - 1, tokens=100), rig.request(n=SLOTS), rig.request(n=2)
    rig.begin(gone, stays, waiting, tokens=60)
    assert rig.engine.abort([gone.group_id, waiting.group_id, 10**6]) == [gone.group_id, waiting.group_id]
    payloads = rig.run(rig.finish(1))
    assert [payload.group_id for payload in payloads] == [stays.group_id]
    assert not rig.engine.has_work
    assert rig.engine.stats().running == rig.engine.stats().waiting == 0


def test_an_abort_of_the_last_group_is_told_to_vllm(rig: Rig) -> None:
    rig.begin(rig.request(n=2, tokens=200), tokens=10)
    rig.engine.abort([rig._ids])
    assert rig.engine.has_work
    assert rig.run(rig.engine.advance(lambda: False)) == []
    assert not rig.engine.has_work


def test_held_begins_nothing_and_finishes_what_runs(rig: Rig) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=30), rig.request(n=2), tokens=SLOTS)
    rig.engine.held = True
    rig.run(rig.finish(1))
    assert not rig.engine.has_work
    assert rig.engine.stats().waiting == 2
    rig.engine.held = False
    rig.run(rig.finish(1))


def test_an_interruption_ends_advance_early(rig: Rig) -> None:
    rig.engine.submit([rig.request(n=1, tokens=200)])
    assert rig.run(rig.engine.advance(interrupted_after(3))) == []
    assert rig.engine.has_work
    rig.run(rig.finish(1))


def test_sampling_options(rig: Rig) -> None:
    version = rig.newest
    greedy, filtered, stopping, one = rig.generate(
        rig.request(n=2, temperature=0.0),
        rig.request(n=4, top_k=20, top_p=0.8, min_p=0.02),
        rig.request(n=4, tokens=200, stop_token_ids=tuple(range(0, 261, 5))),
        rig.request(n=3, tokens=1),
    )
    best = rig.distribution(version, PROMPT, greedy[0], 1.0).max(-1)
    assert greedy[0].tokens.tolist() == best.indices.tolist() == greedy[1].tokens.tolist()
    assert np.abs(greedy[0].logprobs - best.values.numpy()).max() < TOLERANCE
    for sample in filtered:
        left = filters(rig.distribution(version, PROMPT, sample, 0.7).double(), 20, 0.8, 0.02)
        expected = left.gather(1, torch.from_numpy(sample.tokens.astype(np.int64)).unsqueeze(1))[:, 0]
        assert np.abs(expected.numpy() - sample.logprobs).max() < TOLERANCE
    for sample in stopping:
        assert sample.finish_reason == "stop"
        assert [index for index, token in enumerate(sample.tokens) if token % 5 == 0] == [len(sample.tokens) - 1]
    assert [(len(sample.tokens), sample.finish_reason) for sample in one] == [(1, "length")] * 3


def filters(logp: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Row by row: min-p, top-k, top-p, each on what the one before left; then normalised."""
    out = torch.full_like(logp, -torch.inf)
    for row, left in zip(out, logp, strict=True):
        order = [index for index in left.argsort(descending=True).tolist() if left[index].exp() >= min_p * left.max().exp()]
        order = order[:top_k]
        total = float(left[order].exp().sum())
        kept, before = [], 0.0
        for index in order:
            if before < top_p * total:
                kept.append(index)
            before += float(left[index].exp())
        row[kept] = left[kept] - left[kept].logsumexp(0)
    return out


def test_seeds_decide_the_samples(rig: Rig) -> None:
    one, same, other = rig.generate(*(rig.request(n=3, seed=seed) for seed in (8, 8, 9)))
    assert [sample.tokens.tolist() for sample in one] == [sample.tokens.tolist() for sample in same]
    assert len({tuple(sample.tokens.tolist()) for sample in one + other}) == 6


def test_tokens_come_as_often_as_their_probability_says(rig: Rig) -> None:
    (samples,) = rig.generate(rig.request(n=1000, tokens=1, temperature=0.5))
    expected = rig.distribution(rig.newest, PROMPT, samples[0], 0.5)[0].exp().double().numpy()
    counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=len(expected))
    deviation = np.sqrt(expected * (1 - expected) * 1000)
    assert (np.abs(counts - 1000 * expected) < 5 * deviation + 3).all()


def test_weights_that_do_not_fit_change_nothing(rig: Rig) -> None:
    tensors = {name: tensor.clone() for name, tensor in rig.models[rig.newest].state_dict().items()}
    name = "model.norm.weight"
    for bad, fault in (
        ({key: value for key, value in tensors.items() if key != name}, f"missing .*{name}"),
        ({**tensors, "extra": tensors[name]}, "unknown .*extra"),
        ({**tensors, name: tensors[name][:5]}, f"{name} has shape"),
    ):
        with pytest.raises(InvalidMessage, match=fault):
            rig.run(rig.swap(bad, PolicyVersion(9, 9)))
    assert rig.engine.version != PolicyVersion(9, 9)
    rig.check_exact(rig.generate(rig.request(n=1))[0])


def test_a_worker_that_fails_quarantines_the_engine_until_a_whole_version_comes(rig: Rig) -> None:
    tensors = {name: tensor.clone() for name, tensor in rig.next_weights().items()}
    rig.begin(rig.request(n=4, tokens=60), tokens=40)
    broken = {**tensors, "model.layers.1.mlp.down_proj.weight": tensors["model.layers.1.mlp.down_proj.weight"].fill_(BREAKS)}
    before = rig.engine.version
    with pytest.raises(ServiceFault, match=r"rollout-0: swap: version 0\.\d+ was not loaded: .*injected fault at model"):
        rig.run(rig.swap(broken, PolicyVersion(0, rig.newest)))
    assert rig.engine.version == before
    assert not rig.engine.has_work
    rig.run(rig.update(recompute=True))
    payload = rig.finish_one()
    for sample in payload.samples:
        steps = sample.versions & 0xFFFFFFFF
        assert rig.error(rig.newest, sample, steps == rig.newest) < TOLERANCE


def test_a_worker_that_hangs_is_a_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor.clone() for name, tensor in rig.models[rig.newest].state_dict().items()}
    tensors["model.norm.weight"][0] = HANGS
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "_swap_timeout", 1.0)
        with pytest.raises(DeadlineExceeded, match=r"swap: version 9\.9 was not loaded: no answer from vLLM \(deadline 1 s\)"):
            rig.run(rig.swap(tensors, PolicyVersion(9, 9)))
    assert not rig.engine.has_work
    rig.run(rig.update())  # behind the late one
    rig.check_exact(rig.generate(rig.request(n=2))[0])


def test_a_dead_engine_is_a_named_error(rig: Rig) -> None:
    """Last, as it ends the module's engine."""
    import psutil

    rig.begin(rig.request(n=2, tokens=200), tokens=10)
    for child in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
            child.kill()
    with pytest.raises(ServiceFault, match="rollout-0: generate: vLLM's engine has died: "):
        rig.run(rig.finish(1), 60.0)
