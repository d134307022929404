"""The roles as the coordinator sees them: `runtime.ports` over sessions.

    coordinator ── post(Apply(7)) ──► GroupClient ──┬── session ──► rank 0   its answer is the group's
                                                    ├── session ──► rank 1
                                                    └── session ──► rank 2   lost, or silent: then so is the group

Every rank is given every command over its own session, in the order of posting. A command's row in `services.rpc.contract` says
how long its answer may take, which ranks get it, and how its groups are shared out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from msgspec.structs import replace

from runtime import timeouts
from runtime.cluster.topology import data_leaders
from runtime.commands import Accumulate, BeginStep
from runtime.config import Config
from runtime.errors import ServiceFault, Unanswered, Unreachable
from runtime.status import Status
from runtime.types import Command
from services.rpc.contract import METHODS, Method, Ranks, method_of, service_of
from services.rpc.session import Session

# ----------------------------------------------------------------------------------------------------------------------
# Questions to a group whose ranks answer them together: those that are asked at about the same time become one command.


UNDER_WAY = 2  # commands: one that is computed, and one that is there when it is done


class Gathering:
    """What is asked in one turn of the event loop, or while `UNDER_WAY` commands are on their way, is one command."""

    def __init__(self, client: GroupClient, method: Method):
        """`client` posts the command of `method`, which is made of the questions."""
        self._client, self._method = client, method
        self._asked: list[tuple[Any, asyncio.Future[bytes]]] = []
        self._computing: set[asyncio.Task[None]] = set()

    async def ask(self, request: Any) -> Any:
        """The encoded answer."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._flush)
        future: asyncio.Future[bytes] = loop.create_future()
        self._asked.append((request, future))
        return await future

    def _flush(self) -> None:
        if not self._asked or len(self._computing) >= UNDER_WAY:
            return
        asked, self._asked = self._asked, []
        assert self._method.command is not None
        command = self._method.command([request for request, _ in asked])
        task = asyncio.create_task(self._compute(self._client.post(command), asked))
        self._computing.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._computing.discard(task)
        self._flush()

    async def _compute(
        self, answering: Coroutine[Any, Any, list[bytes]], asked: list[tuple[Any, asyncio.Future[bytes]]]
    ) -> None:
        """One command. It is carried through even when those who asked withdraw: the ranks compute it together."""
        try:
            answers = await answering
        except Exception as error:  # noqa: BLE001 - the error goes to everyone who asked
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)


# ----------------------------------------------------------------------------------------------------------------------


R = TypeVar("R")

GROUP_SERVICES = {row.service for row in METHODS.values() if row.ranks is not Ranks.FIRST}
"""Services whose ranks are one unit."""


class RoleClient:
    """One process of several replicas, in whose place another may come; `incarnation` counts those before it."""

    def __init__(self, service: str, session: Session, config: Config, incarnation: int = 0):
        self.name = session.name
        self.machine = session.machine
        self.incarnation = incarnation
        self._service = service
        self._session = session
        self._config = config

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        method = method_of(self._service, command)
        return self._session.post(method, command, method.seconds(self._config))

    async def call(self, command: Command[R]) -> R:
        return await self.post(command)

    def acknowledge(self, command: Command[Any]) -> None:
        """The answer to `command` is safe: it need not be kept any more."""
        self._session.acknowledge(method_of(self._service, command).key_of(command))

    async def status(self) -> Status:
        return await self._session.unary("Process", "Status")

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._session.when_broken(tell)

    def give_up(self, reason: str) -> None:
        self._session.give_up(reason)


class GroupClient(RoleClient):
    """A group of ranks that live and die together, named after rank 0. It is lost with the first of its ranks: then everything
    that was asked of any of them, and is asked later, raises Unreachable.
    """

    def __init__(self, service: str, sessions: Sequence[Session], config: Config, leaders: Sequence[int], incarnation: int = 0):
        """`sessions`: of all ranks, in order. `leaders` are those that are given data; the others get it from them."""
        super().__init__(service, sessions[0], config, incarnation)
        self._sessions = sessions
        self._leaders = leaders
        self._ordered = 0  # steps before this one have been ordered by an earlier coordinator
        self._reason = ""
        self._gone = asyncio.Event()
        self._tell: list[Callable[[str], None]] = []
        for session in sessions:
            session.when_broken(partial(self._lose, session.name))

    @cached_property
    def machines(self) -> Mapping[str, str]:
        """Of every process that may send weights, by its name."""
        senders = self._sessions if self._config.publication.senders == "all" else self._sessions[:1]
        return {session.name: session.machine for session in senders}

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        method = method_of(self._service, command)
        if method.gathered is type(command):
            return self._gatherings[method].ask(command)
        if isinstance(command, BeginStep | Accumulate) and command.step < self._ordered:
            return _done()
        return self._answered(method, self._posted(method, command))

    def acknowledge(self, command: Command[Any]) -> None:
        key = method_of(self._service, command).key_of(command)
        for session in self._sessions:
            session.acknowledge(key)

    async def take_up(self) -> int:
        """Go on where an earlier coordinator was cut off: what belongs to a step whose Apply it had ordered is not asked for
        again. Returns how many steps it had. Raises ServiceFault where some ranks were given commands that others were not, so
        that they may wait for each other for ever."""
        told = await asyncio.gather(*(session.unary("Process", "Status") for session in self._sessions))
        counts = {status.name: int(status.gauges["commands"]) for status in told}
        if len(set(counts.values())) > 1:
            raise ServiceFault(self.name, "take up", f"the coordinator was lost as it gave a command: {counts}")
        self._ordered = int(told[0].gauges["ordered"])
        return self._ordered

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once a rank is lost, at once if one is. Not after `give_up`."""
        if self._reason:
            tell(self._reason)
        else:
            self._tell.append(tell)

    def give_up(self, reason: str) -> None:
        """Ask nothing of any rank any more. Idempotent."""
        self._tell.clear()
        self._reason = self._reason or reason
        for session in self._sessions:
            session.give_up(self._reason)
        self._gone.set()

    @cached_property
    def _gatherings(self) -> dict[Method, Gathering]:
        rows = (row for (service, _), row in METHODS.items() if service == self._service and row.gathered)
        return {row: Gathering(self, row) for row in rows}

    def _posted(self, method: Method, command: Any) -> Coroutine[Any, Any, Any]:
        """The command, on its way to the ranks that it is for; what is returned waits for all of them."""
        seconds = method.seconds(self._config)
        if method.ranks is not Ranks.SHARES:
            first, last = {Ranks.FIRST: (0, 1), Ranks.OTHERS: (1, None)}.get(method.ranks, (0, None))
            posted = [session.post(method, command, seconds) for session in self._sessions[first:last]]
            return _joined(posted) if method.ranks is Ranks.EACH else _first_of(posted)
        assert method.share is not None
        of_leader = dict(zip(self._leaders, method.share(command, len(self._leaders)), strict=True))
        shares = [of_leader.get(rank, []) for rank in range(len(self._sessions))]
        posted = [
            session.post(method, replace(command, groups=[command.groups[i] for i in share]), seconds)
            for session, share in zip(self._sessions, shares, strict=True)
        ]
        return _in_order(posted, shares)

    async def _answered(self, method: Method, asking: Coroutine[Any, Any, R]) -> R:
        """The answer. A rank that does not answer in time is the loss of the group: raises Unreachable then. Where only the
        ranks have a part in it, another fault may be a sign of a rank's end, which is waited for.
        """
        try:
            return await asking
        except Unreachable as error:
            raise Unreachable(self.name, error.phase, self._reason or error.reason) from error
        except ServiceFault as error:
            if isinstance(error, Unanswered):
                self._lose(error.service, error.reason)
            elif not method.deadline.startswith("deadlines.") or not await self._dies():
                raise
            raise Unreachable(self.name, error.phase, self._reason) from error

    async def _dies(self) -> bool:
        """Whether a rank is lost, now or within a moment: the failure of another may be known first."""
        try:
            await asyncio.wait_for(self._gone.wait(), timeouts.RANK_LOSS)
        except asyncio.TimeoutError:
            return False
        return True

    def _lose(self, rank: str, why: str) -> None:
        if self._reason:
            return
        reason = why if rank == self.name else f"{rank}: {why}"
        told = list(self._tell)
        self.give_up(reason)
        for tell in told:
            tell(reason)


async def _done() -> Any:
    return None


async def _first_of(posted: Sequence[Coroutine[Any, Any, Any]]) -> Any:
    """The first rank's answer, once all have answered. Raises the first error."""
    if len(posted) == 1:
        return await posted[0]
    return next(iter(await asyncio.gather(*posted)), None)


async def _joined(posted: Sequence[Coroutine[Any, Any, list[Any]]]) -> list[Any]:
    """What all ranks answer. Raises the first error."""
    return [one for answer in await asyncio.gather(*posted) for one in answer]


async def _in_order(posted: Sequence[Coroutine[Any, Any, Any]], shares: Sequence[Sequence[int]]) -> Any:
    """What the ranks answer to their shares of a command's groups, in the order of the groups; None where that is nothing."""
    replies = await asyncio.gather(*posted)
    if replies[0] is None:
        return None
    answers = {i: one for share, reply in zip(shares, replies, strict=True) for i, one in zip(share, reply, strict=True)}
    return [answers[index] for index in range(len(answers))]


def client(role: str, sessions: Sequence[Session], config: Config, incarnation: int) -> RoleClient | GroupClient:
    """What stands for a process of `role`, or for the group whose ranks `sessions` lead to."""
    service = service_of(role, config)
    if service not in GROUP_SERVICES:
        return RoleClient(service, sessions[0], config, incarnation)
    return GroupClient(service, sessions, config, data_leaders(getattr(config.services, role)), incarnation)


class ContractDeadlines:
    """Seconds until the answer to a command, for those who have no session."""

    def __init__(self, config: Config):
        self._config = config

    def seconds(self, role: str, command: Any) -> float:
        return method_of(service_of(role, self._config), command).seconds(self._config)
