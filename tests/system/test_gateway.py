"""Runs whose tasks are played as episodes: none is lost when gateways, agents and rollouts are killed or stopped; a program of
one's own asks for them; `sluice serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.system.runs import SOON, check_gone, eventually, here, sluice, started, steps, summary, write_config

pytestmark = pytest.mark.timeout(400)

AGENT = f"{Path(__file__).with_name('gateway_agent.py')}:run"
PROGRAM = Path(__file__).with_name("gateway_program.py")
STEPS = 6
BACK = 150.0  # seconds until a process has loaded again, on a busy machine
NO_REFERENCE = {"kl_coefficient": 0.0}
LONG = "training.steps=100000"  # nobody waits for its end
AGENTS = Path(__file__).with_name("agents_of_two_kinds.py")
SUMS = {"messages": [{"role": "user", "content": "1+1="}], "label": "2"}
TWO = {"sums": {"run": f"{AGENTS}:sums", "concurrency": 64}, "maze": {"run": f"{AGENTS}:Maze", "replicas": 2}}
MIXED = [SUMS | {"who": "sums"}, {"who": "maze", "walls": 3}] * 8  # each row names its environment
FAULTS = [  # environment-0 is alone of its kind, environment-2 one of two
    *(("kill", name) for name in ("gateway-0", "rollout-1", "environment-0", "environment-2")),
    *(("suspend", name) for name in ("gateway-1", "environment-1")),
    ("kill", "coordinator"),
]


def written(tiny: Path, folder: Path, **services: object) -> Path:
    """A run of episodes, which are rewarded by who plays them."""
    return write_config(
        folder / "config.yaml",
        tiny,
        rewards={"rules": []},
        gateway={"context": 96},
        algorithm=NO_REFERENCE,
        training={"steps": STEPS},
        evaluation={"before": False, "after": False},
        services=services,
    )


def with_tasks(tiny: Path, folder: Path, rows: list[Any], environment: dict[str, Any], **data: Any) -> Path:
    """A run of the tasks `rows`, rewarded by who plays them alone."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_config(
        folder / "config.yaml",
        tiny,
        data={"train": str(tasks), "eval": str(tasks), "allow_overlap": True, "handler": "task", **data},
        rewards={"rules": []},
        gateway={"context": 96},
        algorithm=NO_REFERENCE,
        evaluation={"before": False, "after": False, "problems": 4},
        services={"environment": environment},
    )


@pytest.mark.long
def test_processes_that_are_killed_or_stopped_cost_no_task(tiny: Path, tmp_path: Path) -> None:
    """Of two gateways, and of two environments, one of which has two processes; one stands still, and it goes on."""
    config = with_tasks(tiny, tmp_path, MIXED, TWO, columns={"environment": "who"})
    roles = ("gateway", "rollout", "coordinator")
    settings = [f"services.{role}.restarts=9" for role in roles]
    short = ("services.gateway.replicas=2", "deadlines.silence=5", "deadlines.stall={loop: 3}")
    with started(config, LONG, *settings, *short, folder=tmp_path / "run", modules=SOON) as run:
        run.reaches(2)
        log, comes = run.folder / "logs" / "coordinator.log", Counter[str]()
        for how, lost in FAULTS:
            getattr(run.member(lost), how)()
            comes[lost] += 1
            new = run.folder / "logs" / f"{lost}.{comes[lost]}.log"
            run.comes(new.exists, BACK, f"another {lost}")
            if lost != "coordinator":
                told = f"INFO {lost} registered"
                run.comes(lambda told=told, lost=lost: log.read_text().count(told) == comes[lost] + 1, BACK, f"{lost} again")
            run.reaches(run.steps() + 3, BACK)
        run.interrupt()
        assert run.wait(BACK) == 0, run.output + run.errors
        check_gone(run.folder)
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * summary(run.folder)["steps"]
        assert set(ledger.dropped()) <= {"run ended"}
        again = [group for group in ledger.groups(states=[Phase.RETIRED]) if group.attempt > 1]
    assert len(again) <= sum(point["rollout/repeated_groups"] for point in steps(run.folder))


def test_a_program_of_ones_own_asks_for_tasks_where_there_is_no_environment(tiny: Path, tmp_path: Path) -> None:
    with started(written(tiny, tmp_path), folder=tmp_path / "run") as run:
        urls = run.folder / "gateways"
        eventually(lambda: urls.is_dir() and list(urls.iterdir()), BACK, "a gateway")
        told = eventually(lambda: sluice("status", str(run.folder), "--gateway").stdout, BACK, "how to reach it")
        found = dict(line.removeprefix("export ").split("=") for line in told.splitlines() if line.startswith("export "))
        with subprocess.Popen([sys.executable, str(PROGRAM)], env={**os.environ, **found}) as program:
            try:
                assert run.wait(BACK) == 0, run.output + run.errors
            finally:
                program.kill()
        check_gone(run.folder)
        assert all(point["episode/turns"] == 2.0 for point in steps(run.folder))


def test_sluice_serve_answers_whoever_has_its_key(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(tiny / "model", "services.gateway.port=0", folder=folder, command="serve") as run:
        run.says("SLUICE_GATEWAY_KEY", BACK)
        told = dict(line.removeprefix("export ").split("=") for line in run.output.splitlines() if line.startswith("export "))
        url, key = told["SLUICE_GATEWAY_URL"], told["SLUICE_GATEWAY_KEY"]
        asked = here("status", str(folder), "--gateway")
        assert f"export SLUICE_GATEWAY_KEY={key}" in asked.stdout

        def ask(shown: str) -> bytes:
            body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
            headers = {"authorization": f"Bearer {shown}", "content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=BACK) as answer:
                found: bytes = answer.read()
            return found

        assert json.loads(ask(key))["usage"]["completion_tokens"] <= 4
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask("another")
        assert refused.value.code == 401
        refused.value.close()
        run.interrupt()
        assert run.wait(BACK) == 0, run.output + run.errors
        check_gone(folder)
    eventually(lambda: not list(tmp_path.glob("run/coordinator.address")), BACK, "no address is left")
