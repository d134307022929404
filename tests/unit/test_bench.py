"""The benches: that they measure what they say, on tiny settings and given numbers; no speed is asserted."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks import (
    command,
    engine,
    engines,
    every,
    learning,
    learning_trial,
    packing,
    packing_trial,
    train,
    train_trl,
    worker,
)
from benchmarks.compared import Compared, Measurement
from benchmarks.drafts_trial import DRAFT_WAYS
from benchmarks.engines import LOAD, PASSES, SAVE, EnginesSettings
from benchmarks.inputs import bench_config
from benchmarks.intervals import t_interval, t_quantile, wilson
from benchmarks.learning import PLAIN, SLUICE, LearningPoint, LearningSettings, LearningTrial
from benchmarks.packing import PackingSettings, PackingShape, packing_config, waste
from benchmarks.packing_trial import APART, PACKED, SORTED, TREES, UNSORTED, WAYS, PackingTrial, cut_as_they_come
from benchmarks.plain_loop import PlainLoop
from benchmarks.publication import bench as publishing
from benchmarks.publication import pauses
from benchmarks.publication import ways as plain
from benchmarks.publication.changes import Changes
from benchmarks.publication.in_run import InRun
from benchmarks.publication.pauses import Held, PauseWindow
from benchmarks.publication.tensors import read_sizes
from benchmarks.publication.transfers import MemoryPasses, Sized, Transfers, TransportFigures, rates, spread
from benchmarks.rollout import Pauses
from benchmarks.worker import Bench, Measured, Worker
from launcher.accept.random_groups import GroupLengths
from runtime.config import Config, Run, model_checks
from runtime.errors import ServiceFault, UserError
from runtime.status import Progress
from tests.closeness import STEP, assert_close


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    torch.set_num_threads(1)
    return bench_config(tmp_path_factory.mktemp("bench") / "inputs")


@pytest.fixture(scope="module")
def loop(config: Config) -> PlainLoop:
    return PlainLoop(config)


# ---------------------------------------------------------------------------------------------- the plain loop


def test_plain_generation_follows_the_model(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy replies are the argmax of transformers' own forward pass, with prompts of different lengths side by side."""
    monkeypatch.setattr(PlainLoop, "_sample", lambda self, logits: logits.argmax(-1))
    loop = PlainLoop(config)
    prompts = [[65, 66, 67, 68, 69, 70, 71], [72, 73], [1, 90, 5, 100]]
    tokens, size = loop.generate(prompts).tokens, loop._group_size
    for number, prompt in enumerate(prompts):
        (reply,) = {tuple(reply) for reply in tokens[number * size : (number + 1) * size]}
        with torch.no_grad():
            logits = loop._model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(reply)


def test_plain_replies_end_once_and_rows_leave(config: Config) -> None:
    stops = set(PlainLoop(config)._tokenizer.eos_ids)
    loop = PlainLoop(config, seed=3)
    replies = loop.generate(loop.prompts()[0])
    assert len(replies.tokens) == loop.samples_per_step
    assert replies.decoded == sum(len(reply) - 1 for reply in replies.tokens)
    for reply in replies.tokens:
        assert 1 <= len(reply) <= config.sampling.max_new_tokens
        assert not stops & set(reply[:-1])
        assert reply[-1] in stops or len(reply) == config.sampling.max_new_tokens
    lengths = torch.tensor([float(len(reply)) for reply in replies.tokens])
    assert 8 < lengths.mean() < 24, "the replies are 15 tokens long on average"


def test_plain_gradient_is_grpos(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over reply tokens of -advantage * grad log p; the KL's gradient is 0 at the reference itself."""
    prompts, replies = [[10, 11, 12], [10, 11, 12], [30]], [[40, 41], [42], [43, 44, 45, 46]]
    advantages = torch.tensor([1.0, -0.5, 2.0])
    parameters = list(loop._model.parameters())
    loss = torch.zeros(())
    for prompt, reply, advantage in zip(prompts, replies, advantages, strict=True):
        logits = loop._model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        loss = loss - advantage * torch.log_softmax(logits, -1)[range(len(reply)), reply].sum() / 7
    expected = torch.autograd.grad(loss, parameters)
    norm = torch.stack([each.norm() for each in expected]).norm()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(loop._optimizer, "step", lambda: seen.extend(p.grad.clone() for p in parameters))
    monkeypatch.setattr(loop._schedule, "step", lambda: None)  # which would ask for a step before it
    loop._train(prompts, replies, advantages)
    for got, wanted in zip(seen, expected, strict=True):
        clipped = wanted * min(1.0, 1.0 / float(norm))
        assert_close(got, clipped, terms=STEP, scale=float(clipped.norm()))


# ---------------------------------------------------------------------------------------------- the measures


def test_every_measure_counts_what_was_done(config: Config) -> None:
    bench = Bench(replace(config, training=replace(config.training, groups_per_step=2)))
    for what in ("decode", "generate", "reference", "train", "plain", "plain decode", *DRAFT_WAYS[:2]):
        measured = bench.measures[what](0.001)
        assert measured.seconds >= 0.001
        assert measured.count == int(measured.count) > 0, what
    tokens = [count for batch in bench._batches for group in batch for count in group.response_tokens]
    assert 8 < sum(tokens) / len(tokens) < 24, "15 on average"


def test_a_worker_answers_and_ends_with_its_block(config: Config) -> None:
    async def measure() -> tuple[Measured, int | None]:
        async with Worker.started(config, 1) as worker:
            measured = await worker.measure("decode", 0.01)
        return measured, worker._process.returncode

    measured, code = asyncio.run(measure())
    assert measured.count > 0 and code is not None


def test_ratios_are_of_totals_and_drafts_are_compared_pair_by_pair() -> None:
    assert worker.total([Measured(10, 1.0), Measured(20, 4.0)]).rate == 6.0
    pairs = engine.DraftedDecoding(drafts=[30.0, 10.0, 8.0], none=[10.0, 10.0, 4.0])
    report = engine.EngineBenchReport(engine.Decoding(30.0, 40.0), engine.Decoding(10.0, 16.0), [3.1, 2.9], {"alike": pairs})
    assert report.ratio == engine.Decoding(3.0, 2.5)
    assert [one.values for one in engine.compared(report)] == [[3.1, 2.9], [3.0, 1.0, 2.0]]
    assert list(map(str, engine.render(report)[1].columns[3].cells)) == ["2.00 (1.00 - 3.00)"]


@pytest.mark.parametrize("trl", [{}, {1: [Measured(320, 4.0)] * 2, 2: [Measured(640, 10.0), Measured(640, 6.0)]}])
def test_the_train_report_is_made_of_its_parts(config: Config, trl: dict[int, list[Measured]]) -> None:
    windows = [
        train.SteadyWindow(steps=10, seconds=1.0, cpu={"trainer-0": 1.0, "reward-0": 0.4}, wake_ups={"trainer-0": 640}),
        train.SteadyWindow(steps=10, seconds=3.0, cpu={"trainer-0": 2.0, "reward-0": 0.4}, wake_ups={"trainer-0": 1280}),
    ]
    for window in windows:
        window.wake_ups["reward-0"] = 0
    alone = {"train": [Measured(320, 0.5)] * 2, "generate": [Measured(320, 0.4)] * 2, "reference": [Measured(320, 0.2)] * 2}
    plain = [Measured(100, 1.0), Measured(100, 1.0)]
    pairs = [(Measured(80, 1.0), Measured(80, 1.0))] * 2
    report = train._report(config, windows, plain, pairs, alone, trl)
    assert report.samples_per_step == 64
    assert report.pipeline == pytest.approx(64 * 20 / 4.0)
    assert report.step_seconds == pytest.approx({"train": 0.1, "generate": 0.08, "reference": 0.04})
    assert report.bound == pytest.approx(64 / 0.12)
    assert report.pipeline_over_bound == pytest.approx(320 / (64 / 0.12))
    assert report.pipeline_over_plain == pytest.approx(2.0)
    assert report.cpu_seconds == pytest.approx({"trainer-0": 0.15, "reward-0": 0.04})
    assert report.wake_ups == pytest.approx({"trainer-0": 1.5, "reward-0": 0.0})
    # The engines' 220 ms and the reward's 40 on two cores: 130 ms a step.
    assert report.bound_with_services == pytest.approx(64 / 0.13)
    assert [one.run for one in report.rounds] == pytest.approx([640.0, 640 / 3])
    bound, over_plain, *_ = train.compared(report)
    assert bound.values == pytest.approx([640 * 0.12 / 64, 640 * 0.12 / 64 / 3])
    assert over_plain.values == pytest.approx([4.0, 4 / 3])
    rates, _ = train.render(report)
    _, text = printed([rates])
    if trl:
        assert report.trl == {1: 80.0, 2: 80.0}
        assert report.pipeline_over_trl == pytest.approx(4.0)
        assert "run / faster TRL (aim 5)" in text
        assert train.compared(report)[2].values == pytest.approx([8.0, 2.0])
        assert "left out" not in text
    else:
        assert (report.trl, report.pipeline_over_trl) == ({}, None)
        assert "TRL is left out: there is no .venv-trl/bin/python" in text
        assert "GRPOTrainer" not in text


def test_the_probe_keeps_the_steady_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train, "used", lambda: {"trainer-0": train.ProcessUse(2 * now[0], round(100 * now[0]))})
    probe = train.Probe(first=3, last=8)
    for step in (1, 2, 4, 6, 9, 10):
        now[0] = step / 10
        probe.progress(Progress(phase="training", step=step, steps=10))
    window = probe.window()
    assert (window.steps, window.seconds) == (5, pytest.approx(0.5))
    assert window.cpu == {"trainer-0": pytest.approx(1.0)}
    assert window.wake_ups == {"trainer-0": 50}
    early = train.Probe(first=3, last=8)
    early.progress(Progress(phase="training", step=5, steps=10))
    with pytest.raises(ServiceFault, match="did not reach step 8"):
        early.window()


# ---------------------------------------------------------------------------------------------- TRL


def _fake_trl(folder: Path, lines: str) -> str:
    """An interpreter that runs these lines in the place of the trial."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\nasked = json.load(sys.stdin)\n{lines}\n")
    script.chmod(0o755)
    return str(script)


def test_trl_is_asked_for_the_same_steps(config: Config, tmp_path: Path) -> None:
    asked = {"samples": 64, "group_size": 8, "max_new_tokens": 64, "kl_coefficient": 0.003, "learning_rate": 1e-6}
    asked |= {"betas": [0.9, 0.95], "threads": 2, "warm": 5, "steps": 20}
    lines = (
        f"found = {{name: asked[name] for name in {[*asked]}}} | {{'env': os.environ['OMP_NUM_THREADS']}}\n"
        f"open({str(tmp_path / 'asked')!r}, 'w').write(json.dumps(found))\n"
        "print('a line of its own')\n"
        "print(json.dumps({'count': 1280, 'seconds': 20.0, 'tokens': len(asked['tokens'])}))"
    )
    measured = asyncio.run(train_trl.trial(config, _fake_trl(tmp_path, lines), threads=2, warm=5, steps=20))
    assert measured == Measured(1280, 20.0)
    assert json.loads((tmp_path / "asked").read_text()) == asked | {"env": "2"}
    python = _fake_trl(tmp_path, "raise SystemExit('ModuleNotFoundError: no trl')")
    with pytest.raises(ServiceFault, match="ModuleNotFoundError: no trl"):
        asyncio.run(train_trl.trial(config, python, threads=1, warm=1, steps=1))


def test_a_bench_that_is_terminated_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60.0)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(command.BENCHES, "engine", lambda options, show: asyncio.run(measure()))  # type: ignore[arg-type, return-value]
    with pytest.raises(KeyboardInterrupt):
        command.run("engine", command.Options())
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ engines


def told(monkeypatch: pytest.MonkeyPatch, count: float, seconds: Callable[[str, Config], float]) -> None:
    """Let workers answer with `count` in that many seconds."""

    @asynccontextmanager
    async def started(config: Config, threads: int) -> AsyncIterator[Any]:
        async def measure(what: str, _: float) -> Measured:
            return Measured(count, seconds(what, config))

        assert threads == 1
        yield SimpleNamespace(measure=measure)

    monkeypatch.setattr(Worker, "started", started)


def test_the_engines_take_turns_and_the_report_pairs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def seconds(what: str, config: Config) -> float:
        asked.append((config.services.trainer.engine, what))
        return {PASSES: 1.0, SAVE: 3.0, LOAD: 5.0}[what] * (2.0 if config.services.trainer.engine == "megatron" else 1.0)

    told(monkeypatch, 100.0, seconds)
    monkeypatch.setattr(engines, "packing_config", lambda *_: Config(run=Run(name="bench")))
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    report = asyncio.run(engines.measure(tmp_path, EnginesSettings(rounds=2, checkpoints=1)))
    passes = [engine for engine, what in asked if what == PASSES]
    assert passes[2:] == ["megatron", "torch", "torch", "megatron"]  # after those that build the engines
    assert report.megatron_over_torch.pairs == [0.5, 0.5]
    assert report.megatron_over_torch.median == 0.5
    core = report.engines["megatron"]
    assert (core.tokens_per_second, core.save_seconds, core.load_seconds) == (50.0, 6.0, 10.0)
    assert engines.render(report)[0].row_count == 2
    monkeypatch.setattr(model_checks, "_installed", lambda: False)
    with pytest.raises(UserError, match=r"bench engines: .*megatron needs a package: pip install"):
        asyncio.run(engines.measure(tmp_path, EnginesSettings()))


# ------------------------------------------------------------------------------------------------ packing


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
def bench(folder: Path) -> Bench:
    """Of two groups a step."""
    config = packing_config(folder, TINY.shapes[0], TINY.budgets[0], TINY)
    return Bench(replace(config, training=replace(config.training, groups_per_step=2)))


@pytest.mark.numeric
def test_every_way_takes_the_same_steps_and_a_measure_counts_real_tokens(bench: Bench) -> None:
    trial = bench._trial
    for index in (0, 1):
        steps = {way: trial.step(way, index) for way in WAYS}
        assert steps[PACKED][1] > 0
        for way in (SORTED, UNSORTED):
            for got, wanted in zip(steps[way], steps[PACKED], strict=True):
                assert_close(got, wanted, terms=STEP, what=way)
    for way in WAYS:
        measured = bench.measures[way](0.0)
        assert measured.count == sum(
            prompt + reply for batch in trial.lengths for prompt, replies in batch for reply in replies
        )
        assert measured.seconds > 0


def test_of_trees_each_branch_counts_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its tokens are computed once or with every branch."""
    small = {"BRANCHES": 3, "BRANCH_TOKENS": 80, "SHARED_TOKENS": 60, "PROMPT_TOKENS": 20, "TREE_TOKENS": 4 * 3 * 80}
    for name, value in small.items():
        monkeypatch.setattr(packing_trial, name, value)
    monkeypatch.setattr(worker, "TREE_TOKENS", 4 * 3 * 80)
    for way in (TREES, APART):
        assert bench.measures[way](0.0).count == 4 * 3 * 80
        assert bench._trial.tree_step(way)[1] > 0


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


@pytest.mark.numeric
def test_waste_is_what_the_engine_reports(bench: Bench) -> None:
    trial = bench._trial
    trial._engine.begin_step(trial._engine.step)
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


def test_the_report_sums_over_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def seconds(what: str, config: Config) -> float:
        asked.append(what)
        slow = {PACKED: 1.0, SORTED: 2.0, UNSORTED: 4.0, TREES: 1.0, APART: 3.0}[what]
        return slow if asked.count(what) == 1 else 3 * slow

    told(monkeypatch, 1000.0, seconds)
    report = asyncio.run(packing.measure(folder, TINY))
    assert asked == [*WAYS, *WAYS, TREES, APART, TREES, APART]  # in turn
    (case,) = report.cases
    assert {name: way.tokens_per_second for name, way in case.ways.items()} == {PACKED: 500.0, SORTED: 250.0, UNSORTED: 125.0}
    assert (case.packed_over_sorted, case.packed_over_unsorted) == (2.0, 4.0)
    assert case.ways[PACKED].waste.linear == 0
    assert 0 < case.ways[SORTED].waste.linear < case.ways[UNSORTED].waste.linear
    assert report.samples_per_step == 64
    config = packing_config(folder, TINY.shapes[0], TINY.budgets[0], TINY)
    assert report.real_tokens_per_step == PackingTrial(config).real_tokens / 2
    (trees,) = report.trees
    assert (trees.tokens_per_second, trees.ratio) == ({TREES: 500.0, APART: pytest.approx(500 / 3)}, pytest.approx(3.0))
    ways, table = packing.render(report)
    assert (ways.row_count, table.row_count) == (3, 1)


# ------------------------------------------------------------------------------------------------ learning


def _trials(seconds: list[float | None]) -> list[LearningTrial]:
    return [LearningTrial(seed, [], None if took is None else 10 * seed, took) for seed, took in enumerate(seconds, 1)]


def test_the_report_has_medians_and_ratios() -> None:
    one, two = PLAIN.values()
    trials = {SLUICE: _trials([10.0, 30.0, 14.0]), one: _trials([20.0, 20.0, 28.0]), two: _trials([40.0, 60.0, 28.0])}
    made = learning.report(LearningSettings(seeds=3), trials)
    assert made.seconds == {SLUICE: 14.0, one: 20.0, two: 40.0}
    assert made.ratios == {one: [0.5, 1.5, 0.5], two: [0.25, 0.5, 0.5]}
    assert made.ratio == pytest.approx(0.7)
    _, text = printed(learning.render(made))
    assert "medians, sluice train / faster plain loop: 0.70 (aim: at most 1.1)" in text
    assert "10.0, 30.0, 14.0" in text
    trials = {SLUICE: _trials([10.0, None]), one: _trials([20.0, 20.0]), two: _trials([None, 40.0])}
    made = learning.report(LearningSettings(seeds=2), trials)
    assert (made.seconds, made.ratio) == ({SLUICE: None, one: 20.0, two: None}, None)
    assert made.ratios == {one: [0.5, None], two: [None, None]}
    rows = [(0, 100.0, 0.5), (9, 103.0, None), (10, 104.5, 0.9)]
    course = learning.points(
        [{"step": step, "time": at} | ({"eval/accuracy": found} if found else {}) for step, at, found in rows]
    )
    assert course == [LearningPoint(0, 0.0, 0.5), LearningPoint(10, 4.5, 0.9)], "from the evaluation before training on"
    reached = [(trial.step, trial.seconds) for trial in (LearningTrial.of(1, course, 0.9), LearningTrial.of(1, course, 0.96))]
    assert reached == [(10, 4.5), (None, None)]


# ---------------------------------------------------------------------------------------------- the plain loop


def test_the_plain_loop_scores_as_the_rules_do(loop: PlainLoop) -> None:
    replies = [loop._tokenizer._tokenizer.encode(text).ids for text in ("1 6 #### 61", "1 6 #### 51", "61")]
    assert loop._score(replies, ["61"]) == pytest.approx([1.1, 0.1, 0.0])


def test_the_plain_loops_accuracy_is_of_greedy_replies(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[65, 66, 67], [72, 73]]
    replies = loop.generate(prompts, greedy=True).tokens
    assert replies == loop.generate(prompts, greedy=True).tokens
    assert len(replies) == 2
    answers = ["7", None]
    monkeypatch.setattr(loop, "_answers", lambda found: answers if found == replies else pytest.fail("other replies"))
    assert loop.accuracy(prompts, ["7", "8"]) == 0.5


def test_the_plain_loop_ramps_its_learning_rate(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = replace(config.training.optimizer, learning_rate=1e-3, warmup_steps=2)
    loop = PlainLoop(replace(config, training=replace(config.training, optimizer=optimizer)))
    rates = []
    for _ in range(3):
        rates.append(loop._optimizer.param_groups[0]["lr"])
        loop._optimizer.step()
        loop._schedule.step()
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_the_plain_loop_learns_until_the_goal(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.2, 0.5, 0.92, 1.0])
    steps: list[int] = []
    monkeypatch.setattr(PlainLoop, "accuracy", lambda self, prompts, labels: next(found))
    monkeypatch.setattr(PlainLoop, "step", lambda self: steps.append(1))
    held_out = replace(config, data=replace(config.data, eval=config.data.train))
    course = learning_trial.learn(held_out, goal=0.9, every=2, steps=20)
    assert [(step, accuracy) for step, _, accuracy in course] == [(0, 0.2), (2, 0.5), (4, 0.92)]
    assert course[0][1] == 0.0 < course[1][1] < course[2][1]
    assert len(steps) == 4


# ------------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_published_intervals(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3; the mirror image by symmetry."""
    got, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
    assert (got.low, got.high) == pytest.approx((low, high), abs=5e-5)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=5e-5)


def test_t_quantiles_agree_with_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 8: 2.3060, 9: 2.2622, 10: 2.2281, 30: 2.0423}
    assert {freedom: t_quantile(0.95, freedom) for freedom in table} == pytest.approx(table, abs=6e-5)
    assert t_quantile(0.99, 4) == pytest.approx(4.6041, abs=6e-5)
    assert t_quantile(0.5, 1) == pytest.approx(1.0, abs=1e-12)


def test_the_t_interval_is_about_the_mean() -> None:
    values = [0.91, 0.95, 0.93, 0.97, 0.94]
    interval = t_interval(values)
    assert interval is not None
    half = 2.776445 * math.sqrt(sum((value - 0.94) ** 2 for value in values) / 4 / 5)
    assert (interval.low, interval.high) == pytest.approx((0.94 - half, 0.94 + half), abs=1e-7)
    assert t_interval([0.9]) is None


# ------------------------------------------------------------------------------------------------ publication


def test_sizes_are_read() -> None:
    assert read_sizes("64,512, 2048") == (64, 512, 2048)
    for text, wrong in (("64,big", "big"), ("64,,512", ""), ("0", "0"), ("-1", "-1")):
        with pytest.raises(UserError, match=f"^--sizes: '{wrong}' is not a whole number of MB, as in 64,512,2048$"):
            read_sizes(text)
    with pytest.raises(UserError, match=r"^--sizes: 64,64 names a size twice$"):
        read_sizes("64,64")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("engine", {"sizes": "64"}, "--sizes: bench engine publishes nothing; publication is the only one that does"),
        ("train", {"receivers": 1}, "--receivers: bench train publishes nothing"),
        ("publication", {"receivers": 0}, "--receivers: 0 is not at least 1"),
        ("publication", {"data": Path()}, "--data: only bench rewards and bench scale take a folder"),
        ("publication", {"json": Path("none/figures.json")}, "--json: there is no folder"),
        ("train", {"trl_python": Path("/no/python")}, "--trl-python: '/no/python' is not an executable$"),
        ("engine", {"trl_python": Path("python3")}, "bench engine runs no TRL; train is the only one that does"),
    ],
)
def test_an_option_that_a_bench_cannot_take_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        command.run(name, command.Options(**options))


def test_ratios_are_of_rates_round_by_round() -> None:
    found = TransportFigures("raw", [1.0, 2.0, 3.0], [2.0, 2.0, 1.5], 10)
    assert found.ratios == [0.5, 1.0, 2.0]
    assert spread(found.ratios) == "1.00 (0.50 – 2.00)"
    assert rates([0.5, 1.0, 2.0], 2e9) == ("2.00", "1.00 – 4.00")


def test_tokens_are_lost_by_the_rate_without_transfers() -> None:
    """100 tokens a second without; 4 s with lose 100. Receiving took 0.5 CPU seconds beyond the quiet ones' in its threads, and
    0.24 on the event loop beyond the 0.15 of 300 quiet tokens; generation makes 200 tokens in 1.6 CPU seconds."""
    quiet = PauseWindow(seconds=2.0, tokens=200.0, engine=1.5, loop=0.1, others=0.1)
    busy = PauseWindow(seconds=4.0, tokens=300.0, engine=2.5, loop=0.39, others=0.7)
    held = Held("tiny", 3.0, 0.5, Pauses(0.01, 0.02, 5), quiet, busy)
    assert held.lost == pytest.approx(100.0)
    assert held.receiving == pytest.approx(0.74)
    assert held.worth == pytest.approx(92.5)
    lines, _ = printed(pauses.render([held]))
    assert "tiny 3.0 10.0 20.0 5 500 4.0%" in lines
    assert "tiny 100 75 20.0 18.5 1.08" in lines
    window = PauseWindow(1.0, 10.0, 0.5, 0.2, 0.1)
    began, now = {"now": 5.0, "tokens": 7.0, "engine": 1.0}, {"now": 7.0, "tokens": 37.0, "engine": 2.0}
    window.add(began | {"loop": 4.0, "others": 2.0}, now | {"loop": 4.5, "others": 2.5})
    assert window == PauseWindow(3.0, 40.0, 1.5, 0.7, 0.6)


def test_what_is_compared_is_what_was_measured_in_the_same_round() -> None:
    seconds = {plain.COPY: [0.1, 0.1], plain.HASHED: [0.2, 0.3]}
    published = {"shared_memory": TransportFigures(plain.COPY, [0.1, 0.2], [0.2, 0.3], 10)}
    sized = Sized(64, seconds, {}, published, MemoryPasses(1.0, 1.0, 1.0))
    run = InRun(988.1, 2.0, [[1.0, 0.1], [3.0, 0.2]], 13 << 30)
    report = publishing.PublicationReport(Transfers(1, [sized]), [run], {}, [], Changes(1e-6, 1000, [0.01], [30]))
    assert publishing.compared(report) == [
        Compared("shared_memory / raw copy out of shared memory, 64 MB", [0.5, pytest.approx(2 / 3)], "≥ 0.6"),
        Compared("shared_memory / a copy that hashes, 64 MB", [1.0, pytest.approx(1.0)], "≥ 0.8"),
        Compared("seconds of version 0 in a run, 988 MB", [2.0], "≤ 1.5"),
        Compared("seconds of a later version in a run, 988 MB", [1.0, 3.0], "≤ 1.0"),
        Compared("GiB of memory in a run, 988 MB", [13.0], "≤ 12"),
        Compared("bytes of a delta / of a whole version", [0.03]),
    ]


def printed(tables: Sequence[Table]) -> tuple[list[str], str]:
    """The lines without frames, and all of it in one."""
    console = Console(record=True, width=160)
    for table in tables:
        console.print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    return lines, " ".join(lines)


# ------------------------------------------------------------------------------------------------ all


def _compares(*found: Compared) -> Callable[[], tuple[Any, Any]]:
    return lambda: (SimpleNamespace(compared=lambda report: report), list(found))


def _raises(error: Exception) -> Callable[[], tuple[Any, Any]]:
    def bench() -> tuple[Any, Any]:
        raise error

    return bench


def test_one_that_fails_does_not_keep_the_others_from_running() -> None:
    ratio = "run / bound of the engines alone"
    benches = {
        "page": _raises(UserError("there is no browser")),
        "startup": _raises(KeyError("coordinator")),
        "storm": _raises(ServiceFault("storm", "run", "ended early")),
        "train": _compares(Compared(ratio, [0.8, 0.6, 0.7], "≥ 0.85"), Compared.of("none", [None])),
    }
    shown: list[str] = []
    report = every.measure(benches, shown.append)
    assert shown == ["page, 1 of 4", "startup, 2 of 4", "storm, 3 of 4", "train, 4 of 4"]
    assert every.cells(report) == [("train", ratio, "0.70", "0.60 – 0.80 (3)", "≥ 0.85", "0.69")]
    assert report.left_out == {"page": "there is no browser"}
    with pytest.raises(ServiceFault, match=r"startup: KeyError: 'coordinator'; storm: .*ended early"):
        report.check()
    (table,) = every.render(report)
    assert "left out: page: there is no browser" in str(table.caption)


def test_all_takes_every_bench_at_its_short_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, command.Options] = {}

    def bench(name: str) -> Callable[[command.Options, command.Show], command.Measured]:
        def measured(options: command.Options, _: command.Show) -> command.Measured:
            asked[name] = options
            return _compares(Compared("a ratio", [1.0]))()

        return measured

    names = [name for name in command.BENCHES if name != command.ALL]
    for name in names:
        monkeypatch.setitem(command.BENCHES, name, bench(name))
    command.run(command.ALL, command.Options(json=tmp_path / "all.json", data=tmp_path))
    assert list(asked) == names
    assert all(options.quick and options.data == tmp_path for options in asked.values())
    written = msgspec.json.decode((tmp_path / "all.json").read_bytes(), type=every.Figures)
    assert [row.bench for row in written.rows] == names
    assert written.measured.cores >= 1
    assert written.measured.date


def test_every_bench_says_what_it_compares() -> None:
    apart = {command.ALL: "every", "publication": "publication.bench"}
    apart |= {"shards": "publication.shards", "staleness": "staleness.bench"}
    for name in command.BENCHES:
        module = import_module(f"benchmarks.{apart.get(name, name)}")
        assert name == command.ALL or (callable(module.compared) and module.QUICK), name
    released = msgspec.json.decode(every.RELEASED.read_bytes(), type=every.Released)
    assert set(released.rows) <= set(command.BENCHES)


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    row, where = every.Row("train", Compared("a | b", [1.0]), None), Measurement("2026-11-27", "abc1234", 2, "x86_64", "3.11.7")
    report = every.Figures("0.1.0", [row], {"page": "no browser"}, {}, {"train": 120.0}, measured=where)
    page = f"# Benchmarks\n\n{every.BEGIN}old\n{every.END}\nThe rest\n"
    made = every.page(page, report)
    assert "| train | a \\| b | 1.00 |" in made
    assert "Left out: `page` (no browser)." in made
    assert "Measured on 2026-11-27, of commit abc1234, in one sitting of 2 minutes: 2 cores (x86_64), Python 3.11.7." in made
    assert "old" not in made
    assert every.page(made, report) == made
    with pytest.raises(UserError, match="no lines"):
        every.page("# Benchmarks\n", report)


def test_the_page_is_made_of_its_figures() -> None:
    docs = Path(__file__).parents[2] / "docs"
    report = msgspec.json.decode((docs / "benchmarks.json").read_bytes(), type=every.Figures)
    text = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert every.page(text, report) == text, "python -m benchmarks.every docs/benchmarks.json docs/benchmarks.md"
