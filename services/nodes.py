"""The nodes of a run, as the coordinator sees them: their admission, their assignments, and their loss."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from runtime import run_files, timeouts
from runtime.cluster.nodes import Assignment, Death, NodePaths, NodeRegistration, Roster, Scale, Scaled, launches, path_faults
from runtime.cluster.placement import Binding, Placement, RestartBackoff, place
from runtime.cluster.topology import (
    UPDATED,
    Instance,
    elastic_sizes,
    group_of,
    has_several_nodes,
    is_group,
    named_paths,
    settings_of,
    with_ranks,
    with_rollouts,
)
from runtime.config import Config, Rollout, loading
from runtime.coordinator.failover import Members, known_units
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.errors import ConfigError, DeadlineExceeded, UserError
from runtime.ledger import checkpoint
from runtime.process import os_process
from runtime.process.waiting import now, still_missing
from runtime.types import Holder

log = logging.getLogger("sluice")


class Nodes:
    """`join` handles a node's stream; `placed` waits for the nodes that the run needs. Placed units go to the register."""

    def __init__(self, config: Config, trains: bool, register: Register):
        """Create it without nodes. `trains`: False for an evaluation alone."""
        self._full = config
        self.config = config  # the configuration, with the numbers of rollouts and elastic ranks that the run has now
        self._yaml = loading.to_yaml(config)
        self.run = uuid.uuid4().hex  # changes when all processes begin anew: agents then end what they ran before
        self._secret = secrets.token_bytes(32)  # for the keys of groups that span nodes
        self._trains = trains
        self._register = register
        self.roster = Roster(config)
        self._placement: Placement | None = None
        self._paths: dict[str, NodePaths] = {}
        self._allowances: dict[str, RestartBackoff] = {}  # of units
        self._restarted: dict[str, int] = {}  # by unit, the run's step as it was last restarted
        self._assignments: dict[str, Assignment] = {}  # the newest of each node
        self._streams: dict[str, asyncio.Event] = {}  # set when the node's assignment has changed
        self._seen: set[str] = set()  # nodes that were here at any time
        self._own = asyncio.Event()  # set once the node of this process has reported its paths
        self._own_name = ""
        self._came = asyncio.Event()
        self._refused = ""

    # ------------------------------------------------------------------------------------------ members

    async def join(self, node: NodeRegistration) -> AsyncGenerator[Assignment, None]:
        """Admit `node` and yield its assignment, again at each change. It leaves as its stream ends. Raises UserError."""
        try:
            if node.pid == os.getppid() and node.machine == os_process.machine():  # its agent started this process
                self._own_name = node.name
            else:
                await self._own_first(node)
            await self._namesake(node)
            self.roster.admit(node)
        except UserError as error:
            self._refuse(str(error))
            raise
        log.info("node %s joined: %s, %d devices, agent %d", node.name, node.address, node.devices, node.pid)
        changed = self._streams[node.name] = asyncio.Event()
        try:
            yield Assignment(run=self.run, config=self._yaml)  # the node checks the paths of this configuration
            while await changed.wait() and self._streams.get(node.name) is changed:
                changed.clear()
                yield self._assignments[node.name]
        finally:
            if self._streams.get(node.name) is changed:
                self._leave(node.name)

    def close(self) -> None:
        for changed in self._streams.values():
            changed.set()
        self._streams = {}

    def report_paths(self, found: NodePaths) -> None:
        """Take a node's report on its paths; the node counts from now on. Raises UserError if the paths differ from ours."""
        if found.node not in self.roster.there:
            return  # its stream has broken meanwhile
        self._paths[found.node] = found
        if found.node == self._own_name:
            self._own.set()
        else:
            own = self._paths[self._own_name]
            faults = list(path_faults(own, found, named_paths(self.config)))
            run, lineage = self.config.run, checkpoint.lineage(self.config)
            if not run.overwrite and any(part.split("/")[-2] != lineage for part in found.parts):
                there = f"{Path(run.dir) / run_files.PARTS} of node {found.node} has checkpoints of another run"
                faults.append(f"run.dir: {there}; move it away, or set run.overwrite=true to replace them")
            if faults:
                self._refuse("\n".join(faults))
                raise UserError("\n".join(faults))
        self.roster.ready(found.node)
        self._seen.add(found.node)
        if self._placement is not None:
            self._take_in(found.node)
        self._came.set()

    def resume(self) -> str:
        """Return the checkpoint to resume from, "" for none. Raises UserError if no checkpoint is whole on all nodes."""
        run = self.config.run
        return checkpoint.resolve(run.resume, Path(run.dir), log.warning, self._lacks, sums=False)  # sums: by the launcher

    def _lacks(self, position: checkpoint.Position) -> str:
        there = {part for found in self._paths.values() for part in found.parts}
        identity = checkpoint.identity(position)
        return next((checkpoint.missing_part(part) for part in position.parts if f"{part}/{identity}" not in there), "")

    async def placed(self, began: float, waits_for: Callable[[str], None] = lambda _: None) -> None:
        """Wait for the nodes, place the processes, and have the nodes start them. `waits_for` gets the missing ones of several
        nodes, at each change. Raises ConfigError, or DeadlineExceeded with those missing `deadlines.start` after `began`."""
        timeout, several = self.config.deadlines.start, has_several_nodes(self.config.cluster)

        def missing() -> list[str]:
            found = self.roster.missing
            if found and several:
                waits_for(", ".join(found))
            return found

        if absent := await still_missing(missing, self._came, began + timeout):
            why = f"; refused: {self._refused}" if self._refused else ""
            raise DeadlineExceeded(f"node {', '.join(absent)}", "start", f"did not come{why}", timeout)
        waits = bool(self.config.cluster.min_nodes)
        self._placement = place(self.config, self.roster.offers, trains=self._trains, waits=waits)
        if self._placement.pending:
            log.info("no room yet for %s", ", ".join(instance.name for instance in self._placement.pending))
        self._start([seat.instance for seat in self._placement.seats])

    async def holders(self) -> set[Holder]:
        """Return the agents that hold blobs. After a takeover, wait for their nodes `deadlines.keepalive` seconds at most."""
        assert self._placement is not None
        expected = {seat.node for seat in self._placement.seats} - self._seen
        await still_missing(lambda: sorted(expected - self._seen), self._came, now() + self.config.deadlines.keepalive)
        return {Holder(name, node.blobs) for name, node in self.roster.nodes.items()}

    async def rejoined(self, seconds: float) -> None:
        """Wait until the nodes that a run needs are there, or `seconds` are over."""
        await still_missing(lambda: self.roster.missing, self._came, now() + seconds)

    def take_up(self, members: Members) -> None:
        """Go on with an earlier coordinator's processes. Their nodes come again; `_take_in` starts what no longer runs."""
        if members.rollouts:
            self.config = with_rollouts(self.config, members.rollouts)
        for unit in members.units:
            if unit.role in UPDATED and len(unit.ranks) != getattr(self.config.services, unit.role).processes:
                self.config = with_ranks(self.config, unit.role, len(unit.ranks))
        self._yaml = loading.to_yaml(self.config)
        self._placement = Placement(tuple(members.seats), tuple(members.pending))
        for unit in members.units:
            self._register.take_up(unit.role, unit.ranks, unit.incarnation, unit.processes)

    def members(self, began: int) -> Members:
        """Return what a coordinator that takes over must know. `began`: the term in which all processes were started."""
        fleet, placement = self.config.services.rollout, self._placement or Placement(())
        return Members(
            run=run_files.run_id(Path(self.config.run.dir)),
            began=began,
            rollouts=fleet.replicas if isinstance(fleet, Rollout) else 0,
            seats=list(placement.seats),
            pending=list(placement.pending),
            units=known_units(self._register),
        )

    # ------------------------------------------------------------------------------------------ changes

    def scale(self, wanted: Scale) -> Scaled:
        """Set the number of rollouts from now on; the highest numbers are stopped first. Raises UserError."""
        if self._placement is None:
            raise UserError("scale: the run has not started yet")
        if not self._trains:
            raise UserError("scale: the number of rollouts of an evaluation cannot change")
        if wanted.role != "rollout" or not isinstance(self.config.services.rollout, Rollout):
            raise UserError(f"scale: {wanted.role}={wanted.replicas}: only rollout can be scaled, and only as one fleet")
        if (nodes := self.config.services.rollout.parallel.nodes) > 1:
            raise UserError(f"scale: services.rollout.parallel.nodes is {nodes}; only rollouts on one node can be scaled")
        if wanted.replicas < 1:
            raise UserError(f"scale: rollout={wanted.replicas}: must be at least 1")
        before = {seat.instance for seat in self._placement.seats}
        config = with_rollouts(self.config, wanted.replicas)
        stays = [seat for seat in self._placement.seats if not _beyond(seat.instance, wanted.replicas)]
        after = self._place_beside(stays, config)
        self.config, self._yaml = config, loading.to_yaml(config)
        started = [seat.instance for seat in after.seats if seat.instance not in before]
        stopped = sorted(before - {seat.instance for seat in after.seats}, key=lambda instance: instance.name)
        for instance in stopped:
            self._register.dismiss(instance.name, "the run was scaled down")
        self._start(started)
        return Scaled(
            started=[instance.name for instance in started],
            stopped=[instance.name for instance in stopped],
            pending=[instance.name for instance in after.pending],
        )

    def start_again(self, role: str, death: Death, step: int) -> bool:
        """Restart a group of trainer or critic, or a unit that spans nodes, as its next incarnation, after the delay that its
        `restarts` give. `step`: of the run; a group in memory that has made a step since its last restart is restarted at once.
        Returns False if `restarts` allow no further start, and for other groups, whose node has tried already."""
        assert self._placement is not None
        unit = [one.name for one in group_of(self.config, Instance(role, death.name))]
        nodes = {seat.node for seat in self._placement.seats if seat.instance.name in unit}
        if len(nodes) < 2 and role not in UPDATED:
            return False
        if self._register.is_followed(death):
            return True  # the report is late: a newer incarnation has replaced this one
        if role in UPDATED:
            self._resize(role)
        allowed, name = settings_of(self.config, Instance(role, death.name)).restarts, unit[0]
        before, self._restarted[name] = self._restarted.get(name, 0), step
        delay: float | None = 0.0
        if not allowed or step <= before or self.config.checkpoint.in_memory == "off" or role == ROLLOUT:
            delay = self._allowances.setdefault(name, RestartBackoff(allowed)).delay(time.monotonic())
        if delay is None:
            return False
        self._place([Instance(role, death.name)])
        asyncio.get_running_loop().call_later(delay, self._send_assignments)
        return True

    def grown(self) -> list[str]:
        """Return the elastic roles that could have more ranks on the nodes that are there."""
        return [role for role in UPDATED if (found := self._fitting(role)) and found[0] > len(self._ranks(role))]

    def _ranks(self, role: str) -> list[Binding]:
        return [seat for seat in self._placement.seats if seat.instance.role == role] if self._placement is not None else []

    def _fitting(self, role: str) -> tuple[int, Placement] | None:
        """Return how many ranks of an elastic role the nodes have room for, and their placement; None for another role."""
        full, mine = getattr(self._full.services, role), self._ranks(role)
        if self._placement is None or not mine or not full.elastic:
            return None
        others = [seat for seat in self._placement.seats if seat.instance.role != role]
        for ranks in elastic_sizes(self._full, role):
            if isinstance(full.placement, list):  # no node gets more than its share
                present = sum(node in self.roster.nodes for node in full.placement)
                if ranks * len(full.placement) > full.processes * present:
                    continue
            with suppress(ConfigError):
                config = with_ranks(self.config, role, ranks)
                return ranks, place(config, self.roster.offers, others, trains=self._trains, waits=True)
        return None

    def _resize(self, role: str) -> None:
        """Give an elastic group as many ranks as fit on the nodes that are there, if its nodes or its size change."""
        there, mine, found = self.roster.nodes, self._ranks(role), self._fitting(role)
        if found is None or (found[0] == len(mine) and all(seat.node in there for seat in mine)):
            return
        ranks, self._placement = found
        log.warning("%s goes on with %d ranks, after %d", role, ranks, len(mine))
        self.config = with_ranks(self.config, role, ranks)
        self._yaml = loading.to_yaml(self.config)

    def _take_in(self, name: str) -> None:
        """Give processes to a node that joins during the run: its own, or to a new node those without room or node."""
        assert self._placement is not None
        seats, there = self._placement.seats, self.roster.nodes
        mine = [seat.instance for seat in seats if seat.node == name]
        if not mine:
            seats = tuple(seat for seat in seats if seat.node in there or self._spans(seat.instance))
        before = set(seats)
        try:
            after = self._place_beside(seats, self.config)
        except ConfigError:  # no room here for the processes of lost nodes: they wait for these
            after = self._place_beside(self._placement.seats, self.config)
        absent = [instance for instance in mine if not self._runs(name, instance)]
        self._start([*absent, *(seat.instance for seat in after.seats if seat not in before)])

    def _runs(self, name: str, instance: Instance) -> bool:
        """Return whether node `name`, which has come back, still runs this process, or a later one that it started itself."""
        assert self._placement is not None
        unit, running = self._register.find(instance.name), self.roster.nodes[name].running
        mine = [seat.instance.name for seat in self._placement.on(name) if self._register.find(seat.instance.name) is unit]
        return unit is not None and running.get(mine[0], -1) >= unit.incarnation

    def _place_beside(self, kept: Sequence[Binding], config: Config) -> Placement:
        self._placement = place(config, self.roster.offers, kept, trains=self._trains, waits=True)
        return self._placement

    def _start(self, coming: Sequence[Instance]) -> None:
        self._place(coming)
        self._send_assignments()

    def _place(self, coming: Sequence[Instance]) -> None:
        units = {tuple(one.name for one in group_of(self.config, instance)): instance.role for instance in coming}
        for ranks, role in units.items():
            self._register.place(role, ranks)

    def _leave(self, name: str) -> None:
        """Handle a node whose agent has ended or is silent. The sessions to its processes show whether they live."""
        self.roster.leave(name)
        self._streams.pop(name, None)
        log.warning("node %s is lost: its agent has ended, or does not answer", name)
        # An elastic group that waits for this node goes on without it.
        waiting = [unit for role in UPDATED for unit in self._register.units(role) if not unit.state.connected]
        for unit in waiting:
            if self._fitting(unit.role) is not None and any(seat.node == name for seat in self._ranks(unit.role)):
                self._resize(unit.role)
                self._start([seat.instance for seat in self._ranks(unit.role)])

    # ------------------------------------------------------------------------------------------ internals

    async def _own_first(self, node: NodeRegistration) -> None:
        """Wait for the coordinator's own node, with which others are compared. Raises UserError if its agent does not come."""
        try:
            await asyncio.wait_for(self._own.wait(), self.config.deadlines.start)
        except TimeoutError:
            raise UserError(f"node {node.name}: the coordinator's own node has not joined") from None

    async def _namesake(self, node: NodeRegistration) -> None:
        """Wait for the end of the node's former stream: its agent ends it at once, another has `deadlines.keepalive`."""
        give_up = time.monotonic() + self.config.deadlines.keepalive
        while (former := self.roster.there.get(node.name)) is not None:
            if (former.pid, former.machine) == (node.pid, node.machine):
                self._streams[node.name].set()
                self._leave(node.name)
            elif time.monotonic() > give_up:
                return  # the roster refuses the node
            else:
                await asyncio.sleep(timeouts.AGENT_STREAM_POLL)

    def _refuse(self, why: str) -> None:
        self._refused = why
        log.warning("a node was refused: %s", why)

    def _send_assignments(self) -> None:
        assert self._placement is not None
        nodes = self.roster.nodes
        holders = [Holder(name, node.blobs) for name, node in sorted(nodes.items()) if node.blobs]
        peers = {one.node: peer for one, peer in zip(holders, holders[1:] + holders[:1], strict=True) if one != peer}
        incarnations = {unit.name: unit.incarnation for unit in self._register.units()}
        for name, started in launches(self.config, self._placement, nodes, incarnations, self._secret).items():
            if self._would_end_a_unit(name, [launch.name for launch in started]):
                continue  # the unit's other nodes have yet to connect: all get their assignments then
            self._assignments[name] = Assignment(run=self.run, config=self._yaml, launches=started, peer=peers.get(name))
            if name in self._streams:  # not after `close`
                self._streams[name].set()

    def _would_end_a_unit(self, name: str, started: Collection[str]) -> bool:
        """Return whether node `name` runs processes of a live unit over several nodes without a launch in `started`."""
        assert self._placement is not None
        kept = {unit.name for unit in map(self._register.find, started) if unit is not None}
        kept |= {unit.name for unit in self._register.units("", UnitState.LOST)}
        here = [seat.instance for seat in self._placement.on(name) if self._spans(seat.instance)]
        ends = [one for one in here if (unit := self._register.find(one.name)) is not None and unit.name not in kept]
        return any(self._runs(name, instance) for instance in ends)

    def _spans(self, instance: Instance) -> bool:
        """Return whether the process is of a group, or of a rollout over several nodes, and so waits for its own node."""
        return is_group(self.config, instance.role) or len(group_of(self.config, instance)) > 1


def _beyond(instance: Instance, replicas: int) -> bool:
    return instance.role == "rollout" and int(instance.name.rpartition("-")[2]) >= replicas
