"""The benches: that they measure what they say, on tiny settings and given numbers; no speed is asserted."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks import command, engine, every, learning, packing, scale_trial, train, worker
from benchmarks.compared import Compared
from benchmarks.inputs import bench_config
from benchmarks.intervals import t_quantile, wilson
from benchmarks.learning import PLAIN, SLUICE, LearningPoint, LearningSettings, LearningTrial
from benchmarks.packing import PackingSettings, PackingShape, packing_config, waste
from benchmarks.packing_trial import PACKED, SORTED, UNSORTED, WAYS
from benchmarks.plain_loop import PlainLoop
from benchmarks.random_groups import GroupLengths
from benchmarks.staleness.bench import StalenessReport, StalenessSettings, measure
from benchmarks.staleness.report import report
from benchmarks.staleness.runs import CONFIG, EvaluationPoint, RunOutcome, StalenessTrial, overrides, plan
from benchmarks.weight_sync import bench as publishing
from benchmarks.weight_sync import ways as plain
from benchmarks.weight_sync.changes import Changes
from benchmarks.weight_sync.in_run import InRun
from benchmarks.weight_sync.spread import Spread
from benchmarks.weight_sync.transfers import MemoryPasses, Sized, Transfers, TransportFigures
from benchmarks.worker import Bench, Measured
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import ServiceFault, UserError
from runtime.simulation.simulate import Simulation
from runtime.telemetry.summary import Totals
from services.rpc.client import command_deadline
from tests.closeness import STEP, assert_close


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    torch.set_num_threads(1)
    return bench_config(tmp_path_factory.mktemp("bench") / "inputs")


@pytest.fixture(scope="module")
def loop(config: Config) -> PlainLoop:
    return PlainLoop(config)


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


def test_every_measure_counts_what_was_done(config: Config) -> None:
    bench = Bench(replace(config, training=replace(config.training, groups_per_step=2)))
    for what in ("decode", "generate", "reference", "train", "plain", "plain decode", "train products", "products"):
        measured = bench.measures[what](0.001)
        assert measured.seconds >= 0.001 and measured.count == int(measured.count) > 0, what


def test_ratios_are_of_totals() -> None:
    assert worker.total([Measured(10, 1.0), Measured(20, 4.0)]).rate == 6.0
    report = engine.EngineBenchReport(engine.Decoding(30.0, 40.0), engine.Decoding(10.0, 16.0), [3.1, 2.9])
    assert report.ratio == engine.Decoding(3.0, 2.5)
    assert [one.values for one in engine.compared(report)] == [[3.1, 2.9]]


def test_the_train_report_is_made_of_its_parts(config: Config) -> None:
    windows = [
        train.SteadyWindow(
            steps=10, seconds=1.0, cpu={"trainer-0": 1.0, "reward-0": 0.4}, wake_ups={"trainer-0": 640, "reward-0": 0}
        ),
        train.SteadyWindow(
            steps=10,
            seconds=3.0,
            cpu={"trainer-0": 2.0, "reward-0": 0.4},
            wake_ups={"trainer-0": 1280, "reward-0": 0},
            peak_bytes=2 << 30,
        ),
    ]
    alone = {"train": [Measured(320, 0.5)] * 2, "generate": [Measured(320, 0.4)] * 2, "reference": [Measured(320, 0.2)] * 2}
    plain = [Measured(100, 1.0)] * 2
    learned, not_yet = [(10.0, 0.5), (20.0, 0.4), (30.0, 0.7), (40.0, 0.9)], [(10.0, 0.7), (20.0, 0.2)]
    trials = [train.TrlMeasured(640, 10.0, 4 << 30, learned), train.TrlMeasured(640, 6.0, 5 << 30, not_yet)]
    trl = {1: [train.TrlMeasured(320, 4.0, 1 << 30, [])] * 2, 2: trials}
    pairs = [(Measured(80, 1.0), Measured(80, 1.0))] * 2
    settings, arithmetic = train.TrainBenchSettings(pretrained=True), [Measured(3e9, 1.0), Measured(8e10, 2.0)]
    report = train._report(config, settings, windows, plain, pairs, alone, trl, arithmetic)
    assert (report.samples_per_step, report.pipeline) == (64, pytest.approx(64 * 20 / 4.0))
    assert report.step_seconds == pytest.approx({"train": 0.1, "generate": 0.08, "reference": 0.04})
    assert report.bound == pytest.approx(64 / 0.12)
    assert report.pipeline_over_bound == pytest.approx(320 / (64 / 0.12))
    assert report.pipeline_over_plain == pytest.approx(2.0)
    assert report.cpu_seconds == pytest.approx({"trainer-0": 0.15, "reward-0": 0.04})
    assert report.wake_ups["trainer-0"] == pytest.approx(1.5)
    # The engines' 220 ms and the reward's 40 on two cores: 130 ms a step.
    assert report.bound_with_services == pytest.approx(64 / 0.13)
    assert [one.run for one in report.rounds] == pytest.approx([640.0, 640 / 3])
    bound, over_plain, over_trl, memory, products = (one.values for one in train.compared(report))
    assert bound == pytest.approx([640 * 0.12 / 64, 640 * 0.12 / 64 / 3])
    assert over_plain == pytest.approx([4.0, 4 / 3])
    assert over_trl == pytest.approx([8.0, 2.0])
    assert (report.trl, report.pipeline_over_trl) == ({1: 80.0, 2: 80.0}, pytest.approx(4.0))
    assert products == pytest.approx([3e9 / 0.1 / 4e10])
    assert (memory, report.peak_bytes) == ([0.4], {"run": 2 << 30, "trl": 5 << 30})
    assert report.seconds_to_goal == {"run": None, "trl": 30.0}
    assert "until 50% of two steps' replies are right: TRL" in printed([train.render(report)[0]])[1]
    without = train._report(config, train.TrainBenchSettings(), windows, plain, pairs, alone, {})
    assert "TRL is left out" in printed([train.render(without)[0]])[1] and len(train.compared(without)) == 3


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


TINY = PackingSettings(
    shapes=(PackingShape(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48),),
    budgets=(300,),
    rounds=2,
    seconds=0.0,
    prompt_tokens=24,
    reply_tokens=48,
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Of two groups a step."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("packing")
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
    rows = [(0, 100.0, 0.5), (9, 103.0, None), (10, 104.5, 0.9)]
    course = learning.points(
        [{"step": step, "time": at} | ({"eval/accuracy": found} if found else {}) for step, at, found in rows]
    )
    assert course == [LearningPoint(0, 0.0, 0.5), LearningPoint(10, 4.5, 0.9)], "from the evaluation before training on"
    reached = [(trial.step, trial.seconds) for trial in (LearningTrial.of(1, course, 0.9), LearningTrial.of(1, course, 0.96))]
    assert reached == [(10, 4.5), (None, None)]


# ------------------------------------------------------------------------------------------------ intervals


def test_wilson_agrees_with_published_intervals() -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3; the mirror image by symmetry."""
    table = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (successes, trials), published in table.items():
        got, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
        assert (got.low, got.high) == pytest.approx(published, abs=5e-5)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx(published, abs=5e-5)


def test_t_quantiles_agree_with_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 8: 2.3060, 9: 2.2622, 10: 2.2281, 30: 2.0423}
    assert {freedom: t_quantile(0.95, freedom) for freedom in table} == pytest.approx(table, abs=6e-5)
    assert t_quantile(0.99, 4) == pytest.approx(4.6041, abs=6e-5)
    assert t_quantile(0.5, 1) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("engine", {"sizes": "64"}, "--sizes: bench engine publishes nothing; weight_sync is the only one that does"),
        ("train", {"receivers": 1}, "--receivers: bench train publishes nothing"),
        ("weight_sync", {"receivers": 0}, "--receivers: 0 is not at least 1"),
        ("weight_sync", {"data": Path()}, "--data: only bench rewards and bench scale take a folder"),
        ("weight_sync", {"json": Path("none/figures.json")}, "--json: there is no folder"),
        ("train", {"trl_python": Path("/no/python")}, "--trl-python: '/no/python' is not an executable$"),
        ("engine", {"pretrained": True}, "--pretrained: bench engine has a model of its own"),
        ("engine", {"trl_python": Path("python3")}, "bench engine runs no TRL; train is the only one that does"),
    ],
)
def test_an_option_that_a_bench_cannot_take_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        command.run(name, command.Options(**options))


def test_what_is_compared_is_what_was_measured_in_the_same_round() -> None:
    seconds = {plain.COPY: [0.1, 0.1], plain.HASHED: [0.2, 0.3]}
    published = {"shared_memory": TransportFigures(plain.COPY, [0.1, 0.2], [0.2, 0.3], 10)}
    sized = Sized(64, seconds, {}, published, MemoryPasses(1.0, 1.0, 1.0))
    run = InRun(988.1, 2.0, [[1.0, 0.1], [3.0, 0.2]], 13 << 30)
    spread = Spread(4, 4, 2, "there", 100, [("collective", 1, 25), ("shared_memory", 3, 25)], 104, 51, 110, [0.1])
    report = publishing.WeightSyncReport(Transfers(1, [sized]), [spread], [run], {}, [], Changes(1e-6, 1000, [0.01], [30]))
    assert publishing.compared(report) == [
        Compared("shared_memory / raw copy out of shared memory, 64 MB", [0.5, pytest.approx(2 / 3)], "≥ 0.6"),
        Compared("shared_memory / a copy that hashes, 64 MB", [1.0, pytest.approx(1.0)], "≥ 0.85"),
        Compared("seconds of version 0 in a run, 988 MB", [2.0], "≤ 1.5"),
        Compared("seconds of a later version in a run, 988 MB", [1.0, 3.0], "≤ 0.4"),
        Compared("GiB of memory in a run, 988 MB", [13.0], "≤ 12"),
        Compared("bytes that leave the machine / the model, 4 to 4 × 2 on another machine", [1.04], "≤ 1.02"),
        Compared("bytes that a worker receives / its share, 4 to 4 × 2 on another machine", [1.02], "≤ 1.02"),
        Compared("host memory of a rollout / its share, 4 to 4 × 2 on another machine", [1.1], "≤ 1.05"),
        Compared("bytes of a delta / of a whole version", [0.03]),
    ]


def printed(tables: Sequence[Table]) -> tuple[list[str], str]:
    """The lines without frames, and all of it in one."""
    console = Console(record=True, width=160)
    for table in tables:
        console.print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    return lines, " ".join(lines)


def _compares(*found: Compared) -> Callable[[], tuple[Any, Any]]:
    return lambda: (SimpleNamespace(compared=lambda report: report), list(found))


def _raises(error: Exception) -> Callable[[], tuple[Any, Any]]:
    return mock.Mock(side_effect=error)


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
    asked: list[command.Options] = []
    names = [name for name in command.BENCHES if name != command.ALL]
    for name in names:
        bench = lambda options, _: asked.append(options) or _compares(Compared("a ratio", [1.0]))()  # noqa: E731
        monkeypatch.setitem(command.BENCHES, name, bench)
    command.run(command.ALL, command.Options(json=tmp_path / "all.json", data=tmp_path))
    assert len(asked) == len(names) and all(options.quick and options.data == tmp_path for options in asked)
    written = msgspec.json.decode((tmp_path / "all.json").read_bytes(), type=every.Figures)
    assert [row.bench for row in written.rows] == names


def test_every_bench_says_what_it_compares() -> None:
    apart = {command.ALL: "every", "weight_sync": "weight_sync.bench"}
    apart |= {"staleness": "staleness.bench"}
    for name in command.BENCHES:
        module = import_module(f"benchmarks.{apart.get(name, name)}")
        assert name == command.ALL or (callable(module.compared) and module.QUICK), name
    released = msgspec.json.decode(every.RELEASED.read_bytes(), type=every.Released)
    assert set(released.rows) <= set(command.BENCHES)


def test_the_page_is_made_of_its_figures() -> None:
    docs = Path(__file__).parents[2] / "docs"
    report = msgspec.json.decode((docs / "benchmarks.json").read_bytes(), type=every.Figures)
    text = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert every.page(text, report) == text, "python -m benchmarks.every docs/benchmarks.json docs/benchmarks.md"


SMALL = StalenessSettings(steps=4, seeds=1, bounds=(0, 2), rates=(1e-4,), others=(), every=2)
NAMES = [trial.name for trial in plan(SMALL)]


@pytest.fixture(autouse=True)
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.staleness.figure.draw", lambda made, png: None)


class Runs:
    """Stands for the runs: writes what each leaves behind, and remembers which were asked for."""

    def __init__(self, **instead: Callable[[StalenessTrial], None]):
        self.made: list[str] = []
        self._instead = {f"lr0.0001-{name.replace('_', '-')}": act for name, act in instead.items()}

    async def __call__(self, trial: StalenessTrial, settings: StalenessSettings, folder: Path) -> None:
        self.made.append(trial.name)
        if trial.name in self._instead:
            self._instead[trial.name](trial)
        write(trial, settings, folder)


def write(trial: StalenessTrial, settings: StalenessSettings, folder: Path, steps: int | None = None) -> None:
    """A run that stopped after `steps`, all by default. Its accuracy grows by 0.1 a step from 0.5 + 0.01 seed."""
    config = loading.resolve(loading.load(CONFIG, overrides(trial, settings, folder)))
    made = {"model": replace(config.model, path="m", reference="m"), "data": replace(config.data, train="t", eval="e")}
    run_dir = folder / trial.name
    (run_dir / "ledger").mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(loading.to_yaml(replace(config, run=replace(config.run, resume=""), **made)))
    done = settings.steps if steps is None else steps
    accuracies = {step: min(1.0, 0.5 + 0.01 * trial.seed + 0.1 * step) for step in range(0, done + 1, settings.every)}
    rows: list[dict[str, float]] = [{"step": step, "loss": 1.0} for step in range(1, done + 1)]
    for step, accuracy in accuracies.items():
        versions = {"eval/version_oldest": float(step), "eval/version_newest": float(min(step + 1, settings.steps))}
        rows.append({"step": step, "eval/accuracy": accuracy, "eval/samples": 100.0, **versions})
    (run_dir / run_files.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    totals = Totals()
    totals.add({"staleness/histogram": {trial.bound: 3, 0: 1}, "timing/all": 1.0})
    totals.steps = done
    rest: dict[str, Any] = {"startup": {}, "groups": {}, "peak_pss_bytes": 0, "accuracy_after": accuracies.get(done)}
    seconds = {"rl_seconds": 10.0 * trial.seed, "total_seconds": 20.0}
    totals.summary(**seconds, stop_reason="all steps done", accuracy_before=0.5, **rest).write(run_dir)


def run(folder: Path, start: Any, settings: StalenessSettings = SMALL) -> StalenessReport:
    return asyncio.run(measure(folder, settings, start=start))


def test_an_interrupted_bench_goes_on_and_finished_runs_are_kept(tmp_path: Path) -> None:
    def interrupted(trial: StalenessTrial) -> None:
        raise asyncio.CancelledError

    first, second, third = Runs(eta2_naive_seed1=interrupted), Runs(), Runs()
    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, first)
    made = run(tmp_path, second)
    assert first.made == NAMES[:4] and second.made == NAMES[3:]
    assert not list(tmp_path.glob("*/ledger")), "what is bulky goes"
    assert run(tmp_path, third) == made
    assert third.made == []


def ended(seed: int, correct: int, reached: int | None, mean: float = 1.5) -> RunOutcome:
    curve = [
        EvaluationPoint(0, 0, 0, 0.5),
        *([EvaluationPoint(reached - 5, reached - 5, reached, 0.9)] if reached else []),
        EvaluationPoint(200, 200, 200, 0.9),
    ]
    return RunOutcome(seed, correct, 820, curve if reached else curve[:1], mean, 4, 30.0 + seed)


def test_the_figures_of_a_cell(tmp_path: Path) -> None:
    settings = StalenessSettings(seeds=3, bounds=(4,), rates=(1e-4,), others=())
    naive = [ended(1, 700, 50), ended(2, 760, None), ended(3, 790, 100, mean=3.0)]
    decoupled = [ended(1, 780, 75), ended(2, 790, 25), ended(3, 800, 50)]
    by_variant = {"naive": naive, "decoupled": decoupled, "default": decoupled}
    outcomes = {trial: by_variant[trial.variant][trial.seed - 1] for trial in plan(settings)}
    made = report(settings, outcomes, tmp_path)
    first, second, _ = made.cells
    assert (first.bound, first.variant, first.runs, second.variant) == (4, "naive", naive, "decoupled")
    assert first.problems == 2460 and first.accuracy == pytest.approx(2250 / 2460)
    assert first.wilson == wilson(2250, 2460)
    spread = 4.302653 * statistics.stdev([700 / 820, 760 / 820, 790 / 820]) / math.sqrt(3)
    assert first.over_seeds is not None
    assert first.over_seeds.low == pytest.approx(2250 / 2460 - spread, abs=1e-6)
    assert first.over_seeds.high == 1.0, "no accuracy is above 1"
    assert (first.steps_to_goal, first.reached) == (75.0, 2)
    assert (second.steps_to_goal, second.reached) == (50, 3)
    assert (first.staleness_mean, first.staleness_max, first.rl_seconds) == (pytest.approx(2.0), 4, pytest.approx(32.0))
    gain, none = made.differences
    assert (gain.other, none.other, none.mean) == ("naive", "decoupled", 0)
    assert gain.mean == pytest.approx((80 + 30 + 10) / 3 / 820)
    assert gain.interval is not None
    assert gain.interval.high - gain.mean == pytest.approx(4.302653 * statistics.stdev([80, 30, 10]) / math.sqrt(3) / 820)


# ------------------------------------------------------------------------------------------------ the command


STEPS = 3


def calls(replicas: int, folder: Path) -> float:
    """Of the coordinator's functions, for each sample."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        name = frame.f_code.co_filename
        found += event == "call" and name.startswith(scale_trial.RUNTIME) and not name.startswith(scale_trial.MODELS)

    config = scale_trial.configured(replicas, STEPS, str(folder / str(replicas)))
    simulation = Simulation(config, scale_trial.costs(replicas), command_deadline)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation.run()
    finally:
        sys.setprofile(before)
    return found / (STEPS * scale_trial.GROUPS * scale_trial.SIZE * replicas)


def test_a_sample_takes_as_much_work_with_forty_rollouts_as_with_five(tmp_path: Path) -> None:
    assert calls(40, tmp_path) <= 1.1 * calls(5, tmp_path)
