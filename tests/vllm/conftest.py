"""Tests with real vLLM, to be run by the interpreter that has it. Starting an engine takes long, so a module shares one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Forked, vLLM's processes need not import it again; nothing here has threads before they are.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")

MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_*.py"] * MISSING


def pytest_report_header() -> list[str]:
    return ["tests/vllm is left out: this interpreter has no vLLM"] * MISSING


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """After all tests: nothing in shared memory, and no folder of an engine's."""
    from tests.system.runs import END, eventually, forgotten, shared_files

    before, folders = shared_files(), left_folders()
    yield
    eventually(lambda: not forgotten(before), END, "that nothing is left in shared memory")
    assert left_folders() <= folders


def left_folders() -> set[Path]:
    """Of engines of which nobody lives."""
    import fcntl
    import tempfile

    from runtime.rollout.vllm.leftovers import PREFIX

    found = set()
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/lock"):
        with lock.open("rb+") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(lock.parent)
            except BlockingIOError:
                continue
    return found


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 128 units and 2 layers. CPU attention of vLLM wants heads of 32."""
    from runtime.models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_model.write_tokenizer(folder)
    shape = tiny_model.Shape(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=256)
    tiny_model.make_model(shape, tokenizer).save_pretrained(folder)
    return folder
