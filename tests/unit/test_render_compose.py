"""The Compose file: what it says of a run. tests/loopback holds it to the specification's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.render.compose import render
from launcher.render.plan import Plan
from tests.unit.render_cases import auto, listed, made, reloaded

PLANS = {
    "one": made(),
    "cuda": made("cuda", 2, **auto(3)),
    "named": made("npu", **listed(trains=2, generates=1), run={"name": "x", "resume": "auto"}),
}


def services(plan: Plan) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(render(plan)["compose.yaml"])["services"]
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_node_is_a_service_that_reaches_the_first(plan: Plan, tmp_path: Path) -> None:
    config = reloaded(render(plan)["config.yaml"], tmp_path)
    first = next(iter(services(plan)))
    assert config.services.coordinator.host == first
    assert len(services(plan)) == len(plan.nodes)
    for name, service in services(plan).items():
        assert service["hostname"] == name == service["command"][service["command"].index("--name") + 1]
        _, *command, folder, address = service["healthcheck"]["test"]
        assert command == ["python3", "-m", "sluice.health_check", "--run"] and address == f"{first}:29400"
        assert folder == f"/home/sluice/{config.run.dir}"
        assert service["user"] == "1000:1000"
        assert service["volumes"][0] == {"type": "volume", "source": "shared", "target": "/home/sluice/runs"}


def test_variables_that_the_configuration_reads_are_the_shells() -> None:
    plan = made(**auto(2), services={"trainer": {"env": {"B": {"from": "HF_TOKEN"}, "A": "x"}}})
    assert [service["environment"] for service in services(plan).values()] == [["HF_TOKEN"], ["HF_TOKEN"]]
    assert not any("environment" in service for service in services(PLANS["one"]).values())


def test_the_coordinators_node_is_stopped_before_the_others() -> None:
    """Compose stops a service before those that it depends on."""
    first, *others = services(PLANS["cuda"]).values()
    assert first["depends_on"] == ["node-1", "node-2"]
    assert not any("depends_on" in other for other in others)
    assert "depends_on" not in services(PLANS["one"])["node-0"]


def test_nodes_share_out_the_machines_devices() -> None:
    reserved = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in services(PLANS["cuda"]).values()
    ]
    assert reserved == [["0", "1"], ["2", "3"], ["4", "5"]]
    trains, generates = services(PLANS["named"]).values()
    assert trains["devices"][:2] == ["/dev/davinci0:/dev/davinci0", "/dev/davinci1:/dev/davinci1"]
    assert generates["devices"][:2] == ["/dev/davinci2:/dev/davinci2", "/dev/davinci_manager:/dev/davinci_manager"]
    assert generates["command"][generates["command"].index("--devices") + 1] == "1"
    assert trains["entrypoint"] == ["with-cann", "torchrun"]


def test_the_coordinators_node_comes_back_only_where_the_run_resumes() -> None:
    assert [service["restart"] for service in services(PLANS["cuda"]).values()] == ["no", "on-failure:3", "on-failure:3"]
    assert [service["restart"] for service in services(PLANS["named"]).values()] == ["on-failure:3", "on-failure:3"]
