"""Tests with real vLLM, to be run by the interpreter that has it. Starting an engine takes long, so a module shares one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Forked, vLLM's processes need not import it again; nothing here has threads before they are.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")

MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_*.py"] * MISSING


def pytest_report_header() -> list[str]:
    return ["tests/vllm is left out: this interpreter has no vLLM"] * MISSING


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 128 units and 2 layers. CPU attention of vLLM wants heads of 32."""
    from runtime.config import Warmup
    from runtime.engines import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_model.write_tokenizer(folder)
    settings = Warmup(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=256)
    tiny_model.make_model(settings, tokenizer).save_pretrained(folder)
    return folder
