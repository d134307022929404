"""`python -m tests.unit.timeouts_page` writes docs/timeouts.md: every deadline of a run, from where each is kept."""

from __future__ import annotations

import re
from pathlib import Path

from services.rpc import contract
from services.rpc.client import GROUP_SERVICES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/timeouts.md"
HEAD = """\
<!-- Written by `make timeouts` from services/rpc/contract.py, runtime/config and runtime/timeouts.py. Changes belong there. -->
# Timeouts

Nothing waits without a deadline, and each stands in one of three places: the configuration, the row of a command, which names
one of the configuration's keys, or `runtime/timeouts.py`. What is given up at a deadline, and what comes in its place, is in
[faults](guides/faults.md).
"""


def page() -> str:
    return "\n".join([HEAD, *_configured(), "", *_commands(), "", *_named(), ""])


def _configured() -> list[str]:
    """The keys of the reference whose unit is seconds and that bound a wait."""
    rows = []
    for line in (ROOT / "docs/configuration-reference.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if (
            len(cells) > 4
            and cells[3] in ("s", "seconds")
            and re.search(r"deadlines\.|timeout|backoff|silence|budgets\.", cells[0])
        ):
            rows.append(f"| {cells[0]} | {cells[2]} | {cells[4]} |")
    return ["## Configured", "", "| key | default, s | of what |", "| --- | --- | --- |", *rows]


def _commands() -> list[str]:
    """The rows of the contract; callers of the others give their own deadlines."""
    rows = []
    for row in contract.METHODS.values():
        if row.deadline:
            key = (
                "2 × (`deadlines.train` + `publication.transfer_timeout`)"
                if row.deadline == "publication"
                else f"`{row.deadline}`"
            )
            ranks = row.ranks.value if row.service in GROUP_SERVICES else ""
            rows.append(f"| {row.service}.{row.name} | {key} | {ranks} | {', '.join(row.key)} |")
    return [
        *("## Commands", ""),
        "The coordinator's calls. `Status`, `Stop` and the agents' calls have `CONTROL_CALL`, or one of what they are for.",
        *("", "| command | deadline | ranks of a group that get it | repeated when the same |", "| --- | --- | --- | --- |"),
        *rows,
    ]


def _named() -> list[str]:
    lines = (ROOT / "runtime/timeouts.py").read_text().splitlines()
    found = (re.match(r"([A-Z_]+) = (.+?)  # (.+)", line) for line in lines)
    rows = [f"| `{match[1]}` | {match[2]} | {match[3]} |" for match in found if match]
    return ["## Named in the source", "", "| name | s | what |", "| --- | --- | --- |", *rows]


if __name__ == "__main__":
    PAGE.write_text(page())
