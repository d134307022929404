"""`sluice bench publication`: what it publishes, what it refuses, and what its report says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.compared import Compared
from benchmarks.publication import bench, changes, in_run, pauses, transfers
from benchmarks.publication import ways as plain
from benchmarks.publication.changes import Changes
from benchmarks.publication.in_run import InRun, InRunSettings
from benchmarks.publication.pauses import Held, PauseWindow
from benchmarks.publication.tensors import read_sizes, uneven
from benchmarks.publication.transfers import MemoryPasses, Sized, Transfers, TransportFigures, rates, spread
from benchmarks.rollout import Pauses
from runtime.errors import UserError


def test_sizes_are_read() -> None:
    assert read_sizes("64,512, 2048") == (64, 512, 2048)
    assert read_sizes("1") == (1,)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("64,big", "--sizes: 'big' is not a whole number of MB, as in 64,512,2048"),
        ("64,,512", "--sizes: '' is not a whole number of MB, as in 64,512,2048"),
        ("0", "--sizes: '0' is not a whole number of MB, as in 64,512,2048"),
        ("-1", "--sizes: '-1' is not a whole number of MB, as in 64,512,2048"),
        ("64,64", "--sizes: 64,64 names a size twice"),
    ],
)
def test_what_is_no_size_is_refused(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_sizes(text)
    assert str(caught.value) == line


def test_options_are_those_of_this_bench_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sizes: bench engine publishes nothing; publication is the only one that does"):
        command.run("engine", command.Options(sizes="64"))
    with pytest.raises(UserError, match="--receivers: bench train publishes nothing"):
        command.run("train", command.Options(receivers=1))
    with pytest.raises(UserError, match="--receivers: 0 is not at least 1"):
        command.run("publication", command.Options(receivers=0))
    with pytest.raises(UserError, match="--data: only bench rewards and bench scale take a folder"):
        command.run("publication", command.Options(data=tmp_path))
    with pytest.raises(UserError, match="--json: there is no folder"):
        command.run("publication", command.Options(json=tmp_path / "none" / "figures.json"))


def test_settings_are_the_defaults_unless_told() -> None:
    default = bench.PublicationSettings()
    assert bench.settings(None, None) == default
    assert bench.settings(None, None, quick=True).sizes == (64, 512)
    chosen = bench.settings("8", 3)
    assert (chosen.sizes, chosen.receivers, chosen.rounds) == ((8,), 3, default.rounds)


def test_ray_is_left_out_where_it_is_not_installed_or_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench.without_ray(1) == "ray is not installed: pip install 'sluice-rl[bench]'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert bench.without_ray(1) == ""
    assert bench.without_ray(1 << 60).startswith("needs 9223372036.9 GB of memory, ")


@pytest.mark.parametrize("megabytes", [1, 64, 2048])
def test_the_tensors_are_uneven_and_make_up_the_size(megabytes: int) -> None:
    specs = uneven(megabytes)
    sizes = sorted(spec.nbytes for spec in specs)
    assert len({spec.name for spec in specs}) == 300
    assert sum(sizes) == megabytes * 1_000_000
    assert sizes[0] >= 2
    assert sizes[-1] > 15 * sizes[150], "one is far larger than most"
    assert sizes[-1] < sum(sizes) / 8, "but not most of it"
    assert specs == uneven(megabytes)


def test_ratios_are_of_rates_round_by_round() -> None:
    found = TransportFigures("raw", [1.0, 2.0, 3.0], [2.0, 2.0, 1.5], 10)
    assert found.ratios == [0.5, 1.0, 2.0]
    assert spread(found.ratios) == "1.00 (0.50 – 2.00)"
    assert rates([0.5, 1.0, 2.0], 2e9) == ("2.00", "1.00 – 4.00")


def test_the_tables_say_what_was_found_and_what_was_left_out() -> None:
    ways = {"raw": [0.1, 0.2], "slow": [0.4, 0.4]}
    published = {"collective": TransportFigures("raw", [0.1, 0.1], [0.125, 0.125], 1_000_000_160)}
    sized = Sized(1000, ways, {"far": "is not installed"}, published, MemoryPasses(25e9, 19e9, 8e9))
    lines, text = printed(transfers.render(Transfers(1, [sized]), "raw"))
    assert "raw 7.50 5.00 – 10.00" in lines
    assert "slow 2.50 2.50 – 2.50 0.38 (0.25 – 0.50)" in lines
    assert "far – is not installed" in lines
    assert "collective 8.00 8.00 – 8.00 0.80 (0.80 – 0.80) raw 1,000.0" in lines
    assert "xxh3 25.0, copy 19.0, gather float32 → bfloat16 8.0 GB/s" in text


def test_tokens_are_lost_by_the_rate_without_transfers() -> None:
    """100 tokens a second without; 4 s with lose 100. Receiving took 0.5 CPU seconds beyond the quiet ones' in its threads, and
    0.24 on the event loop beyond the 0.15 of 300 quiet tokens; generation makes 200 tokens in 1.6 CPU seconds."""
    quiet = PauseWindow(seconds=2.0, tokens=200.0, engine=1.5, loop=0.1, others=0.1)
    busy = PauseWindow(seconds=4.0, tokens=300.0, engine=2.5, loop=0.39, others=0.7)
    held = Held("tiny", 3.0, 0.5, Pauses(0.01, 0.02, 5), quiet, busy)
    assert held.lost == pytest.approx(100.0)
    assert held.receiving == pytest.approx(0.74)
    assert held.worth == pytest.approx(92.5)
    lines, _ = printed(pauses.render([held]))
    assert "tiny 3.0 10.0 20.0 5 500 4.0%" in lines
    assert "tiny 100 75 20.0 18.5 1.08" in lines


def test_windows_add_up() -> None:
    window = PauseWindow(1.0, 10.0, 0.5, 0.2, 0.1)
    window.add(
        {"now": 5.0, "tokens": 7.0, "engine": 1.0, "loop": 4.0, "others": 2.0},
        {"now": 7.0, "tokens": 37.0, "engine": 2.0, "loop": 4.5, "others": 2.5},
    )
    assert window == PauseWindow(3.0, 40.0, 1.5, 0.7, 0.6)


def test_deltas_are_told_as_shares_of_a_whole_version() -> None:
    found = Changes(1e-6, 1000, [0.01, 0.02, 0.03], [30, 60, 1000])
    assert found.shares == [0.03, 0.06, 1.0]
    lines, _ = printed([changes.render(found)])
    assert "1e-06 3 2.00% 6.00% 100.00% 36.33%" in lines


def test_a_run_that_memory_does_not_suffice_for_is_left_out() -> None:
    assert in_run.without(InRunSettings()) == ""
    why = in_run.without(InRunSettings(memory=1 << 60))
    assert why.startswith("needs 1152921505 GB of memory, ")
    lines, _ = printed(in_run.render([], {"24 layers of 896": why}, Transfers(1, [])))
    assert f"24 layers of 896 {why}" in lines


def test_what_is_compared_is_what_was_measured_in_the_same_round() -> None:
    seconds = {plain.COPY: [0.1, 0.1], plain.HASHED: [0.2, 0.3]}
    published = {"shared_memory": TransportFigures(plain.COPY, [0.1, 0.2], [0.2, 0.3], 10)}
    sized = Sized(64, seconds, {}, published, MemoryPasses(1.0, 1.0, 1.0))
    run = InRun(988.1, 2.0, [[1.0, 0.1], [3.0, 0.2]], 13 << 30)
    report = bench.PublicationReport(Transfers(1, [sized]), [run], {}, [], Changes(1e-6, 1000, [0.01], [30]))
    assert bench.compared(report) == [
        Compared("shared_memory / raw copy out of shared memory, 64 MB", [0.5, pytest.approx(2 / 3)], "≥ 0.6"),
        Compared("shared_memory / a copy that hashes, 64 MB", [1.0, pytest.approx(1.0)], "≥ 0.8"),
        Compared("seconds of version 0 in a run, 988 MB", [2.0], "≤ 1.5"),
        Compared("seconds of a later version in a run, 988 MB", [1.0, 3.0], "≤ 1.0"),
        Compared("GiB of memory in a run, 988 MB", [13.0], "≤ 12"),
        Compared("bytes of a delta / of a whole version", [0.03]),
    ]


def printed(tables: Sequence[Table]) -> tuple[list[str], str]:
    """The lines without frames, and all of it in one."""
    console = Console(record=True, width=160)
    for table in tables:
        console.print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    return lines, " ".join(lines)
