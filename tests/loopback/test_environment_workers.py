"""Agents in processes of their own: what each kind of failure costs, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.config import Budgets, Environment
from runtime.environments.messages import EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.environments.workers import AgentWorkers
from runtime.errors import UserError
from runtime.rewards.worker_process import worker_environment

AGENTS = Path(__file__).with_name("agents_of_all_kinds.py")
SHORT = Budgets(setup=60.0, scoring=60.0, cleanup=0.3)


class NothingToAsk:
    async def answer(self, request: EpisodeRequest, what: str, fields: Any) -> Any:
        raise UserError(f"{what}: nobody answers")

    async def forget(self, episode: str) -> None:
        pass


@asynccontextmanager
async def workers(name: str, **settings: Any) -> AsyncIterator[AgentWorkers]:
    environment = Environment(run=f"{AGENTS}:{name}", **settings)
    variables = worker_environment(())
    variables.pop("PYTHONPATH")
    made = AgentWorkers("services.environment.test", environment, variables, NothingToAsk())
    try:
        await made.start()
        yield made
    finally:
        await made.close()
    assert not [child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())]


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
        cleanup_seconds=budgets.cleanup,
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


def of_kind(kind: str, end_in: str = "", **task: Any) -> EpisodeEnd:
    async def work() -> EpisodeEnd:
        async with workers("kinds") as made:
            _, end = await played(made, request(kind=kind, **task), end_in)
            _, after = await played(made, request(kind="good"))  # whatever it did, the next one is none the worse
            assert after.reward == 1.0
            return end

    return asyncio.run(work())


def test_an_episode_has_its_phases_its_figures_and_its_reward() -> None:
    async def work() -> None:
        async with workers("good") as made:
            events, end = await played(made, request(text="four"))
            assert [event.phase for event in events if event.phase] == ["setup", "run", "cleanup"]
            assert [event.log for event in events if event.log] == [{"length": 4.0}]
            assert end == EpisodeEnd(reward=4.0)

    asyncio.run(work())


def test_a_class_has_set_up_scoring_and_clearing_up_and_one_object_a_process() -> None:
    async def work() -> None:
        async with workers("Whole", concurrency=1) as made:
            for before in (1.0, 2.0):
                events, end = await played(made, request())
                assert [event.phase for event in events if event.phase] == ["setup", "run", "score", "cleanup"]
                assert [event.reward for event in events if event.reward is not None] == [0.25]
                assert {"before": before, "cleaned": 1.0} in [event.log for event in events]
                assert end.reward == 0.5
            assert made.processes == 1

    asyncio.run(work())


def test_what_is_told_to_end_is_scored() -> None:
    async def work() -> None:
        async with workers("Whole") as made:
            events, end = await played(made, request(hang=True), end_in="run")
            assert end == EpisodeEnd(reward=0.5, stop_reason="timeout")
            assert [event.phase for event in events if event.phase] == ["setup", "run", "score", "cleanup"]

    asyncio.run(work())


def test_a_function_that_does_not_await_is_an_agent_too() -> None:
    async def work() -> None:
        async with workers("plain") as made:
            assert (await played(made, request()))[1].reward == 1.0

    asyncio.run(work())


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


def test_a_thread_that_goes_on_goes_with_its_process() -> None:
    async def work() -> None:
        async with workers("plain") as made:
            assert (await played(made, request(hang=True), end_in="run"))[1] == EpisodeEnd(stop_reason="timeout")
            while made.processes:  # noqa: ASYNC110 - until the process has ended
                await asyncio.sleep(0)
            assert (await played(made, request()))[1].reward == 1.0

    asyncio.run(work())


def test_an_agent_says_why_it_stopped() -> None:
    async def work() -> None:
        async with workers("late") as made:
            assert (await played(made, request()))[1] == EpisodeEnd(reward=0.0, stop_reason="max_turns")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("kind", "failure", "reason"),
    [
        ("raise", "infrastructure", "RuntimeError: broken"),
        ("infrastructure", "infrastructure", "the database is down"),
        ("data", "data", "row without an answer"),
        ("exit", "infrastructure", "sys.exit(3)"),
        ("die", "infrastructure", "signal 9"),
        ("nan", "infrastructure", "nan is not a finite number"),
        ("text", "infrastructure", "'one' is not a number"),
        ("list", "infrastructure", "is not a number"),
    ],
)
def test_failures_are_known_by_kind(kind: str, failure: str, reason: str) -> None:
    end = of_kind(kind)
    assert end.failure == failure
    assert reason in end.reason


def test_what_leaves_nothing_is_left_out_and_completions_have_rewards_of_their_own() -> None:
    assert of_kind("nothing") == EpisodeEnd(left_out=True, reason="it returned None, and gave no reward")
    assert of_kind("completions") == EpisodeEnd(rewards={"call-1": 1.0})


@pytest.mark.parametrize("kind", ["block", "stubborn"])
def test_one_that_does_not_end_when_told_is_killed(kind: str) -> None:
    end = of_kind(kind, end_in="run")
    assert end.failure == "infrastructure"
    assert "run was told to end, and did not within 0.3 s" in end.reason


def test_a_flood_of_output_is_cut_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> int:
        async with workers("kinds") as made:
            _, end = await played(made, request(kind="print"))
            assert end.reward == 1.0
        return made.dropped

    dropped = asyncio.run(work())
    shown = capfd.readouterr().err
    assert dropped > 32 << 20
    assert len(shown) < 32 << 20
    assert "bytes of output were left out" in shown


def test_a_daemon_that_an_agent_forks_is_ended_with_its_episode() -> None:
    marker = f"daemon-{uuid.uuid4().hex}"
    assert of_kind("daemon", marker=marker).reward == 1.0
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


def test_where_an_agent_failed_is_told_and_its_traceback_once(capfd: pytest.CaptureFixture[str]) -> None:
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
    assert said.count("Traceback") == said.count(f'agents_of_all_kinds.py", line {at}, in kinds') == 1


def test_who_leaves_takes_the_agents_work_along() -> None:
    async def work() -> None:
        async with workers("kinds") as made:
            async with aclosing(made.play(request(kind="block"))) as events:
                async for event in events:
                    if event.phase == "run":
                        break
            assert made.under_way == 0
            assert (await played(made, request(kind="good")))[1].reward == 1.0

    asyncio.run(work())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('not today')", "ValueError: not today (agent.py, line 1)"),
        ("import a_package_that_is_not_there", "ModuleNotFoundError"),
        ("def other(): pass", "AttributeError"),
        ("run = 3", "TypeError: run is neither a function nor has it a method run"),
        ("import os; os._exit(4)", "its process ended"),
        ("raise SystemExit(5)", "SystemExit: 5"),
    ],
)
def test_a_file_that_cannot_be_imported_is_the_users_to_mend(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(text)

    async def work() -> None:
        settings = Environment(run=f"{file}:run")
        made = AgentWorkers("services.environment.test", settings, dict(os.environ), NothingToAsk())
        try:
            with pytest.raises(UserError, match=r"^services\.environment\.test\.run: ") as raised:
                await made.start()
        finally:
            await made.close()
        assert reason in str(raised.value)

    asyncio.run(work())


def test_a_file_that_starts_threads_is_imported_by_each_worker(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import threading, os\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "HERE = os.getpid()\n"
        "def run(data, **_):\n    return HERE == os.getpid()\n"
    )

    async def work() -> None:
        made = AgentWorkers("test", Environment(run=f"{file}:run"), dict(os.environ), NothingToAsk())
        try:
            await made.start()
            assert (await played(made, request()))[1].reward == 1.0
        finally:
            await made.close()

    asyncio.run(work())


def test_the_users_interpreter_needs_nothing_of_sluices(tmp_path: Path) -> None:
    """Another interpreter, without any package, imports the agent and what it is given."""
    file = tmp_path / "agent.py"
    file.write_text(
        "import sys\nfrom sluice.agents import Episode\n"
        "def run(data, *, episode, **_):\n"
        "    return isinstance(episode, Episode) and not {'msgspec', 'grpc', 'numpy', 'torch'} & sys.modules.keys()\n"
    )
    bare = Path(sys.base_prefix) / "bin" / "python3"

    async def work() -> None:
        settings = Environment(run=f"{file}:run", python=str(bare))
        made = AgentWorkers("test", settings, {"PATH": os.environ["PATH"]}, NothingToAsk())
        try:
            await made.start()
            assert (await played(made, request()))[1].reward == 1.0
        finally:
            await made.close()

    asyncio.run(work())
