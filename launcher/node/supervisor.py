"""Starts a run's processes, watches them, and leaves none behind. Each process leads a process group of its own: Ctrl-C reaches
only the launcher, and one signal can end a whole role. Each process writes to a log of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launcher.node import local_node
from launcher.node.logs import Log
from launcher.node.ranks import LARGEST, RanksEnded, RanksOrder
from launcher.node.topology import ProcessSpec
from launcher.node.watchdog import HeartbeatMonitor, is_stopped, keep_stacks, stalled
from launcher.view import View
from runtime import timeouts
from runtime.cluster.placement import RestartBackoff
from runtime.config import Logs
from runtime.config.secret_values import resolved
from runtime.errors import DeadlineExceeded, ServiceFault, SluiceError, UserError
from runtime.process import keys, os_process, spans, waiting
from runtime.process.keys import Keys
from runtime.rollout.vllm import leftovers

# ---- Child: a process that a supervisor has started

FAULT = "error: "  # how a process begins the line that says why it ends
NEXT = "---- the next incarnation of the ranks\n"  # in a log, before what they write


class Child:
    """A process that was started, and its log. `incarnation`: how many were started under its name before it."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, output: Log, incarnation: int = 0):
        self.spec = spec
        self.process = process
        self.output = output
        self.log = output.path
        self.incarnation = incarnation
        self.given_up = ""  # why this node killed it while the others go on
        self.last = ""  # why it is not replaced
        self.orders: socket.socket | None = None  # to the parent of a group's ranks, which outlives them
        self.ended: RanksEnded | None = None  # how the ranks of this incarnation have ended, if their parent lives
        self.starved = ""  # what the kernel says, if it killed the process for want of memory
        self.advice = ""  # what the user can do about the want of memory
        self.late = bool(incarnation)  # whether it was started when the run was under way

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def mistaken(self) -> bool:
        """Whether it ended with a mistake that the user has to mend: a restart would end in the same way."""
        return self.process.returncode == os_process.MISTAKE or bool(self.advice)

    def give_up(self, reason: str, incarnation: int) -> None:
        """Kill the process, or the ranks of this incarnation, if still there. If it has already ended, unnoticed here, its own
        log says why."""
        if self.running and not os_process.ended(self.pid):
            if self.orders is not None:
                self.order(RanksOrder(incarnation=incarnation, ends=reason))
                return
            self.given_up = reason
            self.process.kill()  # the processes that it started end with it

    def order(self, order: RanksOrder) -> None:
        """Send `order` to the parent of the ranks, unless the parent ends."""
        assert self.orders is not None
        with suppress(OSError):
            self.orders.send(msgspec.json.encode(order))

    def signal_group(self, number: int) -> None:
        """Signal the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _log_of(self, line: str) -> Path:
        """Return the newest log of the process that the line names first, if it has one here: it may say more than this log."""
        name = line.partition(":")[0]
        other = re.fullmatch(r"[a-z]+-\d+(n\d+)?", name) and name != self.spec.name
        logs = self.log.parent.glob(f"{name}.*log") if other else ()
        return max(logs, key=lambda path: path.stat().st_mtime, default=self.log)

    def fault(self) -> SluiceError:
        """Return why the process ended, in its own last line where it wrote one."""
        code = self.process.returncode or (self.ended.code if self.ended is not None else 0)
        if self.advice:
            return UserError(f"{self.spec.name}: {self.starved}, twice: {self.advice}")
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        if why := self.starved or self.given_up or (self.ended.why if self.ended is not None else killed):
            return ServiceFault(self.spec.name, "run", why + self.last)
        lines = self.output.tail().rpartition(NEXT)[2].strip().splitlines() or ["(empty log)"]
        own = [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]
        if own and self.mistaken:
            return UserError("\n".join(dict.fromkeys(own)))  # each rank writes the line
        if own:
            return SluiceError(f"{own[-1]} (log: {self._log_of(own[-1])}){self.last}")
        return ServiceFault(self.spec.name, "run", f"ended with exit code {code}: {lines[-1]} (log: {self.log}){self.last}")


# ---- Processes that the kernel has killed for want of memory

_LOG = Path("/dev/kmsg")
_RECORD = 8192  # bytes of the longest record
_KILLED = re.compile(rb"Killed process (\d+) .*?anon-rss:(\d+)kB")
_GROUPS = Path("/sys/fs/cgroup")
_COUNTERS = {"": "memory.events", "memory": "memory.oom_control"}  # by the controller, in cgroup v2 and v1

ADVICE = {  # by role: the keys to lower if it needs more memory than the machine has
    "rollout": "lower services.rollout.max_num_seqs, sampling.max_new_tokens or data.max_prompt_tokens",
    "trainer": "lower training.max_tokens_per_microbatch, or raise services.trainer.processes",
    "critic": "lower training.max_tokens_per_microbatch, or raise services.critic.processes",
    "reference": "lower services.reference.max_tokens_per_microbatch",
    "reward_model": "lower services.reward_model.max_tokens_per_microbatch",
    "reward": "lower rewards.workers, or see what the rules of rewards.rules keep",
}


class OomKills:
    """Processes that the kernel has killed between `open` and `close`. Its log names each, where this process may read it.
    Elsewhere, as in a container, the counter of the control group says only that the kernel killed some process."""

    def __init__(self) -> None:
        self._log = -1
        self._counter = _counter()
        self._counted = _count(self._counter)
        self._killed: dict[int, int] = {}  # by pid, the bytes that the process had

    def open(self) -> None:
        with suppress(OSError):  # not on Linux, or not allowed
            self._log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def of(self, pids: Collection[int]) -> str:
        """Return what the kernel says of the death of a process with these pids (its ranks' included); "" if not for memory."""
        self._killed |= dict(self._news())
        counted, self._counted = self._counted, _count(self._counter)
        if known := [self._killed.pop(pid) for pid in pids if pid in self._killed]:
            return f"the kernel killed it for want of memory; it had {max(known) >> 20} MiB"
        if self._log < 0 and self._counted > counted:
            return "the kernel killed a process of this control group for want of memory"
        return ""

    def _news(self) -> Iterator[tuple[int, int]]:
        while self._log >= 0:
            try:
                record = os.read(self._log, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the kernel has overwritten unread records: the next read returns the oldest that is left
            if found := _KILLED.search(record):
                yield int(found[1]), int(found[2]) << 10


def _counter() -> Path | None:
    """Return the file that counts the OOM kills of this process's control group."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            path = _GROUPS / controllers / group.lstrip("/") / _COUNTERS.get(controllers, "")
            if path.is_file():
                return path
    return None


def _count(counter: Path | None) -> int:
    with suppress(OSError, AttributeError):
        found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)  # type: ignore[union-attr]
        return int(found[1]) if found else 0
    return 0


# ---- What a node's processes leave behind, such as the programs of agents after their environment was killed


class Orphans:
    """Children of this process that it has not started. Each gets SIGTERM, and SIGKILL AGENT_END_GRACE later. Orphans lead
    sessions of their own, so no signal to a process group reaches them; the kernel makes them children of the agent. It
    recognizes them by an environment variable that all of its processes and their children have."""

    def __init__(self) -> None:
        self.variable = f"{os.environ.get(os_process.AGENTS, '')} {os.getpid()}".strip()
        """The variable's value: the pids of this process and of the agents, if any, that it was started by."""
        self._sessions = set[int]()  # that the node's processes have led
        self._seen = set[int]()
        self._signaled: dict[int, float] = {}  # by pid, the time of its SIGTERM
        self._starting = 0

    @contextmanager
    def spared(self) -> Iterator[None]:
        """End no orphans inside the block: it starts a process whose pid is not known yet."""
        os_process.adopt(True)
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def end(self, known: Collection[int]) -> list[str]:
        """Signal all children that are not `known` and were seen in the last call too, as some end by themselves. Return the
        names of the children that get SIGTERM now."""
        self._sessions.update(known)
        others = set() if self._starting else _children().difference(known)
        for pid in others - self._signaled.keys():
            if _ended_in(pid) in self._sessions:  # not a process that a caller of this one has started
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        found = {pid for pid in others if self._is_ours(pid)}
        seen_twice = found & self._seen - self._signaled.keys()
        names = [_terminate(pid) for pid in seen_twice]
        self._signaled |= dict.fromkeys(seen_twice, time.monotonic())
        self._seen = found
        for pid, signaled in list(self._signaled.items()):
            try:
                if time.monotonic() - signaled > timeouts.AGENT_END_GRACE:
                    os.kill(pid, signal.SIGKILL)
                ended = os.waitpid(pid, os.WNOHANG)[0]
            except (ProcessLookupError, ChildProcessError):
                ended = pid
            if ended:
                del self._signaled[pid]
        return [name for name in names if name]

    @property
    def left(self) -> bool:
        """Whether an orphan still lives."""
        return bool(self._seen or self._signaled)

    def _is_ours(self, pid: int) -> bool:
        with suppress(psutil.Error):  # the process has ended, or belongs to another user by now
            return str(os.getpid()) in psutil.Process(pid).environ().get(os_process.AGENTS, "").split()
        return False


def _children() -> set[int]:
    found = set[int]()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return found


def _ended_in(pid: int) -> int:
    """Return the session of a process that has ended and was not waited for; 0 for any other process."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0
    return int(session) if state == "Z" else 0


def _terminate(pid: int) -> str:
    """Send SIGTERM to the process. Return its name; "" if it has ended meanwhile."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        os.kill(pid, signal.SIGTERM)
        return name
    return ""


class Supervisor:
    """The children of one run, in the order in which they were started."""

    def __init__(self, logs: Path, view: View | None = None, settings: Logs | None = None):
        """Keep logs in `logs`. `view` shows what became of processes; if verbose, also every line that they write."""
        os_process.raise_descriptor_limit()  # each child takes some descriptors of this process
        self._logs = logs
        self._view = view
        self._settings = settings or Logs()
        self._outputs: list[Log] = []
        self.on_exit: Callable[[Child], None] = lambda child: None  # called for each process that dies and is not replaced here
        self.keys: Keys | None = None  # the secret from which the keys of the services are made; None if they need no keys
        self.children: list[Child] = []
        self._started = asyncio.Event()
        self.incarnations: dict[str, int] = {}  # by name, the newest that was not ended; it may have died, or be about to start
        self._restarts: Mapping[str, int] = {}
        self._decided_elsewhere: Collection[str] = ()
        self.followed: Collection[str] = ()  # names of processes that others look after once they are killed
        self._under_way = False
        self.stopping = False  # whether the run is ending: a lost trainer or critic is not replaced then, as no step follows
        self._ended_well = False
        self._allowances: dict[str, RestartBackoff] = {}
        self._given_up: list[Child] = []
        self._starting: dict[asyncio.Task[Child], str] = {}  # tasks that replace a process that died, with its name
        self._beats = HeartbeatMonitor()
        self._orphans = Orphans()
        self._processes: list[asyncio.subprocess.Process] = []  # all that may still live
        self._memory: dict[str, int] = {}  # by role, the descriptor of what its ranks keep in memory: it outlives them
        self._kills = OomKills()
        self._starved: dict[str, float] = {}  # when the kernel last killed a process of this name for want of memory
        self._watch: asyncio.Task[None] | None = None  # runs `_look_after`

    def say(self, line: str) -> None:
        if self._view is not None:
            self._view.say(line)

    def enable_restarts(self, restarts: Mapping[str, int], decided_elsewhere: Collection[str] = ()) -> None:
        """Start a process in `restarts` again when it dies, as often as is said there, while the others go on. With the death
        of one in `decided_elsewhere` only call `on_exit`. End one that makes no progress."""
        self._restarts, self._decided_elsewhere = restarts, decided_elsewhere
        self._under_way = True
        for child in self.children:
            if child.orders is not None:
                child.order(RanksOrder())
        if self._watch is None:
            self._kills.open()
            self._watch = asyncio.create_task(self._look_after())
        self._started.set()  # wakes `first_failure`, which then waits for the watch too

    def stop_restarts(self) -> None:
        """Count every death as a failure from now on, and start no process again."""
        self._restarts, self._decided_elsewhere = {}, ()
        for task in self._starting:
            task.cancel()
        self._starting.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
            self._kills.close()

    async def _look_after(self) -> None:
        """Kill each process that makes no progress, with its stacks in its log, and end orphans; go on until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(timeouts.BEAT)
            now = time.monotonic()
            if (late := now - before - timeouts.BEAT) > timeouts.BEAT:
                self._beats.forgive(late)
            if names := self._end_orphans():
                self.say(f"ended orphaned processes: {', '.join(sorted(set(names)))} ({len(names)})")
            self._beats.take()
            for child in list(self.children):
                ranks = self._beats.of(child.spec.name)
                stopped = {rank for rank, heard in ranks.items() if is_stopped(heard.pid)}
                if child.running and child not in self._given_up and (found := stalled(ranks, now, stopped)) is not None:
                    rank, why = found
                    await keep_stacks(child.output, ranks)
                    self.give_up(child.spec.name, child.incarnation, f"rank {rank}: {why}" if len(ranks) > 1 else why)

    def _end_orphans(self) -> list[str]:
        self._processes = [process for process in self._processes if process.returncode is None]
        return self._orphans.end({process.pid for process in self._processes})

    def give_up(self, name: str, incarnation: int, reason: str) -> None:
        """Kill a process that the run does without, after PROCESS_END seconds: if it dies by itself, its own end says more."""
        for child in self.children:
            if (child.spec.name, child.incarnation) == (name, incarnation) and child not in self._given_up:
                self._given_up.append(child)
                asyncio.get_running_loop().call_later(timeouts.PROCESS_END, child.give_up, reason, incarnation)

    async def start(
        self, spec: ProcessSpec, pass_fds: Sequence[int] = (), capture: bool = False, incarnation: int = 0
    ) -> Child:
        """Start one process; with `capture` the caller reads its output. Raises UserError for what the machine lacks."""
        path = self._logs / (f"{spec.name}.{incarnation}.log" if incarnation else f"{spec.name}.log")
        own = resolved(spec.env, os.environ, f"services.{spec.role}.env")
        output = await waiting.done(partial(Log, path, self._settings, spec.name, self._view), path, self.say)
        with output.writer() as out, self._beats.connected(spec.name) as given, self._orphans.spared(), ExitStack() as stack:
            env = {**keys.inherited(), **own, os_process.INCARNATION: str(incarnation), spans.NAME: spec.name}
            env[os_process.AGENTS] = self._orphans.variable
            if self.keys is not None and spec.services:
                env |= keys.to_give(self.keys, spec.services, incarnation)
            orders = None
            if spec.ranks:
                orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(theirs)
                memory = self._memory.get(spec.role)
                if memory is None:
                    memory = self._memory[spec.role] = os.memfd_create(f"sluice-{spec.role}")
                env |= {os_process.ORDERS: str(theirs.fileno()), os_process.MEMORY: str(memory)}
                pass_fds = (*pass_fds, theirs.fileno(), memory)
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=given.fileno(),
                    stdout=asyncio.subprocess.PIPE if capture else out,
                    stderr=out,
                    env=env,
                    pass_fds=pass_fds,
                    start_new_session=True,
                    preexec_fn=partial(os_process.before_exec, spec.cpus, spec.signals_held),
                )
            except (FileNotFoundError, PermissionError):
                raise UserError(f"services.{spec.role}.python: no such interpreter: {spec.command[0]}") from None
            except subprocess.SubprocessError:  # setting the processors is the only step between fork and exec that may fail
                cpus = local_node.shown_cpus(spec.cpus)
                raise UserError(f"services.{spec.role}.cpus: this machine has none of {cpus}") from None
            self._processes.append(process)
        self._started.set()
        child = Child(spec, process, output, incarnation)
        child.late |= self._under_way
        if orders is not None:
            self._listen(child, orders)
        self._outputs.append(output)
        self.incarnations[spec.name] = incarnation
        self.children.append(child)
        self._beats.began(spec.name, process.pid)
        return child

    # ------------------------------------------------------------------------------------------ parents of ranks

    def _listen(self, child: Child, orders: socket.socket) -> None:
        """Take the reports of a parent of ranks, until it ends."""
        child.orders = orders
        orders.setblocking(False)
        asyncio.get_running_loop().add_reader(orders, self._ranks_ended, child, orders)
        if self._under_way:
            child.order(RanksOrder())

    def _ranks_ended(self, child: Child, orders: socket.socket) -> None:
        try:
            data = orders.recv(LARGEST)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(orders)
            orders.close()
            child.orders = None
            return
        report = msgspec.json.decode(data, type=RanksEnded)
        if report.incarnation == child.incarnation:
            child.ended = report
            self._examine(child)
            self.say(str(child.fault()))
            self.on_exit(child)

    def outlives(self, name: str) -> Child | None:
        """Return the parent of the ranks `name` if it lives, and can start their next incarnation."""
        return next((child for child in self.children if child.spec.name == name and child.orders and child.running), None)

    def start_ranks(self, child: Child, order: RanksOrder) -> None:
        """Have the parent of ranks start their next incarnation."""
        assert order.incarnation is not None
        env = {} if self.keys is None else keys.to_give(self.keys, child.spec.services, order.incarnation)
        child.incarnation = self.incarnations[child.spec.name] = order.incarnation
        child.ended, child.starved = None, ""
        self._given_up = [other for other in self._given_up if other is not child]
        child.output.add(NEXT.encode())
        self._beats.began(child.spec.name, child.pid)
        order.env |= env
        child.order(order)

    # ------------------------------------------------------------------------------------------ deaths

    def cause_of_failure(self) -> Child | None:
        """Return the child to blame: one that a signal killed, else one with a user's mistake, else the first that failed."""
        failed = [(one.process.returncode, one) for one in self.children if one.process.returncode and not self._ended_well]
        return min(failed, key=lambda one: (one[0] > 0, not one[1].mistaken), default=(0, None))[1]

    async def first_failure(self) -> Child:
        """Wait until a child ends with an exit code other than 0 and is not replaced. Return that child."""
        waits: dict[asyncio.Task[Any], Child] = {}
        try:
            while True:
                for child in self.children:
                    if child not in waits.values() and child.running:
                        waits[asyncio.create_task(child.process.wait())] = child
                dead = [child for child in self.children if child.process.returncode]
                if failed := next((child for child in dead if not self._replace(child)), None):
                    return failed
                self._started.clear()
                another = asyncio.create_task(self._started.wait())
                watch = {self._watch} if self._watch is not None else set()
                await asyncio.wait({*waits, *self._starting, *watch, another}, return_when=asyncio.FIRST_COMPLETED)
                another.cancel()
                for task in watch:
                    if task.done() and not task.cancelled():
                        task.result()  # raises: the watch ends only by an error
                waits = {task: child for task, child in waits.items() if not task.done()}
                for started in [task for task in self._starting if task.done()]:
                    del self._starting[started]
                    started.result()
        finally:
            for task in waits:
                task.cancel()

    def _replace(self, child: Child) -> bool:
        """Return whether the run goes on without this dead process. Start another in its place if that is allowed."""
        name = child.spec.name
        self._examine(child)
        if name in self.followed and (child.process.returncode or 0) < 0:
            return True
        if self._ended_well:
            self.let_go(child)
            self.say(str(child.fault()))
            return True
        if child.mistaken or name not in {*self._restarts, *self._decided_elsewhere}:
            return False
        self.let_go(child)
        if name in self._decided_elsewhere:
            self.say(str(child.fault()))
            self.on_exit(child)
            return True
        needless = self.stopping and child.spec.role in ("trainer", "critic")
        allowance = self._allowances.setdefault(name, RestartBackoff(self._restarts[name]))
        delay = None if needless else allowance.delay(time.monotonic())
        if delay is None:
            if self._restarts[name] and not needless:
                child.last = f"; services.{child.spec.role}.restarts allows no further start"
            self.say(str(child.fault()))
            self.on_exit(child)
        else:
            self.say(f"{child.fault()}; started again in {delay:g} s")
            self._starting[asyncio.create_task(self._start_again(child, delay))] = name
        return True

    def _examine(self, child: Child) -> None:
        """Note whether the kernel killed the process for want of memory; add advice the second time."""
        name, role = child.spec.name, child.spec.role
        if child.starved or child.given_up:
            return
        child.starved = self._kills.of({child.pid, *(rank.pid for rank in self._beats.of(name).values())})
        if child.starved and role in ADVICE:
            before, now = self._starved.get(name), time.monotonic()
            self._starved[name] = now
            if before is not None and name in self._restarts and now - before < timeouts.RESTART_WINDOW:
                child.advice = ADVICE[role]

    async def _start_again(self, child: Child, delay: float) -> Child:
        await asyncio.sleep(delay)
        return await self.start(child.spec, incarnation=child.incarnation + 1)

    def respecify(self, specs: Mapping[str, ProcessSpec]) -> None:
        """Replace the specifications, by name, with which running processes would be started again."""
        for child in self.children:
            child.spec = specs.get(child.spec.name, child.spec)

    def let_go(self, child: Child) -> None:
        """Remove a dead child. SIGTERM ends what it left in its group, except Python's resource tracker, which ignores SIGTERM
        and frees shared memory first."""
        child.signal_group(signal.SIGTERM)
        self.children.remove(child)

    async def end(self, name: str, grace: float) -> None:
        """End the process `name`, if it runs, and cancel its restart. Send SIGKILL after `grace` seconds."""
        self.incarnations.pop(name, None)
        self._restarts = {known: settings for known, settings in self._restarts.items() if known != name}
        for task in [task for task, starting in self._starting.items() if starting == name]:
            task.cancel()
            del self._starting[task]
        for child in [child for child in self.children if child.spec.name == name]:
            self.children.remove(child)  # so that its end is no failure
            child.signal_group(child.spec.ends_by)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.process.wait(), grace)
            child.signal_group(signal.SIGKILL)
            await child.process.wait()

    async def finish(self, timeout: float) -> None:
        """Wait for every child to end once all is saved. Report a child that ends badly; kill and report one that is late."""
        self.stop_restarts()
        self._ended_well = True
        for child in await self.wait_all(timeout):
            self.say(f"{DeadlineExceeded(child.spec.name, 'stop', 'did not end', timeout)}: killed")
            self.let_go(child)
            child.signal_group(signal.SIGKILL)
            await child.process.wait()

    async def wait_all(self, timeout: float) -> list[Child]:
        """Wait for every child to end. Return the children that did not. Kill a child that was started during the run
        AGENT_END_GRACE after the others: the processes that would ask it to end may never have known it."""
        ends = {child: asyncio.create_task(child.process.wait()) for child in self.children}
        until = time.monotonic() + timeout
        if those := [end for child, end in ends.items() if not child.late]:
            await asyncio.wait(those, timeout=timeout)
        if late := [end for child, end in ends.items() if child.late]:
            await asyncio.wait(late, timeout=min(timeouts.AGENT_END_GRACE, max(0.0, until - time.monotonic())))
        for child in [child for child in self.children if child.running and child.late]:
            child.process.kill()
            await child.process.wait()
            self.let_go(child)
        return [child for child in self.children if child.running]

    async def end_all(self, grace: float) -> None:
        """Ask every running child to end; send SIGKILL after `grace` seconds. Return when every child is gone, and with it
        what vLLM's processes leave in shared memory."""
        self.stop_restarts()
        for child in self.children:
            if child.running:
                child.signal_group(child.spec.ends_by)
        await self.wait_all(grace)  # ends with the last child, or after `grace`
        for child in self.children:
            child.signal_group(signal.SIGKILL)  # also what the child left in its group
        for child in self.children:
            await child.process.wait()  # short after SIGKILL
        until = time.monotonic() + 2 * timeouts.AGENT_END_GRACE
        self._end_orphans()
        while self._orphans.left and time.monotonic() < until:
            await asyncio.sleep(timeouts.ORPHAN_POLL)
            self._end_orphans()  # children of an ended orphan become children of this process
        os_process.adopt(False)
        self._beats.close()
        for memory in self._memory.values():
            os.close(memory)
        self._memory.clear()
        await asyncio.gather(*(asyncio.to_thread(output.close) for output in self._outputs))  # LOG_CLOSE seconds at most
        leftovers.clear()
