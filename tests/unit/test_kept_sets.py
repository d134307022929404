"""What the sampler's filters left of the vocabulary is what the trainer computes with: the same log-probabilities, and the
gradient of the distribution that was sampled from.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from runtime import codec
from runtime.errors import InvalidMessage
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.trainer import rows as train_rows
from runtime.trainer.micro_batch import MicroBatch, micro_batches
from runtime.trainer.step import policy_trainer
from runtime.types import GeneratedGroup, GroupPayload, TrainGroup
from tests.closeness import LOGITS, STEP, assert_close, forward_terms
from tests.unit.rollout_cases import drain, request
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy, with_sets
from tests.unit.training_steps import run_step

pytestmark = pytest.mark.numeric

FILTERS: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.95, "top_k": 40}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))


def sampled(policy: str, **filters: Any) -> list[TrainGroup]:
    """Groups that the rollout engine samples by this policy."""
    engine = TorchRolloutEngine(policy, device=torch.device("cpu"), dtype=torch.float32, slots=5, max_model_len=64)
    requests = [request(index, n=4, prompt=(5, 9, index), limit=12, temperature=0.8, **filters) for index in range(3)]

    async def generate() -> list[GeneratedGroup]:
        engine.submit(requests)
        done = [group async for group in drain(engine)]
        await engine.close()
        return done

    rng = np.random.default_rng(1)
    return [
        TrainGroup(
            group_id=group.group_id,
            tokens=60,
            payload=group.payload,
            rewards=rng.normal(size=4).astype(np.float32),
            valid=np.ones(4, np.uint8),
        )
        for group in asyncio.run(generate())
    ]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_trainer_has_the_sampler_s_log_probabilities(
    policy: str, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]
) -> None:
    """And would not have them without the sets. In several chunks of tokens."""
    monkeypatch.setattr("runtime.trainer.head.CPU_CHUNK_ELEMENTS", 7 * VOCAB)
    config = make_config(policy, sampling={"temperature": 0.8})
    gaps = [
        run_step(policy_trainer(config), sampled(policy, **filters, keep_sets=keep)).metrics["mismatch/max"]
        for keep in (True, False)
    ]
    assert_close(gaps[0], 0.0, terms=forward_terms(20), scale=LOGITS / 0.8)
    assert gaps[1] > 0.05


def test_gradients_are_those_of_the_truncated_distribution(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of log-probabilities and entropies, against a model in float64 whose softmax is over the listed tokens alone."""
    monkeypatch.setattr("runtime.trainer.head.CPU_CHUNK_ELEMENTS", 5 * VOCAB)
    rng = np.random.default_rng(4)
    groups = [with_sets(group, rng) for group in make_groups(2)]
    engine = policy_trainer(make_config(policy))
    backend = engine.backend
    rows = train_rows.join([train_rows.decode_groups([group], VOCAB, engine.objective.needs) for group in groups])
    weight = {"weight": rng.normal(size=len(rows.tokens)).astype(np.float32)}

    def loss(batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        logp, entropy = backend.token_logprobs(outputs, batch, 0.7, entropy_gradient=True)
        weights = batch.columns["weight"].flatten()[batch.cells]
        return (weights * (logp + 0.3 * entropy)).sum()

    total = sum(backend.run(micro_batches(rows, rows.trained(), weight, 90, backend.rank_info), loss, backward=True))

    model = AutoModelForCausalLM.from_pretrained(policy).double()
    expected = torch.zeros((), dtype=torch.float64)
    place = 0
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        for index, sample in enumerate(payload.samples):
            assert sample.kept is not None
            bits = np.unpackbits(sample.kept.bitmaps(np.arange(len(sample.tokens))), axis=1, bitorder="little")[:, :VOCAB]
            ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
            logits = model(ids[None]).logits[0, len(payload.prompt) - 1 : -1] / 0.7
            for at in np.flatnonzero(sample.loss_mask * group.valid[index]):
                listed = np.flatnonzero(bits[at])
                p = torch.softmax(logits[at, listed], 0)
                own = p[int(np.searchsorted(listed, sample.tokens[at]))].log()
                expected = expected + float(weight["weight"][place + at]) * (own - 0.3 * (p * p.log()).sum())
            place += len(sample.tokens)
    expected.backward()
    assert_close(float(total), expected.item(), terms=forward_terms(20) * len(rows.tokens), scale=LOGITS)
    for found, parameter in zip(backend.gradients(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert_close(found, parameter.grad, terms=STEP)


def test_a_token_that_its_set_has_not_is_refused(policy: str) -> None:
    group = with_sets(make_groups(2)[0], np.random.default_rng(4))
    payload = codec.decode(GroupPayload, group.payload)
    assert payload.kept is not None
    some = int(np.flatnonzero((payload.kept.sizes > 0) & (payload.kept.sizes < VOCAB))[0])
    place = np.flatnonzero(payload.loss_mask.expand())[some]
    bits = np.unpackbits(payload.kept.bitmaps(np.array([some]))[0], bitorder="little")[:VOCAB]
    tokens = payload.tokens.copy()
    tokens[place] = np.flatnonzero(bits == 0)[0]
    with pytest.raises(InvalidMessage, match=rf"group 0: token {some} is not in its kept set"):
        run_step(policy_trainer(make_config(policy)), [replace(group, payload=codec.encode(replace(payload, tokens=tokens)))])


def test_parts_of_a_payload_keep_their_sets() -> None:
    """Samples as they come out of a payload make the same payload again: masked tokens have the whole vocabulary."""
    payload = codec.decode(GroupPayload, with_sets(make_groups(2)[0], np.random.default_rng(4)).payload)
    again = GroupPayload.of(payload.group_id, payload.prompt, payload.samples)
    assert codec.encode(again) == codec.encode(payload)


def test_the_folder_of_a_policy_is_used_as_it_is(policy: str, tmp_path: Path) -> None:
    """The model that gives what its head takes is exported with its head's weights."""
    policy_trainer(make_config(policy)).backend.export(tmp_path)
    ids = torch.arange(10)[None]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (policy, tmp_path)]
    assert torch.equal(*(model(ids).logits for model in models))
