"""Trainer and reference on megatron-core, spread over two ranks, do what engine torch does on one."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runtime import types
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Moe, Parallel, ReferenceScorer, Trainer
from runtime.errors import ServiceFault
from runtime.scoring.scorer_torch import TorchScorer, replayed
from runtime.trainer.rows import Routes
from runtime.trainer.step import policy_trainer
from runtime.types import GroupPayload, LogprobRequest
from tests.closeness import FLOAT32, LOGITS, assert_close, forward_terms, gamma
from tests.loopback.megatron_equality import assert_equal, assert_published
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.loopback.ranks import run_ranks, run_two
from tests.unit.lora_cases import LORA, grown
from tests.unit.test_convert_checkpoint import Running
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config, make_episodes, make_groups, make_policy, with_random_experts
from tests.unit.training_steps import comparable, make_probes, weights

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install 'sluice-rl[megatron]'"
    ),
]

CPU = torch.device("cpu")
TORCH, TENSOR, CONTEXT = Layout(0), Layout(2, processes=2), Layout(1, processes=2, context=2)
EXPERT, LORA_TORCH = Layout(1, processes=2, expert=2), Layout(0, lora="all")
LORA_EXPERT = EXPERT._replace(lora="all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    make_policy(folder / "policy")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return train(folder, TORCH)


@pytest.fixture(scope="module")
def tensor(folder: Path) -> dict[str, Any]:
    return train(folder, TENSOR)


def test_tensor_parallel_is_the_torch_engine(folder: Path, expected: dict[str, Any], tensor: dict[str, Any]) -> None:
    assert len(tensor["metrics"]) == STEPS
    assert len({metrics["actor/grad_norm"] for metrics in tensor["metrics"]}) == STEPS
    assert_equal(tensor, expected)
    assert_published(folder, TENSOR, tensor)


def test_context_parallel_is_the_torch_engine(folder: Path, expected: dict[str, Any]) -> None:
    assert_equal(train(folder, CONTEXT), expected)


def saved_with(folder: Path, target: Path, change: Callable[[Path], object]) -> None:
    """A copy in `target` of the policy, and of what the layout TENSOR has saved, whose folder `change` changes."""
    (target / "policy").symlink_to(folder / "policy")
    change(shutil.copytree(folder / f"saved-by-{TENSOR.name}", target / f"saved-by-{TENSOR.name}") / "megatron")


@pytest.mark.usefixtures("tensor")
def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", tied=False)
    (tmp_path / f"saved-by-{TENSOR.name}").symlink_to(folder / f"saved-by-{TENSOR.name}")
    with pytest.raises(AssertionError, match=r"is of another model; \d+ tensors differ, such as .*output_layer"):
        train(tmp_path, Layout(1), resumed=TENSOR.name)


@pytest.mark.usefixtures("tensor")
def test_an_index_that_runs_something_is_refused(folder: Path, tmp_path: Path) -> None:
    saved_with(folder, tmp_path, lambda saved: (saved / ".metadata").write_bytes(pickle.dumps(Running(tmp_path / "run"))))
    with pytest.raises(AssertionError, match=r"megatron/\.metadata: its pickle wants posix\.system, which no checkpoint needs"):
        train(tmp_path, Layout(1), resumed=TENSOR.name)
    assert not (tmp_path / "run").exists()


def objects_run(saved: Path, made: Path) -> None:
    """The objects beside the tensors, and what ranks have in common, make a file when they are unpickled."""
    torch.save(Running(made), saved / "common.pt")
    index = pickle.loads((saved / ".metadata").read_bytes())
    file = io.BytesIO()
    torch.save([Running(made)], file)
    objects = [place for key, place in index.storage_data.items() if "_extra_state" in key.fqn]
    assert objects
    for place in objects:
        place.offset, place.length = (saved / place.relative_path).stat().st_size, len(file.getvalue())
        with (saved / place.relative_path).open("ab") as distributed:
            distributed.write(file.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.usefixtures("tensor")
def test_of_a_checkpoint_nothing_but_tensors_is_read(folder: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    saved_with(folder, tmp_path, lambda saved: objects_run(saved, tmp_path / "run"))
    found = train(tmp_path, Layout(1), resumed=TENSOR.name)
    assert_equal(found, expected, last=STEPS - SAVED)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------- experts, and adapters on them


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy with experts."""
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder / "policy", "qwen3_moe")
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def adapted(experts: Path) -> dict[str, Any]:
    return train(experts, LORA_TORCH)


@pytest.fixture(scope="module")
def spread(experts: Path) -> dict[str, Any]:
    """With adapters, the experts on two ranks."""
    return train(experts, LORA_EXPERT)


def test_expert_parallel_is_the_torch_engine_and_goes_on_with_all_experts_on_one_rank(experts: Path) -> None:
    found = train(experts, EXPERT)
    assert_equal(found, train(experts, TORCH))
    before, after = load_file(experts / "policy" / "model.safetensors"), found["published"]
    assert all(not torch.equal(before[name], after[name]) for name in after)
    exported = load_file(experts / f"export-{EXPERT.name}" / "model.safetensors")
    assert exported.keys() == after.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in after.items())
    assert_equal(train(experts, Layout(1), resumed=EXPERT.name), found, last=STEPS - SAVED)


def test_adapters_of_experts_are_engine_torchs(experts: Path, adapted: dict[str, Any], spread: dict[str, Any]) -> None:
    assert_equal(spread, adapted, lora=True)
    assert spread["metrics"][-1]["actor/kl"] > 1e-4  # so the reference is not the policy
    before = load_file(experts / "policy" / "model.safetensors")
    frozen = {name for name, tensor in spread["published"].items() if torch.equal(tensor, before[name])}
    assert frozen == {name for name in before if "_proj" not in name}


def test_adapters_that_are_written_are_pefts(experts: Path, spread: dict[str, Any]) -> None:
    from peft import PeftModel

    written = [load_file(experts / f"export-{LORA_EXPERT.name}" / "model.safetensors")]
    for folder in ("export", "end-of"):
        base = AutoModelForCausalLM.from_pretrained(experts / "policy")
        opened = PeftModel.from_pretrained(base, experts / f"{folder}-{LORA_EXPERT.name}" / "adapter")
        written.append(dict(opened.merge_and_unload().named_parameters()))
    for tensors in written:
        for name, tensor in spread["published"].items():
            assert_close(tensors[name], tensor, terms=LORA.rank + 2, what=name)  # their product, its scale, the sum


def test_a_checkpoint_of_either_engine_goes_on_in_the_other(
    experts: Path, adapted: dict[str, Any], spread: dict[str, Any], tmp_path: Path
) -> None:
    names = [{path.name for path in (experts / f"saved-by-{each.name}").iterdir()} for each in (LORA_TORCH, LORA_EXPERT)]
    assert names[0] == names[1] == {"adapter", "optimizer.safetensors", "rng.safetensors", "trainer.json"}
    own, other = tmp_path / "own", tmp_path / "other"
    for place in (own, other):
        place.mkdir()
        (place / "policy").symlink_to(experts / "policy")
    (own / f"saved-by-{LORA_EXPERT.name}").symlink_to(experts / f"saved-by-{LORA_EXPERT.name}")
    assert_equal(train(own, LORA_TORCH, resumed=LORA_EXPERT.name), adapted, last=STEPS - SAVED, lora=True)
    grown(experts / f"saved-by-{LORA_TORCH.name}", other / "saved-by-grown")
    found = train(other, LORA_EXPERT, resumed="grown")
    (other / "saved-by-grown").rename(own / "saved-by-grown")
    shutil.rmtree(own / f"export-{LORA_TORCH.name}")
    assert_equal(found, train(own, LORA_TORCH, resumed="grown"), last=STEPS - SAVED, lora=True)


def test_adapters_of_another_base_are_refused(experts: Path, spread: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "qwen3_moe", seed=1)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / f"saved-by-{LORA_EXPERT.name}").symlink_to(experts / f"saved-by-{LORA_EXPERT.name}")
    base = json.loads((tmp_path / f"saved-by-{LORA_EXPERT.name}" / "trainer.json").read_text())["base"]
    assert base["path"] == str(experts / "policy")
    told = (
        rf"model\.path: {tmp_path}/policy \(fingerprint \w+\) is not the base of the adapters in checkpoint .*; their "
        rf"base is {experts}/policy \(fingerprint {base['fingerprint'][:16]}\)\n"
    )
    with pytest.raises(AssertionError, match=f"UserError: {told}"):
        train(tmp_path, LORA_EXPERT, resumed=LORA_EXPERT.name)


def test_weights_that_are_trained_and_adapters_do_not_mix(experts: Path, spread: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(experts / "policy")
    (tmp_path / f"saved-by-{LORA_EXPERT.name}").symlink_to(experts / f"saved-by-{LORA_EXPERT.name}")
    with pytest.raises(AssertionError, match=r"UserError: lora: is not set, but checkpoint .* holds adapters; must be \{"):
        train(tmp_path, Layout(1), resumed=LORA_EXPERT.name)
    (tmp_path / "saved-by-whole").mkdir()
    (tmp_path / "saved-by-whole" / "trainer.json").write_text('{"format": 1, "engine": "megatron"}')
    message = r"UserError: lora: is set, but checkpoint .* has no adapters; must be left out"
    with pytest.raises(AssertionError, match=message):
        train(tmp_path, Layout(1, lora="all"), resumed="whole")


# ---------------------------------------------------- collectives beside computation


def test_neither_overlap_nor_a_device_that_is_lent_out_between_steps_changes_a_bit(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", tied=False)
    run_two(overlap_member, tmp_path)


OVERLAP_STEPS, BLOCKS = 4, 2
BUCKET = 2000  # weights, about: the model has several
SECTIONS: dict[str, Any] = {
    "algorithm": {"kl_coefficient": 0.1},
    "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.0, "weight_decay": 0.1},
    "training": {"max_tokens_per_microbatch": 40},
}


def make_engine(folder: Path, rank: int, overlap: bool, dtype: str, **training: Any) -> Any:
    settings = Trainer(processes=BLOCKS, engine="megatron", offload=["optimizer", "grad", "param"] if overlap else [])
    sections = SECTIONS | {"training": SECTIONS["training"] | training}
    config = make_config(str(folder / "policy"), dtype=dtype, trainer=settings, **sections)
    from runtime.trainer.megatron import optimizer

    known = optimizer.DistributedDataParallelConfig
    apart = {} if overlap else {"overlap_grad_reduce": False, "overlap_param_gather": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "DistributedDataParallelConfig", lambda **options: known(**options | apart))
        return policy_trainer(config, rank=rank, world_size=BLOCKS, device=CPU)


def overlap_steps(engine: Any, rank: int) -> list[dict[str, Any]]:
    """What each step reports, but for the norm, and the weights after every other one, which is published. The norm's last
    digits depend on how buckets lie across the ranks.
    """
    found = []
    for step in range(OVERLAP_STEPS):
        groups = make_groups(step, (5, 4, 6, 3), step=step)
        if step == OVERLAP_STEPS - 1:  # no gradient comes of the last groups: their rewards are the same
            for group in groups[2:]:
                group.rewards[:] = 1.0
        engine.begin_step(step)
        engine.accumulate(groups[rank:2:2])
        engine.accumulate(groups[2 + rank :: 2], last=True)
        gaps = engine.compare(make_probes(step))
        assert len(gaps) == (0 if rank else 3)
        result = comparable(engine.apply())
        assert result.pop("actor/grad_norm") > 0
        found.append({"metrics": result, "gaps": gaps, "weights": published(engine, rank) if step % 2 else {}})
        if engine.backend.on_host:
            lend_device(engine)
    return found


def published(engine: Any, rank: int) -> dict[str, torch.Tensor]:
    """This rank's weights; what the ranks publish is no other."""
    sent = weights(engine)
    assert torch.equal(sent["model.norm.weight"], engine.backend.model.decoder.final_layernorm.weight)
    return {name: parameter.detach().clone() for name, parameter in engine.backend.model.named_parameters()}


def lend_device(engine: Any) -> None:
    engine.backend.optimizer.settle()
    held = [tensor for kind in ("param", "grad", "optimizer") for tensor in engine.backend.optimizer.tensors(kind)]
    weights = {parameter: parameter.clone() for parameter in engine.backend.model.parameters()}
    engine.backend.offload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*held, *weights, *engine.backend.gradients()))
    engine.backend.onload()
    assert all(torch.equal(parameter, before) for parameter, before in weights.items())


def assert_same_steps(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for own, other in zip(left, right, strict=True):
        assert own["metrics"] == other["metrics"]
        assert own["weights"].keys() == other["weights"].keys()
        for name, tensor in own["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


class Watch:
    """Of every update, how often each bucket was reduced, and how many of them before the update was finished."""

    def __init__(self, engine: Any):
        self.updates: list[tuple[Counter[int], int]] = []
        self._begun: Counter[int] = Counter()
        updates = engine.backend.optimizer
        self.buckets = len(updates.model.bucket_groups)
        for number, bucket in enumerate(updates.model.bucket_groups):
            bucket.start_grad_sync = partial(self._start, number, bucket, bucket.start_grad_sync)
        self._finish = updates.finish
        updates.finish = self._finished

    def _start(self, number: int, bucket: Any, start: Any, **options: Any) -> None:
        if bucket.grad_reduce_handle is None:
            self._begun[number] += 1
        start(**options)

    def _finished(self) -> float:
        early = len(self._begun)
        squared: float = self._finish()
        self.updates.append((self._begun, early))
        self._begun = Counter()
        return squared


def overlap_member(rank: int, folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        plain = overlap_steps(make_engine(folder, rank, False, dtype), rank)
        use_small_buckets()
        overlapping = make_engine(folder, rank, True, dtype)
        watch = Watch(overlapping)
        assert watch.buckets > 2
        assert_same_steps(overlap_steps(overlapping, rank), plain)
        assert all(set(begun.values()) == {1} and len(begun) == watch.buckets for begun, _ in watch.updates)
        # megatron-core learns in the first update which gradients to wait for.
        assert [early for _, early in watch.updates] == [0] + [watch.buckets] * (OVERLAP_STEPS - 1)
    fail_to_save(engine=overlapping, rank=rank, folder=folder)
    several: dict[str, Any] = {"epochs": 2, "mini_batch_size": 2, "groups_per_step": 4}
    assert_same_steps(
        overlap_steps(make_engine(folder, rank, True, "float32", **several), rank),
        overlap_steps(make_engine(folder, rank, False, "float32", **several), rank),
    )


def fail_to_save(engine: Any, rank: int, folder: Path) -> None:
    """What rank 0 cannot write is told on every rank, by its file."""
    if rank == 0:
        (folder / "saved").mkdir(exist_ok=True)
    write = engine.begin_save(str(folder / "saved"))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(ServiceFault, match=r"trainer rank 0: save: .*saved/megatron/__0_0\.distcp: ") as told:
        write()
    assert "File too large" in str(told.value) or "file write failed" in str(told.value)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def use_small_buckets() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from runtime.trainer.megatron import optimizer

    optimizer.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=BUCKET)


# ---------------------------------------------------- master weights in bfloat16

RATE, UPDATES = 1e-6, 60
BETAS, EPS = (0.9, 0.95), 1e-8
ROUNDING = UPDATES * FLOAT32  # relative: each update rounds a weight once
UPDATE = UPDATES * RATE * 2 * gamma(UPDATES)  # what all updates add up to is as exact as the two moments, sums of so many terms


def test_the_master_weights_follow_the_arithmetic(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    run_ranks(master_member, tmp_path, 1)


def master_member(rank: int, folder: Path) -> None:
    optimizer = {"learning_rate": RATE, "weight_decay": 0.0, "betas": BETAS, "eps": EPS}
    settings = Trainer(engine="megatron")
    config = make_config(str(folder / "policy"), dtype="bfloat16", trainer=settings, optimizer=optimizer)
    engine: Any = policy_trainer(config, rank=rank, world_size=1, device=CPU)
    parameters = dict(engine.backend.model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    expected = {name: Adam(start) for name, start in before.items()}
    torch.manual_seed(1)
    for _ in range(UPDATES):
        engine.backend.clear_gradients()
        for name, parameter in parameters.items():
            # Of one sign, so that what is lost at each update adds up to what is easily seen.
            parameter.main_grad.copy_(torch.rand(parameter.shape))
            expected[name].step(parameter.main_grad.double())
        engine.backend.optimizer.finish()
        engine.backend.optimizer.step(1.0, RATE)
    for name, parameter in parameters.items():
        master = engine.backend.optimizer.gather(parameter)["master"]
        moved = (expected[name].weights - before[name].double()).abs()
        assert moved.min() > 0.5 * RATE * UPDATES
        torch.testing.assert_close(master.double(), expected[name].weights, rtol=ROUNDING, atol=UPDATE, msg=name)
        assert torch.equal(parameter, master.bfloat16())
        large = parameter.abs() > 0.5  # rounded, these are where they began
        assert torch.equal(parameter[large], before[name][large])


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) in float64."""

    def __init__(self, start: torch.Tensor):
        self.weights = start.double()
        self._first, self._second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self._count = 0

    def step(self, gradient: torch.Tensor) -> None:
        self._count += 1
        self._first = BETAS[0] * self._first + (1 - BETAS[0]) * gradient
        self._second = BETAS[1] * self._second + (1 - BETAS[1]) * gradient.square()
        first = self._first / (1 - BETAS[0] ** self._count)
        second = self._second / (1 - BETAS[1] ** self._count)
        self.weights = self.weights - RATE * first / (second.sqrt() + EPS)


# ---------------------------------------------------- the reference

LAYOUTS = {
    "tensor": Parallel(tensor=2),
    "sequence": Parallel(tensor=2, sequence=True),
    "pipeline": Parallel(pipeline=2),
    "context": Parallel(context=2),
    "data": Parallel(),
}
OF_EXPERTS = {"sequence": Parallel(tensor=2, sequence=True), "expert": Parallel(expert=2), "pipeline": Parallel(pipeline=2)}
BUDGET = 60
TEMPERATURES = (0.7, 1.0, 1.3, 1.0, 1.0, 1.0, 0.7)


def reference_requests(routes: Routes | None = None) -> list[LogprobRequest]:
    """Replies some of whose tokens are an environment's, in groups that were sampled at several temperatures; and episodes, in
    the last group without a common prompt. `routes`: with experts at random."""
    groups = [types.decode(GroupPayload, group.payload) for group in make_groups(7, (5, 4, 6, 3, 1), longest=30)]
    groups += [types.decode(GroupPayload, group.payload) for group in make_episodes(7, (2, 3))]
    if routes is not None:
        groups = [with_random_experts(group, routes) for group in groups]
    return [
        LogprobRequest(group_id=index, payload=types.encode(replace(group, group_id=index)), temperature=temperature)
        for index, (group, temperature) in enumerate(zip(groups, TEMPERATURES, strict=True))
    ]


def predicted(request: LogprobRequest) -> np.ndarray:
    """bool [T]: the tokens of a group that something predicts."""
    payload = types.decode(GroupPayload, request.payload)
    rows = [np.arange(length) + len(payload.prompt) > 0 for length in payload.lengths]
    return np.concatenate(rows)


def spread_reference(folder: Path, layouts: dict[str, Parallel]) -> dict[str, dict[int, np.ndarray]]:
    """The values that two ranks find, by layout and group."""
    run_ranks(reference_member, folder, 2, layouts)
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in layouts}
    for file in folder.glob("*-?.npz"):
        found[file.stem[:-2]] |= {int(group): values for group, values in np.load(file).items()}
    return found


def alone(folder: Path, routes: Routes | None) -> dict[int, np.ndarray]:
    """What the torch engine finds."""
    scorer = TorchScorer(str(folder / "policy"), device=CPU, dtype=torch.float32, max_tokens_per_microbatch=BUDGET)
    scorer.routes = routes
    return {result.group_id: result.values for result in scorer.logprobs(reference_requests(routes))}


def config_of(folder: Path, parallel: Parallel) -> Config:
    config = make_config(str(folder / "policy"))
    settings = ReferenceScorer(processes=2, engine="megatron", parallel=parallel, max_tokens_per_microbatch=BUDGET)
    services = replace(config.services, reference=settings)
    return replace(config, services=services, moe=Moe(router_replay="routing"))  # which a model without experts has not


def reference_member(rank: int, folder: Path, layouts: dict[str, Parallel]) -> None:
    for name, parallel in layouts.items():
        config = config_of(folder, parallel)
        from runtime.scoring.reference_rank import MegatronScorer

        scorer = MegatronScorer(config, 2, CPU)
        assert not any(parameter.requires_grad for parameter in scorer._passes.model.parameters())
        leaders = data_leaders(config.services.reference)
        requests = reference_requests(replayed(config, config.model.path))
        share = requests[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        found = scorer.logprobs(share)
        assert [result.group_id for result in found] == [request.group_id for request in share]
        assert scorer.logprobs([]) == []
        if share:
            np.savez(folder / f"{name}-{rank}.npz", **{str(result.group_id): result.values for result in found})
        scorer._grid.close()


@pytest.mark.parametrize(("family", "layouts"), [("qwen3", LAYOUTS), ("qwen3_moe_tied", OF_EXPERTS)], ids=["dense", "experts"])
def test_a_reference_in_every_layout_is_the_torch_engine(tmp_path: Path, family: str, layouts: dict[str, Parallel]) -> None:
    """With experts, both give each token to the experts that it took in the rollout."""
    save_model(tmp_path / "policy", family)
    expected = alone(tmp_path, replayed(config_of(tmp_path, Parallel()), str(tmp_path / "policy")))
    assert set(expected) == set(range(len(TEMPERATURES)))
    assert np.ptp(np.concatenate(list(expected.values()))) > 1
    for layout, found in spread_reference(tmp_path, layouts).items():
        assert found.keys() == expected.keys(), layout
        for request in reference_requests():
            group, counted = request.group_id, predicted(request)
            assert found[group].dtype == expected[group].dtype
            scale = LOGITS / TEMPERATURES[group]
            assert_close(found[group][counted], expected[group][counted], terms=forward_terms(36), scale=scale, what=layout)


# ---------------------------------------------------- a machine without accelerators


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without an accelerator")
def test_on_a_cpu_megatrons_modules_alone_are_changed(tmp_path: Path) -> None:
    run_ranks(on_a_cpu, tmp_path, 1)


def on_a_cpu(rank: int, folder: Path) -> None:
    """In a process that has prepared megatron-core."""
    from runtime.trainer.megatron import facade

    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    assert layers.torch is not torch and layers.torch.nn is torch.nn
    assert layers.torch.cuda.current_device() == CPU
    assert layers.torch.zeros(2, device="cuda").device.type == "cpu"
    with facade.moving(CPU):
        tensor = torch.zeros(1)
        assert tensor.cuda() is tensor and tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.int64).dtype == torch.int64
    own = (torch._C.TensorBase.cuda, torch._C.TensorBase.type, torch._C._VariableFunctions.zeros)
    assert own == (torch.Tensor.cuda, torch.Tensor.type, torch.zeros)
    assert torch.cuda.current_device.__module__ == "torch.cuda"
