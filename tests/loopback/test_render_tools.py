"""What is rendered, by tools of others: the Compose specification's schema, a shell, and Prometheus' own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.render.files import compose, kubernetes, monitoring
from tests.unit.render_cases import auto, listed, made

PLANS = {"one": made(), "cuda": made("cuda", 2, **auto(3)), "named": made("npu", **listed(trains=2, generates=1))}


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    """By the schema of the Compose specification, as check-jsonschema ships it."""
    tool = Path(sys.executable).parent / "check-jsonschema"
    command = [tool, "--builtin-schema", "vendor.compose-spec", *paths]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_compose_files_are_valid(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.yaml" for name in PLANS]
    for path, plan in zip(paths, PLANS.values(), strict=True):
        path.write_text(compose(plan)["compose.yaml"])
    assert (found := check(*paths)).returncode == 0, found.stdout
    paths[0].write_text(paths[0].read_text().replace("stop_grace_period", "stop_grace"))
    assert check(paths[0]).returncode == 1


@pytest.mark.parametrize(("name", "code"), [("localhost", 0), ("nowhere.invalid", 124)])
def test_the_wait_for_a_name_ends_once_it_is_known_or_in_time(name: str, code: int) -> None:
    *_, job = yaml.safe_load_all(kubernetes(PLANS["one"])["sluice.yaml"])
    (wait,) = job["spec"]["template"]["spec"]["initContainers"]
    timeout, _, *command, _ = wait["command"]
    ended = subprocess.run([timeout, "2" if code else "40", *command, name], stdout=subprocess.DEVNULL, timeout=60, check=False)
    assert ended.returncode == code


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
def test_prometheus_takes_its_configuration_and_rules(tmp_path: Path) -> None:
    plan = made(metrics={"prometheus": {"token": {"from": "SCRAPED"}}})
    for name, text in monitoring(plan.config, "host").items():
        (tmp_path / name).write_text(text)
    (tmp_path / monitoring.TOKEN_FILE).write_text("token")

    def checked() -> subprocess.CompletedProcess[str]:
        command = ["promtool", "check", "config", tmp_path / "prometheus.yaml"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (found := checked()).returncode == 0, found.stderr
    alerts = tmp_path / "alerts.yaml"
    (group,) = yaml.safe_load(alerts.read_text())["groups"]
    assert f"{len(group['rules'])} rules found" in found.stdout
    alerts.write_text(alerts.read_text().replace("sluice_units_lost > 0", "sluice_units_lost >"))
    assert checked().returncode != 0
