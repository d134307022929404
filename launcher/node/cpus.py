"""Lists of processors as Linux writes them, such as 0-15,32. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse(text: str) -> tuple[int, ...]:
    """The processors in a list of numbers and ranges, in order. Raises ValueError for what is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"'{part.strip()}' is no processor and no range of processors")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def shown(cpus: Iterable[int]) -> str:
    """The shortest list of these processors."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
