"""The report in a real browser, where one is installed: its scripts run, and every figure is drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs plotly: make install")

from launcher.commands.report import report
from runtime import run_files

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 90.0


@pytest.fixture
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium")
    return found


def test_it_is_drawn_without_a_complaint(browser: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("score/mean", "timing/all", "timing/update", "<b>_rewards/mean", "acc_rewards/mean", "staleness/mean")
    points = [{"step": n, "time": 1e9, **dict.fromkeys(names, n / 7)} for n in range(1, 60)]
    (folder / run_files.METRICS).write_text("".join(json.dumps(point) + "\n" for point in points))
    page = report(folder, None)
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,4000"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--enable-logging=stderr", "--v=0"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    drawn = [classes for classes in re.findall(r'<div class="([^"]*)"', done.stdout) if "js-plotly-plot" in classes.split()]
    assert len(drawn) == page.read_text(encoding="utf-8").count('<script type="application/json">') == 4
    assert re.search(r'class="legendtext"[^>]*>&lt;b&gt;<', done.stdout)
