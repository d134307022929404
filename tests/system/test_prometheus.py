"""A run that Prometheus watches: every process is named, and tells what alarms and dashboard ask for, across a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from launcher.render import monitoring
from tests.system.runs import END, LONG, Live, check_gone, eventually, one_line, sluice, started, write_config
from tests.system.scrapes import discovered, metrics_address, scraped, value
from tests.unit.render_cases import made

pytestmark = pytest.mark.timeout(400)

TOKEN = "a-token-of-prometheus"
SERVED = {"metrics": {"prometheus": {"token": {"from": "SCRAPED"}}}}
MEMBERS = {"coordinator", "rollout-0", "rollout-1", "reward-0", "reference-0", "trainer-0"}
OF_PROMETHEUS = {"up"}  # what it makes itself of each process that it asks


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run that has evaluated, in the middle of its training."""
    folder = tmp_path_factory.mktemp("live")
    config = write_config(folder / "config.yaml", tiny, evaluation={"before": True}, **SERVED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCRAPED", TOKEN)
        with started(config, *LONG, folder=folder / "run") as run:
            run.reaches(3)
            yield run
            run.interrupt()
            assert run.wait(END) == 0, run.output + run.errors
            check_gone(run.folder)


def asked(expression: str) -> set[str]:
    """The metrics that PromQL names."""
    bare = re.sub(r"\{[^}]*\}|\b(on|by|ignoring|without)\s*\([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:sluice|process)_\w+|\bup\b", bare))


def rendered() -> Iterator[str]:
    """Every expression of the alarms and of the dashboard."""
    files = monitoring.render(made(network={"security": "none"}, metrics={"prometheus": {}}).config, "host")
    for group in yaml.safe_load(files["alerts.yaml"])["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(files["grafana.json"])["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_the_names_in_an_expression_are_found() -> None:
    assert asked('rate(sluice_a_total{x="sluice_b"}[5m]) > 2 * up and on (process_c) process_d') == {
        "sluice_a_total",
        "up",
        "process_d",
    }


def test_every_process_tells_what_alarms_and_dashboard_ask_for(live: Live) -> None:
    found = discovered(live.folder, TOKEN)
    assert found.keys() == MEMBERS
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


def test_every_rollout_comes_to_serve(live: Live) -> None:
    """A slow one may still be joining after the first steps."""
    eventually(
        lambda: value(scraped(metrics_address(live.folder), TOKEN), "sluice_rollouts", state="serving") == 2, END, "both"
    )


def test_the_step_and_the_counters_grow_while_the_run_goes_on(live: Live) -> None:
    before = scraped(metrics_address(live.folder), TOKEN)
    live.reaches(live.steps() + 2)
    after = scraped(metrics_address(live.folder), TOKEN)
    for name in ("sluice_run_step", "sluice_run_step_timestamp_seconds"):
        assert value(after, name) > value(before, name)


def test_a_process_that_comes_in_anothers_place_is_named_where_it_serves(live: Live) -> None:
    former = discovered(live.folder, TOKEN)["rollout-0"]
    os.kill(live.member("rollout-0").pid, signal.SIGKILL)
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


def test_a_port_that_is_taken_ends_the_run_with_one_line(config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = sluice("train", str(config), f"run.dir={tmp_path / 'run'}", f"metrics.prometheus.port={port}")
    assert ended.returncode == 2
    said = f"metrics.prometheus.port: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert said in one_line(ended.stderr)
    check_gone(tmp_path / "run")
