"""`python -m tests.unit.timeouts_page` writes docs/timeouts.md: every deadline of a run, from where each is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from services.rpc import contract
from services.rpc.client import GROUP_SERVICES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/timeouts.md"
HEAD = """\
<!-- Written by `make timeouts` from services/rpc/contract.py, runtime/config, runtime/timeouts.py and files that it names. -->
# Timeouts

Nothing waits without a deadline, and each stands in one of three places: the configuration, the row of a command, which names
one of the configuration's keys, or `runtime/timeouts.py`. What is given up at a deadline, and what comes in its place, is in
[faults](guides/faults.md).
"""
NUMBERS = {  # how often something is tried again, and what limits are multiples or shares of
    "TRIES": "runtime/coordinator/weight_sync.py",
    "RETURNS": "launcher/render/plan.py",
    "TIMES": "runtime/process/spans.py",
    "LEARNT": "runtime/process/spans.py",
    "LATE": "runtime/coordinator/staleness.py",
    "PING": "services/rpc/server.py",
}


def page() -> str:
    return "\n".join([HEAD, *_configured(), "", *_commands(), "", *_named(), "", *_retries(), ""])


def _configured() -> list[str]:
    """The keys of the reference whose unit is seconds and that bound a wait."""
    rows = [
        f"| {key} | {default} | {text} |"
        for key, default, unit, text in _reference()
        if unit in ("s", "seconds") and re.search(r"deadlines\.|timeout|silence|budgets\.", key)
    ]
    return ["## Configured", "", "| key | default, s | of what |", "| --- | --- | --- |", *rows]


def _reference() -> Iterator[tuple[str, str, str, str]]:
    """Key, default, unit and meaning of each row of the configuration's reference."""
    for line in (ROOT / "docs/configuration-reference.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) > 4:
            yield cells[0], cells[2], cells[3], cells[4]


def _commands() -> list[str]:
    """The rows of the contract; callers of the others give their own deadlines."""
    published = "2 × (`deadlines.train` + `weight_sync.transfer_timeout`)"
    rows = []
    for row in (each for each in contract.METHODS.values() if each.deadline):
        key = published if row.deadline == "weight_sync" else f"`{row.deadline}`"
        ranks = row.ranks.value if row.service in GROUP_SERVICES else ""
        rows.append(f"| {row.service}.{row.name} | {key} | {ranks} | {', '.join(row.key)} |")
    said = "The coordinator's calls. `Status`, `Stop` and the agents' calls have `CONTROL_CALL`, or one of what they are for."
    head = ["| command | deadline | ranks of a group that get it | repeated when the same |", "| --- | --- | --- | --- |"]
    return ["## Commands", "", said, "", *head, *rows]


def _named() -> list[str]:
    lines = (ROOT / "runtime/timeouts.py").read_text().splitlines()
    found = (re.match(r"([A-Z_]+) = (.+?)  # (.+)", line) for line in lines)
    rows = [f"| `{match[1]}` | {match[2]} | {match[3]} |" for match in found if match]
    return ["## Named in the source", "", "| name | s | what |", "| --- | --- | --- |", *rows]


def _retries() -> list[str]:
    """Counts, factors and shares: the keys of the reference, one row for what is the same of each role, and `NUMBERS`."""
    rows = []
    for key, default, unit, text in _reference():
        if re.search(r"\.restarts`|\.retries`|failures_in_a_row", key):
            key = re.sub(r"services\.[A-Za-z_.]+\.restarts", "services.ROLE.restarts", key)
            rows.append(f"| {key} | {f'{default} {unit}'.strip()} | {text} |")
    for name, file in NUMBERS.items():
        found = re.search(rf"^{name} = (.+?)  # (.+)$", (ROOT / file).read_text(), re.MULTILINE)
        assert found, f"{file}: {name}"
        rows.append(f"| `{name}`, `{file}` | {found[1]} | {found[2]} |")
    what = "How often something is tried again, and what limits are multiples or shares of."
    return ["## Retries", "", what, "", "| key or name | number | what |", "| --- | --- | --- |", *dict.fromkeys(rows)]


if __name__ == "__main__":
    PAGE.write_text(page())
