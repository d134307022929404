"""Starts that fail say why in one line, and what was started dies with the rollout's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from runtime.errors import UserError
from tests.vllm.rig import Rig

pytestmark = pytest.mark.timeout(900)


def descendants() -> set[int]:
    return {
        child.pid for child in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())
    }


def with_config(path: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"engine_args": {"block_sise": 16}}, "this vLLM has no such argument; nearest is 'block_size'"),
        ({"engine_args": {"dtype": "float64"}}, "services.rollout.engine_args.dtype: Sluice sets it"),
        ({"engine_args": {"kv_cache_memory_bytes": 300_000}}, "services.rollout: vLLM did not start: ValueError: .*KV cache"),
    ],
)
def test_arguments_that_do_not_work(
    model_path: Path, options: dict[str, object], fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = descendants()
    # Captured, what a forked process logs would pass by the engine, which reads it for the error.
    with capfd.disabled(), pytest.raises(UserError, match=fault) as caught:
        Rig(model_path, **options)
    assert "\n" not in str(caught.value)
    until(lambda: descendants() <= before, 20)


def test_a_model_that_vllm_does_not_support(model_path: Path, tmp_path: Path) -> None:
    folder = with_config(model_path, tmp_path / "model", architectures=["NobodyKnowsForCausalLM"])
    before = descendants()
    with pytest.raises(UserError, match=r"services\.rollout: vLLM did not start: .*NobodyKnowsForCausalLM") as caught:
        Rig(folder)
    assert "\n" not in str(caught.value)
    assert descendants() <= before


CONFIG = """
run: {{name: test, dir: {folder}/run}}
model: {{path: {model}}}
data: {{train: unused.jsonl, max_prompt_tokens: 32}}
sampling: {{max_new_tokens: 32}}
services: {{rollout: {{engine: vllm, slots: 4}}}}
deadlines: {{start: 900}}
"""


def test_killed_it_leaves_no_process(model_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model_path))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_WORKER_MULTIPROC_METHOD"}
    with socket.create_server(("127.0.0.1", 0)) as coordinator, (tmp_path / "log").open("wb") as log:
        address = f"127.0.0.1:{coordinator.getsockname()[1]}"  # takes connections and never answers
        command = [sys.executable, "-m", "services.rollout", "--config", str(config), "--name", "rollout-0"]
        rollout = subprocess.Popen([*command, "--coordinator", address], env=environment, stdout=log, stderr=log)
        try:
            process = psutil.Process(rollout.pid)
            until(lambda: has_worker(process) or rollout.poll() is not None, 800)
            assert rollout.poll() is None, (tmp_path / "log").read_text()
            family = process.children(recursive=True)
        finally:
            rollout.send_signal(signal.SIGKILL)
            rollout.wait(10)
        _, alive = psutil.wait_procs(family, timeout=15)
        assert alive == []


def has_worker(process: psutil.Process) -> bool:
    """Whether the engine has started its worker. Before it, vLLM inspects the model in a process that ends by itself."""
    children = [(child, " ".join(child.cmdline())) for child in process.children()]
    return any(child.children() for child, command in children if "spawn_main" in command or "VLLM" in command)


def until(holds: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.1)
