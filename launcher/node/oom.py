"""Which processes the kernel has killed for want of memory, by its own word.

The kernel's log names each, where it may be read. Elsewhere, as in a container, the counter of the control group says that
there was one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_LOG = Path("/dev/kmsg")
_RECORD = 8192  # bytes of the longest
_KILLED = re.compile(rb"Killed process (\d+) .*?anon-rss:(\d+)kB")
_GROUPS = Path("/sys/fs/cgroup")
_COUNTERS = {"": "memory.events", "memory": "memory.oom_control"}  # by the controller, in cgroup v2 and v1

ADVICE = {
    "rollout": "lower services.rollout.slots, sampling.max_new_tokens or data.max_prompt_tokens",
    "trainer": "lower training.max_tokens_per_microbatch, or raise services.trainer.processes",
    "critic": "lower training.max_tokens_per_microbatch, or raise services.critic.processes",
    "reference": "lower services.reference.max_tokens_per_microbatch",
    "reward_model": "lower services.reward_model.max_tokens_per_microbatch",
    "reward": "lower rewards.workers, or see what the rules of rewards.rules keep",
}
"""What a user can do about a role that needs more memory than there is."""


class OomKills:
    """Between `open` and `close`."""

    def __init__(self) -> None:
        self._log = -1
        self._counter = _counter()
        self._counted = 0
        self._killed: dict[int, int] = {}  # by pid, the bytes that it had

    def open(self) -> None:
        self._counted = _count(self._counter)
        with suppress(OSError):  # not on Linux, or not allowed
            self._log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def of(self, pids: Collection[int]) -> str:
        """What is known of the death of a process that had these ids, a rank's among them; "" where nothing tells of memory."""
        self._killed |= dict(self._news())
        counted, self._counted = self._counted, _count(self._counter)
        if known := [self._killed.pop(pid) for pid in pids if pid in self._killed]:
            return f"the kernel killed it for want of memory; it had {max(known) >> 20} MiB"
        if self._log < 0 and self._counted > counted:
            return "the kernel killed a process of this control group for want of memory"
        return ""

    def _news(self) -> Iterator[tuple[int, int]]:
        while self._log >= 0:
            try:
                record = os.read(self._log, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # what was not read yet has been overwritten: the next record follows
            if found := _KILLED.search(record):
                yield int(found[1]), int(found[2]) << 10


def _counter() -> Path | None:
    """The file with the count of this process's control group."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            path = _GROUPS / controllers / group.lstrip("/") / _COUNTERS.get(controllers, "")
            if path.is_file():
                return path
    return None


def _count(counter: Path | None) -> int:
    with suppress(OSError, AttributeError):
        found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)  # type: ignore[union-attr]
        return int(found[1]) if found else 0
    return 0
