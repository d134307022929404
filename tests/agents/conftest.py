"""Tests with stock clients and agents, to be run by the interpreter of .venv-agents. The gateway is another process.

SLUICE_TEST_GATEWAY_URL and SLUICE_TEST_GATEWAY_KEY name one that is running, in place of the scripted one; what holds of the
script alone is skipped then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
PATIENCE = 120.0  # seconds for an answer, on a busy machine
MISSING = any(importlib.util.find_spec(name) is None for name in ("openai", "anthropic", "agents", "minisweagent"))
collect_ignore_glob = ["test_*.py"] * MISSING
sys.path.insert(0, str(ROOT / "configs" / "agents"))  # as for a file in it


def pytest_configure() -> None:
    """Nothing of the agents' own in the home folder, and no look for prices on the network."""
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = f"{os.environ['SLUICE_TEST_FOLDER']}/mini-swe-agent"  # tests/conftest.py made it
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def pytest_report_header() -> list[str]:
    return ["tests/agents is left out: this interpreter has no agents; make install-agents"] * MISSING


class Gateway(NamedTuple):
    url: str
    key: str
    scripted: bool


class Episode(NamedTuple):
    """`url`: to which OpenAI's clients need "/v1" added, and Anthropic's nothing."""

    url: str
    key: str
    id: str


@pytest.fixture(scope="module")  # nothing may outlive a module: tests/conftest.py
def gateway() -> Iterator[Gateway]:
    if url := os.environ.get("SLUICE_TEST_GATEWAY_URL"):
        yield Gateway(url, os.environ["SLUICE_TEST_GATEWAY_KEY"], scripted=False)
        return
    program = [str(PYTHON), "-m", "tests.agents.scripted_server"]
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Gateway(**json.loads(process.stdout.readline()), scripted=True)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


def posted(url: str, path: str, body: Mapping[str, Any], key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


@pytest.fixture
def scripted(gateway: Gateway) -> None:
    if not gateway.scripted:
        pytest.skip("needs the scripted gateway, which says what it is told")


@pytest.fixture
def post(gateway: Gateway) -> Callable[..., Any]:
    def send(path: str, body: dict[str, Any], key: str = gateway.key) -> Any:
        """The answer of one of the gateway's own routes."""
        return posted(gateway.url, path, body, key)

    return send


@pytest.fixture
def episode(gateway: Gateway, post: Callable[..., Any]) -> Iterator[Episode]:
    """Of one test; ended behind it."""
    begun = post("/v1/episodes", {"wait": 60})
    yield Episode(gateway.url + begun["base"], begun["key"], begun["id"])
    post(f"/v1/episodes/{begun['id']}/end", {"stop_reason": "completed"}, begun["key"])


@pytest.fixture
def verifiers_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it keeps in the home folder, elsewhere."""
    runtime = pytest.importorskip("verifiers.v1.runtimes.subprocess")
    monkeypatch.setattr(runtime, "CACHE_DIR", tmp_path / "cache")
