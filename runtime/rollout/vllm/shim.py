"""The only module that calls vLLM: starts its engine and talks to it. Handles the differences between vLLM's versions.

It uses only the part of AsyncLLM that carries requests and outputs between the processes (`engine_core`), without the part that
turns tokens into text. Tokens go in and come out, in the order in which the engine produced them. So outputs before a pause are
known from outputs after it.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from runtime import timeouts
from runtime.config.secret_values import resolved
from runtime.errors import ServiceFault, UserError
from runtime.rollout.vllm.arguments import KEY, own_faults, unknown_faults, with_plugin
from runtime.rollout.vllm.leftovers import Leftovers
from runtime.rollout.vllm.worker import MENDABLE, Location, undelivered

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


# ---- Relay
#
# Passes on what vLLM's processes print, and searches it for the error that ended them: they report it nowhere else.

_KEPT_BYTES = 256 << 10
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)")
_SECOND_HAND = ("root cause", "stack trace", "background process", "EngineDeadError", "Engine core initialization failed")


def last_error(printed: str) -> str:
    """Return the newest exception in a log, as "ValueError: what it says", or "". Skip an exception that only points to another
    one."""
    for line in reversed(printed.splitlines()):
        found = _ERROR.match(_PREFIX.sub("", line.strip()))
        if found and not any(phrase in line for phrase in _SECOND_HAND):
            return f"{found[1]}: {found[2].strip()}"
    return ""


class OutputRelay:
    """While entered, redirects this process's standard output and error, which its children inherit. A thread passes on what
    the children print to the former destination, as long as there are children."""

    def __init__(self) -> None:
        self._tail = bytearray()
        self._saved: list[int] = []

    def __enter__(self) -> OutputRelay:
        self._flush()
        read, write = os.pipe()
        os.set_inheritable(write, True)
        self._saved = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(write, number)
        os.close(write)
        threading.Thread(target=self._pass_on, args=(read, os.dup(self._saved[1])), name="vllm-log", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def _pass_on(self, read: int, target: int) -> None:
        while printed := os.read(read, 1 << 16):
            self._tail += printed
            del self._tail[:-_KEPT_BYTES]
            while printed:
                printed = printed[os.write(target, printed) :]
        os.close(read)
        os.close(target)

    def error(self, patience: float = 0.0) -> str:
        """Return `last_error` of the recent output, or of output within `patience` seconds."""
        give_up = time.monotonic() + patience
        while not (found := last_error(bytes(self._tail).decode(errors="replace"))) and time.monotonic() < give_up:
            time.sleep(timeouts.VLLM_OUTPUT_POLL)
        return found

    def reason(self, error: Exception) -> str:
        """Return the essence of `error`; if that only points to a process's output, of that output, which may come later."""
        line = _one_line(error)
        return self.error(timeouts.VLLM_LAST_OUTPUT if any(phrase in line for phrase in _SECOND_HAND) else 0.0) or line


def _one_line(error: Exception) -> str:
    """Return the essential line of an error of vLLM's, which may be pages long."""
    text = str(error)
    # The arguments' values follow.
    validation = re.search(r"(?:Value error|Assertion failed), (.*?)(?: \[type=|$)", text, re.MULTILINE)
    line = validation.group(1) if validation else next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()}"


SUPPORTED = ("0.23", "0.30")  # vllm-ascend's stable release needs 0.23

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class Output(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    tokens: Sequence[int]
    logprobs: np.ndarray  # float32, of the same length
    finish: str  # vLLM's finish reason; "" while it goes on
    cached: int  # prompt tokens found in the prefix cache, with the first output
    preemptions: int = 0  # how often its keys and values were taken away since the output before
    prefill_seconds: float = 0.0  # from the scheduler's first step with the prompt to this output, with the first output
    experts: np.ndarray | None = None  # [tokens fed since the output before, layers, experts a token], if requested


@dataclass
class CoreLoad:
    """The load that vLLM reports with its outputs; gauges are of the newest step."""

    room: int  # tokens whose keys and values fit, for all sequences together
    kv_use: float = 0.0  # of that room, 0 to 1
    waiting: int = 0  # requests in vLLM that are not running


def check_version(replays: bool = False, nodes: int = 1) -> None:
    """Check vLLM's version. Raises UserError if vLLM is missing or unsupported, or `replays` or `nodes` need a newer one."""
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"services.rollout.engine: vllm cannot be imported by this interpreter ({error})") from error
    found = str(vllm.__version__)
    release = ".".join(found.split(".")[:2])
    if release not in SUPPORTED:
        raise UserError(f"services.rollout.engine: vllm is of version {found}, must be one of {', '.join(SUPPORTED)}")
    if replays and release != SUPPORTED[-1]:
        raise UserError(
            f"moe.router_replay: routing needs vllm {SUPPORTED[-1]}, and this is {found}; must be off, or engine torch"
        )
    if nodes > 1 and release != SUPPORTED[-1]:
        raise UserError(f"services.rollout.parallel.nodes: {nodes} needs vllm {SUPPORTED[-1]}, and this is {found}; must be 1")


def prepare_environment(on_cpu: bool, address: str = "") -> None:
    """Set variables that vLLM reads when it is imported. A variable that is already set stays. `address`: this node's, where
    processes of other nodes reach vLLM's."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        _METHOD: "spawn",  # a process that serves gRPC should not fork
        **({"VLLM_HOST_IP": address} if address else {}),
    }
    if on_cpu:
        # The threads are shared out by Sluice (OMP_NUM_THREADS), and no compiler need be installed.
        defaults.update(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class _Started:
    """vLLM's processes of an engine that are on this node."""

    def __init__(self, arguments: Mapping[str, Any], engine_args: Mapping[str, Any]):
        """Start vLLM, which takes 10 to 60 s. `arguments`: Sluice's; `engine_args`: the user's. Raises UserError."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = [field.name for field in fields(AsyncEngineArgs)]
        faults = [*own_faults(engine_args), *unknown_faults(engine_args, known)]
        if faults:
            raise UserError("\n".join(faults))
        user_args = resolved(engine_args, os.environ, KEY)
        method = os.environ[_METHOD]
        self._relay = OutputRelay()
        self._leftovers = Leftovers()
        try:
            headless = {"headless": True} if arguments.get("node_rank") else {}
            config = AsyncEngineArgs(**with_plugin(arguments, user_args)).create_engine_config(**headless)
            os.environ[_METHOD] = method  # vLLM's platform for CPUs overwrites it
            with self._relay, self._leftovers.starting():
                self._start(config)
        except Exception as error:
            self._leftovers.remove()
            fault = f"vLLM did not start: {self._relay.reason(error)}"
            if arguments.get("nnodes", 1) > 1:  # the cause may be another node's
                raise ServiceFault("services.rollout", "start", fault) from error
            raise UserError(f"services.rollout: {fault}") from error

    def _start(self, config: Any) -> None:
        """Start the processes of vLLM's `config`."""
        raise NotImplementedError

    def _shut_down(self) -> None:
        """End the processes, and wait for their end."""
        raise NotImplementedError

    @property
    def cause(self) -> str:
        """Why the engine died, as far as its processes have printed it."""
        error = self._relay.error()
        return f"the last error that it printed is {error}" if error else "killed, or out of memory"

    def note(self) -> None:
        """Note what the processes share, so that it is removed also after they are killed."""
        self._leftovers.note()

    async def close(self) -> None:
        """End the processes, and remove what they leave."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    def _end(self) -> None:
        self._leftovers.note()
        self._shut_down()
        self._leftovers.remove()


class Core(_Started):
    """A running engine: its processes, and the sockets to them. All methods except the constructor need one event loop."""

    def _start(self, config: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm: AsyncLLM = AsyncLLM.from_vllm_config(config, disable_log_stats=False)
        self._core: Any = self._llm.engine_core
        self._ranks: list[bytes] = self._core.core_engines  # the addresses of the data-parallel ranks, each an engine core
        self._loads: dict[int, tuple[float, int]] = {}  # by rank: its use of the cache, and its waiting requests
        self._next: asyncio.Future[Any] | None = None
        self.vocabulary = int(self._llm.model_config.get_vocab_size())
        self.reported = CoreLoad(room=int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size or 0))

    @property
    def dead(self) -> bool:
        coordinator = self._core.resources.coordinator  # of the data-parallel ranks: vLLM itself does not miss it
        return bool(self._llm.errored) or (coordinator is not None and not coordinator.proc.is_alive())

    async def add(self, request_id: str, prompt: list[int], sampling: Mapping[str, Any], salt: str, rank: int = 0) -> None:
        """Queue a request at a data-parallel rank. Only requests of the same `salt` share prefixes."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(**sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=rank if len(self._ranks) > 1 else None,
        )
        await self._core.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._core.abort_requests_async(request_ids)

    async def outputs(self, timeout: float) -> list[Output]:
        """Return the outputs of one step, or none after `timeout` seconds. Raises RuntimeError if the engine has died."""
        step = self._ask()
        if not step.done():
            await asyncio.wait([step], timeout=timeout)
        return self._take()

    async def outstanding(self) -> list[Output]:
        """Return all outputs from before a pause, once `pause` has returned."""
        found: list[Output] = []
        while self._ask().done() or not self._core.outputs_queue.empty():
            found += self._take()
            await asyncio.sleep(0)
        return found

    def _ask(self) -> asyncio.Future[Any]:
        """Return the future of the next step's outputs. A wait that times out keeps the future for the next wait."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._core.get_output_async())
        return self._next

    def _take(self) -> list[Output]:
        if self._next is None or not self._next.done():
            return []
        outputs, self._next = self._next.result(), None
        if (stats := outputs.scheduler_stats) is not None:
            self._loads[outputs.engine_index] = float(stats.kv_cache_usage), int(stats.num_waiting_reqs)
            kv_use, waiting = zip(*self._loads.values(), strict=True)
            self.reported.kv_use, self.reported.waiting = max(kv_use), sum(waiting)
        return [_output(each, float(outputs.timestamp)) for each in outputs.outputs]

    async def pause(self, forget: bool) -> None:
        """Stop between two steps. With `forget`, drop all keys and values: running requests recompute them."""
        await self._core.pause_scheduler_async("keep", forget)

    async def resume(self) -> None:
        await self._core.resume_scheduler_async()

    async def load(self, locations: Sequence[Location], first: bool, last: bool) -> list[str]:
        """Have every worker load a part of the weights. Return the faults; [] if there are none."""
        given = "sluice_load", None, (list(map(list, locations)), first, last), None
        calls = (self._core._call_utility_async("collective_rpc", *given, engine=rank) for rank in self._ranks)
        answers = [answer for of_rank in await asyncio.gather(*calls) for answer in of_rank]
        faults = [f"worker {number}: {fault}" for number, (fault, *_) in enumerate(answers) if fault]
        if not faults and (fault := undelivered(sorted(set.intersection(*(set(unread) for _, *unread in answers))))):
            faults.append(f"{MENDABLE}{fault}")
        return faults

    async def sleep(self) -> None:
        await self._core.sleep_async(1, "keep")

    async def wake(self, tags: Sequence[str]) -> None:
        """Wake what is asleep of `weights` and `kv_cache`. vLLM goes on once both are awake."""
        await self._core.wake_up_async(list(tags))

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        await super().close()

    def _shut_down(self) -> None:
        self._llm.shutdown()


class CoreFollower(_Started):
    """The processes of an engine that spans nodes, on another node than its core. The core sends them their work."""

    def _start(self, config: Any) -> None:
        from vllm.utils.network_utils import get_tcp_uri
        from vllm.v1.engine.utils import CoreEngineProcManager
        from vllm.v1.executor import Executor
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        parallel = config.parallel_config
        self.reported = CoreLoad(room=0)
        self._holder: Any
        if parallel.node_rank_within_dp > 0:  # workers of a rank whose engine core is on another node
            self._holder = MultiprocExecutor(config, monitor_workers=False)  # returns once all workers are ready
            self._processes = [worker.proc for worker in self._holder.workers]
        else:  # data-parallel ranks, which meet the core later
            self._holder = CoreEngineProcManager(
                local_engine_count=parallel.data_parallel_size_local,
                start_index=parallel.data_parallel_rank,
                local_start_index=0,
                vllm_config=config,
                local_client=False,
                handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
                executor_class=Executor.get_class(config),
                log_stats=False,
            )
            self._processes = self._holder.processes

    @property
    def dead(self) -> bool:
        return not all(process.is_alive() for process in self._processes)

    def when_dead(self, notify: Callable[[], None]) -> None:
        """Call `notify` from a thread once one of the processes has ended."""

        def wait() -> None:
            connection.wait([process.sentinel for process in self._processes])
            notify()

        threading.Thread(target=wait, name="vllm-end", daemon=True).start()

    def _shut_down(self) -> None:
        for process in self._processes:  # they hold nothing, and may wait for processes that have ended on other nodes
            process.kill()
        self._holder.shutdown()


def _output(raw: Any, now: float) -> Output:
    logprobs = np.zeros(0, np.float32) if raw.new_logprobs is None else np.asarray(raw.new_logprobs.logprobs, np.float32)[:, 0]
    prefill = getattr(raw, "prefill_stats", None)
    cached = prefill.num_cached_tokens if prefill is not None else getattr(raw, "num_cached_tokens", 0)
    finish = "" if raw.finish_reason is None else str(raw.finish_reason)
    preemptions = sum(event.type.name == "PREEMPTED" for event in raw.events or ())
    took = now - min((event.timestamp for event in raw.events or () if event.type.name == "SCHEDULED"), default=now)
    experts = getattr(raw, "routed_experts", None)
    return Output(raw.request_id, raw.new_token_ids, logprobs, finish, cached, preemptions, took, experts)
