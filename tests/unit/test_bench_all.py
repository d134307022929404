"""`sluice bench all`: what each bench compares, in one table."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks import command, every
from benchmarks.compared import Compared, Measurement
from launcher.cli import main
from runtime.errors import ServiceFault, UserError

APART = {
    command.ALL: "every",
    "publication": "publication.bench",
    "shards": "publication.shards",
    "staleness": "staleness.bench",
}
RATIO = "run / bound of the engines alone"


def _compares(*found: Compared) -> Callable[[], tuple[Any, Any]]:
    return lambda: (SimpleNamespace(compared=lambda report: report), list(found))


def _raises(error: Exception) -> Callable[[], tuple[Any, Any]]:
    def bench() -> tuple[Any, Any]:
        raise error

    return bench


def test_one_that_fails_does_not_keep_the_others_from_running() -> None:
    benches = {
        "page": _raises(UserError("there is no browser")),
        "startup": _raises(KeyError("coordinator")),
        "storm": _raises(ServiceFault("storm", "run", "ended early")),
        "train": _compares(
            Compared("run / bound of the engines alone", [0.8, 0.6, 0.7], "≥ 0.85"), Compared.of("none", [None])
        ),
    }
    shown: list[str] = []
    report = every.measure(benches, shown.append)
    assert shown == ["page, 1 of 4", "startup, 2 of 4", "storm, 3 of 4", "train, 4 of 4"]
    assert every.cells(report) == [("train", RATIO, "0.70", "0.60 – 0.80 (3)", "≥ 0.85", "0.69")]
    assert report.left_out == {"page": "there is no browser"}
    with pytest.raises(ServiceFault, match=r"startup: KeyError: 'coordinator'; storm: .*ended early"):
        report.check()
    (table,) = every.render(report)
    assert "left out: page: there is no browser" in str(table.caption)


def test_all_takes_every_bench_at_its_short_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, command.Options] = {}

    def bench(name: str) -> Callable[[command.Options, command.Show], command.Measured]:
        def measured(options: command.Options, _: command.Show) -> command.Measured:
            asked[name] = options
            return _compares(Compared("a ratio", [1.0]))()

        return measured

    names = [name for name in command.BENCHES if name != command.ALL]
    for name in names:
        monkeypatch.setitem(command.BENCHES, name, bench(name))
    command.run(command.ALL, command.Options(json=tmp_path / "all.json", data=tmp_path))
    assert list(asked) == names
    assert all(options.quick and options.data == tmp_path for options in asked.values())
    written = msgspec.json.decode((tmp_path / "all.json").read_bytes(), type=every.Figures)
    assert [row.bench for row in written.rows] == names
    assert written.measured.cores >= 1
    assert written.measured.date


@pytest.mark.parametrize("name", command.BENCHES)
def test_a_bench_needs_no_option_but_its_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[command.Options] = []

    def measured(options: command.Options, _: command.Show) -> command.Measured:
        asked.append(options)
        return SimpleNamespace(render=lambda _: []), every.EveryReport("0.1.0", [], {}, {}, {})

    monkeypatch.setitem(command.BENCHES, name, measured)
    with pytest.raises(SystemExit) as ended:
        main(["bench", name])
    assert ended.value.code == 0
    assert asked == [command.Options()]


def test_every_bench_says_what_it_compares() -> None:
    apart = {name: f"benchmarks.{path}" for name, path in APART.items()}
    for name in command.BENCHES:
        module = import_module(apart.get(name, f"benchmarks.{name}"))
        assert name == command.ALL or callable(module.compared), name
        assert name == command.ALL or module.QUICK, name


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    row, where = every.Row("train", Compared("a | b", [1.0]), None), Measurement("2026-11-27", "abc1234", 2, "x86_64", "3.11.7")
    report = every.Figures("0.1.0", [row], {"page": "no browser"}, {}, {"train": 120.0}, measured=where)
    page = f"# Benchmarks\n\n{every.BEGIN}old\n{every.END}\nThe rest\n"
    made = every.page(page, report)
    assert "| train | a \\| b | 1.00 |" in made
    assert "Left out: `page` (no browser)." in made
    assert "Measured on 2026-11-27, of commit abc1234, in one sitting of 2 minutes: 2 cores (x86_64), Python 3.11.7." in made
    assert "old" not in made
    assert every.page(made, report) == made
    with pytest.raises(UserError, match="no lines"):
        every.page("# Benchmarks\n", report)


def test_what_the_last_release_said_is_of_benches_that_are_there() -> None:
    released = msgspec.json.decode(every.RELEASED.read_bytes(), type=every.Released)
    assert set(released.rows) <= set(command.BENCHES)


def test_the_page_is_made_of_its_figures() -> None:
    docs = Path(__file__).parents[2] / "docs"
    report = msgspec.json.decode((docs / "benchmarks.json").read_bytes(), type=every.Figures)
    text = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert every.page(text, report) == text, "python -m benchmarks.every docs/benchmarks.json docs/benchmarks.md"
