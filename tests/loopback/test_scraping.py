"""What a process serves for Prometheus, over real sockets: who may ask, what it costs the process, and a port that is taken."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from runtime import timeouts
from runtime.config import Config
from runtime.errors import UserError
from runtime.status import Progress, Registration, RunFigures, Status
from runtime.telemetry import prometheus
from services.process import exposed

PATIENCE = 60.0  # seconds for what another task has to do, on a busy machine
Get = Callable[..., Awaitable[tuple[int, str]]]


def made(prometheus: dict[str, Any] | None, **network: Any) -> Config:
    raw = {"run": {"name": "a run"}, "metrics": {"prometheus": prometheus}, "network": network}
    return msgspec.convert(raw, Config)


class Told:
    """A process that counts how often it is asked."""

    def __init__(self, role: str = "rollout") -> None:
        self.role, self.asked, self.leads = role, 0, False
        self.address = ""

    def status(self) -> Status:
        self.asked += 1
        return Status(role=self.role, name=self.role, state="ready", metrics=self.address)

    def figures(self) -> RunFigures | None:
        if not self.leads:
            return None
        other = Registration(role="reward", name="reward-0", address="", pid=1, host="", metrics="127.0.0.1:9")
        counts: dict[str, dict[str, int]] = {"rollouts": {}, "lost": {}, "restarts": {}}
        return RunFigures(progress=Progress(), processes=[other], staleness=2, folder="/", **counts)


def serving(config: Config, told: Told, test: Callable[[Get], Awaitable[None]], leads: bool = False) -> None:
    async def within() -> None:
        told.leads = leads
        async with exposed(config, told, leads) as told.address, aiohttp.ClientSession() as http:

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

    monkeypatch.setattr(prometheus, "text", text)
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
        async with exposed(config, Told(), leads) as address:
            return address

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as refused:
            asyncio.run(within(made({"port": port}), True))
        assert str(refused.value) == f"metrics.prometheus.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        assert asyncio.run(within(made({"port": port}), False)) != f"127.0.0.1:{port}"  # it is the coordinator's alone
        with pytest.raises(UserError, match=f"network.port_range: all ports from {port} to {port} are in use"):
            asyncio.run(within(made({}, port_range=[port, port]), False))
