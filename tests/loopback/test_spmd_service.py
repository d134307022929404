"""Ranks of a critic: what one does with its commands, and two over real sessions, with an engine that only notes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runtime import types
from runtime.commands import Accumulate, Apply, BeginStep, ComputeValues, Export, Keep, Offload, Onload, Restore, Save
from runtime.config import Checkpoint, Config, Critic, Deadlines, Run, Services, Trainer
from runtime.data.prompts import StreamState
from runtime.errors import Forbidden, InvalidMessage, ServiceFault, StorageFull, UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import CriticRank
from runtime.trainer.step import ModelTrainer
from runtime.types import PolicyVersion, StepResult, TrainGroup, ValueRequest, Values
from services.model_service import SpmdService
from services.rpc import contract
from services.rpc.client import Channel, GroupClient, Session
from services.rpc.server import Server
from tests.loopback.session_peers import PATIENCE, run

RANKS = 2


class NotingEngine(ModelTrainer):
    """The value of a group is its id. Values are told, and a checkpoint is written, once they `may` be."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.backend: Any = self
        self.rank_info = RankInfo(rank, world_size, torch.device("cpu"))
        self.seen: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.may = threading.Event()
        self.may.set()

    def begin_step(self, step: int) -> None:
        self.seen.append(("begin", step))

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        self.seen.append(("accumulate", last, *((group.mini_batch, group.group_id) for group in groups)))

    def apply(self) -> StepResult:
        self.seen.append(("apply",))
        return StepResult(metrics={"critic/loss": 1.0}, seconds=0.5)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        self.seen.append(("values", *(group.group_id for group in groups)))
        assert self.may.wait(PATIENCE)
        if any(group.payload == b"torn" for group in groups):
            raise InvalidMessage("torn")
        return [Values(group_id=group.group_id, values=np.full(1, group.group_id, np.float32)) for group in groups]

    def begin_save(self, folder: str) -> Callable[[], None]:
        self.seen.append(("save", folder))

        def write() -> None:
            assert self.may.wait(PATIENCE)
            if self.failure is not None:
                raise self.failure
            self.seen.append(("written", folder))

        return write

    def offload(self) -> None:
        self.seen.append(("offload",))

    def onload(self) -> None:
        self.seen.append(("onload",))

    def load(self, folder: str) -> None:
        self.seen.append(("load", folder))


PATIENT = Deadlines(train=PATIENCE)
WITHOUT_COPIES = Checkpoint(in_memory="off")  # these engines have no state


class Group:
    """The group of ranks, and a client of all of them."""

    def __init__(self) -> None:
        self.engines = [NotingEngine(rank, RANKS) for rank in range(RANKS)]
        self.services: list[SpmdService] = []
        self.sessions: list[Session] = []
        self.client: GroupClient
        self._config = Config(
            run=Run(name="test", dir="/", resume=""), deadlines=Deadlines(train=PATIENCE), checkpoint=WITHOUT_COPIES
        )

    def make_rank(self, config: Config, rank: int, world_size: int) -> CriticRank:
        return CriticRank(self.engines[rank], config)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Group]:
        self.services = [SpmdService("critic", self.make_rank, self._config, "critic-0", rank) for rank in range(RANKS)]
        await asyncio.gather(*(asyncio.to_thread(service.load) for service in self.services))
        servers = []
        for service in self.services:
            await service.start()
            rows = [row for row in contract.METHODS.values() if row.service == "Critic"]
            server = Server({"Critic": {row.name: service.handler(row) for row in rows}})
            address = server.bind("127.0.0.1", 0)
            await server.start()
            servers.append(server)
            self.sessions.append(Session(Channel(address), service.name, "Critic"))
        try:
            for session in self.sessions:
                await session.open(PATIENCE)
            self.client = GroupClient("Critic", self.sessions, self._config, range(len(self.sessions)))
            yield self
        finally:
            for session in self.sessions:
                await session.close()
            for service in self.services:
                await service.close()
            for server in servers:
                await server.stop(0)

    def seen(self, kind: str) -> list[list[tuple[Any, ...]]]:
        """By rank: what the commands of this kind brought."""
        return [[what[1:] for what in engine.seen if what[0] == kind] for engine in self.engines]


def with_group(test: Callable[[Group], Awaitable[None]]) -> Callable[[], None]:
    """A test of the group, which is up meanwhile."""

    def run_test() -> None:
        async def while_up() -> None:
            async with Group().up() as group:
                await test(group)

        run(while_up())

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return run_test


def asked(*group_ids: int, tokens: int = 1) -> list[ValueRequest]:
    return [ValueRequest(group_id=group_id, tokens=tokens, payload=b"") for group_id in group_ids]


def train_group(group_id: int, tokens: int, mini_batch: int) -> TrainGroup:
    return TrainGroup(
        group_id=group_id,
        tokens=tokens,
        payload=b"",
        rewards=np.zeros(1, np.float32),
        valid=np.ones(1, np.uint8),
        mini_batch=mini_batch,
    )


def answer(encoded: bytes) -> tuple[int, list[float]]:
    values = types.decode(Values, encoded)
    return values.group_id, values.values.tolist()


def write_position(folder: Path) -> None:
    """As of step 9 in epoch 2."""
    stream = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
    position = Position(version=PolicyVersion(2, 9), stream=stream, trained=[])
    (folder / checkpoint.POSITION).write_bytes(types.encode(position))


def test_every_rank_goes_on_from_the_checkpoint_that_the_first_command_names(tmp_path: Path) -> None:
    write_position(tmp_path)
    (tmp_path / checkpoint.CRITIC).mkdir()

    async def test() -> None:
        async with Group().up() as group:
            await group.client.call(Restore(str(tmp_path)))
            await asyncio.gather(*(group.client.call(request) for request in asked(1, 2)))  # behind it, on all ranks
            assert group.seen("load") == [[(str(tmp_path / checkpoint.CRITIC),)]] * RANKS
            assert [service.version for service in group.services] == [PolicyVersion(2, 9)] * RANKS

    run(test())


@with_group
async def test_what_is_asked_in_one_turn_is_one_part_shared_out_by_tokens(group: Group) -> None:
    requests = [*asked(1, tokens=30), *asked(2, 3, 4, tokens=10)]
    answers = await asyncio.gather(*(group.client.call(request) for request in requests))
    assert list(map(answer, answers)) == [(number, [float(number)]) for number in (1, 2, 3, 4)]
    assert sorted(group.seen("values")) == [[(1,)], [(2, 3, 4)]]
    # A turn later it is another part, of which each rank has a share, be it nothing.
    assert answer(await group.client.call(asked(5)[0])) == (5, [5.0])
    assert sorted(shares[1] for shares in group.seen("values")) == [(), (5,)]


@with_group
async def test_what_is_asked_while_two_parts_are_on_their_way_is_the_next(group: Group) -> None:
    calls = []
    for engine in group.engines:
        engine.may.clear()
    for request in asked(1, 2, 3, 4, 5):
        calls.append(asyncio.ensure_future(group.client.call(request)))
        for _ in range(3):
            await asyncio.sleep(0)  # until it is asked, or waits
    for engine in group.engines:
        engine.may.set()
    answers = [answer(encoded)[0] for encoded in await asyncio.gather(*calls)]
    assert answers == [1, 2, 3, 4, 5]
    parts = [sorted(number for share in part for number in share) for part in zip(*group.seen("values"), strict=True)]
    assert parts == [[1], [2], [3, 4, 5]]


class Part:
    """Of rank `number`'s node."""

    def __init__(self, number: int):
        self.number = number

    def begin(self, command: Save) -> Path:
        return Path(command.folder).with_name(f"part-{self.number}")

    def complete(self, folder: Path, command: Save) -> list[str]:
        return [f"{folder.name} after {command.keep}"]


@with_group
async def test_a_save_is_answered_with_the_parts_of_all_ranks(group: Group) -> None:
    for number, service in enumerate(group.services):
        service._worker._part = Part(number)  # type: ignore[attr-defined]
    assert await group.client.call(Save("/nowhere", b"", (2, 4))) == ["part-0 after (2, 4)", "part-1 after (2, 4)"]
    assert group.seen("written") == [[(f"/part-{number}",)] for number in range(RANKS)]


@with_group
async def test_each_mini_batch_is_shared_out_for_itself_and_all_ranks_see_one_order(group: Group) -> None:
    client = group.client
    tokens = {0: [5, 4, 9], 1: [8, 6, 5, 3]}  # balanced over all, neither would be balanced in itself
    groups = [train_group(10 * batch + i, n, batch) for batch, row in tokens.items() for i, n in enumerate(row)]
    posted = [
        client.post(BeginStep(0)),
        client.post(Accumulate(0, groups[::-1], False)),
        client.post(Accumulate(0, [], True)),
        client.post(Apply(0)),
    ]
    value = asyncio.ensure_future(client.call(asked(1)[0]))
    await asyncio.gather(*posted, value, client.post(Save("/nowhere")))
    cost = {group.group_id: group.tokens for group in groups}
    first = [shares[0] for shares in group.seen("accumulate")]
    for batch, row in tokens.items():
        sums = [sum(cost[number] for own, number in share[1:] if own == batch) for share in first]
        assert sums == [sum(row) / RANKS] * RANKS
    orders = [[what[0] for what in engine.seen if what[0] not in ("values", "save")] for engine in group.engines]
    assert orders == [["begin", "accumulate", "accumulate", "apply", "written"]] * RANKS
    assert [service.version.step for service in group.services] == [1, 1]


@with_group
async def test_all_ranks_leave_the_devices_and_come_back(group: Group) -> None:
    await group.client.call(Offload())
    await group.client.call(Offload())
    await group.client.call(Onload())
    assert (group.seen("offload"), group.seen("onload")) == ([[()]] * RANKS, [[()]] * RANKS)


@with_group
async def test_a_request_that_is_withdrawn_takes_no_other_with_it(group: Group) -> None:
    calls = [asyncio.ensure_future(group.client.call(request)) for request in asked(1, 2, 3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    assert [answer(encoded)[0] for encoded in await asyncio.gather(calls[0], calls[2])] == [1, 3]
    assert answer(await group.client.call(asked(4)[0])) == (4, [4.0])


@with_group
async def test_a_part_that_cannot_be_computed_fails_for_everyone_who_still_asks(group: Group) -> None:
    torn = [msgspec.structs.replace(request, payload=b"torn") for request in asked(1, 2, 3)]
    calls = [asyncio.ensure_future(group.client.call(request)) for request in torn]
    await asyncio.sleep(0)
    calls[0].cancel()
    answers = await asyncio.gather(*calls[1:], return_exceptions=True)
    assert [(type(error), str(error)) for error in answers] == [(InvalidMessage, "torn")] * 2


@with_group
async def test_a_command_that_is_withdrawn_is_carried_out_by_every_rank(group: Group) -> None:
    for engine in group.engines:
        engine.may.clear()
    value = asyncio.ensure_future(group.client.call(asked(1)[0]))
    while not all(group.seen("values")):  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.001)
    beginning = asyncio.ensure_future(group.client.call(BeginStep(0)))  # waits behind it on both
    while not all(service._thread._work_queue.qsize() for service in group.services):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    beginning.cancel()
    for engine in group.engines:
        engine.may.set()
    await group.client.call(Apply(0))
    assert group.seen("begin") == [[(0,)]] * RANKS
    await value


def test_it_writes_and_reads_in_the_runs_folder_alone(tmp_path: Path) -> None:
    run_dir, base, elsewhere = tmp_path / "run", tmp_path / "base", tmp_path / "elsewhere"
    config = Config(run=Run(name="a", dir=str(run_dir), resume=str(base)), checkpoint=WITHOUT_COPIES)
    service = SpmdService("critic", lambda *_: CriticRank(NotingEngine(), config), config, "critic-0", 0)
    foreign = (
        Save(str(elsewhere)),
        Export(str(run_dir / ".." / "elsewhere")),
        Export("/"),
        Restore(str(elsewhere)),
        Save(str(base)),
    )
    own = (Save(str(run_dir / "checkpoints")), Restore(str(base)), Restore(str(run_dir)))

    async def test() -> None:
        for command in foreign:
            with pytest.raises(Forbidden, match=f"critic-0: {type(command).__name__}: .* is not below run.dir"):
                service.execute(command)
        outcomes = await asyncio.gather(*map(service.execute, own), return_exceptions=True)
        assert not [
            outcome for outcome in outcomes if isinstance(outcome, Forbidden)
        ]  # nothing is loaded: each fails otherwise

    asyncio.run(test())


# ------------------------------------------------------------------------------------------------------------- one rank


def make(**settings: Any) -> tuple[CriticRank, NotingEngine]:
    engine, saved = NotingEngine(), Checkpoint(async_save=settings.pop("async_save", False), in_memory="off")
    services = Services(critic=Trainer(**settings))
    config = Config(run=Run(name="a"), services=services, critic=Critic(), checkpoint=saved)
    return CriticRank(engine, config), engine


def ordered(engine: NotingEngine) -> list[tuple[Any, ...]]:
    """What it was ordered to do, but for what is asked of every step."""
    return [what for what in engine.seen if what[0] not in ("apply", "values", "written")]


def test_a_step_makes_the_next_version() -> None:
    rank, engine = make()
    assert rank.execute(BeginStep(4)) is None
    assert rank.execute(Accumulate(4, [], True)) is None
    assert rank.version == PolicyVersion(0, 0)
    engine.phases = {"timing/adv": 0.25}
    assert rank.execute(Apply(4)).metrics == {"critic/loss": 1.0, "timing/adv": 0.25}
    assert rank.version == PolicyVersion(0, 5)
    assert ordered(engine) == [("begin", 4), ("accumulate", True)]


@pytest.mark.parametrize("failing", ["accumulate", "apply"])
def test_commands_behind_one_that_failed_say_what_it_said(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were ordered ahead. Nothing of a step is applied without all of its batch, and the first fault is the one told."""
    rank, engine = make()
    fault = ServiceFault("critic", failing, "the loss is NaN")

    def fail(*_: Any) -> StepResult:
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr(engine, failing, fail)
        rank.execute(BeginStep(0))
        with pytest.raises(ServiceFault):
            rank.execute(Accumulate(0, [], True))
            rank.execute(Apply(0))
    for behind in (Accumulate(0, [], True), Apply(0), Keep(PolicyVersion(0, 1)), BeginStep(1)):
        with pytest.raises(ServiceFault) as caught:
            rank.execute(behind)
        assert caught.value is fault
    assert rank.version == PolicyVersion(0, 0) and ("begin", 1) not in ordered(engine)


def test_a_full_disk_is_told_whatever_library_met_it(tmp_path: Path) -> None:
    rank, engine = make()
    engine.failure = RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")
    with pytest.raises(StorageFull, match=str(tmp_path)):
        rank.execute(Save(str(tmp_path)))
    engine.failure = RuntimeError("of another kind")
    with pytest.raises(RuntimeError, match="of another kind"):
        rank.execute(Save(str(tmp_path)))


def test_a_checkpoint_is_written_beside_the_next_commands(tmp_path: Path) -> None:
    rank, engine = make(async_save=True)
    engine.may.clear()
    saving = rank.execute(Save(str(tmp_path)))
    rank.execute(BeginStep(4))
    assert ordered(engine) == [("save", str(tmp_path)), ("begin", 4)]
    assert not saving.done()
    engine.may.set()
    assert saving.result(60.0) == []
    assert "timing/critic_save" in rank.execute(Apply(4)).metrics
    assert "timing/critic_save" not in rank.execute(Apply(5)).metrics
    engine.failure = OSError("No space left on device")
    with pytest.raises(StorageFull, match=str(tmp_path)):
        rank.execute(Save(str(tmp_path))).result(60.0)
    engine.failure = None
    assert rank.execute(Save(str(tmp_path))).result(60.0) == [], "the next one is another"


def test_the_state_is_away_between_steps(tmp_path: Path) -> None:
    rank, engine = make(engine="megatron", offload=["optimizer"])
    step = [BeginStep(0), Accumulate(0, [], True), Apply(0)]
    for command in (*step, ComputeValues([]), Save(str(tmp_path)), BeginStep(1)):
        answer = rank.execute(command)
        if command == step[-1]:
            assert "timing/critic_onload" not in answer.metrics
    whole = [("begin", 0), ("accumulate", True), ("offload",), ("onload",), ("save", str(tmp_path)), ("offload",)]
    assert ordered(engine) == [*whole, ("onload",), ("begin", 1)]
    metrics = rank.execute(Apply(1)).metrics
    assert {"timing/critic_onload", "timing/critic_offload"} <= metrics.keys()


def test_where_the_device_is_anothers_as_well_the_coordinator_says_when(tmp_path: Path) -> None:
    rank, engine = make(colocate="trainer", offload=["optimizer"])
    assert ordered(engine) == [("offload",)]
    for command in (Offload(), Onload(), Onload(), BeginStep(0), Apply(0)):
        rank.execute(command)
    assert ordered(engine) == [("offload",), ("onload",), ("begin", 0)]
    rank.execute(Offload())
    rank.execute(ComputeValues([]))
    assert ordered(engine)[3:] == [("offload",)]
    rank.execute(Save(str(tmp_path)))  # which needs it, and leaves it for the next order
    assert ordered(engine)[4:] == [("onload",), ("save", str(tmp_path))]


def test_a_critic_goes_on_from_its_part_of_the_checkpoint(tmp_path: Path) -> None:
    write_position(tmp_path)
    rank, engine = make()
    with pytest.raises(UserError, match="has no folder critic"):
        rank.execute(Restore(str(tmp_path)))
    (tmp_path / checkpoint.CRITIC).mkdir()
    rank.execute(Restore(str(tmp_path)))
    assert rank.version == PolicyVersion(2, 9)
    assert ordered(engine) == [("load", str(tmp_path / "critic"))]
