"""Whom the next group goes to: the rollout with the fewest samples under way for its slots, as a plain search finds it."""

from __future__ import annotations

import random

from runtime.coordinator.pools import RolloutLoads
from runtime.coordinator.register import Member


def test_the_least_loaded_is_the_one_that_a_search_finds() -> None:
    chance = random.Random(3)
    members = tuple(Member(f"rollout-{index}", 0) for index in range(9))
    slots = {member.name: chance.choice((2, 8, 16)) for member in members}
    loads = RolloutLoads(slots)
    under_way: list[tuple[Member, int]] = []
    among = members
    for _ in range(3000):
        if chance.random() < 0.02:  # somebody comes or is lost
            among = tuple(member for member in members if chance.random() < 0.7) or members
        if under_way and chance.random() < 0.5:
            member, samples = under_way.pop(chance.randrange(len(under_way)))
            loads.add(member, -samples)
        else:
            expected = min(among, key=lambda one: loads.samples[one] / slots[one.name])
            member, samples = loads.least(among), chance.randint(1, 9)
            assert member == expected
            loads.add(member, samples)
            under_way.append((member, samples))
    assert len(loads._heap) < 200  # outdated entries do not pile up
