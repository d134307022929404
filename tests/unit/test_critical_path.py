"""The spans of processes: their file, and what a step waited for, in hand-made lives of groups whose paths are known."""

from __future__ import annotations

import itertools
import math
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.why import CAUSES
from runtime import config, run_files
from runtime.config import Config
from runtime.gateway import players
from runtime.ledger.reader import GroupRow
from runtime.ledger.states import Mark, Phase
from runtime.process import spans
from runtime.process.spans import CALLS, EPISODES, POLICY, STATE, TOOL, WEIGHT_SYNC, LineStates, SpanLog, TracedSpan, joined
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
from runtime.telemetry.record import SpanFolder

LIFE = ("admitted", "generating", "generated", "scored", "ready", "consumed", "retired")


def group(group_id: int, step: int, *times: float, replica: str = "rollout-0", attempt: int = 1, **marks: float) -> GroupRow:
    """`times`: of LIFE, in order."""
    nothing = dict.fromkeys(("why", "oldest", "newest", "outcomes", "holders", "scores"))
    same = {"phase": Phase.RETIRED, "marks": Mark.SCORED, "taken": step, "place": 0, "due": step}
    sizes = {"prompt_tokens": 1, "response_tokens": [1], "truncated": 0, "rewards": [], "reward": 1.0, "handles": {}}
    known: Any = {"problem": 0, "source": "", "label": "", "seed": 0, **nothing, **same, **sizes}
    stamps = {**dict(zip(LIFE, times, strict=True)), **marks}
    return GroupRow(group_id=group_id, step=step, replica=replica, attempt=attempt, times=stamps, **known)


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
    # What was done before the step began is not on its path.
    assert told(path(5, [group(1, 5, 2, 3, 14, 15, 15, 20, 21)], 10.0)) == [
        ("generate", 4.0, "rollout-0", 1),
        ("score", 1.0, "", 1),
        ("train", 5.0, TRAINER, -1),
        ("publish", 1.0, "", -1),
    ]
    ready = [group(1, 5, 2, 3, 4, 5, 5, 20, 21), group(2, 5, 2, 3, 4, 9, 9, 20, 21)]
    assert told(path(5, ready, 10.0)) == [("train", 10.0, TRAINER, -1), ("publish", 1.0, "", -1)]
    again = [group(1, 5, 10, 13, 14, 15, 15, 16, 16, attempt=2)]
    assert told(path(5, again, 10.0))[0] == ("generate again", 3.0, "", 1)


@pytest.mark.parametrize(("mark", "cause"), [("scored", "score"), ("referenced", "reference"), ("valued", "value")])
def test_the_mark_that_came_last_is_the_one_that_was_waited_for(mark: str, cause: str) -> None:
    marks = {"referenced": 12.1, "valued": 12.2, mark: 14.0}
    row = group(1, 5, 10, 10, 12, marks.pop("scored", 12.05), 14, 15, 15, **marks)
    assert told(path(5, [row], 10.0))[1][:2] == (cause, 2.0)


def test_a_step_begins_where_the_one_before_was_committed() -> None:
    rows = [group(step, step, step, step, step, step, step + 0.5, step + 1.5, step + 2.0) for step in (3, 4, 6, 7)]
    del rows[-1].times["retired"]  # it is of no step
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


def test_the_parts_are_as_long_as_the_step_whatever_the_times() -> None:
    chance = random.Random(3)
    for _ in range(100):
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
    agent, place, score = ("agent", GAME), ("place", GAME), ("agent's score", GAME)
    first, second, tool = (POLICY, "rollout-1"), (POLICY, "rollout-0"), (TOOL, f"{GAME}: search")
    played = [place, agent, place, ("setup", GAME), agent, first, second, tool, agent, score, ("cleanup", GAME)]
    assert [(part.cause, part.process) for part in found.parts] == [*played, ("generate", "gateway-0"), ("train", TRAINER)]
    seconds = [part.seconds for part in found.parts]
    assert seconds == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 0.25, 0.75, 1.0, 0.5, 0.5, 1.0]
    assert found.inside[6] == {"decode": 0.5}
    (policy,) = (total for total in totals([found]) if total.process == "rollout-0")
    assert (policy.cause, policy.seconds, policy.steps) == (POLICY, 2.0, 1)


@pytest.mark.parametrize("spans", [[], [episode_span(POLICY, 12, 13, "0 rollout-0")], [PLAYED[0]._replace(end=11.0)]])
def test_a_generation_of_which_the_spans_are_lost_stays_whole(spans: list[TracedSpan]) -> None:
    part = PathPart("generate", 11.0, 20.0, "gateway-0", 1)
    assert conversation(part, spans) == [part]


def test_every_cause_has_a_meaning_and_is_in_the_guide() -> None:
    episodes = {critical_path.PHASES.get(phase, phase) for phase in players.PHASES}
    own = {
        getattr(critical_path, name)
        for name in ["ADMIT", "DISPATCH", "GENERATE", "AGAIN", "TRAIN", "RESTART", "PROBE", "PUBLISH", "PLACE"]
    }
    assert episodes | own | {POLICY, TOOL} | set(critical_path.MARKS.values()) == CAUSES.keys()
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "observing.md").read_text()
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
                TracedSpan("await sender", 19, 20.5, WEIGHT_SYNC, step=6),
                TracedSpan("CommitWeights", 20.6, 21, CALLS, step=6),  # once all have received it
            ],
            "rollout-1": [
                TracedSpan("ReceiveWeights", 19, 20.6, CALLS, step=6),
                TracedSpan("receive", 20, 20.6, WEIGHT_SYNC, step=6),
                TracedSpan("wait", 20, 20.2, WEIGHT_SYNC, step=6),
                TracedSpan("copy", 20.2, 20.6, WEIGHT_SYNC, step=6),
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
            TracedSpan("send", 10, 17, WEIGHT_SYNC),
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
    told = [(total.cause, total.process, total.seconds, total.steps) for total in found]
    assert told == [("train", TRAINER, 6.0, 2), ("generate", "rollout-0", 3.0, 1), ("publish", "", 1.0, 1)]
    assert found[1].inside == {"decode": 2.0}


# ------------------------------------------------------------------------------------------------------------ the file of spans
def opened(folder: Path, most_bytes: int = 1 << 20, process: str = "rollout-0") -> SpanLog:
    log = SpanLog()
    log.open(Config(run=config.Run(name="test", dir=str(folder)), logs=config.Logs(span_bytes=most_bytes)), process)
    return log


class FullDisk:
    """A file on a disk that has no room until `room`; a write of a part is all that it takes."""

    def __init__(self, file: Any):
        self._file, self.room = file, False

    def write(self, line: bytes) -> int:
        return int(self._file.write(line if self.room else line[:5]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def read(folder: Path) -> SpanFolder:
    files = SpanFolder(folder)
    files.follow()
    return files


def test_what_was_added_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLUICE_INCARNATION", "2")
    log, now = opened(tmp_path), time.monotonic()
    log.add("decode", now - 2, now - 1, "engine")
    log.add("Generate", now - 2, now, CALLS, 7, 5, "why ☃\n")
    log.close()
    (file,) = read(tmp_path).files.values()
    assert (file.header.process, file.header.rank, file.header.incarnation, file.header.dropped) == ("rollout-0", 3, 2, 0)
    decode, generate = file.spans
    assert (decode.name, decode.line, decode.group, decode.step) == ("decode", "engine", -1, -1)
    assert generate[3:] == (CALLS, 7, 5, "why ☃\n")
    # Both clocks are read one after the other, in an interval that holds this one.
    assert decode.end - decode.start == pytest.approx(1.0, abs=1e-6)
    assert generate.start == decode.start


def test_a_log_that_is_not_open_takes_nothing(tmp_path: Path) -> None:
    for log in (SpanLog(), opened(tmp_path, 0)):
        log.add("decode", 0.0, 1.0)
        with log.span("gather"):
            pass
        log.close()
    assert not (tmp_path / run_files.SPANS).exists()


def test_a_folder_that_cannot_be_written_costs_the_spans_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / run_files.SPANS).write_text("")
    log = opened(tmp_path)
    log.add("decode", 0.0, 1.0)
    log.close()
    assert "no spans of rollout-0" in caplog.text


def test_a_file_is_followed_and_a_torn_line_left_out(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add("one", 0.0, 1.0)
    log.close()
    files = read(tmp_path)
    (file,) = files.files.values()
    with file.path.open("ab") as more:
        more.write(b'["two",1.0,2.0,"",-1,-1,""]\n["thr')
    files.follow()
    assert [span.name for span in file.spans] == ["one", "two"]
    with file.path.open("ab") as more:
        more.write(b'ee",2.0,3.0,"",-1,-1,""]\n["torn\n["four",3.0,4.0,"",-1,-1,""]\n')
    files.follow()
    assert [span.name for span in file.spans] == ["one", "two", "three", "four"]
    file.path.unlink()  # of a run that was replaced
    files.follow()
    assert files.files == {}


def test_a_line_is_in_one_state_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    monkeypatch.setattr(spans, "log", log)
    states = LineStates()
    for line, state, detail in (("a", "placed", ""), ("b", "placed", ""), ("a", "lost", "signal 9"), ("a", "serving", "")):
        states.enter(line, state, detail)
    states.close()
    log.close()
    (file,) = read(tmp_path).files.values()
    told = [(span.line, span.name, span.detail) for span in sorted(file.spans, key=lambda span: (span.line, span.start))]
    assert told == [("a", "placed", ""), ("a", "lost", "signal 9"), ("a", "serving", ""), ("b", "placed", "")]


def test_what_only_a_short_gap_parts_is_one_span() -> None:
    def decode(start: float, end: float, detail: str = "") -> TracedSpan:
        return TracedSpan("decode", start, end, "engine", detail=detail)

    call = TracedSpan("Score", 0.0, 1.0, CALLS)
    spans = [decode(0, 1), call, decode(1.001, 2), decode(2.0, 3, "other"), call._replace(start=1.0), decode(2.01, 4)]
    assert joined(spans) == [decode(0, 2), call, decode(2.0, 3, "other"), call._replace(start=1.0), decode(2.01, 4)]
    alternating = [decode(0, 1), decode(1, 1.001, "other"), decode(1.001, 2)]
    assert joined(alternating) == alternating


def test_all_starts_of_a_process_together_have_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.process.spans.time.time", itertools.count(1.0).__next__)
    for _ in range(3):
        log = opened(tmp_path, 4000)
        for at in range(100):
            log.add(f"decode {at}", at, at + 0.5, CALLS)
        log.close()
    files = sorted(read(tmp_path).files.values(), key=lambda file: file.path.name)
    assert sum(file.path.stat().st_size for file in files) <= 4000 + 2 * 512, "a header tells of each start what it dropped"
    assert [len(file.spans) + file.header.dropped for file in files] == [100, 100, 100]
    assert [span.name for span in files[0].spans] == [f"decode {at}" for at in range(len(files[0].spans))], (
        "the newest is dropped"
    )
    assert 0 < len(files[0].spans) < 100


def test_a_disk_that_is_full_for_a_moment_costs_what_came_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    full = FullDisk(log._file)
    monkeypatch.setattr(log, "_file", full)
    log.add("lost", 1.0, 2.0, CALLS)
    log._flush()
    full.room = True
    log.add("kept", 2.0, 3.0, CALLS)
    log.close()
    (found,) = read(tmp_path).files.values()
    assert ([span.name for span in found.spans], found.header.dropped) == (["kept"], 1)
