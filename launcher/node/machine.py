"""What of this machine the processes' environment and placement depend on. Loads no torch."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from runtime.cluster.topology import has_several_nodes
from runtime.config import Config
from runtime.errors import UserError
from runtime.process import keys
from runtime.process.network import is_loopback, own_address

Kind = Literal["npu", "cuda", "cpu"]

# By kind: the variable that says which devices a process sees, and the device files that there are one each of.
VISIBLE: dict[Kind, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_FILES: dict[Kind, re.Pattern[str]] = {"npu": re.compile(r"davinci\d+"), "cuda": re.compile(r"nvidia\d+")}


class Machine(Struct, frozen=True, kw_only=True):
    """`devices`: its accelerators of one kind, by the names that the kind's variable knows them by (indices as a rule): those
    which the launcher's own environment leaves. `cpus`: those that processes may be given. `jemalloc`: the library's path, or
    "". `variables`: the names of what is in the environment."""

    kind: Kind = "cpu"
    devices: tuple[str, ...] = ()
    cpus: frozenset[int] = frozenset()
    jemalloc: str = ""
    preload: str = ""  # LD_PRELOAD of the launcher
    variables: frozenset[str] = frozenset()


def this_machine(root: Path = Path("/")) -> Machine:
    """Looks at device files and libraries below `root`, and at the launcher's environment."""
    folder = root / "dev"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = [path for path in jemalloc_paths(platform.machine()) if (root / path.lstrip("/")).is_file()]
    kind: Kind = next((kind for kind, pattern in _FILES.items() if any(map(pattern.fullmatch, names))), "cpu")
    return Machine(
        kind=kind,
        devices=_devices(kind, names) if kind != "cpu" else (),
        cpus=frozenset(os.sched_getaffinity(0)),
        jemalloc=found[0] if found else "",
        preload=os.environ.get("LD_PRELOAD", ""),
        variables=frozenset(os.environ),
    )


def _devices(kind: Kind, names: list[str]) -> tuple[str, ...]:
    """Those that the environment names, else all, in the order of their indices."""
    visible = os.environ.get(VISIBLE[kind])
    if visible is not None:
        return tuple(filter(None, (name.strip() for name in visible.split(","))))
    count = sum(_FILES[kind].fullmatch(name) is not None for name in names)
    return tuple(map(str, range(count)))


def on_this_machine(config: Config, address: str = "") -> Config:
    """With this machine's own address as `network.interface`: `address` where it is given, else what fits that key.

    Raises UserError when there is none, or none that other nodes reach.
    """
    key, given = ("--address", address) if address else ("network.interface", config.network.interface)
    own = own_address(given, config.services.coordinator.host, key)
    if has_several_nodes(config.cluster) and is_loopback(own):
        raise UserError(
            f"{key}: '{given}' gives this node {own}, by which no other is reached; must be "
            "its address, a network that it is in, or an interface"
        )
    return replace(config, network=replace(config.network, interface=own))


def check_secret(config: Config) -> None:
    """Raises UserError where other nodes cannot know the secret of this one."""
    apart = has_several_nodes(config.cluster) and not config.cluster.shared_folder
    if apart and keys.security(config.network) != "none" and keys.SECRET not in os.environ:
        raise UserError(f"{keys.SECRET}: missing; cluster.shared_folder is false, so it must be set, to the same on all nodes")


def jemalloc_paths(architecture: str) -> tuple[str, ...]:
    """Where distributions put jemalloc: Debian and Ubuntu (libjemalloc2), openEuler (jemalloc), one's own build."""
    return (
        f"/usr/lib/{architecture}-linux-gnu/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so.2",
    )
