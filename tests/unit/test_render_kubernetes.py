"""The manifests: by Kubernetes' own schemas, and what they say of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.render.files import kubernetes, secret
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
    (text,) = kubernetes(plan, claim).values()
    return list(yaml.load_all(text, yaml.CSafeLoader))


def of_kind(kind: str, plan: Plan, claim: str = "") -> list[dict[str, Any]]:
    return [document for document in documents(plan, claim) if document["kind"] == kind]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_manifests_are_valid(plan: Plan) -> None:
    found = documents(plan)
    for document in found:
        kubernetes_validate.validate(document, "1.31", strict=True)
    kubernetes_validate.validate(found[-1], kubernetes_validate.latest_version(), strict=True)
    found[-1]["spec"]["completions"] = "one"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], "1.31", strict=True)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_agents_find_the_coordinator_by_the_name_of_the_first_pod_and_have_the_runs_secret(plan: Plan, tmp_path: Path) -> None:
    (config_map,), (service,), jobs = (of_kind(kind, plan) for kind in ("ConfigMap", "Service", "Job"))
    config = reloaded(config_map["data"]["config.yaml"], tmp_path)
    assert config.services.coordinator.host == f"{jobs[0]['metadata']['name']}-0.{service['metadata']['name']}"
    served = (plan.config.services.coordinator.port or 29400,) * 2
    assert (config.services.coordinator.port, service["spec"]["ports"][0]["port"]) == served
    assert config.cluster.min_nodes == (0 if plan.named else sum(job["spec"]["completions"] for job in jobs))
    given = yaml.safe_load(secret(plan, "ab")["secret.yaml"])
    assert given["stringData"] == {"SLUICE_SECRET": "ab"}
    for job in jobs:
        (variable,) = (one for one in job["spec"]["template"]["spec"]["containers"][0]["env"] if one["name"] == "SLUICE_SECRET")
        assert variable["valueFrom"]["secretKeyRef"] == {"name": given["metadata"]["name"], "key": "SLUICE_SECRET"}


def test_what_other_plans_have_otherwise() -> None:
    first, others = of_kind("Job", PLANS["three"])
    assert (first["spec"]["backoffLimit"], others["spec"]["backoffLimitPerIndex"]) == (0, 3)
    limits = [job["spec"]["template"]["spec"]["containers"][0].get("resources") for job in of_kind("Job", PLANS["named"])]
    assert limits == [{"limits": {"huawei.com/Ascend910": count}} for count in (8, 4)]
    (policy,) = of_kind("NetworkPolicy", PLANS["three"])
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    assert of_kind("PersistentVolumeClaim", PLANS["one"], "team") == []
    (job,) = of_kind("Job", PLANS["one"], "team")
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "team"}} in job["spec"]["template"]["spec"]["volumes"]
    (job,) = of_kind("Job", made(warmup={"max_seconds": 500}, deadlines={"start": 100}))
    probe = job["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 600
    with pytest.raises(ConfigError, match=r"run\.name: too long"):
        kubernetes(made(run={"name": "x" * 60}))
