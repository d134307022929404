"""A service process as the launcher starts it: what it serves, how it ends, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import structs

from runtime.config import Config, Deadlines, Model, Network, Rewards, Rule, Run, loading
from runtime.errors import Unreachable, UserError
from runtime.models.tiny_model import END_OF_TURN, make_tokenizer, write_tokenizer
from runtime.process import os_process
from runtime.status import Registration, Status, Stop
from runtime.types import ScoreRequest, Scores
from services.rpc import contract
from services.rpc.client import Channel, Session
from services.rpc.server import Server
from tests.coroutines import driven_by
from tests.loopback.session_peers import run
from tests.loopback.session_peers import started as serves
from tests.unit.reward_cases import make_request

ROOT = Path(__file__).parents[2]
START = 60.0  # seconds from the start of a process until it has registered, on a machine that is busy
END = 40.0  # seconds until a process that was told to stop is gone


@asynccontextmanager
async def coordinating(refusal: Exception | None = None) -> AsyncIterator[tuple[str, asyncio.Queue[Registration]]]:
    """The address of a coordinator, and what registers with it. With `refusal`, it raises that instead."""
    registrations: asyncio.Queue[Registration] = asyncio.Queue()

    async def register(registration: Registration) -> None:
        if refusal is not None:
            raise refusal
        registrations.put_nowait(registration)

    async with serves(Server({"Coordinator": {"Register": register}})) as address:
        yield address, registrations


def write_config(folder: Path, **sections: Any) -> Path:
    """The resolved configuration of a run whose model is a tokenizer alone."""
    model = folder / "model"
    model.mkdir()
    write_tokenizer(model)
    settings: dict[str, Any] = {
        "run": Run(name="test", dir=str(folder)),
        "model": Model(path=str(model)),
        "rewards": Rewards(rules=[Rule(name="gsm8k", weight=2.0)]),
        "deadlines": Deadlines(start=START, stop=5.0),
        "network": Network(security="none"),  # no agent is there to give keys
    }
    path = folder / "config.yaml"
    path.write_text(loading.to_yaml(loading.resolve(Config(**settings | sections))))
    return path


def command(config: Path, coordinator: str) -> list[str]:
    words = ("services.reward", "--config", str(config), "--name", "reward-0", "--coordinator", coordinator)
    return [sys.executable, "-m", *words]


class Service:
    """A reward service process; what it says on standard error is in `log`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path):
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), END)


@asynccontextmanager
async def started(config: Path, coordinator: str) -> AsyncIterator[Service]:
    log = config.parent / "log"
    with log.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *command(config, coordinator),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=err,
            preexec_fn=partial(os_process.before_exec, (), True),
        )
    try:
        yield Service(process, log)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def registered(folder: Path, **sections: Any) -> AsyncIterator[tuple[Service, Registration, Session]]:
    """A process that has registered, and a session to it."""
    async with coordinating() as (address, found), started(write_config(folder, **sections), address) as service:
        registration = await asyncio.wait_for(found.get(), START)
        session = Session(Channel(registration.address), "reward-0", "Reward")
        try:
            await session.open(END)
            yield service, registration, session
        finally:
            await session.close()


async def until_serving(address: str) -> None:
    """Registration comes first, health a moment later: `Watch` tells of the change."""
    async with Channel(address) as channel:
        async for reply in health_pb2_grpc.HealthStub(channel.grpc).Watch(health_pb2.HealthCheckRequest(), timeout=END):
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return


SCORE = contract.METHODS["Reward", "Score"]


def score_request(*texts: str, group_id: int = 5) -> ScoreRequest:
    tokenizer = make_tokenizer()
    return make_request(group_id, [0], [tokenizer.encode(text + END_OF_TURN).ids for text in texts], label="7")


@driven_by(run)
async def test_a_reward_process_registers_serves_and_stops_when_told(tmp_path: Path) -> None:
    """What a scheduler tells all processes as this one begins is heeded as it is later: the coordinator says when to stop."""
    late = Deadlines(start=START, stop=START + END)
    async with coordinating() as (address, found), started(write_config(tmp_path, deadlines=late), address) as service:
        service.process.terminate()
        registration = await asyncio.wait_for(found.get(), START)
        session = Session(Channel(registration.address), "reward-0", "Reward")
        await session.open(END)
        assert (registration.role, registration.name, registration.rank) == ("reward", "reward-0", 0)
        assert registration.pid == service.process.pid
        assert registration.seconds.keys() == {"interpreter", "imports", "load"}
        await until_serving(registration.address)

        request = score_request("so #### 7", "so #### 8")
        over_the_stream: Scores = await session.call("Score", request, END)
        unary: Scores = await session.unary("Reward", "Score", request)
        for scores in (over_the_stream, unary):
            assert scores.group_id == 5
            assert scores.rewards.tolist() == [2.0, 0.0]
            assert scores.valid.tolist() == [1, 1]

        status: Status = await session.unary("Process", "Status")
        assert (status.role, status.name, status.state) == ("reward", "reward-0", "ready")
        assert (status.pid, status.address) == (service.process.pid, registration.address)
        assert (status.calls.answered, status.calls.open) == (2, 0)
        assert status.gauges["groups_total"] == 2
        assert status.rates["groups"] > 0
        assert status.uptime_seconds > 0

        await session.unary("Process", "Stop", Stop(drain_seconds=1.0))
        assert await service.ended() == 0
        with pytest.raises(Unreachable, match="reward-0"):
            await session.call("Score", request, 5.0)
        await session.close()
        assert "Traceback" not in service.log


OWN = """
import os, time
from runtime.rewards.rules import rule

@rule("waits")
def waits(text, label, context):
    while text == "slow" and not os.path.exists("FOLDER/go"):
        time.sleep(0.01)
    if text == "fails":
        raise KeyError(text)
    return context.extra["year"]
"""


@driven_by(run)
async def test_a_group_is_answered_once_it_is_scored_and_a_process_that_is_terminated_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("FOLDER", str(tmp_path)))
    rewards = Rewards(rules=[Rule(name=f"{tmp_path}/own.py:waits")], workers=2, timeout=60.0)

    def request(text: str, group_id: int) -> ScoreRequest:
        return structs.replace(score_request(text, group_id=group_id), extra={"year": 2024})

    async with registered(tmp_path, rewards=rewards) as (service, registration, session):
        await until_serving(registration.address)
        failed: Scores = await session.call("Score", request("fails", 6), END)
        assert (failed.valid.tolist(), failed.errors) == ([0], {"exception:KeyError": 1})
        slow, quick = (
            asyncio.ensure_future(session.call("Score", request(text, number), 60.0))
            for number, text in enumerate(("slow", "quick"))
        )
        assert (await quick).rules["waits"].tolist() == [2024.0]
        assert not slow.done()
        (tmp_path / "go").touch()
        assert (await slow).rules["waits"].tolist() == [2024.0]
        before = len(service.log)  # with the traceback of the rule
        service.process.terminate()
        assert await service.ended() == 0
        assert "Traceback" not in service.log[before:]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("configuration", "error: surprise: "),
        ("model", "error: model.path: FOLDER/nowhere has no tokenizer.json"),
        ("registration", "error: reward-0 (rank 0) is not in this run's topology"),
    ],
)
@driven_by(run)
async def test_what_its_user_has_to_mend_is_one_line_and_exit_code_2(tmp_path: Path, what: str, said: str) -> None:
    config = write_config(tmp_path, **({"model": Model(path=str(tmp_path / "nowhere"))} if what == "model" else {}))
    if what == "configuration":
        config.write_text(config.read_text() + "surprise: 1\n")
    refusal = UserError("reward-0 (rank 0) is not in this run's topology") if what == "registration" else None
    async with coordinating(refusal) as (address, found), started(config, address) as service:
        assert await asyncio.wait_for(service.process.wait(), START) == 2
        assert found.empty()
        lines = service.log.splitlines()
    assert lines[-1].startswith(said.replace("FOLDER", str(tmp_path)))
    assert len(lines) == 1 or what == "registration"


PARENT = """
import json, subprocess, sys
child = subprocess.Popen(json.loads(sys.argv[1]))
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel kills orphans on Linux only")
@driven_by(run)
async def test_a_process_dies_with_its_parent_and_the_calls_under_way_fail(tmp_path: Path) -> None:
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    async with coordinating() as (address, found):
        arguments = json.dumps(command(write_config(tmp_path), address))
        quiet = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, arguments, cwd=ROOT, **quiet)
        descriptor = session = None
        try:
            assert parent.stdout is not None
            child = int(await asyncio.wait_for(parent.stdout.readline(), START))
            descriptor = os.pidfd_open(child)  # stays this very process, whatever becomes of its number
            loop.add_reader(descriptor, gone.set)
            registration = await asyncio.wait_for(found.get(), START)
            assert registration.pid == child
            session = Session(Channel(registration.address), "reward-0", "Reward")
            await session.open(END)
            assert not gone.is_set()
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)  # so that it cannot answer first
            calls = [session.post(SCORE, score_request("1", group_id=number), 60.0) for number in range(3)]
            parent.kill()
            await asyncio.wait_for(gone.wait(), END)
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert type(outcome) is Unreachable
                assert (outcome.service, outcome.phase) == ("reward-0", "Score")
        finally:
            if session is not None:
                await session.close()
            if descriptor is not None:
                loop.remove_reader(descriptor)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
            with suppress(ProcessLookupError):
                parent.kill()
            await parent.wait()


# ---- Commands that are told to end as they begin

# In a process that imports AT, the signal NUMBER comes at that moment.
SENDS = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("AT"):
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
sys.meta_path.insert(0, Sends())
"""
BEFORE = "stopped before training began: there is nothing to save\n"


def test_a_command_that_is_told_to_end_at_any_moment_of_its_start_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SENDS)
    quickstart = (str(ROOT / "configs/quickstart.yaml"), f"run.dir={tmp_path}/run")
    node = ("sluice.node", *quickstart)
    train, sft, serve = (("sluice", *each) for each in (("train", *quickstart), ("sft", *quickstart), ("serve", "nowhere")))
    table = [
        (train, "launcher.cli", signal.SIGTERM, 0, BEFORE),
        (train, "launcher.commands.train", signal.SIGHUP, 0, BEFORE),
        (train, "launcher.job", signal.SIGINT, 0, BEFORE),
        (sft, "launcher.commands.sft", signal.SIGTERM, 0, BEFORE),
        (serve, "launcher.commands.serve", signal.SIGINT, 0, "stopped before it served\n"),
        (node, "launcher.node.agent", signal.SIGTERM, 0, "stopped before this node took part\n"),
        (("sluice", "status", "nowhere"), "launcher.cli", signal.SIGINT, 130, ""),
        (("sluice", "status", "nowhere"), "launcher.commands.status", signal.SIGINT, 130, ""),
    ]
    for first in range(0, len(table), 2):
        begun = [
            subprocess.Popen(
                (sys.executable, "-m", *command),
                env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "AT": at, "NUMBER": str(int(number))},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command, at, number, _, _ in table[first : first + 2]
        ]
        for process, (command, at, _, code, said) in zip(begun, table[first:], strict=False):
            out, errors = process.communicate(timeout=START)
            assert (process.returncode, out, errors) == (code, said, ""), (command, at)
    assert not (tmp_path / "run").exists()
