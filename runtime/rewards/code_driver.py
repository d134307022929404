"""Runs a reply's program on each of its tests in the sandbox, as `source` of `Box.run`.

Standard input holds the name of a function or "", the maximal bytes of an output, the program, and the tests' inputs. Each part
follows its length, a little-endian uint32. For each test the driver writes a `RESULT` (exit code, length of the output) and the
output: the program's prints, or the function's return value as JSON.

The program is compiled once. Each test runs in a fork, so that no test sees another. A program sees no expected output."""

from __future__ import annotations

import os
import struct
import sys

TYPE_CHECKING = False  # importing typing would take as long as all other imports
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType
    from typing import Any, NoReturn

LENGTH = struct.Struct("<I")
RESULT = struct.Struct("<iI")
RECURSION = 50_000
MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")


def parts() -> Iterator[bytes]:
    data = bytearray()
    while part := os.read(0, 1 << 20):
        data += part
    at = 0
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        yield bytes(data[at + LENGTH.size : at + LENGTH.size + size])
        at += LENGTH.size + size


def function_of(code: CodeType, name: str) -> Callable[[bytes, int], None]:
    """Return a function that runs a test and writes the result. The usual imports are made first: such programs omit them."""
    import json

    scope: dict[str, Any] = {"__name__": "program"}
    for module in MODULES:
        exec(f"import {module}\nfrom {module} import *", scope)
    exec(code, scope)

    def call(given: bytes, target: int) -> None:
        function = getattr(scope["Solution"](), name) if "Solution" in scope else scope[name]
        os.write(target, json.dumps(function(*json.loads(given))).encode())

    return call


def scratch(data: bytes = b"") -> int:
    """Return a file without a name, filled with `data`."""
    descriptor = os.open("scratch", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink("scratch")  # noqa: PTH108 - pathlib takes as long to load as the rest
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def finish(work: Callable[..., object], *arguments: object) -> NoReturn:
    """Run `work` and exit like an interpreter, but without its teardown, which takes longer than most tests."""
    code: Any = 0
    try:
        work(*arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - a test whose program raises does not pass
        code = 1
    if "threading" in sys.modules:
        threading = sys.modules["threading"]
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    if "atexit" in sys.modules:  # some programs print there
        sys.modules["atexit"]._run_exitfuncs()
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else 1)


def main() -> None:
    name, most, program, *tests = parts()
    sys.setrecursionlimit(RECURSION)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    code = compile(program, "program.py", "exec")
    call = function_of(code, name.decode()) if name else None
    for given in tests:
        source, target = scratch(given), scratch()
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(nothing if call else source, 0)
            os.dup2(nothing if call else target, 1)
            finish(call, given, target) if call else finish(exec, code, {"__name__": "__main__"})
        status = os.waitpid(child, 0)[1]
        try:  # noqa: SIM105 - contextlib takes long to load
            os.killpg(child, 9)  # kill the processes that it left
        except ProcessLookupError:
            pass
        output = os.pread(target, int(most), 0)
        os.close(source)
        os.close(target)
        report = RESULT.pack(os.waitstatus_to_exitcode(status), len(output)) + output
        while report:
            report = report[os.write(1, report) :]


main()
