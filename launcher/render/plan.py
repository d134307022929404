"""The input for every scheduler's files: a run's nodes, their devices, and the configuration that they share. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from runtime.cluster.placement import NodeResources
from runtime.cluster.topology import processes, warm_up_seconds
from runtime.config import Config
from runtime.config.secret_values import references
from runtime.config.service_checks import cluster_faults, scraping_faults
from runtime.errors import ConfigError
from runtime.process.network import is_loopback

Device = Literal["cpu", "cuda", "npu"]

PORT = 29400  # the coordinator's, if the configuration gives none
METRICS_PORT = 28400  # likewise, for its metrics
RETURNS = 3  # times that a node may come back by itself
HOME = PurePosixPath("/home/sluice")  # the images' working folder
CONFIG_PATH = "/etc/sluice/config.yaml"
AGENT = ("--rdzv-backend", "sluice", "--nproc-per-node", "1", "--max-restarts", "0", "-m", "sluice.node")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LONGEST_LABEL = 63

_IMAGES: dict[Device, str] = {"cpu": "sluice", "cuda": "sluice:cuda", "npu": "sluice:ascend"}


class Plan(Struct, frozen=True, kw_only=True):
    """`nodes`: the first one runs the coordinator; a name is "" if the scheduler gives it. `named`: the configuration names the
    nodes; otherwise any node may join."""

    name: str  # of the run, fit for host names
    config: Config
    nodes: tuple[NodeResources, ...]
    named: bool
    device: Device
    port: int
    image: str

    @property
    def launcher(self) -> list[str]:
        """The command that starts an agent in one of the images."""
        return ["with-cann", "torchrun"] if self.device == "npu" else ["torchrun"]

    @property
    def start_seconds(self) -> float:
        """Seconds until the coordinator serves, with the warm-up before that."""
        return self.config.deadlines.start + warm_up_seconds(self.config)

    @property
    def restartable(self) -> bool:
        """True if a restarted coordinator goes on; otherwise it would refuse the folder, or begin anew in it."""
        return self.config.run.resume == "auto"

    @property
    def health(self) -> list[str]:
        """The command that asks a process for its health; the address follows it."""
        return ["python3", "-m", "sluice.health_check", "--run", str(HOME / self.config.run.dir)]

    @property
    def variables(self) -> list[str]:
        """The variables of the nodes' environment that the configuration reads, by `{from: NAME}`."""
        names = {name for path, role in processes(self.config).items() for name in references(role, path).values()}
        settings = self.config.metrics.prometheus
        return sorted(names | ({settings.token.variable} if settings is not None and settings.token is not None else set()))

    def placed_at(self, host: str) -> Config:
        """Return the configuration of all nodes, with the coordinator at `host`."""
        config = self.config
        coordinator = replace(config.services.coordinator, host=host, port=self.port)
        return replace(config, services=replace(config.services, coordinator=coordinator))


def plan(config: Config, device: Device | None = None, devices: int | None = None, image: str = "") -> Plan:
    """Plan the nodes of a resolved `config`. `device`: None takes it from the platform. `devices`: accelerators of the nodes
    for which the configuration gives no number. Raises ConfigError."""
    device = device or ("npu" if config.services.platform == "ascend" else "cpu")
    faults = list(_faults(config, device, devices))
    if faults:
        raise ConfigError(faults)
    cluster, network, metrics = config.cluster, config.network, config.metrics
    named = cluster.nodes != "auto"
    if cluster.nodes == "auto":
        cluster = replace(cluster, min_nodes=max(1, cluster.min_nodes))
        nodes = [NodeResources("", devices or 0)] * cluster.min_nodes
    else:
        counts = [devices if node.devices is None else node.devices for node in cluster.nodes]
        nodes = [NodeResources(node.name, count or 0) for node, count in zip(cluster.nodes, counts, strict=True)]
    if is_loopback(network.interface):
        network = replace(network, interface="auto")
    if (settings := metrics.prometheus) is not None:
        metrics = replace(metrics, prometheus=replace(settings, port=settings.port or METRICS_PORT))
    config = replace(config, cluster=cluster, network=network, metrics=metrics)
    if faults := list(scraping_faults(config)):
        raise ConfigError(faults)
    return Plan(
        name=f"sluice-{label(config.run.name)}",
        config=config,
        nodes=tuple(nodes),
        named=named,
        device=device,
        port=config.services.coordinator.port or PORT,
        image=image or _IMAGES[device],
    )


def _faults(config: Config, device: Device, devices: int | None) -> Iterator[str]:
    if not label(config.run.name):
        yield f"run.name: '{config.run.name}' must have a letter from a to z, or a digit"
    if devices is not None and devices < 1:
        yield f"--devices: {devices} is not an integer of at least 1"
    if device == "cpu" and devices is not None:
        yield f"--devices: {devices}, but --device is cpu; must be left out, or --device be cuda or npu"
    if config.cluster.nodes == "auto":
        if device != "cpu" and devices is None:
            yield f"--devices: missing; with --device {device} and cluster.nodes: auto it gives the number on each node"
        return
    yield from cluster_faults(config.cluster)
    for index, node in enumerate(config.cluster.nodes):
        if device == "cpu" and node.devices:
            yield f"cluster.nodes.{index}.devices: {node.devices}, but --device is cpu; must be 0, or --device be cuda or npu"
        elif device != "cpu" and node.devices is None and devices is None:
            yield f"cluster.nodes.{index}.devices: not set; with --device {device} it is needed, or --devices for all"


def label(text: str) -> str:
    """Return `text` with a hyphen in place of all that a host name may not have."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def check_names(names: Sequence[str], where: str) -> None:
    faults = [
        f"cluster.nodes.{index}.name: '{name}' cannot name a host {where}; must be up to {LONGEST_LABEL} of a-z, 0-9, -"
        for index, name in enumerate(names)
        if not LABEL.fullmatch(name) or len(name) > LONGEST_LABEL
    ]
    if faults:
        raise ConfigError(faults)


def shared_folder(config: Config) -> str:
    """Return the folder in the images where the nodes' volume is mounted: the one that holds the run's folder. Raises
    ConfigError if the volume would hide other folders."""
    if not config.cluster.shared_folder:
        raise ConfigError(["cluster.shared_folder: false, but the containers share a volume; must be true"])
    folder = (HOME / config.run.dir).parent
    if ".." in folder.parts or folder in (HOME, *HOME.parents):
        raise ConfigError([f"run.dir: '{config.run.dir}' must be in a folder that the nodes share, such as runs/NAME"])
    return str(folder)
