"""What is said to vLLM and refused before it is asked, what its processes print and leave behind. Needs no vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from runtime.config import Config, Model, Moe, RolloutParallel, Run, Services, Warmup, loading
from runtime.config.checks import semantic_faults
from runtime.config.service_checks import _parallel_faults
from runtime.errors import InvalidMessage, UserError
from runtime.models import tiny_model
from runtime.models.families import family_for
from runtime.models.hf_folder import read_raw
from runtime.models.vllm_sharding import undeclared, workers_sharding
from runtime.rollout.vllm import arguments, leftovers, shim
from runtime.rollout.vllm import engine as rollout_vllm
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from runtime.rollout.vllm.leftovers import Leftovers
from runtime.rollout.vllm.shim import Output
from runtime.rollout.vllm.worker import MENDABLE, Buffers, Location, locate, mapped
from runtime.types import SamplingParams
from runtime.weights.group import memory_file
from runtime.weights.plan import Cut, TensorSpec
from services.rollout import make_engine
from tests.loopback.ranks import Helper
from tests.unit.rollout_cases import request
from tests.unit.training_cases import make_policy

SPREADS = [("qwen3_moe", {"tensor": 2}), ("qwen3_moe", {"tensor": 2, "expert": 2}), ("gpt_oss", {"tensor": 2})]


@pytest.mark.parametrize(("family", "parallel"), SPREADS)
def test_workers_share_out_experts_as_vllm_does(family: str, parallel: dict[str, int], tmp_path: Path) -> None:
    """Or say that it is unknown. What vLLM reads of all layers, with data parallelism, is compared in tests/vllm."""
    made = Config(run=Run(name="a"), model=Model(path=f"tiny:{family}"), warmup=Warmup(cache=str(tmp_path)))
    path = tiny_model.made(made).model.path
    services = msgspec.convert({"rollout": {"engine": "vllm", "parallel": parallel}}, Services)
    config = replace(made, model=Model(path=path), services=services)
    specs = [TensorSpec(name, "float32", shape) for name, shape in family_for(read_raw(path), mapped=False).tensors().items()]
    sharding, note = workers_sharding(config, specs), undeclared(config)
    found = {spec.name: (spec.shape, sharding.cut(index)) for index, spec in enumerate(specs)}
    if family == "gpt_oss":
        assert note is not None and "2 workers share out 4 matrices whole" in note and "mlp.experts.gate_up_proj" in note
        return
    assert note is None
    for name, (shape, cut) in found.items():
        if "experts" in name:
            number, dim = int(name.split(".")[5]), int("down" in name)
            assert cut == (Cut(((number // 4,),)) if "expert" in parallel else Cut(((0,), (1,)), dim, shape[dim] // 2))


def test_a_stage_needs_its_layers_at_every_rank_and_parts_of_experts_are_over_all_ranks(tmp_path: Path) -> None:
    made = Config(run=Run(name="a"), model=Model(path="tiny:qwen3_moe"), warmup=Warmup(cache=str(tmp_path)))
    path = tiny_model.made(made).model.path
    services = msgspec.convert({"rollout": {"engine": "vllm", "parallel": {"pipeline": 2, "data": 2}}}, Services)
    config = replace(made, model=Model(path=path), services=services)
    shapes = family_for(read_raw(path), mapped=False).tensors()
    names = {"embed": "model.embed_tokens.weight", "query": "model.layers.1.self_attn.q_proj.weight"}
    names["expert"] = "model.layers.1.mlp.experts.0.gate_proj.weight"
    sharding = workers_sharding(config, [TensorSpec(name, "float32", shapes[name]) for name in names.values()])
    holders = {name: sharding.cut(index).holders for index, name in enumerate(names)}
    assert holders == {"embed": ((0, 1, 2, 3),), "query": ((1, 3),), "expert": ((1,), (3,))}


def test_each_node_of_an_engine_over_several_gets_whole_weights_by_its_own_workers() -> None:
    services = msgspec.convert({"rollout": {"engine": "vllm", "parallel": {"tensor": 4, "nodes": 2}}}, Services)
    config = Config(run=Run(name="a"), services=services)
    sharding = workers_sharding(config, [TensorSpec("model.layers.0.self_attn.q_proj.weight", "float32", (8, 8))])
    assert (sharding.members, sharding.cut(0)) == (2, Cut(((0, 1),)))
    assert undeclared(config) is None


def test_a_fault_that_vllm_finds_shows_no_arguments_values() -> None:
    text = "1 validation error\n  Value error, too many [type=value_error, input_value=ArgsKwargs({'hf_token': 's3cr3t'})]\n"
    assert shim.OutputRelay().reason(ValueError(text)) == "ValueError: too many"
    assert shim.OutputRelay().reason(ValueError("Value error, [type] is missing\nmore")) == "ValueError: [type] is missing"


def test_secrets_reach_vllm_from_the_processs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM refuses to start once it has its arguments."""

    @dataclasses.dataclass
    class AsyncEngineArgs:
        hf_token: str = ""
        model: str = ""

        def create_engine_config(self) -> None:
            found.append(self.hf_token)
            raise ValueError("that is all")

    found: list[str] = []
    for name, content in {
        "vllm.engine.arg_utils": AsyncEngineArgs,
        "vllm.v1.engine.async_llm": type("AsyncLLM", (), {}),
    }.items():
        module = types.ModuleType(name)
        setattr(module, content.__name__, content)
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("MINE", "s3cr3t")
    with pytest.raises(UserError, match="that is all"):
        shim.Core({"model": "m"}, {"hf_token": {"from": "MINE"}})
    with pytest.raises(UserError, match=r"engine_args.hf_token: \{from: NONE\}: this machine's environment has no NONE"):
        shim.Core({"model": "m"}, {"hf_token": {"from": "NONE"}})
    assert found == ["s3cr3t"]


def test_sampling_options_keep_their_meaning() -> None:
    ours = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, stop_token_ids=(5, 6))
    assert arguments.as_vllm(ours, 11) == {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 11,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_every_sample_has_a_seed_of_its_own() -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63]
    drawn = [arguments.sample_seed(seed, sample) for seed, sample in itertools.product(seeds, range(50))]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert arguments.sample_seed(5, 1) == arguments.sample_seed(5, 1)


def test_a_temperature_that_vllm_would_change() -> None:
    for temperature in (0.0, 0.01, 1.0):
        arguments.check_temperature(request(7, temperature=temperature))
    with pytest.raises(InvalidMessage, match=r"group 7: temperature is 0\.005"):
        arguments.check_temperature(request(7, temperature=0.005))


def test_arguments_that_sluice_sets_or_does_not_know() -> None:
    (fault,) = arguments.own_faults({"max_num_seqs": 3, "block_size": 16})
    assert fault == "services.rollout.engine_args.max_num_seqs: Sluice sets it; services.rollout.max_num_seqs decides it"
    (fault,) = arguments.unknown_faults({"block_sise": 16}, ["block_size", "gpu_memory_utilization"])
    assert fault == "services.rollout.engine_args.block_sise: this vLLM has no such argument; nearest is 'block_size'"


def test_what_vllm_ascend_must_have_off() -> None:
    """Whatever its mode for reinforcement learning says, which its older releases do not know."""
    key = "services.rollout.engine_args.additional_config"
    given = {"weight_nz_mode": 2, "enable_reduce_sample": True, "rl_config": {"enabled": True}}
    assert list(arguments.own_faults({"additional_config": given})) == [
        f"{key}.weight_nz_mode: 2; must be 0: new weights cannot be loaded into the NPU format FRACTAL_NZ",
        f"{key}.enable_reduce_sample: True; must be false: log-probabilities would be of a part of the vocabulary",
    ]
    for value in ("0", None, 1, True):  # the release takes a text for true
        (fault,) = arguments.own_faults({"additional_config": {"weight_nz_mode": value}}, "services.rollout.1.engine_args")
        assert fault.startswith(f"services.rollout.1.engine_args.additional_config.weight_nz_mode: {value!r}; must be 0: ")
    (fault,) = arguments.own_faults({"additional_config": "{}"})
    assert fault == f"{key}: '{{}}'; must be a mapping"
    for right in ({}, {"weight_nz_mode": 0, "enable_reduce_sample": False}, {"rl_config": {"enabled": True}}):
        assert not list(arguments.own_faults({"additional_config": right}))


def test_on_npus_weights_keep_a_layout_that_can_be_loaded(tmp_path: Path) -> None:
    """Also if the user configures the plugin otherwise."""

    def given(device: str, user: dict[str, Any]) -> dict[str, Any]:
        own = rollout_vllm._arguments(
            "m", {}, cast(Any, types.SimpleNamespace(type=device)), torch.bfloat16, 4, 64, RolloutParallel()
        )
        return arguments.with_plugin(own, user)

    mode = {"rl_config": {"enabled": True}}
    assert given("npu", {})["additional_config"] == {"weight_nz_mode": 0}
    assert given("npu", {"additional_config": mode, "seed": 1})["additional_config"] == {"weight_nz_mode": 0, **mode}
    assert given("npu", {"seed": 1, "enforce_eager": True})["enforce_eager"]
    assert "additional_config" not in given("cuda", {})
    assert given("cuda", {"additional_config": mode})["additional_config"] == mode


# ------------------------------------------------------------------------------------------------ configuration

CONFIG = """
run: {name: test}
warmup: {}
rewards: {rules: [{name: format}]}
"""


def faults_of(tmp_path: Path, *overrides: str) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return [line for line in semantic_faults(loading.load(path, overrides)) if "rollout" in line or "temperature" in line]


KEPT = "needs rollouts of engine torch: vllm reports no kept sets"
VLLM = ("services.rollout.engine=vllm", f"services.rollout.python={sys.executable}")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (("services.rollout.parallel.tensor=2",), "services.rollout.parallel: is for engine vllm"),
        (("services.rollout.engine_args={block_size: 16}",), "services.rollout.engine_args: is for engine vllm"),
        (
            (*VLLM, "services.rollout.engine_args={seed: 3, model: other}"),
            "services.rollout.engine_args.model: Sluice sets it; model.path decides it",
        ),
        (
            (*VLLM, "services.rollout.parallel.tensor=3"),
            "services.rollout.parallel.tensor: 3 does not divide the model's 4 attention heads",
        ),
        (
            (*VLLM, "evaluation.temperature=0.001"),
            "evaluation.temperature: 0.001 is too low for engine vllm; must be 0 or at least 0.01",
        ),
        (
            (*VLLM, "services.rollout.parallel={tensor: 2, data: 2, expert: 2}"),
            "services.rollout.parallel.expert: 2; vllm spreads experts over tensor × data devices: must be 4, or 1",
        ),
        (
            (*VLLM, "services.rollout.parallel={tensor: 2, expert: 2}"),
            "services.rollout.parallel.expert: 2 is for models with experts, and model.path has none; must be 1",
        ),
        (
            (*VLLM, "services.rollout.parallel.pipeline=5"),
            "services.rollout.parallel.pipeline: 5 stages, but the model has 4 layers; must be at most that",
        ),
        ((*VLLM, "sampling.top_p=0.9"), f"sampling.top_p: 0.9 {KEPT}; must be 1.0"),
        ((*VLLM, "sampling.top_k=5"), f"sampling.top_k: 5 {KEPT}; must be 0"),
    ],
)
def test_faults_are_found_without_vllm(tmp_path: Path, overrides: tuple[str, ...], fault: str) -> None:
    assert faults_of(tmp_path, *overrides) == [fault]


CANNOT = [
    ("qwen3_moe", {"tensor": 2, "expert": 2}, "expert: 2; must be 1 on CPUs, for which vllm has a kernel of experts"),
    ("qwen3_moe", {"data": 2}, "data: 2; must be 1 on CPUs, for which vllm has no exchange of tokens between ranks"),
    ("qwen2", {"data": 2, "pipeline": 2}, "pipeline: 2; must be 1 on CPUs, for which vllm has no buffers for what a stage"),
]


@pytest.mark.parametrize(("family", "parallel", "fault"), CANNOT)
def test_on_cpus_a_rollout_refuses_what_vllm_lacks_there(
    family: str, parallel: dict[str, int], fault: str, tmp_path: Path
) -> None:
    config = Config(run=Run(name="a"), model=Model(path=f"tiny:{family}"), warmup=Warmup(cache=str(tmp_path)))
    services = msgspec.convert({"rollout": {"engine": "vllm", "parallel": parallel}}, Services)
    with pytest.raises(UserError, match=f"^services.rollout.parallel.{fault}"):
        make_engine(replace(tiny_model.made(config), services=services), "rollout-0")


def test_experts_of_families_that_only_vllm_knows_are_counted() -> None:
    model = {"model_type": "qwen3_next", "num_attention_heads": 8, "num_experts": 6}
    parallel = RolloutParallel(tensor=4, expert=4)
    assert list(_parallel_faults(parallel, Moe(), model)) == ["expert: 4 does not divide the model's 6 experts"]
    assert not list(_parallel_faults(parallel, Moe(), {**model, "num_experts": 8}))
    none = "expert: 4 is for models with experts, and model.path has none; must be 1"
    assert list(_parallel_faults(parallel, Moe(), {**model, "model_type": "olmo3", "num_experts": 0})) == [none]


# ------------------------------------------------------------------------------------------------ shared buffers


def read_sums(connection: Any) -> None:
    before = Buffers()
    while True:  # one load each
        buffers, locations = Buffers(), [Location(*fields) for fields in connection.recv()]
        sums = [mapped(location, buffers, before).double().sum().item() for location in locations]
        connection.send([*sums, sum(buffers[path] is before.get(path) for path in buffers)])
        before = buffers


def test_another_process_reads_what_was_staged_and_keeps_what_stays() -> None:
    buffer = memory_file(4096)
    assert not buffer.any()
    staged: dict[str, Any] = {
        "a": buffer[64:104].view(torch.float32).view(2, 5).fill_(2.5),
        "b": buffer[128:136].view(torch.bfloat16).fill_(1.0),
        "elsewhere": torch.arange(6.0).view(2, 3).t(),
    }
    locations, copies = locate(staged)
    assert len(copies) == 1  # what lies in a shared buffer is not copied
    reader = Helper(read_sums)
    try:
        reader.tell(*map(tuple, locations))
        assert reader.hear() == [25.0, 4.0, 15.0, 0]
        del copies  # its descriptor's number goes to the next file
        staged["a"].fill_(1.0)
        staged["elsewhere"] = torch.ones(3, 2)
        locations, copies = locate(staged)
        assert len(copies) == 1
        reader.tell(*map(tuple, locations))
        assert reader.hear() == [10.0, 4.0, 6.0, 1]  # only the buffer that is still there stays mapped
    finally:
        reader.end()


def test_a_buffer_goes_with_its_last_view() -> None:
    buffer = memory_file(64)
    view = buffer[8:16]
    del buffer
    locations, copies = locate({"view": view})
    assert copies == []
    held = Path(locations[0].path)
    assert "sluice-weights" in str(held.readlink())
    del view
    assert not held.exists() or "sluice-weights" not in str(held.readlink())  # the number may be another file's


# ------------------------------------------------------------------------------------------------ errors of its processes

PRINTED = """
(EngineCore pid=12) INFO 11-21 17:57:53 [core.py:185] local_world_size=1
(Worker pid=13) ERROR 11-21 17:46:14 [multiproc_executor.py:1055] Traceback (most recent call last):
(Worker pid=13) ERROR 11-21 17:46:14 [multiproc_executor.py:1055] RuntimeError: head_dim=16 is not supported
(EngineCore pid=12) ERROR 11-21 17:46:14 [core.py:1368] RuntimeError: Worker failed with error 'head_dim=16 is not supported', \
please check the stack trace above for the root cause
Traceback (most recent call last):
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


def test_the_error_behind_the_errors_is_found() -> None:
    assert shim.last_error(PRINTED) == "RuntimeError: head_dim=16 is not supported"
    assert shim.last_error("INFO all is well\nAn Error: none\n") == ""


def test_what_children_print_is_passed_on_and_kept() -> None:
    script = (
        "import subprocess, sys, time\n"
        "from runtime.rollout.vllm.shim import OutputRelay\n"
        "made = OutputRelay()\n"
        "with made:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import sys; print(\"out\"); sys.exit(\"ValueError: no\")'])\n"
        "child.wait()\n"
        "while not made.error(): time.sleep(0.01)\n"
        "print('own', made.error())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "own ValueError: no\n"
    assert done.stderr.split() == ["out", "ValueError:", "no"]


# ------------------------------------------------------------------------------------------------ what its processes leave

MEETING = "vllm_dist_0123"
NOTED, NAMED_AFTER, ANOTHERS = "psm_1", f"{MEETING}-tp:0-[0-1]-cpushm_0", "psm_2"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, with files of one engine, and of another."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in (NOTED, NAMED_AFTER, ANOTHERS):
        (folder / name).write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(leftovers, "SHARED", folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return folder


def leaving() -> Leftovers:
    made = Leftovers()
    with made.starting():
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(made._folder)
        (Path(tempfile.gettempdir()) / MEETING).write_text("")
    made._names.add(NOTED)
    made.note()
    return made


def left(shared: Path) -> tuple[set[str], int]:
    """Files in shared memory, and folders of engines."""
    return {file.name for file in shared.iterdir()}, len(list(Path(tempfile.gettempdir()).iterdir()))


def test_it_goes_with_the_engine(shared: Path) -> None:
    variables = dict(os.environ)
    made = leaving()
    assert dict(os.environ) == variables
    made.remove()
    made.remove()
    assert left(shared) == ({ANOTHERS}, 0)


@pytest.mark.parametrize(("longest", "beside"), [(1000, False), (10, True)])
def test_sockets_go_with_the_engine_too_where_their_paths_are_short_enough(
    shared: Path, monkeypatch: pytest.MonkeyPatch, longest: int, beside: bool
) -> None:
    monkeypatch.setattr(leftovers, "_PATH_BYTES", longest)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    usual, made = tempfile.gettempdir(), Leftovers()
    with made.starting():
        assert os.environ["VLLM_RPC_BASE_PATH"] == (usual if beside else str(made._folder))
    made.remove()


def test_what_a_killed_engine_left_goes_with_the_next_and_what_is_in_use_stays(shared: Path) -> None:
    made = leaving()
    leftovers.clear()
    assert left(shared) == ({NOTED, NAMED_AFTER, ANOTHERS}, 1)
    os.close(made._lock)  # as the kernel does
    Leftovers().remove()
    assert left(shared) == ({ANOTHERS}, 0)


def test_names_that_are_not_vllms_are_not_noted() -> None:
    names = ("psm_00e1b003", "vllm_dist_5d09-tp:0-[0-1]-cpushm_1", "29500-tp:0-[0-1]-cpushm_0", "sem.ga4gVC", "torch_1_2")
    assert [bool(leftovers._OF_VLLM.match(name)) for name in names] == [True, True, True, False, False]


# ------------------------------------------------------------------------------------------------ with all slots taken

SLOTS = 2


class Core:
    dead = False
    vocabulary = 61

    def __init__(self, own: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.own = own
        self.asked: list[int] = []  # the prompts' first tokens
        self.ranks: list[int] = []

    async def add(self, request_id: str, prompt: list[int], sampling: dict[str, Any], salt: str, rank: int) -> None:
        self.asked.append(prompt[0])
        self.ranks.append(rank)


def test_an_engine_over_nodes_needs_the_newest_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", cast(Any, types.SimpleNamespace(__version__="0.23.0")))
    shim.check_version()
    with pytest.raises(
        UserError, match=r"^services\.rollout\.parallel\.nodes: 2 needs vllm 0\.30, and this is 0\.23\.0; must be 1"
    ):
        shim.check_version(nodes=2)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VLLMRolloutEngine]:
    monkeypatch.setattr(rollout_vllm, "Core", Core)
    for name in ("prepare_environment", "check_version"):
        monkeypatch.setattr(rollout_vllm, name, lambda *_: None)
    options: dict[str, Any] = {"name": "rollout-0", "device": torch.device("cpu"), "dtype": torch.float32}
    return partial(VLLMRolloutEngine, make_policy(tmp_path), **options, max_model_len=64, swap_timeout=1.0)


def test_a_sample_goes_to_the_rank_with_the_fewest(made: Callable[..., VLLMRolloutEngine]) -> None:
    """A rank may have all that it can get: one more than the fewest, of the slots and a probe's."""
    engine = made(slots=5, parallel=RolloutParallel(data=2))
    core: Any = engine._core
    assert (core.own["data_parallel_size"], core.own["max_num_seqs"]) == (2, 3)
    engine.submit([request(1, n=4, prompt=(1,)), request(2, n=2, prompt=(2,))])
    asyncio.run(engine._feed())
    assert core.ranks == [0, 1, 0, 1, 0]
    engine._record([Output(number, [5], np.zeros(1, np.float32), "stop", 0) for number in ("1", "3")])
    engine.submit([request(3, n=1, prompt=(3,))])
    asyncio.run(engine._feed())
    assert core.ranks[5:] == [0, 0]


def test_weights_that_no_worker_of_any_rank_reads_are_a_fault_and_so_is_each_workers() -> None:
    core: Any = shim.Core.__new__(shim.Core)
    core._ranks = [b"0", b"1"]

    def loaded(*answers: list[list[str]]) -> list[str]:
        async def answer(method: str, *arguments: Any, engine: bytes) -> list[list[str]]:
            assert method == "collective_rpc" and arguments[0] == "sluice_load"
            return answers[int(engine)]

        core._core = types.SimpleNamespace(_call_utility_async=answer)
        found: list[str] = asyncio.run(core.load([], True, True))
        return found

    assert not loaded([["", "a", "b"], ["", "c"]], [["", "b"], ["", "a"]])
    (fault,) = loaded([["", "a", "b"], ["", "c", "b"]], [["", "b"], ["", "b", "a"]])
    assert fault.startswith(MENDABLE) and "1 published weights have no place in it: b;" in fault
    assert loaded([["", "b"], ["", "b"]], [["", "b"], ["no"]]) == ["worker 3: no"]


def test_a_probe_goes_before_all_that_wait_into_a_sequence_of_its_own(made: Callable[..., VLLMRolloutEngine]) -> None:
    engine = made(slots=SLOTS)
    core: Any = engine._core
    assert core.own["max_num_seqs"] == SLOTS + 1
    engine.submit([request(1, n=3, prompt=(1,)), request(2, n=2, prompt=(2,))])
    asyncio.run(engine._feed())
    assert core.asked == [1, 1]
    probes = [request(group_id, n=1, prompt=(9 + group_id,)) for group_id in (-1, -2)]
    probes = [replace(probe, purpose="probe") for probe in probes]
    engine.submit(probes[:1])
    asyncio.run(engine._feed())
    engine.submit(probes[1:])  # there is one such sequence
    asyncio.run(engine._feed())
    assert core.asked == [1, 1, 8]
