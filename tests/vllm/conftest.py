"""Tests with real vLLM, to be run by the interpreter that has it. Starting an engine takes long, so a module shares one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import vllm  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return "" if "collect_ignore_glob" not in globals() else "tests/vllm is left out: this interpreter has no vLLM"


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


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's own files stay out of the home folder."""
    folder = tmp_path_factory.mktemp("vllm-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield
