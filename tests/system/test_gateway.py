"""Runs whose tasks are played as episodes: what is trained is what was sampled, also when gateways and rollouts are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from msgspec.structs import asdict

from runtime import codec
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.types import GroupPayload
from tests.loopback.certificate_files import write_certificates
from tests.system.runs import Live, check_gone, eventually, one_line, sluice, started, steps, summary, trained, write_config

pytestmark = pytest.mark.timeout(400)

AGENT = f"{Path(__file__).with_name('gateway_agent.py')}:run"
PROGRAM = Path(__file__).with_name("gateway_program.py")
STEPS = 12
BACK = 150.0  # seconds until a process has loaded again, on a busy machine
NO_REFERENCE = {"kl_coefficient": 0.0}


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


@pytest.fixture
def agents(tiny: Path, tmp_path: Path) -> Path:
    return written(tiny, tmp_path, environment={"two-turns": {"run": AGENT}})


def goes_on_without_loss(run: Live, lost: str) -> None:
    """After `lost` was: another comes in its place, and every task is played."""
    run.comes(lambda: (run.folder / "logs" / f"{lost}.1.log").exists(), BACK, f"another {lost}")
    if lost != "coordinator":
        log = run.folder / "logs" / "coordinator.log"
        run.comes(lambda: log.read_text().count(f"INFO {lost} registered") == 2, BACK, f"{lost} again")
    run.reaches(run.steps() + 4, BACK)
    run.interrupt()
    assert run.wait(BACK) == 0, run.output + run.errors
    check_gone(run.folder)
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * summary(run.folder)["steps"]
        assert set(ledger.dropped()) <= {"run ended"}
        again = [group for group in ledger.groups(states=[Phase.RETIRED]) if group.attempt > 1]
    assert len(again) <= sum(point["rollout/repeated_groups"] for point in steps(run.folder))


@pytest.mark.parametrize("security", ["token", "tls", "certificates of one's own"])
def test_what_is_trained_is_what_was_sampled(agents: Path, tmp_path: Path, security: str) -> None:
    """On-policy all tokens of a step are of one version, so that the trainer computes what the rollouts did."""
    settings = ["training.staleness=0", f"network.security={'token' if security == 'token' else 'tls'}"]
    if security == "certificates of one's own":
        files = write_certificates(tmp_path / "own", "127.0.0.1")
        settings += [f"network.tls.{name}={path}" for name, path in asdict(files).items()]
    run = trained(agents, *settings, folder=tmp_path / "run", timeout=BACK)
    url = next((run.folder / "gateways").iterdir()).read_text()
    assert url.startswith("http://" if security == "token" else "https://")
    for point in steps(run.folder):
        assert point["mismatch/abs_logprob"] < 1e-4 and point["mismatch/max"] < 1e-2
        assert point["episode/turns"] == 2.0 and point.get("gateway/forks", 0.0) == 0.0
    with LedgerReader(run.folder / "ledger") as ledger:
        for group in ledger.groups(states=[Phase.RETIRED]):
            payload = codec.decode(GroupPayload, ledger.read(group.handles["payload"]))
            assert payload.rows.tolist() == [1] * payload.n
            assert all(0 in sample.loss_mask and sample.loss_mask[0] == 1 for sample in payload.samples)
            assert group.scores is not None and set(group.scores.rules) == {"environment"}


LONG = "training.steps=100000"  # nobody waits for its end


@pytest.mark.parametrize("killed", ["gateway-0", "rollout-1", "coordinator"])
def test_a_process_that_is_killed_costs_no_task(agents: Path, tmp_path: Path, killed: str) -> None:
    role = killed.partition("-")[0]
    settings = (LONG, f"services.{role}.restarts.backoff=0.1", "services.gateway.replicas=2")
    with started(agents, *settings, folder=tmp_path / "run") as run:
        run.reaches(2)
        run.member(killed).kill()
        goes_on_without_loss(run, killed)


def test_a_gateway_that_is_stopped_is_ended_and_its_tasks_are_played_again(agents: Path, tmp_path: Path) -> None:
    settings = (LONG, "deadlines.silence=5", "deadlines.stall={loop: 3}", "services.gateway.restarts.backoff=0.1")
    with started(agents, *settings, folder=tmp_path / "run") as run:
        run.reaches(2)
        run.member("gateway-0").suspend()
        goes_on_without_loss(run, "gateway-0")


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


def test_a_task_that_no_program_asks_for_ends_the_run_in_words(tiny: Path, tmp_path: Path) -> None:
    with started(written(tiny, tmp_path), "deadlines.episode=3", folder=tmp_path / "run") as run:
        assert run.wait(BACK) == 1, run.output + run.errors
        check_gone(run.folder)
        assert "gateway-0: Play: no program has asked for" in one_line(run.errors)


def test_an_agent_that_always_fails_ends_the_run_and_the_cause_is_named(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("async def run(data, **_):\n    raise ConnectionError('the shop is closed')\n")
    config = written(tiny, tmp_path, environment={"shop": {"run": f"{broken}:run", "failures_in_a_row": 5}})
    with started(config, folder=tmp_path / "run") as run:
        assert run.wait(BACK) == 1, run.output + run.errors
        check_gone(run.folder)
        line = one_line(run.errors)
        assert "services.environment.shop: play: 5 failures in a row (failures_in_a_row)" in line
        assert "the last: ConnectionError: the shop is closed" in line


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("gateway.player={run: a.py}", "gateway.player: no longer a key: write services.environment"),
        ("services.environment.two-turns.run=nowhere.py:run", "services.environment.two-turns.run: 'nowhere.py' is not a file"),
        ("services.environment.two-turns.python=no/python", "services.environment.two-turns.python: 'no/python' is not an"),
        ("services.rollout.colocate=trainer", "services.rollout.colocate: trainer is not for a run with a gateway"),
    ],
)
def test_what_cannot_be_played_is_refused(agents: Path, tmp_path: Path, setting: str, told: str) -> None:
    done = sluice("train", str(agents), f"run.dir={tmp_path / 'run'}", setting)
    assert done.returncode == 2 and told in done.stderr


def test_sluice_serve_answers_whoever_has_its_key(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(tiny / "model", "services.gateway.port=0", folder=folder, command="serve") as run:
        run.says("SLUICE_GATEWAY_KEY", BACK)
        told = dict(line.removeprefix("export ").split("=") for line in run.output.splitlines() if line.startswith("export "))
        url, key = told["SLUICE_GATEWAY_URL"], told["SLUICE_GATEWAY_KEY"]
        asked = sluice("status", str(folder), "--gateway")
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


def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    done = sluice("serve", str(tmp_path / "nothing"), f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 2 and "model.path" in done.stderr
