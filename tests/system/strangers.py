"""What somebody tries who knows every address of a run, and has no key of it: a program that prints what came of it, as JSON.

`python -m tests.system.strangers TARGETS`, where TARGETS is JSON of `Targets`. With a `user` it becomes that user first.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
import msgspec
import torch.distributed as dist
from msgspec.structs import replace

from runtime.process import certificates, keys
from runtime.process.keys import Keys
from services.rpc import contract
from services.rpc.client import Channel
from tests.system.listeners import is_store

PATIENCE = 20.0  # seconds for one answer
ANOTHER = bytes(range(32))  # the secret of another run
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Targets(msgspec.Struct):
    """`processes`: HOST:PORT by name. `ports`: what else listens. `paths` and `pids`: what is to be read."""

    processes: dict[str, str]
    ports: list[str] = []
    paths: list[str] = []
    pids: list[int] = []
    user: int | None = None


class Found(msgspec.Struct):
    """`codes`: how many calls ended so. `served`: the calls that did not end with a refusal. `stores`: how many names of each
    were overwritten and deleted. `read`: what could be read."""

    codes: dict[str, int] = {}
    served: list[str] = []
    stores: dict[str, int] = {}
    read: list[str] = []


def strangers() -> Iterator[tuple[str, Keys | None]]:
    yield "no key", None
    for party in (keys.COORDINATOR, keys.OPERATOR, keys.node_agent("first"), keys.process("rollout-0", 0)):
        yield f"another run's {party}", Keys(name=party, secret=ANOTHER)
    own = Keys(name=keys.COORDINATOR, secret=ANOTHER)
    yield "another run's certificate", replace(own, certificates=certificates.issued(keys.authority(ANOTHER), own.name))


def paths() -> list[str]:
    """Every method that a process of a run may have."""
    services = sorted({service for service, _ in contract.METHODS})
    sessions = [f"/{contract.PACKAGE}.{service}/Session" for service in services]
    return [*(method.path for method in contract.METHODS.values()), *sessions, REFLECTION]


async def call_all(processes: dict[str, str], found: Found) -> None:
    codes: Counter[str] = Counter()
    for name, address in processes.items():
        for who, own in strangers():
            called = name if name == keys.COORDINATOR else keys.process(name, 0)
            async with Channel(address, own, called) as channel:
                for path in paths():
                    code = await _code(channel, path)
                    codes[code.name] += 1
                    if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
                        found.served.append(f"{path} of {name} to {who}: {code.name}")
    found.codes = dict(codes)


async def _code(channel: Channel, path: str) -> grpc.StatusCode:
    try:
        await channel.grpc.unary_unary(path)(b"", timeout=PATIENCE, metadata=channel.metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def spoil(address: str) -> int:
    """Overwrite and delete every name of the store at `address`; returns how many there were."""
    ip, _, port = address.rpartition(":")
    store = dist.TCPStore(ip, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    names = store.list_keys()
    for name in (*names, "epoch/1/transfer/1"):
        store.set(name, b"x")
    for name in names[::2]:
        store.delete_key(name)
    return len(names)


def readable(path: str) -> bool:
    try:
        return bool(Path(path).read_bytes())
    except OSError:
        return False


def look_into(pid: int) -> Iterator[str]:
    """What of a process's memory and environment can be read."""
    for name in ("environ", "mem", "maps"):
        with suppress(OSError), Path(f"/proc/{pid}/{name}").open("rb") as file:
            if name != "maps" or file.read(1):
                yield f"{pid}: {name}"
    with suppress(OSError):
        yield from (f"{pid}: {descriptor}" for descriptor in Path(f"/proc/{pid}/fd").iterdir())


def sockets() -> list[str]:
    """Every abstract unix socket of a run. Each user of the machine can connect to such a one, and fill it."""
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return [name for name in names if name.startswith("@sluice-")]


def main() -> None:
    targets, found = msgspec.json.decode(sys.argv[1], type=Targets), Found()
    if targets.user is not None:
        os.setgroups([])
        os.setresgid(targets.user, targets.user, targets.user)
        os.setresuid(targets.user, targets.user, targets.user)
    asyncio.run(call_all(targets.processes, found))
    found.stores = {address: spoil(address) for address in targets.ports if is_store(address)}
    found.read = [path for path in targets.paths if readable(path)]
    found.read += [what for pid in targets.pids for what in look_into(pid)]
    if targets.user is not None:
        found.read += sockets()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
