"""The fork server: it imports what services of models need, and forks them: `python -m services.fork_server ROLE ...`

::

    agent ── ForkRequest, input, log ──► this ── fork ──► one that ends at once ── fork ──► the service ── its pid ──► agent

Since the one between ends, the kernel gives the service to the agent as its own child (`launcher/node/fork_server.py`). Nothing
here starts a thread or touches a device: neither would be whole in a process that is forked. Standard input is the agent's
socket.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import services
from runtime.process import os_process
from runtime.process.os_process import LARGEST, ForkRequest
from services.process import TORCH, TRANSFORMERS

_MODELS = (
    "services.model_service",
    *TORCH,
    "runtime.scoring.scorer_torch",
    "runtime.rollout.torch.engine",
    "runtime.weights.receiver",
)
_TRAINED = (*TRANSFORMERS, "runtime.trainer.rank")
_ARGUMENTS = (45, 46)  # in /proc/PID/stat, counted from what follows the name: where the command line begins and ends


def serve(agent: socket.socket) -> list[str]:
    """Fork what is asked for. Returns in each process that was forked, with its command, and in this one, with none, once the
    agent is gone."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, LARGEST, 2)
        if not data:
            return []
        request, (given, log) = msgspec.msgpack.decode(data, type=ForkRequest), descriptors
        parent, (adopted, between_ended) = os.getppid(), os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(between_ended)
            os.read(adopted, 1)  # nothing: until the one between is gone
            os.close(adopted)
            return _become(request, given, log, agent, parent)
        os.waitpid(between, 0)
        for descriptor in (between_ended, adopted, given, log):
            os.close(descriptor)


def _become(request: ForkRequest, given: int, log: int, agent: socket.socket, parent: int) -> list[str]:
    """What the agent does for those that it starts itself is done here; returns the command. Where the agent does not wait any
    more, or `parent`, which it is, has not adopted this process, it ends."""
    services.BEGAN = time.monotonic()
    os_process.die_with_parent(parent)
    os_process.hold_signals()
    os.setsid()
    _show(request.command)
    os.environ.clear()
    os.environ.update(request.env)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # libgomp has read the variable long since
    agent.send(str(os.getpid()).encode())
    agent.close()
    for descriptor, place in ((given, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(given)
    os.close(log)
    return request.command


def _show(command: Sequence[str]) -> None:
    """Have `ps` show the command line of a service that was started by itself, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[index]) for index in _ARGUMENTS)
    line = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    os_process.stacks_on_signal()  # and those that live by it do not end by it
    gc.disable()  # nearly all of it stays; what is forked turns it on again once it has loaded
    for module in (*_MODELS, *(_TRAINED if {"trainer", "critic"} & set(sys.argv) else ())):
        importlib.import_module(module)
    services.IMPORTED = time.monotonic() - services.BEGAN
    gc.freeze()
    if command := serve(socket.socket(fileno=os.dup(0))):
        sys.argv[:] = command[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
