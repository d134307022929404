"""`sluice render kubernetes`: manifests of a run. No I/O.

Nodes are pods of Indexed Jobs (batch/v1). A Job ends with the run; a StatefulSet does not, since its pods are always started
again. A Job's pods have stable host names and come back under them, which is what a JobSet would be taken for, and a JobSet
needs a controller that not every cluster has. The node with the coordinator is a Job of its own: it alone serves at a known
port, and restarts differently. The others are one Job, whose completions and parallelism may be changed while the run goes
on; nodes that the configuration names are a Job each.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from launcher.render import monitoring
from launcher.render.plan import (
    AGENT,
    CONFIG_PATH,
    HOME,
    LONGEST_LABEL,
    RETURNS,
    Device,
    Plan,
    check_names,
    shared_folder,
    to_yaml,
)
from runtime import timeouts
from runtime.config import loading
from runtime.errors import ConfigError
from runtime.process.keys import SECRET

RESOURCES: dict[Device, str] = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
STORAGE = "100Gi"

_UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class _JobNodes(Struct, frozen=True):
    """Nodes that are one Job. `agent`: their agents' name, $(NODE_INDEX) being a pod's place in the Job."""

    job: str
    agent: str
    count: int
    devices: int  # of each
    leads: bool = False  # runs the coordinator


def render(plan: Plan, claim: str = "") -> dict[str, str]:
    """Text by file name. `claim`: of the volume that the nodes share; when "", one is claimed. Raises ConfigError."""
    groups = _groups(plan)
    first = groups[0].job
    host = f"{first}-0.{plan.name}"
    documents = [
        *([] if claim else [_claim(plan)]),
        _config_map(plan, host),
        _service(plan),
        _network_policy(plan),
        *(_job(plan, group, f"{host}:{plan.port}", claim or _claim_name(plan)) for group in groups),
    ]
    given = " ".join(f"{name}=..." for name in plan.variables)
    header = [
        "Written by `sluice render kubernetes`: the nodes of a run as pods, in the namespace of whoever applies it.",
        *(
            [f"  kubectl create secret generic {_secret_name(plan)} --from-env-file FILE      of lines {given}"]
            if given
            else []
        ),
        "  kubectl apply --filename secret.yaml --filename sluice.yaml",
        f"  kubectl exec job/{first} -- sluice status {host}:{plan.port}",
        f"  kubectl delete job {first}      the run drains, saves a checkpoint and ends, and so do the other nodes",
    ]
    watched = "  From pods with the label app.kubernetes.io/name: prometheus, in the namespace of the run or in `monitoring`."
    return {"sluice.yaml": to_yaml(header, *documents), **monitoring.render(plan.config, host, watched)}


def _groups(plan: Plan) -> list[_JobNodes]:
    """The coordinator's node first. Raises ConfigError when a name is not one for a host."""
    if plan.named:
        check_names([node.name for node in plan.nodes], "in Kubernetes")
        named = [_JobNodes(f"{plan.name}-{node.name}", node.name, 1, node.devices) for node in plan.nodes]
        groups = [replace(named[0], leads=True), *named[1:]]
    else:
        devices, others = plan.nodes[0].devices, len(plan.nodes) - 1
        groups = [_JobNodes(f"{plan.name}-first", "first", 1, devices, leads=True)]
        if others:
            groups.append(_JobNodes(f"{plan.name}-others", "other-$(NODE_INDEX)", others, devices))
    for group in groups:
        if len(host := f"{group.job}-{group.count - 1}") > LONGEST_LABEL:
            raise ConfigError([f"run.name: too long: '{host}' names a host, and has more than {LONGEST_LABEL} characters"])
    return groups


def _labels(plan: Plan) -> dict[str, str]:
    return {"app.kubernetes.io/name": "sluice", "app.kubernetes.io/instance": plan.name}


def _object(plan: Plan, kind: str, name: str, api: str = "v1", **parts: Any) -> dict[str, Any]:
    """`parts`: what it has besides its head."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": _labels(plan)}, **parts}


def _secret_name(plan: Plan) -> str:
    """Of the Secret, made by the user, whose keys are the variables that the configuration reads."""
    return f"{plan.name}-env"


def secret(plan: Plan, digits: str) -> dict[str, str]:
    """Text by file name: that by which the pods know each other, hexadecimal `digits`."""
    document = _object(plan, "Secret", plan.name, stringData={SECRET: digits})
    return {"secret.yaml": to_yaml(["The run's secret: whoever has it can call, and stop, each process of the run."], document)}


def _claim_name(plan: Plan) -> str:
    return f"{plan.name}-shared"


def _claim(plan: Plan) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": STORAGE}}}
    return _object(plan, "PersistentVolumeClaim", _claim_name(plan), spec=spec)


def _config_map(plan: Plan, host: str) -> dict[str, Any]:
    return _object(plan, "ConfigMap", plan.name, data={"config.yaml": loading.to_yaml(plan.placed_at(host))})


def _service(plan: Plan) -> dict[str, Any]:
    """Names for the pods; also before they are ready, since they become so by finding each other."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(plan),
        "ports": [{"name": "coordinator", "port": plan.port}],
    }
    return _object(plan, "Service", plan.name, spec=spec)


def _network_policy(plan: Plan) -> dict[str, Any]:
    """Nobody but the run's own pods may open connections; and a Prometheus, whose requests carry the token."""
    own = {"matchLabels": _labels(plan)}
    rules: list[dict[str, Any]] = [{"from": [{"podSelector": own}]}]
    if (prometheus := plan.config.metrics.prometheus) is not None:
        scraper = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
        elsewhere = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        rule: dict[str, Any] = {"from": [scraper, elsewhere | scraper]}
        if (ports := plan.config.network.port_range) is not None:  # else any port may be one that serves metrics
            coordinator = [{"port": prometheus.port}] if prometheus.port else []
            rule["ports"] = [{"port": ports[0], "endPort": ports[1]}, *coordinator]
        rules.append(rule)
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": rules}
    return _object(plan, "NetworkPolicy", plan.name, "networking.k8s.io/v1", spec=spec)


def _job(plan: Plan, group: _JobNodes, coordinator: str, claim: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"completionMode": "Indexed", "completions": group.count, "parallelism": group.count}
    if group.leads and not plan.restartable:
        spec["backoffLimit"] = 0
    else:
        spec["backoffLimitPerIndex"] = RETURNS
        # What the cluster takes away, by draining a machine for example, is not the node's fault.
        disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        spec["podFailurePolicy"] = {"rules": [disrupted]}
    spec["template"] = {"metadata": {"labels": _labels(plan)}, "spec": _pod(plan, group, coordinator, claim)}
    return _object(plan, "Job", group.job, "batch/v1", spec=spec)


def _pod(plan: Plan, group: _JobNodes, coordinator: str, claim: str) -> dict[str, Any]:
    return {
        "subdomain": plan.name,
        "restartPolicy": "Never",  # a pod that ended is replaced by another, which is counted
        "terminationGracePeriodSeconds": timeouts.CONTAINER_GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(plan)},
            }
        ],
        **({"initContainers": [_name_is_known(plan, coordinator.rpartition(":")[0])]} if group.leads else {}),
        "containers": [_container(plan, group, coordinator)],
        "volumes": [
            {"name": "config", "configMap": {"name": plan.name}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        ],
    }


def _name_is_known(plan: Plan, host: str) -> dict[str, Any]:
    """The agent runs the coordinator if `host` is its own name, which the DNS has a moment after the pod has begun."""
    wait = 'until getent hosts "$0"; do sleep 1; done'
    return {
        "name": "name-is-known",
        "image": plan.image,
        "command": ["timeout", str(timeouts.POD_NAME), "sh", "-c", wait, host],
        "securityContext": _UNPRIVILEGED,
    }


def _container(plan: Plan, group: _JobNodes, coordinator: str) -> dict[str, Any]:
    devices = ("--devices", str(group.devices)) if group.devices else ()
    return {
        "name": "node",
        "image": plan.image,
        "command": list(plan.launcher),
        "args": [*AGENT, "--name", group.agent, "--address", "$(POD_IP)", *devices, CONFIG_PATH],
        "workingDir": str(HOME),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "NODE_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": plan.name, "key": SECRET}}},
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret_name(plan), "key": name}}}
                for name in plan.variables
            ),
        ],
        **({"resources": {"limits": {RESOURCES[plan.device]: group.devices}}} if group.devices else {}),
        **(_coordinator_probes(plan, coordinator) if group.leads else _node_probe(plan, coordinator)),
        "securityContext": _UNPRIVILEGED,
        "volumeMounts": [
            {"name": "config", "mountPath": str(PurePosixPath(CONFIG_PATH).parent), "readOnly": True},
            {"name": "shared", "mountPath": shared_folder(plan.config)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _probe(plan: Plan, coordinator: str) -> dict[str, Any]:
    """Not Kubernetes' own of gRPC, which has no certificate to show."""
    asked = {"exec": {"command": [*plan.health, coordinator]}, "timeoutSeconds": 10}
    return {**asked, "periodSeconds": 30, "failureThreshold": 3}


def _coordinator_probes(plan: Plan, coordinator: str) -> dict[str, Any]:
    """The coordinator serves grpc.health.v1 at its port from its start to its end."""
    probe = _probe(plan, coordinator)
    starts = {**probe, "periodSeconds": 10, "failureThreshold": math.ceil(plan.start_seconds / 10)}
    return {"startupProbe": starts, "livenessProbe": probe, "readinessProbe": probe}


def _node_probe(plan: Plan, coordinator: str) -> dict[str, Any]:
    """Another node is ready while it reaches the coordinator.

    There is no liveness of its own: its services' ports are known to the coordinator alone, which notices their silence, and to
    restart a node because the coordinator is away would take from the run what it needs to go on.
    """
    return {"readinessProbe": _probe(plan, coordinator)}
