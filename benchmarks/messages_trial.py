"""The other end of `sluice bench messages`: a service that answers at once, and a plain grpc.aio server, in one process.

`python -m benchmarks.messages_trial` prints the addresses, the plain one first, then ours with each `network.security`, and
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import grpc
import uvloop

from runtime.commands import CommitWeights, WeightsCommitted
from runtime.config import Network
from runtime.process import keys, os_process
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion
from services.model_service import Actor, Request
from services.rpc import contract
from services.rpc.server import Server

HOST = "127.0.0.1"
NETWORKS = {mode: Network(security=mode) for mode in ("none", "token", "tls")}
SECRET = bytes(keys.BYTES)  # that both ends know, and nobody has to guess
PLAIN = "/plain.Plain/Echo"


class Answering:
    """In the place of a rollout: a commit is answered at once, and a group is one token long."""

    busy = False

    async def receive(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            if isinstance(message, CommitWeights):
                request.reply(WeightsCommitted(0.0))
            elif isinstance(message, GroupRequest):
                request.reply(_generated(message))

    async def advance(self, interrupted: Any) -> None:
        raise AssertionError("there is nothing to advance")


def _generated(request: GroupRequest) -> GeneratedGroup:
    version = PolicyVersion()
    return GeneratedGroup(
        group_id=request.group_id,
        prompt_tokens=len(request.prompt),
        response_tokens=[1],
        truncated=0,
        oldest=version,
        newest=version,
        payload=b"",
    )


class _Plain(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers with what it was sent: bytes, not even decoded."""

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(_echo) if details.method == PLAIN else None


async def _echo(data: bytes, _: Any) -> bytes:
    return data


async def serve() -> None:
    actor = Actor("rollout-0", cast(Any, Answering()), batch=1024)
    working = asyncio.create_task(actor.run())

    handlers = {
        name: partial(actor.send, priority=contract.METHODS["Rollout", name].priority) for name in ("Generate", "CommitWeights")
    }
    agents = [keys.holder(network, keys.node_agent("a"), SECRET) for network in NETWORKS.values()]
    of_rollout = [None if agent is None else agent.of_process("rollout-0", 0) for agent in agents]
    ours = [Server({"Rollout": handlers}, keys=own) for own in of_rollout]
    plain = grpc.aio.server()
    plain.add_generic_rpc_handlers((_Plain(),))
    print(f"{HOST}:{plain.add_insecure_port(f'{HOST}:0')}", *(server.bind(HOST, 0) for server in ours), flush=True)
    for server in (plain, *ours):
        await server.start()
    await asyncio.to_thread(sys.stdin.read)
    working.cancel()
    for server in (plain, *ours):
        await server.stop(0.0)


if __name__ == "__main__":
    os_process.die_with_parent()
    uvloop.install()
    asyncio.run(serve())
