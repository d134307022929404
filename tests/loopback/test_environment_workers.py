"""Agents in processes of their own, their sandboxes, and environments that others serve: what each kind of failure costs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from runtime.config import Budgets, Config, Deadlines, Environment, RemoteServer, Run, Services
from runtime.config.base import FromEnvironment
from runtime.config.sandbox import Sandbox
from runtime.environments.messages import EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.environments.workers import AgentWorkers, stricter
from runtime.errors import Unreachable, UserError
from runtime.rewards.pool import worker_environment
from services.gateway import RUN, EnvironmentChannel, EnvironmentChannels
from services.rpc.generated import environment_pb2
from tests.leftovers import descendants

AGENTS = Path(__file__).with_name("agents_of_all_kinds.py")
SHORT = Budgets(setup=60.0, scoring=60.0)


@asynccontextmanager
async def workers(
    name: str, file: Path = AGENTS, variables: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[AgentWorkers]:
    environment = Environment(run=f"{file}:{name}", **settings)
    if variables is None:
        variables = worker_environment(())
        variables.pop("PYTHONPATH")
    made = AgentWorkers("services.environment.test", environment, variables)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
    assert not descendants("worker.py")


def request(budgets: Budgets = SHORT, **task: Any) -> EpisodeRequest:
    return EpisodeRequest(
        id=uuid.uuid4().hex,
        base_url="http://127.0.0.1:1/episodes/none",
        api_key="none",
        task=json.dumps(task),
        seed=7,
        purpose="train",
        call_seconds=budgets.call,
        tool_seconds=budgets.tool,
        setup_seconds=budgets.setup,
        score_seconds=budgets.scoring,
        cleanup_seconds=0.3,
    )


async def played(made: AgentWorkers, asked: EpisodeRequest, end_in: str = "") -> tuple[list[EpisodeEvent], EpisodeEnd]:
    """All events, and the end. `end_in`: the phase in which the episode is told to end."""
    found = []
    async with aclosing(made.play(asked)) as events:
        async for event in events:
            found.append(event)
            if end_in and event.phase == end_in:
                made.end(asked.id)
    assert found[-1].end is not None
    return found, found[-1].end


def play(name: str, *asked: EpisodeRequest, end_in: str = "", **settings: Any) -> list[tuple[list[EpisodeEvent], EpisodeEnd]]:
    """One after the other, by the same workers; all are told to end in the phase `end_in`."""

    async def work() -> list[tuple[list[EpisodeEvent], EpisodeEnd]]:
        async with workers(name, **settings) as made:
            return [await played(made, each, end_in) for each in asked]

    return asyncio.run(work())


def phases(events: list[EpisodeEvent]) -> list[str]:
    return [event.phase for event in events if event.phase]


def test_an_episode_has_its_phases_its_figures_and_its_reward() -> None:
    ((events, end),) = play("good", request(text="four"))
    assert phases(events) == ["setup", "run", "cleanup"]
    assert [event.log for event in events if event.log] == [{"length": 4.0}]
    assert end == EpisodeEnd(reward=4.0)
    assert play("late", request())[0][1] == EpisodeEnd(reward=0.0, stop_reason="max_turns")


def test_a_class_has_set_up_scoring_and_clearing_up_and_one_object_a_process() -> None:
    """And one that is told to end is scored."""
    found = play("Whole", request(), request(), concurrency=1)
    for before, (events, end) in enumerate(found, 1):
        assert phases(events) == ["setup", "run", "score", "cleanup"]
        assert [event.reward for event in events if event.reward is not None] == [0.25]
        assert {"before": before, "cleaned": 1.0} in [event.log for event in events]
        assert end.reward == 0.5
    ((events, end),) = play("Whole", request(hang=True), end_in="run")
    assert end == EpisodeEnd(reward=0.5, stop_reason="timeout")
    assert phases(events) == ["setup", "run", "score", "cleanup"]


def test_what_a_worker_said_counts_before_its_end() -> None:
    """Though its end is heard of first: both come by ways of their own."""

    async def work() -> None:
        async with workers("plain") as made:
            asked = request(hang=True)
            async for event in made.play(asked):
                if event.phase == "run":
                    (worker,) = made._workers
                    worker._reader._transport.pause_reading()  # type: ignore[attr-defined]
                    made.end(asked.id)
                    await worker.ended
                    worker._reader._transport.resume_reading()  # type: ignore[attr-defined]
                last = event
            assert last.end == EpisodeEnd(stop_reason="timeout")

    asyncio.run(work())


def test_a_function_that_does_not_await_is_an_agent_too_and_its_thread_goes_with_its_process() -> None:
    async def work() -> None:
        async with workers("plain") as made:
            assert (await played(made, request(hang=True), end_in="run"))[1] == EpisodeEnd(stop_reason="timeout")
            while made.processes:  # noqa: ASYNC110 - until the process has ended
                await asyncio.sleep(0)
            assert (await played(made, request()))[1].reward == 1.0

    asyncio.run(work())


LATE = "run was asked to end and did not within 0.3 s"
KINDS = {
    "raise": ("infrastructure", "RuntimeError: broken"),
    "infrastructure": ("infrastructure", "the database is down"),
    "data": ("data", "row without an answer"),
    "exit": ("infrastructure", "sys.exit(3)"),
    "die": ("infrastructure", "signal 9"),
    "nan": ("infrastructure", "nan is not a finite number"),
    "text": ("infrastructure", "'one' is not a number"),
    "list": ("infrastructure", "is not a number"),
    "block": ("infrastructure", LATE),
    "stubborn": ("infrastructure", LATE),
}


def test_failures_are_known_by_kind() -> None:
    """Whatever one did, the next one is none the worse; a daemon that an agent forks is ended with its episode."""
    marker = f"daemon-{uuid.uuid4().hex}"

    async def work() -> None:
        async with workers("kinds") as made:
            for kind, (failure, reason) in KINDS.items():
                _, end = await played(made, request(kind=kind), "run" if reason == LATE else "")
                assert end.failure == failure, kind
                assert reason in end.reason
                assert (await played(made, request(kind="good")))[1].reward == 1.0, kind
            _, end = await played(made, request(kind="nothing"))
            assert end == EpisodeEnd(left_out=True, reason="it returned None, and gave no reward")
            assert (await played(made, request(kind="completions")))[1] == EpisodeEnd(rewards={"call-1": 1.0})
            assert (await played(made, request(kind="daemon", marker=marker)))[1].reward == 1.0

    asyncio.run(work())
    assert not [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or [])]


def test_a_process_that_dies_costs_those_beside_it_no_more_than_a_repeat() -> None:
    async def work() -> None:
        async with workers("kinds", per_process=2, concurrency=2) as made:
            both = await asyncio.gather(played(made, request(kind="die")), played(made, request(kind="stubborn")))
            assert [end.failure for _, end in both] == ["infrastructure", "infrastructure"]
            assert made.lost == 1
            assert (await played(made, request(kind="good")))[1].reward == 1.0

    asyncio.run(work())


def test_no_more_are_played_at_once_than_concurrency() -> None:
    async def work() -> None:
        async with workers("Whole", concurrency=2) as made:
            held = [asyncio.create_task(played(made, request(hang=True))) for _ in range(2)]
            while made.under_way < 2:  # noqa: ASYNC110 - no time passes
                await asyncio.sleep(0)
            third = asyncio.create_task(played(made, request()))
            for _ in range(1000):
                await asyncio.sleep(0)
            assert made.under_way == 2
            held[0].cancel()
            await third
            assert made.processes <= 2
            held[1].cancel()
            await asyncio.gather(*held, return_exceptions=True)

    asyncio.run(work())


def test_where_an_agent_failed_is_told_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    at = AGENTS.read_text().splitlines().index('        raise RuntimeError("broken")') + 1

    async def work() -> None:
        async with workers("kinds", concurrency=1) as made:
            ends = [(await played(made, request(kind=kind)))[1] for kind in ("raise", "raise", "infrastructure")]
            assert made.processes == 1
        assert [end.reason for end in ends] == [
            *[f"RuntimeError: broken (agents_of_all_kinds.py, line {at})"] * 2,
            "InfrastructureError: the database is down",
        ]

    asyncio.run(work())
    said = capfd.readouterr().err
    assert said.count("Traceback") == said.count(f'agents_of_all_kinds.py", line {at}, in kinds') == 2, said


def test_who_leaves_takes_the_agents_work_along() -> None:
    async def work() -> None:
        async with workers("kinds") as made:
            async with aclosing(made.play(request(kind="block"))) as events:
                while (await anext(events)).phase != "run":
                    pass
            assert made.under_way == 0
            assert (await played(made, request(kind="good")))[1].reward == 1.0

    asyncio.run(work())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('not today')", "ValueError: not today (agent.py, line 1)"),
        *(("import a_package_that_is_not_there", "ModuleNotFoundError"), ("def other(): pass", "AttributeError")),
        ("run = 3", "TypeError: run must be a function, or have a method run"),
        *(("import os; os._exit(4)", "its process ended"), ("raise SystemExit(5)", "SystemExit: 5")),
    ],
)
def test_a_file_that_cannot_be_imported_is_the_users_to_mend(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(text)

    async def work() -> None:
        async with workers("run", file, dict(os.environ)):
            pass

    with pytest.raises(UserError, match=r"^services\.environment\.test\.run: ") as raised:
        asyncio.run(work())
    assert reason in str(raised.value)


def test_a_file_that_starts_threads_is_imported_by_each_worker(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import threading, os\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "HERE = os.getpid()\n"
        "def run(data, **_):\n    return HERE == os.getpid()\n"
    )

    assert play("run", request(), file=file, variables=dict(os.environ))[0][1].reward == 1.0


def test_the_users_interpreter_needs_nothing_of_sluices(tmp_path: Path) -> None:
    """Another interpreter, without any package, imports the agent and what it is given."""
    file = tmp_path / "agent.py"
    file.write_text(
        "import sys\nfrom sluice.agents import Episode\n"
        "def run(data, *, episode, **_):\n"
        "    return isinstance(episode, Episode) and not {'msgspec', 'grpc', 'numpy', 'torch'} & sys.modules.keys()\n"
    )
    bare = Path(sys.base_prefix) / "bin" / "python3"

    variables = {"PATH": os.environ["PATH"]}
    assert play("run", request(), file=file, variables=variables, python=str(bare))[0][1].reward == 1.0


# ------------------------------------------------------------------------------------------------ sandboxes of agents

LIMITS = Sandbox(runtime="subprocess", network="open", memory=1 << 28, processes=8)


def boxed(sandbox: Sandbox | None, *tasks: dict[str, Any]) -> list[EpisodeEnd]:
    async def work() -> list[EpisodeEnd]:
        async with workers("boxed", variables=dict(os.environ), sandbox=sandbox) as made:
            return [(await played(made, request(**task)))[1] for task in tasks]

    return asyncio.run(work())


def test_an_agent_may_ask_for_less_and_not_for_more() -> None:
    """Commands of one sandbox share its folder."""
    plain, less, more = boxed(LIMITS, {}, {"spec": {"memory": 1 << 27}}, {"spec": {"memory": 1 << 29}})
    assert (plain.reward, less.reward) == (1.0, 1.0)
    assert "memory: 536870912 is more than the 268435456 allowed" in more.reason
    (end,) = boxed(None, {})
    assert "there is none; set services.environment.test.sandbox" in end.reason


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"timeout": 1e9}, "timeout: "),
        ({"runtime": "bwrap"}, "runtime, image and network are those of services.environment"),
        *(({"network": "gateway"}, "runtime, image and network"), ({"read": ["/etc"]}, "read: '/etc' is not one of")),
        *(({"memory": "much"}, "Expected `int`"), ({"colour": 1}, "unknown field `colour`")),
    ],
)
def test_what_is_less_strict_is_refused(spec: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        stricter(LIMITS, spec)
    assert stricter(LIMITS, {"processes": 2}) == Sandbox(runtime="subprocess", network="open", memory=1 << 28, processes=2)


# ------------------------------------------------------------------------------------------------ environments of others

PATIENCE = 60.0
REQUEST = request()
BEGINS, ENDS = EpisodeEvent(phase="run"), EpisodeEvent(end=EpisodeEnd(reward=1.0))


class ScriptedServer:
    """Serves Environment as strangers do; each episode sends `sends` and then does `last`."""

    def __init__(self, sends: list[bytes], last: Callable[[Any], Awaitable[None]] | None = None):
        self._sends, self._last = sends, last
        self.cancelled: list[str] = []
        self.metadata: dict[str, str] = {}
        self.over = asyncio.Event()

    async def describe(self, request: Any, context: Any) -> Any:
        return environment_pb2.Description(name="scripted", concurrency=1)

    async def run(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.metadata = dict(context.invocation_metadata())
        try:
            for each in self._sends:
                yield each
            if self._last is not None:
                await self._last(context)
        finally:
            self.over.set()

    async def cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.id)
        return environment_pb2.CancelReply()

    async def start(self) -> tuple[Any, int]:
        server = grpc.aio.server()
        of = grpc.unary_unary_rpc_method_handler
        messages = environment_pb2
        handlers = {
            "Describe": of(self.describe, messages.DescribeRequest.FromString, messages.Description.SerializeToString),
            "Run": grpc.unary_stream_rpc_method_handler(self.run),
            "Cancel": of(self.cancel, messages.CancelRequest.FromString, messages.CancelReply.SerializeToString),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("sluice.v1.Environment", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port


def served(scripted: ScriptedServer, use: Callable[[EnvironmentChannel], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        server, port = await scripted.start()
        settings = RemoteServer(address=f"127.0.0.1:{port}", token=FromEnvironment(variable="GAME_TOKEN"))
        services = Services(environment={"game": Environment(server=settings)})
        channels = EnvironmentChannels(Config(run=Run(name="a"), services=services), None)
        try:
            (channel,) = channels.by_name()["game"]
            return await use(channel)
        finally:
            await channels.close()
            await server.stop(None)

    return asyncio.run(asyncio.wait_for(whole(), PATIENCE))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_TOKEN", "sesame")


def told(event: EpisodeEvent) -> bytes:
    return RUN.reply.serialize(event)


async def all_of(events: AsyncGenerator[EpisodeEvent, None]) -> list[EpisodeEvent]:
    return [event async for event in events]


def test_events_arrive_and_calls_carry_the_token() -> None:
    scripted = ScriptedServer([told(BEGINS), told(ENDS)])

    async def use(channel: EnvironmentChannel) -> list[EpisodeEvent]:
        await channel.cancel("another")
        return await all_of(channel.run(REQUEST))

    assert served(scripted, use) == [BEGINS, ENDS]
    assert scripted.cancelled == ["another"] and scripted.metadata["authorization"] == "Bearer sesame"


async def fail(context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


@pytest.mark.parametrize(
    ("sends", "last", "reason"), [([told(BEGINS)], fail, "RESOURCE_EXHAUSTED: full"), ([b"\xff"], None, "EpisodeEvent")]
)
def test_what_goes_wrong_at_the_server_is_one_error(sends: list[bytes], last: Any, reason: str) -> None:
    with pytest.raises(Unreachable, match=reason):
        served(ScriptedServer(sends, last), lambda channel: all_of(channel.run(REQUEST)))


async def hang(context: Any) -> None:
    await asyncio.Event().wait()


def test_a_process_that_is_used_no_more_ends_what_it_has_under_way() -> None:
    async def use(channel: EnvironmentChannel) -> None:
        async with aclosing(channel.run(REQUEST)) as events:
            async for event in events:
                assert event == BEGINS
                await channel.close()

    with pytest.raises(Unreachable, match="it no longer serves"):
        served(ScriptedServer([told(BEGINS)], hang), use)


def test_who_wants_no_more_of_an_episode_withdraws_it() -> None:
    scripted = ScriptedServer([told(BEGINS)], hang)

    async def use(channel: EnvironmentChannel) -> None:
        async with aclosing(channel.run(REQUEST)) as events:
            await anext(events)
        await scripted.over.wait()

    served(scripted, use)


def test_nobody_at_the_address_is_the_same_error() -> None:
    async def use(channel: EnvironmentChannel) -> None:
        gone = EnvironmentChannel("gone", grpc.aio.insecure_channel("127.0.0.1:1"), ())
        try:
            with pytest.raises(Unreachable, match="UNAVAILABLE"):
                await all_of(gone.run(REQUEST))
            with pytest.raises(Unreachable, match="UNAVAILABLE"):
                await gone.cancel("a")
        finally:
            await gone.close()

    served(ScriptedServer([]), use)


def test_a_server_is_asked_who_it_is_before_a_run_begins() -> None:
    async def check(address: str, silence: float) -> None:
        services = Services(environment={"game": Environment(server=RemoteServer(address=address))})
        config = Config(run=Run(name="a"), services=services, deadlines=Deadlines(keepalive=silence))
        channels = EnvironmentChannels(config, None)
        try:
            await channels.check()
        finally:
            await channels.close()

    async def whole() -> None:
        server, port = await ScriptedServer([]).start()
        try:
            await check(f"127.0.0.1:{port}", PATIENCE)
        finally:
            await server.stop(None)
        told = r"^services\.environment\.game\.server\.address: no Environment answers within 0\.2 s"
        with pytest.raises(UserError, match=told):
            await check("127.0.0.1:1", 0.2)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))
