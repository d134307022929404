"""What has to hold in a run, told by those beyond the ports: none of it is asked of the coordinator's own books."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime import timeouts
from runtime.cluster.topology import takes_turns
from runtime.coordinator.register import UnitState
from runtime.ledger.reader import LedgerReader
from runtime.simulation.cluster import Observer
from runtime.types import GroupRequest, PolicyVersion, TrainGroup

if TYPE_CHECKING:
    from runtime.coordinator.run import TrainingRun
    from runtime.simulation.cluster import SimulatedCluster, SimulatedModel, SimulatedProcess, SimulatedRollout, SyncEpoch
    from runtime.simulation.engine import ModelState


class Broken(Exception):
    """An invariant does not hold."""


class Witness(Observer):
    """`patience`: seconds of virtual time in which a step has to end, a recovery in between included. `redone`: the most steps
    that a recovery does again."""

    def __init__(self, staleness: int, groups_per_step: int, patience: float, redone: int):
        self._staleness, self._per_step, self._patience = staleness, groups_per_step, patience
        # What may be admitted, a batch that is not retired yet, and what comes back to be trained again.
        self._most = (staleness + 2 + redone) * groups_per_step
        self._step = -1
        self._since = 0.0
        self.steps = self.oldest = 0
        self.most_live = 0
        self.damaged = False  # a ledger, at the beginning of a life
        self._problems: dict[int, int] = {}  # of the groups that live or did, by their ids
        self._trained: dict[int, int] = {}  # as they were when they were trained
        self._kept: set[PolicyVersion] = set()  # those of the trainer, whose copies in memory were complete
        self._incarnation = 0  # of the newest
        self._copied: set[str] = set()  # the roles that have copied a version of that incarnation
        self._generates: dict[int, SimulatedRollout] = {}  # by group: who began it last

    def applied(self, model: SimulatedModel, step: int, batch: Sequence[TrainGroup]) -> None:
        """A model updates: the next step, with a whole batch, of groups that it has not trained, of tokens within the bound."""
        from runtime.simulation.engine import Stamp

        who = f"{model.name}.{model.incarnation}, step {step}"
        _hold(step == model.state.step, f"{who}: it is at step {model.state.step}")
        ids = [group.group_id for group in batch]
        _hold(len(ids) == self._per_step, f"{who}: {len(ids)} groups instead of {self._per_step}")
        again = sorted(set(ids) & set(model.state.trained)) + [one for one in ids if ids.count(one) > 1]
        _hold(not again, f"{who}: groups {again} are trained again")
        self._trained |= {group_id: self._problems[group_id] for group_id in ids}
        for group in batch:
            stamp = msgspec.msgpack.decode(group.payload, type=Stamp)
            _hold(stamp.group_id == group.group_id, f"{who}: group {group.group_id} has the payload of {stamp.group_id}")
            age = step - PolicyVersion.unpack(stamp.oldest).step
            _hold(age <= self._staleness, f"{who}: group {group.group_id} has a token {age} steps old")
            self.oldest = max(self.oldest, age)
        copy = model.cluster.memory.newest(model.name, PolicyVersion(self._incarnation, step + 1))
        _hold(copy is None, f"{who}: it is made again, and the copy of what it made is in memory")
        self.steps += model.role == "trainer"

    def kept(self, model: SimulatedModel, version: PolicyVersion) -> None:
        """A model's copies are complete. With a later incarnation the run has gone back, and begins its groups again."""
        if model.role == "trainer":
            self._kept.add(version)
        if version.incarnation > self._incarnation:
            lost = model.cluster.memory.lost
            whole = len(self._copied) == 1 + (model.cluster.config.critic is not None)  # of the lineage before
            _hold(bool(lost) or not whole, f"the run goes back to {version}, and all copies are in memory")
            lost.clear()
            self._copied.clear()
            self._incarnation = version.incarnation
            self._generates.clear()
        self._copied.add(model.role)

    def generates(self, rollout: SimulatedRollout, request: GroupRequest) -> None:
        """Check that the rollout that had begun the group before is lost, or puts groups aside for the trainer."""
        before = self._generates.get(request.group_id)
        config = rollout.cluster.config
        if before is not None and config.checkpoint.in_memory != "off" and not takes_turns(config):
            gone = before._lost or not before.alive or rollout.cluster.agents.losses  # of nodes: perhaps it was of blobs
            _hold(bool(gone), f"{rollout.name} begins group {request.group_id} again, which {before.name} has begun")
        self._generates[request.group_id] = rollout

    def swapped(self, rollout: SimulatedRollout, version: PolicyVersion, epoch: SyncEpoch) -> None:
        """A rollout takes a version over: a later one, which every member of the epoch has whole."""
        missing = set(epoch.names[1:]) - epoch.verified.get(version, set())
        _hold(not missing, f"{rollout.name}: version {version} is committed, and {sorted(missing)} have not verified it")
        keeps = rollout.cluster.config.checkpoint.in_memory != "off"
        _hold(not keeps or version in self._kept, f"{rollout.name}: version {version} is committed before it is in memory")
        _hold(version >= rollout.version, f"{rollout.name}: from version {rollout.version} back to {version}")

    def stopped(self, process: SimulatedProcess) -> None:
        """A rollout that serves, or a model under training, does nothing any more, and its connection stays: it has to be
        noticed by its silence, if another has to be started meanwhile after that."""
        unit = process.cluster.register.find(process.name)
        serves = unit is not None and unit.incarnation == process.incarnation and unit.state is UnitState.SERVING
        if serves and self.published and (process.role == "rollout" or process.is_group):
            deadlines = process.cluster.config.deadlines
            within = 2 * deadlines.keepalive + deadlines.start + 3 * timeouts.CONTROL_CALL
            process.loop.call_later(within, self._noticed, process, within)

    def _noticed(self, process: SimulatedProcess, within: float) -> None:
        noticed = process._goes_on.is_set() or process._lost or not process.alive
        _hold(bool(noticed), f"{process.name} has said nothing for {within:g} s, and is not given up")

    def look(self, run: TrainingRun, cluster: SimulatedCluster) -> None:
        """After each round of callbacks."""
        buffer, now = run.buffer, cluster.loop.time()
        self._problems |= {group.group_id: group.ticket.problem for group in buffer}
        if len(buffer) > self.most_live:
            self.most_live = len(buffer)
            _hold(len(buffer) <= self._most, f"{len(buffer)} groups live, and {self._most} may")
        if buffer.committed != self._step:
            self._step, self._since = buffer.committed, now
        elif now - self._since > self._patience:
            waits = cluster.loop.waiting()
            raise Broken(f"no step after {self._step} in {self._patience:g} s; {run.pool}; these wait:\n{waits}")

    def moved(self, now: float) -> None:
        """Another life of the coordinator begins: the time to its first step begins too."""
        self._step, self._since, self.published = -1, now, False
        self._kept, self._copied, self._incarnation, self._generates = set(), set(), 0, {}

    def ended(self, run: TrainingRun, ledger: Path, state: ModelState, steps: int, prompts: int) -> None:
        """The run is over: what the ledger calls trained is what the trainer has trained, every ordinal has an end, and no
        rollout has anything to do."""
        loads = {rollout.name: load for rollout in run.pool.units() if (load := run.pool.load(rollout))}
        _hold(not loads, f"nothing is under way, and the loads are {loads}")
        with LedgerReader(ledger) as reader:
            rows = list(reader.groups(states=()))
        retired = sorted(row.group_id for row in rows if row.phase.value == "retired")
        _hold(state.step <= steps, f"{state.step} steps of {steps}")
        mine, others = _odd(retired, state.trained), _odd(state.trained, retired)
        _hold(retired == sorted(state.trained), f"retired alone {mine}, trained alone {others}")
        asked = [self._trained[group_id] for group_id in state.trained]
        twice = {problem for problem in asked if asked.count(problem) > 1}
        _hold(not twice or max(row.group_id for row in rows) >= prompts, f"the prompts {twice} are trained twice")
        ids = sorted(row.group_id for row in rows)
        _hold(self.damaged or ids == list(range(len(ids))), f"the ordinals {ids[:20]} have gaps")
        unsaid = [row.group_id for row in rows if row.phase.value == "dropped" and not row.why]
        _hold(not unsaid, f"groups {unsaid} are dropped, and nobody says why")


def _hold(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _odd(mine: Sequence[int], others: Sequence[int]) -> list[int]:
    return sorted(set(mine) - set(others))[:20]
