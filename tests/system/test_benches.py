"""The benches that are real programs, each once and in its cheapest form: that it measures what it says, and what fails is
told. No speed is asserted."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from rich.console import Console

from benchmarks import concurrency, coordinator, engines, gateway, messages, rollout, startup
from benchmarks.concurrency import GROUP, RULE, SLOTS, ConcurrencyReport, ConcurrencySettings, PaceReport, ToolPace, Way
from benchmarks.engines import EnginesSettings
from benchmarks.gateway import OURS, PLAIN, GatewayBenchSettings, GatewayPace
from benchmarks.gateway_script import write_model
from benchmarks.messages import PLAIN as BARE
from benchmarks.messages import STREAM, TLS, TOKEN, UNARY
from benchmarks.packing import PackingSettings as Samples
from benchmarks.packing import PackingShape, packing_config
from benchmarks.rollout import RolloutBenchSettings
from benchmarks.weight_sync import pauses
from benchmarks.weight_sync import ways as plain
from benchmarks.weight_sync.bench import WeightSyncSettings
from benchmarks.weight_sync.bench import measure as measure_weight_sync
from benchmarks.weight_sync.bench import render as render_weight_sync
from benchmarks.weight_sync.in_run import InRunSettings
from benchmarks.weight_sync.peers import TRANSPORTS
from benchmarks.worker import Worker
from runtime import types
from runtime.errors import ServiceFault
from runtime.types import GeneratedGroup, GroupPayload, PolicyVersion, Sample
from tests.system.runs import VLLM_PYTHON, needs_vllm

pytestmark = pytest.mark.timeout(300)


def text_of(tables: Any) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


# ------------------------------------------------------------------------------------------------ concurrency

SHORT = ToolPace(0.0, (1,), 1.0, 1.0, 2.0)


def test_the_rule_and_fixed_numbers_are_given_the_same_programs() -> None:
    told: list[str] = []
    report = concurrency.run(ConcurrencySettings(rounds=1, paces=(SHORT,)), told.append)
    (pace,) = report.paces
    assert [way.name for way in pace.ways] == ["1", RULE]
    fixed, rule = pace.ways
    for way in pace.ways:
        assert len(way.tokens_per_second) == 1 and way.tokens_per_second[0] > 0
        assert 0 < way.running[0] <= SLOTS
    assert 0 < fixed.episodes[0] <= SLOTS // GROUP * GROUP < rule.episodes[0]
    assert report.ratios == [pace.ratios] == [[rule.tokens_per_second[0] / fixed.tokens_per_second[0]]]
    assert told[0] == "tools of 0 s: the rule finds its number" and told[-1] == "tools of 0 s, round 1 of 1: 1"


@pytest.mark.long
def test_programs_that_fail_fail_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their conversations has room for a second turn."""
    monkeypatch.setattr(concurrency, "CONTEXT", concurrency.REPLY + 64)
    with pytest.raises(ServiceFault, match=r'programs: play: failed: \{"400":'):
        concurrency.run(ConcurrencySettings(rounds=1, paces=(replace(SHORT, measure=10.0),)))  # a busy machine's first turn


def test_the_ratio_is_to_the_best_of_each_round() -> None:
    ways = [Way("2", [100.0, 50.0], [8.0], [8.0], [0.0]), Way("4", [80.0, 60.0], [16.0], [16.0], [2.0])]
    pace = PaceReport(1.0, [*ways, Way(RULE, [90.0, 66.0], [12.0], [12.0], [1.0])])
    assert pace.ratios == [0.9, 1.1]
    text = text_of(concurrency.render(ConcurrencyReport(SLOTS, [pace], [pace.ratios])))
    assert "1 s: 0.90, 1.10" in text and "measured" in text and "75" in text


# ------------------------------------------------------------------------------------------------ training engines

TINY = EnginesSettings(
    PackingShape(32, 1, 2, 1, 64), rounds=2, seconds=0.1, checkpoints=1, samples=Samples(prompt_tokens=20, reply_tokens=24)
)


def test_both_engines_run_and_save(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    report = asyncio.run(engines.measure(tmp_path, TINY))
    assert report.engines.keys() == {"torch", "megatron"}
    for engine in report.engines.values():
        assert min(engine.tokens_per_second, engine.save_seconds, engine.load_seconds) > 0
    assert len(report.megatron_over_torch.pairs) == 2


def test_what_a_worker_leaves_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are killed at their end, with a checkpoint on their disk."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def measured() -> list[str]:
        async with Worker.started(packing_config(tmp_path, TINY.shape, TINY.budget, TINY.samples), 1) as worker:
            assert (await worker.measure(engines.SAVE, 0.0)).seconds > 0
            return [path.name for path in temporary.rglob("*")]

    assert "checkpoint" in asyncio.run(measured())
    assert list(temporary.iterdir()) == []


# ------------------------------------------------------------------------------------------------ gateway

CONTEXT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script") / "model"
    write_model(folder, CONTEXT)
    return folder


def test_the_gateway_and_a_plain_server_are_given_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "DEFAULT_PYTHON", tmp_path / "python")  # which is not there
    settings = GatewayBenchSettings(episodes=8, turns=3, group=4, paces=(GatewayPace(0.01, 0.0),))
    report = gateway.run(settings, None)
    assert [load.server for load in report.loads] == [OURS, PLAIN]
    for load in report.loads:
        assert (load.calls, load.failures) == (8 * 3, {})
        assert load.latencies[0] >= 0.005, "a reply takes half of its pace at least"
        assert load.cpu_seconds >= 0 and load.memory > 1 << 20  # the kernel counts in hundredths of a second
        assert 0 <= load.lags[0] <= load.lags[1] <= load.lags[2]
    text = text_of(gateway.render(report))
    assert "8 episodes at once, 3 turns each" in text
    assert "vLLM is left out" in text and "none" in text


def group(turns: int, rows: int) -> GeneratedGroup:
    """Of two episodes."""
    mask = np.array([0, 1] * turns, np.uint8)
    size = len(mask)
    columns = {"tokens": np.zeros(size, np.int32), "logprobs": np.zeros(size, np.float32), "versions": np.zeros(size, np.int64)}
    sample = Sample(loss_mask=mask, finish_reason="stop", **columns)
    payload = GroupPayload.of(3, np.zeros(1, np.int32), [sample] * (rows + 1), [rows, 1])
    return GeneratedGroup(
        group_id=3,
        prompt_tokens=1,
        response_tokens=payload.lengths.tolist(),
        truncated=0,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        payload=types.encode(payload),
    )


def test_episodes_that_fork_or_lose_a_reply_fail_the_bench() -> None:
    gateway.check([group(turns=3, rows=1)], turns=3)
    with pytest.raises(ServiceFault, match="2 episodes of 3 turns are 3 rows with 9 trained replies"):
        gateway.check([group(turns=3, rows=2)], turns=3)
    with pytest.raises(ServiceFault, match="2 episodes of 3 turns are 2 rows with 4 trained replies"):
        gateway.check([group(turns=2, rows=1)], turns=3)


# ------------------------------------------------------------------------------------------------ messages, coordinator

SAMPLES = 4096  # some 400 ms of the coordinator's, which the system counts in ticks of 10 ms


def test_messages_are_answered_by_every_way() -> None:
    report = messages.run(messages.MessagesSettings(rounds=2, pings=5, calls=40, in_flight=(4, 16)))
    assert report.pings.keys() == {BARE, STREAM, TOKEN, TLS, UNARY}
    assert all(0 < each.p50 <= each.p90 for each in report.pings.values())
    assert report.rates.keys() == {4, 16}
    assert all(rates.keys() == {BARE, STREAM, TOKEN, TLS} for rates in report.rates.values())
    assert report.ratios.keys() == {4, 16} and report.ping_ratios.keys() == {STREAM, TOKEN, TLS, UNARY}
    assert len(messages.render(report)) == 2


@pytest.mark.long
def test_a_run_over_engines_that_compute_nothing_costs_the_coordinator_something(tmp_path: Path) -> None:
    settings = coordinator.CoordinatorBenchSettings(replicas=(1, 3), groups=2, samples=SAMPLES, warm=1, rounds=1)
    report = asyncio.run(coordinator.measure(tmp_path / "inputs", settings))
    assert [(cost.replicas, cost.samples >= SAMPLES) for cost in report.costs] == [(1, True), (3, True)]
    assert all(cost.cpu_seconds > 0 and cost.seconds > 0 for cost in report.costs)
    assert len(coordinator.render(report)) == 1


# ------------------------------------------------------------------------------------------------ weight sync


@pytest.mark.long
def test_a_megabyte_goes_every_way(tmp_path: Path) -> None:
    tiny = pauses.PausesModel("tiny", PackingShape(64, 1, 2, 1, 64), "float32")
    settings = WeightSyncSettings(
        (1,),
        1,
        rounds=1,
        generation=pauses.PausesSettings((tiny,), rounds=1, seconds=0.5),
        runs=(InRunSettings(tiny.shape, steps=2),),
        versions=3,
    )
    report = asyncio.run(measure_weight_sync(tmp_path, settings))
    (sized,) = report.transfers.sizes
    assert report.transfers.receivers == 1
    assert sized.ways.keys() >= {plain.GLOO, plain.COPY, plain.HASHED, plain.BUCKETS, plain.ONE_BY_ONE, plain.DISK}
    assert (plain.RAY in sized.ways) == (importlib.util.find_spec("ray") is not None)
    assert (plain.RAY in sized.left_out) != (plain.RAY in sized.ways)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in sized.ways.values())
    assert sized.published.keys() == set(TRANSPORTS)
    for transport, found in sized.published.items():
        assert found.seconds[0] > 0
        assert found.baseline_seconds[0] > 0
        assert found.bytes > (0 if transport == "delta" else 1_000_000)
    assert min(sized.passes.checksum, sized.passes.copy, sized.passes.gather) > 0
    (run,) = report.runs
    assert run.first > 0
    assert run.peak > 1 << 20
    assert [len(metrics) for metrics in run.later] == [7, 7]
    (held,) = report.generation
    assert held.pauses.updates >= 1
    assert held.quiet.tokens > 0
    assert held.worth > 0
    assert len(report.changes.bytes) == len(report.changes.changed) == 3
    assert all(0 < share < 0.1 for share in report.changes.changed)
    assert all(one.left <= 1.05 * one.model for one in report.spread)
    assert all(one.total("shared_memory") >= 7 * one.model for one in report.spread if one.receivers == 8)
    assert len(render_weight_sync(report)) == 7
    assert not list(tmp_path.glob("weight sync-*"))
    assert not list(plain.SHARED_MEMORY.glob("weight sync-*"))


# ------------------------------------------------------------------------------------------------ rollouts

SMALL = RolloutBenchSettings(shapes=(PackingShape(128, 1, 4, 2, 64),), sequences=(8, 16), rounds=2, seconds=0.5, updates=2)


@pytest.mark.long
@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_both_engines_are_measured(tmp_path: Path) -> None:
    report = asyncio.run(rollout.measure(tmp_path, str(VLLM_PYTHON), SMALL))
    assert [case.sequences for case in report.cases] == [8, 16]
    for case in report.cases:
        assert case.tokens_per_second.keys() == {"torch", "vllm"}
        assert all(rate > 0 for rate in case.tokens_per_second.values())
        assert len(case.ratios) == 2
        assert len(case.own_ratios) == 2
        for found in (*case.pauses.values(), case.own_pauses):
            assert found.updates == 4
            assert 0 < found.p50 <= found.p99
    assert report.start_seconds["1 layers of 128"]["vllm"] > 0
    text = text_of(rollout.render(report))
    assert "vllm / torch" in text
    assert "vllm / own" in text


# ------------------------------------------------------------------------------------------------ startup


def test_idle_processes_are_started_counted_and_ended() -> None:
    before = {*psutil.Process().children()}
    found = asyncio.run(startup._idle("sluice", 2))
    assert found.processes == 3
    assert 0 < found.seconds < startup.DEADLINE
    assert 0 < found.memory.pss_bytes <= found.memory.rss_bytes
    left = {*psutil.Process().children()} - before
    assert not [child for child in left if child.is_running() and child.status() != "zombie"]
