"""The page over HTTP: who may ask, and that every view says what the run's files hold."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import ClientSession, CookieJar, web
from yarl import URL

from benchmarks.recorded_run import BEGAN, PROMPT, STEP, record, reply_of, reward_of, write_spans
from launcher.commands.report import report
from launcher.page.server import THIS, PageGuard, Pages, application
from runtime import run_files
from runtime.errors import UserError
from runtime.ledger.reader import DATABASE, LedgerReader
from runtime.process.spans import PUBLICATION, SpanHeader, TracedSpan

STEPS, GROUPS, SAMPLES = 6, 2, 3
EPOCHS, LOST = (1, 1, 2, 2), (0, 0, 1, 2)  # of four steps
HOSTILE = [
    "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>",
    "\u202egnihton\u202c \x1b]0;title\x07\x1b[2J",
    "nul \x00 and ￾ and \ud7ff",
    "long " + "y" * 2_000_000,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("page") / "run", STEPS, GROUPS, SAMPLES)


def served(root: Path, use: Callable[[ClientSession, str], Awaitable[Any]], host: str = "127.0.0.1", token: str = "") -> Any:
    """What `use` gives, with the page of `root` at its address."""

    async def work() -> Any:
        runner = web.AppRunner(application(Pages(root), PageGuard(host, token)), access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
                return await use(client, address)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(work(), 60))


def asked(root: Path, path: str, **more: Any) -> Any:
    async def use(client: ClientSession, address: str) -> Any:
        async with client.get(f"{address}/api/run/{THIS}/{path}", **more) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    return served(root, use)


def statuses(root: Path, paths: Sequence[str], token: str = "", **more: Any) -> list[int]:
    async def use(client: ClientSession, address: str) -> list[int]:
        found = []
        for path in paths:
            async with client.get(URL(address + path, encoded=True), **more) as answer:
                found.append(answer.status)
                assert "token" not in str(answer.url) or answer.status == 401
        return found

    return list(served(root, use, token=token))


def test_the_files_are_served_with_a_policy_that_lets_nothing_else_in(run: Path) -> None:
    (run / "secret.html").write_text("secret")

    async def use(client: ClientSession, address: str) -> None:
        for path, kind in (("/", "html"), ("/static/page.js", "javascript"), ("/static/plotly.js", "javascript")):
            async with client.get(address + path) as answer:
                assert (answer.status, answer.content_type) == (200, f"text/{kind}")
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"

    served(run, use)
    outside = ["/static/../server.py", "/static/..%2Fserver.py", f"/static/{quote(str(run / 'secret.html'), safe='')}"]
    outside += ["/static/server.py", "/static/nothing.js", "/api/run/other/why", f"/api/run/{THIS}/no"]
    assert set(statuses(run, outside)) == {404}
    queries = ("samples?states=none", "rows?groups=a", "rows", "why?from=nan", "why?from=x", "group?id=inf")
    assert statuses(run, [f"/api/run/{THIS}/{query}" for query in queries]) == [400, 400, 200, 200, 400, 200]


def test_a_page_is_asked_by_its_own_names_alone_and_with_a_token_wants_it_once(run: Path) -> None:
    async def use(client: ClientSession, address: str) -> list[int]:
        port = address.rpartition(":")[2]
        found = []
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", f"rebound.example:{port}", "attacker.example"):
            async with client.get(f"{address}/api/runs", headers={"Host": host}) as answer:
                found.append(answer.status)
        return found

    assert served(run, use) == [200, 200, 200, 403, 403]
    queries = ("/", "/?token=wrong", f"/?token={quote('sésame')}", "/?token=right", "/")
    assert statuses(run, queries, token="right") == [401, 401, 401, 200, 200]


def test_the_critical_paths_are_those_of_the_ledger_and_the_spans(run: Path) -> None:
    found = asked(run, "why")
    assert [step["step"] for step in found["steps"]] == list(range(STEPS))
    for step in found["steps"]:
        start = BEGAN + STEP * step["step"]
        group = step["step"] * GROUPS
        assert step["parts"] == [
            ["generate", start, start + 2.0, f"rollout-{group % 2}", group],
            ["score", start + 2.0, start + 2.5, "reward-0", group],
            ["train", start + 2.5, start + 3.5, "trainer-0", -1],
            ["publish", start + 3.5, start + 4.0, "rollout-0", -1],
        ]
    totals = {(total["cause"], total["process"]): total["seconds"] for total in found["totals"]}
    assert totals["generate", "rollout-0"] == pytest.approx(2.0 * STEPS, abs=1e-6)
    assert found["waits"] == [], "the run is over"
    assert [step["step"] for step in asked(run, "why?from=2&to=3")["steps"]] == [2, 3]
    assert asked(run, "why?from=900")["steps"] == []


def test_groups_are_counted_by_state_over_time(run: Path) -> None:
    found = asked(run, "occupancy")
    assert found["start"] == BEGAN
    assert found["bound"] == 2 * GROUPS
    for seconds, *counts in zip(found["seconds"], *found["states"].values(), strict=True):
        within = seconds % STEP
        state = "generating" if within < 2 else "generated" if within < 2.5 else "ready" if within < 3.5 else "consumed"
        edge = min(abs(within - each) for each in (0.0, 2.0, 2.5, 3.5, STEP))
        if edge > 1e-3:  # else the moment is where the state changes
            assert dict(zip(found["states"], counts, strict=True))[state] == GROUPS
            assert sum(counts) == GROUPS


def test_samples_are_found_by_what_is_asked_for(run: Path) -> None:
    everything = asked(run, "samples")
    ids = list(range(STEPS * GROUPS))
    assert everything == {"ids": ids, "rows": [SAMPLES] * len(ids), "steps": [group // GROUPS for group in ids], "next": None}
    assert asked(run, "samples?step-from=1&step-to=2")["ids"] == [2, 3, 4, 5]
    assert asked(run, "samples?text=reply 7.")["ids"] == [7]
    assert asked(run, "samples?replica=rollout-1")["ids"] == list(range(1, STEPS * GROUPS, 2))
    means = [sum(reward_of(group, at) for at in range(SAMPLES)) / SAMPLES for group in range(STEPS * GROUPS)]
    assert asked(run, "samples?reward-from=1")["ids"] == [group for group, mean in enumerate(means) if mean >= 1]
    assert asked(run, "samples?states=dropped")["ids"] == []
    lines = asked(run, "rows?groups=3,5")
    assert [(line["group"], line["sample"], line["reply"], line["reward"]) for line in lines] == [
        (group, at, reply_of(group, at), reward_of(group, at)) for group in (3, 5) for at in range(SAMPLES)
    ]


def test_a_group_is_told_token_by_token(run: Path) -> None:
    found = asked(run, "group?id=4")
    assert (found["state"], found["step"], found["label"], found["replica"]) == ("retired", 2, "4", "rollout-0")
    for at, sample in enumerate(found["samples"]):
        assert sample["prompt"] == PROMPT
        assert "".join(token[0] for token in sample["tokens_shown"]) == reply_of(4, at) == sample["reply"]
        assert {tuple(token[1:]) for token in sample["tokens_shown"]} == {(-0.25, "0.2", 1, None, -0.5, float(at))}
    assert asked(run, "group?id=999") is None


def test_every_other_view_answers(run: Path) -> None:
    assert asked(run, "summary")["facts"][0] == ["Steps", str(STEPS), f"of {STEPS}"]
    assert asked(run, "metric?name=score/mean")["values"] == [step / STEPS for step in range(1, STEPS + 1)]
    assert asked(run, "weights")["replicas"][0]["version"] == STEPS
    processes = {each["process"] for each in asked(run, "processes")["processes"]}
    assert processes == {"rollout-0", "rollout-1", "reward-0", "trainer-0"}
    differs = {row[0]: row[1:] for row in asked(run, "configuration")["differs"]}
    assert differs["training.groups_per_step"][1] == str(GROUPS)
    assert "network.interface" not in differs
    assert any(title == "Off-policy" for title, _ in asked(run, "curves")["sections"])
    assert asked(run, "evaluations") == {"table": None, "changed": []}
    lanes = asked(run, "lanes?pixels=800")["lanes"]
    decoded = next(lane for lane in lanes if (lane["process"], lane["line"]) == ("rollout-0", "engine"))
    assert len(decoded["slices"]) == STEPS


def test_a_process_that_was_down_and_the_epochs_are_lanes(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 4)
    again = BEGAN + 4 * STEP + 10.0
    write_spans(run, SpanHeader("rollout-0", 0, 1, 2, "host"), [TracedSpan("decode", again, again + 1.0, "engine")])
    points = [json.loads(line) for line in (run / run_files.METRICS).read_text().splitlines()]
    told = [
        point | {"publication/epoch": epoch, "rollout/lost": lost}
        for point, epoch, lost in zip(points, EPOCHS, LOST, strict=True)
    ]
    (run / run_files.METRICS).write_text("".join(json.dumps(point) + "\n" for point in told))
    lanes = {(lane["process"], lane["line"]): lane["slices"] for lane in asked(run, "lanes")["lanes"]}
    ((name, start, end, *_, detail, _),) = lanes["rollout-0", "starts"]
    assert (name, start, end, detail) == ("down", 4 * STEP, 4 * STEP + 10.0, "start 1")
    assert [(name, start, end, detail) for name, start, end, _, _, detail, _ in lanes[" epochs", ""]] == [
        ("epoch 1", STEP, 2 * STEP, ""),
        ("epoch 2", 2 * STEP, 3 * STEP, "lost: 1"),
        ("epoch 2", 3 * STEP, 4 * STEP, "lost: 2"),
    ]


def test_rollouts_of_which_one_has_other_bytes_are_told(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 2)
    at = BEGAN + 2 * STEP
    for rollout, checksum in (("rollout-0", "epoch 1: aa"), ("rollout-1", "epoch 1: bb"), ("rollout-2", "epoch 2: cc")):
        spans = [TracedSpan(name, at, at, PUBLICATION, step=2, detail=checksum) for name in ("verified", "swap")]
        write_spans(run, SpanHeader(rollout, 0, 7, 1, "host"), spans)
    found = asked(run, "weights")
    assert [each["checksum"] for each in found["replicas"]] == ["epoch 1: aa", "epoch 1: bb", "epoch 2: cc"]
    assert found["disagree"] == ["rollout-0", "rollout-1"]


def test_a_process_that_is_there_tells_its_memory(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 1)
    for host, process in ((socket.gethostname(), "python"), (socket.gethostname(), "other"), ("elsewhere", "python")):
        write_spans(run, SpanHeader(process, 0, len(host), os.getpid(), host), [])
    found = {(each["process"], each["host"]): each for each in asked(run, "processes")["processes"]}
    here = found["python", socket.gethostname()]
    assert here["rss"] > 1 << 20 and here["used"] > 0 and 1 <= here["cores"] <= (os.cpu_count() or 1)
    assert "rss" not in found["other", socket.gethostname()] and "rss" not in found["python", "elsewhere"]


def test_text_of_a_model_is_data(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 1, replies=HOSTILE)
    found = asked(run, "group?id=0")
    assert [sample["reply"] for sample in found["samples"]] == HOSTILE
    shown = ["".join(token[0] for token in sample["tokens_shown"]) for sample in found["samples"][:3]]
    assert shown == HOSTILE[:3], "characters of several tokens are whole"
    assert len(found["samples"][3]["tokens_shown"]) < len(HOSTILE[3]), "no browser is given two million elements"
    assert asked(run, "samples?text=onerror")["ids"] == [0]


def test_what_changes_is_told(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 1)

    async def use(client: ClientSession, address: str) -> list[str]:
        async with client.get(f"{address}/api/run/{THIS}/events") as answer:
            with (run / run_files.METRICS).open("a") as file:
                file.write(json.dumps({"step": 2, "time": BEGAN, "timing/all": 1.0}) + "\n")
            async for line in answer.content:
                if line.startswith(b"data: "):
                    changed: list[str] = json.loads(line[6:])
                    return changed
        raise AssertionError("the stream ended")

    assert served(run, use) == ["metrics"]


def test_a_run_that_was_killed_and_one_of_another_version(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 2)
    with (run / run_files.METRICS).open("a") as file:
        file.write('{"step": 3, "ti')
    assert asked(run, "summary")["state"] == "ended without a summary: it was killed, or failed"
    with sqlite3.connect(run / run_files.LEDGER / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    assert "the ledger is of format 99" in asked(run, "why")["verdict"]

    async def use(client: ClientSession, address: str) -> tuple[int, Any]:
        async with client.get(f"{address}/api/run/{THIS}/occupancy") as answer:
            return answer.status, await answer.json()

    status, told = served(run, use)
    assert status == 404
    assert "format 99" in told["error"]


def test_a_folder_of_runs_is_a_list(tmp_path: Path) -> None:
    for name in ("b", "a"):
        record(tmp_path / name, 2)
    (tmp_path / "a" / run_files.METRICS).write_text("nonsense\n")
    record(tmp_path / "c", 1)
    (tmp_path / "c" / run_files.LEDGER / DATABASE).write_bytes(b"")
    record(tmp_path / "d", 1)
    (tmp_path / "d" / run_files.LEDGER / DATABASE).write_bytes(b"no database " * 100)
    (tmp_path / "notes").mkdir()

    async def use(client: ClientSession, address: str) -> Any:
        async with client.get(f"{address}/api/runs") as answer:
            return await answer.json()

    first, second, killed, damaged = served(tmp_path, use)
    assert (killed["waited"], "cannot be read" in damaged["state"]) == ({}, True)
    assert (first["id"], "line 1 is not a point" in first["state"]) == ("a", True)
    assert (second["id"], second["steps"]) == ("b", 2)
    assert second["waited"] == {"seconds": pytest.approx(STEP), "most": "generate rollout-0 50%"}


def test_a_copy_that_nobody_may_write_is_read(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with LedgerReader(run / run_files.LEDGER) as reader:
        counts = reader.counts()
    assert counts["retired"] == STEPS * GROUPS
    assert len(asked(copy, "why")["steps"]) == STEPS


def test_where_there_is_no_run_a_line_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="neither a run's folder nor a folder of runs"):
            Pages(folder)


def test_two_pages_on_one_port(run: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli", "page", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            port = first.stdout.readline().strip().rstrip("/").rpartition(":")[2]
            second = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=60, check=False)
            assert second.returncode == 2
            assert second.stderr.startswith(f"error: --port: 127.0.0.1:{port}: ")
        finally:
            first.kill()


# ------------------------------------------------------------------------------------------------ the report in a real browser


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def test_a_report_is_drawn_without_a_complaint(tmp_path: Path) -> None:
    """Its scripts run, and every figure is drawn."""
    pytest.importorskip("plotly", reason="needs plotly: make install")
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium")
    names = ("score/mean", "timing/all", "timing/update", "<b>_rewards/mean", "acc_rewards/mean", "staleness/mean")
    points = [{"step": n, "time": 1e9, **dict.fromkeys(names, n / 7)} for n in range(1, 60)]
    (tmp_path / run_files.METRICS).write_text("".join(json.dumps(point) + "\n" for point in points))
    page = report(tmp_path, None)
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,4000"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--enable-logging=stderr", "--v=0"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    drawn = [classes for classes in re.findall(r'<div class="([^"]*)"', done.stdout) if "js-plotly-plot" in classes.split()]
    assert len(drawn) == page.read_text(encoding="utf-8").count('<script type="application/json">') == 4
    assert re.search(r'class="legendtext"[^>]*>&lt;b&gt;<', done.stdout)
