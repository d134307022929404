"""Over HTTP: the page, whose views say what the files of a run hold, and what a process serves for Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from aiohttp import ClientSession, CookieJar
from yarl import URL

from benchmarks.recorded_run import BEGAN, PROMPT, STEP, record, reply_of, reward_of
from launcher.page.report import report
from launcher.page.server import CONNECTIONS, THIS, PageGuard, Pages, application, serve
from runtime import run_files, timeouts
from runtime.config import Config
from runtime.errors import UserError
from runtime.ledger.reader import DATABASE
from runtime.process import network
from runtime.process.http_server import HttpServer
from runtime.status import Progress, Registration, RunFigures, Status
from runtime.telemetry import scraping
from services.process import exposed

TOKEN = "right"
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


def served(root: Path, use: Callable[[ClientSession, str], Awaitable[Any]], host: str = "127.0.0.1", shown: bool = True) -> Any:
    """What `use` gives, with the page of `root` at its address. `shown`: its token has been, once."""

    async def work() -> Any:
        server = HttpServer(application(Pages(root), PageGuard(host, TOKEN)), CONNECTIONS, 0.0)
        try:
            address = await server.open(network.listener("127.0.0.1", 0, 16))
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
                if shown:
                    async with client.get(f"{address}/?token={TOKEN}") as answer:
                        assert answer.status == 200
                return await use(client, address)
        finally:
            await server.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


def asked(root: Path, path: str, **more: Any) -> Any:
    async def use(client: ClientSession, address: str) -> Any:
        async with client.get(f"{address}/api/run/{THIS}/{path}", **more) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    return served(root, use)


def statuses(root: Path, paths: Sequence[str], shown: bool = True, **more: Any) -> list[int]:
    async def use(client: ClientSession, address: str) -> list[int]:
        found = []
        for path in paths:
            async with client.get(URL(address + path, encoded=True), **more) as answer:
                found.append(answer.status)
                assert "token" not in str(answer.url) or answer.status == 401
        return found

    return list(served(root, use, shown=shown))


def test_the_files_are_served_with_a_policy_that_lets_nothing_else_in(run: Path) -> None:
    (run / "secret.html").write_text("secret")

    async def use(client: ClientSession, address: str) -> None:
        for path, kind in (("/", "html"), ("/static/page.js", "javascript"), ("/static/charts.js", "javascript")):
            async with client.get(address + path) as answer:
                assert (answer.status, answer.content_type) == (200, f"text/{kind}")
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"

    served(run, use)
    outside = ["/static/../server.py", "/static/..%2Fserver.py", f"/static/{quote(str(run / 'secret.html'), safe='')}"]
    outside += ["/static/server.py", "/static/nothing.js", "/api/run/other/why", f"/api/run/{THIS}/no"]
    assert set(statuses(run, outside)) == {404}
    wrong = ["samples?states=none", "rows?groups=a", "why?from=x"]
    for odd in ("nan", "inf", "-inf", "1e22", "9" * 20, "9" * 400, "１e9e"):
        names = ("rows?groups", "why?from", "why?to", "group?id", "samples?after", "lanes?pixels")
        wrong += [f"{name}={quote(odd)}" for name in names]
    wrong += [
        f"{name}={odd}" for name in ("samples?step-from", "samples?reward-to", "lanes?start") for odd in ("nan", "inf", "x")
    ]
    assert set(statuses(run, [f"/api/run/{THIS}/{query}" for query in wrong])) == {400}
    right = (
        "rows",
        "group?id=9007199254740992",
        "lanes?pixels=-1",
        "lanes?pixels=0",
        "lanes?start=9&end=9",
        "samples?step-to=1e300",
    )
    assert set(statuses(run, [f"/api/run/{THIS}/{query}" for query in right])) == {200}


def test_a_page_is_asked_by_its_own_names_alone_and_wants_its_token_once(run: Path) -> None:
    async def use(client: ClientSession, address: str) -> list[int]:
        port = address.rpartition(":")[2]
        found = []
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", f"rebound.example:{port}", "attacker.example"):
            async with client.get(f"{address}/api/runs", headers={"Host": host}) as answer:
                found.append(answer.status)
        return found

    assert served(run, use, shown=False) == [401, 401, 401, 403, 403]
    paths = ("/", "/?token=wrong", f"/?token={quote('sésame')}", "/?token=%ff", f"/?token={TOKEN}", "/", "/api/runs")
    assert statuses(run, paths, shown=False) == [401, 401, 401, 401, 200, 200, 200]
    assert statuses(run, ("/", "/api/runs"), headers={"Content-Encoding": "gzip"}, shown=False) == [415, 415]
    other = {"Cookie": "sluice-page-1=\udcff", "Authorization": "\udcff"}
    assert statuses(run, ("/", f"/api/run/{THIS}/what-if"), shown=False, headers=other) == [401, 401]


def test_where_a_page_is_printed_with_its_token(run: Path) -> None:
    async def use(address: str) -> list[int]:
        found = []
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
            for url in (URL(address).with_query({}), URL(address), URL(address).with_query({})):
                async with client.get(url) as answer:
                    found.append(answer.status)
                    assert "token" not in str(answer.url)
        return found

    async def work() -> list[int]:
        told = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(run, "localhost", 0, told.set_result))
        try:
            return await use(await told)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    assert asyncio.run(asyncio.wait_for(work(), 60)) == [401, 200, 200]


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
    assert any(section["title"] == "Off-policy" for section in asked(run, "curves")["sections"])
    assert asked(run, "evaluations") == {"table": None, "changed": []}
    lanes = asked(run, "lanes?pixels=800")["lanes"]
    decoded = next(lane for lane in lanes if (lane["process"], lane["line"]) == ("rollout-0", "engine"))
    assert len(decoded["slices"]) == STEPS


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
    assert statuses(run, [f"/api/run/{THIS}/occupancy"]) == [404]


def test_a_folder_of_runs_is_a_list(tmp_path: Path) -> None:
    for name, steps in {"b": 2, "a": 2, "c": 1, "d": 1}.items():
        record(tmp_path / "runs" / name, steps)
    record(tmp_path / "elsewhere", 1)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "a" / run_files.METRICS).write_text("nonsense\n")
    (tmp_path / "runs" / "c" / run_files.LEDGER / DATABASE).write_bytes(b"")
    (tmp_path / "runs" / "d" / run_files.LEDGER / DATABASE).write_bytes(b"no database " * 100)
    (tmp_path / "runs" / "notes").mkdir()

    async def use(client: ClientSession, address: str) -> Any:
        async with client.get(f"{address}/api/runs") as answer:
            return await answer.json()

    first, second, killed, damaged = served(tmp_path / "runs", use)
    assert (killed["waited"], "cannot be read" in damaged["state"]) == ({}, True)
    assert (first["id"], "line 1 is not a point" in first["state"]) == ("a", True)
    assert (second["id"], second["steps"]) == ("b", 2)
    assert second["waited"] == {"seconds": pytest.approx(STEP), "most": "generate rollout-0 50%"}


def test_where_there_is_no_run_a_line_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="neither a run's folder nor a folder of runs"):
            Pages(folder)


# ------------------------------------------------------------------------------------------------ the report in a real browser


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def test_a_report_is_drawn_without_a_complaint(tmp_path: Path) -> None:
    """Its scripts run, and every figure is drawn."""
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
        *("--dump-dom", f"{page.as_uri()}#_/curves"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert re.findall(r'<canvas[^>]* data-drawn="(\d)"', done.stdout) == ["2", "4", "1", "2"], "with the means over curves"
    assert re.search(r"</i>&lt;b&gt;</button>", done.stdout)


PATIENCE = 60.0  # seconds for what another task has to do, on a busy machine
Get = Callable[..., Awaitable[tuple[int, str]]]


def made(prometheus: dict[str, Any] | None, **network: Any) -> Config:
    raw = {"run": {"name": "a run"}, "metrics": {"prometheus": prometheus}, "network": network}
    return msgspec.convert(raw, Config)


class Told:
    """A process that counts how often it is asked."""

    def __init__(self, role: str = "rollout") -> None:
        self.role, self.asked, self.address = role, 0, ""

    def status(self) -> Status:
        self.asked += 1
        return Status(role=self.role, name=self.role, state="ready", metrics=self.address)

    def figures(self) -> RunFigures:
        other = Registration(role="reward", name="reward-0", address="", pid=1, host="", metrics="127.0.0.1:9")
        counts: dict[str, dict[str, int]] = {"rollouts": {}, "lost": {}, "restarts": {}}
        return RunFigures(progress=Progress(), processes=[other], staleness=2, folder="/", **counts)


def serving(config: Config, told: Told, test: Callable[[Get], Awaitable[None]], leads: bool = False) -> None:
    async def within() -> None:
        scraped = exposed(config, told.status, told.figures if leads else None)
        async with scraped as told.address, aiohttp.ClientSession() as http:

            async def get(path: str, **headers: str) -> tuple[int, str]:
                async with http.get(f"http://{told.address}{path}", headers=headers) as answer:
                    return answer.status, await answer.text()

            await asyncio.wait_for(test(get), PATIENCE)

    asyncio.run(within())


def test_a_process_is_looked_at_when_somebody_asks_and_only_then() -> None:
    told = Told()

    async def test(get: Get) -> None:
        assert told.asked == 0
        code, written = await get("/metrics")
        assert code == 200 and 'sluice_process_state{process="rollout",role="rollout",run="a run",state="ready"} 1.0' in written
        assert told.asked == 1
        assert (await get("/sd"))[0] == (await get("/"))[0] == 404

    serving(made({}), told, test)
    assert told.address.startswith("127.0.0.1:")


def test_the_coordinator_says_where_all_serve() -> None:
    told = Told("coordinator")

    async def test(get: Get) -> None:
        named = msgspec.json.decode((await get("/sd"))[1])
        assert [(each["targets"], each["labels"]["process"]) for each in named] == [
            ([told.address], "coordinator"),
            (["127.0.0.1:9"], "reward-0"),
        ]
        assert "sluice_run_step" in (await get("/metrics"))[1]

    serving(made({}), told, test, leads=True)


def test_who_has_not_the_token_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRAPED", "token")
    told = Told("coordinator")

    async def test(get: Get) -> None:
        for given in ("", "Bearer", "Bearer other", "Bearer ätoken", "token"):
            for path in ("/metrics", "/sd", "/other"):
                code, body = await get(path, **({"Authorization": given} if given else {}))
                assert code == 401 and "a run" not in body
        assert (await get("/metrics", **{"Content-Encoding": "gzip", "Authorization": "Bearer token"}))[0] == 415
        assert told.asked == 0
        assert (await get("/metrics", Authorization="Bearer token"))[0] == 200

    serving(made({"token": {"from": "SCRAPED"}}), told, test, leads=True)


def test_the_event_loop_goes_on_while_the_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what takes for ever is given up, without a second thread for the next who asks."""
    over, began, threads = threading.Event(), threading.Event(), set()

    def text(*_: object) -> bytes:
        threads.add(threading.current_thread().name)
        began.set()
        over.wait(PATIENCE)
        return b""

    monkeypatch.setattr(scraping, "text", text)
    monkeypatch.setattr(timeouts, "SCRAPE", 0.05)

    async def test(get: Get) -> None:
        try:
            assert [(await get("/metrics"))[0] for _ in range(2)] == [503, 503]
            assert began.is_set()
        finally:
            over.set()

    serving(made({}), Told(), test)
    assert len(threads) == 1 and threading.main_thread().name not in threads


def test_a_port_that_is_taken_is_one_line_with_its_key() -> None:
    async def within(config: Config, leads: bool) -> str:
        async with exposed(config, Told().status, Told().figures if leads else None) as address:
            return address

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as refused:
            asyncio.run(within(made({"port": port}), True))
        assert str(refused.value) == f"metrics.prometheus.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        assert asyncio.run(within(made({"port": port}), False)) != f"127.0.0.1:{port}"  # it is the coordinator's alone
        with pytest.raises(UserError, match=f"network.port_range: all ports from {port} to {port} are in use"):
            asyncio.run(within(made({}, port_range=[port, port]), False))
