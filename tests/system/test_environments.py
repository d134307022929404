"""Runs whose tasks agents of the user's play: of several kinds, of which one is a server's in another process; and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import asdict

from runtime import types
from runtime.evaluation import results as evaluation
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import GroupPayload
from tests.loopback.certificate_files import write_certificates
from tests.system.runs import ROOT, check_gone, eventually, here, one_line, sluice, started, steps, trained
from tests.system.test_gateway import BACK, MIXED, SUMS, TWO, with_tasks
from tests.system.test_why import blamed, why
from tests.unit.docs_blocks import own_files
from tests.unit.test_trace import check_trace

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def mixed(tiny: Path, tmp_path: Path) -> Path:
    return with_tasks(tiny, tmp_path, MIXED, TWO, columns={"environment": "who"})


@contextmanager
def server(folder: Path, authority: str) -> Iterator[str]:
    """The address of the guide's server, which runs beside what protoc makes of the protocol, and trusts the gateway's."""
    folder.mkdir()
    source = ROOT / "proto" / "environment.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source.parent}", f"--python_out={folder}"]
    subprocess.run([*command, f"--grpc_python_out={folder}", source.name], check=True, timeout=BACK)
    (folder / "environment_server.py").write_text(own_files()["environment_server.py"])
    out = folder / "out"
    with out.open("w") as file:
        served = subprocess.Popen(
            [sys.executable, "environment_server.py", "127.0.0.1:0"],
            cwd=folder,
            env={**os.environ, "SSL_CERT_FILE": authority},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        told = eventually(lambda: served.poll() is not None or out.read_text().strip(), BACK, "a server")
        assert served.poll() is None, out.read_text()
        yield f"127.0.0.1:{str(told).rpartition(' ')[2]}"
    finally:
        served.kill()
        served.wait()


def test_what_agents_of_several_environments_play_is_trained_as_it_was_sampled(tiny: Path, tmp_path: Path) -> None:
    """On-policy all tokens of a step are of one version, so that the trainer computes what the rollouts did. With certificates
    of one's own; one agent has a slow tool, which is told apart from the policy."""
    files = write_certificates(tmp_path / "own", "127.0.0.1")
    rows = [SUMS | {"who": "sums", "tool": 2.0}, SUMS | {"who": "far"}, {"who": "maze", "walls": 3}] * 8
    settings = ["training.staleness=0", "network.security=tls"]
    settings += [f"network.tls.{name}={path}" for name, path in asdict(files).items()]
    with server(tmp_path / "server", str(files.ca)) as address:
        environments = TWO | {"far": {"server": {"address": address}}}
        config = with_tasks(tiny, tmp_path, rows, environments, columns={"environment": "who"})
        run = trained(config, *settings, folder=tmp_path / "run", timeout=BACK)
    assert next((run.folder / "gateways").iterdir()).read_text().startswith("https://")
    points = steps(run.folder)
    for point in points:
        assert point["mismatch/abs_logprob"] < 1e-4 and point["mismatch/max"] < 1e-2
        assert point.get("gateway/forks", 0.0) == 0.0
    figures: dict[str, list[float]] = {}
    for name, value in ((name, value) for point in points for name, value in point.items()):
        if name.startswith("environment/"):
            figures.setdefault(name.removeprefix("environment/"), []).append(value)
    assert set(figures["maze/turns"]) == {2.0} and set(figures["sums/turns"]) == {1.0}
    assert set(figures["maze/reward"]) == {0.5} and set(figures["maze/log/walls"]) == {3.0}
    assert set(figures["far/log/replies"]) == {1.0}
    assert sum(sum(figures[f"{name}/episodes"]) for name in environments) == len(points) * 4 * 4
    assert not sum(sum(figures[f"{name}/repeated"]) for name in environments)
    with LedgerReader(run.folder / "ledger") as ledger:
        groups = list(ledger.groups(states=[Phase.RETIRED]))
        for group in groups:
            payload = types.decode(GroupPayload, ledger.read(group.handles["payload"]))
            assert payload.rows.tolist() == [1] * payload.n
            assert all(sample.loss_mask[0] == 1 for sample in payload.samples)
            assert group.outcomes is not None
            assert group.outcomes.environment != "maze" or all(0 in sample.loss_mask for sample in payload.samples)
            assert group.scores is not None and set(group.scores.rules) == {"environment"}
    assert {group.outcomes.environment for group in groups if group.outcomes is not None} == {"maze", "sums", "far"}
    logs = (run.folder / "logs").glob("environment*")  # of the run's own processes
    assert sorted(path.name for path in logs) == ["environment-0.log", "environment-1.log", "environment-2.log"]

    assert blamed(run.folder) == ("agent", "environment sums")
    found = {(total["cause"], total["process"]): total for total in why(run.folder)["totals"]}
    policy = [total for (cause, process), total in found.items() if cause == "policy" and process.startswith("rollout-")]
    assert policy and all("decode" in total["inside"] for total in policy)
    done = here("trace", str(run.folder))
    assert (done.returncode, one_line(done.stdout)) == (0, str(run.folder / "trace.json")), done.stderr
    events = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    check_trace(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"steps", "coordinator", "gateway-0", "environment-0", "rollout-0", "rollout-1", "trainer-0"} <= names
    assert {"s", "f"} <= {event["ph"] for event in events}
    of_policy = [event for event in events if event["name"] == "policy" and event["args"].get("group", -1) >= 0]
    assert len(of_policy) >= len(points) * 4 * 4  # one in an episode at least


def test_evaluations_and_single_tasks_are_played_too(mixed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = sluice("eval", str(mixed), f"run.dir={folder}", timeout=BACK)
    assert done.returncode == 0, done.stdout + done.stderr
    check_gone(folder)
    replies = list(evaluation.read_replies(evaluation.folder_for(folder / "eval", 0) / "held_out.jsonl"))
    assert len(replies) == 4 and {each.outcome for each in replies} == {"completed"}
    done = sluice("play", str(mixed), "--task", "1", f"run.dir={folder}", "data.eval=''", timeout=BACK)
    assert done.returncode == 0, done.stdout + done.stderr
    check_gone(folder)
    assert "3 walls" in done.stdout and "tasks:2: reward" in done.stdout and "completed" in done.stdout
    done = here("play", str(mixed), "--task", "99", f"run.dir={folder}")
    assert (done.returncode, one_line(done.stderr)) == (2, "error: --task: 99, but there are only 16 tasks")


def test_an_agent_that_always_fails_ends_the_run_and_the_cause_is_named(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("async def run(data, **_):\n    raise ConnectionError('the shop is closed')\n")
    config = with_tasks(tiny, tmp_path, [SUMS], {"shop": {"run": f"{broken}:run", "failures_in_a_row": 5}})
    with started(config, folder=tmp_path / "run") as run:
        assert run.wait(BACK) == 1, run.output + run.errors
        check_gone(run.folder)
        line = one_line(run.errors)
        assert "services.environment.shop: play: 5 failures in a row (failures_in_a_row)" in line
        assert "the last: ConnectionError: the shop is closed" in line
