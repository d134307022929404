"""Runs whose tasks agents of the user's play: of several kinds, killed, stopped, broken, and on a server in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.evaluation import generations
from runtime.evaluation import results as evaluation
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.system.runs import (
    ROOT,
    check_gone,
    eventually,
    one_line,
    sluice,
    started,
    steps,
    trained,
    write_config,
)
from tests.system.test_gateway import BACK, LONG, NO_REFERENCE, goes_on_without_loss
from tests.unit.docs_blocks import own_files

pytestmark = pytest.mark.timeout(400)

AGENTS = Path(__file__).with_name("agents_of_two_kinds.py")
SUMS = {"messages": [{"role": "user", "content": "1+1="}], "label": "2"}


def written(tiny: Path, folder: Path, rows: list[Any], environment: dict[str, Any], **data: Any) -> Path:
    """A run of the tasks `rows`, rewarded by who plays them alone."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_config(
        folder / "config.yaml",
        tiny,
        data={"train": str(tasks), "eval": str(tasks), "allow_overlap": True, "handler": "task", **data},
        rewards={"rules": []},
        gateway={"context": 96},
        algorithm=NO_REFERENCE,
        evaluation={"before": False, "after": False, "problems": 4},
        services={"environment": environment},
    )


@pytest.fixture
def mixed(tiny: Path, tmp_path: Path) -> Path:
    """Tasks of two environments, each of which its row names."""
    rows = [SUMS | {"who": "sums"}, {"who": "maze", "walls": 3}] * 8
    two = {"sums": {"run": f"{AGENTS}:sums"}, "maze": {"run": f"{AGENTS}:Maze", "replicas": 2}}
    return written(tiny, tmp_path, rows, two, environment_key="who")


def test_two_environments_are_mixed_by_row_and_have_figures_of_their_own(mixed: Path, tmp_path: Path) -> None:
    run = trained(mixed, folder=tmp_path / "run", timeout=BACK)
    points = steps(run.folder)
    figures: dict[str, list[float]] = {}
    for name, value in ((name, value) for point in points for name, value in point.items()):
        if name.startswith("environment/"):
            figures.setdefault(name.removeprefix("environment/"), []).append(value)
    assert set(figures["maze/turns"]) == {2.0} and set(figures["sums/turns"]) == {1.0}
    assert set(figures["maze/reward"]) == {0.5} and set(figures["maze/log/walls"]) == {3.0}
    assert sum(figures["maze/episodes"] + figures["sums/episodes"]) == len(points) * 4 * 4
    assert not sum(figures["maze/repeated"] + figures["sums/repeated"])
    with LedgerReader(run.folder / "ledger") as ledger:
        told = {group.outcomes.environment for group in ledger.groups(states=[Phase.RETIRED]) if group.outcomes is not None}
    assert told == {"maze", "sums"}
    assert sorted(path.name for path in (run.folder / "logs").glob("environment*")) == [
        *("environment-0.log", "environment-1.log", "environment-2.log"),
    ]


def test_evaluations_and_single_tasks_are_played_too(mixed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = sluice("eval", str(mixed), f"run.dir={folder}", timeout=BACK)
    assert done.returncode == 0, done.stdout + done.stderr
    check_gone(folder)
    replies = list(generations.read(evaluation.folder_for(folder / "eval", 0) / "held_out.jsonl"))
    assert len(replies) == 4 and {each.outcome for each in replies} == {"completed"}
    for task, shown in ((0, "1+1="), (1, "3 walls")):
        done = sluice("play", str(mixed), "--task", str(task), f"run.dir={folder}", "data.eval=''", timeout=BACK)
        assert done.returncode == 0, done.stdout + done.stderr
        check_gone(folder)
        assert shown in done.stdout and f"tasks:{task + 1}: reward" in done.stdout and "completed" in done.stdout
    done = sluice("play", str(mixed), "--task", "99", f"run.dir={folder}")
    assert (done.returncode, one_line(done.stderr)) == (2, "error: --task: 99, but there are only 16 tasks")


SHORT = ("deadlines.silence=5", "deadlines.stall={loop: 3}")


@pytest.mark.parametrize(
    ("how", "lost"),
    [("kill", "environment-0"), ("suspend", "environment-0"), ("kill", "environment-2")],
)
def test_an_environment_that_is_lost_costs_no_task(mixed: Path, tmp_path: Path, how: str, lost: str) -> None:
    """One of two of its kind, and one that is alone."""
    with started(mixed, LONG, *SHORT, folder=tmp_path / "run") as run:
        run.reaches(2)
        getattr(run.member(lost), how)()
        goes_on_without_loss(run, lost)


def test_an_agent_that_cannot_be_imported_is_the_users_to_mend(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import a_package_that_is_not_there\n")
    config = written(tiny, tmp_path, [SUMS], {"sums": {"run": f"{broken}:run"}})
    with started(config, folder=tmp_path / "run") as run:
        assert run.wait(BACK) == 2, run.output + run.errors
        check_gone(run.folder)
        line = one_line(run.errors)
        assert line.startswith(f"error: services.environment.sums.run: {broken}:run cannot be imported: ModuleNotFoundError: ")


def test_a_row_that_names_an_unknown_environment_is_the_users_to_mend(mixed: Path, tmp_path: Path) -> None:
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"who": "shop"}\n')
    with started(mixed, folder=tmp_path / "run") as run:
        assert run.wait(BACK) == 2, run.output + run.errors
        check_gone(run.folder)
        assert one_line(run.errors).endswith("tasks:17: environment 'shop' is not one of services.environment: maze, sums")


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of the guide's server, which runs beside what protoc makes of the protocol."""
    folder.mkdir()
    source = ROOT / "proto" / "environment.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source.parent}", f"--python_out={folder}"]
    subprocess.run([*command, f"--grpc_python_out={folder}", source.name], check=True, timeout=BACK)
    (folder / "environment_server.py").write_text(own_files()["environment_server.py"])
    out = folder / "out"
    with out.open("w") as file:
        served = subprocess.Popen(
            [sys.executable, "environment_server.py", "127.0.0.1:0"], cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        told = eventually(lambda: served.poll() is not None or out.read_text().strip(), BACK, "a server")
        assert served.poll() is None, out.read_text()
        yield f"127.0.0.1:{str(told).rpartition(' ')[2]}"
    finally:
        served.kill()
        served.wait()


def test_a_server_of_the_protocol_plays_in_a_process_that_the_run_did_not_start(tiny: Path, tmp_path: Path) -> None:
    with server(tmp_path / "server") as address:
        config = written(tiny, tmp_path, [SUMS], {"far": {"server": {"address": address}}})
        run = trained(config, folder=tmp_path / "run", timeout=BACK)
        for point in steps(run.folder):
            assert point["environment/far/episodes"] == 16.0 and point["environment/far/log/replies"] == 1.0
        assert not list((run.folder / "logs").glob("environment*"))
