"""Starts that fail say why in one line, and what was started dies with the rollout's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.errors import UserError
from runtime.rollout.vllm import leftovers
from tests.vllm.conftest import left_folders
from tests.vllm.rig import Rig

pytestmark = pytest.mark.timeout(900)


def descendants() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


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
        ({}, r"services\.rollout: vLLM did not start: .*NobodyKnowsForCausalLM"),
    ],
    ids=["unknown", "Sluice's own", "too little memory", "a model that it does not support"],
)
def test_arguments_that_do_not_work(
    model_path: Path, tmp_path: Path, options: dict[str, object], fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = model_path if options else with_config(model_path, tmp_path / "model", architectures=["NobodyKnowsForCausalLM"])
    before = descendants()
    # Captured, what a forked process logs would pass by the engine, which reads it for the error.
    with capfd.disabled(), pytest.raises(UserError, match=fault) as caught:
        Rig(model, **options)
    assert "\n" not in str(caught.value)
    until(lambda: descendants() <= before, 60)


CONFIG = """
run: {{name: test, dir: {folder}/run}}
model: {{path: {model}}}
data: {{train: unused.jsonl, max_prompt_tokens: 32}}
sampling: {{max_new_tokens: 32}}
services: {{rollout: {{engine: vllm, max_num_seqs: 4, parallel: {{tensor: 2}}}}}}
deadlines: {{start: 900}}
network: {{security: none}}  # no agent is there to give keys
"""


def test_killed_it_leaves_no_process_and_what_it_leaves_can_be_removed(model_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=model_path))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_WORKER_MULTIPROC_METHOD"}
    with socket.create_server(("127.0.0.1", 0)) as coordinator, (tmp_path / "log").open("wb") as log:
        address = f"127.0.0.1:{coordinator.getsockname()[1]}"  # takes connections and never answers
        command = [sys.executable, "-m", "services.rollout", "--config", str(config), "--name", "rollout-0"]
        rollout = subprocess.Popen([*command, "--coordinator", address], env=environment, stdout=log, stderr=log)
        try:
            process = psutil.Process(rollout.pid)
            until(lambda: started(rollout.pid) or rollout.poll() is not None, 800)
            assert rollout.poll() is None, (tmp_path / "log").read_text()
            family = process.children(recursive=True)
        finally:
            rollout.send_signal(signal.SIGKILL)
            rollout.wait(60)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []
    assert left_folders()
    leftovers.clear()  # as the one that comes in its place does
    assert not left_folders()


def started(rollout: int) -> bool:
    """Whether the engine of this process has started all of its own, and noted what they share."""
    noted = Path(tempfile.gettempdir()).glob(f"{leftovers.PREFIX}*/shared")
    return any(str(note.with_name("lock")) in held(rollout) and note.read_text() for note in noted)


def held(process: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(file))  # noqa: PTH115
    return found


def until(holds: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_memory_that_is_too_little_for_all_slots_is_told_and_so_is_who_lost_it(model_path: Path) -> None:
    blocks = 12 * 128 * 1024  # bytes: 12 of 128 tokens, and 16 sequences of 350 tokens need three each
    with Rig(model_path, engine_args={"kv_cache_memory_bytes": blocks}) as rig:
        rig.begin(rig.request(n=16, tokens=200), tokens=16 * 20)
        stats = rig.engine.stats()
        assert stats.kv_shared and stats.kv_use > 0.8
        payload = rig.finish_one()
        assert len(payload.samples) == 16
        assert rig.engine.stats().preemptions > 0
        rig.check_exact(payload.samples)
