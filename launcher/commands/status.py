"""`sluice status`: every process of a run, where it is and what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from runtime import run_files, timeouts
from runtime.errors import Forbidden, SluiceError, UserError
from runtime.process import keys
from runtime.process.keys import Keys
from runtime.status import Registration, Status, Topology
from runtime.telemetry.shown import LiteralTable, literal
from services.rpc import contract, session

LAST_PORT = 65535
UNREACHABLE = "unreachable"


async def show(run: str, watch: bool) -> None:
    """Print the tables once, or keep it up to date. Raises UserError when no coordinator answers."""
    address, own = address_of(run, "status"), keys.of_user(run)
    console = Console()
    tables = await _tables(address, own)
    if not watch:
        console.print(tables)
        return
    with Live(tables, console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(timeouts.STATUS_REFRESH)
            live.update(await _tables(address, own), refresh=True)


def address_of(run: str, command: str) -> str:
    """Of the coordinator of a run, given its folder or host:port. Raises UserError."""
    folder = Path(run)
    if not folder.is_dir():
        host, _, port = run.rpartition(":")
        if host and port.isdecimal() and 0 < int(port) <= LAST_PORT:
            return run
        raise UserError(f"{command}: {run!r} is neither a run's folder nor host:port")
    try:
        return (folder / run_files.ADDRESS).read_text().strip()
    except FileNotFoundError:
        raise UserError(f"{command}: no run is under way in {folder}") from None


async def _tables(address: str, own: Keys | None) -> Group:
    try:
        async with session.Channel(address, own) as channel:
            coordinator: Status = await session.call(channel, "coordinator", contract.METHODS["Process", "Status"])
            topology: Topology = await session.call(channel, "coordinator", contract.METHODS["Coordinator", "Processes"])
    except Forbidden as error:
        raise UserError(f"status: {address}: {error}; a run's folder has it, or {keys.SECRET}") from None
    except SluiceError as error:
        raise UserError(f"status: no coordinator at {address}: {error}") from None
    answers = await asyncio.gather(*(_status(process, own) for process in topology.processes))
    restarts = [0, *(process.incarnation for process in topology.processes)]
    return render([coordinator, *answers], restarts)


def render(statuses: Sequence[Status], restarts: Sequence[int]) -> Group:
    """Two tables that fit 80 columns, the coordinator's line first: where the processes are, and what they do."""
    processes = _columns(statuses[0].detail, ("process", "state", "version", "restarts", "pid", "address"))
    work = _columns("", ("process", "at", "open", "answered", "failed", "rates"))
    silent: list[Text] = []
    for status, restarted in zip(statuses, restarts, strict=True):
        place = str(restarted), str(status.pid), status.address
        processes.add_row(status.name, status.state, str(status.version), *place)
        if status.state == UNREACHABLE:
            silent.append(literal(f"{status.name}: {status.detail}"))
            continue
        calls = status.calls
        counts = str(calls.open), str(calls.answered), str(calls.failed)
        at = status.detail if status is not statuses[0] else ""
        work.add_row(status.name, at, *counts, _rates(status.rates))
    return Group(processes, work, *silent)


def _columns(title: str, names: Sequence[str]) -> LiteralTable:
    table = LiteralTable(title=title, title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _rates(rates: Mapping[str, float]) -> str:
    busy = rates.get("busy_seconds")
    told = [f"busy {busy:.0%}"] if busy is not None else []
    return ", ".join(told + [f"{name} {value:,.0f}/s" for name, value in rates.items() if not name.endswith("_seconds")])


async def _status(process: Registration, own: Keys | None) -> Status:
    try:
        async with session.Channel(process.address, own, keys.process(process.name, process.incarnation)) as channel:
            return await session.call(channel, process.name, contract.METHODS["Process", "Status"])
    except SluiceError as error:
        return Status(
            role=process.role,
            name=process.name,
            state=UNREACHABLE,
            detail=str(error),
            pid=process.pid,
            address=process.address,
        )
