"""The run as the coordinator knows it now, in plain values."""

from __future__ import annotations

from collections import Counter

from runtime.config import Config
from runtime.coordinator.register import ROLLOUT, Register, UnitState
from runtime.coordinator.run import TrainingRun
from runtime.status import Progress, RunFigures


def run_figures(config: Config, register: Register, progress: Progress, run: TrainingRun | None) -> RunFigures:
    """`run`: None before it begins, and of an evaluation alone."""
    units = register.units()
    states = Counter({state.value: 0 for state in UnitState})
    states.update(unit.state.value for unit in units if unit.role == ROLLOUT)
    lost, restarts = Counter[str](), Counter[str]()
    for unit in units:
        lost[unit.role] += unit.state is UnitState.LOST
        restarts[unit.role] += unit.incarnation
    there = [unit for unit in units if unit.state is not UnitState.DISMISSED]
    return RunFigures(
        progress=progress,
        processes=[process for unit in there for process in unit.processes if process is not None],
        staleness=config.training.staleness,
        folder=config.run.dir,
        rollouts=dict(states),
        lost=dict(lost),
        restarts=dict(restarts),
        **({} if run is None else run.figures()),
    )
