"""`sluice render`: the command, what all targets have in common, the Compose file, and the files for Prometheus and Grafana.
tests/loopback holds the files to the schemas and tools of others; tests/system asks a run for each metric that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import main
from launcher.render.files import compose, kubernetes, monitoring, slurm
from launcher.render.plan import Plan, label, shared_folder
from runtime.errors import ConfigError
from tests.unit.config_cases import cases
from tests.unit.render_cases import CUDA, KEPT, PLANS, auto, listed, made, reloaded, rendered

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_plan_has_as_many_nodes_as_the_run_waits_for_and_addresses_that_others_reach() -> None:
    assert [node.devices for node in made("cuda", 8, **auto(3)).nodes] == [8, 8, 8]
    assert len(made().nodes) == 1
    named = made("npu", 4, **listed(a=8, b=None))
    assert [(node.name, node.devices) for node in named.nodes] == [("a", 8), ("b", 4)]
    assert made(services={"platform": "ascend"}, devices=8).device == "npu"
    assert made("cpu", services={"platform": "ascend"}).device == made().device == "cpu"
    for given, interface in (({}, "auto"), ({"interface": "::1"}, "auto"), ({"interface": "eth1"}, "eth1")):
        assert made(network=given).config.network.interface == interface


def test_names_become_those_of_hosts_and_the_folder_above_the_runs_is_shared() -> None:
    for text, made_of_it in (("My run_1", "my-run-1"), ("--", ""), ("grpo/v2.", "grpo-v2")):
        assert label(text) == made_of_it
    for directory, folder in (
        ("runs/x", "/home/sluice/runs"),
        ("/shared/team/x", "/shared/team"),
        ("a/b/x", "/home/sluice/a/b"),
    ):
        assert shared_folder(made(run={"name": "x", "dir": directory}).config) == folder
    for directory in ("x", "/x", "/home/x", "runs/../x"):  # it would hide others
        with pytest.raises(ConfigError, match=f"run.dir: '{directory}' must be in a folder that the nodes share"):
            shared_folder(made(run={"name": "x", "dir": directory}).config)


PLANNED = """
device: cuda => --devices: missing; with --device cuda
device: npu, cluster: {nodes: [{name: a, devices: 8}, {name: b}]} => cluster.nodes.1.devices: not set; with --device npu
devices: 8 => --devices: 8, but --device is cpu
device: cuda, devices: 0 => --devices: 0 is not an integer of at least 1
cluster: {nodes: [{name: a, devices: 8}]} => cluster.nodes.0.devices: 8, but --device is cpu
cluster: {nodes: []} => cluster.nodes: empty
cluster: {nodes: [{name: a}, {name: a}]} => cluster.nodes.1.name: 'a' is that of another node; must be its own
run: {name: ...} => run.name: '...' must have a letter
metrics: {prometheus: {}} => metrics.prometheus.token: missing
"""


@pytest.mark.parametrize(("arguments", "said"), cases(PLANNED))
def test_what_cannot_be_planned_is_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**arguments)
    assert [said in fault for fault in refused.value.faults] == [True]


@pytest.mark.parametrize("target", [kubernetes, compose])
def test_nodes_that_cannot_name_hosts_are_refused(target: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        target(made(cluster={"nodes": [{"name": "Node_1"}, {"name": "b"}, {"name": "c-"}]}))
    assert [fault.partition(":")[0] for fault in refused.value.faults] == ["cluster.nodes.0.name", "cluster.nodes.2.name"]


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "compose"])
def test_the_command_writes_files_that_say_where_they_are_from_and_spares_what_was_changed(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = tmp_path / "out", ROOT / "configs" / "quickstart.yaml"
    assert command("render", target, config, "cluster.min_node=2", "--output", out) == 2
    assert "cluster.min_node: unknown key" in capsys.readouterr().err and not out.exists()
    arguments = ("render", target, config, "cluster.min_nodes=2", "--output", out)
    assert command(*arguments) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths and sorted(paths) == sorted(out.iterdir())
    files = {path: path.read_text() for path in paths}
    assert any(line.startswith(f"# Written by `sluice render {target}`") for line in files[paths[0]].splitlines()[:2])
    assert command(*arguments) == 0
    assert {path: path.read_text() for path in paths} == files
    paths[0].write_text("mine")
    capsys.readouterr()
    assert command(*arguments) == 2
    assert capsys.readouterr().err == f"error: --output: {paths[0]} is there and differs; remove it, or name another folder\n"
    assert paths[0].read_text() == "mine"


@pytest.mark.parametrize("name", PLANS)
def test_what_is_rendered_is_what_was_read_and_kept(name: str) -> None:
    assert rendered(name) == (KEPT / f"{name}.txt").read_text(), "read the difference, then python -m tests.unit.render_cases"


def services(plan: Plan) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(compose(plan)["compose.yaml"])["services"]
    return found


def test_services_of_compose_share_out_the_machines_devices_and_come_back_only_where_the_run_resumes(tmp_path: Path) -> None:
    (alone,) = services(made()).values()
    assert not {"environment", "depends_on", "deploy", "devices"} & alone.keys() and "--devices" not in alone["command"]
    assert reloaded(compose(CUDA)["config.yaml"], tmp_path).services.coordinator.host == next(iter(services(CUDA)))
    resources = [service["deploy"]["resources"]["reservations"]["devices"] for service in services(CUDA).values()]
    assert [each[0]["device_ids"] for each in resources] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert {service["restart"] for service in services(CUDA).values()} == {"on-failure:3"}


FILES = {"prometheus.yaml", "alerts.yaml", "grafana.json"}
TOKEN = {"metrics": {"prometheus": {"token": {"from": "SCRAPED"}}}}


def job(files: dict[str, str]) -> dict[str, Any]:
    (found,) = yaml.safe_load(files["prometheus.yaml"])["scrape_configs"]
    return found


def url(files: dict[str, str]) -> str:
    (discovery,) = job(files)["http_sd_configs"]
    return discovery["url"]


@pytest.mark.parametrize("target", [slurm, kubernetes, compose])
def test_nothing_is_written_for_a_prometheus_that_finds_nothing(target: Any) -> None:
    assert not FILES & target(made(**auto(2))).keys()
    assert target(made(**auto(2), **TOKEN)).keys() >= FILES


@pytest.mark.parametrize(("given", "port"), [(0, 28400), (9500, 9500)])
def test_the_coordinator_serves_where_prometheus_looks(given: int, port: int, tmp_path: Path) -> None:
    plan = made(**auto(2), metrics={"prometheus": {"port": given, "token": {"from": "SCRAPED"}}})
    files = compose(plan)
    config = reloaded(files["config.yaml"], tmp_path)
    assert config.metrics.prometheus is not None and config.metrics.prometheus.port == port
    assert url(files) == f"http://{config.services.coordinator.host}:{port}/sd"
    expected = {"type": "Bearer", "credentials_file": "sluice.token"}
    assert job(files)["authorization"] == job(files)["http_sd_configs"][0]["authorization"] == expected
    (configured,) = (each for each in yaml.safe_load_all(kubernetes(plan)["sluice.yaml"]) if each["kind"] == "ConfigMap")
    host = reloaded(configured["data"]["config.yaml"], tmp_path).services.coordinator.host
    assert url(kubernetes(plan)) == f"http://{host}:{port}/sd"
    open_to_all = made(network={"security": "none"}, metrics={"prometheus": {"port": 1}})
    files = monitoring(open_to_all.config, "fd00::1")
    assert url(files) == "http://[fd00::1]:1/sd" and "authorization" not in job(files) and open_to_all.variables == []


def test_alarms_and_panels_are_whole_and_in_the_guide() -> None:
    files = monitoring(made(**TOKEN).config, "host")
    (group,) = yaml.safe_load(files["alerts.yaml"])["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 6
    for rule in group["rules"]:
        assert rule["expr"] and rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    guide = (ROOT / "docs" / "guides" / "observing.md").read_text().partition("\n### Alarms\n")[2]
    assert [line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")] == names
    cells = []
    for panel in json.loads(files["grafana.json"])["panels"]:
        at = panel["gridPos"]
        cells += [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) >= 1
        assert all('{run="$run"' in target["expr"] for target in panel["targets"])
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_a_run_that_is_started_by_hand_is_watched_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = ROOT / "configs" / "quickstart.yaml", tmp_path / "out"
    assert command("render", "prometheus", config, "metrics.prometheus={}", "--output", out) == 2
    said = "metrics.prometheus.port: missing; must be a port at which Prometheus finds the coordinator"
    assert capsys.readouterr().err == f"error: {said}\n" and not out.exists()
    assert command("render", "prometheus", config, "metrics.prometheus.port=9500", "--output", out) == 0
    assert {path.name for path in out.iterdir()} == FILES
    assert url({path.name: path.read_text() for path in out.iterdir()}) == "http://127.0.0.1:9500/sd"
