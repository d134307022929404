"""A service process as the launcher starts it: what it serves, how it ends, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from msgspec import structs

from runtime.config import Config, Deadlines, Model, Network, Rewards, Rule, Run, loading
from runtime.errors import ServiceFault, Unreachable, UserError
from runtime.models.tiny_model import END_OF_TURN, make_tokenizer, write_tokenizer
from runtime.status import Registration, Status, Stop
from runtime.types import ScoreRequest, Scores
from services.rpc import contract
from services.rpc.server import OPTIONS, Server
from services.rpc.session import Channel, Session
from tests.unit.reward_cases import make_request

ROOT = Path(__file__).parents[2]
START = 60.0  # seconds from the start of a process until it has registered, on a machine that is busy
END = 40.0  # seconds until a process that was told to stop is gone


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test, START + END)

    asyncio.run(within())


class Coordinator:
    """Takes registrations. With `refusal`, it raises that instead."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.registrations: asyncio.Queue[Registration] = asyncio.Queue()
        self.address = ""
        self._refusal = refusal

    async def register(self, registration: Registration) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.registrations.put_nowait(registration)

    async def __aenter__(self) -> Coordinator:
        self._server = Server({"Coordinator": {"Register": self.register}}, {})
        self.address = self._server.bind("127.0.0.1", 0)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


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
    return [
        sys.executable,
        "-m",
        "services.reward",
        "--config",
        str(config),
        "--name",
        "reward-0",
        "--coordinator",
        coordinator,
    ]


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
            *command(config, coordinator), cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stderr=err
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
    async with Coordinator() as coordinator, started(write_config(folder, **sections), coordinator.address) as service:
        registration = await asyncio.wait_for(coordinator.registrations.get(), START)
        session = Session(registration.address, "reward-0", "Reward")
        try:
            await session.open(END)
            yield service, registration, session
        finally:
            await session.close()


async def serving_status(address: str) -> str:
    async with Channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel.grpc).Check(health_pb2.HealthCheckRequest(service="sluice.v1.Reward"))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def until_serving(address: str) -> None:
    """Registration comes first, health a moment later: `Watch` tells of the change."""
    async with Channel(address) as channel:
        async for reply in health_pb2_grpc.HealthStub(channel.grpc).Watch(health_pb2.HealthCheckRequest(), timeout=END):
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return


def reflected(address: str) -> set[str]:
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


SCORE = contract.METHODS["Reward", "Score"]


def score_request(*texts: str, group_id: int = 5) -> ScoreRequest:
    tokenizer = make_tokenizer()
    return make_request(group_id, [0], [tokenizer.encode(text + END_OF_TURN).ids for text in texts], label="7")


def test_a_reward_process_registers_serves_and_stops_when_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with registered(tmp_path) as (service, registration, session):
            assert (registration.role, registration.name, registration.rank) == ("reward", "reward-0", 0)
            assert registration.pid == service.process.pid
            assert registration.seconds.keys() == {"interpreter", "imports", "load"}
            await until_serving(registration.address)
            assert await serving_status(registration.address) == "SERVING"
            services = await asyncio.to_thread(reflected, registration.address)
            assert services >= {"sluice.v1.Reward", "sluice.v1.Process", "grpc.health.v1.Health"}

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
            assert "Traceback" not in service.log

    run(test())


SEES = """
from runtime.rewards.rules import group_rule, rule

def screen(text, label, context):
    return len(context.prompt[0]["content"]) if text == "screened" else None

@rule("sees", screen=screen)
def sees(text, label, context):
    return context.extra["year"] + len(context.prompt[0]["content"])

@group_rule("distinct")
async def distinct(texts, label, context):
    if label == "short":
        return [1.0]
    assert context.prompt == [{"role": "user", "content": "2+3="}] and context.extra == {"year": 2024}
    assert len(context.tokens) == len(texts) == len(context.finish_reasons)
    return [texts.count(text) == 1 for text in texts]
"""


def test_a_users_rules_see_prompt_and_extra_and_the_whole_group(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEES)
    rules = [Rule(name=f"{tmp_path}/own.py:sees"), Rule(name=f"{tmp_path}/own.py:distinct", wrong=-1.0)]

    async def test() -> None:
        async with registered(tmp_path, rewards=Rewards(rules=rules, workers=1)) as (_, _, session):
            request = structs.replace(
                score_request("a", "screened", "a"),
                messages=[{"role": "user", "content": "2+3="}],
                extra={"year": 2024},
            )
            scores: Scores = await session.call("Score", request, END)
            assert scores.rules["sees"].tolist() == [2028.0, 4.0, 2028.0]
            assert scores.rules["distinct"].tolist() == [-1.0, 1.0, -1.0]
            assert (scores.valid.tolist(), scores.errors) == ([1, 1, 1], {})
            failed: Scores = await session.call("Score", structs.replace(request, group_id=6, label="short"), END)
            assert (failed.valid.tolist(), failed.errors) == ([0, 0, 0], {"exception:ValueError": 3})

    run(test())


def test_a_group_rule_that_fails_names_itself_and_the_group(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEES)
    rewards = Rewards(rules=[Rule(name=f"{tmp_path}/own.py:distinct")], workers=1, on_error="fail")

    async def test() -> None:
        async with registered(tmp_path, rewards=rewards) as (_, _, session):
            with pytest.raises(ServiceFault, match=r"rule distinct.*exception:AssertionError on sample 0 of group 5"):
                await session.call("Score", score_request("a", "b"), END)

    run(test())


PATIENT = """
import os, time
from runtime.rewards.rules import rule

@rule("patient")
def patient(text, label, context):
    while text == "slow" and not os.path.exists("FOLDER/go"):
        time.sleep(0.01)
    return True
"""


def test_a_group_is_answered_when_it_is_scored_whatever_came_with_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PATIENT.replace("FOLDER", str(tmp_path)))
    rewards = Rewards(rules=[Rule(name=f"{tmp_path}/own.py:patient")], workers=2, timeout=60.0)

    async def test() -> None:
        async with registered(tmp_path, rewards=rewards) as (_, _, session):
            slow, quick = (
                asyncio.ensure_future(session.call("Score", score_request(text, group_id=number), 60.0))
                for number, text in enumerate(("slow", "quick"))
            )
            assert (await quick).rewards.tolist() == [1.0]
            assert not slow.done()
            (tmp_path / "go").touch()
            assert (await slow).rewards.tolist() == [1.0]

    run(test())


def test_a_process_that_is_terminated_ends_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        async with registered(tmp_path) as (service, registration, _):
            await until_serving(registration.address)
            service.process.terminate()
            assert await service.ended() == 0
            assert "Traceback" not in service.log

    run(test())


def test_a_process_that_is_killed_fails_the_calls_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with registered(tmp_path) as (service, registration, session):
            await until_serving(registration.address)
            os.kill(service.process.pid, signal.SIGSTOP)  # so that it cannot answer first
            calls = [session.post(SCORE, score_request("1", group_id=number), 60.0) for number in range(3)]
            service.process.kill()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert type(outcome) is Unreachable
                assert (outcome.service, outcome.phase) == ("reward-0", "Score")

    run(test())


def refused(config: Path, refusal: Exception | None = None) -> tuple[int, list[str]]:
    """Exit code and log lines of a process that is not to come up."""
    out: list[Any] = []

    async def test() -> None:
        async with Coordinator(refusal) as coordinator, started(config, coordinator.address) as service:
            code = await asyncio.wait_for(service.process.wait(), START)
            assert coordinator.registrations.empty()
            out.extend((code, service.log.splitlines()))

    run(test())
    return out[0], out[1]


def test_a_bad_configuration_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    config.write_text(config.read_text() + "surprise: 1\n")
    code, lines = refused(config)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: surprise")


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code, lines = refused(write_config(tmp_path, model=Model(path=str(tmp_path / "nowhere"))))
    assert code == 2
    assert lines == [f"error: model.path: {tmp_path / 'nowhere'} has no tokenizer.json"]


def test_a_process_that_the_coordinator_does_not_know_says_so_and_ends(tmp_path: Path) -> None:
    code, lines = refused(write_config(tmp_path), UserError("reward-0 (rank 0) is not in this run's topology"))
    assert code == 2
    assert lines[-1] == "error: reward-0 (rank 0) is not in this run's topology"


PARENT = """
import json, subprocess, sys
child = subprocess.Popen(json.loads(sys.argv[1]))
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel kills orphans on Linux only")
def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    async def test() -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        async with Coordinator() as coordinator:
            arguments = json.dumps(command(write_config(tmp_path), coordinator.address))
            parent = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                PARENT,
                arguments,
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            descriptor = None
            try:
                assert parent.stdout is not None
                child = int(await asyncio.wait_for(parent.stdout.readline(), START))
                descriptor = os.pidfd_open(child)  # stays this very process, whatever becomes of its number
                loop.add_reader(descriptor, gone.set)
                registration = await asyncio.wait_for(coordinator.registrations.get(), START)
                assert registration.pid == child
                assert not gone.is_set()
                parent.kill()
                await asyncio.wait_for(gone.wait(), END)
            finally:
                if descriptor is not None:
                    loop.remove_reader(descriptor)
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    os.close(descriptor)
                with suppress(ProcessLookupError):
                    parent.kill()
                await parent.wait()

    run(test())
