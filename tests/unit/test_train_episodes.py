"""Episodes in the training engine: one forward pass a branch in float64 says what their losses and gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime import codec
from runtime.columns import Runs
from runtime.config import Critic
from runtime.trainer.step import critic_trainer, policy_trainer
from runtime.types import GroupPayload, Logprobs, Sample, TrainGroup, Values
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import make_config, make_episodes, make_groups, make_policy
from tests.unit.training_steps import assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric

SMOOTH = {"eps": 1e-2, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))


def plain_step(
    path: str, groups: list[TrainGroup], weigh: Callable[[list[list[int]]], tuple[list[list[float]], float]]
) -> tuple[float, float]:
    """Loss and gradient norm of -A log p / p_old, A by group_norm over episodes. `weigh`: from the numbers of trained tokens of
    each row of each episode that is valid, what a token of each row counts, and what all is divided by."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    terms, counts = [], []
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        kept = group.rewards.astype(np.float64)[group.valid == 1]
        samples = iter(payload.samples)
        for episode, branches in enumerate(payload.rows):
            rows = [next(samples) for _ in range(branches)]
            if not group.valid[episode]:
                continue
            advantage = (group.rewards[episode] - kept.mean()) / (kept.std(ddof=1) + 1e-6)
            terms.append([])
            counts.append([int(row.loss_mask.sum()) for row in rows])
            for row in rows:
                ids = torch.from_numpy(np.concatenate([payload.prompt, row.tokens]).astype(np.int64))
                where = np.flatnonzero(row.loss_mask) + len(payload.prompt)
                logits = model(ids[None]).logits[0, where - 1]
                logp = torch.log_softmax(logits, -1).gather(1, ids[where, None])[:, 0]
                ratio = (logp - torch.from_numpy(row.logprobs[row.loss_mask == 1].astype(np.float64))).exp()
                clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
                terms[-1].append(torch.maximum(-ratio * advantage, -clipped * advantage).sum())
    weighed, divisor = weigh(counts)
    loss = sum(
        weight * term for many, some in zip(terms, weighed, strict=True) for term, weight in zip(many, some, strict=True)
    )
    loss = loss / divisor
    loss.backward()
    return loss.item(), math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))


def by_episode(counts: list[list[int]]) -> tuple[list[list[float]], float]:
    return [[1 / max(sum(rows), 1)] * len(rows) for rows in counts], sum(sum(rows) > 0 for rows in counts)


def by_row(counts: list[list[int]]) -> tuple[list[list[float]], float]:
    return [[1 / max(row, 1) for row in rows] for rows in counts], sum(row > 0 for rows in counts for row in rows)


def by_token(counts: list[list[int]]) -> tuple[list[list[float]], float]:
    return [[1.0] * len(rows) for rows in counts], sum(map(sum, counts))


def dr_grpo(counts: list[list[int]]) -> tuple[list[list[float]], float]:
    """Every episode counts, also the one that is not valid, and the one that has nothing to train on."""
    return [[1.0] * len(rows) for rows in counts], 7 * (len(counts) + 1)


@pytest.mark.parametrize("budget", [8192, 1])
@pytest.mark.parametrize(
    ("aggregation", "weigh"),
    [
        ("episode_mean_token_mean", by_episode),
        ("seq_mean_token_mean", by_row),
        ("token_mean", by_token),
        ("dr_grpo", dr_grpo),
    ],
)
def test_a_step_is_that_of_a_plain_loop_over_branches(policy: str, aggregation: str, weigh: Any, budget: int):
    groups = make_episodes(0)
    loss, norm = plain_step(policy, groups, weigh)
    algorithm = {"loss": "ppo", "aggregation": aggregation, "aggregation_norm": 7}
    config = make_config(policy, algorithm=algorithm, training={"max_tokens_per_microbatch": budget})
    got = run_step(policy_trainer(config), groups).metrics
    found = {name: got[name] for name in ("actor/pg_loss", "actor/grad_norm")}
    assert_metrics(found, {"actor/pg_loss": loss, "actor/grad_norm": norm})


def branched(groups: list[TrainGroup]) -> list[TrainGroup]:
    """The same replies, each trained in three branches: of the first all but two thirds of the tokens, and so on."""
    found = []
    for group in groups:
        payload = codec.decode(GroupPayload, group.payload)
        rows = [_third(sample, part) for sample in payload.samples for part in range(3)]
        whole = GroupPayload.of(payload.group_id, payload.prompt, rows, [3] * payload.n)
        found.append(structs.replace(group, payload=codec.encode(whole)))
    return found


def _third(sample: Sample, part: int) -> Sample:
    mask = sample.loss_mask * (np.arange(len(sample.tokens)) % 3 == part).astype(np.uint8)
    return structs.replace(sample, loss_mask=mask, logprobs=sample.logprobs * mask)


@pytest.mark.parametrize("aggregation", ["episode_mean_token_mean", "dr_grpo", "token_mean"])
@pytest.mark.parametrize("advantage", ["group_norm", "rloo", "reinforce_plus_plus_baseline"])
def test_more_branches_do_not_weigh_more(policy: str, aggregation: str, advantage: str):
    """The tokens of a reply, in one row or shared out over three: the same gradient, whoever has more branches."""
    algorithm = {"loss": "ppo", "aggregation": aggregation, "advantage": advantage}
    results = []
    for groups in (make_groups(2), [*branched(make_groups(2)[:1]), *make_groups(2)[1:]]):
        engine = policy_trainer(make_config(policy, algorithm=algorithm, optimizer=SMOOTH))
        metrics = run_step(engine, groups).metrics
        results.append(
            ({name: metrics[name] for name in ("actor/pg_loss", "actor/grad_norm", "score/mean", "samples")}, weights(engine))
        )
    assert_metrics(results[1][0], results[0][0])
    assert_updated(results[1][1], results[0][1], engine._config.training.optimizer, norm=results[0][0]["actor/grad_norm"])


def test_where_each_episode_has_one_row_its_mean_is_that_of_sequences(policy: str):
    """Bit for bit."""
    engines = []
    for aggregation in ("episode_mean_token_mean", "seq_mean_token_mean"):
        engines.append(policy_trainer(make_config(policy, algorithm={"aggregation": aggregation})))
        run_step(engines[-1], make_groups(3))
    assert_same(weights(engines[0]), weights(engines[1]))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"aggregation": "episode_mean_token_mean", "turn_discount": 0.9, "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        {
            "aggregation": "dr_grpo",
            "advantage": "reinforce_plus_plus_baseline",
            "kl_placement": "reward",
            "kl_coefficient": 0.1,
        },
        {"advantage": "group_norm", "group_std": "batch", "aggregation": "seq_mean_token_mean", "loss": "gspo"},
        {"advantage": "reinforce_plus_plus", "gamma": 0.9, "loss": "ppo", "correction": "sequence_tis"},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()),
)
def test_the_split_over_calls_and_micro_batches_changes_nothing(policy: str, algorithm: dict[str, Any]):
    groups, results = make_episodes(4, turns=True), []
    for budget, cuts in ((8192, [groups]), (1, [groups[2:], [], groups[:2]])):
        config = make_config(policy, algorithm=algorithm, optimizer=SMOOTH, training={"max_tokens_per_microbatch": budget})
        engine = policy_trainer(config)
        results.append((comparable(run_step(engine, *cuts)), weights(engine)))
    assert_metrics(results[1][0], results[0][0])
    norm = results[0][0]["actor/grad_norm"]
    assert norm > 0
    assert_updated(results[1][1], results[0][1], engine._config.training.optimizer, norm=norm)


def test_what_environments_wrote_has_no_say(policy: str):
    """Reference, values, log-probabilities and versions at tokens that are not trained are whatever they are."""
    groups = make_episodes(5, turns=True)
    others = [_spoiled(group) for group in groups]
    algorithm = {"kl_coefficient": 0.1, "loss": "decoupled", "correction": "none", "aggregation": "episode_mean_token_mean"}
    engines = [policy_trainer(make_config(policy, algorithm=algorithm)) for _ in range(2)]
    metrics = [run_step(engine, each).metrics for engine, each in zip(engines, (groups, others), strict=True)]
    assert metrics[0] == metrics[1]
    assert_same(weights(engines[0]), weights(engines[1]))


def _spoiled(group: TrainGroup) -> TrainGroup:
    payload, reference = codec.decode(GroupPayload, group.payload), codec.decode(Logprobs, group.reference)
    given = payload.loss_mask.expand() == 0
    versions = np.where(given, payload.versions.expand() + 7, payload.versions.expand())
    values = np.where(given, np.float32(-30), reference.values)
    changed = structs.replace(payload, versions=Runs.of(versions))
    return structs.replace(
        group, payload=codec.encode(changed), reference=codec.encode(structs.replace(reference, values=values))
    )


def test_the_critic_learns_along_each_branch_as_if_gaps_were_not_there(policy: str):
    """Returns of GAE by its recursion over a row's trained tokens, the episode's reward at the last and turns' at their own."""
    groups, gamma, lam, returns = make_episodes(8, turns=True), 0.9, 0.7, []
    for group in groups:
        payload, values = (
            codec.decode(GroupPayload, group.payload),
            codec.decode(Values, group.values).values.astype(np.float64),
        )
        owner, begin = np.repeat(np.arange(payload.n), payload.rows), 0
        for row, sample in enumerate(payload.samples):
            own, begin = values[begin : begin + len(sample.tokens)], begin + len(sample.tokens)
            if not group.valid[owner[row]]:
                continue
            earned = {turn.token: turn.value for turn in payload.turn_rewards if turn.row == row}
            following, advantage = 0.0, 0.0
            for nth, token in enumerate(np.flatnonzero(sample.loss_mask)[::-1].tolist()):
                reward = earned.get(token, 0.0) + (float(group.rewards[owner[row]]) if nth == 0 else 0.0)
                advantage = reward + gamma * following - own[token] + gamma * lam * advantage
                following = own[token]
                returns.append(advantage + own[token])
    algorithm = {"advantage": "gae", "gamma": gamma, "gae_lambda": lam}
    engine = critic_trainer(structs.replace(make_config(policy, algorithm=algorithm), critic=Critic()))
    got = run_step(engine, groups).metrics
    for name, expected in (("mean", np.mean(returns)), ("max", max(returns)), ("min", min(returns))):
        assert_close(got[f"critic/returns/{name}"], expected, terms=len(returns), scale=max(map(abs, returns)), what=name)


def test_metrics_are_of_episodes(policy: str):
    groups = make_episodes(6)
    got = run_step(policy_trainer(make_config(policy)), groups).metrics
    payloads = [codec.decode(GroupPayload, group.payload) for group in groups]
    rows, turns, given, episodes = 0, 0, 0, 0
    for group, payload in zip(groups, payloads, strict=True):
        samples = iter(payload.samples)
        for valid, branches in zip(group.valid, payload.rows, strict=True):
            own = [next(samples) for _ in range(branches)]
            if valid:
                episodes, rows = episodes + 1, rows + len(own)
                turns += sum("".join(map(str, row.loss_mask)).replace("0", " ").split().__len__() for row in own)
                given += sum(int((row.loss_mask == 0).sum()) for row in own)
    assert got["episode/rows"] == pytest.approx(rows / episodes)
    assert got["episode/turns"] == pytest.approx(turns / episodes)
    assert got["episode/environment_tokens"] == pytest.approx(given / episodes)
    assert got["samples"] == sum(payload.n for payload in payloads)
    scores = np.concatenate([group.rewards[group.valid == 1] for group in groups])
    assert got["score/mean"] == pytest.approx(scores.mean(dtype=np.float64))
    assert got["response_length/mean"] == pytest.approx(np.mean(np.concatenate([payload.lengths for payload in payloads])))


def test_replies_have_no_metrics_of_episodes(policy: str):
    groups = [
        group for group in make_groups(1, longest=4) if group.group_id != 1
    ]  # without gaps, and without what is not trained
    assert not [name for name in run_step(policy_trainer(make_config(policy)), groups).metrics if name.startswith("episode/")]


def test_the_kl_coefficient_adapts_by_episodes(policy: str):
    """β ← β (1 + clip(kl / target - 1, ±0.2) · n / horizon), n the episodes of the step."""
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1e-6, "kl_horizon": 100}
    engine, groups = policy_trainer(make_config(policy, algorithm=algorithm)), make_episodes(1)
    run_step(engine, groups)
    episodes = sum(codec.decode(GroupPayload, group.payload).n for group in groups)
    assert_close(engine.objective.kl_control.coefficient, 0.1 * (1 + 0.2 * episodes / 100), terms=STEP)
