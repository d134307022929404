"""One run that is looked at while it trains, in every way: status, health and reflection, samples, Prometheus, profiles, the
page; and processes of it are lost. A SIGTERM to every process ends it in order."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from transformers import AutoModelForCausalLM

from benchmarks import browser
from launcher.render.files import monitoring
from runtime import run_files
from runtime.errors import UserError
from runtime.ledger.checkpoint import steps as checkpoints
from runtime.process.os_process import find_program
from tests.system.runs import (
    END,
    LONG,
    ROOT,
    Live,
    belonging,
    check_gone,
    eventually,
    here,
    one_line,
    shown,
    sluice,
    started,
    summary,
    table,
    write_config,
)
from tests.system.test_page_browser import VIEWS, WAIT, shows
from tests.unit.render_cases import made

pytestmark = pytest.mark.timeout(400)

PATIENCE = 150.0  # seconds that one answer may take on a busy machine
TOKEN = "a-token-of-prometheus"
MEMBERS = {
    "coordinator": "Coordinator",
    "rollout-0": "Rollout",
    "rollout-1": "Rollout",
    "reward-0": "Reward",
    "reference-0": "Reference",
    "trainer-0": "Trainer",
    "trainer-1": "Trainer",
}
OF_PROMETHEUS = {"up"}  # what it makes itself of each process that it asks


def fetched(address: str, path: str, token: str = "") -> str:
    """Raises HTTPError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(f"http://{address}{path}", headers=headers), timeout=PATIENCE) as response:
        return response.read().decode()


def metrics_address(folder: Path) -> str:
    """Of the coordinator, by its log."""
    log = (folder / run_files.LOGS / "coordinator.log").read_text()
    return re.findall(r"metrics for Prometheus at http://(\S+)/metrics", log)[-1]


def discovered(folder: Path, token: str = "") -> dict[str, str]:
    """HOST:PORT by process."""
    named: list[dict[str, Any]] = json.loads(fetched(metrics_address(folder), "/sd", token))
    return {each["labels"]["process"]: each["targets"][0] for each in named}


def scraped(address: str, token: str = "") -> list[Sample]:
    families = text_string_to_metric_families(fetched(address, "/metrics", token))
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    """Of the only such sample."""
    (found,) = (each.value for each in samples if each.name == name and labels.items() <= each.labels.items())
    return found


@pytest.fixture(scope="module")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """It has evaluated, and has a trainer of two ranks."""
    folder = tmp_path_factory.mktemp("live")
    config = write_config(
        folder / "config.yaml",
        tiny,
        evaluation={"before": True},
        services={"trainer": {"processes": 2}},
        metrics={"prometheus": {"token": {"from": "SCRAPED"}}},
        page={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCRAPED", TOKEN)
        with started(config, *LONG, folder=folder / "run") as run:
            run.reaches(3)
            yield run
            # As a scheduler gives it that ends a job: to the launcher, the services, and what starts ranks and they alike.
            for process in belonging(run.folder):
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            assert run.wait(END) == 0, run.output + run.errors
            check_gone(run.folder)
    assert summary(run.folder)["stop_reason"] == "interrupted"
    assert checkpoints(run.folder)[-1] == summary(run.folder)["steps"]
    AutoModelForCausalLM.from_pretrained(run.folder / "model")


@pytest.fixture
def live(running: Live) -> Live:
    """Both rollouts serve: one may still be joining, or come in the place of what another test has lost."""

    def serve() -> bool:
        return value(scraped(metrics_address(running.folder), TOKEN), "sluice_rollouts", state="serving") == 2

    eventually(serve, PATIENCE, "both rollouts")
    running.reaches(running.steps() + 1)
    return running


def test_status_shows_every_process(live: Live) -> None:
    ended = sluice("status", str(live.folder), timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "training" in ended.stdout
    assert "weights by shared_memory" in " ".join(ended.stdout.split())
    rows = table(ended.stdout)
    assert rows.keys() == MEMBERS.keys()
    for name, row in rows.items():
        assert row[1] == "ready", row
        rank = 1 if name == "trainer-1" else 0
        assert int(row[-2]) == live.member(name.replace("-1", "-0") if rank else name, rank).pid
    for name in ("rollout-0", "trainer-0", "trainer-1"):
        assert int(rows[name][2].partition(".")[2]) >= 1  # it has come to a version of its own


def test_status_takes_an_address_too_with_the_runs_secret(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    address = (live.folder / "coordinator.address").read_text().strip()
    for secret, said in ((None, "wants TLS"), ("00" * 32, "certificates do not fit"), ("1", "64 hexadecimal digits")):
        if secret is not None:
            monkeypatch.setenv("SLUICE_SECRET", secret)
        ended = sluice("status", address, timeout=PATIENCE)
        assert ended.returncode == 2 and said in one_line(ended.stderr)
    monkeypatch.setenv("SLUICE_SECRET", (live.folder / ".secret").read_text())
    assert table(sluice("status", address, timeout=PATIENCE).stdout).keys() == MEMBERS.keys()


def test_samples_can_be_looked_at_meanwhile(live: Live) -> None:
    assert len(shown(live.folder, "--limit", "2", "--state", "retired")) == 2 * 4


# ------------------------------------------------------------------------------------------------ Prometheus


def asked(expression: str) -> set[str]:
    """The metrics that PromQL names."""
    bare = re.sub(r"\{[^}]*\}|\b(on|by|ignoring|without)\s*\([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:sluice|process)_\w+|\bup\b", bare))


def rendered() -> Iterator[str]:
    """Every expression of the alarms and of the dashboard."""
    files = monitoring(made(network={"security": "none"}, metrics={"prometheus": {}}).config, "host")
    for group in yaml.safe_load(files["alerts.yaml"])["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(files["grafana.json"])["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_every_process_tells_what_alarms_and_dashboard_ask_for(live: Live) -> None:
    found = discovered(live.folder, TOKEN)
    assert found.keys() == MEMBERS.keys()
    told = {name: scraped(address, TOKEN) for name, address in found.items()}
    for name, samples in told.items():
        own = [each for each in samples if each.name.startswith("sluice_")]
        assert {(each.labels["process"], each.labels["role"], each.labels["run"]) for each in own} == {
            (name, name.partition("-")[0], "test")
        }
        assert value(samples, "sluice_process_state", state="ready") == 1
        assert value(samples, "process_resident_memory_bytes") > 0
    there = {sample.name for samples in told.values() for sample in samples} | OF_PROMETHEUS
    needed = {name for expression in rendered() for name in asked(expression)}
    assert len(needed) > 20 and sorted(needed - there) == []
    run = told["coordinator"]
    assert value(run, "sluice_run_step") >= 3 and value(run, "sluice_run_phase", phase="training") == 1
    assert value(told["rollout-0"], "sluice_rollout_tokens_total") > 0


def test_the_step_and_the_counters_grow_while_the_run_goes_on(live: Live) -> None:
    before = scraped(metrics_address(live.folder), TOKEN)
    live.reaches(live.steps() + 2)
    after = scraped(metrics_address(live.folder), TOKEN)
    for name in ("sluice_run_step", "sluice_run_step_timestamp_seconds"):
        assert value(after, name) > value(before, name)


def test_a_process_that_comes_in_anothers_place_is_named_where_it_serves(live: Live) -> None:
    former = discovered(live.folder, TOKEN)["rollout-0"]
    live.member("rollout-0").kill()
    now = eventually(lambda: _other(live.folder, former), END, "another rollout-0")
    assert value(scraped(now, TOKEN), "sluice_calls_open", process="rollout-0") >= 0
    with pytest.raises(URLError):
        scraped(former, TOKEN)
    run = scraped(metrics_address(live.folder), TOKEN)
    assert value(run, "sluice_restarts_total", of_role="rollout") >= 1


def _other(folder: Path, former: str) -> str:
    """The address of rollout-0, once it is not that."""
    now = discovered(folder, TOKEN)["rollout-0"]
    return "" if now == former else now


# ------------------------------------------------------------------------------------------------ profiles


def profile(live: Live, *options: str) -> dict[str, Path]:
    """What was written, by process; the run has gone on."""
    ended = sluice("profile", str(live.folder), *options, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(": ") for line in ended.stdout.splitlines())
    live.reaches(live.steps() + 2)
    return {name: Path(path) for name, path in found.items()}


def events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        found = json.load(file)
    return found if isinstance(found, list) else found["traceEvents"]


def test_the_ranks_of_the_trainer_record_the_same_steps_and_the_run_goes_on(live: Live) -> None:
    found = profile(live, "--role", "trainer", "--steps", "2")
    assert found.keys() == {"trainer-0", "trainer-1"}
    names = {re.fullmatch(rf"{name}\.[01]\.(\d+)\.json\.gz", path.name) for name, path in found.items()}
    assert len({match and match.group(1) for match in names}) == 1 and None not in names
    for path in found.values():
        assert path.parent == live.folder / "profiles"
        assert any("Backward" in event.get("name", "") for event in events(path))


def test_what_has_torch_records_what_it_computes(live: Live) -> None:
    found = profile(live, "--role", "rollout", "--seconds", "1") | profile(live, "--role", "reference", "--seconds", "1")
    assert found.keys() == {"rollout-0", "rollout-1", "reference-0"}
    for path in found.values():
        assert any(event.get("name") == "aten::mm" for event in events(path))


@pytest.mark.skipif(find_program("py-spy") is None, reason="needs py-spy: pip install py-spy")
@pytest.mark.parametrize("role", ["reward", "coordinator"])
def test_what_has_no_torch_is_looked_at_with_its_children(role: str, live: Live) -> None:
    (path,) = profile(live, "--role", role, "--seconds", "2").values()
    found = events(path)
    own = live.member(role if role == "coordinator" else f"{role}-0")
    pids = {own.pid} | ({child.pid for child in own.children(recursive=True)} if role == "reward" else set())
    assert own.pid in {event["pid"] for event in found} <= pids


def test_whom_it_cannot_ask_is_a_line_and_exit_code_2(live: Live, tmp_path: Path) -> None:
    for options, said in (
        (("--role", "critic"), "--role: 'critic' is not one of coordinator, "),
        (("--process", "trainer-7"), "--process: 'trainer-7' is not one of coordinator, "),
        (("--process", "trainer-0", "--seconds", "1"), "trainer-0: is profiled for a number of steps"),
        (("--process", "rollout-0", "--steps", "1"), "rollout-0: is profiled for a number of seconds"),
        (("--process", "trainer-0", "--steps", "100000"), "trainer-0: --steps: 100000; only "),
        (("--process", "trainer-0", "--steps", "0"), "--steps: 0; must be above 0"),
        (("--process", "trainer-0", "--memory"), "trainer-0: --memory: is of CUDA's allocator"),
        (("--process", "reward-0", "--memory"), "reward-0: --memory: is of CUDA's allocator"),
    ):
        ended = here("profile", str(live.folder), *options)
        assert ended.returncode == 2 and said in one_line(ended.stderr), ended.stderr
    ended = here("profile", str(tmp_path), "--role", "trainer")
    assert ended.returncode == 2 and "no run is under way" in one_line(ended.stderr)


def test_its_deadline_ends_a_profile_and_another_can_be_made(live: Live) -> None:
    ended = sluice(
        *("profile", str(live.folder), "--process", "rollout-0", "--seconds", "900", "--timeout", "2"), timeout=PATIENCE
    )
    assert ended.returncode == 2 and "rollout-0: Profile: did not answer (deadline 2 s)" in one_line(ended.stderr)

    eventually(lambda: _can_be_made(live, "rollout-0"), PATIENCE, "another profile of rollout-0")  # which hears a moment later


def test_a_process_that_dies_meanwhile_is_told_of(live: Live) -> None:
    command = [sys.executable, "-m", "launcher.cli", "profile", str(live.folder), "--process", "rollout-1", "--seconds", "900"]
    victim = live.member("rollout-1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        eventually(lambda: _calls(asking.pid, victim), PATIENCE, "a call of rollout-1")
        victim.kill()
        _, said = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 2 and re.search(
        "rollout-1: (Profile|connect): ", one_line(said)
    )  # within its TLS, or behind it
    eventually(lambda: _can_be_made(live, "rollout-1"), PATIENCE, "a profile of the process that came in its place")


def _can_be_made(live: Live, name: str) -> bool:
    return here("profile", str(live.folder), "--process", name, "--seconds", "0.1").returncode == 0


def _calls(caller: int, called: psutil.Process) -> bool:
    """Whether the process `caller` has a connection to `called`."""
    ports = {one.laddr.port for one in called.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    try:
        own = psutil.Process(caller).net_connections("inet")
    except psutil.Error:
        return False
    return any(one.raddr and one.raddr.port in ports and one.status == psutil.CONN_ESTABLISHED for one in own)


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_follows_it(live: Live) -> None:
    try:
        browser.found()
    except UserError as missing:
        pytest.skip(str(missing))
    address = eventually(lambda: re.search(r"page: (http\S+)", live.output), WAIT / 1000, "the page's address")[1]
    with browser.opened(address) as (page, faults):
        shows(page, "why")
        reached = "Number(document.getElementById('state').textContent.match(/step (\\d+)/)?.[1])"
        browser.until(page, f"{reached} >= 3")
        first = page.evaluate(reached)
        browser.until(page, f"{reached} > {first} + 5")
        assert "under way" in page.inner_text("#state")
        for view in VIEWS:
            shows(page, view)
        assert faults == []
