"""`sluice bench page`: how soon each view of a long run is there in a browser, how evenly a hundred thousand samples scroll,
and what spans and a page that is watched cost a run.

The long run is made here: 2,000 steps and 128,000 samples. The browser's own trace says how long its main thread was at one
piece of work while the list scrolls; a frame cannot come sooner. The cost is the quickstart's samples a second, in turn with
spans, without, and with a page beside that is asked what a browser asks for: the browser itself is on another machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import aiohttp
from msgspec import Struct

from benchmarks.browser import opened, served, until
from benchmarks.compared import Compared
from benchmarks.recorded_run import record
from benchmarks.staleness.runs import train_quickstart
from launcher.page.server import THIS
from runtime.errors import UserError
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.summary import Summary

VIEWS = ("why", "lanes", "occupancy", "samples", "weights", "evaluations", "curves", "processes", "configuration")
TOLD = {"none": ["logs.span_bytes=0"], "spans": [], "watched": ["page={}"]}
START = 120.0  # seconds
LOOK = 0.2  # seconds between two looks for the page's address
EVERY = 0.9  # seconds between what a browser asks for at most
ADDRESS = re.compile(r"page: (http\S+)")


class PageSettings(Struct, frozen=True):
    steps: int = 2000
    groups: int = 8
    samples: int = 8
    rounds: int = 5  # of looking at every view
    scrolls: int = 200  # screens of the list of samples
    pairs: int = 10
    run_steps: int = 80
    deadline: float = 900.0  # seconds of one run


FULL = PageSettings()
QUICK = PageSettings(rounds=2, scrolls=50, pairs=3)


class ViewTime(Struct, frozen=True):
    """Milliseconds until a view shows its data, the median of the rounds."""

    view: str
    milliseconds: float


class PageReport(Struct):
    """`first_paint`: ms, the median. `work`: the longest piece of work of the browser's main thread while it scrolls, ms, and
    the 99th percentile. `cost`: samples a second over those without spans, the geometric mean of the pairs."""

    first_paint: float
    views: list[ViewTime]
    work: tuple[float, float]
    cost: dict[str, float]


async def measure(folder: Path, settings: PageSettings, show: Callable[[str], None]) -> PageReport:
    with tempfile.TemporaryDirectory() as place:
        show("making a run of 128,000 samples")
        run = await asyncio.to_thread(record, Path(place) / "run", settings.steps, settings.groups, settings.samples)
        show("looking at it")
        paint, views, work = await asyncio.to_thread(_looked_at, run, settings)
    cost = await _cost(folder, settings, show)
    return PageReport(paint, views, work, cost)


def _looked_at(run: Path, settings: PageSettings) -> tuple[float, list[ViewTime], tuple[float, float]]:
    paints: list[float] = []
    times: dict[str, list[float]] = {view: [] for view in VIEWS}
    with served(run) as address:
        for _ in range(settings.rounds):
            with opened(address) as (page, _):
                until(page, "performance.getEntriesByName('first-contentful-paint').length")
                paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
                for view in VIEWS:
                    times[view].append(page.evaluate(_SHOWN, view))
        with opened(address) as (page, _):
            page.evaluate(_SHOWN, "samples")
            work = _scrolled(page, settings.scrolls)
    return median(paints), [ViewTime(view, median(found)) for view, found in times.items()], work


_SHOWN = """async (view) => {
    const began = performance.now();
    location.hash = page.link(view);
    await new Promise((done) => setTimeout(done, 0));
    while (page.shown !== view) await new Promise((done) => requestAnimationFrame(done));
    return performance.now() - began;
}"""


def _scrolled(page: Any, screens: int) -> tuple[float, float]:
    """The longest and the 99th percentile, in ms, of what the main thread did in one piece."""
    session = page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    session.on("Tracing.dataCollected", lambda told: events.extend(told["value"]))
    session.send(
        "Tracing.start", {"transferMode": "ReportEvents", "categories": "toplevel,disabled-by-default-devtools.timeline"}
    )
    page.evaluate(
        """async (screens) => {
            const list = document.querySelector(".list"), step = list.scrollHeight / screens;
            for (let at = 0; at < screens; at += 1) {
                list.scrollTop = at * step;
                await new Promise((done) => requestAnimationFrame(done));
            }
        }""",
        screens,
    )
    ended: list[Any] = []
    session.on("Tracing.tracingComplete", lambda told: ended.append(told))
    session.send("Tracing.end")
    while not ended:
        page.wait_for_timeout(50)
    thread = next(each["tid"] for each in events if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain")
    work = sorted(
        each["dur"] / 1000 for each in events if each["tid"] == thread and each["name"] == "RunTask" and "dur" in each
    )
    return work[-1], work[int(0.99 * (len(work) - 1))]


async def _cost(folder: Path, settings: PageSettings, show: Callable[[str], None]) -> dict[str, float]:
    rates: dict[str, list[float]] = {kind: [] for kind in TOLD}
    for seed in range(1, settings.pairs + 1):
        kinds = list(TOLD)[seed % 3 :] + list(TOLD)[: seed % 3]
        for kind in kinds:
            name = f"page-{kind}-seed{seed}"
            show(name)
            rates[kind].append(await _trained(folder, name, kind, seed, settings))
    pairs = {kind: zip(rates[kind], rates["none"], strict=True) for kind in ("spans", "watched")}
    return {kind: geometric_mean(one / other for one, other in found) for kind, found in pairs.items()}


async def _trained(folder: Path, name: str, kind: str, seed: int, settings: PageSettings) -> float:
    changes = [
        f"run.dir={json.dumps(str(folder / name))}",
        f"run.seed={seed}",
        f"warmup.cache={json.dumps(str(folder))}",
        f"training.steps={settings.run_steps}",
        "evaluation={every: 0, before: false, after: false}",
        "checkpoint.every=0",
        "trackers=[{name: jsonl}]",
        *TOLD[kind],
    ]
    training = asyncio.create_task(train_quickstart(name, changes, folder, settings.deadline))
    watching = asyncio.create_task(_watch(folder / "logs" / f"{name}.log") if kind == "watched" else asyncio.sleep(0))
    try:
        await training
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return Summary.read(folder / name).samples_per_second


async def _watch(console: Path) -> None:
    """Ask for what a browser asks for that shows why steps take as long as they do."""
    page = await asyncio.to_thread(_address, console)
    run = f"{page.partition('?')[0]}api/run/{THIS}"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        async with client.get(page) as first:  # with its token, which is a cookie from then on
            await first.read()
        await _follow(client, run)


async def _follow(client: aiohttp.ClientSession, run: str) -> None:
    async with client.get(f"{run}/events") as events:
        async for line in events.content:
            if line.startswith(b"data: "):
                for view in ("summary", "why"):
                    async with client.get(f"{run}/{view}") as answer:
                        await answer.read()
                await asyncio.sleep(EVERY)


def _address(console: Path) -> str:
    """Of the page, once the run has told it."""
    for _ in range(int(START / LOOK)):
        if console.exists() and (told := ADDRESS.search(console.read_text())):
            return told[1]
        time.sleep(LOOK)
    raise UserError(f"{console}: no page within {START:g} s")


def compared(report: PageReport) -> list[Compared]:
    return [Compared(f"samples/s, {kind} / without spans", [ratio]) for kind, ratio in report.cost.items()]


def render(report: PageReport) -> list[LiteralTable]:
    views = LiteralTable("view", "ms until it shows its data", title="a run of 2,000 steps and 128,000 samples")
    views.add_row("first paint", f"{report.first_paint:.0f}")
    for view in report.views:
        views.add_row(view.view, f"{view.milliseconds:.0f}")
    cost = LiteralTable("", "", title="")
    cost.add_row("longest piece of work while samples scroll", f"{report.work[0]:.0f} ms (99 %: {report.work[1]:.0f} ms)")
    for kind, ratio in report.cost.items():
        cost.add_row(f"samples/s with {kind} / without spans", f"{ratio:.3f}")
    return [views, cost]
