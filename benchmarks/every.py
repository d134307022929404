"""`sluice bench all`: every bench at its short setting, and what they compare in one table, beside the last release's.

    each bench ──► its report ──► its `compared` ──► one row each ──► --json FILE ──► the table of docs/benchmarks.md

`python -m benchmarks.every FILE PAGE` puts the table of such a file into the page.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.compared import Compared, Measurement
from runtime.errors import ServiceFault, SluiceError, UserError
from runtime.telemetry.shown import LiteralTable

RELEASED = Path(__file__).parent / "released.json"
BEGIN, END = "<!-- made by benchmarks/every.py -->\n", "<!-- until here -->\n"
COLUMNS = ("bench", "what", "median", "lowest – highest", "asked")

Measure = Callable[[], tuple[Any, Any]]  # a bench's module, and its report


class Released(Struct):
    """What the benches of a release said: by bench what is compared, each a median."""

    release: str
    rows: dict[str, dict[str, float]]


class Row(Struct):
    """`released`: the median at the last release; None: it had no such figure."""

    bench: str
    compared: Compared
    released: float | None


class EveryReport(Struct):
    """`left_out`: benches for which this machine has not what they need. `failed`: those that broke. `seconds` of each."""

    release: str
    rows: list[Row]
    left_out: dict[str, str]
    failed: dict[str, str]
    seconds: dict[str, float]

    def check(self) -> None:
        """Raises ServiceFault where a bench failed."""
        if self.failed:
            raise ServiceFault("bench", "all", "; ".join(f"{name}: {why}" for name, why in self.failed.items()))


def measure(benches: Mapping[str, Measure], show: Callable[[str], None]) -> EveryReport:
    """One after the other; one that fails does not keep the others from running."""
    released = msgspec.json.decode(RELEASED.read_bytes(), type=Released)
    report = EveryReport(released.release, [], {}, {}, {})
    for number, (name, bench) in enumerate(benches.items()):
        show(f"{name}, {number + 1} of {len(benches)}")
        began = time.monotonic()
        try:
            module, found = bench()
        except UserError as error:
            report.left_out[name] = str(error)
            continue
        except SluiceError as error:
            report.failed[name] = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - a mistake of one bench's; what others found is kept, and it is told
            traceback.print_exc()
            report.failed[name] = f"{type(error).__name__}: {error}"
            continue
        report.seconds[name] = time.monotonic() - began
        before = released.rows.get(name, {})
        report.rows += [Row(name, one, before.get(one.what)) for one in module.compared(found) if one.values]
    return report


class Figures(EveryReport, kw_only=True):
    """What `--json` writes."""

    measured: Measurement


def cells(report: EveryReport) -> list[tuple[str, ...]]:
    """The table's rows: of `COLUMNS`, and the last release's."""
    return [
        (
            row.bench,
            row.compared.what,
            f"{median(row.compared.values):.2f}",
            _spread(row.compared.values),
            row.compared.asked,
            "" if row.released is None else f"{row.released:.2f}",
        )
        for row in report.rows
    ]


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} – {max(values):.2f} ({len(values)})" if len(values) > 1 else ""


def render(report: EveryReport) -> list[LiteralTable]:
    table = LiteralTable(*COLUMNS, report.release, title="All benches, at their short settings", title_justify="left")
    for row in cells(report):
        table.add_row(*row)
    told = [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    told += [f"failed: {name}: {why}" for name, why in report.failed.items()]
    table.caption = "\n".join([f"{sum(report.seconds.values()) / 60:.0f} minutes", *told])
    table.caption_justify = "left"
    return [table]


def markdown(report: Figures) -> str:
    """The same for a page."""
    where, minutes = report.measured, sum(report.seconds.values()) / 60
    head = (*COLUMNS, report.release)
    rows = [head, ("---",) * len(head), *cells(report)]
    lines = [
        f"Measured on {where.date}, of commit {where.commit}, in one sitting of {minutes:.0f} minutes: "
        f"{where.cores} cores ({where.processor}), Python {where.python}.\n"
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines += [f"\nLeft out: `{name}` ({why})." for name, why in report.left_out.items()]
    return "\n".join(lines) + "\n"


def page(text: str, report: Figures) -> str:
    """The page `text` with the table of `report` in the place of the one that it has."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise UserError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{markdown(report)}\n{END}{after}"


if __name__ == "__main__":
    made, path = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Figures), Path(sys.argv[2])
    path.write_text(page(path.read_text(encoding="utf-8"), made), encoding="utf-8")
