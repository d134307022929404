"""The command relay of an SPMD role: rank 0 takes ordered commands and passes them to the other ranks.

Commands are msgspec Structs over gloo point-to-point messages, in a star around rank 0, so that a failure names its rank.
A thread per rank does the talking: the engine may compute for minutes while its rank still answers. When rank 0 has nothing
to relay it sends a beat every `heartbeat` seconds and awaits everyone's answer; who is silent for `deadline` seconds, or
whose connection closes, is lost, and the relay with it: every rank's next call raises a ServiceFault that names that rank.

A frame is a block of 1 KiB: its kind or the command's length, then the first bytes of the command; the rest follows in a
second message when there is one.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from runtime import codec
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.process.network import own_address
from runtime.weights.gloo_mesh import GlooMesh, reason

Command = TypeVar("Command")

BLOCK = 1024
_HEADER = struct.Struct("<q?")  # kind or length; whether it goes past the commands that wait
_INLINE = BLOCK - _HEADER.size
_BEAT, _END = -1, -2
_COMMAND_TAG, _ANSWER_TAG = 1, 2
_LOST_KEY = "lost"
_LAST_WORD = 5.0  # seconds, at most, that followers give rank 0 to say whom it lost
_ROUNDING = 0.02  # seconds by which torch may give up early


class Relay(Generic[Command]):
    """Ordered commands from rank 0 to every other rank, and everyone's pulse.

    `commands` is the Struct, or the union of tagged Structs, that may be sent; `name` is the role ("trainer").
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        commands: Any,
        *,
        name: str,
        interface: str,
        heartbeat: float = 1.0,
        deadline: float = 20.0,
        join_timeout: float = 60.0,
        on_fault: Callable[[ServiceFault], None] | None = None,
        on_aside: Callable[[Command], None] | None = None,
    ):
        """Connect all ranks through `store` (the default group's, under torchrun).

        `on_fault` is called once, from the relay's thread; so is `on_aside`, for each command that is sent aside, and must not
        block. Raises ServiceFault, phase "rendezvous", naming the ranks that are not there within `join_timeout` seconds.
        """
        if heartbeat > deadline / 4:
            raise ValueError(f"heartbeat {heartbeat:g} s must be at most a quarter of the deadline {deadline:g} s")
        self.rank = rank
        self._name = name
        self._followers = range(1, world_size)
        self._commands = commands
        self._heartbeat = heartbeat
        self._deadline = deadline
        self._on_fault = on_fault
        self._on_aside = on_aside
        self._fault: ServiceFault | None = None
        self._closing = False
        self._queue: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._store = dist.PrefixStore("relay", store)
        labels = [f"{name} rank {other}" for other in range(world_size)]
        self._mesh = GlooMesh(self._store, rank, labels, own_address(interface), join_timeout, name=labels[rank])
        self._thread = threading.Thread(target=self._run, name=f"{name}-relay", daemon=True)
        self._thread.start()

    def send(self, command: Command, aside: bool = False) -> None:
        """Rank 0: pass `command` to the others, after those sent before; does not wait. Raises the relay's ServiceFault.

        `aside`: they hand it to `on_aside` as it comes, while those before it may still wait for `receive`.
        """
        if self._fault is not None:
            raise self._fault
        self._queue.put((codec.encode(command), aside))

    def receive(self, timeout: float | None = None) -> Command | None:
        """The others: the next command, or None once rank 0 has closed the relay.

        Without `timeout` only the relay's deadline applies, which is enough: it ends the wait when rank 0 is lost. Raises
        DeadlineExceeded after `timeout` seconds, and the relay's ServiceFault after every command before it was taken.
        """
        try:
            frame = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise DeadlineExceeded(f"{self._name} rank {self.rank}", "command", "none came", timeout) from None
        if frame is None:
            self._queue.put(None)  # for the next call
            if self._fault is not None:
                raise self._fault
            return None
        return self._decoded(frame[0])

    def _decoded(self, frame: bytes) -> Command:
        command: Command = codec.decode(self._commands, frame)
        return command

    def close(self) -> None:
        """Rank 0: end the others' `receive`, after the commands sent before. Everyone: leave. Idempotent."""
        if self.rank == 0 and self._fault is None:
            self._queue.put(None)
            self._thread.join(self._deadline)
        self._closing = True
        self._mesh.abort()
        self._thread.join(self._deadline)

    def _run(self) -> None:
        try:
            if self.rank == 0:
                self._lead()
            else:
                self._follow()
        except ServiceFault as fault:
            if not self._closing:
                self._fault = fault
                self._mesh.abort()
                if self._on_fault is not None:
                    self._on_fault(fault)
        if self.rank != 0:
            self._queue.put(None)

    def _lead(self) -> None:
        while True:
            try:
                queued = self._queue.get(timeout=self._heartbeat)
            except queue.Empty:
                self._send(_block(_BEAT))
                self._hear_all()
                continue
            if queued is None:
                with suppress(ServiceFault, RuntimeError):  # as soon as they have answered they may leave
                    self._end_all()  # gloo fails what has arrived but was not yet taken when its connection closes
                return
            command, aside = queued
            self._send(_block(len(command), command, aside))
            if len(command) > _INLINE:
                self._send(_tensor(command[_INLINE:]))

    def _follow(self) -> None:
        block = torch.empty(BLOCK, dtype=torch.uint8)
        while True:
            self._hear(block)
            frame = block.numpy().tobytes()
            kind, aside = _HEADER.unpack_from(frame)
            if kind == _END:
                with suppress(ServiceFault):  # rank 0 leaves as soon as it hears the answer
                    self._answer()
                return
            if kind == _BEAT:
                self._answer()
                continue
            command = frame[_HEADER.size : _HEADER.size + min(kind, _INLINE)]
            if kind > _INLINE:
                rest = torch.empty(kind - _INLINE, dtype=torch.uint8)
                self._hear(rest)
                command += rest.numpy().tobytes()
            if not aside:
                self._queue.put((command, False))
            elif self._on_aside is not None:
                self._on_aside(self._decoded(command))

    def _send(self, tensor: torch.Tensor) -> None:
        self._with_followers(lambda pg, rank: pg.send([tensor], rank, _COMMAND_TAG))

    def _end_all(self) -> None:
        """Nobody waits for these sends: gloo may forget one whose receiver leaves, and the answer says that it came."""
        ends = [self._pg().send([_block(_END)], rank, _COMMAND_TAG) for rank in self._followers]
        self._hear_all()
        del ends

    def _hear_all(self) -> None:
        answers = {rank: torch.empty(1, dtype=torch.uint8) for rank in self._followers}
        self._with_followers(lambda pg, rank: pg.recv([answers[rank]], rank, _ANSWER_TAG))

    def _with_followers(self, post: Callable[[Any, int], Any]) -> None:
        # Half the deadline: while rank 0 waits for one follower the others hear nothing, and must not take it for lost.
        seconds = self._deadline / 2
        give_up = time.monotonic() + seconds
        works: list[Any] = []
        done = 0
        try:
            pg = self._pg()
            works.extend(post(pg, rank) for rank in self._followers)
            for work in works:
                _wait(work, give_up)
                done += 1
        except RuntimeError as error:
            # Posting fails at the follower after the last one posted, waiting at the one after the last one done.
            rank = 1 + (done if len(works) == len(self._followers) else len(works))
            self._tell_store(rank)
            raise self._lost(rank, error, give_up, seconds) from error

    def _hear(self, tensor: torch.Tensor) -> None:
        self._with_leader(lambda pg: pg.recv([tensor], 0, _COMMAND_TAG))

    def _answer(self) -> None:
        self._with_leader(lambda pg: pg.send([torch.zeros(1, dtype=torch.uint8)], 0, _ANSWER_TAG))

    def _with_leader(self, post: Callable[[Any], Any]) -> None:
        give_up = time.monotonic() + self._deadline
        try:
            _wait(post(self._pg()), give_up)
        except RuntimeError as error:
            raise self._lost(0 if _timed_out(give_up) else self._ask_store(), error, give_up, self._deadline) from error

    def _pg(self) -> Any:
        if self._mesh.pg is None:
            raise RuntimeError("the relay was closed")
        return self._mesh.pg

    def _lost(self, rank: int, error: RuntimeError, give_up: float, seconds: float) -> ServiceFault:
        if _timed_out(give_up):
            return DeadlineExceeded(f"{self._name} rank {rank}", "relay", "silent", seconds)
        return ServiceFault(f"{self._name} rank {rank}", "relay", f"lost: {reason(error)}", self._deadline)

    def _tell_store(self, rank: int) -> None:
        """Rank 0 leaves the culprit's rank: the others will only see that rank 0 closes its connections."""
        try:
            self._store.set(_LOST_KEY, str(rank))
        except RuntimeError:
            return  # the store died with its host: the others take rank 0 for lost

    def _ask_store(self) -> int:
        """Whom rank 0 lost, or 0. gloo closes every connection of a rank on which one operation timed out, so the others may
        see that before rank 0 has said whom it waited for: they give it a moment."""
        try:
            self._store.wait([_LOST_KEY], timedelta(seconds=min(_LAST_WORD, self._deadline / 2)))
            return int(self._store.get(_LOST_KEY))
        except RuntimeError:
            return 0  # it said nothing, or the store died with it


def _block(kind: int, command: bytes = b"", aside: bool = False) -> torch.Tensor:
    return _tensor((_HEADER.pack(kind, aside) + command[:_INLINE]).ljust(BLOCK, b"\0"))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _timed_out(give_up: float) -> bool:
    return time.monotonic() >= give_up - _ROUNDING


def _wait(work: Any, give_up: float) -> None:
    # torch reads a timeout of 0 as none at all.
    work.wait(timedelta(seconds=max(give_up - time.monotonic(), 0.001)))
