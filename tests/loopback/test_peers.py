"""Groups of ranks behind real sessions: what is the loss of one, and when another has come in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from runtime import timeouts
from runtime.cluster.topology import group_of, instances
from runtime.commands import Apply, SendWeights, WeightsSent
from runtime.config import Config
from runtime.coordinator.register import Register, Unit, UnitState
from runtime.errors import ServiceFault, Unreachable, UserError
from runtime.status import Registration
from runtime.types import PolicyVersion, StepResult
from services import coordinator
from services.coordinator import Peers
from services.rpc.client import GroupClient
from services.rpc.server import Server
from tests.loopback.session_peers import PATIENCE
from tests.loopback.weight_cases import on_a_loop, until

SERVED = {
    "trainer": ("Trainer", ("Apply", "SendWeights")),
    "reference": ("ReferenceGroup", ("Logprobs",)),
    "rollout": ("Rollout", ("Generate",)),
}
FAULT = ServiceFault("trainer-0", "Apply", "a collective failed")


class Rank:
    """A process that has loaded. It answers a command once `gate` is set, with `fault` if there is one."""

    def __init__(self, role: str, rank: int, incarnation: int):
        self.fault: Exception | None = None
        self.seen: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        service, methods = SERVED[role]
        self._server = Server({service: dict.fromkeys(methods, self._carry_out)})
        address = self._server.bind("127.0.0.1", 0)
        name = f"{role}-{rank}"
        self.registration = Registration(
            role=role, name=name, rank=rank, address=address, pid=1, host="here", incarnation=incarnation
        )

    async def _carry_out(self, message: Any) -> Any:
        self.seen.append(message)
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return StepResult(metrics={}, seconds=0.0) if isinstance(message, Apply) else WeightsSent(0, 0.0)

    async def start(self) -> None:
        await self._server.start()

    async def dies(self) -> None:
        await self._server.stop(0)


class Here:
    """The processes of one rollout and a trainer of two ranks, or of a reference of as many besides, connected."""

    def __init__(self, **sections: Any):
        services = {"trainer": {"processes": 2}, **sections.pop("services", {})}
        made = {"run": {"name": "a"}, "services": services, **sections}
        self.config = msgspec.convert(made, Config)
        self.book = Register()
        self.peers = Peers(self.config, self.book)
        for ranks, role in {tuple(group_of(self.config, one)): one.role for one in instances(self.config)}.items():
            self.book.place(role, [rank.name for rank in ranks])
        self._stack = AsyncExitStack()

    async def rank(self, role: str, rank: int, incarnation: int = 0) -> Rank:
        """Not registered yet."""
        made = Rank(role, rank, incarnation)
        await made.start()
        self._stack.push_async_callback(made.dies)
        return made

    async def register(self, role: str, rank: int, incarnation: int = 0) -> Rank:
        made = await self.rank(role, rank, incarnation)
        self.peers.admit(made.registration)
        return made

    def unit(self, name: str) -> Unit:
        found = self.book.find(name)
        assert found is not None
        return found

    async def close(self) -> None:
        await self.peers.stop_all()
        await self._stack.aclose()


@asynccontextmanager
async def connected(**sections: Any) -> AsyncIterator[tuple[Here, list[Rank], GroupClient]]:
    here = Here(**sections)
    ranks = [await here.register("trainer", rank) for rank in range(2)]
    await here.register("rollout", 0)
    if here.config.algorithm.kl_coefficient:
        ranks += [await here.register("reference", rank) for rank in range(2)]
    await here.peers.connect(asyncio.get_running_loop().time())
    try:
        trainer = here.unit("trainer-0").port
        assert isinstance(trainer, GroupClient)
        yield here, ranks, trainer
    finally:
        await here.close()


async def told(trainer: GroupClient) -> str:
    """Why it is lost, once it is."""
    reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    trainer.when_lost(lambda why: reason.done() or reason.set_result(why))
    return await asyncio.wait_for(reason, PATIENCE)


@on_a_loop
async def test_the_loss_of_one_rank_is_that_of_the_group() -> None:
    async with connected() as (_, ranks, trainer):
        ranks[0].gate.clear()
        applying = asyncio.ensure_future(trainer.call(Apply(0)))
        await ranks[1].dies()
        assert (await told(trainer)).startswith("trainer-1: ")
        with pytest.raises(Unreachable, match=r"trainer-0: Apply: trainer-1: "):
            await applying
        with pytest.raises(Unreachable):  # although rank 0 lives
            await trainer.call(Apply(1))


@on_a_loop
async def test_a_fault_that_comes_before_the_loss_that_caused_it_is_that_loss() -> None:
    async with connected() as (_, ranks, trainer):
        ranks[0].fault = FAULT
        applying = asyncio.ensure_future(trainer.call(Apply(0)))
        await asyncio.sleep(0.05)
        assert not applying.done()
        await ranks[1].dies()
        with pytest.raises(Unreachable, match="trainer-1: "):
            await applying


@pytest.mark.parametrize(
    ("command", "wait"),
    [(Apply(0), 0.05), (SendWeights(PolicyVersion(), 1), 100 * PATIENCE)],  # a transfer's fault may be the receiver's
    ids=["after a while", "at once"],
)
@on_a_loop
async def test_a_fault_of_ranks_that_live_is_their_own(command: Any, wait: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RANK_LOSS", wait)
    async with connected() as (_, ranks, trainer):
        ranks[0].fault = FAULT
        with pytest.raises(ServiceFault, match="a collective failed") as raised:
            await asyncio.wait_for(trainer.call(command), PATIENCE)
        assert not isinstance(raised.value, Unreachable)


@on_a_loop
async def test_every_rank_is_given_each_command_and_the_first_answers_for_the_group() -> None:
    async with connected() as (_, ranks, trainer):
        ranks[1].gate.clear()
        applying = asyncio.ensure_future(trainer.call(Apply(3)))
        await until(lambda: all(rank.seen == [Apply(3)] for rank in ranks))
        assert not applying.done()
        ranks[1].gate.set()
        assert (await applying).seconds == 0.0
        ranks[1].fault = ServiceFault("trainer-1", "SendWeights", "a collective failed")
        with pytest.raises(ServiceFault, match="trainer-1: SendWeights: a collective failed"):
            await trainer.call(SendWeights(PolicyVersion(), 1))


@on_a_loop
async def test_a_group_that_does_not_answer_in_time_is_lost() -> None:
    async with connected(deadlines={"train": 0.1}) as (_, ranks, trainer):
        ranks[0].gate.clear()
        with pytest.raises(Unreachable, match="did not answer"):
            await trainer.call(Apply(0))
        assert "did not answer" in await told(trainer)


@on_a_loop
async def test_a_group_is_back_once_all_its_ranks_are_there_with_one_incarnation() -> None:
    async with connected() as (here, ranks, trainer):
        await ranks[1].dies()
        await until(lambda: here.unit("trainer-0").state is UnitState.LOST)
        assert here.unit("trainer-0").reason == await told(trainer)
        await here.register("trainer", 0, incarnation=1)  # whose other rank dies while it loads
        await here.register("trainer", 1, incarnation=2)
        await asyncio.sleep(0.05)
        assert here.unit("trainer-0").state is UnitState.STARTED
        await here.register("trainer", 0, incarnation=2)
        await until(lambda: here.unit("trainer-0").state is UnitState.SERVING)
        assert here.unit("trainer-0").port.incarnation == 2
        late = await here.rank("trainer", 1, incarnation=1)
        with pytest.raises(UserError, match="its incarnation 2 has registered already"):
            here.peers.admit(late.registration)


@on_a_loop
async def test_a_group_in_whose_place_another_has_come_is_lost_before_its_connections_are() -> None:
    async with connected() as (here, _, trainer):
        for rank in range(2):
            await here.register("trainer", rank, incarnation=1)
        assert await told(trainer) == "incarnation 1 has come in its place"
        with pytest.raises(Unreachable, match="incarnation 1 has come in its place"):
            await trainer.call(Apply(0))
        await until(lambda: here.unit("trainer-0").state is UnitState.SERVING)
        assert here.unit("trainer-0").port.incarnation == 1


@on_a_loop
async def test_one_that_cannot_be_taken_in_is_lost_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise ValueError("is odd")

    async with connected() as (here, _, _):
        monkeypatch.setattr(coordinator, "client", refuses)
        await here.register("rollout", 0, incarnation=1)
        await until(lambda: here.unit("rollout-0").reason == "ValueError: is odd")
        assert here.unit("rollout-0").state is UnitState.LOST


@on_a_loop
async def test_a_reference_of_several_ranks_arrives_as_one() -> None:
    spread = {"engine": "megatron", "processes": 2, "parallel": {"pipeline": 2}}
    async with connected(algorithm={"kl_coefficient": 0.1}, services={"reference": spread}) as (here, _, _):
        await here.register("reference", 1, incarnation=1)
        assert here.unit("reference-0").state is UnitState.STARTED
        await here.register("reference", 0, incarnation=1)
        await until(lambda: here.unit("reference-0").state is UnitState.SERVING)
        arrived = here.unit("reference-0").port
        assert isinstance(arrived, GroupClient)
        assert (arrived.name, arrived.incarnation) == ("reference-0", 1)
