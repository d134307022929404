"""The experts that tokens took in the rollout are those that the trainer gives them to: what the rollout records, what travels,
and the trainer's log-probabilities and gradients, against a model in float64 that is forced to the same experts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from runtime import types
from runtime.config import Algorithm, Config, Lora, Moe, Reference, Trainer
from runtime.errors import InvalidMessage
from runtime.models import hf_policy
from runtime.models.experts import route, route_corrected
from runtime.models.forward import Packing
from runtime.scoring.scorer_torch import PolicyScorer, TorchScorer, replayed
from runtime.trainer import micro_batch
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import StepStatistics, micro_batches
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import (
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    LogprobRequest,
    PolicyVersion,
    RoutedExperts,
    Sample,
    TrainGroup,
)
from tests.closeness import LOGITS, STEP, assert_close, forward_terms
from tests.unit import lora_cases
from tests.unit.lora_cases import grown
from tests.unit.rollout_cases import begin, drain, engines, request, update
from tests.unit.tiny_models import saved
from tests.unit.training_cases import VOCAB, fed_tokens, make_config, make_groups, random_experts
from tests.unit.training_steps import assert_same, run_step, weights

pytestmark = pytest.mark.numeric

# Of each family: layers with experts, experts a token, experts.
SHAPES = {"qwen3_moe": (2, 2, 4), "deepseek_v3_whole_queries": (3, 4, 16), "glm4_moe": (2, 2, 4), "gpt_oss": (3, 2, 4)}
SHAPES["mixtral"] = (2, 2, 4)


@pytest.fixture
def folders() -> Callable[[str], str]:
    return _folder


@cache
def _folder(family: str) -> str:
    path, _ = saved(family)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return str(path)


@cache
def _watched(path: str) -> Any:
    """transformers' model in float64, whose blocks note the experts that they choose."""
    model = hf_policy.load_policy(path).double()
    for module in model.modules():
        if hasattr(module, "watch"):
            module.watch.keeps = True
    return model


def with_moe(path: str, trainer: Any = None, **moe: Any) -> Config:
    return replace(make_config(path, sampling={"temperature": 0.8}, trainer=trainer), moe=Moe(**moe))


def sampled(path: str, *requests: GroupRequest, **options: Any) -> dict[int, GroupPayload]:
    """One group after the other."""

    async def generate() -> list[GeneratedGroup]:
        found = []
        for each in requests:
            engine.submit([each])
            found += [group async for group in drain(engine)]
        return found

    with engines(Path(path), **{"replays": True, **options}) as make:
        engine = make(5)
        return {group.group_id: types.decode(GroupPayload, group.payload) for group in asyncio.run(generate())}


def some(group_id: int, n: int = 4, **sampling: Any) -> GroupRequest:
    return request(group_id, n=n, prompt=(5, 9, group_id), limit=12, **{"temperature": 0.8, "experts_from": 0, **sampling})


def to_train(payload: GroupPayload) -> TrainGroup:
    rewards = np.random.default_rng(payload.group_id).normal(size=payload.n).astype(np.float32)
    valid, encoded = np.ones(payload.n, np.uint8), types.encode(payload)
    return TrainGroup(group_id=payload.group_id, tokens=60, payload=encoded, rewards=rewards, valid=valid)


# ------------------------------------------------------------------------------------------ what the rollout records


@torch.no_grad()
def expected_rows(path: str, prompt: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the tokens that are fed [n, L, k], sorted, by transformers' model in float64, and where no two experts are so near
    that rounding decides [n, L]."""
    model = _watched(path)
    blocks = [module for module in model.modules() if hasattr(module, "watch")]
    ids = torch.from_numpy(np.concatenate([prompt, tokens[:-1]]).astype(np.int64))
    cells = torch.arange(len(ids))
    packing = Packing(rows=[cells[None]], cells=cells)
    model(input_ids=ids[None], position_ids=cells[None], packing=packing, use_cache=False)
    taken = torch.stack([block.watch.own.sort(-1).values for block in blocks], 1)
    clear = []
    for block in blocks:
        scores = block.watch.logits
        if hasattr(block.gate, "e_score_correction_bias"):
            scores = torch.sigmoid(scores) + block.gate.e_score_correction_bias
        best = scores.sort(-1, descending=True).values
        k = block.watch.own.shape[1]
        clear.append(best[:, k - 1] - best[:, k] > 1e-3)
    return taken.numpy(), torch.stack(clear, 1).numpy()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_whole_queries"])
def test_the_rollout_tells_the_experts_that_its_tokens_took(folders: Callable[[str], str], family: str) -> None:
    """Of prompts that are computed side by side, and of replies of one token."""
    path = folders(family)
    requests = [some(0, n=6), some(1, n=2), request(2, n=2, prompt=(5,), limit=1, experts_from=0)]
    payloads = sampled(path, *requests, *(replace(some(0, n=6), group_id=3 + at) for at in range(2)))
    share = []
    for payload in payloads.values():
        assert payload.experts is not None and payload.experts.fit(fed_tokens(payload), *SHAPES[family])
        for sample, own in zip(payload.samples, payload.experts.by_row(payload.lengths.tolist()), strict=True):
            taken, clear = expected_rows(path, payload.prompt, sample.tokens)
            assert (np.sort(own.rows, -1) == taken)[clear].all()
            share.append(clear.mean())
    assert np.mean(share) > 0.8


def test_a_conversation_goes_on_with_the_experts_of_what_is_new(folders: Callable[[str], str]) -> None:
    """The next turn's request asks for those from the last reply's last token on, which no request had fed; all together are
    those of the whole text. A prompt that is asked for again is computed again from there on, though more of it is kept."""
    path = folders("qwen3_moe")
    prompt = tuple(range(20))
    first = request(0, n=1, prompt=prompt, limit=8, experts_from=0)
    (payload,) = sampled(path, replace(first, keep=True)).values()
    begun = (*prompt, *payload.tokens.tolist())
    second = request(1, n=2, prompt=(*begun, 7, 8, 9), limit=8, experts_from=len(begun) - 1)
    keeps = [replace(each, keep=True) for each in (first, second, replace(second, group_id=2))]
    found = sampled(path, *keeps)
    for group_id in (1, 2):
        one, other = found[0], found[group_id]
        assert one.experts is not None and other.experts is not None
        for sample, own in zip(other.samples, other.experts.by_row(other.lengths.tolist()), strict=True):
            whole = RoutedExperts.joined([one.experts, own])
            taken, clear = expected_rows(path, other.prompt, sample.tokens)
            assert whole is not None and whole.rows.shape == taken.shape
            assert (np.sort(whole.rows, -1) == taken)[clear].all()


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_keep_the_experts_that_they_took_before_weights_changed(folders: Callable[[str], str], recompute: bool) -> None:
    """Also where their keys and values are made anew: what was sampled behind them saw these."""
    path = folders("qwen3_moe")
    (before,) = sampled(path, some(0)).values()
    tensors = AutoModelForCausalLM.from_pretrained(path).state_dict()
    torch.manual_seed(1)
    changed = {name: tensor + 0.5 * torch.randn_like(tensor) for name, tensor in tensors.items()}

    async def generate() -> GroupPayload:
        await begin(engine, [some(0)], 6)
        await update(engine, changed, PolicyVersion(0, 1), recompute)
        done = [group async for group in drain(engine)]
        return types.decode(GroupPayload, done[0].payload)

    with engines(Path(path), replays=True) as make:
        engine = make(5)
        after = asyncio.run(generate())
    assert before.experts is not None and after.experts is not None
    assert after.experts.fit(fed_tokens(after), *SHAPES["qwen3_moe"])
    pairs = zip(before.experts.by_row(before.lengths.tolist()), after.experts.by_row(after.lengths.tolist()), strict=True)
    changes = 0
    for sample, (own, other) in zip(after.samples, pairs, strict=True):
        old = len(after.prompt) + int((sample.versions == 0).sum()) - 1  # the newest of them was fed after the change
        assert (own.rows[:old] == other.rows[:old]).all()
        changes += not np.array_equal(own.rows[old:], other.rows[old:])
    assert changes


def test_nothing_travels_unless_it_is_asked_for(folders: Callable[[str], str]) -> None:
    (payload,) = sampled(folders("qwen3_moe"), some(0, experts_from=-1)).values()
    assert payload.experts is None
    (payload,) = sampled(folders("qwen3_moe"), some(0), replays=False).values()
    assert payload.experts is None


# ------------------------------------------------------------------------------------------ what travels


def test_a_group_keeps_the_experts_of_its_rows() -> None:
    """Also of more than 256 experts, and beside a row that the model was never given. A part of a sample keeps those of what is
    before it, as the prompt's."""
    rng = np.random.default_rng(0)
    arrays = {"loss_mask": np.ones(5, np.uint8), "logprobs": np.zeros(5, np.float32), "versions": np.zeros(5, np.int64)}
    taken = [RoutedExperts.of(rng.integers(0, 300, (7, 2, 3)).astype("<u2")) for _ in range(2)]
    taken[1].rows[:3] = taken[0].rows[:3]
    samples = [Sample(tokens=np.arange(5, dtype=np.int32), finish_reason="stop", experts=each, **arrays) for each in taken]
    idle = replace(samples[0].part(slice(2)), loss_mask=np.zeros(2, np.uint8), experts=None)
    made = GroupPayload.of(0, np.arange(3, dtype=np.int32), [idle, *samples])
    payload = types.decode(GroupPayload, types.encode(made))
    assert payload.experts is not None and payload.experts.fit(fed_tokens(payload), 2, 3, 300)
    none, *rows = payload.experts.by_row(payload.lengths.tolist())
    assert [each.rows.tolist() for each in rows] == [each.rows.tolist() for each in taken]
    assert not none.rows[3:].any()
    part = samples[0].part(slice(1, 4)).experts
    assert part is not None and part.rows.tolist() == taken[0].rows[:6].tolist()
    unknown = replace(samples[0], experts=None)  # of which something is trained
    assert GroupPayload.of(0, np.arange(3, dtype=np.int32), [unknown, *samples]).experts is None


@pytest.mark.parametrize(
    "change",
    [
        lambda taken: None,
        lambda taken: RoutedExperts.of(taken.rows[1:]),
        lambda taken: RoutedExperts.of(taken.rows[:, :1]),
        lambda taken: RoutedExperts.of(taken.rows + np.uint8(4)),
    ],
    ids=["none", "of fewer tokens", "of fewer layers", "of more experts"],
)
def test_experts_that_are_not_those_of_the_tokens_are_refused(
    folders: Callable[[str], str], change: Callable[[Any], Any]
) -> None:
    group = random_experts(make_groups(2)[:1], SHAPES["qwen3_moe"])[0]
    payload = types.decode(GroupPayload, group.payload)
    wrong = replace(group, payload=types.encode(replace(payload, experts=change(payload.experts))))
    fault = f"group 0: its experts do not fit {fed_tokens(payload)} tokens of this model; moe.router_replay needs them"
    with pytest.raises(InvalidMessage, match=fault):
        run_step(policy_trainer(with_moe(folders("qwen3_moe"), router_replay="routing")), [wrong])


def test_a_rank_gets_the_experts_of_its_own_layers_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is read. Padding, and a token of which nothing is known, get experts that differ."""
    groups = random_experts(make_groups(2), (3, 2, 4))
    needs = train_rows.Needs(experts=(3, 2, 4))
    rows = train_rows.rows_of(train_rows.check_groups(groups, VOCAB, needs), needs)
    routes = rows.routes
    assert routes is not None
    group, unknown = int(rows.group[3]), routes._rows[len(rows.prompts) + rows.start[3] + np.arange(2)]
    changed = routes._taken[group].rows.copy()
    changed[unknown - routes._begin[group]] = 0
    routes._taken[group] = RoutedExperts.of(changed)
    chosen, device = np.flatnonzero(rows.trained()), torch.device("cpu")
    whole = micro_batch.pack(rows, chosen, {}, device).experts
    assert whole is not None and (whole[..., 0] != whole[..., 1]).all()
    own, read = np.array([7, 0, -1, 30, -1]), []
    known = routes.at
    monkeypatch.setattr(routes, "at", lambda *given: read.append(known(*given).shape) or known(*given))
    part = micro_batch.pack(rows, chosen, {}, device, routed=micro_batch.RoutedShare(slice(1, 2), lambda _: own)).experts
    expected = whole[torch.from_numpy(own), 1:2]
    expected[own < 0] = torch.arange(2, dtype=torch.uint8)
    assert torch.equal(part, expected) and read == [(5, 1, 2)]


# ------------------------------------------------------------------------------------------ what the trainer computes


class Forced:
    """transformers' model in float64, whose tokens go to `taken` [n, L, k]: one sequence at a time, one token, one expert."""

    def __init__(self, path: str):
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        self.logits: list[torch.Tensor] = []
        self.taken = np.zeros((0, 0, 0))
        kinds = ("SparseMoeBlock", "V3MoE", "MoeMoE", "OssMLP")
        self.blocks = [module for module in self.model.modules() if type(module).__name__.endswith(kinds)]
        for layer, block in enumerate(self.blocks):
            block.forward = partial(self._block, layer, block)

    def _block(self, layer: int, block: Any, hidden: torch.Tensor) -> Any:
        x, joined = hidden[0], hasattr(block, "router")
        router = block.router if joined else block.gate
        logits = F.linear(x, router.weight, getattr(router, "bias", None))
        self.logits.append(logits)
        corrected = hasattr(router, "e_score_correction_bias")
        scores, out = torch.sigmoid(logits) if corrected else torch.softmax(logits, -1), []
        for token in range(len(x)):
            picks = self.taken[token, layer].astype(int).tolist()
            shares = scores[token, picks] / scores[token, picks].sum() * (router.routed_scaling_factor if corrected else 1.0)
            made = [self._expert(block.experts, expert, x[token], joined) for expert in picks]
            out.append(sum(share * each for share, each in zip(shares, made, strict=True)))
        whole = torch.stack(out)[None]
        return whole + block.shared_experts(hidden) if corrected else (whole, logits)

    @staticmethod
    def _expert(experts: Any, index: int, x: torch.Tensor, joined: bool) -> torch.Tensor:
        if not joined:
            return experts[index](x)
        both = x @ experts.gate_up_proj[index] + experts.gate_up_proj_bias[index]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ experts.down_proj[index] + experts.down_proj_bias[index]

    def __call__(self, prompt: np.ndarray, sample: Sample, taken: np.ndarray) -> torch.Tensor:
        """[R, vocabulary] logits. `logits` are those of the routers."""
        self.taken, self.logits = taken, []
        ids = torch.from_numpy(np.concatenate([prompt, sample.tokens[:-1]]).astype(np.int64))
        return self.model(ids[None]).logits[0, len(prompt) - 1 :]


def balance_of(logits: torch.Tensor, taken: np.ndarray, corrected: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row in one layer, as the papers have them: E Σ f P, and the mean square of the log-sum-exp."""
    count = logits.shape[1]
    f = torch.tensor([float((taken == expert).sum()) / taken.size for expert in range(count)], dtype=torch.float64)
    scores = torch.sigmoid(logits) if corrected else logits.exp()
    p = torch.stack([(row / row.sum()) for row in scores]).mean(0)
    return count * (f * p).sum(), torch.stack([torch.log(row.exp().sum()) ** 2 for row in logits]).mean()


@pytest.mark.parametrize(("family", "checkpointing"), [(family, family == "qwen3_moe") for family in SHAPES])
def test_logits_gradients_and_balance_are_those_of_a_model_that_is_forced(
    folders: Callable[[str], str], family: str, checkpointing: bool
) -> None:
    """Weighted log-probabilities, and the losses that balance experts, of each row's trained tokens; in several micro-batches,
    where rows share their prompts."""
    path, shape, rng = folders(family), SHAPES[family], np.random.default_rng(4)
    groups = random_experts(make_groups(2), shape)
    aux, z = 0.3, 0.02
    engine = policy_trainer(
        with_moe(path, Trainer(activation_checkpointing=checkpointing), router_replay="routing", aux_loss=aux, z_loss=z)
    )
    backend, statistics = engine.backend, StepStatistics(torch.device("cpu"))
    rows = train_rows.rows_of(train_rows.check_groups(groups, VOCAB, engine.objective.needs), engine.objective.needs)
    weight = {"weight": rng.normal(size=len(rows.tokens)).astype(np.float32)}

    def loss(batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        logp, _ = backend.token_logprobs(outputs, batch, 0.7, entropy_gradient=False)
        balance = backend.balance(batch, statistics)
        assert balance is not None
        return (batch.columns["weight"].flatten()[batch.cells] * logp).sum() + (balance * batch.mask).sum()

    total = sum(backend.run(micro_batches(rows, rows.trained(), weight, 90, backend.rank_info), loss, backward=True))

    forced, corrected = Forced(path), family.startswith(("deepseek", "glm"))
    expected, place, of_rows = torch.zeros((), dtype=torch.float64), 0, []
    for group in groups:
        payload = types.decode(GroupPayload, group.payload)
        assert payload.experts is not None
        for index, own in enumerate(payload.experts.by_row(payload.lengths.tolist())):
            sample = payload.samples[index]
            at = np.flatnonzero(sample.loss_mask * group.valid[index])
            if len(at):
                logp = torch.log_softmax(forced(payload.prompt, sample, own.rows) / 0.7, -1)[at, sample.tokens[at]]
                expected = expected + (torch.from_numpy(weight["weight"][place + at]).double() * logp).sum()
                pairs = [balance_of(each, own.rows[:, layer], corrected) for layer, each in enumerate(forced.logits)]
                expected = expected + len(at) * sum(aux * one + z * other for one, other in pairs)
                of_rows.append([sum(each.item() for each in column) / len(pairs) for column in zip(*pairs, strict=True)])
            place += len(sample.tokens)
    expected.backward()
    terms = forward_terms(20, layers=4) * len(rows.tokens)
    assert_close(float(total), expected.item(), terms=terms, scale=LOGITS)
    reduced = statistics.reduce(1).metrics()
    for name, value in zip(("moe/aux_loss", "moe/z_loss"), np.mean(of_rows, 0), strict=True):
        assert_close(reduced[name], value, terms=terms, what=name)
    parameters = dict(forced.model.named_parameters())
    assert len(backend.gradients()) == len(parameters)
    for found, (name, parameter) in zip(backend.gradients(), parameters.items(), strict=True):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # of an expert without tokens
        assert_close(found, gradient, terms=4 * STEP, scale=max(1.0, float(gradient.abs().max())), what=name)


def test_the_same_experts_have_the_same_weights_bit_for_bit() -> None:
    torch.manual_seed(0)
    logits, correction = torch.randn(50, 16), torch.rand(16)
    for choose in (
        partial(route, logits, 4, True),
        partial(route, logits, 4, False),
        partial(route_corrected, logits, correction, 4, 4, 2, 2.5),
    ):
        own = choose()
        again = choose(taken=own[1])
        assert torch.equal(own[0], again[0]) and torch.equal(own[1], again[1])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_whole_queries"])
def test_what_was_sampled_is_trained_with_the_experts_that_it_took(folders: Callable[[str], str], family: str) -> None:
    """With the weights that sampled, log-probabilities are the sampler's. With another router they still are of its experts,
    so that the policies are nearer than where it chooses for itself."""
    path = folders(family)
    groups = [to_train(payload) for payload in sampled(path, some(0), some(1), some(2)).values()]
    metrics = run_step(policy_trainer(with_moe(path, router_replay="routing")), groups).metrics
    assert_close(metrics["mismatch/max"], 0.0, terms=forward_terms(20, layers=4), scale=LOGITS / 0.8)
    assert metrics["moe/routing_differs"] < 0.02  # where two experts are so near that rounding decides

    found = {}
    for replay in ("off", "routing"):
        engine = policy_trainer(with_moe(path, router_replay=replay))
        perturb(engine)
        found[replay] = run_step(engine, groups).metrics
    assert "moe/routing_differs" not in found["off"]
    assert found["routing"]["moe/routing_differs"] > 0.3
    assert found["routing"]["mismatch/abs_logprob"] < found["off"]["mismatch/abs_logprob"]
    for name in ("moe/load_max", "moe/load_entropy"):
        assert found["routing"][name] == pytest.approx(metrics[name])
        assert found["off"][name] != pytest.approx(metrics[name])


def perturb(engine: ModelTrainer) -> None:
    backend: Any = engine.backend
    torch.manual_seed(5)
    for name, parameter in backend.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                parameter += 0.15 * torch.randn_like(parameter)


def test_a_probe_is_compared_with_its_experts(folders: Callable[[str], str]) -> None:
    path = folders("qwen3_moe")
    (payload,) = sampled(path, some(0, n=1)).values()
    engine = policy_trainer(with_moe(path, router_replay="routing"))
    perturb(engine)
    gap = run_step(engine, [to_train(payload)], probes=[types.encode(payload)]).probes[0]
    other = policy_trainer(with_moe(path))
    perturb(other)
    assert gap != pytest.approx(run_step(other, [to_train(payload)], probes=[types.encode(payload)]).probes[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_whole_queries", "gpt_oss"])
def test_a_reference_gives_tokens_to_the_same_experts(folders: Callable[[str], str], family: str) -> None:
    """Also the rollout's decoder; and a model with other experts chooses for itself."""
    path, options = folders(family), {"device": torch.device("cpu"), "dtype": torch.float32, "max_tokens_per_microbatch": 50}
    config = with_moe(path, router_replay="routing")
    routes, groups = replayed(config, path), random_experts(make_groups(2), SHAPES[family])
    engine = policy_trainer(config)
    assert routes == SHAPES[family] == engine.backend.routes
    other = folders("qwen3_moe" if family == "gpt_oss" else "gpt_oss")
    assert replayed(with_moe(path), path) is replayed(config, other) is None
    rows = train_rows.rows_of(train_rows.check_groups(groups, VOCAB, engine.objective.needs), engine.objective.needs)
    wanted = engine._per_token_output(rows)[rows.mask]
    requests = [LogprobRequest(group_id=each.group_id, payload=each.payload, temperature=0.8) for each in groups]
    for kind in (TorchScorer, PolicyScorer):
        scorer = kind(path, **options)
        alone = np.concatenate([each.values for each in scorer.logprobs(requests)])[rows.mask]
        assert np.abs(alone - wanted).max() > 0.1
        scorer.routes = routes
        found = np.concatenate([each.values for each in scorer.logprobs(requests)])[rows.mask]
        assert_close(found, wanted, terms=forward_terms(20, layers=4), scale=LOGITS / 0.8, what=kind.__name__)


ADAPTED = ["q_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("family", "targets"), [("qwen3_moe", ADAPTED), ("glm4_moe", ADAPTED), ("qwen3_moe", ["q_proj"])])
def test_adapters_are_trained_with_the_experts_of_the_rollout(
    folders: Callable[[str], str], tmp_path: Path, family: str, targets: list[str]
) -> None:
    """Also adapters in the experts, and the reference, which is the model without them."""
    pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    path = folders(family)

    def made(replay: str) -> ModelTrainer:
        lora, reference = Lora(rank=4, alpha=12.0, target_modules=targets), Reference(source="adapter_off")
        engine = policy_trainer(
            replace(
                with_moe(path, router_replay=replay), lora=lora, reference=reference, algorithm=Algorithm(kl_coefficient=0.1)
            )
        )
        if (tmp_path / "grown").exists():
            engine.load(str(tmp_path / "grown"))
        return engine

    grown(lora_cases.saved(made("off"), tmp_path / "saved"), tmp_path / "grown")
    made("off").export(tmp_path / "merged")
    payloads = sampled(str(tmp_path / "merged"), some(0), some(1), some(2))
    groups = [to_train(payload) for payload in payloads.values()]
    engine = made("routing")
    rows = train_rows.rows_of(train_rows.check_groups(groups, VOCAB, engine.objective.needs), engine.objective.needs)
    with engine.backend.adapters.off():
        base = engine._per_token_output(rows)
    metrics = run_step(engine, groups).metrics
    assert_close(metrics["mismatch/max"], 0.0, terms=forward_terms(20, layers=4), scale=LOGITS / 0.8)
    assert metrics["actor/kl"] > 1e-3 < metrics["actor/grad_norm"]

    forced, place = Forced(path), 0
    for payload in payloads.values():
        assert payload.experts is not None
        for sample, own in zip(payload.samples, payload.experts.by_row(payload.lengths.tolist()), strict=True):
            logp = torch.log_softmax(forced(payload.prompt, sample, own.rows).detach() / 0.8, -1)
            expected = logp[np.arange(len(sample.tokens)), sample.tokens.copy()]
            got = base[place : place + len(sample.tokens)]
            assert_close(got, expected, terms=forward_terms(20, layers=4), scale=LOGITS / 0.8)
            place += len(sample.tokens)

    found = {}
    for replay in ("off", "routing"):
        other = made(replay)
        perturb(other)
        found[replay] = run_step(other, groups).metrics
    assert found["routing"]["moe/routing_differs"] > 0.3
    assert found["routing"]["mismatch/abs_logprob"] < found["off"]["mismatch/abs_logprob"]


# ------------------------------------------------------------------------------------------ balance without a loss


def loads_of(groups: list[TrainGroup], shape: tuple[int, int, int]) -> np.ndarray:
    """[L, E] of what is fed: prompts once, and replies of which something is trained."""
    loads = np.zeros((shape[0], shape[2]))
    for group in groups:
        payload = types.decode(GroupPayload, group.payload)
        assert payload.experts is not None
        prompt, rows = payload.experts.rows[: len(payload.prompt)], payload.experts.by_row(payload.lengths.tolist())
        parts = [prompt]
        for index, sample in enumerate(payload.samples):
            if group.valid[index] and sample.loss_mask.any():
                parts.append(rows[index].rows[len(prompt) :])
        np.add.at(loads, (np.arange(shape[0])[None, :, None], np.concatenate(parts)), 1)
    return loads


@pytest.mark.parametrize("family", ["deepseek_v3_whole_queries", "glm4_moe"])
def test_what_corrects_scores_follows_the_load(folders: Callable[[str], str], family: str, tmp_path: Path) -> None:
    """b + u · sign(mean − load), by experts and layers; it is published, and comes back from a checkpoint. The metrics are of
    the same loads."""
    path, shape = folders(family), SHAPES[family]
    groups = random_experts(make_groups(2), shape)
    config = with_moe(path, router_replay="routing", bias_update=0.01)
    engine = policy_trainer(config)
    before = weights(engine)
    metrics = run_step(engine, groups).metrics
    after, loads = weights(engine), loads_of(groups, shape)
    names = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(names) == len(loads)
    for name, load in zip(names, loads, strict=True):
        moved = before[name].double() + 0.01 * torch.from_numpy(np.sign(load.mean() - load))
        assert_close(after[name], moved, terms=2, what=name)
    share = loads / loads.sum(1, keepdims=True)
    assert metrics["moe/load_max"] == pytest.approx((share.max(1) * shape[2]).mean())
    logs = np.log(share, where=share > 0, out=np.zeros_like(share))
    assert metrics["moe/load_entropy"] == pytest.approx(-(share * logs).sum(1).mean() / np.log(shape[2]))

    engine.save(str(tmp_path))
    again = policy_trainer(config)
    again.load(str(tmp_path))
    assert_same(weights(again), after)

    fixed = policy_trainer(with_moe(path, router_replay="routing"))
    run_step(fixed, groups)
    assert all(torch.equal(weights(fixed)[name], before[name]) for name in names)


def test_balance_is_learned_where_advantages_are_0(folders: Callable[[str], str]) -> None:
    """A group whose rewards are all alike has a gradient by it, and by nothing else."""
    groups = [replace(group, rewards=np.ones_like(group.rewards)) for group in make_groups(2)]
    norms = [
        run_step(policy_trainer(with_moe(folders("qwen3_moe"), aux_loss=aux)), groups).metrics["actor/grad_norm"]
        for aux in (0.0, 0.1)
    ]
    assert norms[0] == 0.0 < norms[1]
