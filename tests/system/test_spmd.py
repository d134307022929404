"""A trainer of two ranks computes what one rank computes, and both of them publish it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.ledger.states import Phase
from tests.system.runs import Live, steps, trained, write_config
from tests.unit.training_steps import assert_metrics

pytestmark = pytest.mark.timeout(300)

RUN = 150.0
STEPS = 3
COMPARED = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "score/mean")
SMOOTH = {
    "learning_rate": 1e-2,
    "eps": 1e-2,
}  # with a small eps, the rounding of a gradient near 0 decides the sign of an update

# Random weights earn nothing from rules of arithmetic, and without differences in reward there is no gradient.
VARIETY = """
from runtime.rewards.rules import rule


@rule("variety")
def variety(text, label, context):
    return len(set(text)) / 16
"""


def assert_compared(own: Mapping[str, float], other: Mapping[str, float]) -> None:
    """What a step reports is the same but for rounding, which adds up from the first step on."""
    compared, expected = ({name: each[name] for name in COMPARED} for each in (own, other))
    assert_metrics(compared, expected, steps=int(other["step"]) + 1)


def trained_groups(run: Live) -> list[GroupRow]:
    with LedgerReader(run.folder / "ledger") as reader:
        return sorted(reader.groups(states=[Phase.RETIRED]), key=lambda group: group.group_id)


def test_two_ranks_have_the_losses_of_one(tiny: Path, tmp_path: Path) -> None:
    rule = tmp_path / "variety.py"
    rule.write_text(VARIETY)
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards={"rules": [{"name": f"{rule}:variety"}]},
        algorithm={"kl_coefficient": 0.1},
        # On-policy, so that both runs train the same groups: what is generated depends on the weights and seeds alone.
        training={"steps": STEPS, "staleness": 0, "optimizer": SMOOTH},
    )
    one, two = (
        trained(
            config,
            f"services.trainer.processes={ranks}",
            "publication.senders=all",
            folder=tmp_path / f"ranks-{ranks}",
            timeout=RUN,
        )
        for ranks in (1, 2)
    )
    for alone, shared in zip(trained_groups(one), trained_groups(two), strict=True):
        assert (alone.group_id, alone.problem, alone.step) == (shared.group_id, shared.problem, shared.step)
        assert alone.response_tokens == shared.response_tokens
        assert alone.reward == shared.reward
    points = list(zip(steps(one.folder), steps(two.folder), strict=True))
    assert len(points) == STEPS
    for alone, shared in points:
        assert alone["actor/grad_norm"] > 1e-3
        assert_compared(shared, alone)
    assert points[-1][0]["actor/kl_loss"] > 1e-5  # the weights have moved
