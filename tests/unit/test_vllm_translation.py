"""What is said to vLLM, and what is refused before it is asked. Needs no vLLM."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import loading
from runtime.config.checks import semantic_faults
from runtime.errors import InvalidMessage, UserError
from runtime.rollout.vllm import arguments, relay, shim
from runtime.types import GroupRequest, SamplingParams
from runtime.weights.group import Location, locate, memory_file


def request(temperature: float) -> GroupRequest:
    chosen = SamplingParams(max_new_tokens=4, temperature=temperature)
    return GroupRequest(group_id=7, prompt=np.array([1], np.int32), n=1, seed=3, sampling=chosen)


def test_a_fault_that_vllm_finds_shows_no_arguments_values() -> None:
    text = "1 validation error\n  Value error, too many [type=value_error, input_value=ArgsKwargs({'hf_token': 's3cr3t'})]\n"
    assert relay.OutputRelay().reason(ValueError(text)) == "ValueError: too many"
    assert relay.OutputRelay().reason(ValueError("Value error, [type] is missing\nmore")) == "ValueError: [type] is missing"


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


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_temperatures_that_vllm_takes(temperature: float) -> None:
    arguments.check_temperature(request(temperature))


def test_a_temperature_that_vllm_would_change() -> None:
    with pytest.raises(InvalidMessage, match=r"group 7: temperature is 0\.005"):
        arguments.check_temperature(request(0.005))


def test_arguments_that_sluice_sets() -> None:
    faults = list(arguments.own_faults({"max_num_seqs": 3, "block_size": 16}))
    assert faults == ["services.rollout.engine_args.max_num_seqs: Sluice sets it; services.rollout.slots decides it"]


def test_unknown_arguments_name_the_nearest() -> None:
    faults = list(arguments.unknown_faults({"block_sise": 16}, ["block_size", "gpu_memory_utilization"]))
    assert faults == ["services.rollout.engine_args.block_sise: this vLLM has no such argument; nearest is 'block_size'"]


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


VLLM = ("services.rollout.engine=vllm", f"services.rollout.python={sys.executable}")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (("services.rollout.tensor_parallel=2",), "services.rollout.tensor_parallel: is for engine vllm"),
        (("services.rollout.engine_args={block_size: 16}",), "services.rollout.engine_args: is for engine vllm"),
        (
            (*VLLM, "services.rollout.engine_args={seed: 3, model: other}"),
            "services.rollout.engine_args.model: Sluice sets it; model.path decides it",
        ),
        (
            (*VLLM, "services.rollout.tensor_parallel=3"),
            "services.rollout.tensor_parallel: 3 does not divide the model's 4 attention heads",
        ),
        (
            (*VLLM, "evaluation.temperature=0.001"),
            "evaluation.temperature: 0.001 is too low for engine vllm; must be 0 or at least 0.01",
        ),
        (
            (*VLLM, "sampling.top_p=0.9"),
            "sampling.top_p: 0.9 needs rollouts of engine torch: vllm tells no kept sets; must be 1.0",
        ),
        (
            (*VLLM, "sampling.top_k=5"),
            "sampling.top_k: 5 needs rollouts of engine torch: vllm tells no kept sets; must be 0",
        ),
    ],
)
def test_faults_are_found_without_vllm(tmp_path: Path, overrides: tuple[str, ...], fault: str) -> None:
    assert faults_of(tmp_path, *overrides) == [fault]


def test_a_good_configuration(tmp_path: Path) -> None:
    assert faults_of(tmp_path, *VLLM, "services.rollout.engine_args={gpu_memory_utilization: 0.8}") == []


# ------------------------------------------------------------------------------------------------ shared buffers

READER = """
import json, sys
from runtime.weights.group import Location, Mapped
mapped = Mapped()
print([mapped.tensor(Location(*fields)).double().sum().item() for fields in json.loads(sys.argv[1])])
"""


def read_elsewhere(locations: list[Location]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(locations)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_reads_what_was_staged() -> None:
    buffer = memory_file(4096)
    assert not buffer.any()
    staged: dict[str, Any] = {
        "a": buffer[64:104].view(torch.float32).view(2, 5).fill_(2.5),
        "b": buffer[128:136].view(torch.bfloat16).fill_(1.0),
        "elsewhere": torch.arange(6.0).view(2, 3).t(),
    }
    locations, copies = locate(staged)
    assert len(copies) == 1  # what lies in a shared buffer is not copied
    assert read_elsewhere(locations) == "[25.0, 4.0, 15.0]"


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
    assert relay.last_error(PRINTED) == "RuntimeError: head_dim=16 is not supported"
    assert relay.last_error("INFO all is well\nAn Error: none\n") == ""


def test_what_children_print_is_passed_on_and_kept() -> None:
    script = (
        "import subprocess, sys, time\n"
        "from runtime.rollout.vllm.relay import OutputRelay\n"
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
