"""What vLLM's processes print: passed on, and read for the error that ended them, which they tell nobody else."""

from __future__ import annotations

import os
import re
import sys
import threading
import time

from runtime import timeouts

_KEPT_BYTES = 256 << 10
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)")
_SECOND_HAND = ("root cause", "stack trace", "background process", "EngineDeadError", "Engine core initialization failed")


def last_error(printed: str) -> str:
    """The newest exception that a log shows, as "ValueError: what it says", or "". One that only points to another is passed
    over."""
    for line in reversed(printed.splitlines()):
        found = _ERROR.match(_PREFIX.sub("", line.strip()))
        if found and not any(phrase in line for phrase in _SECOND_HAND):
            return f"{found[1]}: {found[2].strip()}"
    return ""


class OutputRelay:
    """While entered, this process's standard output and error lead here, for its children to inherit.

    A thread passes on what they print to where it went before, as long as there are children.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self._saved: list[int] = []

    def __enter__(self) -> OutputRelay:
        self._flush()
        read, write = os.pipe()
        os.set_inheritable(write, True)
        self._saved = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(write, number)
        os.close(write)
        threading.Thread(target=self._pass_on, args=(read, os.dup(self._saved[1])), name="vllm-log", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def _pass_on(self, read: int, target: int) -> None:
        while printed := os.read(read, 1 << 16):
            self._tail += printed
            del self._tail[:-_KEPT_BYTES]
            while printed:
                printed = printed[os.write(target, printed) :]
        os.close(read)
        os.close(target)

    def error(self, patience: float = 0.0) -> str:
        """What `last_error` finds in what was printed of late, or comes within `patience` seconds."""
        give_up = time.monotonic() + patience
        while not (found := last_error(bytes(self._tail).decode(errors="replace"))) and time.monotonic() < give_up:
            time.sleep(timeouts.VLLM_OUTPUT_POLL)
        return found

    def reason(self, error: Exception) -> str:
        """The gist of `error`, or, where it only points to what a process prints, of that, which may come after it."""
        line = _one_line(error)
        return self.error(timeouts.VLLM_LAST_OUTPUT if any(phrase in line for phrase in _SECOND_HAND) else 0.0) or line


def _one_line(error: Exception) -> str:
    """The gist of one of vLLM's errors, some of which are pages long."""
    text = str(error)
    validation = re.search(
        r"(?:Value error|Assertion failed), (.*?)(?: \[type=|$)", text, re.MULTILINE
    )  # what follows are the arguments' values
    line = validation.group(1) if validation else next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()}"
