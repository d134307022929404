"""What of this machine the environment of its processes depends on. Loads no torch."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config
from runtime.network import own_address

_NPU = re.compile(r"davinci\d+")


class Machine(Struct, frozen=True, kw_only=True):
    """`visible`: the NPUs that the launcher's own environment leaves, by index; `jemalloc`: the library's path, or ""."""

    npus: int = 0
    visible: tuple[int, ...] | None = None
    jemalloc: str = ""
    preload: str = ""  # LD_PRELOAD of the launcher


def this_machine(root: Path = Path("/")) -> Machine:
    """Looks at device files and libraries below `root`."""
    devices = root / "dev"
    found = [path for path in jemalloc_paths(platform.machine()) if (root / path.lstrip("/")).is_file()]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    return Machine(
        npus=sum(_NPU.fullmatch(entry.name) is not None for entry in devices.iterdir()) if devices.is_dir() else 0,
        visible=tuple(int(index) for index in visible.split(",") if index.strip().isdecimal()) or None,
        jemalloc=found[0] if found else "",
        preload=os.environ.get("LD_PRELOAD", ""),
    )


def on_this_machine(config: Config) -> Config:
    """With this machine's own address as `network.interface`. Raises UserError when it has none that fits."""
    address = own_address(config.network.interface, config.services.coordinator.host)
    return replace(config, network=replace(config.network, interface=address))


def jemalloc_paths(architecture: str) -> tuple[str, ...]:
    """Where distributions put jemalloc: Debian and Ubuntu (libjemalloc2), openEuler (jemalloc), one's own build."""
    return (
        f"/usr/lib/{architecture}-linux-gnu/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so.2",
    )
