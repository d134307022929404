"""`sluice status`: every process of a run, its address and its work; `sluice scale` and `profile` ask these processes."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from runtime import run_files, timeouts
from runtime.cluster.nodes import Scale, Scaled
from runtime.errors import Forbidden, SluiceError, Unanswered, UserError
from runtime.process import keys
from runtime.process.keys import Keys
from runtime.process.network import is_host_port, server_name
from runtime.status import Profile, Profiled, Registration, Status, Topology
from runtime.telemetry.shown import LiteralTable, literal, shown
from services.rpc import client, contract, security

UNREACHABLE = "unreachable"


def run(options: argparse.Namespace) -> None:
    """Print tables, once or kept up to date, or how to reach a process or gateways. Raises UserError without a coordinator."""
    asyncio.run(_show(options))


async def _show(options: argparse.Namespace) -> None:
    folder, console = Path(options.run), Console()
    address, own = address_of(options.run, "status"), keys.of_user(options.run)
    if options.gateway or options.grpcurl:
        known = [] if options.gateway else await processes_of(address, own, "status")
        certificates = folder / run_files.CERTIFICATES
        for line in endpoint(folder) if options.gateway else for_grpcurl(known, options.grpcurl, own, certificates):
            print(shown(line))
        return
    tables = await _tables(address, own)  # before `Live`: a first error is printed alone
    if not options.watch:
        console.print(tables)
        return
    with Live(tables, console=console, auto_refresh=False) as live:  # until Ctrl-C, or until the coordinator is gone
        while True:
            await asyncio.sleep(timeouts.STATUS_REFRESH)
            live.update(await _tables(address, own), refresh=True)


async def processes_of(address: str, own: Keys | None, command: str) -> list[Registration]:
    """Return all processes, the coordinator first. Raises UserError in the name of `command`."""
    with _user_errors(address, command):
        async with client.Channel(address, own) as channel:
            topology: Topology = await client.call(channel, "coordinator", contract.METHODS["Coordinator", "Processes"])
    coordinator = Registration(role="coordinator", name="coordinator", address=address, pid=0, host="")
    return [coordinator, *topology.processes]


def party(process: Registration) -> str:
    """Return the name that the process's keys are made for."""
    return process.name if process.name == keys.COORDINATOR else keys.process(process.name, process.incarnation)


def for_grpcurl(processes: Sequence[Registration], name: str, own: Keys | None, folder: Path) -> list[str]:
    """Return lines of a shell: the token as a variable, as any user can read command lines, and a function that calls grpcurl.
    With TLS, also write the user's certificate and its key to `folder`. Raises UserError."""
    found = next((one for one in processes if one.name == name), None)
    if found is None:
        raise UserError(f"--grpcurl: '{name}' is not one of {', '.join(one.name for one in processes)}")
    token, arguments = [], ["-plaintext"]
    if own is not None:
        token = [f"export SLUICE_TOKEN={shlex.quote(own.token(party(found)))}"]
        arguments = ["-expand-headers", "-H", f"{security.HEADER}:${{SLUICE_TOKEN}}", *_over(own, party(found), folder)]
    return [*token, f'sluice_grpcurl() {{ grpcurl {shlex.join([*arguments, found.address])} "$@"; }}']


def _over(own: Keys, called: str, folder: Path) -> list[str]:
    if not own.tls:
        return ["-plaintext"]
    files, name_of_peer = own.files, []
    if files is None:
        from runtime.process import certificates

        if not folder.parent.is_dir():
            raise UserError("--grpcurl: with TLS certificates are written: name the run's folder, not an address")
        files, name_of_peer = certificates.written(own.pem(), folder), ["-authority", server_name(called)]
    return ["-cacert", files.ca, "-cert", files.certificate, "-key", files.key, *name_of_peer]


def endpoint(folder: Path) -> list[str]:
    """Return what a program needs to reach the gateways of the run in `folder`, as lines of a shell. Raises UserError."""
    places = sorted((folder / run_files.GATEWAYS).glob("*"))
    own = keys.of_user(str(folder))
    key = "" if own is None else keys.of_programs(own.secret)
    lines = [f"export SLUICE_GATEWAY_URL={_url(place)}" for place in places]
    lines.append(f"export SLUICE_GATEWAY_KEY={key or 'none'}")
    if (ca := folder / run_files.GATEWAYS_CA).exists():
        lines.append(f"export SSL_CERT_FILE={shlex.quote(str(ca.absolute()))}")
    return lines


def _url(place: Path) -> str:
    """Return a gateway's URL, quoted: safe in a shell whatever the file holds. Raises UserError."""
    url = run_files.regular(place).read_text(encoding="utf-8", errors="replace").strip()
    scheme, _, address = url.partition("://")
    if scheme not in ("http", "https") or not is_host_port(address):
        raise UserError(f"--gateway: {place}: {url[:80]!r} is not http://HOST:PORT or https://HOST:PORT")
    return shlex.quote(url)


def address_of(run: str, command: str) -> str:
    """Return the address of a run's coordinator, given the run's folder or host:port. Raises UserError."""
    folder = Path(run)
    if not folder.is_dir():
        if is_host_port(run):
            return run
        raise UserError(f"{command}: {run!r} is neither a run's folder nor host:port or [IPv6]:port")
    try:
        address = run_files.regular(folder / run_files.ADDRESS).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        why = "it has ended, or its coordinator is not there yet, as before and during a warm-up"
        raise UserError(f"{command}: no run is under way in {folder}: {why}") from None
    if not is_host_port(address):
        raise UserError(f"{command}: {folder / run_files.ADDRESS}: {address[:80]!r} is not host:port or [IPv6]:port")
    return address


@contextmanager
def _user_errors(address: str, command: str) -> Iterator[None]:
    """Turn the error of a coordinator that does not answer into a UserError."""
    try:
        yield
    except Forbidden as error:
        raise UserError(f"{command}: {address}: {error}; a run's folder has it, or {keys.SECRET}") from None
    except SluiceError as error:
        raise UserError(f"{command}: no coordinator at {address}: {error}") from None


async def _tables(address: str, own: Keys | None) -> Group:
    coordinator, *others = await processes_of(address, own, "status")
    with _user_errors(address, "status"):
        answers = [await asked(coordinator, own), *await asyncio.gather(*(_status(process, own) for process in others))]
    return render(answers, [process.incarnation for process in (coordinator, *others)])


def render(statuses: Sequence[Status], restarts: Sequence[int]) -> Group:
    """Return two tables that fit 80 columns, the coordinator's line first: addresses of the processes, and their work."""
    processes = LiteralTable(title=statuses[0].detail, title_justify="left")
    work = LiteralTable()
    for table, names in ((processes, "state version restarts pid address"), (work, "at open answered failed rates")):
        for name in ("process", *names.split()):
            table.add_column(name, overflow="fold")
    silent: list[Text] = []
    for status, restarted in zip(statuses, restarts, strict=True):
        place = map(str, (status.version, restarted, status.pid))
        processes.add_row(status.name, status.state, *place, status.address)
        if status.state == UNREACHABLE:
            silent.append(literal(f"{status.name}: {status.detail}"))
            continue
        counts = map(str, (status.calls.open, status.calls.answered, status.calls.failed))
        work.add_row(status.name, status.detail if status is not statuses[0] else "", *counts, _rates(status.rates))
    return Group(processes, work, *silent)


def _rates(rates: Mapping[str, float]) -> str:
    busy = rates.get("busy_seconds")
    shown_rates = [f"busy {busy:.0%}"] if busy is not None else []
    counts = {name: f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for name, value in sorted(rates.items()) if value > 0}
    return ", ".join(shown_rates + [f"{name} {value}/s" for name, value in counts.items() if not name.endswith("_seconds")])


async def asked(process: Registration, own: Keys | None) -> Status:
    """Ask a process for its status. Raises SluiceError."""
    async with client.Channel(process.address, own, party(process)) as channel:
        answer: Status = await client.call(channel, process.name, contract.METHODS["Process", "Status"])
        return answer


async def _status(process: Registration, own: Keys | None) -> Status:
    try:
        return await asked(process, own)
    except SluiceError as error:
        known = {name: getattr(process, name) for name in ("role", "name", "pid", "address")}
        return Status(**known, state=UNREACHABLE, detail=str(error))


# ---- sluice scale


def run_scale(options: argparse.Namespace) -> None:
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


# ---- sluice profile

LONGEST = 1_000_000
STEPS, SECONDS = 1, 5.0  # defaults; a process takes the unit that it is measured in


def run_profile(options: argparse.Namespace) -> None:
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
