"""What `sluice render` writes for Prometheus and Grafana. tests/system asks a run for each metric that is named there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.render import compose, kubernetes, monitoring, slurm
from runtime.errors import ConfigError
from tests.unit.render_cases import auto, made, reloaded
from tests.unit.test_render import ROOT, command

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
    assert not FILES & target.render(made(**auto(2))).keys()
    assert target.render(made(**auto(2), **TOKEN)).keys() >= FILES


@pytest.mark.parametrize(("given", "port"), [(0, 28400), (9500, 9500)])
def test_the_coordinator_serves_where_prometheus_looks(given: int, port: int, tmp_path: Path) -> None:
    plan = made(**auto(2), metrics={"prometheus": {"port": given, "token": {"from": "SCRAPED"}}})
    files = compose.render(plan)
    config = reloaded(files["config.yaml"], tmp_path)
    assert config.metrics.prometheus is not None and config.metrics.prometheus.port == port
    assert url(files) == f"http://{config.services.coordinator.host}:{port}/sd"
    manifests = yaml.safe_load_all(kubernetes.render(plan)["sluice.yaml"])
    (mapped,) = (each for each in manifests if each["kind"] == "ConfigMap")
    host = reloaded(mapped["data"]["config.yaml"], tmp_path).services.coordinator.host
    assert url(kubernetes.render(plan)) == f"http://{host}:{port}/sd"


def test_an_address_of_ipv6_has_brackets() -> None:
    config = made(network={"security": "none"}, metrics={"prometheus": {"port": 1}}).config
    assert url(monitoring.render(config, "fd00::1")) == "http://[fd00::1]:1/sd"


def test_a_token_is_read_from_a_file_and_every_node_is_given_its_variable() -> None:
    plan = made(**TOKEN)
    assert plan.variables == ["SCRAPED"]
    found = job(compose.render(plan))
    expected = {"type": "Bearer", "credentials_file": "sluice.token"}
    assert found["authorization"] == found["http_sd_configs"][0]["authorization"] == expected
    open_to_all = made(network={"security": "none"}, metrics={"prometheus": {}})
    assert "authorization" not in job(compose.render(open_to_all)) and open_to_all.variables == []


def test_off_this_machine_a_token_is_needed() -> None:
    with pytest.raises(ConfigError) as refused:
        made(metrics={"prometheus": {}})
    assert [fault.partition(";")[0] for fault in refused.value.faults] == ["metrics.prometheus.token: missing"]


def test_pods_let_prometheus_in_where_it_has_something_to_read() -> None:
    ranged = made(**TOKEN, network={"port_range": [20000, 21000]})
    for plan, others, ports in (
        (made(), 0, []),
        (made(**TOKEN), 1, [None]),
        (ranged, 1, [[{"port": 20000, "endPort": 21000}, {"port": 28400}]]),
    ):
        manifests = yaml.safe_load_all(kubernetes.render(plan)["sluice.yaml"])
        (policy,) = (each["spec"] for each in manifests if each["kind"] == "NetworkPolicy")
        own, *scraped = policy["ingress"]
        assert own == {"from": [{"podSelector": policy["podSelector"]}]}
        selectors = [each["podSelector"]["matchLabels"] for rule in scraped for each in rule["from"]]
        assert selectors == [{"app.kubernetes.io/name": "prometheus"}] * others
        assert [rule.get("ports") for rule in scraped] == ports


def test_alarms_and_panels_are_whole() -> None:
    files = monitoring.render(made(**TOKEN).config, "host")
    (group,) = yaml.safe_load(files["alerts.yaml"])["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 6
    for rule in group["rules"]:
        assert rule["expr"] and rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    dashboard = json.loads(files["grafana.json"])
    cells = [(x, y) for panel in dashboard["panels"] for x in _columns(panel) for y in _rows(panel)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in dashboard["panels"]:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) >= 1
        assert all('{run="$run"' in target["expr"] for target in panel["targets"])


def _columns(panel: dict[str, Any]) -> range:
    return range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])


def _rows(panel: dict[str, Any]) -> range:
    return range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])


def test_every_alarm_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text().partition("\n## Alarms\n")[2]
    named = [line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")]
    (group,) = yaml.safe_load(monitoring.render(made(**TOKEN).config, "host")["alerts.yaml"])["groups"]
    assert named == [rule["alert"] for rule in group["rules"]]


def test_a_run_that_is_started_by_hand_is_watched_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = ROOT / "configs" / "quickstart.yaml", tmp_path / "out"
    assert command("render", "prometheus", config, "metrics.prometheus={}", "--output", out) == 2
    said = "metrics.prometheus.port: missing; must be a port at which Prometheus finds the coordinator"
    assert capsys.readouterr().err == f"error: {said}\n" and not out.exists()
    assert command("render", "prometheus", config, "metrics.prometheus.port=9500", "--output", out) == 0
    assert {path.name for path in out.iterdir()} == FILES
    assert url({path.name: path.read_text() for path in out.iterdir()}) == "http://127.0.0.1:9500/sd"
