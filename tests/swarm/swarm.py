"""Seeds of faults over random configurations of the real coordinator, on a virtual clock.

`python -m tests.swarm.swarm --seeds 1000 [--first N]` runs them and prints how they ended; a seed that breaks an invariant is
shrunk, and printed as the command that replays it: `… --first N --seeds 1 --faults kill:rollout-0@0.3`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from unittest import mock

from msgspec.structs import replace

from runtime import config, timeouts
from runtime.cluster.topology import instances, is_group
from runtime.config import Config
from runtime.coordinator.weight_sync import TRIES
from runtime.errors import InvariantViolated, SluiceError
from runtime.simulation.engine import Costs, Fixed, LogNormal, Pareto
from services.rpc.client import command_deadline
from tests.swarm.faults import Fault, Kind, draw
from tests.swarm.faulty import FaultySimulation

MEMORY = Path("/dev/shm")  # a file system in memory, where there is one
MOST_FAULTS = 5
ATTEMPTS = config.Trainer().restarts


@dataclass(frozen=True)
class Case:
    seed: int
    config: Config
    costs: Costs
    faults: tuple[Fault, ...]
    nodes: int
    tick: float  # of the ledger

    def may_give_up(self, published: bool) -> bool:
        """Whether so much goes wrong that a run may end: as often as a process is started again, or a weight sync tried; or a
        model under training is lost while there is nothing to go back to."""
        by_unit = Counter(fault.who for fault in self.faults if fault.who and fault.kind not in ("slow", "corrupt"))
        nodes = sum(fault.kind == "node" for fault in self.faults)
        models = sum(fault.kind == "agents" for fault in self.faults)  # a trainer that cannot read a blob ends
        models += sum(count for who, count in by_unit.items() if who.partition("-")[0] in ("trainer", "critic", "node"))
        # What a sender has that is not what it gathered is sent once more before it is gathered anew.
        syncs = sum(1 + (fault.who == "trainer-0") for fault in self.faults if fault.kind in ("slow", "corrupt"))
        again = max(by_unit.values(), default=0) + nodes > ATTEMPTS or models > ATTEMPTS or syncs >= TRIES
        return again or (models > 0 and not published)


def case_of(seed: int) -> Case:
    """The configuration and faults of a seed."""
    chance, memory, blobs = (random.Random(f"{what} {seed}") for what in ("case", "memory", "blobs"))
    pick = chance.choice
    critic, colocated, dynamic = chance.random() < 0.2, chance.random() < 0.25, chance.random() < 0.2
    settings = Config(
        run=config.Run(name="swarm", seed=seed),
        sampling=config.Sampling(group_size=pick((1, 2, 4)) + dynamic, max_new_tokens=pick((4, 32))),
        evaluation=config.Evaluation(
            before=pick((False, True)), after=pick((False, True)), every=pick((0, 2)), max_new_tokens=8
        ),
        data=config.Data(eval=pick(("", "eval.jsonl"))),
        rewards=config.Rewards(rules=[config.Rule(name="gsm8k")]),
        algorithm=config.Algorithm(
            kl_coefficient=pick((0.0, 0.1)), dynamic_sampling=dynamic, advantage="gae" if critic else "group_norm"
        ),
        critic=config.Critic() if critic else None,
        moe=config.Moe(router_replay="routing" if blobs.random() < 0.4 else "off"),
        training=config.Training(
            steps=chance.randint(2, 8), staleness=pick((0, 1, 2, 4)), groups_per_step=chance.randint(1, 5)
        ),
        services=config.Services(
            rollout=config.Rollout(
                replicas=chance.randint(1, 4), max_num_seqs=pick((2, 8, 16)), colocate="trainer" if colocated else ""
            ),
            reward=config.Reward(replicas=chance.randint(1, 2)),
        ),
        weight_sync=config.WeightSyncConfig(
            join_timeout=10.0, transfer_timeout=10.0, commit_timeout=10.0, in_flight=pick(("keep", "drain"))
        ),
        deadlines=config.Deadlines(start=60.0, keepalive=8.0, generate=pick((60.0, 300.0)), score=30.0, train=60.0, save=30.0),
        checkpoint=config.Checkpoint(
            every=pick((0, 1, 2, 3)), keep=pick((1, 2)), in_memory="off" if memory.random() < 0.2 else "auto"
        ),
        trackers=[],
    )
    tick = pick((0.001, 0.05))
    costs = Costs(
        reply_tokens=pick((LogNormal(6.0, 0.8), Pareto(2.0, 1.1, 32.0))),
        decode_step=pick((1e-4, 1e-2)) * memory.choice((1, 1, 10)),
        score=pick((Fixed(1e-3), Pareto(1e-3, 1.2, 5.0))),
        update=pick((1e-3, 0.3)),
        weights_bytes=pick((1e6, 1e9)),
        delay=pick((Fixed(1e-4), LogNormal(1e-3, 1.0))),
        storage=pick((Fixed(0.0), LogNormal(1e-3, 1.0))),
        start=LogNormal(2.0, 0.3),
        keep=memory.choice((1e-3, 0.3, 2.0)),
        forked=memory.choice((0.05, 0.4)),
    )
    nodes = chance.randint(1, 3)
    units = [one.name for one in instances(settings) if one.rank == 0 or not is_group(settings, one.role)]
    if memory.random() < 0.3:
        units = [unit for unit in units if unit.startswith(("trainer", "critic"))]
    copying = 2 * costs.keep * (settings.training.steps + 1)  # seconds
    faults = draw(chance, units, nodes, within := pick((0.3, 3.0)) + copying, MOST_FAULTS)
    if settings.moe.router_replay == "routing":
        near = [fault.at for fault in faults] + [blobs.uniform(0.0, within)]
        faults += [Fault("agents", blobs.choice(near) + blobs.expovariate(1.0)) for _ in range(blobs.randint(0, 2))]
    return Case(seed, settings, costs, tuple(faults), nodes, tick)


@contextmanager
def simulation(case: Case) -> Iterator[FaultySimulation]:
    """Nothing is left behind."""
    with (
        tempfile.TemporaryDirectory(prefix="sluice-swarm-", dir=MEMORY if MEMORY.is_dir() else None) as folder,
        mock.patch.object(timeouts, "LEDGER_TICK", case.tick),
        mock.patch.object(timeouts, "SYNC_ABORT", 5.0),
    ):
        settings = replace(case.config, run=replace(case.config.run, dir=f"{folder}/run"))
        yield FaultySimulation(settings, case.costs, command_deadline, case.seed, case.faults, nodes=case.nodes)


def verdict(case: Case) -> str:
    """ "" where everything holds, and where a run gave up that may; else what does not hold."""
    with simulation(case) as simulated:
        return said(simulated, case)


def said(simulated: FaultySimulation, case: Case) -> str:
    """`verdict`, of a simulation that has not run."""
    try:
        simulated.run()
    except SluiceError as error:
        may = case.may_give_up(simulated.witness.published)
        return "" if may and not isinstance(error, InvariantViolated) else f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        return f"{type(error).__name__}: {error}"
    return ""


def hunt(seeds: Iterable[int], seconds: float) -> str:
    """What the first seed that breaks something says."""
    began = time.monotonic()
    with quiet():
        for number, seed in enumerate(seeds, start=1):
            if found := verdict(case_of(seed)):
                return f"after {number} seeds: {' '.join(found.split())}"
            if time.monotonic() - began > seconds:
                return f"not in {number} seeds"
    return "not in all seeds"


@contextmanager
def quiet() -> Iterator[None]:
    """What the coordinator logs is not shown meanwhile."""
    before = {logger: logger.level for logger in map(logging.getLogger, ("sluice", "asyncio"))}
    for logger in before:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def shrink(case: Case, found: str) -> Case:
    """Without the faults that it does not take."""
    kind = found.partition(":")[0]
    for fault in case.faults:
        smaller = dataclasses.replace(case, faults=tuple(other for other in case.faults if other is not fault))
        if verdict(smaller).startswith(kind):
            case = smaller
    return case


def command(case: Case) -> str:
    told = ",".join(map(str, case.faults))
    return f"python -m tests.swarm.swarm --first {case.seed} --seeds 1 --faults '{told}'"


_FAULT = re.compile(rf"({'|'.join(get_args(Kind))}):?([a-z_]+-\d+)?@([-\d.e]+)(?:/([-\d.e]+))?(?:\+(\d+))?")


def parse(text: str) -> tuple[Fault, ...]:
    """The faults as `command` writes them."""
    found = []
    for part in filter(None, text.split(",")):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise SystemExit(f"--faults: {part!r} is no fault")
        kind, who, at, lasts, rounds = match.groups()
        found.append(Fault(kind, float(at), who or "", float(lasts or 0), int(rounds or 0)))  # type: ignore[arg-type]
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: after the seeds")
    parser.add_argument("--faults", help="these instead of the seed's")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args(arguments)
    if options.v:
        logging.basicConfig(level=logging.INFO)
    with nullcontext() if options.v else quiet():
        return _swarm(options)


def _swarm(options: argparse.Namespace) -> int:
    began, broken, number = time.monotonic(), 0, 0
    for number in range(1, options.seeds + 1):
        case = case_of(options.first + number - 1)
        if options.faults is not None:
            case = dataclasses.replace(case, faults=parse(options.faults))
        if found := verdict(case):
            broken += 1
            small = case if options.faults is not None else shrink(case, found)
            print(f"seed {case.seed}: {found}\n  {command(small)}", flush=True)
        if options.seconds and time.monotonic() - began > options.seconds:
            break
    print(f"{number} seeds in {time.monotonic() - began:.0f} s, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
