"""Starts the ranks of a group that are on this node. They live and die together, and meet in a store of torch.distributed::

    socket on one address ──► rank 0 opens the store on it (`trainer.rank_group.join_group`) ◄── ranks on any node connect

If all ranks are on this node, the address is loopback, and the port any free one. No process unpickles what the store holds.
A rendezvous of torchrun listens on every address of the machine; with `--standalone` it unpickles what any client puts there.
The ranks get the key of their group in an environment variable, which no other user can read. The key is the value of
`os_process.STORE_KEY`, or a new one if all ranks are on this node.

With `--standby` this process imports the modules that the ranks need, and forks each rank: a rank that follows a dead one needs
no import, which takes seconds. This process joins no group, starts no thread and holds no device memory.

An agent may give a socket (`os_process.ORDERS`). From the agent's first order on, this process outlives its ranks: it reports
their end, and starts the next incarnation of all of them when the agent orders it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

import services
from runtime.process import network, os_process


class RanksOrder(Struct, kw_only=True):
    """An order of the agent. With `ends`, the reason: kill the ranks of this `incarnation`. Otherwise start these `ranks` of
    this incarnation of `world` ranks; they meet at the address `at` ("" = loopback) and get the variables `env`. Without
    `incarnation`: outlive the ranks from now on."""

    incarnation: int | None = None
    ends: str = ""
    ranks: list[int] = []
    world: int = 0
    at: str = ""
    env: dict[str, str] = {}


class RanksEnded(Struct, kw_only=True):
    """The report that all ranks of `incarnation` have ended. `code`: of the rank that ended first. `why`: "" if its log says
    it."""

    incarnation: int
    code: int
    why: str


LARGEST = 1 << 16  # bytes of a message


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", required=True, help="what messages call it")
    parser.add_argument("--ranks", required=True, help="those of this node: 0,1")
    parser.add_argument("--world", required=True, type=int, help="ranks on all nodes")
    parser.add_argument("--at", default="", help="HOST:PORT of the store, on the node of rank 0 (default: loopback, any port)")
    parser.add_argument("--standby", default="", help="modules that are imported before the ranks are forked: torch,services.x")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what Python is to run, and its arguments")
    return parser.parse_args()


def opened(at: str, world: int) -> socket.socket:
    """Return the listening socket of the store. Raises OSError."""
    host, _, port = at.rpartition(":") if at else (network.loopback(), "", "0")
    return network.listener(host.strip("[]"), int(port), world)


class LocalRanks:
    """The ranks of this node, of one incarnation after another."""

    def __init__(self, options: argparse.Namespace, orders: socket.socket | None):
        self.name, self._program, self._world = options.group, options.program, options.world
        self._ranks = [int(rank) for rank in options.ranks.split(",")]
        self._forks, self._orders = bool(options.standby), orders
        self.left: dict[int, int] = {}  # the rank of each living process, by pid
        self._executing: dict[int, subprocess.Popen[bytes]] = {}
        self.handlers: dict[int, Any] = {}  # those of a new rank, by signal
        self._reported = False  # the agent knows that the ranks have ended
        self.incarnation = int(os.environ.get(os_process.INCARNATION, "0"))

    def start(self, at: str, env: Mapping[str, str]) -> None:
        """Start all ranks. Raises OSError if the store's address is taken."""
        store = opened(at, self._world) if 0 in self._ranks and self._world > 1 else None
        if store is not None:
            at = network.host_port(*store.getsockname()[:2])
        host, _, port = at.rpartition(":")
        key = env.get(os_process.STORE_KEY) or secrets.token_hex(32)
        group = {
            **env,
            os_process.STORE_KEY: key,
            os_process.INCARNATION: str(self.incarnation),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(len(self._ranks)),
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
        }
        for index, rank in enumerate(self._ranks):
            own = {**group, "RANK": str(rank), "LOCAL_RANK": str(index)}
            passed = [int(os.environ[name]) for name in (os_process.MEMORY,) if name in os.environ]
            if store is not None and rank == 0:
                own[os_process.STORE] = str(store.fileno())
                passed.append(store.fileno())
            self.left[self._forked(own, store) if self._forks else self._executed(own, passed)] = rank
        if store is not None:
            store.close()  # rank 0 has it

    def _executed(self, own: Mapping[str, str], passed: Sequence[int]) -> int:
        command, env = (sys.executable, *self._program), {**os.environ, **own}
        process = subprocess.Popen(command, env=env, pass_fds=passed, preexec_fn=os_process.die_with_parent)
        self._executing[process.pid] = process  # Popen waits for a process that nothing refers to
        return process.pid

    def _forked(self, own: Mapping[str, str], store: socket.socket | None) -> int:
        if pid := os.fork():
            return pid
        os_process.die_with_parent()
        if store is not None and os_process.STORE in own:
            store.detach()  # the rank opens the descriptor
        if self._orders is not None:
            self._orders.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.environ.update(own)
        raise InRank(self._program)

    def kill(self) -> None:
        """Kill all ranks that live, and wait for their end."""
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)
        for pid in self.left:
            os.waitpid(pid, 0)
        self.left.clear()

    def reap(self) -> tuple[int, int] | None:
        """Return the rank and the exit code of a rank that has ended; None if none has."""
        pid, status = os.waitpid(-1, os.WNOHANG) if self.left else (0, 0)
        return (self.left.pop(pid), os.waitstatus_to_exitcode(status)) if pid else None

    def lead(self, woken: socket.socket) -> int:
        """Follow ranks and orders. `woken` has a byte after each signal. Return the exit code once all ranks have ended."""
        stays, asked, sources = False, False, [woken, *([self._orders] if self._orders is not None else [])]
        while True:
            ready = select.select(sources, [], [])[0]
            asked |= woken in ready and any(number in (signal.SIGINT, signal.SIGTERM) for number in woken.recv(LARGEST))
            stays = stays and not asked
            while (ended := self.reap()) is not None:
                rank, code = ended
                if not code:
                    continue
                self.kill()  # any error that they report from now on follows from that rank's end
                why = f"rank {rank} was killed by {signal.Signals(-code).name}" if code < 0 else ""
                if not stays or code == os_process.MISTAKE:
                    if why:
                        os_process.say_errors([f"{self.name}: run: {why}"])
                    return max(code, 1)
                self._report(code, why)
                break
            else:
                if not self.left and not self._reported:
                    return 0
            if not self.left and asked:
                return 0
            if self._orders in ready:
                self._obey()
                stays = not asked

    def _obey(self) -> None:
        """Carry out the next order."""
        assert self._orders is not None
        order = msgspec.json.decode(self._orders.recv(LARGEST), type=RanksOrder)
        if order.ends:
            if self.left and order.incarnation == self.incarnation:
                self.kill()
                self._report(-signal.SIGKILL, order.ends)
        elif order.incarnation is not None:
            self.kill()  # ranks of a group that has ended on another node
            self.incarnation, self._ranks, self._world, self._reported = order.incarnation, order.ranks, order.world, False
            self.start(order.at, order.env)

    def _report(self, code: int, why: str) -> None:
        assert self._orders is not None
        self._reported = True
        self._orders.send(msgspec.json.encode(RanksEnded(incarnation=self.incarnation, code=code, why=why)))


class InRank(BaseException):
    """Raised in a forked process, which leaves the code of its parent and becomes a rank: it runs `program`."""

    def __init__(self, program: Sequence[str]):
        self.program = program


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


def lead(options: argparse.Namespace) -> int:
    """Start the ranks, and return this process's exit code. Raises InRank in each forked rank."""
    for module in filter(None, options.standby.split(",")):
        importlib.import_module(module)
    gc.freeze()  # a collection would write to the pages that the ranks share
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    orders = socket.socket(fileno=int(os.environ[os_process.ORDERS])) if os_process.ORDERS in os.environ else None
    group = LocalRanks(options, orders)

    def hand_on(number: int, _: object) -> None:
        for pid in group.left:
            os.kill(pid, number)

    # SIGINT, SIGTERM and SIGHUP reach the ranks too, which report what follows from them.
    for number in HANDLED:
        group.handlers[number] = signal.signal(number, hand_on if number == signal.SIGUSR1 else lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    group.start(options.at, dict(os.environ))
    return group.lead(woken)


def main() -> None:
    try:
        sys.exit(lead(arguments()))
    except InRank as rank:
        program = rank.program
    services.BEGAN = time.monotonic()
    sys.argv = list(program)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
