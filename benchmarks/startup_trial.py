"""What `bench startup` measures: a control plane and idle processes, Sluice's or Ray's.

`python -m benchmarks.startup_trial sluice|ray N` prints a line once each of the N answers, and ends with its standard
input.
`python -m benchmarks.startup_trial idle ...` is one of Sluice's N: a service like any other, with nothing to load.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from runtime.status import Registration
from runtime.types import ScoreRequest, Scores
from services import process
from services.rpc import client, contract
from services.rpc.server import Server
from sluice import start

DEADLINE = 60.0
HOST = "127.0.0.1"


class Idle(process.Service):
    role = "reward"

    def load(self) -> None:
        """There is nothing."""

    async def score(self, request: ScoreRequest) -> Scores:
        raise AssertionError("nobody asks")


async def sluice(count: int) -> None:
    """Launcher and coordinator in one process: what supervises, and what takes registrations and asks each how it is."""
    from launcher.node.supervisor import Supervisor
    from launcher.node.topology import ProcessSpec

    registered: asyncio.Queue[Registration] = asyncio.Queue()

    async def register(registration: Registration) -> None:
        registered.put_nowait(registration)

    server = Server({"Coordinator": {"Register": register}})
    address = server.bind(HOST, 0)
    await server.start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text("run: {name: startup}\nnetwork: {security: none}\n")
        supervisor = Supervisor(Path(folder))
        try:
            for index in range(count):
                arguments = ("--config", str(config), "--name", f"reward-{index}", "--coordinator", address)
                command = start.command("benchmarks.startup_trial", "idle", *arguments)
                await supervisor.start(ProcessSpec(name=f"reward-{index}", role="reward", command=command, env={}))
            for _ in range(count):
                one = await asyncio.wait_for(registered.get(), DEADLINE)
                async with client.Channel(one.address) as channel:
                    await client.call(channel, one.name, contract.METHODS["Process", "Status"], None, DEADLINE)
            await _until_told()
        finally:
            await supervisor.end_all(1.0)
            await server.stop(grace=0.2)


async def with_ray(count: int) -> None:
    """As `ray.init()` makes it, but for the folder, which is removed."""
    import ray

    class EmptyActor:
        def ping(self) -> None: ...

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # else a token is left in the home folder
        ray.init(num_cpus=count, log_to_driver=False, _temp_dir=folder)
        try:
            actors: list[Any] = [ray.remote(EmptyActor).remote() for _ in range(count)]
            ray.get([actor.ping.remote() for actor in actors], timeout=DEADLINE)
            await _until_told()
        finally:
            ray.shutdown()


async def _until_told() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    kind = sys.argv[1]
    if kind == "idle":
        del sys.argv[1]
        process.main(Idle)
    else:
        asyncio.run({"sluice": sluice, "ray": with_ray}[kind](int(sys.argv[2])))


if __name__ == "__main__":
    main()
