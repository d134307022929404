"""`sluice bench packing`: both sides train the same, and its figures are what they say. No speed is asserted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import packing
from benchmarks.packing import PackingSettings, PackingShape, packing_config, waste
from benchmarks.packing_trial import (
    APART,
    PACKED,
    SORTED,
    TREE_TOKENS,
    TREES,
    UNSORTED,
    WAYS,
    PackingTrial,
    cut_as_they_come,
)
from benchmarks.worker import Bench, Measured, Worker
from launcher.accept.random_groups import GroupLengths, draw_lengths
from runtime.config import Config
from tests.closeness import STEP, assert_close

pytestmark = pytest.mark.numeric

TINY = PackingSettings(
    shapes=(PackingShape(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48),),
    budgets=(300,),
    rounds=2,
    seconds=0.0,
    prompt_tokens=24,
    reply_tokens=48,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("packing")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return packing_config(folder, TINY.shapes[0], TINY.budgets[0], TINY)


def test_every_way_takes_the_same_steps(config: Config):
    trial = PackingTrial(config)
    for index in (0, 1):
        steps = {way: trial.step(way, index) for way in WAYS}
        assert steps[PACKED][1] > 0
        for way in (SORTED, UNSORTED):
            for got, wanted in zip(steps[way], steps[PACKED], strict=True):
                assert_close(got, wanted, terms=STEP, what=way)


def test_a_measure_counts_real_tokens_of_whole_passes(config: Config):
    bench = Bench(config)
    real = sum(prompt + reply for batch in draw_lengths(config) for prompt, replies in batch for reply in replies)
    for way in WAYS:
        measured = bench.measures[way](0.0)
        assert measured.count == real
        assert measured.seconds > 0


def test_of_trees_each_branch_counts_whole(folder: Path):
    """Whether its tokens are computed once or with every branch."""
    bench = Bench(packing_config(folder, TINY.shapes[0], 8192, TINY))
    for way in (TREES, APART):
        assert bench.measures[way](0.0).count == TREE_TOKENS
    metrics = [bench._trial.tree_step(way) for way in (TREES, APART)]
    assert all(norm > 0 for _, norm in metrics)


def test_lengths_have_a_long_tail_within_their_limits(folder: Path):
    lengths = draw_lengths(packing_config(folder, TINY.shapes[0], 8192, PackingSettings()))
    replies = torch.tensor([reply for batch in lengths for group in batch for reply in group.replies]).double()
    prompts = [group.prompt for batch in lengths for group in batch]
    assert (replies.min(), replies.max()) == (16, 512)
    assert 16 <= min(prompts) < max(prompts) <= 128
    assert {len(group.replies) for batch in lengths for group in batch} == {8}
    assert replies.mean() > 1.2 * replies.median()


def test_waste_by_hand():
    batches = [[GroupLengths(4, [6, 2]), GroupLengths(2, [10])]]  # samples of 10, 6 and 12 tokens
    # As they come: [10, 6] and [12]; sorted: [6, 10] and [12], in 20 tokens each.
    padded = packing.Waste(linear=4 / 32, attention=4 / 32, computed=32 / 28)
    assert waste(UNSORTED, batches, 20) == waste(SORTED, batches, 20) == padded
    # Packed, in two micro-batches: a prompt of 4 with replies of 1 and 5, and 2 with 9. Rows of 5 and 9 are too unlike for one
    # attention call.
    assert waste(PACKED, batches, 20) == packing.Waste(linear=0.0, attention=0.0, computed=(4 + 1 + 5 + 2 + 9) / 28)
    # With all in one micro-batch the rows of 9 and 11 share a call.
    together = waste(PACKED, batches, 100)
    assert together.attention == pytest.approx(2 / (5 + 2 * 11))
    assert waste(UNSORTED, [[GroupLengths(1, [1, 9]), GroupLengths(1, [1])]], 20).linear == pytest.approx(8 / (20 + 2))


def test_waste_is_what_the_engine_reports(config: Config):
    trial = PackingTrial(config)
    trial._engine.begin_step(0)
    trial._engine.accumulate(trial.groups[0])
    reported = trial._engine.apply().metrics["padding_waste"]
    assert 0 < reported < 0.5
    assert waste(PACKED, trial.lengths[:1], TINY.budgets[0]).attention == pytest.approx(reported)


@pytest.mark.parametrize("budget", [1, 20, 50, 1000])
def test_cuts_as_they_come_keep_their_order_and_fit(budget: int):
    lengths = [5, 9, 1, 1, 12, 3, 3, 3, 20, 2]
    batches = cut_as_they_come(lengths, budget)
    assert list(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)
    following = itertools.pairwise(batches)
    assert all((len(batch) + 1) * max(lengths[i] for i in [*batch, after[0]]) > budget for batch, after in following)


def test_the_report_sums_over_rounds(folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    class Told:
        async def measure(self, what: str, seconds: float) -> Measured:
            asked.append(what)
            slow = {PACKED: 1.0, SORTED: 2.0, UNSORTED: 4.0, TREES: 1.0, APART: 3.0}[what]
            return Measured(1000.0, slow if asked.count(what) == 1 else 3 * slow)

    @asynccontextmanager
    async def started(config: Config, threads: int) -> AsyncIterator[Told]:
        assert threads == 1
        yield Told()

    monkeypatch.setattr(Worker, "started", started)
    report = asyncio.run(packing.measure(folder, TINY))
    assert asked == [*WAYS, *WAYS, TREES, APART, TREES, APART]  # in turn
    (case,) = report.cases
    assert {name: way.tokens_per_second for name, way in case.ways.items()} == {PACKED: 500.0, SORTED: 250.0, UNSORTED: 125.0}
    assert (case.packed_over_sorted, case.packed_over_unsorted) == (2.0, 4.0)
    assert case.ways[PACKED].waste.linear == 0
    assert 0 < case.ways[SORTED].waste.linear < case.ways[UNSORTED].waste.linear
    assert report.samples_per_step == 64
    assert report.real_tokens_per_step == PackingTrial(config).real_tokens / 2
    (trees,) = report.trees
    assert (trees.tokens_per_second, trees.ratio) == ({TREES: 500.0, APART: pytest.approx(500 / 3)}, pytest.approx(3.0))
    ways, table = packing.render(report)
    assert (ways.row_count, table.row_count) == (3, 1)
