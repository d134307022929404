"""A worker of the pool: `python -m runtime.rewards.worker PARENT_PID LIMITS RULE...`, with the limits as JSON.

Frames on standard input and output are a little-endian uint32 length and msgpack: a batch
of tasks is read, and each verdict is written at once. An empty frame means that the worker is ready. The kernel enforces the
limits: SIGPROF ends the process when a task has used its CPU time; memory beyond the limit is refused, as a MemoryError."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import resource
import signal
import struct
import sys
import time
import traceback
from typing import BinaryIO

import msgspec

from runtime.config.sandbox import Sandbox
from runtime.process.os_process import die_with_parent
from runtime.rewards.rules import NO_NUMBER, Context, Evaluate, RewardRule, RuleOutcome, attempt

LENGTH = struct.Struct("<I")
TRACE_LINES, TRACE_CHARACTERS = 20, 1000  # last entries of a rule's traceback, and characters of each


class Limits(msgspec.Struct, frozen=True):
    """Limits of a task: seconds by the clock, and of the CPU; a worker's bytes; the sandbox of the programs that it runs."""

    seconds: float
    cpu_seconds: float
    memory_bytes: int
    sandbox: Sandbox = Sandbox()


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Evaluate `rule` (its configured name) on one reply, or on the texts of a group."""

    rule: str
    text: str | list[str]
    label: str
    context: Context


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a task, and its seconds by the clock, without the time in the queue."""

    outcome: RuleOutcome
    seconds: float = 0.0


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def _log_first(seen: set[tuple[str, str]], rule: str, error: Exception) -> None:
    """Write the first exception of each rule and type to standard error, which is the service's log."""
    kind = (rule, type(error).__name__)
    if kind in seen:
        return
    seen.add(kind)
    lines = [f"rule {rule} failed; later failures of type {kind[1]} are only counted\n"]
    lines += [line[:TRACE_CHARACTERS] for line in traceback.format_exception(error)[-TRACE_LINES:]]
    sys.stderr.write("".join(map(_printable, lines)))
    sys.stderr.flush()


def _printable(line: str) -> str:
    """Escape control characters as Python does: the line may hold a model's text, and a terminal shows it."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in line.rstrip("\n")) + "\n"


def serve(requests: BinaryIO, replies: BinaryIO, rules: list[str], limits: Limits) -> None:
    """Answer batches until the parent closes the pipe."""
    from runtime.rewards.code import find_rule, use  # imports code of users: only after the pipes are set up

    use(limits.sandbox)
    loop = asyncio.new_event_loop()
    evaluate = {name: _synchronous(find_rule(name), loop) for name in rules}
    decode = msgspec.msgpack.Decoder(list[Task]).decode
    failed: set[tuple[str, str]] = set()
    replies.write(frame(b""))
    while header := requests.read(LENGTH.size):
        try:
            tasks = decode(requests.read(LENGTH.unpack(header)[0]))
        except MemoryError:  # a single text is too long
            replies.write(frame(msgspec.msgpack.encode(Verdict(RuleOutcome(error="memory")))))
            return
        for task in tasks:
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
            on_error = functools.partial(_log_first, failed, task.rule)
            outcome = attempt(evaluate[task.rule], task.text, task.label, task.context, on_error)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            if outcome.unresolved:
                outcome = RuleOutcome(error=f"{NO_NUMBER}NoneType")  # only a screen may return None
            replies.write(frame(msgspec.msgpack.encode(Verdict(outcome, time.perf_counter() - start))))


def _synchronous(entry: RewardRule, loop: asyncio.AbstractEventLoop) -> Evaluate:
    """Return the rule's function. An `async` one runs on the worker's loop, which keeps its connections between tasks."""
    function = entry.evaluate
    if not inspect.iscoroutinefunction(function):
        return function  # type: ignore[return-value]  # only coroutine functions return awaitables

    return lambda text, label, context: loop.run_until_complete(function(text, label, context))


def main() -> None:
    parent, settings, *rules = sys.argv[1:]
    limits = msgspec.json.decode(settings, type=Limits)
    die_with_parent(int(parent))  # on systems without this call, the closed pipe ends an idle worker
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Keep the pipes for the protocol: a rule prints to standard error and reads from /dev/null.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    serve(requests, replies, rules, limits)


if __name__ == "__main__":
    main()
