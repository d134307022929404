"""`sluice profile RUN --role ROLE`: records what processes of a run do while the run goes on."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from launcher.commands.status import address_of, asked, party, processes_of
from runtime import timeouts
from runtime.errors import SluiceError, UserError
from runtime.process import keys
from runtime.process.keys import Keys
from runtime.status import Profile, Profiled, Registration
from runtime.telemetry.shown import shown
from services.rpc import client, contract

LONGEST = 1_000_000
STEPS, SECONDS = 1, 5.0  # defaults; a process takes the unit that it is measured in


def run(options: argparse.Namespace) -> None:
    """Print what was written. Raises UserError with a line for each process that wrote nothing, once all have answered."""
    asyncio.run(_profile(options))


async def _profile(options: argparse.Namespace) -> None:
    address, own = address_of(options.run, "profile"), keys.of_user(options.run)
    for option in ("steps", "seconds", "timeout"):
        if (value := getattr(options, option)) is not None and not 0 < value <= LONGEST:
            raise UserError(f"profile: --{option}: {value:g}; must be above 0 and at most {LONGEST}")
    processes = await processes_of(address, own, "profile")
    wanted = chosen(processes, options.role, options.process)
    step = int((await asked(processes[0], own)).gauges["step"])
    lengths = {"steps": options.steps, "seconds": options.seconds}
    given = {name: value for name, value in lengths.items() if value is not None} or {"steps": STEPS, "seconds": SECONDS}
    request = Profile(step=step, memory=options.memory, **given)
    answers = await asyncio.gather(*(_of(process, request, own, options.timeout) for process in wanted), return_exceptions=True)
    for process, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, Profiled):
            for file in answer.files:
                print(shown(f"{process.name}: {file}"))
        elif not isinstance(answer, SluiceError):
            raise answer
    if faults := [f"profile: {answer}" for answer in answers if isinstance(answer, SluiceError)]:
        raise UserError("\n".join(faults))


def chosen(processes: Sequence[Registration], role: str | None, name: str | None) -> list[Registration]:
    """Return the processes of the role, or the process of the name. Raises UserError if there is none."""
    found = [one for one in processes if name in (None, one.name) and role in (None, one.role)]
    if not found:
        option = "process" if role is None else "role"
        known = dict.fromkeys(one.name if role is None else one.role for one in processes)
        raise UserError(f"profile: --{option}: '{name or role}' is not one of {', '.join(known)}")
    return found


async def _of(process: Registration, request: Profile, own: Keys | None, timeout: float) -> Profiled:
    """Let a process record. Raises its error, and ServiceFault if it is absent, ends, or takes longer than `timeout`."""
    async with client.Channel(process.address, own, party(process)) as channel:
        await channel.ready(process.name, timeouts.CONTROL_CALL)
        answer: Profiled = await client.call(channel, process.name, contract.METHODS["Process", "Profile"], request, timeout)
        return answer
