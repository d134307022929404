"""`sluice scale rollout=N RUN`: more or fewer rollouts for a run that goes on."""

from __future__ import annotations

import argparse
import asyncio

from launcher.commands.status import address_of
from runtime.cluster.nodes import Scale, Scaled
from runtime.errors import Forbidden, Unanswered, UserError
from runtime.process import keys
from runtime.telemetry.shown import shown
from services.rpc import client, contract


def run(options: argparse.Namespace) -> None:
    print(asyncio.run(scale(options.run, options.wanted)))


async def scale(run: str, wanted: str) -> str:
    """Ask the coordinator for a number of rollouts. Return what it did, for the user. Raises UserError, ServiceFault."""
    role, equals, number = wanted.partition("=")
    if role != "rollout" or not equals or not number.isdecimal():
        raise UserError(f"scale: '{wanted}' is not rollout=N, with N the wanted number of rollouts")
    method = contract.METHODS["Coordinator", "Scale"]
    address = address_of(run, "scale")
    try:
        async with client.Channel(address, keys.of_user(run)) as channel:
            done: Scaled = await client.call(channel, "coordinator", method, Scale(role=role, replicas=int(number)))
    except (Unanswered, Forbidden) as error:
        raise UserError(f"scale: no coordinator at {address}: {error}") from None
    said = {"started": done.started, "stopped": done.stopped, "waiting for a node with room": done.pending}
    return shown("; ".join(f"{what}: {', '.join(names)}" for what, names in said.items() if names) or f"{wanted} already")
