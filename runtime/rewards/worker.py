"""A worker of the pool: `python -m runtime.rewards.worker PARENT_PID RULE...`. It loads neither numpy nor torch.

Frames on its standard input and output are a little-endian uint32 length and msgpack: a batch of tasks in, one outcome
per task out, each as soon as it is known. An empty frame says that the worker is ready.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import BinaryIO

import msgspec

from runtime.os_process import die_with_parent
from runtime.rewards.rules import Outcome, RuleContext, attempt

LENGTH = struct.Struct("<I")


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Evaluate `rule` (its configured name) on one reply."""

    rule: str
    text: str
    label: str
    context: RuleContext


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def serve(requests: BinaryIO, replies: BinaryIO, rules: list[str]) -> None:
    """Answer batches until the parent closes the pipe."""
    from runtime.rewards.catalogue import find_rule  # the rules' own modules may be anything: load them behind the pipes

    evaluate = {name: find_rule(name).evaluate for name in rules}
    decode = msgspec.msgpack.Decoder(list[Task]).decode
    replies.write(frame(b""))
    while header := requests.read(LENGTH.size):
        for task in decode(requests.read(LENGTH.unpack(header)[0])):
            outcome = attempt(evaluate[task.rule], task.text, task.label, task.context)
            if outcome.unresolved:
                outcome = Outcome(error="not a number:NoneType")
            replies.write(frame(msgspec.msgpack.encode(outcome)))


def main() -> None:
    die_with_parent(int(sys.argv[1]))  # where there is no such thing, the closed pipe ends an idle worker
    # Keep the pipes for the protocol: a rule that prints or reads gets standard error and nothing.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    serve(requests, replies, sys.argv[2:])


if __name__ == "__main__":
    main()
