"""How a step is cut into updates, and when it may be given in parts."""

from __future__ import annotations

import pytest

from runtime.chosen_algorithm import groups_per_update, streams, updates_per_epoch
from runtime.config import Algorithm, Config, Run, Training


@pytest.mark.parametrize(("mini_batch", "size", "updates"), [(0, 8, 1), (8, 8, 1), (2, 2, 4)])
def test_a_step_makes_an_update_for_every_mini_batch(mini_batch: int, size: int, updates: int) -> None:
    config = Config(run=Run(name="a"), training=Training(groups_per_step=8, mini_batch_size=mini_batch))
    assert (groups_per_update(config), updates_per_epoch(config)) == (size, updates)


@pytest.mark.parametrize(
    ("advantage", "training", "streamed"),
    [
        ("group_norm", {}, True),
        ("group_norm", {"mini_batch_size": 8}, True),
        ("group_norm", {"mini_batch_size": 4}, False),
        ("group_norm", {"epochs": 2}, False),
        ("reinforce_plus_plus", {}, False),
    ],
)
def test_only_one_update_of_local_advantages_is_given_in_parts(
    advantage: str, training: dict[str, int], streamed: bool
) -> None:
    algorithm, steps = Algorithm(advantage=advantage), Training(groups_per_step=8, **training)
    assert streams(Config(run=Run(name="a"), algorithm=algorithm, training=steps)) is streamed
