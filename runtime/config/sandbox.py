"""The sandbox of untrusted programs: code of replies, and programs of environments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Literal

from runtime.config.base import Bytes, Processes, Seconds, Section

IN_CONTAINERS = ("docker", "apptainer")


class Sandbox(Section, frozen=True):
    """What a program may access and use. The run is refused at the start if the machine lacks what is asked for."""

    runtime: Literal["bwrap", "subprocess", "docker", "apptainer"] = "bwrap"
    """`bwrap`: bubblewrap, without a daemon. `docker` and `apptainer`: containers of `image`. `subprocess`: only limits, for
    trusted programs."""
    image: str = ""
    """`docker` and `apptainer`: an image on the machine, with python3 of 3.9 or later. Empty: none, for the others."""
    timeout: Seconds = 8.0
    """Wall time of a command. `rewards.sandbox`: of all tests of a reply; below `rewards.timeout`."""
    cpu_seconds: Seconds = 8.0
    """Processor time of all processes of a command together."""
    memory: Bytes = 256 << 20
    """Of all processes together, checked 20 times a second, and of each. `rewards.sandbox`: at most `rewards.memory_bytes`."""
    processes: Processes = 32
    """Most processes and threads at a time."""
    disk: Bytes = 64 << 20
    """Bytes of files in the program's folder, the only folder that it can write. They are in memory, beside `memory`."""
    network: Literal["none", "gateway", "open"] = "none"
    """`none`: no network, not even this machine. `gateway` (`bwrap`): only the run's gateway. `open` (`subprocess`, which
    cannot restrict it): all that this machine reaches."""
    read: list[str] = []
    """Absolute paths that it may read, besides the programs and libraries of the system and Python."""


CODE_RULES = ("code", "code_share")  # whose programs run in `rewards.sandbox`


def sandbox_faults(key: str, sandbox: Sandbox) -> Iterator[str]:
    """Yield a line for each setting that no machine supports. `key` is the section's."""
    runtime, network = sandbox.runtime, sandbox.network
    networks = {"bwrap": ("none", "gateway"), "subprocess": ("open",)}.get(runtime, ("none",))
    if network not in networks:
        yield f"{key}.network: {network!r} is not what runtime {runtime!r} can do; must be {' or '.join(networks)}"
    if runtime in IN_CONTAINERS and not sandbox.image:
        yield f"{key}.image: empty; runtime {runtime!r} needs an image that has python3"
    if runtime not in IN_CONTAINERS and sandbox.image:
        yield f"{key}.image: {sandbox.image!r} is for docker and apptainer; must be empty with runtime {runtime!r}"
    if runtime == "subprocess" and sandbox.read:
        yield f"{key}.read: {sandbox.read[0]!r} must be left out: with runtime 'subprocess' a program reads all that you can"
    for path in sandbox.read:
        if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or set(path) & set(":,"):
            yield f"{key}.read: {path!r} must be an absolute path without '..', ':' and ','"
