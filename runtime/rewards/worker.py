"""A worker of the pool: `python -m runtime.rewards.worker PARENT_PID CPU_SECONDS MEMORY_BYTES SANDBOX RULE...`.

SANDBOX is `rewards.sandbox` as JSON. It loads neither numpy nor torch. Frames on its standard input and output are a
little-endian uint32 length and msgpack: a batch of tasks in, one verdict per task out, each as soon as it is known. An empty
frame says that the worker is ready.

Its limits are the kernel's, so that no code can sit them out: SIGPROF ends the process when one task has used its CPU time, and
memory beyond the limit is refused, which raises MemoryError here.
"""

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
from runtime.rewards.rules import NO_NUMBER, Context, Evaluate, RewardRule, RuleOutcome, Value, attempt

LENGTH = struct.Struct("<I")
TOLD_LINES, TOLD_CHARACTERS = 20, 1000  # of a rule's traceback: the last entries, and of each


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Evaluate `rule` (its configured name) on one reply, or on the texts of a group."""

    rule: str
    text: str | list[str]
    label: str
    context: Context


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What became of a task, and the seconds that it took by the clock, waiting for its turn excluded."""

    outcome: RuleOutcome
    seconds: float = 0.0


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


class FirstFailures:
    """Writes what a rule raised to standard error, which is the service's log: the first of each type, as they are counted."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def tell(self, rule: str, error: Exception) -> None:
        kind = (rule, type(error).__name__)
        if kind in self._seen:
            return
        self._seen.add(kind)
        lines = [f"rule {rule} failed; of {kind[1]} this is the first, others are counted alone\n"]
        lines += [line[:TOLD_CHARACTERS] for line in traceback.format_exception(error)[-TOLD_LINES:]]
        sys.stderr.write("".join(map(_printable, lines)))
        sys.stderr.flush()


def _printable(line: str) -> str:
    """It may hold what a model wrote, and is read on a terminal: control characters as Python writes them."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in line.rstrip("\n")) + "\n"


def serve(requests: BinaryIO, replies: BinaryIO, rules: list[str], cpu_seconds: float, sandbox: Sandbox) -> None:
    """Answer batches until the parent closes the pipe."""
    from runtime.rewards.catalogue import find_rule  # the rules' own modules may be anything: load them behind the pipes
    from runtime.rewards.code import use

    use(sandbox)
    loop = asyncio.new_event_loop()
    evaluate = {name: _synchronous(find_rule(name), loop) for name in rules}
    decode = msgspec.msgpack.Decoder(list[Task]).decode
    failures = FirstFailures()
    replies.write(frame(b""))
    while header := requests.read(LENGTH.size):
        try:
            tasks = decode(requests.read(LENGTH.unpack(header)[0]))
        except MemoryError:  # a text alone is too long
            replies.write(frame(msgspec.msgpack.encode(Verdict(RuleOutcome(error="memory")))))
            return
        for task in tasks:
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            told = functools.partial(failures.tell, task.rule)
            outcome = attempt(evaluate[task.rule], task.text, task.label, task.context, told)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            if outcome.unresolved:
                outcome = RuleOutcome(error=f"{NO_NUMBER}NoneType")  # only a screen may leave a case open
            replies.write(frame(msgspec.msgpack.encode(Verdict(outcome, time.perf_counter() - start))))


def _synchronous(entry: RewardRule, loop: asyncio.AbstractEventLoop) -> Evaluate:
    """The rule's function; one that is `async` runs on the worker's loop, which keeps its connections between tasks."""
    function = entry.evaluate
    if not inspect.iscoroutinefunction(function):
        return function  # type: ignore[return-value]  # what is not a coroutine function returns a value

    def call(text: str | list[str], label: str, context: Context) -> Value | list[Value]:
        value: Value | list[Value] = loop.run_until_complete(function(text, label, context))
        return value

    return call


def _limit(memory_bytes: int) -> None:
    """Bound the memory that this process may allocate, in all; what kills it leaves no core file behind."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    parent, cpu_seconds, memory_bytes, sandbox, *rules = sys.argv[1:]
    die_with_parent(int(parent))  # where there is no such thing, the closed pipe ends an idle worker
    _limit(int(memory_bytes))
    # Keep the pipes for the protocol: a rule that prints or reads gets standard error and nothing.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    serve(requests, replies, rules, float(cpu_seconds), msgspec.json.decode(sandbox, type=Sandbox))


if __name__ == "__main__":
    main()
