"""`sluice bench staleness`: its plan, what is run again and what is kept, its figures, and how it fails."""

from __future__ import annotations

import asyncio
import io
import json
import math
import statistics
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from benchmarks.intervals import wilson
from benchmarks.staleness import bench, runs
from benchmarks.staleness.bench import QUICK, StalenessReport, StalenessSettings, measure, render
from benchmarks.staleness.figure import curve
from benchmarks.staleness.report import report
from benchmarks.staleness.runs import CONFIG, EvaluationPoint, RunOutcome, StalenessTrial, outcome, overrides, plan, train
from launcher.cli import main
from launcher.node.supervisor import Child, Supervisor
from runtime import run_files
from runtime.config import loading
from runtime.errors import SluiceError, UserError
from runtime.telemetry.summary import Totals

SMALL = StalenessSettings(steps=4, seeds=1, bounds=(0, 2), rates=(1e-4,), others=(), every=2)
NAMES = [trial.name for trial in plan(SMALL)]


@pytest.fixture(autouse=True)
def no_figure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second a figure: one test draws."""
    if request.function is not test_the_figure_and_the_report_are_written:
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


# ------------------------------------------------------------------------------------------------ the plan


def test_the_plan_is_every_cell_with_every_seed() -> None:
    trials = plan(StalenessSettings())
    assert len(set(trials)) == len({trial.name for trial in trials}) == 5 * (2 * 3 * 3 + 6)
    assert [trial.seed for trial in trials] == [seed for seed in range(1, 6) for _ in range(24)]
    assert {(trial.rate, trial.bound) for trial in trials if trial.variant in runs.OTHERS} == {(3e-4, 8)}
    assert [trial.name for trial in plan(QUICK)] == [f"lr0.0001-eta{b}-{x}-seed1" for b in (0, 2, 8) for x in runs.VARIANTS]
    assert StalenessSettings().problems * StalenessSettings().seeds >= 4000


def test_a_variant_is_a_configuration(tmp_path: Path) -> None:
    for variant in (*runs.VARIANTS, *runs.OTHERS):
        changes = overrides(StalenessTrial(3e-4, 8, variant, 1), StalenessSettings(), tmp_path)
        config = loading.resolve(loading.load(CONFIG, changes))
        assert (config.training.staleness, config.training.optimizer.learning_rate) == (8, 3e-4)
        assert config.training.lr_staleness_power == (0.5 if variant in ("default", "naive, by staleness") else 0)


def test_a_run_is_the_quickstart_but_for_what_is_compared(tmp_path: Path) -> None:
    folder = tmp_path / "a: [b] #c"
    config = loading.load(CONFIG, overrides(StalenessTrial(1e-4, 4, "naive", 3), StalenessSettings(), folder))
    assert (config.algorithm.loss, config.algorithm.correction, config.training.staleness) == ("ppo", "none", 4)
    assert (config.run.seed, config.run.dir) == (3, str(folder / "lr0.0001-eta4-naive-seed3"))
    assert config.warmup is not None
    assert (config.warmup.seed, config.warmup.eval_problems, config.warmup.cache) == (3, 820, str(folder))
    assert (config.training.steps, config.evaluation.problems, config.evaluation.after) == (200, 0, True)
    quickstart = loading.load(CONFIG, ())
    for section in ("sampling", "rewards", "services", "publication"):
        assert getattr(config, section) == getattr(quickstart, section)
    as_it_is = {"staleness": 2, "depth": "auto", "lr_staleness_power": 0.5}
    assert replace(config.training, **as_it_is) == quickstart.training
    other = loading.load(CONFIG, overrides(StalenessTrial(1e-4, 4, "decoupled", 3), StalenessSettings(), folder))
    assert replace(other, run=config.run, algorithm=config.algorithm) == config
    assert replace(other.algorithm, loss="ppo") == config.algorithm


# ------------------------------------------------------------------------------------------------ what is run again


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


def test_only_a_whole_run_with_the_same_settings_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = plan(SMALL)[5]
    run_dir = tmp_path / trial.name

    def found(settings: StalenessSettings = SMALL, **written: Any) -> RunOutcome | None:
        if written:
            write(trial, settings, tmp_path, **written)
        return outcome(trial, settings, tmp_path)

    for name in (run_files.CONFIG, run_files.SUMMARY, run_files.METRICS):
        assert found(steps=None) is not None
        (run_dir / name).unlink()
        assert found() is None, name
    assert found(steps=2) is None, "stopped early"
    assert found(steps=None) is not None
    assert found(replace(SMALL, steps=6)) is None
    lines = (run_dir / run_files.METRICS).read_text().splitlines(keepends=True)
    (run_dir / run_files.METRICS).write_text("".join(lines[:-1]))
    assert found() is None, "not evaluated"
    write(trial, SMALL, tmp_path)
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text() + "once: 1\n")
    assert found() is None, "an old schema"
    write(trial, SMALL, tmp_path)
    changed = tmp_path / "quickstart.yaml"
    changed.write_text(CONFIG.read_text().replace("warmup_steps: 10", "warmup_steps: 20"))
    monkeypatch.setattr(runs, "CONFIG", changed)
    assert found() is None, "another quickstart"


# ------------------------------------------------------------------------------------------------ failures


def failing(trial: StalenessTrial) -> None:
    raise SluiceError(f"{trial.name}: coordinator: died (log: logs/{trial.name}.log)")


def test_a_failed_run_is_named_and_the_others_are_made(tmp_path: Path) -> None:
    first = Runs(eta0_naive_seed1=failing)
    with pytest.raises(SluiceError, match="1 of 6 runs failed, 5 are finished and kept") as caught:
        run(tmp_path, first)
    assert str(caught.value).splitlines()[1:] == [
        "lr0.0001-eta0-naive-seed1: coordinator: died (log: logs/lr0.0001-eta0-naive-seed1.log)"
    ]
    assert not isinstance(caught.value, UserError), "the exit code is 1"
    again = Runs()
    run(tmp_path, again)
    assert again.made == ["lr0.0001-eta0-naive-seed1"]


def test_three_failures_end_the_bench_and_a_run_that_ends_early_is_one(tmp_path: Path) -> None:
    first = Runs(eta0_naive_seed1=failing, eta0_default_seed1=failing, eta2_decoupled_seed1=failing)
    with pytest.raises(SluiceError, match="3 of 6 runs failed, 2 are finished"):
        run(tmp_path, first)
    assert first.made == NAMES[:5]

    async def start(trial: StalenessTrial, settings: StalenessSettings, folder: Path) -> None:
        write(trial, settings, folder, steps=2)

    with pytest.raises(SluiceError, match=r"(\S+-seed1): ended before its last step \(log: .*\1.log\)"):
        run(tmp_path, start)


def test_a_refused_configuration_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "quickstart.yaml"
    config.write_text("run: {name: x}\ntrainig: {}\n")
    monkeypatch.setattr(runs, "CONFIG", config)
    with pytest.raises(SluiceError, match="unknown key") as caught:
        asyncio.run(train(StalenessTrial(1e-4, 0, "naive", 1), SMALL, tmp_path))
    log = tmp_path / "logs" / "lr0.0001-eta0-naive-seed1.log"
    assert str(caught.value).startswith("lr0.0001-eta0-naive-seed1: ") and str(caught.value).endswith(f"(log: {log})")
    assert "trainig" in log.read_text()


def test_a_run_that_is_late_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Child] = []
    end_all = Supervisor.end_all

    async def ended(supervisor: Supervisor, grace: float) -> None:
        children.extend(supervisor.children)
        await end_all(supervisor, grace)

    monkeypatch.setattr(Supervisor, "end_all", ended)
    monkeypatch.setattr(runs.start, "command", lambda *_: ("sleep", "100"))
    with pytest.raises(SluiceError, match=r"did not end within 0.1 s \(log: .*lr0.0001-eta2-naive-seed1.log\)"):
        asyncio.run(train(StalenessTrial(1e-4, 2, "naive", 1), replace(SMALL, deadline=0.1), tmp_path))
    assert [child.running for child in children] == [False]


# ------------------------------------------------------------------------------------------------ the report


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


def test_what_a_run_left_is_read_back(tmp_path: Path) -> None:
    trial = StalenessTrial(1e-4, 2, "decoupled", 2)
    write(trial, SMALL, tmp_path)
    read = outcome(trial, SMALL, tmp_path)
    assert read is not None
    assert (read.seed, read.correct, read.problems) == (2, 92, 100)
    assert [(p.step, p.oldest, p.newest) for p in read.curve] == [(0, 0, 1), (2, 2, 3), (4, 4, 4)]
    assert [p.accuracy for p in read.curve] == pytest.approx([0.52, 0.72, 0.92])
    assert (read.steps_to(0.7), read.steps_to(0.9), read.steps_to(0.95)) == (3, 4, None)
    assert (read.staleness_mean, read.staleness_max, read.rl_seconds) == (1.5, 2, 20.0)


def printed(made: StalenessReport) -> str:
    text = io.StringIO()
    Console(width=160, file=text).print(*render(made))
    return text.getvalue()


def test_the_table_tells_both_intervals(tmp_path: Path) -> None:
    text = printed(run(tmp_path, Runs(), replace(SMALL, seeds=2, bounds=(2,))))
    row = next(line for line in text.splitlines() if "decoupled" in line and " 2 " in line.partition("decoupled")[0])
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["0.0001", "2", "decoupled", "91.5%", "85.1% to 97.9%", "86.8% to 94.6%", "4 (2 of 2)", "1.50", "15"]
    assert "+0.0 to +0.0" in text


def test_the_figure_and_the_report_are_written(tmp_path: Path) -> None:
    settings = StalenessSettings(seeds=1, bounds=(4,), others=())
    for trial in plan(settings):
        write(trial, settings, tmp_path)
    made = run(tmp_path, None, settings)
    png = (tmp_path / "staleness.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and width >= 960 and height == 450 * (1 + 2) and len(png) > 20_000
    assert msgspec.json.decode((tmp_path / "staleness.json").read_bytes(), type=StalenessReport) == made


def test_a_curve_stands_on_what_all_runs_evaluated() -> None:
    points = [EvaluationPoint(0, 0, 0, 0.5), EvaluationPoint(25, 25, 35, 0.6), EvaluationPoint(50, 50, 60, 0.7)]
    whole = RunOutcome(1, 1, 2, points, 0, 0, 0)
    gap = RunOutcome(2, 1, 2, [EvaluationPoint(0, 0, 0, 0.4), EvaluationPoint(50, 50, 54, 0.9)], 0, 0, 0)
    steps, accuracies = curve([whole, gap])
    assert steps.tolist() == [0.0, 53.5]
    assert accuracies.tolist() == [[0.5, 0.7], [0.4, 0.9]]


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    made = run(tmp_path, Runs())
    asked: list[tuple[Path, StalenessSettings]] = []

    async def measured(folder: Path, settings: StalenessSettings, *_: object) -> StalenessReport:
        asked.append((folder, settings))
        return made

    monkeypatch.setattr(bench, "measure", measured)
    for options in ([], ["--quick"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "staleness", "--json", str(tmp_path / "out.json"), *options])
        assert ended.value.code == 0
    assert asked == [(Path("runs/.cache/bench/staleness/bound"), settings) for settings in (StalenessSettings(), QUICK)]
    said = capsys.readouterr().out
    assert "Final accuracy" in said and "one seed" in said and "4 (1 of 1)" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["bench"] == "staleness" and len(written["cells"]) == 6
