"""Rules of the whole suite: a test that leaves something behind fails by name, and the last line counts what was skipped."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leftovers, record

try:
    from hypothesis import Phase, settings
except ImportError:  # the environments of vLLM and of the agents have no properties to test
    pass
else:
    # The number of examples is chosen here alone. How fast an example is says nothing of whether a property holds.
    settings.register_profile("quick", deadline=None, max_examples=20)
    settings.register_profile("ci", deadline=None, max_examples=100)
    settings.register_profile("long", deadline=None, max_examples=1000)
    # `make mutants` asks only whether a test fails: the same examples each time, and none is made smaller.
    settings.register_profile(
        "mutants", deadline=None, max_examples=100, database=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
    )
    settings.load_profile(os.environ.get("SLUICE_EXAMPLES", "quick"))

LONG = "SLUICE_LONG"
"""Which tests marked `long` run: none, `all`, or one of SHARES by any other word, such as a date."""
BEFORE = pytest.StashKey[frozenset[str]]()
MODULE = pytest.StashKey[leftovers.Module]()
SKIPPED = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One temporary folder for the session, with those of its workers and of its tests, which is removed in the end."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if not worker:
        folder = Path(tempfile.mkdtemp(prefix="sluice-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # behind multiprocessing's, which removes what it has there
        config.option.basetemp = config.option.basetemp or str(folder / "t")
        # Tests leave no file behind, but torch's compiler may make this folder of its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        os.environ["SLUICE_TEST_FOLDER"] = str(folder)
    leftovers.use_temporary_folder(Path(os.environ["SLUICE_TEST_FOLDER"]) / (worker or "main"))
    if path := os.environ.get(record.FILE):
        record.start_counting()
        config.pluginmanager.register(record.Recorder(Path(path), writes=not worker))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that are not asked for, and with SLUICE_TEST_ONLY all but the tests named in that file."""
    only, word = os.environ.get(record.ONLY), os.environ.get(LONG, "")
    names = set(Path(only).read_text().splitlines()) if only else None
    chosen = {
        id(item)
        for item in items
        if (
            item.nodeid in names
            if names is not None
            else item.get_closest_marker("long") is None or record.is_in_share(item.nodeid, word)
        )
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def pytest_unconfigure(config: pytest.Config) -> None:
    if SKIPPED in config.stash:
        print(config.stash[SKIPPED])  # behind pytest's own last line


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    module = _module(item)
    if MODULE not in module.stash:
        module.stash[MODULE] = leftovers.Module()
    module.stash[MODULE].began.append((time.time(), item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    item.stash[BEFORE] = leftovers.directly()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which keeps what a test logged, and so its errors' frames
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    module = _module(item)
    last = nextitem is None or _module(nextitem) is not module
    seen = module.stash.get(MODULE, None)
    lines = []
    if BEFORE in item.stash and (left := leftovers.left(item.stash[BEFORE], leftovers.directly)):
        lines += [f"{item.nodeid} left behind {thing}" for thing in left]
        leftovers.end(left)
        if seen is not None:
            seen.before |= frozenset(left)  # told once
    if last and seen is not None:
        left = leftovers.left(seen.before, leftovers.thoroughly)
        lines += [f"{seen.culprit(thing)} left behind {thing}" for thing in left]
        leftovers.end(left)
        del module.stash[MODULE]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def _module(item: pytest.Item) -> pytest.Module:
    module = item.getparent(pytest.Module)
    assert module is not None
    return module


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [_reason(report) for report in terminalreporter.stats.get("skipped", [])]
    counts = Counter(skipped).most_common()
    config.stash[SKIPPED] = f"skipped {len(skipped)}: " + ("; ".join(f"{count} × {why}" for why, count in counts) or "none")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")
