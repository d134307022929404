"""The roles as the coordinator sees them: `runtime.commands` over sessions.

    coordinator ── post(Apply(7)) ──► GroupClient ──┬── session ──► rank 0   its answer is the group's
                                                    ├── session ──► rank 1
                                                    └── session ──► rank 2   lost, or silent: then so is the group

Every rank gets every command over its own session, in the order of posting. A command's row in `services.rpc.contract` gives
its deadline, its ranks, and the way its groups are shared out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import Any, TypeVar

import grpc
from msgspec.structs import replace

from runtime import errors, timeouts
from runtime.cluster.topology import data_leaders
from runtime.commands import HANDED_OVER, Accumulate, BeginStep
from runtime.config import Config
from runtime.process.keys import COORDINATOR, Keys
from runtime.process.waiting import done_within
from runtime.status import Progress, Status
from runtime.types import SCHEMA_VERSION, Command
from services.rpc import contract, security
from services.rpc.generated import common_pb2
from services.rpc.server import ERROR_KEY, options

# ---- Session

HEALTH = "/grpc.health.v1.Health/Check"
WATCH = contract.METHODS["Coordinator", "Watch"]
LONGEST = (1 << 32) - 1  # milliseconds, as uint32 holds them


class Channel:
    """A channel to `called`, a party of the run, for the party that has `keys`. None where the run needs no keys."""

    def __init__(
        self, address: str, keys: Keys | None = None, called: str = COORDINATOR, silence: float = 0.0, token: str = ""
    ):
        """Open the channel. `silence`: see `server.options`. `token`: given by the coordinator, to be shown to this peer."""
        self.address = address
        self.grpc: grpc.aio.Channel = security.connection(grpc.aio, address, keys, called, options(silence))
        shown = "" if keys is None else token or keys.token(called)
        self.metadata = ((security.HEADER, security.SCHEME + shown),) if shown else ()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.close()

    async def ready(self, name: str, timeout: float) -> None:
        """Connect to the process called `name`. Raises DeadlineExceeded with the result of the last attempt."""
        try:
            await asyncio.wait_for(self.grpc.channel_ready(), timeout)
        except TimeoutError:
            raise errors.DeadlineExceeded(name, "connect", await self.why(), timeout) from None

    async def why(self) -> str:
        """Return why there is no answer, as far as gRPC reports on its last attempt to connect."""
        if self.grpc.get_state() is grpc.ChannelConnectivity.READY:
            return "did not answer"
        reason = f"no connection to {self.address}"
        try:
            await self.grpc.unary_unary(HEALTH)(b"", timeout=timeouts.CONTROL_CALL)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                reason += f": {security.in_words(error.details() or '')}"
        return reason


async def call(
    channel: Channel, name: str, method: contract.Method, request: Any = None, timeout: float = timeouts.CONTROL_CALL
) -> Any:
    """Make one unary call to the process called `name`. Raises the peer's error, DeadlineExceeded, or Unreachable."""
    stub = channel.grpc.unary_unary(method.path, method.request.serialize, method.reply.parse)
    try:
        return await stub(request, timeout=timeout, wait_for_ready=True, metadata=channel.metadata)
    except grpc.aio.AioRpcError as error:
        if (raised := _peer_error(error, name, method.name)) is not None:
            raise raised from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise errors.Unanswered(name, method.name, await channel.why(), timeout) from None
        lost = errors.Unreachable if error.code() is grpc.StatusCode.UNAVAILABLE else errors.ServiceFault
        raise lost(name, method.name, f"{error.code().name}: {error.details()}") from None


async def items(channel: Channel, name: str, method: contract.Method, request: Any = None) -> AsyncGenerator[Any, None]:
    """Yield what the process called `name` streams in answer to one request. Raises the peer's error, or Unreachable."""
    stub = channel.grpc.unary_stream(method.path, method.request.serialize, method.reply.parse)
    try:
        async for item in stub(request, metadata=channel.metadata):
            yield item
    except grpc.aio.AioRpcError as error:
        lost = errors.Unreachable(name, method.name, f"{error.code().name}: {error.details()}")
        raise _peer_error(error, name, method.name) or lost from None


async def watch(address: str, silence: float = 0.0, keys: Keys | None = None) -> AsyncGenerator[Progress, None]:
    """Yield the coordinator's reports until the run ends. Raises ServiceFault. `silence`: see `server.options`."""
    channel = Channel(address, keys, silence=silence)
    async with channel, aclosing(items(channel, COORDINATOR, WATCH)) as progress:
        async for one in progress:
            yield one


def _peer_error(error: grpc.aio.AioRpcError, name: str, phase: str) -> Exception | None:
    """Return the error that the peer raised, if it sent one."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return contract.error_from_wire(common_pb2.Error.FromString(value), name, phase)
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.Forbidden(f"{name}: {phase}: {error.details()}")
    return None


class Session:
    """Calls to one peer over one stream, many at once. Once it breaks, calls raise ServiceFault. `machine`: the peer's."""

    def __init__(self, channel: Channel, name: str, service: str, machine: str = "", term: int = 0):
        """Create the session over `channel`, and own it. `term`: of the coordinator."""
        self.name = name
        self.machine = machine
        self._service = service
        self._term = term
        self._channel = channel
        self._ids = itertools.count(1)
        self._outbox = contract.SendQueue()
        self._waiting: dict[int, tuple[str, asyncio.Future[bytes]]] = {}  # the method's name, and the answer to come
        self._keys: dict[int, str] = {}  # of the calls that have one
        self._acknowledged: list[str] = []  # keys of answers that are safe here, since the last frame
        self._broken = ""  # why, once the stream has broken
        self._tasks: list[asyncio.Task[None]] = []
        self._callbacks: list[Callable[[str], None]] = []

    async def open(self, timeout: float) -> None:
        """Connect. Raises DeadlineExceeded."""
        await self._channel.ready(self.name, timeout)
        method = self._channel.grpc.stream_stream(f"/{contract.PACKAGE}.{self._service}/Session")
        rpc = method(metadata=self._channel.metadata)
        self._tasks = [asyncio.create_task(self._write(rpc)), asyncio.create_task(self._read(rpc))]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def when_broken(self, notify: Callable[[str], None]) -> None:
        """Call `notify(why)` once the stream breaks, at once if it has broken. Not after `close`."""
        if self._broken:
            notify(self._broken)
        else:
            self._callbacks.append(notify)

    def ends(self) -> None:
        """Expect the end of the session, so that no callback reports it."""
        self._callbacks.clear()

    def give_up(self, reason: str) -> None:
        """Break the stream: pending and later calls raise Unreachable. Unary calls still work. Idempotent."""
        self.ends()
        self._break(reason)
        for task in self._tasks:
            task.cancel()

    def post(self, method: contract.Method, request: Any, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a call now, and return the coroutine that waits for its answer. Calls reach the peer in the order of posting.

        Awaiting raises the peer's error, DeadlineExceeded, or ServiceFault if the stream is broken; cancelling withdraws it."""
        id_, urgent = next(self._ids), method.priority is contract.Priority.CONTROL
        body = method.request.pack(request)
        milliseconds = min(max(1, int(timeout * 1000)), LONGEST)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = method.name, future
        if self._broken:
            future.set_exception(errors.Unreachable(self.name, method.name, self._broken))
        else:
            if key := method.key_of(request):
                self._keys[id_] = key
            for chunk, more in contract.split(body):
                call = common_pb2.Call(id=id_, method=method.name, timeout_ms=milliseconds, more=more, key=key)
                self._outbox.put(call, chunk, urgent)
        return self._answer(id_, method, future, timeout)

    async def _answer(self, id_: int, method: contract.Method, future: asyncio.Future[bytes], timeout: float) -> Any:
        # Not wait_for: it makes a second future, which costs as much as the rest of this call.
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, id_, timeout)
        try:
            body = await future
        except asyncio.CancelledError as cancelled:
            if HANDED_OVER not in cancelled.args:
                self._withdraw(id_)
            raise
        finally:
            timer.cancel()
            self._waiting.pop(id_, None)
            self._keys.pop(id_, None)
        return method.reply.parse(body)

    def acknowledge(self, key: str) -> None:
        """Note that the answer to the call of this key is safe here: the peer may drop it. Sent with the next call."""
        self._acknowledged.append(key)

    def _withdraw(self, id_: int) -> None:
        self._outbox.put(common_pb2.Call(id=id_, cancel=True, key=self._keys.get(id_, "")), urgent=True)

    def _expire(self, id_: int, timeout: float) -> None:
        method_name, future = self._waiting[id_]
        if not future.done():
            self._withdraw(id_)
            future.set_exception(errors.Unanswered(self.name, method_name, "did not answer", timeout))

    async def call(self, method_name: str, request: Any, timeout: float) -> Any:
        return await self.post(contract.METHODS[self._service, method_name], request, timeout)

    async def unary(self, service: str, method_name: str, request: Any = None) -> Any:
        """Make a unary call on the same channel, beside the stream. Raises Unreachable if the session is closed meanwhile."""
        asking = asyncio.ensure_future(call(self._channel, self.name, contract.METHODS[service, method_name], request))
        try:
            await asyncio.wait([asking])
        finally:
            asking.cancel()
        if asking.cancelled():  # the channel has ended: the caller's task has not been cancelled
            raise errors.Unreachable(self.name, method_name, self._broken)
        return asking.result()

    async def close(self) -> None:
        self.give_up("was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.grpc.close()

    async def _write(self, rpc: Any) -> None:
        try:
            while calls := await self._outbox.frame():
                acknowledged, self._acknowledged = self._acknowledged, []
                head = common_pb2.CallFrame(schema=SCHEMA_VERSION, acknowledged=acknowledged, term=self._term)
                await rpc.write(contract.wire_frame(head, "calls", calls))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, and reports why

    async def _read(self, rpc: Any) -> None:
        joiner = contract.Reassembler()
        try:
            async for data in rpc:
                for reply in contract.frame_of(common_pb2.ReplyFrame, data).replies:
                    self._settle(reply, joiner)
            self._break("closed the connection")
        except grpc.aio.AioRpcError as error:
            self._break(f"connection lost ({error.code().name}: {error.details()})")
        except errors.InvalidMessage as error:
            self._break(str(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail all pending calls if a reader or writer task fails."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(f"{type(error).__name__}: {error}")

    def _settle(self, reply: common_pb2.Reply, joiner: contract.Reassembler) -> None:
        failed = reply.HasField("error")
        body = None if failed else joiner.add(reply.id, reply.body, reply.more)
        method_name, future = self._waiting.get(reply.id, ("", None))
        if future is None or future.done():
            return
        if failed:
            future.set_exception(contract.error_from_wire(reply.error, self.name, method_name))
        elif body is not None:
            future.set_result(body)

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        for method_name, future in self._waiting.values():
            if not future.done():
                future.set_exception(errors.Unreachable(self.name, method_name, self._broken))
        callbacks, self._callbacks = self._callbacks, []
        for notify in callbacks:
            notify(self._broken)


# ---- Requests to a group whose ranks answer them together: requests of about the same time become one command.


UNDER_WAY = 2  # commands: one that the ranks compute, and the next, which waits there


class RequestBatcher:
    """Requests of one turn of the event loop, or of the time while `UNDER_WAY` commands run, become one command."""

    def __init__(self, client: GroupClient, method: contract.Method):
        """Create the batcher. `client` posts the command of `method`, which is made of the requests."""
        self._client, self._method = client, method
        self._asked: list[tuple[Any, asyncio.Future[bytes]]] = []
        self._room = asyncio.Semaphore(UNDER_WAY)
        self._computing: set[asyncio.Task[None]] = set()

    async def ask(self, request: Any) -> Any:
        """Return the encoded answer."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        if len(self._asked) == 1:
            task = asyncio.create_task(self._compute())
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)
        return await future

    async def _compute(self) -> None:
        """Answer the requests that are there once there is room, even if callers withdraw: the ranks compute together."""
        async with self._room:  # until one of the commands under way is answered
            asked, self._asked = self._asked, []
            assert self._method.command is not None
            try:
                answers = await self._client.post(self._method.command([request for request, _ in asked]))
            except Exception as error:  # noqa: BLE001 - the error goes to every caller
                for _, future in asked:
                    if not future.done():
                        future.set_exception(error)
                return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)


R = TypeVar("R")

GROUP_SERVICES = {row.service for row in contract.METHODS.values() if row.ranks is not contract.Ranks.FIRST}
"""Services whose ranks form one unit."""


class RoleClient:
    """One process of several replicas. Another process may replace it; `incarnation` counts the earlier ones."""

    def __init__(self, service: str, session: Session, config: Config, incarnation: int = 0):
        self.name = session.name
        self.machine = session.machine
        self.machines: Mapping[str, str] = {session.name: session.machine}
        self.incarnation = incarnation
        self._service = service
        self._session = session
        self._config = config

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        method = contract.method_of(self._service, command)
        return self._session.post(method, command, method.seconds(self._config))

    async def call(self, command: Command[R]) -> R:
        return await self.post(command)

    def acknowledge(self, command: Command[Any]) -> None:
        """Let the peer drop its answer to `command`, which is safe here."""
        self._session.acknowledge(contract.method_of(self._service, command).key_of(command))

    async def status(self) -> Status:
        return await self._session.unary("Process", "Status")

    def when_lost(self, notify: Callable[[str], None]) -> None:
        self._session.when_broken(notify)

    def give_up(self, reason: str) -> None:
        self._session.give_up(reason)


class GroupClient(RoleClient):
    """A group of ranks, named after rank 0. It is lost with its first lost rank: then all commands raise Unreachable."""

    def __init__(self, service: str, sessions: Sequence[Session], config: Config, leaders: Sequence[int], incarnation: int = 0):
        """Create the client. `sessions`: of all ranks, in order. `leaders`: the ranks that get data, and pass it on."""
        super().__init__(service, sessions[0], config, incarnation)
        self.machines = {session.name: session.machine for session in sessions}
        self._sessions = sessions
        self._leaders = leaders
        self._ordered = 0  # an earlier coordinator has sent the commands of all steps before this one
        self._reason = ""
        self._gone = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []
        for session in sessions:
            session.when_broken(partial(self._lose, session.name))

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        method = contract.method_of(self._service, command)
        if method.gathered is type(command):
            return self._gatherings[method].ask(command)
        if isinstance(command, BeginStep | Accumulate) and command.step < self._ordered:
            return _done()
        return self._answered(method, self._posted(method, command))

    def acknowledge(self, command: Command[Any]) -> None:
        key = contract.method_of(self._service, command).key_of(command)
        for session in self._sessions:
            session.acknowledge(key)

    async def take_up(self) -> int:
        """Go on after an earlier coordinator. Commands of a step whose Apply it had sent are not sent again. Returns the number
        of such steps. Raises ServiceFault if some ranks lack a command, since ranks may then wait for each other for ever."""
        statuses = await asyncio.gather(*(session.unary("Process", "Status") for session in self._sessions))
        counts = {status.name: int(status.gauges["commands"]) for status in statuses}
        if len(set(counts.values())) > 1:
            raise errors.ServiceFault(self.name, "take up", f"the coordinator was lost while it sent a command: {counts}")
        self._ordered = int(statuses[0].gauges["ordered"])
        return self._ordered

    def when_lost(self, notify: Callable[[str], None]) -> None:
        """Call `notify(why)` once a rank is lost, at once if one is. Not after `give_up`."""
        if self._reason:
            notify(self._reason)
        else:
            self._callbacks.append(notify)

    def give_up(self, reason: str) -> None:
        """Send nothing to any rank any more. Idempotent."""
        self._callbacks.clear()
        self._reason = self._reason or reason
        for session in self._sessions:
            session.give_up(self._reason)
        self._gone.set()

    @cached_property
    def _gatherings(self) -> dict[contract.Method, RequestBatcher]:
        rows = (row for (service, _), row in contract.METHODS.items() if service == self._service and row.gathered)
        return {row: RequestBatcher(self, row) for row in rows}

    def _posted(self, method: contract.Method, command: Any) -> Coroutine[Any, Any, Any]:
        """Post the command to its ranks. The returned coroutine waits for all of them."""
        seconds = method.seconds(self._config)
        if method.ranks is not contract.Ranks.SHARES:
            first, last = {contract.Ranks.FIRST: (0, 1), contract.Ranks.OTHERS: (1, None)}.get(method.ranks, (0, None))
            posted = [session.post(method, command, seconds) for session in self._sessions[first:last]]
            return _joined(posted) if method.ranks is contract.Ranks.EACH else _first_of(posted)
        assert method.share is not None
        of_leader = dict(zip(self._leaders, method.share(command, len(self._leaders)), strict=True))
        shares = [of_leader.get(rank, []) for rank in range(len(self._sessions))]
        posted = [
            session.post(method, replace(command, groups=[command.groups[i] for i in share]), seconds)
            for session, share in zip(self._sessions, shares, strict=True)
        ]
        return _in_order(posted, shares)

    async def _answered(self, method: contract.Method, asking: Coroutine[Any, Any, R]) -> R:
        """Wait for the answer. Raises Unreachable if a rank does not answer in time, since the group is lost with it. If only
        the ranks take part in the command, another fault may come from the end of a rank. That end is waited for."""
        try:
            return await asking
        except errors.Unreachable as error:
            raise errors.Unreachable(self.name, error.phase, self._reason or error.reason) from error
        except errors.ServiceFault as error:
            if isinstance(error, errors.Unanswered):
                self._lose(error.service, error.reason)
            elif not method.deadline.startswith("deadlines.") or not await self._dies():
                raise
            raise errors.Unreachable(self.name, error.phase, self._reason) from error

    async def _dies(self) -> bool:
        """Return whether a rank is lost, now or within a moment: the failure of another rank may be known first."""
        return await done_within(self._gone.wait(), timeouts.RANK_LOSS)

    def _lose(self, rank: str, why: str) -> None:
        if self._reason:
            return
        reason = why if rank == self.name else f"{rank}: {why}"
        callbacks = list(self._callbacks)
        self.give_up(reason)
        for notify in callbacks:
            notify(reason)


async def _done() -> Any:
    return None


async def _first_of(posted: Sequence[Coroutine[Any, Any, Any]]) -> Any:
    """Return the first rank's answer, once all have answered. Raises the first error."""
    if len(posted) == 1:
        return await posted[0]
    return next(iter(await asyncio.gather(*posted)), None)


async def _joined(posted: Sequence[Coroutine[Any, Any, list[Any]]]) -> list[Any]:
    return [one for answer in await asyncio.gather(*posted) for one in answer]


async def _in_order(posted: Sequence[Coroutine[Any, Any, Any]], shares: Sequence[Sequence[int]]) -> Any:
    """Return the ranks' answers to their shares of a command's groups, in the order of the groups; None if there are none."""
    replies = await asyncio.gather(*posted)
    if replies[0] is None:
        return None
    answers = {i: one for share, reply in zip(shares, replies, strict=True) for i, one in zip(share, reply, strict=True)}
    return [answers[index] for index in range(len(answers))]


def client(role: str, sessions: Sequence[Session], config: Config, incarnation: int) -> RoleClient | GroupClient:
    """Return the client of a process of `role`, or of the unit to whose processes `sessions` lead."""
    service = contract.service_of(role, config)
    if service not in GROUP_SERVICES or (role == "rollout" and len(sessions) == 1):
        return RoleClient(service, sessions[0], config, incarnation)
    if role == "rollout":
        return GroupClient(service, sessions, config, range(1), incarnation)
    settings = replace(getattr(config.services, role), processes=len(sessions))  # an elastic group may have fewer ranks
    return GroupClient(service, sessions, config, data_leaders(settings), incarnation)


def command_deadline(config: Config, role: str, command: Any) -> float:
    """Return the seconds until the answer of a process of `role` to `command`, for callers without a session."""
    return contract.method_of(contract.service_of(role, config), command).seconds(config)
