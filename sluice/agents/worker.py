"""Plays episodes in the agent's interpreter, without packages: `python worker.py FILE NAME DESCRIPTOR PER_PROCESS`.

    services.environment ── socket ──► Nursery    imports the agent's file once; forks workers, reaps them,
                                         │ fork    and ends the processes that they leave behind
                         ── socket ──► Worker     plays its episodes, one message a line of JSON, and dies alone

If the file's import has started threads, a fork would copy only one of them: each worker then imports the file itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import operator
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

if "sluice" not in sys.modules:  # this runs as a script: import `sluice` from beside it, wherever the interpreter would look
    _home = Path(__file__).resolve().parents[1]
    _spec = importlib.util.spec_from_file_location("sluice", _home / "__init__.py", submodule_search_locations=[str(_home)])
    assert _spec is not None and _spec.loader is not None
    sys.modules["sluice"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sluice"])

from sluice.agents.conversation import RUNNING, value_of
from sluice.agents.episode import DataError, Episode, InfrastructureError, finite
from sluice.agents.functions import Toolset

# ---- Clients
# The HTTP client that agents get if their interpreter has httpx, or httpx2, which newer clients of OpenAI's bring.

PACKAGES = ("httpx", "httpx2")  # the first one found: every client takes a client of httpx


@cache
def _package() -> Any:
    return next((importlib.import_module(name) for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


@cache
def trust() -> Any:
    """Return httpx's context of this machine's authorities, which takes tens of milliseconds; None without httpx."""
    return None if (httpx := _package()) is None else httpx.create_ssl_context()


def import_all() -> None:
    """Import what the first client and its first request import, which takes tens of milliseconds. Forked workers have it."""
    if (httpx := _package()) is None:
        return

    async def ask(port: int) -> None:
        async with httpx.AsyncClient(verify=trust(), trust_env=False) as client:
            with suppress(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{port}")

    with suppress(OSError), socket.socket() as deaf:  # it has the port, and does not listen; a machine may have no IPv4
        deaf.bind(("127.0.0.1", 0))
        asyncio.run(ask(deaf.getsockname()[1]))


def http_client() -> Any:
    """Return a client for all episodes of a process; None without httpx."""
    if (httpx := _package()) is None:
        return None
    return httpx.AsyncClient(verify=trust(), timeout=None, limits=httpx.Limits(max_connections=None))


# ---- Failures

MOST = 2000  # characters


def failure_text(error: BaseException) -> str:
    """Return the error's kind, its text, and the innermost line of the agent's own code in its traceback, if any: "KeyError:
    'x' (FILE.py, line 7)". An error by which an agent itself reports a failure gets no line."""
    said = f"{type(error).__name__}: {error}"[:MOST]
    place = "" if isinstance(error, (DataError, InfrastructureError)) else _place(error)
    return f"{said} ({place})" if place else said


def _place(error: BaseException) -> str:
    own = Path(sys.path[0])  # the folder of the agent's file
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename).resolve()
        if file.suffix == ".py" and file.is_relative_to(own) and "site-packages" not in file.parts:
            place = f"{file.relative_to(own)}, line {line}"
    return place


MESSAGE = 1 << 16  # bytes of a message to or from the nursery
LINE = 64 << 20  # bytes of a task, or of an answer
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROUNDS = 100  # of ending children, which may start others meanwhile


def main() -> None:
    """Run the nursery, or a worker that imports for itself. Exits with code 2 if it cannot; a nursery's message says why."""
    file, name, descriptor, per_process = sys.argv[1:5]
    sys.path[0] = str(Path(file).resolve().parent)
    sys.path.append(str(Path.cwd()))
    own = socket.socket(fileno=int(descriptor))
    own.set_inheritable(False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    alone = len(sys.argv) > 5
    try:
        made = imported(file, name)
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the message reports any error
        if not alone:
            own.send(json.dumps({"failed": failure_text(error)}).encode())
        sys.exit(2)
    if alone:
        work(made, own, int(per_process))
    else:
        Zygote(own, made, int(per_process)).run()


def imported(file: str, name: str) -> Any:
    """Import the file, and return its object `name`. Raises AttributeError, TypeError, and the file's errors."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = operator.attrgetter(name)(module)
    if not callable(getattr(found, "run", found)):
        raise TypeError(f"{name} must be a function, or have a method run")
    Toolset(getattr(found, "tools", ()), 0.0)  # raises for a tool without a schema
    import_all()  # once for all workers
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


# ---------------------------------------------------------------------------------------------------------- the nursery


class Zygote:
    """The nursery. "fork" with a descriptor starts a worker on it; "kill PID" ends one. Reports how workers ended."""

    def __init__(self, own: socket.socket, made: Any, per_process: int):
        self._own, self._made, self._per_process = own, made, per_process
        self._workers: set[int] = set()
        self._forks = not sys.platform.startswith("linux") or len(list(Path("/proc/self/task").iterdir())) == 1

    def run(self) -> None:
        """Serve until the socket is closed."""
        ended, wake = socket.socketpair()
        ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()
        self._send(ready=True)
        while True:
            readable, _, _ = select.select([self._own, ended], [], [])
            if ended in readable:
                ended.recv(MESSAGE)
                self._reap()
            if self._own in readable and not self._hear():
                signal.set_wakeup_fd(-1)  # `wake` closes as this method returns
                return

    def _hear(self) -> bool:
        data = b""
        with suppress(ConnectionResetError):  # the service closed its end before it had read all that was sent
            data, descriptors, _, _ = socket.recv_fds(self._own, MESSAGE, 1)
        if not data:
            return False
        word, _, pid = data.decode().partition(" ")
        if word == "fork":
            self._start(descriptors[0])
        elif int(pid) in self._workers:  # only this process reaps it: the pid is still its own
            with suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)  # it may not lead a group yet
        return True

    def _start(self, descriptor: int) -> None:
        if self._forks:
            pid = os.fork()
            if not pid:
                self._become_worker(descriptor)
        else:
            command = [sys.executable, *sys.argv[:3], str(descriptor), sys.argv[4], "alone"]
            pid = subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True).pid
        os.close(descriptor)
        self._workers.add(pid)
        self._send(started=pid)

    def _become_worker(self, descriptor: int) -> None:
        """Turn this process into a worker. Never returns."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._own.close()
            work(self._made, socket.socket(fileno=descriptor), self._per_process)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report the workers that ended, and end the children that they left, which are this process's now."""
        with suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._workers:
                    self._workers.remove(pid)
                    self._send(ended=pid, code=os.waitstatus_to_exitcode(status))
        for child in children() - self._workers:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _send(self, **news: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the service has closed its end: `_hear` ends the loop
            self._own.send(json.dumps(news).encode())


def children() -> set[int]:
    """Return the processes whose parent this one is."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return found


def end_children(kept: set[int]) -> None:
    """End the children that are not `kept`, and their children, which become ours as they lose their parent."""
    for _ in range(ROUNDS):
        if not (left := children() - kept):
            return
        for child in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
    os._exit(1)  # they are too many to be ended here: the nursery goes on


# ------------------------------------------------------------------------------------------------------------ a worker


def work(made: Any, own: socket.socket, per_process: int) -> None:
    """Play episodes until the socket is closed."""
    agent = made() if inspect.isclass(made) else made
    asyncio.run(_EpisodeWorker(agent, per_process).run(own))


class _EpisodeWorker:
    """Plays the episodes of one process. Also the channel by which they reach the environment's process."""

    def __init__(self, agent: Any, per_process: int):
        self._agent, self._threads = agent, ThreadPoolExecutor(4 * per_process, "agent")
        self._only = per_process == 1
        self._playing: dict[str, _Play] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._http: Any = None

    async def run(self, own: socket.socket) -> None:
        asyncio.get_running_loop().set_default_executor(self._threads)
        reader, self._writer = await asyncio.open_connection(sock=own, limit=LINE)
        self._http = http_client()
        with suppress(ConnectionError):
            while line := await reader.readline():
                message = json.loads(line)
                if "task" in message:
                    play = self._playing[message["id"]] = _Play(self._agent, message, self, self._http)
                    play.task = asyncio.create_task(self._play(play, message))
                elif "end" in message:
                    if (late := self._playing.get(message["end"])) is not None:
                        late.end(message["phase"])
                elif "drop" in message:
                    if (dropped := self._playing.pop(message["drop"], None)) is not None:
                        dropped.task.cancel()
                else:
                    self._answered(**message)
        os._exit(0)  # the environment's process is gone, and with it all callers

    async def _play(self, play: _Play, task: Mapping[str, Any]) -> None:
        kept = children()
        if self._only:
            random.seed(task["seed"])
        outcome = await play.outcome()
        del self._playing[task["id"]]
        if self._only:
            end_children(kept)
        self._write({"episode": task["id"], "end": outcome})
        if self._only and RUNNING:  # a thread goes on: only the process's end stops it
            await self._writer.drain()
            os._exit(0)

    def notify(self, episode: str, **news: Any) -> None:
        self._write({"episode": episode, **news})

    async def ask(self, episode: str, what: str, **fields: Any) -> Any:
        """Return the answer of the environment's process. Raises InfrastructureError if it cannot give one."""
        number = len(self._asked) + 1 + max(self._asked, default=0)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._write({"episode": episode, "ask": number, "what": what, **fields})
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def _answered(self, answer: int, found: Any = None, failed: str = "") -> None:
        future = self._asked.get(answer)
        if future is not None and not future.done():
            if failed:
                future.set_exception(InfrastructureError(failed))
            else:
                future.set_result(found)

    def _write(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


class _Play:
    """One episode, through its phases: setup, run, score, cleanup. Each phase may be ended, and has a deadline of its own."""

    def __init__(self, agent: Any, task: Mapping[str, Any], worker: _EpisodeWorker, http: Any):

        tools = Toolset(getattr(agent, "tools", ()), float(task["tool_seconds"]))
        self._agent, self._http = agent, http
        self.episode = tools.episode = Episode(task, worker, tools)
        self.task: asyncio.Task[None]
        self._phase, self._work = "", asyncio.ensure_future(asyncio.sleep(0))

    def end(self, phase: str) -> None:
        """End this phase if it is under way."""
        if phase == self._phase:
            self._work.cancel()

    async def outcome(self) -> dict[str, Any]:
        """Play all phases, and return `ended` of proto/environment.proto, in JSON."""
        try:
            found = await self._played()
        except DataError as error:
            found = {"failure": "data", "reason": failure_text(error)}
        except _Ended as error:
            found = {"failure": "infrastructure", "reason": f"{error} was ended at its deadline"}
        except Exception as error:  # noqa: BLE001 - any error of the agent is reported
            found = {"failure": "infrastructure", "reason": failure_text(error)}
            if not isinstance(error, InfrastructureError):  # in one write: other processes write to the same log
                sys.stderr.write(f"episode {self.episode.id} failed\n{''.join(traceback.format_exception(error))}")
        try:
            await self._do("cleanup", self._clean_up())
        except Exception as error:  # noqa: BLE001
            found.setdefault("reason", f"cleanup: {failure_text(error)}")
        return {**found, "stop_reason": self.episode.stop_reason}

    async def _played(self) -> dict[str, Any]:
        episode = self.episode
        given = {"base_url": episode.base_url, "api_key": episode.api_key, "http_client": self._http, "episode": episode}
        await self._do("setup", self._set_up(given))
        run = getattr(self._agent, "run", self._agent)
        try:
            value = await self._do("run", value_of(run, episode.data, **given))
        except _Ended:  # score what is there
            value, episode.stop_reason = None, "timeout"
        if hasattr(self._agent, "score"):
            value = await self._do("score", self._own("score", given))
        return self._read(value)

    async def _set_up(self, given: Mapping[str, Any]) -> None:
        await self.episode.tools.open()
        await self._own("setup", given)

    async def _clean_up(self) -> None:
        try:
            await self._own("cleanup")
        finally:
            await self.episode.tools.close()

    async def _own(self, method: str, given: Mapping[str, Any] | None = None) -> Any:
        found = getattr(self._agent, method, None)
        return found and await value_of(found, self.episode.data, **(given or {"episode": self.episode}))

    async def _do(self, phase: str, work: Awaitable[Any]) -> Any:
        self._phase, self._work = phase, asyncio.ensure_future(work)
        self.episode.notify(phase=phase)
        try:
            return await self._work
        except asyncio.CancelledError:
            raise _Ended(phase) from None
        finally:
            self._phase = ""

    def _read(self, value: Any) -> dict[str, Any]:
        """Return the reward in an agent's result. Raises ValueError if there is none in it."""
        if value is None:
            scored = self.episode.rewarded or self.episode.stop_reason == "timeout"
            return {} if scored else {"left_out": True, "reason": "it returned None, and gave no reward"}
        if isinstance(value, Mapping):
            return {"rewards": {str(name): finite(number) for name, number in value.items()}}
        return {"reward": finite(value)}


class _Ended(Exception):
    """A phase that was ended at its deadline."""


if __name__ == "__main__":
    main()
