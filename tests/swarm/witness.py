"""What has to hold in a run, told by those beyond the ports: none of it is asked of the coordinator's own books."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime import timeouts
from runtime.coordinator.register import UnitState
from runtime.ledger.reader import LedgerReader
from runtime.simulation.cluster import Observer
from runtime.types import PolicyVersion, TrainGroup

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
        self.steps += model.role == "trainer"

    def swapped(self, rollout: SimulatedRollout, version: PolicyVersion, epoch: SyncEpoch) -> None:
        """A rollout takes a version over: a later one, which every member of the epoch has whole."""
        missing = set(epoch.names[1:]) - epoch.verified.get(version, set())
        _hold(not missing, f"{rollout.name}: version {version} is committed, and {sorted(missing)} have not verified it")
        forward = rollout.version is None or version >= rollout.version
        _hold(forward, f"{rollout.name}: from version {rollout.version} back to {version}")

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
