"""`sluice simulate`: a calibration finds the costs behind a run, and what cannot be answered is said in one line."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.commands import simulate as command
from runtime import config as schema
from runtime.config import Config
from runtime.errors import UserError
from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.simulation import prediction
from runtime.simulation.calibration import calibrate, observe
from runtime.simulation.cores import Cores
from runtime.simulation.costs import Costs, Fixed, LogNormal
from runtime.simulation.loop import SimulatedLoop, SimulatedWorld
from runtime.simulation.prediction import simulated, variations
from runtime.simulation.simulate import Simulation
from services.rpc.client import ContractDeadlines

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 30


def configured(folder: Path, staleness: int = 2) -> Config:
    return Config(
        run=schema.Run(name="real", dir=str(folder), resume=""),
        sampling=schema.Sampling(group_size=4, max_new_tokens=64),
        evaluation=schema.Evaluation(before=False, after=False),
        rewards=schema.Rewards(rules=[schema.Rule(name="gsm8k")]),
        algorithm=schema.Algorithm(kl_coefficient=0.1),
        training=schema.Training(steps=STEPS, staleness=staleness, groups_per_step=4),
        services=schema.Services(rollout=schema.Rollout(replicas=1, slots=16)),
        trackers=[],
    )


def real(folder: Path, costs: Costs) -> tuple[Config, list[dict[str, Any]], list[GroupRow]]:
    """What a run leaves whose costs are known."""
    config = configured(folder)
    outcome = Simulation(config, costs, ContractDeadlines(config)).run()
    with LedgerReader(folder / "ledger") as reader:
        return config, [point for _, point in outcome.metrics], list(reader.groups())


@pytest.mark.parametrize("cores", [0, 2])
def test_calibration_finds_costs_that_predict_another_configuration(tmp_path: Path, cores: int) -> None:
    """Each of the durations of the run is met within 5 %, and throughput within 10 % with another bound on staleness: what is
    calibrated are means, while lengths and schedules are drawn anew."""
    true = Costs(
        reply_tokens=LogNormal(12.0, 0.8),
        decode_step=3e-3,
        decode_sequence=2e-4,
        prefill_token=0.0,
        score=Fixed(4e-3),
        reference_token=3e-5,
        train_token=4e-4,
        update=1e-2,
        coordinator_message=5e-4,
        cores=cores,
    )
    config, points, groups = real(tmp_path / "run", true)
    deadlines = ContractDeadlines(config)
    start = Costs(cores=cores)
    found = calibrate(start, points, groups, lambda costs: simulated(config, costs, deadlines, STEPS).observed)
    assert found.measured is not None and found.simulated is not None
    assert found.simulated.seconds == pytest.approx(found.measured.seconds, rel=0.05)
    strict = configured(tmp_path / "other", staleness=0)
    expected = simulated(strict, true, deadlines, STEPS).observed
    predicted = simulated(strict, found.costs, deadlines, STEPS).observed
    assert predicted.samples_per_second == pytest.approx(expected.samples_per_second, rel=0.1)


def test_what_computes_at_once_shares_the_processors() -> None:
    """Three pieces of 1, 1 and 2 seconds on one processor end after 3, 3 and 4; one that is given up frees its share."""
    loop = SimulatedLoop("cores", SimulatedWorld())  # type: ignore[abstract]
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

    loop.run(main())
    assert ended == pytest.approx({"a": 3.0, "b": 3.0, "c": 4.0})


def test_the_usual_variations_are_configurations_of_their_own(tmp_path: Path) -> None:
    config = configured(tmp_path / "run")
    named = {name: (tried, costs) for name, tried, costs in variations(config, Costs())}
    assert {"rollouts 2", "η 1", "η 3", "slots 32", "groups of 8"} <= named.keys()
    assert named["η 3"][0].training.staleness == 3
    assert named["replies twice as long"][1].length_scale == 2.0


def test_a_command_answers_with_roles_rows_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    picture = tmp_path / "what-if.html"
    arguments = (
        str(QUICKSTART),
        "services.platform=ascend",
        "--sweep",
        "training.staleness=0,1",
        "--steps",
        "6",
        "--lend",
        "0.5",
    )
    command.simulate(cli._parser().parse_args(["simulate", *arguments, "--picture", str(picture)]))
    told = capsys.readouterr().out
    assert "lend 0.5 s" in told
    assert "calibrated on nothing" in told and "training.staleness=1" in told
    assert "plotly" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "training.staleness"), "--sweep: 'training.staleness' names no values"),
        (("--from", "nowhere"), "--from nowhere: not a run's folder"),
        (("--lend", "-1"), "--lend: -1: must be at least 0"),
        (("--lend", "1"), "--lend: 1: a node's processes share its processors"),
        (("--steps", "3"), "--steps: 3; must be at least 5"),
        (("--picture", "nowhere/x.html"), "--picture: there is no folder nowhere"),
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

    monkeypatch.setattr(prediction, "MEMORY", tmp_path)
    monkeypatch.setattr(Simulation, "run", ended)
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", str(QUICKSTART)])
    assert end.value.code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_short_run_measures_nothing() -> None:
    with pytest.raises(UserError, match="2 steps are too few"):
        observe([{"timing/all": 1.0}] * 2, [])
