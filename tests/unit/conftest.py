"""What tests share: one tiny policy, and configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from runtime.config import Config
from runtime.config.loading import load
from runtime.process import spans
from runtime.process.spans import TracedSpan
from tests.unit.config_cases import Loading, model_folder
from tests.unit.training_cases import make_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny policy, to be read alone."""
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def loading(tmp_path: Path) -> Loading:
    """Loads a text as the file of a run."""

    def load_text(text: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path, overrides)

    return load_text


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, Any]:
    """A configuration without faults, as raw YAML data."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    return {
        "run": {"name": "a"},
        "model": {"path": str(model_folder(tmp_path / "model"))},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64},
        "sampling": {"max_new_tokens": 64},
        "rewards": {"rules": [{"name": "accuracy"}]},
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[TracedSpan]:
    """The spans of a test."""
    found: list[TracedSpan] = []
    monkeypatch.setattr(spans.log, "add", lambda *span, **more: found.append(TracedSpan(*span, **more)))
    return found


@pytest.fixture
def validated(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Gives `sluice validate` arguments: its exit code, and what it says, on stderr when it is a mistake."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["validate", *arguments])
        told = capsys.readouterr()
        return int(str(end.value.code)), told.err or told.out

    return run
