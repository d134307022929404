"""The page in a real browser: of a long run that is over, and of a model's hostile words. test_prometheus.py follows a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import browser
from benchmarks.browser import NARROW, WIDE, opened, served, until
from benchmarks.recorded_run import record, reply_of
from runtime.errors import UserError

pytestmark = pytest.mark.timeout(300)

STEPS, GROUPS, SAMPLES = 2000, 8, 8
VIEWS = ("why", "lanes", "occupancy", "samples", "weights", "evaluations", "curves", "processes", "configuration")
WAIT = 60_000  # ms that something may take to appear
HOSTILE = ["<script>document.title = 'taken'</script><img src=x onerror=alert(1)>", "\u202egnihton\u202c \x1b[2J\x00"]


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    try:
        browser.found()
    except UserError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "run", STEPS, GROUPS, SAMPLES)


def shows(page: Any, view: str, query: str = "{}") -> None:
    """Go there, and wait until it has something to show."""
    page.evaluate(f"location.hash = page.link('{view}', {query})")
    page.wait_for_selector("nav a[aria-current]", timeout=WAIT)
    until(page, f"page.shown === '{view}'")


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (NARROW, True)])
def test_every_view_of_a_long_run_is_shown_without_a_complaint(long_run: Path, size: tuple[int, int], dark: bool) -> None:
    with served(long_run) as address, opened(address, size, dark) as (page, faults):
        for view in VIEWS:
            shows(page, view)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        assert faults == []


def test_the_numbers_are_those_of_the_ledger(long_run: Path) -> None:
    with served(long_run) as address, opened(address) as (page, faults):
        shows(page, "why", "{from: 0}")
        until(page, f"document.querySelector('[data-part=verdict]').innerText.includes('{STEPS} steps')")
        page.wait_for_selector("[data-plot=why] canvas[data-drawn]", timeout=WAIT)
        told = page.inner_text("[data-part=totals]")
        # Of the four seconds of each step its last group is generated in 2 and scored in a half; training takes 1.
        for cause, process, seconds in (
            ("train", "trainer-0", STEPS),
            ("score", "reward-0", STEPS / 2),
            ("generate", "rollout-0", 2 * STEPS),
        ):
            assert re.search(rf"{cause}\s+{process}\s+{seconds:,.0f}\s", told), told
        shows(page, "samples")
        page.wait_for_selector(".list .row >> nth=3", timeout=WAIT)
        assert f"{STEPS * GROUPS * SAMPLES:,} samples in {STEPS * GROUPS:,} groups" in page.inner_text("main")
        page.evaluate("document.querySelector('.list').scrollTop = 1e9")
        last = reply_of(STEPS * GROUPS - 1, SAMPLES - 1).strip()
        page.wait_for_selector(f".row:has-text('{last}')", timeout=WAIT)
        page.click(f".row:has-text('{last}')")
        page.wait_for_selector(f"h2:has-text('group {STEPS * GROUPS - 1}')", timeout=WAIT)
        assert page.locator(".sibling").count() == SAMPLES
        assert faults == []


def test_an_episode_with_branches_is_a_tree(long_run: Path) -> None:
    rows = [[["a", 0, "0.1", masked], ["b", 1, "0.1", masked], [end, 2, "0.1", 1]] for end, masked in (("x", 1), ("y", 0))]
    longer = [*rows[0], ["z", 3, "0.1", 1]]
    with served(long_run) as address, opened(address) as (page, _):
        tree = page.evaluate("(rows) => treeOf(rows)", [*rows, longer])
        assert [token[0] for token in tree["tokens"]] == ["a", "b"]
        assert all(token[3] for token in tree["tokens"]), "of the row that trains them"
        x, y = tree["branches"]
        assert ([each[0] for each in x["tokens"]], [each[0] for each in y["tokens"]]) == (["x"], ["y"])
        assert ([[each[0] for each in one["tokens"]] for one in x["branches"]], y["branches"]) == ([["z"]], [])


def test_keys_lead_to_the_views_and_to_the_search(long_run: Path) -> None:
    with served(long_run) as address, opened(address) as (page, _):
        shows(page, "why")
        page.keyboard.press("4")
        page.wait_for_selector(".list .row >> nth=3", timeout=WAIT)
        page.keyboard.press("/")
        page.keyboard.type("reply 77.")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('main').innerText.includes('8 samples in 1 groups')")
        page.focus(".list")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector("h2:has-text('group 77')", timeout=WAIT)


def test_what_a_model_says_is_text(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 2, replies=HOSTILE)
    with served(run) as address, opened(address) as (page, faults):
        shows(page, "samples")
        page.wait_for_selector(".list .row >> nth=1", timeout=WAIT)
        page.click(".list .row >> nth=0")
        page.wait_for_selector(".sibling", timeout=WAIT)
        told = page.inner_text(".siblings")
        assert HOSTILE[0] in told
        assert "\\u202egnihton\\u202c \\x1b[2J\\x00" in told
        page.wait_for_function("document.title === 'recorded – Sluice'", timeout=WAIT)
        assert faults == []
