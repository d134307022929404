"""The processes that run the user's agents: a nursery, which has imported the agent's file, and the workers that it forks.

    AgentWorkers ── "fork", "kill PID" ──► nursery     sluice/agents/worker.py, in the user's interpreter
         └── a task, "end" ──► worker ── events ──►    one socket per worker; it closes with the worker

A late episode gets a request to end. If it does not end, its worker is killed. A worker that dies fails only its own episodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

import sluice
from runtime import timeouts
from runtime.config import Environment
from runtime.environments.messages import EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.errors import ServiceFault, UserError
from runtime.process import os_process
from runtime.process.waiting import done_within
from runtime.sandbox import Box, Sandbox

LIMITS = ("timeout", "cpu_seconds", "memory", "processes", "disk")


def stricter(sandbox: Sandbox, spec: Mapping[str, Any]) -> Sandbox:
    """Return the sandbox with the changes of `spec`. Raises UserError for an unknown key or for a less strict value."""
    try:
        asked = msgspec.convert(msgspec.to_builtins(sandbox) | dict(spec), Sandbox)
    except msgspec.ValidationError as error:
        raise UserError(f"episode.sandbox: {error}") from None
    for name in LIMITS:
        if (value := getattr(asked, name)) > getattr(sandbox, name):
            raise UserError(f"episode.sandbox: {name}: {value} is more than the {getattr(sandbox, name)} allowed")
    if (asked.runtime, asked.image) != (sandbox.runtime, sandbox.image) or asked.network not in ("none", sandbox.network):
        raise UserError(f"episode.sandbox: runtime, image and network are those of services.environment, {sandbox.runtime}")
    if more := set(asked.read) - set(sandbox.read):
        raise UserError(f"episode.sandbox: read: {sorted(more)[0]!r} is not one of {sandbox.read}")
    return asked


SCRIPT = Path(sluice.__file__).parent / "agents" / "worker.py"
MESSAGE = 1 << 16  # bytes of a message of the nursery, at most
LINE = 64 << 20  # bytes of a message of a worker, at most


class AgentWorkers:
    """The nursery and the workers of one environment. All methods belong to one event loop."""

    def __init__(self, key: str, settings: Environment, variables: Mapping[str, str]):
        """Create without processes. `key`: of the settings. `variables`: the whole environment of the agents' processes."""
        self._key, self._settings, self._variables = key, settings, variables
        self._opened = 0  # sandboxes so far
        self._room = asyncio.Semaphore(settings.concurrency)
        self._forking = asyncio.Lock()
        self._workers: list[_AgentProcess] = []
        self._starting: asyncio.Future[int] | None = None  # the pid of the worker being forked
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with a ServiceFault when the nursery ends."""
        self.lost = 0  # workers that died

    async def start(self) -> None:
        """Start the nursery. Raises UserError if it cannot import the agent's file in time."""
        settings = self._settings
        file, _, name = settings.run.rpartition(":")
        path = os.path.abspath(file)  # noqa: ASYNC240, PTH100 - does not access the disk
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with theirs:
            self._nursery = await asyncio.create_subprocess_exec(
                *(settings.python or sys.executable, str(SCRIPT), path, name),
                *(str(theirs.fileno()), str(settings.per_process)),
                env=dict(self._variables),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # both go to the service's log
                pass_fds=[theirs.fileno()],
                preexec_fn=os_process.before_exec,
                start_new_session=True,
            )
        self.spawn(self._follow_nursery())
        if not await done_within(asyncio.wait({self._ready}), settings.budgets.setup):
            late = f"was not imported within budgets.setup, {settings.budgets.setup:g} s"
            raise UserError(f"{self._key}.run: {settings.run} {late}")
        if why := self._ready.result():
            raise UserError(f"{self._key}.run: {settings.run} cannot be imported: {why}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_nursery"):
            for worker in list(self._workers):
                self._kill(worker)
            self._control.close()  # the nursery then ends
            if not await done_within(self._nursery.wait(), timeouts.PROCESS_END):
                with suppress(ProcessLookupError):
                    self._nursery.kill()
                await self._nursery.wait()

    async def play(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        """Yield the events of an episode, once fewer than `concurrency` run; the last has the end. Closing it withdraws it."""
        async with self._room:  # an ended or withdrawn episode frees room
            worker, playing = await self._worker_with_room(request)  # forks a worker if none has room, within AGENT_FORK
            over = False
            worker.write({**structs.asdict(request), "task": json.loads(request.task)})
            try:
                while not over:
                    event = await worker.next_event(playing)
                    over = event.end is not None
                    yield event
            finally:
                if not over and len(worker.episodes) > 1:  # the episode is withdrawn; the worker still plays others
                    worker.write({"drop": request.id})
                elif not over:
                    self.lose(worker, "one of its episodes was withdrawn")
                worker.episodes.pop(request.id, None)
                self.spawn(playing.close())  # a task: a closed generator must not await

    def end(self, episode: str) -> None:
        """Ask the agent to stop. The reward that it has earned is scored."""
        for worker in self._workers:
            worker.end(episode, "run")

    @property
    def under_way(self) -> int:
        return sum(len(worker.episodes) for worker in self._workers)

    @property
    def processes(self) -> int:
        return len(self._workers)

    # ------------------------------------------------------------------------------------------ workers

    async def _worker_with_room(self, request: EpisodeRequest) -> tuple[_AgentProcess, _PlayedEpisode]:
        """Return a worker with room, and the episode, which occupies the room from now on."""
        async with self._forking:
            found = next((each for each in self._workers if len(each.episodes) < self._settings.per_process), None)
            if found is None:
                found = await self._fork()
            playing = found.episodes[request.id] = _PlayedEpisode(request)
        return found, playing

    async def _fork(self) -> _AgentProcess:
        ours, theirs = socket.socketpair()
        self._starting = asyncio.get_running_loop().create_future()
        with theirs:
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ServiceFault(self._key, "fork a worker", str(error)) from None
        if not await done_within(asyncio.wait({self._starting}), timeouts.AGENT_FORK):
            ours.close()
            raise ServiceFault(self._key, "fork a worker", "the nursery does not answer", timeouts.AGENT_FORK)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE)
        worker = _AgentProcess(self._starting.result(), reader, writer, self)
        self._workers.append(worker)
        self.spawn(worker.run())
        return worker

    def _kill(self, worker: _AgentProcess) -> None:
        with suppress(OSError):
            self._control.send(f"kill {worker.pid}".encode())

    def lose(self, worker: _AgentProcess, why: str) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            self.lost += 1
            self._kill(worker)
            for playing in worker.episodes.values():
                playing.events.put_nowait(EpisodeEvent(end=EpisodeEnd(failure="infrastructure", reason=why)))

    async def _follow_nursery(self) -> None:
        """Handle the messages of the nursery until it ends."""
        with suppress(OSError):
            while data := await asyncio.get_running_loop().sock_recv(self._control, MESSAGE):
                self._on_nursery_message(json.loads(data))
        if not self._ready.done():
            self._ready.set_result("its process ended")
        if not self.ended.done():
            self.ended.set_exception(ServiceFault(self._key, "run", "the process that starts the workers has ended"))

    def _on_nursery_message(self, message: Mapping[str, Any]) -> None:
        if "started" in message and self._starting is not None and not self._starting.done():
            self._starting.set_result(message["started"])
        elif "ended" in message:
            worker = next((each for each in self._workers if each.pid == message["ended"]), None)
            if worker is not None:
                code = message["code"]
                why = f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
                worker.ended.set_result(why)
                # The worker's last messages come by another socket. A process that it left behind may keep this socket open.
                asyncio.get_running_loop().call_later(timeouts.PROCESS_END, self.lose, worker, why)
        elif not self._ready.done():
            self._ready.set_result(message.get("failed", ""))

    async def answer(self, worker: _AgentProcess, message: dict[str, Any]) -> None:
        number, playing, what = message.pop("ask"), worker.episodes.get(message.pop("episode")), message.pop("what")
        if playing is None:
            return  # the episode is over
        try:
            worker.write({"answer": number, "found": await self._sandbox(playing, what, message)})
        except Exception as error:  # noqa: BLE001 - the agent receives the error
            worker.write({"answer": number, "failed": f"{type(error).__name__}: {error}"})

    async def _sandbox(self, playing: _PlayedEpisode, what: str, fields: Mapping[str, Any]) -> Any:
        """Return the answer, as JSON, to `SandboxHandle` (sluice/agents/episode.py). Raises UserError and ServiceFault."""
        if what == "sandbox_open":
            return await self._open_sandbox(playing, fields["spec"])
        if (box := playing.boxes.get(fields["name"])) is None:
            raise UserError("episode.sandbox: the sandbox is closed")
        if what == "sandbox_close":
            del playing.boxes[fields["name"]]
            return await box.close()
        seconds, most = fields["timeout"], playing.request.tool_seconds
        timeout = most if seconds is None else min(seconds, most)
        finished = await box.run(fields["command"], stdin=fields["stdin"].encode(), timeout=timeout)
        texts = {name: getattr(finished, name).decode(errors="replace") for name in ("stdout", "stderr")}
        return {**structs.asdict(finished), **texts}

    async def _open_sandbox(self, playing: _PlayedEpisode, spec: Mapping[str, Any]) -> str:
        if self._settings.sandbox is None:
            raise UserError(f"episode.sandbox: there is none; set {self._key}.sandbox")
        asked, url = stricter(self._settings.sandbox, spec), urlsplit(playing.request.base_url)
        box = Box(asked, (str(url.hostname), url.port or 0) if asked.network == "gateway" else None)
        await box.__aenter__()
        self._opened += 1
        playing.boxes[str(self._opened)] = box
        return str(self._opened)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _PlayedEpisode:
    """An episode in a worker, and the sandboxes that its agent has open."""

    def __init__(self, request: EpisodeRequest):
        self.request, self.phase = request, "setup"
        self.events: asyncio.Queue[EpisodeEvent] = asyncio.Queue()
        self.boxes: dict[str, Box] = {}

    async def close(self) -> None:
        while self.boxes:
            await self.boxes.popitem()[1].close()


class _AgentProcess:
    """A worker process, and the events of its episodes."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: AgentWorkers):
        self.pid = pid
        self.episodes: dict[str, _PlayedEpisode] = {}
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the nursery's report of the end
        self._reader, self._writer, self._owner = reader, writer, owner

    async def run(self) -> None:
        """Read the worker's messages until it ends. An invalid message also loses the worker."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "ask" in message:
                    self._owner.spawn(self._owner.answer(self, message))
                elif (playing := self.episodes.get(message.pop("episode", ""))) is not None:
                    event = msgspec.convert(message, EpisodeEvent)
                    playing.phase = event.phase or playing.phase
                    playing.events.put_nowait(event)
            why = "its process ended"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"its process sent an invalid message: {str(error)[:200]}"
        finally:
            self._writer.close()
        known = await done_within(asyncio.wait({self.ended}), timeouts.AGENT_LAST_WORD)
        self._owner.lose(self, self.ended.result() if known else why)

    async def next_event(self, playing: _PlayedEpisode) -> EpisodeEvent:
        """Return the next event within the time of its phase. The gateway limits the time of phase `run`."""
        events, phase = playing.events, playing.phase
        if phase == "run":
            return await events.get()
        coming = asyncio.ensure_future(events.get())
        try:
            await asyncio.wait({coming}, timeout=getattr(playing.request, f"{phase}_seconds"))
            if not coming.done():
                self.end(playing.request.id, phase)
            return await coming
        finally:
            coming.cancel()

    def end(self, episode: str, phase: str) -> None:
        """End the episode if it is in `phase`. If it does not end within the time of cleanup, its process is killed."""
        playing = self.episodes.get(episode)
        if playing is not None and playing.phase == phase:
            self.write({"end": episode, "phase": phase})
            asyncio.get_running_loop().call_later(playing.request.cleanup_seconds, self._kill_if_late, playing, phase)

    def _kill_if_late(self, playing: _PlayedEpisode, phase: str) -> None:
        if self.episodes.get(playing.request.id) is playing and playing.phase == phase and playing.events.empty():
            self._owner.lose(self, f"{phase} was asked to end and did not within {playing.request.cleanup_seconds:g} s")

    def write(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")
