"""The manifests: by Kubernetes' own schemas, and what they say of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.render import kubernetes
from launcher.render.kubernetes import render
from launcher.render.plan import Plan
from runtime.errors import ConfigError
from tests.unit.render_cases import auto, listed, made, reloaded

PLANS = {
    "one": made(),
    "three": made(**auto(3)),
    "cuda": made("cuda", 8, **auto(2), run={"name": "x", "resume": "auto"}),
    "named": made("npu", **listed(trains=8, generates=4), services={"platform": "ascend", "coordinator": {"port": 7000}}),
}


def documents(plan: Plan, claim: str = "") -> list[dict[str, Any]]:
    (text,) = render(plan, claim).values()
    return list(yaml.load_all(text, yaml.CSafeLoader))


def of_kind(kind: str, plan: Plan, claim: str = "") -> list[dict[str, Any]]:
    return [document for document in documents(plan, claim) if document["kind"] == kind]


def containers(plan: Plan) -> list[dict[str, Any]]:
    return [job["spec"]["template"]["spec"]["containers"][0] for job in of_kind("Job", plan)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_manifests_are_valid(plan: Plan) -> None:
    found = documents(plan)
    for document in found:
        kubernetes_validate.validate(document, "1.31", strict=True)
    kubernetes_validate.validate(found[-1], kubernetes_validate.latest_version(), strict=True)
    found[-1]["spec"]["completions"] = "one"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], "1.31", strict=True)


SECRETS: dict[str, Any] = {
    "rollout": {"engine_args": {"hf_token": {"from": "HF_TOKEN"}}},
    "trainer": {"env": {"HF_TOKEN": {"from": "HF_TOKEN"}, "WANDB_API_KEY": {"from": "WANDB"}}},
}


def test_variables_that_the_configuration_reads_are_of_a_secret(tmp_path: Path) -> None:
    plan = made(**auto(2), services=SECRETS)
    (text,) = render(plan).values()
    assert "kubectl create secret generic sluice-a-run-env --from-env-file FILE      of lines HF_TOKEN=... WANDB=..." in text
    for container in containers(plan):
        kept = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "secretKeyRef" in one["valueFrom"]}
        assert kept.pop("SLUICE_SECRET") == {"name": "sluice-a-run", "key": "SLUICE_SECRET"}
        assert kept == {name: {"name": "sluice-a-run-env", "key": name} for name in ("HF_TOKEN", "WANDB")}
    (config_map,) = of_kind("ConfigMap", plan)
    assert reloaded(config_map["data"]["config.yaml"], tmp_path).services.trainer == plan.config.services.trainer
    assert "create secret" not in next(iter(render(PLANS["one"]).values()))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_agents_find_the_coordinator_by_the_name_of_the_first_pod(plan: Plan, tmp_path: Path) -> None:
    (config_map,), (service,), jobs = (of_kind(kind, plan) for kind in ("ConfigMap", "Service", "Job"))
    config = reloaded(config_map["data"]["config.yaml"], tmp_path)
    first, domain = config.services.coordinator.host.split(".")
    assert first == f"{jobs[0]['metadata']['name']}-0"
    pods = [job["spec"]["template"] for job in jobs]
    assert {pod["spec"]["subdomain"] for pod in pods} == {domain} == {service["metadata"]["name"]}
    assert all(service["spec"]["selector"].items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    served = (plan.config.services.coordinator.port or 29400,) * 2
    assert (config.services.coordinator.port, service["spec"]["ports"][0]["port"]) == served
    assert config.cluster.min_nodes == (0 if plan.named else sum(job["spec"]["completions"] for job in jobs))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_node_is_probed_by_asking_the_coordinator_with_the_runs_secret(plan: Plan) -> None:
    first, *others = containers(plan)
    commands = {tuple(first[probe]["exec"]["command"]) for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {tuple(other["readinessProbe"]["exec"]["command"]) for other in others} <= commands and len(commands) == 1
    given = yaml.safe_load(kubernetes.secret(plan, "ab")["secret.yaml"])
    for node in (first, *others):
        (variable,) = [entry for entry in node["env"] if entry["name"] == "SLUICE_SECRET"]
        assert variable["valueFrom"]["secretKeyRef"] == {"name": given["metadata"]["name"], "key": "SLUICE_SECRET"}
    assert given["stringData"] == {"SLUICE_SECRET": "ab"}
    startup = first["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= plan.config.deadlines.start
    (config_map,) = of_kind("ConfigMap", plan)
    for other in others:
        *asks, address = other["readinessProbe"]["exec"]["command"]
        assert asks[:4] == ["python3", "-m", "sluice.health_check", "--run"]
        assert f"host: {address.rpartition(':')[0]}\n" in config_map["data"]["config.yaml"]
        assert "livenessProbe" not in other


def test_the_coordinators_node_waits_until_its_name_is_known() -> None:
    """Its agent would not know that it is the one. tests/loopback carries the command out."""
    first, others = of_kind("Job", PLANS["three"])
    (wait,) = first["spec"]["template"]["spec"]["initContainers"]
    assert wait["command"][:2] == ["timeout", "120"]
    assert wait["command"][-1] == "sluice-a-run-first-0.sluice-a-run"
    assert "initContainers" not in others["spec"]["template"]["spec"]
    (container,) = containers(made(warmup={"max_seconds": 500}, deadlines={"start": 100}))
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 600


def test_nodes_get_their_devices_and_names() -> None:
    first, others = containers(PLANS["cuda"])
    assert first["resources"] == others["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert others["args"][-7:] == [
        *("--name", "other-$(NODE_INDEX)", "--address", "$(POD_IP)", "--devices", "8", "/etc/sluice/config.yaml")
    ]
    assert {"NODE_INDEX", "POD_IP", "SLUICE_SECRET"} == {variable["name"] for variable in others["env"]}
    trains, generates = containers(PLANS["named"])
    assert trains["resources"] == {"limits": {"huawei.com/Ascend910": 8}}
    assert generates["resources"] == {"limits": {"huawei.com/Ascend910": 4}}
    assert generates["args"][generates["args"].index("--name") + 1] == "generates"
    assert trains["command"] == ["with-cann", "torchrun"]
    assert trains["image"] == "sluice:ascend"
    (alone,) = containers(PLANS["one"])
    assert "resources" not in alone
    assert "--devices" not in alone["args"]


def test_a_node_comes_back_but_the_coordinators_only_where_the_run_resumes() -> None:
    first, others = of_kind("Job", PLANS["three"])
    assert first["spec"]["backoffLimit"] == 0
    assert others["spec"]["backoffLimitPerIndex"] == 3
    assert others["spec"]["completions"] == others["spec"]["parallelism"] == 2
    first, others = of_kind("Job", PLANS["cuda"])
    assert first["spec"]["backoffLimitPerIndex"] == 3


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_pods_are_ordinary_users_with_the_run_on_shared_storage(plan: Plan) -> None:
    (claim,) = of_kind("PersistentVolumeClaim", plan)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for job in of_kind("Job", plan):
        pod = job["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in pod["volumes"]
        assert {"name": "shared", "mountPath": "/home/sluice/runs"} in pod["containers"][0]["volumeMounts"]
        assert pod["terminationGracePeriodSeconds"] > 30  # what torchrun leaves an agent


def test_storage_that_is_there_is_not_claimed_again_and_a_long_name_is_refused() -> None:
    assert of_kind("PersistentVolumeClaim", PLANS["one"], "team") == []
    (job,) = of_kind("Job", PLANS["one"], "team")
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "team"}} in job["spec"]["template"]["spec"]["volumes"]
    with pytest.raises(ConfigError, match=r"run\.name: too long"):
        render(made(run={"name": "x" * 60}))


def test_only_the_runs_own_pods_may_connect() -> None:
    (policy,) = of_kind("NetworkPolicy", PLANS["three"])
    own = policy["spec"]["podSelector"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    for job in of_kind("Job", PLANS["three"]):
        assert own["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
