"""`sluice render compose`: a Compose file, one service for each node, all on one machine. No I/O."""

from __future__ import annotations

from typing import Any

from launcher.render import monitoring
from launcher.render.plan import AGENT, CONFIG_PATH, RETURNS, Plan, check_names, shared_folder, to_yaml
from runtime import timeouts
from runtime.config import loading

_DRIVER = (  # what containers are given of an Ascend machine's driver, as vllm-ascend's installation page has it
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
_MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


def render(plan: Plan) -> dict[str, str]:
    """Text by file name. Raises ConfigError."""
    names = [node.name for node in plan.nodes] if plan.named else [f"node-{index}" for index in range(len(plan.nodes))]
    check_names(names, "in Compose")
    services: dict[str, Any] = {}
    first = 0  # of the machine's accelerators that no node has yet
    for name, node in zip(names, plan.nodes, strict=True):
        services[name] = _service(plan, name, names[0], range(first, first + node.devices))
        first += node.devices
    # Compose stops what depends on others before those: so the coordinator drains the run while all nodes are there.
    if others := names[1:]:
        services[names[0]]["depends_on"] = others
    document = {
        "name": plan.name,
        "services": services,
        "networks": {"nodes": {}},
        "volumes": {"shared": {}},
        "configs": {"sluice": {"file": "./config.yaml"}},
    }
    header = [
        "Written by `sluice render compose`: the nodes of a run as containers of one machine.",
        f"  docker compose up --detach      then: docker compose exec {names[0]} sluice status {names[0]}:{plan.port}",
        "  docker compose down             the run drains, saves a checkpoint and ends",
    ]
    watched = f"  From the network {plan.name}_nodes, in which the containers have their names."
    return {
        "compose.yaml": to_yaml(header, document),
        "config.yaml": loading.to_yaml(plan.placed_at(names[0])),
        **monitoring.render(plan.config, names[0], watched),
    }


def _service(plan: Plan, name: str, coordinator: str, devices: range) -> dict[str, Any]:
    leads = name == coordinator
    health = ["CMD", *plan.health, f"{coordinator}:{plan.port}"]
    volumes: list[dict[str, Any]] = [{"type": "volume", "source": "shared", "target": shared_folder(plan.config)}]
    service: dict[str, Any] = {
        "image": plan.image,
        "hostname": name,
        "entrypoint": list(plan.launcher),
        "command": [*AGENT, "--name", name, *(("--devices", str(len(devices))) if devices else ()), CONFIG_PATH],
        "user": "1000:1000",
        "init": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "shm_size": "16gb",
        "networks": ["nodes"],
        **({"environment": plan.variables} if plan.variables else {}),  # with the values that the shell has, or .env
        "configs": [{"source": "sluice", "target": CONFIG_PATH}],
        "volumes": volumes,
        # A node is well while it reaches the coordinator.
        "healthcheck": {
            "test": health,
            "interval": "30s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{round(plan.start_seconds)}s",
        },
        "stop_grace_period": f"{timeouts.CONTAINER_GRACE}s",
        "restart": f"on-failure:{RETURNS}" if plan.restartable or not leads else "no",
    }
    if devices and plan.device == "cuda":
        reserved = {"driver": "nvidia", "device_ids": [str(index) for index in devices], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [reserved]}}}
    elif devices:
        service["devices"] = [f"{path}:{path}" for path in (*(f"/dev/davinci{index}" for index in devices), *_MANAGERS)]
        volumes += [{"type": "bind", "source": path, "target": path, "read_only": True} for path in _DRIVER]
    return service
