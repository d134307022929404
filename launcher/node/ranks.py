"""Starts the ranks of a group that are on this node. They live and die together, and meet in a store of torch.distributed::

    socket on one address ──► rank 0 opens the store on it (`trainer.rank_group.join_group`) ◄── ranks on any node connect

If all ranks are on this node, the address is loopback, and the port any free one. No process unpickles what the store holds.
A rendezvous of torchrun listens on every address of the machine; with `--standalone` it unpickles what any client puts there.
The ranks get the key of their group in an environment variable, which no other user can read. The key is the value of
`os_process.STORE_KEY`, or a new one if all ranks are on this node.
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
    """Return the listening socket of the store. Raises OSError."""
    host, _, port = at.rpartition(":") if at else (network.loopback(), "", "0")
    return network.listener(host.strip("[]"), int(port), world)


def start(options: argparse.Namespace) -> dict[int, tuple[int, subprocess.Popen[bytes]]]:
    """Start the ranks. Return by pid each rank and its process."""
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
        store.close()  # rank 0 has it
    return started


def main() -> None:
    options = arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the ranks get the signal too, and report what follows from it
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
                process.kill()  # any error that they report from now on follows from that rank's end
            if code < 0:
                os_process.say_errors([f"{options.group}: run: rank {rank} was killed by {signal.Signals(-code).name}"])
            sys.exit(max(code, 1))


if __name__ == "__main__":
    main()
