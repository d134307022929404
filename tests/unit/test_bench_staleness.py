"""`sluice bench staleness`: its plan, what is run again and what is kept, its figures, and how it fails."""

from __future__ import annotations

import asyncio
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

from benchmarks.intervals import wilson
from benchmarks.staleness import runs
from benchmarks.staleness.bench import StalenessReport, StalenessSettings, measure
from benchmarks.staleness.report import report
from benchmarks.staleness.runs import CONFIG, EvaluationPoint, RunOutcome, StalenessTrial, outcome, overrides, plan
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


def test_the_figure_and_the_report_are_written(tmp_path: Path) -> None:
    settings = StalenessSettings(seeds=1, bounds=(4,), others=())
    for trial in plan(settings):
        write(trial, settings, tmp_path)
    made = run(tmp_path, None, settings)
    png = (tmp_path / "staleness.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and width >= 960 and height == 450 * (1 + 2) and len(png) > 20_000
    assert msgspec.json.decode((tmp_path / "staleness.json").read_bytes(), type=StalenessReport) == made


# ------------------------------------------------------------------------------------------------ the command
