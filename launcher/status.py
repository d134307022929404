"""`sluice status`: every process of a run in one table."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from runtime import layout
from runtime.errors import SluiceError, UserError
from runtime.status import Registration, Status, Topology
from services import session, wire

REFRESH = 1.0  # seconds
LAST_PORT = 65535


async def show(run: str, watch: bool) -> None:
    """Print the table once, or keep it up to date. Raises UserError when no coordinator answers."""
    address = address_of(run, "status")
    console = Console()
    table = await _table(address)
    if not watch:
        console.print(table)
        return
    with Live(table, console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(REFRESH)
            live.update(await _table(address), refresh=True)


def address_of(run: str, command: str) -> str:
    """Of the coordinator of a run, given its folder or host:port. Raises UserError."""
    folder = Path(run)
    if not folder.is_dir():
        host, _, port = run.rpartition(":")
        if host and port.isdecimal() and 0 < int(port) <= LAST_PORT:
            return run
        raise UserError(f"{command}: {run!r} is neither a run's folder nor host:port")
    try:
        return (folder / layout.ADDRESS).read_text().strip()
    except FileNotFoundError:
        raise UserError(f"{command}: no run is under way in {folder}") from None


async def _table(address: str) -> Table:
    try:
        async with session.open_channel(address) as channel:
            coordinator: Status = await session.call(channel, "coordinator", wire.METHODS["Process", "Status"])
            topology: Topology = await session.call(channel, "coordinator", wire.METHODS["Coordinator", "Processes"])
    except SluiceError as error:
        raise UserError(f"status: no coordinator at {address}: {error}") from None
    table = Table(title=coordinator.detail, title_justify="left")
    for column in ("process", "state", "version", "mailbox", "wait", "handled", "rates", "restarts", "pid", "address"):
        table.add_column(column)
    _row(table, coordinator)
    for process, status in zip(topology.processes, await asyncio.gather(*map(_status, topology.processes)), strict=True):
        _row(table, status, process.incarnation)
    return table


async def _status(process: Registration) -> Status:
    try:
        async with session.open_channel(process.address) as channel:
            return await session.call(channel, process.name, wire.METHODS["Process", "Status"])
    except SluiceError as error:
        return Status(
            role=process.role,
            name=process.name,
            state="unreachable",
            detail=str(error),
            pid=process.pid,
            address=process.address,
        )


def _row(table: Table, status: Status, restarts: int = 0) -> None:
    mailbox = status.mailbox
    rates = ", ".join(f"{name} {value:,.0f}/s" for name, value in status.rates.items() if not name.endswith("_seconds"))
    busy = status.rates.get("busy_seconds")
    table.add_row(
        status.name,
        status.state,
        str(status.version),
        f"{mailbox.depth}/{mailbox.capacity}",
        f"{mailbox.wait_seconds * 1000:.1f} ms",
        str(mailbox.handled),
        (f"busy {busy:.0%}, " if busy is not None else "") + rates,
        str(restarts),
        str(status.pid),
        status.address,
    )
