"""`sluice simulate`: virtual time, engines and lending beside sums by hand; calibration; a mistake is one line."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher import cli
from launcher.commands import simulate as command
from runtime import config as schema
from runtime import timeouts
from runtime.config import Config
from runtime.errors import UserError
from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.simulation import simulate
from runtime.simulation.calibration import calibrate, observe
from runtime.simulation.cluster import Observer, SimulatedCluster, SimulatedModel
from runtime.simulation.engine import Cores, Costs, Fixed, LogNormal, SimulatedEngine, sync_seconds
from runtime.simulation.loop import BEGAN, Crash, SimulatedLoop, SimulatedWorld, Stuck
from runtime.simulation.simulate import INTERVAL, DyingSimulation, Simulation, death_costs, simulated, variations
from services.rpc.client import command_deadline

HOUR = 3600.0
NAMES = tuple("abcdefgh")


@contextmanager
def loop_of(seed: str = "0", world: SimulatedWorld | None = None) -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(seed, world or SimulatedWorld())  # type: ignore[abstract]
    try:
        yield loop
    finally:
        loop.end()


def run(main: Callable[[], Coroutine[Any, Any, Any]], seed: str = "0") -> tuple[Any, str]:
    with loop_of(seed) as loop:
        return loop.run(main()), loop.trace


async def together() -> list[str]:
    """What sleeps as long as the others, in the order in which it wakes."""
    woken: list[str] = []

    async def sleeper(name: str) -> None:
        await asyncio.sleep(HOUR)
        woken.append(name)

    await asyncio.gather(*map(sleeper, NAMES))
    return woken


def test_time_stands_still_but_for_timers() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        await asyncio.sleep(HOUR)
        seen.append(loop.time())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2 * HOUR)
        return [*seen, loop.time()]

    assert run(main)[0] == [BEGAN, BEGAN + HOUR, BEGAN + 3 * HOUR]


def test_the_seed_alone_draws_the_order_of_what_becomes_ready_together() -> None:
    orders = {seed: run(together, seed) for seed in map(str, range(12))}
    assert all(sorted(order) == list(NAMES) for order, _ in orders.values())
    assert len({tuple(order) for order, _ in orders.values()}) > 8  # of 8! orders
    assert orders == {seed: run(together, seed) for seed in orders}


def test_what_one_callback_schedules_keeps_its_order() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(0)  # it was scheduled last
        return seen

    for seed in map(str, range(10)):
        assert run(main, seed)[0] == list(range(20))


def test_who_waits_for_ever_is_named() -> None:
    async def waits_in_vain() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match=r"waits_in_vain at .*test_simulate\.py:\d+"):
        run(waits_in_vain)


def test_an_executors_work_is_done_in_order_and_takes_its_time() -> None:
    class Slow(SimulatedWorld):
        seconds = iter((3.0, 1.0, 2.0))

        def storage_seconds(self) -> float:
            return next(self.seconds)

        def check_storage(self) -> None:
            if len(done) == 3:
                raise OSError("no room")

    done: list[int] = []

    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        await asyncio.gather(*(loop.run_in_executor(executor, done.append, number) for number in range(3)))
        assert loop.time() == BEGAN + 3.0
        Slow.seconds = iter((0.0,))
        await asyncio.to_thread(lambda: None)

    with loop_of(world=Slow()) as loop, pytest.raises(OSError, match="no room"):
        loop.run(main())
    assert done == [0, 1, 2]


def test_an_error_that_nobody_awaits_ends_it() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(HOUR)

    with pytest.raises(ZeroDivisionError):
        run(main)


def test_a_crash_comes_between_two_rounds_and_cleans_up_afterwards() -> None:
    left: list[float] = []

    async def main() -> None:
        try:
            await asyncio.sleep(HOUR)
        finally:
            await asyncio.sleep(1.0)
            left.append(asyncio.get_running_loop().time())

    class Killed(SimulatedWorld):
        def before_round(self, rounds: int) -> None:
            if rounds == 1:
                raise Crash

    with loop_of(world=Killed()) as loop:
        with pytest.raises(Crash):
            loop.run(main())
        assert left == []
    assert left == [BEGAN + 1.0]


# ---------------------------------------------------------------------------------------------------------------------- engines
STEP, SEQUENCE = 1.0, 0.25  # a step of B sequences takes 1 + B / 4 seconds
COSTS = Costs(decode_step=STEP, decode_sequence=SEQUENCE, prefill_token=0.5)


Ended = list[tuple[str, float]]


def ends(main: Callable[[SimulatedEngine, Ended], Coroutine[Any, Any, None]], slots: int) -> dict[str, float]:
    """When each sequence ended, in seconds from the beginning."""
    ended: Ended = []
    with loop_of() as loop:
        loop.run(main(SimulatedEngine(loop, COSTS, slots, Cores(loop, 0)), ended))
    return {name: at - BEGAN for name, at in ended}


def submit(engine: SimulatedEngine, ended: Ended, name: str, tokens: int, prompt: int = 0) -> None:
    loop = asyncio.get_running_loop()
    engine.submit(name, prompt, tokens, lambda: None, lambda: ended.append((name, loop.time())))


@pytest.mark.parametrize(
    ("slots", "prompt", "tokens", "expected"),
    [
        (4, 0, {"short": 2, "long": 6}, {"short": 3.0, "long": 8.0}),  # two steps of 1.5 s, then four of 1.25 s
        (1, 0, dict.fromkeys("abc", 4), {"a": 5.0, "b": 10.0, "c": 15.0}),  # what has no slot waits for one
        (1, 6, {"one": 4}, {"one": 3.0 + 5.0}),  # a prompt is read before the next token
    ],
)
def test_a_step_takes_longer_the_more_sequences_it_has(
    slots: int, prompt: int, tokens: dict[str, int], expected: dict[str, float]
) -> None:
    async def main(engine: SimulatedEngine, ended: Ended) -> None:
        for name, count in tokens.items():
            submit(engine, ended, name, count, prompt)
        await asyncio.sleep(100)
        assert prompt or engine.busy == pytest.approx(max(expected.values()))

    assert ends(main, slots) == pytest.approx(expected)


def test_a_pause_takes_no_tokens_and_what_is_withdrawn_gives_its_slot_back() -> None:
    async def main(engine: SimulatedEngine, ended: Ended) -> None:
        submit(engine, ended, "withdrawn", 100)
        submit(engine, ended, "next", 4)
        await asyncio.sleep(10)
        engine.pause()
        await asyncio.sleep(7)
        engine.go_on()
        engine.withdraw("withdrawn")
        await asyncio.sleep(100)

    assert ends(main, slots=1) == pytest.approx({"next": 17.0 + 5.0})


def test_it_is_drained_once_the_last_sequence_ends_and_begins_none_meanwhile() -> None:
    async def main(engine: SimulatedEngine, ended: Ended) -> None:
        submit(engine, ended, "running", 4)
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(engine.drained())
        await asyncio.sleep(0)
        submit(engine, ended, "waiting", 4)
        await draining
        ended.append(("drained", asyncio.get_running_loop().time()))
        await asyncio.sleep(100)

    assert ends(main, slots=2) == pytest.approx({"running": 5.0, "drained": 5.0, "waiting": 10.0})


# ------------------------------------------------------------------------------------------------------------------ the command
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 10


def configured(folder: Path, staleness: int = 2) -> Config:
    return Config(
        run=schema.Run(name="real", dir=str(folder), resume=""),
        sampling=schema.Sampling(group_size=4, max_new_tokens=64),
        evaluation=schema.Evaluation(before=False, after=False),
        rewards=schema.Rewards(rules=[schema.Rule(name="gsm8k")]),
        algorithm=schema.Algorithm(kl_coefficient=0.1),
        training=schema.Training(steps=STEPS, staleness=staleness, groups_per_step=4),
        services=schema.Services(rollout=schema.Rollout(replicas=1, max_num_seqs=16)),
        trackers=[],
    )


def real(folder: Path, costs: Costs) -> tuple[Config, list[dict[str, Any]], list[GroupRow]]:
    """What a run leaves whose costs are known."""
    config = configured(folder)
    simulation = Simulation(config, costs, command_deadline)
    simulation.run()
    with LedgerReader(folder / "ledger") as reader:
        return config, [point for _, point in simulation.metrics], list(reader.groups())


@pytest.mark.parametrize("cores", [0, 2])
def test_calibration_finds_costs_that_predict_another_configuration(tmp_path: Path, cores: int) -> None:
    """Each of the durations of the run is met within 5 %, and throughput within 10 % with another bound on staleness: what is
    calibrated are means, while lengths and schedules are drawn anew."""
    reply = {"reply_tokens": LogNormal(12.0, 0.8), "decode_step": 3e-3, "decode_sequence": 2e-4, "prefill_token": 0.0}
    train = {
        "score": Fixed(4e-3),
        "reference_token": 3e-5,
        "train_token": 4e-4,
        "update": 1e-2,
        "coordinator_message": 5e-4,
        "keep": 2e-3,
    }
    true = Costs(**reply, **train, cores=cores)  # type: ignore[arg-type]
    config, points, groups = real(tmp_path / "run", true)
    found = calibrate(
        Costs(cores=cores), points, groups, lambda costs: simulated(config, costs, command_deadline, STEPS).observed
    )
    assert found.measured is not None and found.simulated is not None
    assert found.measured.seconds["keep"] == pytest.approx(2e-3, rel=1.0)  # where processors are shared it takes longer
    assert found.simulated.seconds == pytest.approx(found.measured.seconds, rel=0.05)
    strict = configured(tmp_path / "other", staleness=0)
    expected = simulated(strict, true, command_deadline, STEPS).observed
    predicted = simulated(strict, found.costs, command_deadline, STEPS).observed
    assert predicted.samples_per_second == pytest.approx(expected.samples_per_second, rel=0.1)


def test_a_death_costs_a_restart_with_copies_in_memory_and_half_an_interval_without(tmp_path: Path) -> None:
    """Both wait for the start; without copies the steps since the checkpoint are repeated, also those beyond the simulated."""
    config = replace(configured(tmp_path / "run"), checkpoint=schema.Checkpoint(every=INTERVAL))
    costs = Costs(update=0.2, keep=0.01, start=Fixed(2.0), forked=0.5)
    found = death_costs(config, costs, command_deadline)
    assert 1.0 < found["auto"].death < 1.0 + 2 * 0.3
    assert 1.0 + INTERVAL / 2 * 0.2 < found["off"].death < 1.0 + timeouts.FIRST_BACKOFF + (INTERVAL / 2 + 2) * 0.3
    assert 3600 * 0.01 / 0.3 < found["auto"].copying < 3600 * 0.02 / 0.2
    assert found["off"].copying == 0.0
    rarely = replace(config, checkpoint=schema.Checkpoint(every=3 * INTERVAL))
    more = death_costs(rarely, costs, command_deadline)["off"].death - found["off"].death
    assert INTERVAL * 0.2 < more < INTERVAL * 0.3
    cold = replace(config, services=replace(config.services, trainer=schema.Trainer(standby=False)))
    assert death_costs(cold, costs, command_deadline)["auto"].death == pytest.approx(found["auto"].death + 1.0)


def test_a_lost_model_goes_on_at_the_step_of_its_copies(tmp_path: Path) -> None:
    """No step is made twice but the one under way, which is made once or twice."""
    made: list[int] = []

    class Counting(Observer):
        def applied(self, model: SimulatedModel, step: int, batch: Any) -> None:
            made.append(step)

    simulation = DyingSimulation(4, configured(tmp_path / "run"), Costs(update=0.2), command_deadline)
    simulation.observer = Counting()
    simulation.run()
    assert sorted(set(made)) == list(range(STEPS)) and made == sorted(made)
    assert len(made) - STEPS <= 1
    assert simulation.cluster is not None and simulation.cluster.processes["trainer-0"].incarnation == 1


class Weighed(Simulation):
    """A run that counts the bytes of the answers that reach the coordinator."""

    nbytes = 0

    def began(self, loop: SimulatedLoop, cluster: SimulatedCluster) -> None:
        arrive = cluster.arrive

        def weighed(deliver: Callable[[], None], nbytes: int = 0) -> None:
            self.nbytes += nbytes
            arrive(deliver, nbytes)

        cluster.arrive = weighed  # type: ignore[method-assign]


def test_replayed_experts_do_not_pass_through_the_coordinator(tmp_path: Path) -> None:
    """They are the agents' blobs: the coordinator works on as many bytes, and as long, as without them."""
    found = {}
    for replay in ("off", "routing"):
        config = replace(configured(tmp_path / replay), moe=schema.Moe(router_replay=replay))
        run = Weighed(config, Costs(coordinator_message=1e-4, coordinator_byte=1e-6), command_deadline, nodes=2)
        run.run()
        assert run.cluster is not None
        found[replay] = run.nbytes, run.cluster.coordinator_busy
    assert found["routing"] == found["off"] > (0, 0.0)


def test_what_computes_at_once_shares_the_processors() -> None:
    """Three pieces of 1, 1 and 2 seconds on one processor end after 3, 3 and 4; one that is given up frees its share."""
    ended: dict[str, float] = {}

    async def piece(cores: Cores, name: str, seconds: float) -> None:
        began = loop.time()
        await cores.spend(seconds)
        ended[name] = loop.time() - began

    async def main() -> None:
        cores = Cores(loop, 1)
        given_up = loop.create_task(cores.spend(100.0))
        tasks = [loop.create_task(piece(cores, name, seconds)) for name, seconds in (("a", 1.0), ("b", 1.0), ("c", 2.0))]
        loop.call_soon(lambda: loop.call_soon(given_up.cancel))
        for task in tasks:
            await task

    with loop_of() as loop:
        loop.run(main())
    assert ended == pytest.approx({"a": 3.0, "b": 3.0, "c": 4.0})


SYNC = Costs(weights_bytes=64e6, bandwidth=1e6, memory=1e9)


@pytest.mark.parametrize(
    ("machines", "senders", "seconds"),
    [
        (("t", "a"), 1, [64.0]),
        (("t", *"aaaaaaaa"), 1, [64.0, *[64.001] * 7]),
        (("t", *map(str, range(16))), 1, [64.0 + hops for hops in range(16)]),
        (("t", "", ""), 1, [64.0, 65.0]),
        (("t", "t", "t", "a"), 1, [0.064, 0.064, 64.0]),
        (("t", "u", "a", "b"), 2, [64.0, 65.0]),
        (("t", "u", "a", "a"), 2, [32.001, 32.001]),
    ],
    ids=[
        "one machine",
        "eight receivers there",
        "a chain of 16 machines",
        "no shared memory",
        "the sender's machine",
        "two senders into one link",
        "two senders into two links of a machine",
    ],
)
def test_a_version_takes_as_long_as_its_hops(machines: tuple[str, ...], senders: int, seconds: list[float]) -> None:
    """64 MB at 1 MB/s over the network, in buckets of a second or, in memory, of a millisecond."""
    assert sync_seconds(SYNC, machines, senders, 1_000_000) == pytest.approx(seconds)
    assert sync_seconds(replace(SYNC, weights_bytes=4 * 64e6), machines, senders, 1_000_000, 4) == pytest.approx(seconds)


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "weight-sync.md"


def test_the_guide_has_what_the_plan_takes() -> None:
    """Half of the cards are senders, in machines of eight; memory takes no time; seconds at 25 and 50 GB/s."""
    found = re.findall(r"^\| [^|]+, ([\d,.]+) GB \| (\d) × (\d) \|(.*)\|$", GUIDE.read_text(), re.MULTILINE)
    for nbytes, rollouts, workers, cells in found:
        costs = Costs(weights_bytes=1e9 * float(nbytes.replace(",", "")), memory=1e15)
        for cards, cell in zip((64, 256, 1024), cells.split("|"), strict=True):
            machines = [f"trainer {rank // 8}" for rank in range(cards // 2)]
            machines += [f"rollout {rank // int(rollouts)}" for rank in range(cards // 16 * int(rollouts))]
            for rate, seconds in zip((25e9, 50e9), cell.split(","), strict=True):
                took = max(sync_seconds(replace(costs, bandwidth=rate), machines, cards // 2, 16 << 20, int(workers)))
                assert float(seconds) == pytest.approx(took, abs=0.006)
    assert len(found) == 3


@pytest.mark.parametrize(("nodes", "least", "most"), [(1, 0.064, 0.1), (2, 64.0, 80.0)])
def test_a_simulated_sync_takes_its_way(tmp_path: Path, nodes: int, least: float, most: float) -> None:
    """Of four units, which are placed in turn, the rollout is the first and the trainer the last."""
    config = replace(configured(tmp_path / "run"), weight_sync=schema.WeightSyncConfig(transfer_timeout=HOUR))
    simulation = Simulation(config, SYNC, command_deadline, nodes=nodes)
    simulation.run()
    assert least < observe([point for _, point in simulation.metrics], []).seconds["weight sync"] < most


def test_the_usual_variations_are_configurations_of_their_own(tmp_path: Path) -> None:
    config = configured(tmp_path / "run")
    named = {name: (tried, costs) for name, tried, costs in variations(config, Costs())}
    assert {"rollouts 2", "η 1", "η 3", "slots 32", "groups of 8"} <= named.keys()
    assert named["η 3"][0].training.staleness == 3
    assert named["replies twice as long"][1].length_scale == 2.0


def test_it_answers_with_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    swept = ("--sweep", "training.staleness=0,1", "--steps", "6")
    arguments = (str(QUICKSTART), "services.platform=ascend", *swept)
    command.simulate(cli._parser().parse_args(["simulate", *arguments]))
    told = capsys.readouterr().out
    assert "calibrated on nothing" in told and "training.staleness=1" in told
    assert "one death of a trainer rank" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "training.staleness"), "--sweep: 'training.staleness' names no values"),
        (("--from", "nowhere"), "--from nowhere: not a run's folder"),
        (("--picture", "x.html"), "--picture: was removed in 0.3; the table has the rows"),
        (("--steps", "3"), "--steps: 3; must be at least 5"),
        (
            ("services.rollout=[{replicas: 1}, {replicas: 1, engine: vllm}]",),
            "services.rollout: fleets of different engines or sizes are not modelled",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [one for one in arguments if "=" in one and not one.startswith("--") and arguments[0] != "--sweep"]
    options = [one for one in arguments if one not in overrides]
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", str(QUICKSTART), *overrides, *options])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_sigterm_leaves_no_folder_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ended(self: Simulation) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(simulate, "MEMORY", tmp_path)
    monkeypatch.setattr(Simulation, "run", ended)
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", str(QUICKSTART)])
    assert end.value.code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_short_run_measures_nothing() -> None:
    with pytest.raises(UserError, match="2 steps are too few"):
        observe([{"timing/all": 1.0}] * 2, [])
