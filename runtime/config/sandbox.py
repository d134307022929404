"""Where programs of strangers run: what a model wrote, or an environment brings along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Literal

from runtime.config.base import Bytes, Processes, Seconds, Section

IN_CONTAINERS = ("docker", "apptainer")


class Sandbox(Section, frozen=True):
    """What a program may see and take. What is asked for and is not there is refused at the start."""

    runtime: Literal["bwrap", "subprocess", "docker", "apptainer"] = "bwrap"
    """`bwrap`: bubblewrap, without a daemon; `docker` and `apptainer`: containers of `image`; `subprocess`: limits alone, for
    programs that are trusted."""
    image: str = ""
    """Of `docker` and `apptainer`: an image on the machine that has python3, 3.9 or later. Empty: none, for the others."""
    timeout: Seconds = 8.0
    """Of a command, by the clock. `rewards.sandbox`: of all tests of a reply, below `rewards.timeout`."""
    cpu_seconds: Seconds = 8.0
    """Processor time of a command, of all its processes together."""
    memory: Bytes = 256 << 20
    """Of all processes together, counted 20 times a second; and what one of them may allocate, by the kernel.
    `rewards.sandbox`: at most `rewards.memory_bytes`."""
    processes: Processes = 32
    """Processes and threads at a time."""
    disk: Bytes = 64 << 20
    """Of the files in the program's folder, the only one that it can write to. They lie in memory, beside `memory`."""
    network: Literal["none", "gateway", "open"] = "none"
    """`none`: not even this machine; `gateway`: the run's gateway alone, with `bwrap`; `open`: all that this machine reaches,
    with `subprocess`, which can hold back nothing."""
    read: list[str] = []
    """Absolute paths that it may read besides the system's programs and libraries and Python's own."""


CODE_RULES = ("code", "code_share")  # whose programs run in `rewards.sandbox`


def sandbox_faults(key: str, sandbox: Sandbox) -> Iterator[str]:
    """What no machine can do, one line each. `key` is the section's."""
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
