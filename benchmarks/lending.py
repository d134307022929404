"""What a trainer's devices would gain that generate while it waits, by the lengths of replies: `python -m benchmarks.lending`.

All of it is simulated. Four devices train; 2, 4 or 8 rollouts of 32 slots generate 16 groups of 8 replies a step, of 1,000
tokens on the mean. Four rollouts generate about as fast as the trainer trains.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from runtime.config import Config, loading
from runtime.simulation.costs import Costs, Distribution, Fixed, LogNormal, Pareto
from runtime.simulation.prediction import simulated
from runtime.telemetry.shown import LiteralTable
from services.rpc.client import ContractDeadlines

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
MEAN = 1000.0  # tokens
STEPS = 25
MOVES = (0.0, 1.0, 3.0)  # seconds
COSTS = Costs(
    prompt_tokens=200,
    decode_step=1e-2,
    decode_sequence=1e-4,
    prefill_token=2e-5,
    score=Fixed(0.01),
    train_token=8.6e-5,
    update=0.3,
    weights_bytes=1.5e10,
    bandwidth=1e10,
    swap=0.1,
)


class Exponential(Struct, frozen=True):
    """As geometric lengths are, before they are rounded."""

    mean: float

    def draw(self, chance: random.Random) -> float:
        return chance.expovariate(1 / self.mean)


def log_normal(sigma: float) -> LogNormal:
    return LogNormal(MEAN / math.exp(sigma**2 / 2), sigma)


# By name: tokens of a reply, and seconds of its tools.
SHAPES: dict[str, tuple[Distribution, Distribution]] = {
    "constant": (Fixed(MEAN), Fixed(0.0)),
    "geometric": (Exponential(MEAN), Fixed(0.0)),
    "log-normal, σ 1.2": (log_normal(1.2), Fixed(0.0)),
    "agents: log-normal, σ 0.8, and tools": (log_normal(0.8), Pareto(3.0, 1.5, 120.0)),
}


def configured(rollouts: int, staleness: int) -> Config:
    changed = {
        "services.rollout.replicas": rollouts,
        "services.rollout.slots": 32,
        "services.trainer.processes": 4,
        "training.staleness": staleness,
        "training.groups_per_step": 16,
        "sampling.max_new_tokens": 8000,
        "algorithm.kl_coefficient": 0,
        "deadlines.generate": 1e5,  # no step of this ends for being long
        "deadlines.train": 1e5,
    }
    return loading.resolve(loading.load(CONFIG, [f"{key}={value}" for key, value in changed.items()]))


def main() -> None:
    table = LiteralTable("replies", "η", "rollouts", "idle trainer", "idle rollouts", *(f"{move:g} s" for move in MOVES))
    for shape, (lengths, tools) in SHAPES.items():
        costs = replace(COSTS, reply_tokens=lengths, tools=tools)
        for staleness in (2, 0):
            for rollouts in (2, 4, 8):
                config = configured(rollouts, staleness)
                deadlines = ContractDeadlines(config)
                base = simulated(config, costs, deadlines, STEPS).observed
                lent = [simulated(config, replace(costs, lend=move), deadlines, STEPS).observed for move in MOVES]
                idle = (f"{base.idle[role]:.0%}" for role in ("trainer", "rollout"))
                gains = (f"{each.samples_per_second / base.samples_per_second - 1:+.1%}" for each in lent)
                table.add_row(shape, str(staleness), str(rollouts), *idle, *gains)
    Console().print(table)


if __name__ == "__main__":
    main()
