"""Starts the ranks of a group that are on this node, which live and die together. They meet in a store of torch.distributed::

    socket on one address ──► rank 0 opens the store on it (`runtime.trainer.rank.join_group`) ◄── the others, on whatever node

Where all ranks are on this node that address is loopback, and the port any free one. Nobody unpickles what the store holds. A
rendezvous of torchrun listens on every address of the machine, and that of `--standalone` unpickles what anybody puts there.
The ranks get the key of their group in the environment, whose variables no other user reads: that of `os_process.STORE_KEY`, or
a new one where all ranks are on this node.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys

from runtime.process import network, os_process


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", required=True, help="what messages call it")
    parser.add_argument("--ranks", required=True, help="those of this node: 0,1")
    parser.add_argument("--world", required=True, type=int, help="ranks on all nodes")
    parser.add_argument("--at", default="", help="HOST:PORT of the store, on the node of rank 0 (default: loopback, any port)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what Python is to run, and its arguments")
    return parser.parse_args()


def opened(at: str, world: int) -> socket.socket:
    """The socket of the store. Raises OSError."""
    host, _, port = at.rpartition(":") if at else (network.loopback(), "", "0")
    return network.listener(host.strip("[]"), int(port), world)


def start(options: argparse.Namespace) -> dict[int, tuple[int, subprocess.Popen[bytes]]]:
    """The ranks, by their pid."""
    ranks, at = [int(rank) for rank in options.ranks.split(",")], options.at
    store = opened(at, options.world) if 0 in ranks else None
    if store is not None:
        at = network.host_port(*store.getsockname()[:2])
    host, _, port = at.rpartition(":")
    key = os.environ.get(os_process.STORE_KEY) or secrets.token_hex(32)
    group = {
        os_process.STORE_KEY: key,
        "WORLD_SIZE": options.world,
        "LOCAL_WORLD_SIZE": len(ranks),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
    }
    started = {}
    for index, rank in enumerate(ranks):
        own = {**group, "RANK": rank, "LOCAL_RANK": index}
        passed: tuple[int, ...] = ()
        if store is not None and rank == 0:
            own[os_process.STORE], passed = store.fileno(), (store.fileno(),)
        process = subprocess.Popen(
            (sys.executable, *options.program),
            env={**os.environ, **{name: str(value) for name, value in own.items()}},
            pass_fds=passed,
            preexec_fn=os_process.die_with_parent,
        )
        started[process.pid] = rank, process
    if store is not None:
        store.close()  # it is rank 0's
    return started


def main() -> None:
    options = arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the ranks get it too, and say what comes of it
    left: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def hand_on(number: int, _: object) -> None:
        for _rank, process in left.values():
            process.send_signal(number)

    signal.signal(signal.SIGUSR1, hand_on)
    left |= start(options)
    while left:
        pid, status = os.wait()
        rank, _ = left.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            for _, process in left.values():
                process.kill()  # whatever they say from now on comes of that rank's end
            if code < 0:
                os_process.say_errors([f"{options.group}: run: rank {rank} was killed by {signal.Signals(-code).name}"])
            sys.exit(max(code, 1))


if __name__ == "__main__":
    main()
