"""Several optimizer updates a step, the proximal policy, and the critic, against loops that are written out."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from runtime import config, run_files, types
from runtime.config import Config
from runtime.errors import InvalidMessage, ServiceFault, UserError
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.telemetry import summary
from runtime.telemetry.summary import TrainedTokenLog, TrainedTokens
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import BINS_PER_OCTAVE, Reduced, StepStatistics, micro_batches
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import GeneratedGroup, GroupPayload, StepResult, TrainGroup, ValueRequest
from tests.closeness import LOGITS, STEP, assert_close, forward_terms
from tests.unit import training_oracle as oracle
from tests.unit.rollout_cases import drain, request
from tests.unit.training_cases import VOCAB, make_config, make_groups, with_sets
from tests.unit.training_steps import assert_metrics, assert_updated, comparable, run_step, weights

pytestmark = pytest.mark.numeric

GROUPS = 4
SMOOTH = {"eps": 1e-2, "learning_rate": 3e-3, "max_grad_norm": 0.5}
PPO = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8}
SEVERAL = [{"epochs": 2}, {"mini_batch_size": 2}, {"epochs": 2, "mini_batch_size": 1}]


def settings(path: str, *, algorithm: dict[str, Any] | None = None, critic: str | None = None, **training: Any) -> Config:
    training = {"groups_per_step": GROUPS, **training}
    made = make_config(path, algorithm=algorithm or {}, optimizer=SMOOTH, training=training)
    if critic is not None:
        made = replace(made, critic=config.Critic(path=critic, value_clip=0.1, learning_rate=5e-3))
    return made


def batch(seed: int, made: Config, step: int = 0) -> list[TrainGroup]:
    """A step's groups in mini-batches."""
    groups = make_groups(seed, (4, 3, 5, 2), step=step)
    size = made.training.mini_batch_size or GROUPS
    for place, group in enumerate(groups):
        group.mini_batch = place // size
    return groups


def state(engine: ModelTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().double() for name, parameter in engine.backend.parameters.items()}


def assert_equals(engine: ModelTrainer, model: torch.nn.Module, optimizer: Any, updates: int) -> None:
    expected = {name: parameter.detach() for name, parameter in model.named_parameters() if name in engine.backend.parameters}
    assert_updated(state(engine), expected, optimizer, steps=updates)


@pytest.fixture(scope="module")
def reward_model(policy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model's folder, its head not 0."""
    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def plain_policy(path: str, made: Config) -> oracle.PolicyLoop:
    return oracle.PolicyLoop(AutoModelForCausalLM.from_pretrained(path), made, made.training.optimizer)


class TestSeveralUpdates:
    @pytest.mark.parametrize(
        ("training", "proximal"), [({}, "interpolated"), (SEVERAL[0], "recomputed"), (SEVERAL[2], "interpolated")], ids=str
    )
    def test_steps_are_those_of_a_plain_loop(self, policy: str, training: dict[str, int], proximal: str):
        """With samples that are up to two versions old, from the third step on."""
        made = settings(policy, algorithm={"proximal": proximal, "clip_low": 0.02, "clip_high": 0.03}, **training)
        engine = policy_trainer(made)
        plain = plain_policy(policy, made)
        updates = 0
        for step in range(3):
            groups = batch(step, made, step=max(0, step - 1))
            plain.norms.clear()
            result = run_step(engine, groups[:1], groups[1:])
            plain.step(groups, step, oracle.group_norm(groups))
            updates += len(plain.norms)
            assert_close(result.metrics["actor/grad_norm"], np.mean(plain.norms), terms=updates * STEP)
        assert_equals(engine, plain.model, made.training.optimizer, updates)
        assert engine.step == 3

    @pytest.mark.parametrize(("training", "most"), [({}, 1 << 20), ({}, 7), (SEVERAL[0], 0), (SEVERAL[2], 1 << 20)], ids=str)
    def test_what_is_kept_of_tokens_are_the_numbers_of_a_plain_loop(
        self, policy: str, tmp_path: Path, training: dict[str, int], most: int, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("runtime.trainer.step.KEPT_TOKENS", most)
        made = settings(policy, **training)
        made = replace(made, run=replace(made.run, dir=str(tmp_path)))
        engine = policy_trainer(made)
        plain = plain_policy(policy, made)
        groups = batch(0, made)
        run_step(engine, groups[:1], groups[1:])
        trained = oracle.tokens_of(groups, 0)
        kept = list(summary.read(tmp_path, 0))
        assert sum(len(each.group) for each in kept) == min(most, len(trained))
        logprobs, advantages = plain.logprobs(groups), oracle.group_norm(groups)
        for each in kept:
            places = [((int(g), int(i)), int(t)) for g, i, t in zip(each.group, each.row, each.position, strict=True)]
            assert len(set(places)) == len(places)
            expected = [float(logprobs[sample][t].detach()) for sample, t in places]
            assert_close(each.logprob, expected, terms=forward_terms(20))
            assert_close(each.advantage, [advantages[place] for place in places], terms=STEP)

    @pytest.mark.parametrize(("training", "advantage"), [({}, "group_norm"), (SEVERAL[1], "none")], ids=str)
    def test_distillation_is_that_of_a_plain_loop(self, policy: str, training: dict[str, int], advantage: str):
        """A token's advantage is its sample's by the rewards, or 0, less β · (log π − log teacher), as it was sampled."""
        chosen = {"advantage": advantage, "kl": "k1", "kl_placement": "advantage", "kl_coefficient": 0.7}
        made = settings(policy, algorithm=chosen, **training)
        engine = policy_trainer(made)
        plain = plain_policy(policy, made)
        groups = batch(3, made)
        gaps, advantages = oracle.divergences(groups), oracle.group_norm(groups)
        rewarded = {key: value * (advantage != "none") for key, value in advantages.items()}
        result = run_step(engine, groups[:1], groups[1:])
        plain.step(groups, 0, {key: rewarded[key] - 0.7 * gaps[key] for key in rewarded})
        assert_close(result.metrics["actor/grad_norm"], np.mean(plain.norms), terms=len(plain.norms) * STEP)
        assert result.metrics["actor/kl"] == pytest.approx(np.mean([gaps[key] for key in rewarded]))
        assert "actor/kl_loss" not in result.metrics
        assert_equals(engine, plain.model, made.training.optimizer, len(plain.norms))

    def test_seconds_of_its_parts_are_those_of_this_step(self, policy: str):
        several, single = (policy_trainer(settings(policy, **training)) for training in (SEVERAL[0], {}))
        parts = {"timing/adv", "timing/non_overlap_adv"}
        for step in range(2):
            for engine, expected in ((several, parts | {"timing/old_log_p"}), (single, parts)):
                result = run_step(engine, batch(step, engine._config))
                assert engine.phases.keys() == expected
                assert engine.phases["timing/adv"] == engine.phases["timing/non_overlap_adv"]
                assert 0 < sum(engine.phases.values()) - engine.phases["timing/adv"] < result.seconds
        engine.begin_step(2)
        assert engine.phases == {}

    def test_clipping_is_at_work_from_the_second_update_on(self, policy: str):
        narrow = {"clip_low": 1e-4, "clip_high": 1e-4}
        metrics = [
            run_step(policy_trainer(made), batch(0, made)).metrics
            for made in (settings(policy, algorithm=narrow, epochs=epochs) for epochs in (1, 2))
        ]
        assert metrics[0]["actor/pg_clipfrac"] == 0
        assert metrics[1]["actor/pg_clipfrac"] > 0.2

    def test_micro_batches_change_nothing(self, policy: str):
        results = []
        for budget in (1, 8192):
            made = settings(policy, epochs=2, mini_batch_size=2, max_tokens_per_microbatch=budget)
            engine = policy_trainer(made)
            results.append((comparable(run_step(engine, batch(1, made))), weights(engine)))
        assert_metrics(results[0][0], results[1][0], steps=4)
        assert_updated(results[0][1], results[1][1], made.training.optimizer, steps=4)


class TestPpo:
    @pytest.mark.parametrize("training", [{}, {"epochs": 2, "mini_batch_size": 2}], ids=str)
    def test_policy_and_critic_step_as_plain_loops(self, policy: str, reward_model: str, training: dict[str, int]):
        made = settings(policy, algorithm=PPO, critic=reward_model, **training)
        assert made.critic is not None
        actor, critic = policy_trainer(made), critic_trainer(made)
        plain_actor = plain_policy(policy, made)
        classifier = AutoModelForSequenceClassification.from_pretrained(reward_model)
        plain_critic = oracle.CriticLoop(classifier, made, made.optimizer_of("critic"))
        for step in range(2):
            groups = batch(step, made)
            taken = run_step(actor, groups).metrics
            metrics = run_critic(critic, groups).metrics
            advantages, returns = oracle.gae(groups, 0.9, 0.8)
            plain_actor.step(groups, step, oracle.whitened(advantages))
            plain_critic.step(groups, step, returns)
            plain = list(returns.values())
            told = [metrics[f"critic/returns/{part}"] for part in ("mean", "max", "min")]
            assert_close(told, [np.mean(plain), max(plain), min(plain)], terms=len(plain))
            assert metrics["critic/values/min"] < metrics["critic/values/mean"] < metrics["critic/values/max"]
            white = list(oracle.whitened(advantages).values())
            told = [taken[f"advantages/{part}"] for part in ("mean", "max", "min")]
            assert_close(told, [np.mean(white), max(white), min(white)], terms=2 * len(white))  # mean and deviation
        assert_equals(actor, plain_actor.model, made.training.optimizer, len(plain_actor.norms))
        assert_equals(critic, plain_critic.model, made.optimizer_of("critic"), len(plain_critic.norms))
        assert metrics["critic/lr"] == 5e-3
        assert all(name.startswith("critic/") for name in metrics)

    def test_values_are_those_of_the_state_before_each_token(self, policy: str, reward_model: str):
        made = settings(policy, algorithm=PPO, critic=reward_model)
        groups = batch(3, made)
        engine = critic_trainer(made)
        requests = [ValueRequest(group_id=g.group_id, tokens=g.tokens, payload=g.payload) for g in groups]
        found = engine.values(requests)
        model = AutoModelForSequenceClassification.from_pretrained(reward_model)
        expected = oracle.CriticLoop(model, made, made.optimizer_of("critic")).values(groups)
        assert [values.group_id for values in found] == [0, 1, 2, 3]
        for g, group in enumerate(groups):
            samples = types.decode(GroupPayload, group.payload).samples
            plain = [expected[g, i].detach().numpy() * sample.loss_mask for i, sample in enumerate(samples)]
            assert_close(found[g].values, np.concatenate(plain), terms=forward_terms(18))
        assert engine.values([]) == []

    def test_a_language_model_starts_with_values_of_0(self, policy: str):
        made = settings(policy, algorithm=PPO, critic="")
        group = batch(0, made)[0]
        (values,) = critic_trainer(made).values([ValueRequest(group_id=0, tokens=group.tokens, payload=group.payload)])
        assert not values.values.any()

    def test_the_kl_in_the_reward_reaches_the_critic(self, policy: str, reward_model: str):
        """Its β adapts as the trainer's does, from the same divergence."""
        kl = {"kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.3, "kl_target": 0.01, "kl_horizon": 20}
        made = settings(policy, algorithm=PPO | kl, critic=reward_model)
        actor, critic = policy_trainer(made), critic_trainer(made)
        for step in range(3):
            run_step(actor, batch(step, made))
            run_critic(critic, batch(step, made))
        assert critic.objective.kl_control.coefficient == actor.objective.kl_control.coefficient != 0.3
        without = settings(policy, algorithm=PPO, critic=reward_model)
        returns = [run_critic(critic_trainer(each), batch(0, each)).metrics["critic/returns/mean"] for each in (made, without)]
        assert returns[0] != pytest.approx(returns[1], rel=1e-3)

    def test_a_checkpoint_resumes_bit_for_bit_and_is_a_classifier(self, policy: str, reward_model: str, tmp_path: Path):
        made = settings(policy, algorithm=PPO, critic=reward_model)
        engine = critic_trainer(made)
        run_critic(engine, batch(0, made))
        engine.save(str(tmp_path))
        resumed = critic_trainer(made)
        resumed.load(str(tmp_path))
        assert run_critic(resumed, batch(1, made)).metrics == run_critic(engine, batch(1, made)).metrics
        for name, tensor in state(engine).items():
            assert torch.equal(state(resumed)[name], tensor), name
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
        assert (model.config.num_labels, type(model).__name__) == (1, "Qwen2ForSequenceClassification")

    def test_groups_without_values_are_refused(self, policy: str):
        made = settings(policy, algorithm=PPO, critic="")
        groups = batch(0, made)
        groups[2].values = None
        for engine in (policy_trainer(made), critic_trainer(made)):
            engine.begin_step(0)
            with pytest.raises(InvalidMessage, match="group 2: has no values"):
                engine.accumulate(groups)

    def test_a_head_of_several_numbers_is_refused(self, policy: str, tmp_path: Path):
        AutoModelForSequenceClassification.from_pretrained(policy, num_labels=3).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"critic\.path: .* cannot be loaded: .*\[3, 32\]"):
            critic_trainer(settings(policy, algorithm=PPO, critic=str(tmp_path)))


def run_critic(engine: ModelTrainer, groups: list[TrainGroup]) -> StepResult:
    return run_step(engine, groups)  # type: ignore[arg-type]


class TestNotFinite:
    """A NaN reward makes the advantages of its group NaN, and so the loss of the micro-batches that hold it."""

    def poisoned(self, made: Config) -> list[TrainGroup]:
        groups = batch(0, made)
        groups[2].rewards = groups[2].rewards.copy()
        groups[2].rewards[4] = math.nan
        return groups

    def settings(self, policy: str, folder: Path, **training: Any) -> Config:
        made = settings(policy, max_tokens_per_microbatch=1, **training)
        return replace(made, run=replace(made.run, dir=str(folder)))

    def test_the_samples_are_named_and_the_weights_stay(self, policy: str, tmp_path: Path):
        made = self.settings(policy, tmp_path)
        engine = policy_trainer(made)
        before = state(engine)
        with pytest.raises(ServiceFault, match=r"step 0: .* NaN or infinite in the micro-batch of samples 2:\d, 2:") as caught:
            run_step(engine, self.poisoned(made))
        assert (caught.value.service, caught.value.phase) == ("trainer", "apply")
        written = json.loads((tmp_path / "nonfinite" / "trainer-step-00000000.json").read_text())
        assert sorted(written["micro_batches"]) == [[[2, i]] for i in range(5)]
        for name, tensor in state(engine).items():
            assert torch.equal(tensor, before[name])

    @pytest.mark.parametrize("training", [{}, {"mini_batch_size": 2}], ids=str)
    def test_the_update_can_be_skipped(self, policy: str, tmp_path: Path, training: dict[str, int]):
        """The other updates of the step are made, and the step counts."""
        made = self.settings(policy, tmp_path, on_nonfinite="skip", **training)
        engine = policy_trainer(made)
        metrics = run_step(engine, self.poisoned(made)).metrics
        assert metrics["skipped_updates"] == 1
        assert all(math.isfinite(value) for value in metrics.values())
        assert {int(each["step"]) for each in engine.backend.optimizer.state.values()} == ({1} if training else set())
        assert run_step(engine, batch(1, made)).metrics["skipped_updates"] == 0
        assert (tmp_path / "nonfinite" / "trainer-step-00000000.json").exists()


# -------------------------------------------------------------------- what the sampler's filters left of the vocabulary

FILTERS: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.95, "top_k": 40}]


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
    monkeypatch.setattr("runtime.trainer.backend.CPU_CHUNK_ELEMENTS", 7 * VOCAB)
    config = make_config(policy, sampling={"temperature": 0.8})
    gaps = [
        run_step(policy_trainer(config), sampled(policy, **filters, keep_sets=keep)).metrics["mismatch/max"]
        for keep in (True, False)
    ]
    assert_close(gaps[0], 0.0, terms=forward_terms(20), scale=LOGITS / 0.8)
    assert gaps[1] > 0.05


def test_gradients_are_those_of_the_truncated_distribution(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of log-probabilities and entropies, against a model in float64 whose softmax is over the listed tokens alone."""
    monkeypatch.setattr("runtime.trainer.backend.CPU_CHUNK_ELEMENTS", 5 * VOCAB)
    rng = np.random.default_rng(4)
    groups = [with_sets(group, rng) for group in make_groups(2)]
    engine = policy_trainer(make_config(policy))
    backend = engine.backend
    rows = train_rows.rows_of(train_rows.check_groups(groups, VOCAB, engine.objective.needs), engine.objective.needs)
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
        payload = types.decode(GroupPayload, group.payload)
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
    payload = types.decode(GroupPayload, group.payload)
    assert payload.kept is not None
    some = int(np.flatnonzero((payload.kept.sizes > 0) & (payload.kept.sizes < VOCAB))[0])
    place = np.flatnonzero(payload.loss_mask.expand())[some]
    bits = np.unpackbits(payload.kept.bitmaps(np.array([some]))[0], bitorder="little")[:VOCAB]
    tokens = payload.tokens.copy()
    tokens[place] = np.flatnonzero(bits == 0)[0]
    with pytest.raises(InvalidMessage, match=rf"group 0: token {some} is not in its kept set"):
        run_step(policy_trainer(make_config(policy)), [replace(group, payload=types.encode(replace(payload, tokens=tokens)))])


def test_parts_of_a_payload_keep_their_sets() -> None:
    """Samples as they come out of a payload make the same payload again: masked tokens have the whole vocabulary."""
    payload = types.decode(GroupPayload, with_sets(make_groups(2)[0], np.random.default_rng(4)).payload)
    again = GroupPayload.of(payload.group_id, payload.prompt, payload.samples)
    assert types.encode(again) == types.encode(payload)


# --------------------------------------------------------------------------------------- what is kept of trained tokens


def some(step: int, count: int = 3) -> TrainedTokens:
    numbers = np.arange(count)
    return TrainedTokens(step, numbers, numbers + 1, numbers + 2, np.float32(numbers) - step, np.float32(numbers))


def test_what_was_kept_of_a_step_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        log = TrainedTokenLog(tmp_path, f"trainer-{rank}")
        for step in range(5):
            log.append(some(step))
    found = list(summary.read(tmp_path, 3))
    assert len(found) == 2
    for each in found:
        assert (each.step, each.group.tolist(), each.row.tolist(), each.position.tolist()) == (
            3,
            [0, 1, 2],
            [1, 2, 3],
            [2, 3, 4],
        )
        assert each.logprob.tolist() == [-3, -2, -1]
    assert list(summary.read(tmp_path, 9)) == []
    assert list(summary.read(tmp_path / "none", 0)) == []


def test_the_newest_steps_are_kept_in_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MOST_BYTES", 4096)
    log = TrainedTokenLog(tmp_path, "trainer-0")
    for step in range(100):
        log.append(some(step))
        assert sum(path.stat().st_size for path in (tmp_path / run_files.TRAINED).iterdir()) <= 4096 + 16
    kept = [step for step in range(100) if list(summary.read(tmp_path, step))]
    assert kept == list(range(kept[0], 100))
    assert 0 < kept[0] < 99


def test_a_step_that_is_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = TrainedTokenLog(tmp_path, "trainer-0")
    log.append(some(0))
    log.append(some(1))
    (path,) = (tmp_path / run_files.TRAINED).iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert len(list(summary.read(tmp_path, 0))) == 1
    assert list(summary.read(tmp_path, 1)) == []
    again = TrainedTokenLog(tmp_path, "trainer-0")  # of the process that goes on
    again.append(some(1))
    again.append(some(2))
    assert [len(list(summary.read(tmp_path, step))) for step in range(3)] == [1, 1, 1]


def test_a_folder_that_cannot_be_written_costs_what_is_kept_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / run_files.TRAINED).write_text("")
    log = TrainedTokenLog(tmp_path, "trainer-0")
    log.append(some(0))
    log.append(some(1))
    assert caplog.text.count("no more log-probabilities of trained tokens are kept") == 1


# ------------------------------------------------------------------------------------------------ quantiles that add up


def reduced(values: np.ndarray, counted: np.ndarray) -> Reduced:
    statistics = StepStatistics(torch.device("cpu"))
    statistics.histogram("gap", torch.from_numpy(values), torch.from_numpy(counted))
    return statistics.reduce(1)


def exact(values: np.ndarray) -> float:
    return float(np.sort(values)[math.ceil(0.99 * len(values)) - 1])


@pytest.mark.parametrize("size", [1, 7, 100, 101, 5000])
def test_the_99th_percentile_is_within_a_bin_of_the_exact_one(size: int) -> None:
    rng = np.random.default_rng(size)
    values = np.exp(rng.normal(-8, 4, size)).clip(2e-9, 200).astype(np.float32)
    found = reduced(values, np.ones(size)).metrics()["gap_p99"]
    assert exact(values) * 2 ** (-1 / BINS_PER_OCTAVE) * (1 - 1e-5) <= found <= exact(values)


def test_parts_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    values, counted = np.exp(rng.normal(-8, 4, (60, 9))).astype(np.float32), rng.random((60, 9)) < 0.7
    whole = reduced(values, counted)
    parts = reduced(values[:1], counted[:1]) + reduced(values[1:37], counted[1:37]) + reduced(values[37:], counted[37:])
    assert parts == whole
    assert sum(whole.sums["gap_p99"]) == counted.sum()
    assert whole.metrics()["gap_p99"] <= exact(values[counted])


def test_what_is_not_counted_has_no_say_and_the_ends_are_open() -> None:
    values = np.array([0.0, 1e-12, 1e6, np.nan, 4.0], np.float32)
    assert reduced(values, np.array([0, 0, 0, 0, 1])).metrics() == {"gap_p99": 4.0}
    assert reduced(values, np.array([1, 1, 0, 0, 0])).metrics() == {"gap_p99": 0.0}
    assert reduced(values, np.array([1, 1, 1, 1, 0])).metrics() == {"gap_p99": 256.0}
    assert reduced(values, np.zeros(5)).metrics() == {}
