"""The coordinator's process: it takes registrations, tells the run's progress, and runs the pipeline over the roles.

`python -m services.coordinator --config FILE --ready-fd N`. It says its address on the descriptor N once it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from runtime import config_loading, layout, os_process
from runtime.aio import first_error
from runtime.config import Config
from runtime.data.held_out import load_held_out
from runtime.data.sources import training_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.errors import DeadlineExceeded, SluiceError, UserError
from runtime.ledger import Ledger
from runtime.pipeline.evaluation_run import EvaluationMaterial, EvaluationRun
from runtime.pipeline.roles import EvaluationRoles, Replicas, Roles
from runtime.pipeline.run import INTERRUPTED, Material, Run
from runtime.ports import ReferencePort
from runtime.status import Loss, Progress, Registration, Status, Stop, Topology
from runtime.topology import Member, data_leaders, members, replaceable
from runtime.trackers import Trackers
from services.client import (
    CLIENTS,
    CriticClient,
    Peer,
    ReferenceClient,
    ReferenceGroupClient,
    RewardClient,
    RolloutClient,
    TrainerClient,
    service_of,
)
from services.server import Handler, Server
from services.session import Session

log = logging.getLogger("sluice")

T = TypeVar("T")


class Coordinator:
    """One coordinator process, from binding its port to its end."""

    def __init__(self, config: Config, trains: bool = True):
        """`trains`: False for an evaluation alone."""
        self._config = config
        self._members = members(config, trains)
        self._trains = trains
        self._folder = Path(config.run.dir)
        self._started = time.monotonic()
        # CLOCK_MONOTONIC is one for all processes of a machine.
        self._launched = float(os.environ.get("SLUICE_LAUNCHED", self._started))
        self._progress = Progress(steps=config.training.steps)
        self._watchers: set[asyncio.Event] = set()
        self._registered: dict[Member, Registration] = {}
        self._lost: dict[str, Loss] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._settings = config.deadlines, config.publication  # of every client
        self._of_replicas = config.deadlines.start, self._lose
        self._sessions: dict[Member, Session] = {}  # none before all are there
        self._interrupted = False
        self._run: Run | None = None
        self._evaluation: EvaluationRun | None = None
        self._address = ""

    async def serve(self, ready_fd: int) -> None:
        """Everything. Raises UserError, ServiceFault."""
        server = Server(
            {"Process": self._process_handlers(), "Coordinator": self._coordinator_handlers()},
            {("Coordinator", "Watch"): self._watch},
        )
        settings, network = self._config.services.coordinator, self._config.network
        try:
            self._address = server.bind(settings.host or network.interface, settings.port, network.port_range)
        except UserError as error:
            raise UserError(f"services.coordinator.port: {error}" if settings.port else str(error)) from None
        await server.start()
        await server.set_serving(True)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        (self._folder / layout.ADDRESS).write_text(self._address)
        os.write(ready_fd, f"{self._address}\n".encode())
        os.close(ready_fd)
        end = "failed"
        try:
            await (self._train() if self._trains else self._evaluate())
            end = "finished"
        finally:
            (self._folder / layout.ADDRESS).unlink(missing_ok=True)
            await self._stop_all()
            self._report(msgspec.structs.replace(self._progress, phase=end))
            await server.stop(grace=0.2)

    async def _train(self) -> None:
        material = await self._material()
        try:
            seconds = time.monotonic()
            roles = self._roles(await self._connect())
            material.seconds["services"] = time.monotonic() - seconds
            self._run = Run(material, roles)
            if self._interrupted:
                self._run.stop(INTERRUPTED)
            summary = await self._run.execute()
        except BaseException as error:  # noqa: BLE001 - it is raised again once everything is closed
            await _quietly(material.trackers.close())
            await _quietly(material.ledger.close())
            raise first_error(error) from None
        await material.trackers.close()
        await material.ledger.close()
        summary.write(self._folder)

    async def _evaluate(self) -> None:
        config = self._config
        tokenizer = _tokenizer(config)
        held_out = load_held_out(config, tokenizer)
        trackers = Trackers(config.trackers, self._folder, config.run.name, msgspec.to_builtins(config))
        material = EvaluationMaterial(
            config=config,
            trackers=trackers,
            held_out=held_out,
            text=tokenizer,
            stop_token_ids=tokenizer.stop_ids,
            report=self._report,
            lost=self._lose,
        )
        try:
            self._evaluation = EvaluationRun(material, self._evaluation_roles(await self._connect()))
            if self._interrupted:
                self._evaluation.stop()
            await self._evaluation.execute()
        except BaseException as error:  # noqa: BLE001 - it is raised again once everything is closed
            await _quietly(trackers.close())
            raise first_error(error) from None
        await trackers.close()

    async def _material(self) -> Material:
        """Read the data while the services start."""
        config, before = self._config, time.monotonic()
        tokenizer = _tokenizer(config)
        train = training_prompts(config.data, tokenizer)
        log.info("prompts: %s", train.report())
        held_out = load_held_out(config, tokenizer, train.problems)
        return Material(
            config=config,
            folder=self._folder,
            ledger=await Ledger.open(self._folder / layout.LEDGER, config.ledger.segment_bytes),
            trackers=Trackers(config.trackers, self._folder, config.run.name, msgspec.to_builtins(config)),
            train=train,
            held_out=held_out,
            text=tokenizer,
            stop_token_ids=tokenizer.stop_ids,
            report=self._report,
            launched=self._launched,
            seconds={"coordinator": self._started - self._launched, "data": time.monotonic() - before},
            lost=self._lose,
        )

    # ------------------------------------------------------------------------------------------ the roles

    async def _connect(self) -> dict[str, list[Session]]:
        """Wait until every process of the topology has registered, and open a session to each; returns them by role."""
        timeout = self._config.deadlines.start
        deadline = self._started + timeout
        while missing := [member for member in self._members if member not in self._registered]:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                names = ", ".join(member.name for member in missing)
                raise DeadlineExceeded(names, "start", "did not register", timeout) from None
        self._sessions = {member: self._session(self._registered[member]) for member in self._members}
        await asyncio.gather(*(session.open(timeout) for session in self._sessions.values()))
        by_role: dict[str, list[Session]] = defaultdict(list)
        for member, session in self._sessions.items():
            by_role[member.role].append(session)
        return by_role

    def _session(self, registration: Registration) -> Session:
        service = service_of(registration.role, self._config)
        return Session(registration.address, registration.name, service, registration.machine)

    async def _take_in(self, member: Member, registration: Registration) -> None:
        """Talk to the process that has come in the place of another from now on."""
        session = self._session(registration)
        try:
            await session.open(self._config.deadlines.start)
        except DeadlineExceeded as error:
            await session.close()
            self._lose(Loss(name=member.name, incarnation=registration.incarnation, reason=str(error)))
            return
        former, self._sessions[member] = self._sessions[member], session
        run = self._run or self._evaluation
        assert run is not None  # sessions are made before
        run.arrive(member.role, CLIENTS[member.role](session, *self._settings, registration.incarnation))
        self._lost.pop(member.name, None)
        self._report(self._progress)
        await former.close()

    def _lose(self, loss: Loss) -> None:
        self._lost[loss.name] = loss
        self._report(self._progress)

    def _roles(self, by_role: dict[str, list[Session]]) -> Roles:
        answering, services = self._evaluation_roles(by_role), self._config.services
        critic = None
        if self._config.critic is not None:
            critic = CriticClient(by_role["critic"], *self._settings, data_leaders(services.critic))
        return Roles(
            rollouts=answering.rollouts,
            rewards=answering.rewards,
            reward_models=answering.reward_models,
            references=self._references(by_role["reference"]),
            trainer=TrainerClient(by_role["trainer"], *self._settings, data_leaders(services.trainer)),
            critic=critic,
        )

    def _references(self, sessions: list[Session]) -> Replicas[ReferencePort]:
        settings = self._config.services.reference
        references: list[ReferencePort] = [ReferenceClient(session, *self._settings) for session in sessions]
        if sessions and settings.engine == "megatron":
            references = [ReferenceGroupClient(sessions, *self._settings, data_leaders(settings))]
        return Replicas(references, *self._of_replicas)

    def _evaluation_roles(self, by_role: dict[str, list[Session]]) -> EvaluationRoles:
        return EvaluationRoles(
            rollouts=[RolloutClient(session, *self._settings) for session in by_role["rollout"]],
            rewards=Replicas([RewardClient(session, *self._settings) for session in by_role["reward"]], *self._of_replicas),
            reward_models=Replicas(
                [RewardClient(session, *self._settings) for session in by_role["reward_model"]], *self._of_replicas
            ),
        )

    async def _stop_all(self) -> None:
        """Tell every process to stop; one that does not answer is the launcher's to end."""
        for task in self._joining:
            task.cancel()
        sessions = [session for member, session in self._sessions.items() if member.name not in self._lost]
        stops = (asyncio.wait_for(Peer(session, *self._settings).stop(0.0), 1.0) for session in sessions)
        for session in sessions:
            session.ends()
        for session, outcome in zip(sessions, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s did not take the order to stop: %s", session.name, outcome or type(outcome).__name__)
        for session in self._sessions.values():
            await session.close()

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._run is not None:
            self._run.stop(INTERRUPTED)
        if self._evaluation is not None:
            self._evaluation.stop()

    # ------------------------------------------------------------------------------------------ what it answers

    def _process_handlers(self) -> dict[str, Handler]:
        async def status(_: None, timeout: float | None) -> Status:
            return self.status()

        async def stop(_: Stop, timeout: float | None) -> None:
            self._interrupt()

        return {"Status": status, "Stop": stop}

    def _coordinator_handlers(self) -> dict[str, Handler]:
        async def register(registration: Registration, timeout: float | None) -> None:
            member = Member(registration.role, registration.name, registration.rank)
            if member not in self._members:
                raise UserError(f"{registration.name} (rank {registration.rank}) is not in this run's topology")
            former = self._registered.get(member)
            if former is not None and registration.incarnation <= former.incarnation:
                if registration != former:
                    raise UserError(f"{registration.name}: its incarnation {former.incarnation} has registered already")
                return
            if self._sessions and member.role not in replaceable(self._config):
                raise UserError(f"{registration.name}: a {member.role} cannot be replaced while the run goes on")
            self._registered[member] = registration
            log.info("%s registered: pid %d at %s, %s", *_told(registration))
            if self._sessions:
                task = asyncio.create_task(self._take_in(member, registration))
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)
            self._arrived.set()

        async def processes(_: None, timeout: float | None) -> Topology:
            return Topology(processes=list(self._registered.values()))

        return {"Register": register, "Processes": processes}

    def status(self) -> Status:
        progress = self._progress
        gauges: dict[str, float] = {"step": progress.step}
        done, total = (progress.step, progress.steps) if self._trains else (progress.done, progress.total)
        detail = f"{self._config.run.name}: {progress.phase} {done}/{total}"
        if self._run is not None:
            gauges |= {name: float(number) for name, number in self._run.buffer.counts().items()}
            if (wait := self._run.buffer.oldest_wait()) is not None:
                detail += f"; waits for group {wait.group_id} ({wait.phase}, {wait.service}, {wait.seconds:.1f} s)"
            membership = self._run.pool.membership
            gauges |= {"epoch": membership.epoch.number, "rollouts": len(membership.serving)}
            detail += f"; {self._run.pool}"
            if self._run.transport:
                detail += f"; weights by {self._run.transport}"
            if self._run.last_abort:
                detail += f"; last abort: {self._run.last_abort}"
        return Status(
            role="coordinator",
            name="coordinator",
            state="ready",
            detail=detail,
            gauges=gauges,
            pid=os.getpid(),
            address=self._address,
            uptime_seconds=time.monotonic() - self._started,
        )

    def _report(self, progress: Progress) -> None:
        self._progress = msgspec.structs.replace(progress, lost=list(self._lost.values()))
        for watcher in self._watchers:
            watcher.set()

    async def _watch(self) -> AsyncIterator[Progress]:
        """Every change, or the newest of several that came together."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                progress = self._progress
                yield progress
                if progress.phase in ("finished", "failed"):
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)


def _told(registration: Registration) -> tuple[str, int, str, str]:
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in registration.seconds.items())
    return registration.name, registration.pid, registration.address, seconds


def _tokenizer(config: Config) -> Tokenizer:
    data = config.data
    return Tokenizer(config.model.path, config.model.chat_template, data.prompt_type, data.prompt_type_path)


async def _quietly(work: Awaitable[T]) -> None:
    """Closing after a failure: a second failure is logged, the first is the one that is told."""
    try:
        await work
    except SluiceError as error:
        log.warning("%s", error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="the resolved configuration")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--evaluate", action="store_true", help="no training: evaluate the weights that the rollouts load")
    arguments = parser.parse_args()
    os_process.die_with_parent()
    os_process.stacks_on_signal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        config = config_loading.load(arguments.config, ())
        uvloop.install()
        asyncio.run(Coordinator(config, trains=not arguments.evaluate).serve(arguments.ready_fd))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except SluiceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
