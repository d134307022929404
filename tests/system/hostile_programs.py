"""Programs made to escape from a sandbox, to outlive it, or to take more than they are given: hostile_programs.txt.

`python -m tests.system.hostile_programs` runs them all, one after the other, and prints a `ProgramEnding` in JSON for each: how
late it was killed, and what was left.

In a source, SECRET, CANARY, SOCKET and ABSTRACT are a file to be read, one to be changed, and sockets of the host; PORT is one
on which the host listens, and HOST the pid of whoever opened the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.sandbox import Box, Sandbox
from tests.sandboxes import members, namespaces_below

LIMITS = Sandbox(timeout=1.0, cpu_seconds=1.0, memory=128 << 20, processes=16, disk=8 << 20)
_HEADER = re.compile(r"(.+?)(?: \(([a-z ]+)\))?")


class HostileProgram(Struct, frozen=True):
    """`reasons`: why it may have been ended."""

    name: str
    source: str
    reasons: tuple[str, ...] = ("",)


class Outside(Struct):
    """What is beside the sandbox: files and sockets that nobody in it should reach."""

    folder: Path
    secret: str
    listeners: list[socket.socket]

    def touched(self) -> list[str]:
        """What was changed, or was connected to."""
        found = [] if (self.folder / "canary").read_text() == "alive" else ["the canary"]
        found += [path.name for path in self.folder.iterdir() if path.name not in ("secret", "canary", "socket")]
        for listener in self.listeners:
            listener.setblocking(False)
            try:
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
            except BlockingIOError:
                continue
            found.append(f"a connection to {listener.getsockname()}")
        return found


class ProgramEnding(Struct):
    """`late`: seconds beyond the limit by the clock until everything was gone; `left`: processes."""

    name: str
    reason: str
    code: int
    seconds: float
    late: float
    left: list[int]
    touched: list[str]
    told: bool  # it came by the secret, or says that it escaped
    said: str


@contextmanager
def outside() -> Iterator[tuple[Outside, dict[str, str]]]:
    """It, and what is put in for the capitals of a source."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outside-")))
        folder.chmod(0o755)
        secret, abstract = secrets.token_hex(16), f"sluice-{secrets.token_hex(8)}"
        (folder / "secret").write_text(secret)
        (folder / "canary").write_text("alive")
        (folder / "canary").chmod(0o666)
        addresses = (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, str(folder / "socket")),
            (socket.AF_UNIX, f"\0{abstract}"),
        )
        listeners = [stack.enter_context(socket.socket(family)) for family, _ in addresses]
        for listener, (_, address) in zip(listeners, addresses, strict=True):
            listener.bind(address)
            listener.listen()
        port = listeners[0].getsockname()[1]
        listeners.append(stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        listeners[-1].bind(("127.0.0.1", port))
        names = {"SECRET": folder / "secret", "CANARY": folder / "canary", "SOCKET": folder / "socket", "ABSTRACT": abstract}
        yield (
            Outside(folder, secret, listeners),
            {k: str(v) for k, v in names.items()} | {"PORT": str(port), "HOST": str(os.getpid())},
        )


async def carry_out(program: HostileProgram, limits: Sandbox = LIMITS) -> ProgramEnding:
    with outside() as (beside, values):
        source = program.source
        for name, value in values.items():
            source = source.replace(name, value)
        async with Box(limits) as box:
            spaces = namespaces_below()
            began = time.monotonic()
            finished = await box.run(["program.py"], source=source)
        seconds = time.monotonic() - began
        said = finished.stdout + finished.stderr
        return ProgramEnding(
            name=program.name,
            reason=finished.reason,
            code=finished.code,
            seconds=seconds,
            late=max(seconds - limits.timeout, 0.0),
            left=members(spaces),
            touched=beside.touched(),
            told=any(words in said for words in (beside.secret.encode(), b"root:$", b"root:*:", b"ESCAPED")),
            said=said[-600:].decode("utf-8", "replace"),
        )


def programs() -> Iterator[HostileProgram]:
    text = Path(__file__).with_name("hostile_programs.txt").read_text("utf-8")
    for part in text.split("\n=== ")[1:]:
        header, source = part.split("\n", 1)
        name, reasons = _HEADER.fullmatch(header).groups(default="")  # type: ignore[union-attr]
        yield HostileProgram(name, source, tuple(word.replace("ends", "") for word in (reasons or "ends").split()))


async def main() -> None:
    for program in programs():
        print(msgspec.json.encode(await carry_out(program)).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
