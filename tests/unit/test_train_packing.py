"""Packing changes nothing: a step on packed sequences is one on padded rows, and no sequence sees another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import codec
from runtime.config import Algorithm
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import GroupPayload, Logprobs, Sample, TrainGroup
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import VOCAB, make_config, make_groups
from tests.unit.training_steps import LOSS_TERMS, assert_metrics, comparable, run_step, weights

pytestmark = pytest.mark.numeric

# Adam's first step is lr · g / (|g| + eps): with a large eps it is plain gradient descent at a rate of lr / eps.
RATE = 100.0
DESCENT = {"learning_rate": RATE * 1e6, "eps": 1e6, "weight_decay": 0.0, "max_grad_norm": 0.0}
SIZES = (5, 3, 6, 4)
LONGEST = 40  # against prompts of at most 6 tokens: several attention buckets


def make_engine(policy: str, algorithm: dict[str, Any], budget: int = 8192) -> ModelTrainer:
    return policy_trainer(
        make_config(policy, algorithm=algorithm, optimizer=DESCENT, training={"max_tokens_per_microbatch": budget})
    )


def step_and_gradient(engine: ModelTrainer, *calls: list[TrainGroup]) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of one step, and the gradient [parameters] that its weights moved by."""
    before = weights(engine)
    metrics = comparable(run_step(engine, *calls))
    after = weights(engine)
    return metrics, torch.cat([(before[name].double() - after[name].double()).flatten() for name in before]) / RATE


# ---------------------------------------------------------------------------------------------- against padded rows


@dataclass(frozen=True)
class Padded:
    """All samples as rows of one right-padded batch, T tokens wide: `ids` and `attended` [B, T], the others [B, T - 1]."""

    ids: torch.Tensor
    attended: torch.Tensor
    trained: torch.Tensor  # bool, where the next token is trained
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor


def pad(groups: list[TrainGroup]) -> Padded:
    rows = []
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        ends = np.cumsum([len(sample.tokens) for sample in payload.samples])
        references = np.split(codec.decode(Logprobs, group.reference).values, ends[:-1])
        rewards = group.rewards.astype(np.float64)
        kept = rewards[group.valid == 1]
        for sample, reference, reward, valid in zip(payload.samples, references, rewards, group.valid, strict=True):
            advantage = (reward - kept.mean()) / (kept.std(ddof=1) + 1e-6)
            rows.append((payload.prompt, sample, reference, advantage, bool(valid)))
    width = max(len(prompt) + len(sample.tokens) for prompt, sample, *_ in rows)
    ids, attended = torch.zeros(2, len(rows), width, dtype=torch.int64)
    trained = torch.zeros(len(rows), width - 1, dtype=torch.bool)
    behaviours, references, advantages = torch.zeros(3, len(rows), width - 1, dtype=torch.float64)
    for row, (prompt, sample, reference, advantage, valid) in enumerate(rows):
        end = len(prompt) + len(sample.tokens)
        ids[row, :end] = torch.from_numpy(np.concatenate([prompt, sample.tokens]))
        attended[row, :end] = 1
        reply = slice(len(prompt) - 1, end - 1)
        trained[row, reply] = torch.from_numpy((sample.loss_mask == 1) & valid)
        behaviours[row, reply] = torch.tensor(sample.logprobs)
        references[row, reply] = torch.tensor(reference)
        advantages[row] = advantage
    return Padded(ids, attended, trained, behaviours, references, advantages)


def padded_step(policy: str, groups: list[TrainGroup], algorithm: Algorithm) -> tuple[dict[str, float], torch.Tensor]:
    """One forward and backward pass of the stock model over all rows, in float64: what is reported, and the gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager").double()
    rows = pad(groups)
    logp_all = torch.log_softmax(model(input_ids=rows.ids, attention_mask=rows.attended).logits[:, :-1], -1)
    logp = logp_all.gather(2, rows.ids[:, 1:, None]).squeeze(2)
    old = logp.detach() if algorithm.loss == "decoupled" else rows.behaviour
    ratio = torch.exp(logp - old)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    policy_loss = -torch.minimum(ratio * rows.advantages, ratio.clamp(low, high) * rows.advantages)
    if algorithm.loss == "decoupled":
        policy_loss = torch.exp(logp.detach() - rows.behaviour).clamp(max=algorithm.behaviour_weight_cap) * policy_loss
    behind = rows.reference - logp
    divergence = (torch.exp(behind) - 1 - behind).clamp(max=10)
    entropy = -(logp_all.exp() * logp_all).sum(-1)

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        if algorithm.aggregation == "token_mean":
            return values[rows.trained].mean()
        return torch.stack([own[kept].mean() for own, kept in zip(values, rows.trained, strict=True) if kept.any()]).mean()

    parts = {"actor/pg_loss": policy_loss, "actor/entropy": entropy}
    if algorithm.kl_coefficient:
        parts["actor/kl_loss"] = divergence
    means = {name: aggregate(values) for name, values in parts.items()}
    loss = means["actor/pg_loss"] - algorithm.entropy_coefficient * means["actor/entropy"]
    if algorithm.kl_coefficient:
        loss = loss + algorithm.kl_coefficient * means["actor/kl_loss"]
    gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
    return {**{name: mean.item() for name, mean in means.items()}, "actor/grad_norm": gradient.norm().item()}, gradient


@pytest.mark.parametrize("terms", [{}, LOSS_TERMS], ids=["plain", "kl and entropy"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("loss", ["decoupled", "ppo"])
def test_a_packed_step_is_a_padded_one(policy: str, loss: str, aggregation: str, terms: dict[str, float]):
    algorithm = {"loss": loss, "aggregation": aggregation, **terms}
    groups = make_groups(20, SIZES, longest=LONGEST)
    expected, wanted = padded_step(policy, groups, Algorithm(**algorithm))
    metrics, gradient = step_and_gradient(make_engine(policy, algorithm, budget=300), groups)
    assert_metrics({name: metrics[name] for name in expected}, expected)
    assert_close(gradient, wanted, terms=STEP)


# ---------------------------------------------------------------------------------------------- no sequence sees another


def mute(group: TrainGroup, samples: range) -> None:
    """Behaviour log-probabilities so far from any policy's that PPO's clip decides every token of `samples`: whatever their
    tokens, the losses are constants and the gradients 0, and yet the samples run packed with the others."""
    payload = codec.decode(GroupPayload, group.payload)
    mean = group.rewards[group.valid == 1].mean()
    replies = payload.samples
    for index in samples:
        far = -40.0 if group.rewards[index] > mean else 40.0
        replies[index] = msgspec.structs.replace(replies[index], logprobs=np.float32(far) * replies[index].loss_mask)
    group.payload = codec.encode(GroupPayload.of(payload.group_id, payload.prompt, replies))


def alter(group: TrainGroup, samples: range, *, prompt: bool) -> None:
    """Other tokens in the replies of `samples`, and in the prompt."""
    payload = codec.decode(GroupPayload, group.payload)
    changed = (payload.prompt + 7) % VOCAB if prompt else payload.prompt
    replies = payload.samples
    for index in samples:
        replies[index] = msgspec.structs.replace(replies[index], tokens=(replies[index].tokens + 7) % VOCAB)
    group.payload = codec.encode(GroupPayload.of(payload.group_id, changed, replies))


@pytest.mark.parametrize(("samples", "prompt"), [(range(2, 3), False), (range(SIZES[0]), True)], ids=["reply", "group"])
def test_other_tokens_in_one_sequence_reach_no_other(policy: str, samples: range, prompt: bool):
    """Bit for bit: the gradient of the others, those with the same prompt included. The altered group comes first because the
    padding of attention rows points to the first packed token."""
    results = []
    for altered in (False, True):
        groups = make_groups(21, SIZES, longest=LONGEST)
        mute(groups[0], samples)
        if altered:
            alter(groups[0], samples, prompt=prompt)
        results.append(step_and_gradient(make_engine(policy, {"loss": "ppo"}), groups))
    (before, gradient), (after, other_gradient) = results
    assert before["actor/entropy"] != after["actor/entropy"]  # the altered sequences themselves did change
    assert before["actor/grad_norm"] > 0
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert before[name] == after[name], name
    assert torch.equal(gradient, other_gradient)


# ---------------------------------------------------------------------------------------------- any way of cutting a step


def reordered(group: TrainGroup, order: list[int]) -> TrainGroup:
    """`group` with its samples in another order."""
    payload = codec.decode(GroupPayload, group.payload)
    ends = np.cumsum([len(sample.tokens) for sample in payload.samples])
    references = np.split(codec.decode(Logprobs, group.reference).values, ends[:-1])
    samples = payload.samples
    values = np.concatenate([references[i] for i in order])
    return msgspec.structs.replace(
        group,
        payload=codec.encode(GroupPayload.of(payload.group_id, payload.prompt, [samples[i] for i in order])),
        rewards=group.rewards[order],
        valid=group.valid[order],
        reference=codec.encode(Logprobs(group_id=group.group_id, values=values)),
    )


CUT_ALGORITHMS = {
    "decoupled": {"loss": "decoupled", **LOSS_TERMS},
    "ppo": {"loss": "ppo", "aggregation": "seq_mean_token_mean", **LOSS_TERMS},
    "whole batch": {"loss": "ppo", "advantage": "reinforce_plus_plus_baseline", "entropy_coefficient": 0.01},
}


@pytest.fixture(scope="module", params=CUT_ALGORITHMS.values(), ids=list(CUT_ALGORITHMS))
def uncut(request: pytest.FixtureRequest, policy: str) -> tuple[dict[str, Any], dict[str, float], torch.Tensor]:
    """An algorithm, and a step of it in one call and one micro-batch."""
    groups = make_groups(23, SIZES, longest=LONGEST)
    return request.param, *step_and_gradient(make_engine(policy, request.param, budget=1 << 20), groups)


@settings(max_examples=8)
@given(data=st.data())
def test_cuts_and_orders_change_nothing(
    policy: str, uncut: tuple[dict[str, Any], dict[str, float], torch.Tensor], data: st.DataObject
):
    algorithm, expected, wanted = uncut
    groups = [
        reordered(group, data.draw(st.permutations(range(size)), label=f"samples of {group.group_id}"))
        for group, size in zip(make_groups(23, SIZES, longest=LONGEST), SIZES, strict=True)
    ]
    groups = data.draw(st.permutations(groups).map(list), label="groups")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(groups)), max_size=4), label="cuts"))
    calls = [groups[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
    budget = data.draw(st.sampled_from([1, 60, 150, 400, 1 << 20]), label="budget")
    metrics, gradient = step_and_gradient(make_engine(policy, algorithm, budget), *calls)
    assert_metrics(metrics, expected)
    assert_close(gradient, wanted, terms=STEP)


def test_padding_waste_is_what_attention_rows_hold_beyond_their_tokens(policy: str):
    """Rows of prompt and reply less its last token, in buckets whose longest is at most 1.5 times the shortest."""
    (group,) = make_groups(0, (4,))
    prompt, lengths = 4, (5, 9, 7, 21)  # rows of 8, 10 and 12 tokens side by side, and one of 24
    samples = [
        Sample(
            tokens=np.arange(length, dtype=np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=np.full(length, -4.0, np.float32),
            versions=np.zeros(length, np.int64),
            finish_reason="stop",
        )
        for length in lengths
    ]
    payload = GroupPayload.of(group.group_id, np.arange(prompt, dtype=np.int32), samples)
    group = msgspec.structs.replace(group, payload=codec.encode(payload), valid=np.ones(4, np.uint8))
    metrics = run_step(make_engine(policy, {}), [group]).metrics
    assert metrics["padding_waste"] == pytest.approx((4 + 2) / (3 * 12 + 24))
