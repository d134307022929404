"""What several whole-system tests share: a tiny model with its data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.data import arithmetic
from runtime.models import tiny_model
from tests.system.namespaces import why_not
from tests.system.runs import write_config


def make_tiny(folder: Path, kv_heads: int = 1, hidden_size: int = 32) -> Path:
    """model/ with random weights, train.jsonl and eval.jsonl."""
    shape = tiny_model.Shape(hidden_size=hidden_size, layers=2, heads=2, kv_heads=kv_heads, intermediate_size=64)
    (folder / "model").mkdir(parents=True)
    tokenizer = tiny_model.write_tokenizer(folder / "model")
    tiny_model.make_model(shape, tokenizer).save_pretrained(folder / "model")
    return make_data(folder)


def make_data(folder: Path) -> Path:
    """train.jsonl and eval.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = arithmetic.split(10, 30, 32, 1)
    arithmetic.write_jsonl(folder / "train.jsonl", train)
    arithmetic.write_jsonl(folder / "eval.jsonl", held_out)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A small run on the tiny model; tests override what they need otherwise."""
    return write_config(tmp_path / "config.yaml", tiny)


@pytest.fixture(scope="session")
def warmups() -> Path:
    """A folder of all workers for `warmup.cache`: a model that one test had taught is there for the next."""
    return Path(os.environ["SLUICE_TEST_FOLDER"]) / "warmups"


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what needs nodes of their own network where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
