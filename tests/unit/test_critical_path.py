"""What a step waited for: hand-made lives of groups, whose paths are known."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.commands.why import CAUSES
from runtime.environments import messages
from runtime.ledger.reader import GroupRow
from runtime.ledger.states import Mark, Phase
from runtime.process.spans import CALLS, EPISODES, POLICY, PUBLICATION, STATE, TOOL, TracedSpan
from runtime.telemetry import critical_path
from runtime.telemetry.critical_path import (
    COORDINATOR,
    TRAINER,
    PathPart,
    ProcessSpans,
    StepPath,
    conversation,
    path,
    paths,
    totals,
)

LIFE = ("admitted", "generating", "generated", "scored", "ready", "consumed", "retired")


def group(group_id: int, step: int, *times: float, replica: str = "rollout-0", attempt: int = 1, **marks: float) -> GroupRow:
    """`times`: of LIFE, in order."""
    return GroupRow(
        group_id=group_id,
        problem=0,
        source="",
        label="",
        seed=0,
        phase=Phase.RETIRED,
        marks=Mark.SCORED,
        why=None,
        step=step,
        taken=step,
        place=0,
        replica=replica,
        attempt=attempt,
        due=step,
        oldest=None,
        newest=None,
        prompt_tokens=1,
        response_tokens=[1],
        truncated=0,
        rewards=[],
        outcomes=None,
        reward=1.0,
        scores=None,
        handles={},
        times={**dict(zip(LIFE, times, strict=True)), **marks},
    )


def told(found: StepPath) -> list[tuple[str, float, str, int]]:
    return [(part.cause, part.seconds, part.process, part.group) for part in found.parts]


def test_a_step_waits_for_its_last_group() -> None:
    batch = [group(1, 5, 10, 10, 11, 12, 12, 20, 21), group(2, 5, 10.5, 11, 16, 18, 18, 20, 21, replica="rollout-1")]
    assert told(path(5, batch, 10.0)) == [
        ("admit", 0.5, "", 2),
        ("dispatch", 0.5, "", 2),
        ("generate", 5.0, "rollout-1", 2),
        ("score", 2.0, "", 2),
        ("train", 2.0, TRAINER, -1),
        ("publish", 1.0, "", -1),
    ]


def test_what_was_done_before_the_step_began_is_not_on_its_path() -> None:
    batch = [group(1, 5, 2, 3, 14, 15, 15, 20, 21)]
    assert told(path(5, batch, 10.0)) == [
        ("generate", 4.0, "rollout-0", 1),
        ("score", 1.0, "", 1),
        ("train", 5.0, TRAINER, -1),
        ("publish", 1.0, "", -1),
    ]


def test_a_step_whose_groups_were_ready_waits_for_the_trainer_alone() -> None:
    batch = [group(1, 5, 2, 3, 4, 5, 5, 20, 21), group(2, 5, 2, 3, 4, 9, 9, 20, 21)]
    assert told(path(5, batch, 10.0)) == [("train", 10.0, TRAINER, -1), ("publish", 1.0, "", -1)]


@pytest.mark.parametrize(("mark", "cause"), [("scored", "score"), ("referenced", "reference"), ("valued", "value")])
def test_the_mark_that_came_last_is_the_one_that_was_waited_for(mark: str, cause: str) -> None:
    marks = {"referenced": 12.1, "valued": 12.2, mark: 14.0}
    row = group(1, 5, 10, 10, 12, marks.pop("scored", 12.05), 14, 15, 15, **marks)
    assert told(path(5, [row], 10.0))[1][:2] == (cause, 2.0)


def test_what_was_lost_and_generated_again_says_so() -> None:
    found = path(5, [group(1, 5, 10, 13, 14, 15, 15, 16, 16, attempt=2)], 10.0)
    assert told(found)[0] == ("generate again", 3.0, "", 1)


def test_a_step_begins_where_the_one_before_was_committed() -> None:
    rows = [group(step, step, step, step, step, step, step + 0.5, step + 1.5, step + 2.0) for step in (3, 4, 6)]
    assert [(each.start, each.end) for each in paths(rows)] == [(3.0, 5.0), (5.0, 6.0), (6.0, 8.0)]


def test_the_time_for_which_the_trainer_was_not_there_is_a_restart() -> None:
    step = path(5, [group(1, 5, 70, 71, 72, 73, 73, 75, 76)], 10.0)
    line = f"{STATE}{TRAINER}"
    states = [("serving", 2.0, 12.0), ("placed", 60.0, 65.0), ("registered", 65.0, 69.5), ("serving", 69.5, 90.0)]
    spans = [TracedSpan(name, start, end, line, -1, -1, "") for name, start, end in states]
    explained = ProcessSpans({COORDINATOR: spans}).explain(step)
    assert told(explained)[:3] == [("restart", 59.5, "", -1), ("admit", 0.5, "", 1), ("dispatch", 1.0, "", 1)]
    assert sum(part.seconds for part in explained.parts) == step.seconds
    assert ProcessSpans({COORDINATOR: spans[:1]}).explain(step).parts[0] == PathPart("admit", 10.0, 70.0, "", 1)


def test_groups_that_are_not_committed_are_of_no_step() -> None:
    row = group(1, 5, 10, 10, 12, 13, 14, 15, 15)
    del row.times["retired"]
    assert paths([row]) == []


def test_the_parts_are_as_long_as_the_step_whatever_the_times() -> None:
    chance = random.Random(3)
    for _ in range(300):
        batch = [
            group(number, 5, *sorted(chance.uniform(0, 20) for _ in LIFE), attempt=chance.choice((1, 2)))
            for number in range(chance.randint(1, 5))
        ]
        whole = path(5, batch, chance.choice((None, chance.uniform(0, 25))))
        played = [episode_span(chance.choice(PHASES), *two_of(chance), f"{chance.randrange(2)} x") for _ in range(20)]
        asked = [TracedSpan("probe", *two_of(chance), chance.choice(("probe", CALLS)), detail="x") for _ in range(4)]
        worked = [TracedSpan("forward", *two_of(chance), "engine") for _ in range(3)]
        spans = ProcessSpans({"rollout-0": played, COORDINATOR: asked, TRAINER: worked})
        for found in (whole, spans.explain(whole)):
            together = sum(part.seconds for part in found.parts)
            assert math.isclose(together, found.seconds, rel_tol=0, abs_tol=1e-11)  # some 50 additions
            assert all(one.end == other.start and one.seconds > 0 for one, other in pairwise(found.parts))
            if found.parts:
                assert (found.parts[0].start, found.parts[-1].end) == (found.start, found.end)


PHASES = ("setup", "run", "score", "cleanup", POLICY, TOOL)


def two_of(chance: random.Random) -> list[float]:
    return sorted(chance.uniform(-1, 22) for _ in range(2))


def episode_span(name: str, start: float, end: float, detail: str, group: int = 1) -> TracedSpan:
    return TracedSpan(name, start, end, EPISODES, group, detail=detail)


GAME = "environment game"
PLAYED = [  # the second episode of group 1, which ends last: it was played before, and failed
    episode_span("run", 11, 12, f"1 {GAME}"),
    episode_span("setup", 13, 14, f"1 {GAME}"),
    episode_span("run", 14, 18, f"1 {GAME}"),
    episode_span(POLICY, 14.5, 16, "1 rollout-1"),
    episode_span(POLICY, 15, 17, "1 rollout-0"),
    episode_span(TOOL, 16, 17.25, f"1 {GAME}: search"),
    episode_span("score", 18, 19, f"1 {GAME}"),
    episode_span("cleanup", 19, 19.5, f"1 {GAME}"),
]
OTHERS = [episode_span("run", 10, 16, f"0 {GAME}"), episode_span("run", 10, 19.75, f"1 {GAME}", group=2)]


def test_the_generation_of_a_gateway_is_what_the_episode_that_ended_last_was_at() -> None:
    step = path(5, [group(1, 5, 10, 10, 20, 20, 20, 21, 21, replica="gateway-0")], 10.0)
    busy = {"rollout-0": [TracedSpan("decode", 16, 16.5, "engine")], "gateway-0": [*PLAYED, *OTHERS]}
    found = ProcessSpans(busy).explain(step)
    assert [(part.cause, part.seconds, part.process) for part in found.parts] == [
        ("place", 1.0, GAME),
        ("agent", 1.0, GAME),
        ("place", 1.0, GAME),
        ("setup", 1.0, GAME),
        ("agent", 0.5, GAME),
        (POLICY, 0.5, "rollout-1"),
        (POLICY, 2.0, "rollout-0"),
        (TOOL, 0.25, f"{GAME}: search"),
        ("agent", 0.75, GAME),
        ("agent's score", 1.0, GAME),
        ("cleanup", 0.5, GAME),
        ("generate", 0.5, "gateway-0"),
        ("train", 1.0, TRAINER),
    ]
    assert found.inside[6] == {"decode": 0.5}
    (policy,) = (total for total in totals([found]) if total.process == "rollout-0")
    assert (policy.cause, policy.seconds, policy.steps) == (POLICY, 2.0, 1)


@pytest.mark.parametrize("spans", [[], [episode_span(POLICY, 12, 13, "0 rollout-0")], [PLAYED[0]._replace(end=11.0)]])
def test_a_generation_of_which_the_spans_are_lost_stays_whole(spans: list[TracedSpan]) -> None:
    part = PathPart("generate", 11.0, 20.0, "gateway-0", 1)
    assert conversation(part, spans) == [part]


def test_every_cause_has_a_meaning_and_is_in_the_guide() -> None:
    episodes = {critical_path.PHASES.get(phase, phase) for phase in messages.PHASES}
    own = {
        critical_path.ADMIT,
        critical_path.DISPATCH,
        critical_path.GENERATE,
        critical_path.AGAIN,
        critical_path.TRAIN,
        critical_path.RESTART,
    }
    others = {critical_path.PROBE, critical_path.PUBLISH, critical_path.PLACE, POLICY, TOOL}
    assert episodes | own | others | set(critical_path.MARKS.values()) == CAUSES.keys()
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "slow-steps.md").read_text()
    assert [cause for cause in CAUSES if f"`{cause}`" not in guide] == []


def test_the_spans_say_who_scored_and_what_everyone_was_at() -> None:
    step = path(5, [group(1, 5, 10, 10, 12, 16, 16, 20, 21)], 10.0)
    spans = ProcessSpans(
        {
            "reward-0": [TracedSpan("Score", 12, 13, CALLS, 7), TracedSpan("Score", 15, 15.5, CALLS, 7)],
            "reward-1": [TracedSpan("Score", 12.1, 15.9, CALLS, 1)],
            "rollout-0": [
                *(TracedSpan("decode", 9, 11), TracedSpan("Generate", 10, 12, CALLS, 1)),
                TracedSpan("ReceiveWeights", 19, 20.6, CALLS, step=6),
                TracedSpan("await sender", 19, 20.5, PUBLICATION, step=6),
                TracedSpan("CommitWeights", 20.6, 21, CALLS, step=6),  # once all have received it
            ],
            "rollout-1": [
                TracedSpan("ReceiveWeights", 19, 20.6, CALLS, step=6),
                TracedSpan("receive", 20, 20.6, PUBLICATION, step=6),
                TracedSpan("wait", 20, 20.2, PUBLICATION, step=6),
                TracedSpan("copy", 20.2, 20.6, PUBLICATION, step=6),
                TracedSpan("decode", 20, 21),  # beside it
                TracedSpan("CommitWeights", 20.6, 20.9, CALLS, step=6),
            ],
            "rollout-2": [TracedSpan("ReceiveWeights", 20, 21, CALLS, step=9)],
            TRAINER: [TracedSpan("backward", 15, 18), TracedSpan("command", 18, 22, detail="Apply")],
        }
    )
    found = spans.explain(step)
    assert told(found) == [
        ("generate", 2.0, "rollout-0", 1),
        ("score", 4.0, "reward-1", 1),
        ("train", 4.0, TRAINER, -1),
        ("publish", 1.0, "rollout-1", -1),
    ]
    published = {phase: pytest.approx(seconds, abs=1e-9) for phase, seconds in (("wait", 0.2), ("copy", 0.4), ("swap", 0.3))}
    assert found.inside == [{"decode": 1.0}, {}, {"backward": 2.0, "Apply": 2.0}, published]


def test_an_update_that_waits_for_a_rollouts_probe_is_not_the_trainers_doing() -> None:
    step = path(5, [group(1, 5, 2, 3, 4, 5, 5, 20, 21)], 10.0)
    spans = {
        COORDINATOR: [
            TracedSpan("probe", 11, 15, CALLS, detail="rollout-1"),
            TracedSpan("probe", 11, 18, CALLS, detail="rollout-0"),
            TracedSpan("probe", 11, 19, CALLS, detail="rollout-2"),  # which came later, and was not waited for
            TracedSpan("probe", 12, 18, "probe"),
        ],
        TRAINER: [
            TracedSpan("forward", 10, 13, "engine"),
            TracedSpan("send", 10, 17, PUBLICATION),
            TracedSpan("Accumulate", 10, 17, CALLS),
            TracedSpan("update", 18, 20, "engine"),
        ],
    }
    assert told(ProcessSpans(spans).explain(step)) == [
        ("train", 3.0, TRAINER, -1),
        ("probe", 5.0, "rollout-0", -1),
        ("train", 2.0, TRAINER, -1),
        ("publish", 1.0, "", -1),
    ]
    spans[TRAINER][0] = TracedSpan("forward", 10, 18.5, "engine")  # busy all the while
    assert [part.cause for part in ProcessSpans(spans).explain(step).parts] == ["train", "publish"]


def test_what_lies_in_a_stretch_of_time_is_found_however_long_it_goes_on() -> None:
    chance = random.Random(5)
    spans = [TracedSpan(str(n), (start := chance.uniform(0, 10)), start + chance.expovariate(1)) for n in range(200)]
    index = ProcessSpans({"a": spans})
    for _ in range(200):
        low, high = sorted((chance.uniform(-1, 12), chance.uniform(-1, 12)))
        expected = {span.name for span in spans if span.end > low and span.start < high}
        assert {span.name for span in index.within("a", low, high)} == expected
    assert index.within("b", 0, 10) == []


def test_the_totals_are_as_long_as_the_steps_and_the_longest_first() -> None:
    parts = [PathPart("generate", 0, 3, "rollout-0", 1), PathPart("train", 3, 4, TRAINER)]
    more = [PathPart("train", 4, 9, TRAINER), PathPart("publish", 9, 10)]
    found = totals([StepPath(0, 0, 4, [1], parts, [{"decode": 2.0}, {}]), StepPath(1, 4, 10, [2], more)])
    assert [(total.cause, total.process, total.seconds, total.steps) for total in found] == [
        ("train", TRAINER, 6.0, 2),
        ("generate", "rollout-0", 3.0, 1),
        ("publish", "", 1.0, 1),
    ]
    assert found[1].inside == {"decode": 2.0}
