"""`make screenshots`: the page's views as docs/images/page-VIEW.png, of a run of the quickstart that is made for them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.browser import WIDE, opened, served, until
from benchmarks.staleness.runs import train_quickstart
from runtime.errors import SluiceError

IMAGES = Path(__file__).parents[1] / "docs" / "images"
VIEWS = ("why", "lanes", "samples")  # that the guide shows
CHANGES = ["training.steps=60", "evaluation={every: 20, max_new_tokens: 24}", "logs.keep=1"]
GROUP = 100  # that is shown with the samples
DEADLINE = 900.0  # seconds
WAIT = 60_000  # ms
SETTLE = 1500  # ms until what is drawn stands still


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.chdir(folder)  # no picture has this machine's paths
        run = Path("runs") / "quickstart"
        asyncio.run(train_quickstart("quickstart", [f"run.dir={run}", *CHANGES], folder, DEADLINE))
        with served(run) as address, opened(address, WIDE) as (page, faults):
            page.wait_for_selector("nav a[aria-current]", timeout=WAIT)
            for view in VIEWS:
                page.evaluate(f"location.hash = page.link('{view}', {{{f'group: {GROUP}' if view == 'samples' else ''}}})")
                until(page, f"page.shown === '{view}'")
                page.wait_for_timeout(SETTLE)
                page.screenshot(path=IMAGES / f"page-{view}.png", full_page=True)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    try:
        main()
    except SluiceError as error:
        sys.exit(f"error: {error}")
