"""Which points of a run are drawn, and as what."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.telemetry.report import panels, thinning
from runtime.telemetry.report.lineages import history
from runtime.telemetry.report.panels import Panel, Series


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "time": 1000.0 + number, "timing/all": 0.5, **metrics}


def evaluated(number: int, accuracy: float) -> dict[str, Any]:
    return {"step": number, "time": 1000.0 + number, "eval/accuracy": accuracy}


class TestLineages:
    def test_a_run_that_never_went_back_is_one(self) -> None:
        found = history([evaluated(0, 0.1), *(step(n, incarnation=0) for n in range(1, 4)), evaluated(3, 0.2)])
        assert [point["step"] for point in found.steps] == [1, 2, 3]
        assert [point["eval/accuracy"] for point in found.evaluations] == [0.1, 0.2]
        assert (len(found.lineages), found.done_again, found.returns) == (1, 0, [])

    @pytest.mark.parametrize("told", [True, False], ids=["incarnations", "steps-counted-back"])
    def test_steps_that_were_done_again_do_not_count(self, told: bool) -> None:
        """Killed after step 6, resumed after 4, killed after 5, resumed after 2."""
        tries = [range(1, 7), range(5, 6), range(3, 5)]
        points = [
            step(n, mark=10 * which + n, **({"incarnation": float(which)} if told else {}))
            for which, done in enumerate(tries)
            for n in done
        ]
        found = history(points)
        assert [point["mark"] for point in found.steps] == [1, 2, 23, 24]
        assert [(each.incarnation, each.first, each.last, each.kept) for each in found.lineages] == [
            (0, 1, 6, 2),
            (1, 5, 5, 2),
            (2, 3, 4, 4),
        ]
        assert (found.done_again, found.returns) == (5, [4, 2])

    def test_a_run_that_goes_on_where_it_stopped_has_two_by_their_incarnations(self) -> None:
        found = history([step(1, incarnation=0), step(2, incarnation=0), step(3, incarnation=4)])
        assert (len(found.lineages), len(found.steps), found.done_again, found.returns) == (2, 3, 0, [2])
        assert found.lineages[1].incarnation == 4 and found.lineages[0].times == (1001.0, 1002.0)

    def test_evaluations_of_steps_that_were_done_again_go_with_them(self) -> None:
        """The checkpoint's own stays; one that comes late is that of the lineage that goes on."""
        first = [*(step(n) for n in (1, 2, 3, 4)), *(evaluated(n, n / 10) for n in (2, 3, 4))]
        found = history([*first, step(3), evaluated(3, 0.9)])
        assert [(point["step"], point["eval/accuracy"]) for point in found.evaluations] == [(2, 0.2), (3, 0.9)]

    def test_nothing_was_logged(self) -> None:
        found = history([])
        assert (found.steps, found.evaluations, found.lineages, found.done_again) == ([], [], [], 0)


class TestThinning:
    @given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(4, 40))
    def test_a_thinned_curve_keeps_its_extremes_and_ends(self, values: list[float], most: int) -> None:
        array = np.array(values)
        kept = thinning.extremes(array, most)
        assert (np.diff(kept) > 0).all() and len(kept) <= most
        assert (kept[0], kept[-1]) == (0, len(array) - 1)
        if not np.isnan(array).all():
            assert (np.nanmin(array[kept]), np.nanmax(array[kept])) == (np.nanmin(array), np.nanmax(array))

    @given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.integers(1, 30))
    def test_means_of_parts_that_are_stacked_add_up(self, values: list[float], most: int) -> None:
        array = np.array(values)
        parts = thinning.means(array, most)
        assert len(parts) == min(most, len(array))
        np.testing.assert_allclose(thinning.means(array * 3, most), parts * 3, rtol=1e-12)
        edges = np.linspace(0, len(array), len(parts) + 1).astype(int)
        np.testing.assert_allclose(parts, [array[a:b].mean() for a, b in zip(edges, edges[1:])], rtol=1e-9)  # noqa: B905, RUF007

    def test_a_moving_mean_leaves_out_what_was_not_measured(self) -> None:
        found = thinning.smoothed(np.array([math.nan, 2.0, math.nan, 4.0, 9.0]), 3)
        np.testing.assert_allclose(found, [math.nan, 2.0, 2.0, 3.0, 6.5])


def drawn(points: list[dict[str, Any]]) -> dict[str, Panel]:
    return {panel.title: panel for section in panels.sections(history(points)) for panel in section.panels}


class TestPanels:
    def test_what_a_loss_of_the_users_reports_is_drawn(self) -> None:
        found = drawn([step(n, **{"actor/soft_weight": n / 8, "actor/pg_clipfrac": 0.5}) for n in (1, 2)])
        (curve,) = found["actor/soft_weight"].series
        assert (curve.name, curve.values.tolist()) == ("soft_weight", [0.125, 0.25])
        assert "actor/pg_clipfrac" not in found, "it is drawn already"

    def test_gaps_are_kept_and_what_was_never_measured_is_said(self) -> None:
        points = [step(n, **{"score/mean": None if n == 2 else float(n)}) for n in range(1, 5)]
        found = drawn(points)
        (reward,) = found["Reward"].series
        assert reward.steps.tolist() == [1, 2, 3, 4]
        np.testing.assert_array_equal(reward.values, [1.0, math.nan, 3.0, 4.0])
        assert found["Held-out accuracy"].series == [] and found["Entropy"].series == []
        assert "Value loss" not in found

    def test_an_empty_run_has_panels_without_curves(self) -> None:
        found = drawn([])
        assert found and not any(panel.series for panel in found.values())

    def test_every_rule_and_every_set_has_a_curve(self) -> None:
        sets = {"eval/accuracy": 0.5, "eval/easy/pass@1": 0.75, "eval/hard/pass@1": 0.25, "eval/hard/pass@4": 0.5}
        points = [step(1, **{"acc_rewards/mean": 1.0, "rules/my.py:len_rewards/mean": 3.0}), {"step": 1, **sets}]
        found = drawn(points)
        assert [curve.name for curve in found["Reward by rule, before weights"].series] == ["acc", "rules/my.py:len"]
        assert [curve.name for curve in found["Held-out accuracy"].series] == ["mean of the sets", "easy", "hard"]
        (alone,) = drawn([{"step": 0, "eval/accuracy": 0.5, "eval/held_out/pass@1": 0.5}])["Held-out accuracy"].series
        assert alone.name == "held_out"

    def test_phases_are_stacked_without_what_is_part_of_another(self) -> None:
        timing = {"timing/rollout": 0.3, "timing/update": 0.4, "timing/adv": 0.1, "timing/non_overlap_rule_reward": 0.2}
        found = drawn([step(1, **timing), step(2, **{"timing/update": 0.4})])["Time by phase"]
        assert [layer.name for layer in found.series] == ["update", "rollout", "wall time"]
        assert found.series[1].values.tolist() == [0.3, 0.0]
        assert found.series[-1].values.tolist() == [0.5, 0.5]

    def test_the_histogram_is_over_all_steps_that_count(self) -> None:
        points = [step(1, **{"staleness/histogram": {"0": 4}}), step(2, **{"staleness/histogram": {"1": 3, "2": 1}})]
        (bars,) = drawn([*points, points[1]])["Samples by staleness"].series
        assert (bars.steps.tolist(), bars.values.tolist()) == ([0, 1, 2], [4.0, 3.0, 1.0])

    def test_samples_a_second_are_of_each_step(self) -> None:
        (rate,) = drawn([step(1, samples=64.0), step(2, samples=32.0)])["Samples a second"].series
        assert rate.values.tolist() == [128.0, 64.0]

    def test_long_runs_are_thinned_and_smoothed(self) -> None:
        values = np.sin(np.arange(10_000) / 700)
        values[4321] = 40.0
        (curve,) = drawn([step(n + 1, **{"score/mean": value}) for n, value in enumerate(values.tolist())])["Reward"].series
        assert len(curve.steps) <= thinning.MOST_POINTS and curve.values.max() == 40.0
        assert curve.smooth is not None and len(curve.smooth) == len(curve.steps) and curve.smooth.max() < 2.0


@pytest.mark.parametrize(("step", "marked"), [(1, False), (2, True), (100, True)])
def test_points_between_gaps_are_marked_as_no_line_shows_them(step: int, marked: bool) -> None:
    figures = pytest.importorskip("runtime.telemetry.report.page")
    values = np.full(200, np.nan)
    values[::step] = 0.01
    panel = Panel("mismatch", "nats", [Series("mean", np.arange(200), values)], log=True)
    (curve,) = json.loads(figures.draw(panel, []))["data"]
    assert ("markers" in curve["mode"]) == marked


def test_each_environment_has_a_section_of_its_own() -> None:
    game = {"reward": 0.5, "turns": 2.0, "left_out": 1.0, "repeated": 3.0, "ended/completed": 6.0, "ended/timeout": 1.0}
    told = {f"environment/game/{name}": value for name, value in {**game, "log/moves": 4.0}.items()}
    found = panels.sections(history([step(1, **told, **{"environment/shop/reward": 1.0})]))[-2:]
    assert [section.title for section in found] == ["Environment game", "Environment shop"]
    ended = next(panel for panel in found[0].panels if panel.title == "How episodes ended")
    assert {each.name: each.values.tolist() for each in ended.series} == {
        "completed": [6.0],
        "timeout": [1.0],
        "left out": [1.0],
        "played again": [3.0],
    }
    assert [panel.title for panel in found[0].panels] == ["Reward", "How episodes ended", "Calls of the policy", "log/moves"]
