"""Checkpoints: a save that is killed before each of its operations; what `run.resume: auto` takes; parts on nodes."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from msgspec.structs import replace

from launcher import run_folder
from launcher.node.local_node import check_secret, on_this_machine
from runtime import config, run_files, types
from runtime.cluster.nodes import NodePaths
from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.coordinator.register import Register
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.reader import DATABASE
from runtime.types import PolicyVersion
from services.nodes import Nodes

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")  # what Python says of itself before it does them

TRAINER = "trainer.json"

Work = Callable[[Path], Any]


def save(run: Path, step: int, word: str, keep: int) -> None:
    """As the coordinator does it: a checkpoint whose files say `word`."""
    folder = checkpoint.folder_for(run, step)
    partial = checkpoint.begin(folder)
    (partial / "model").mkdir()
    for name in ("model/__0_0.distcp", "model/__1_0.distcp", TRAINER):
        (partial / name).write_text(f'"{word}"')
    checkpoint.complete(partial, folder, Position(version=PolicyVersion(0, step), stream=STREAM, trained=[]))
    checkpoint.prune(run, keep, {step})


def export(run: Path, word: str) -> None:
    with checkpoint.atomic_folder(run / run_files.MODEL) as partial:
        for name in ("config.json", "model.safetensors"):
            (partial / name).write_text(word)


def auto(run: Path, say: Callable[[str], None] = lambda _: None) -> str:
    return run_folder.begin(run, config.Config(run=config.Run(name="a", dir=str(run), resume="auto")), say)


def words(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != checkpoint.POSITION}


class Killed(BaseException):
    """The end of a process that is killed: from now on none of its operations on files is done, so that no clean-up is."""


left: list[int] = []  # operations that are still done, where they are counted


def count(event: str, _: tuple[Any, ...]) -> None:
    if left and event in CHANGES:
        left[0] -= 1
        if left[0] < 0:
            raise Killed


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """`test`, in a process of its own: what counts its operations cannot be taken away again."""

    @functools.wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        child = os.fork()
        if not child:
            try:
                gc.disable()  # what earlier tests left, as a gRPC server, would wait for threads that a child does not have
                sys.addaudithook(count)
                test(*args, **kwargs)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - nothing of the parent's may go on here
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return forked


def killed_before(number: int, work: Callable[[], Any]) -> bool:
    """Do `work` as a process that is killed before its operation `number` on files. Whether it came that far."""
    left[:] = [number]
    try:
        work()
    except Killed:
        return True
    finally:
        left.clear()
    return False


def every_crash(template: Path, work: Work) -> Iterator[tuple[Path, bool]]:
    """A copy of `template` for each operation before which `work` was killed, and one of which it came to its end."""
    number, killed = 0, True
    while killed:
        run = template.with_name(f"killed-{number}")
        shutil.copytree(template, run)
        killed = killed_before(number, lambda run=run: work(run))  # type: ignore[misc]
        yield run, killed
        shutil.rmtree(run)
        number += 1
    assert number > 10


@pytest.fixture
def run() -> Iterator[Path]:
    """In memory, where there is such a file system: a disk takes its time to sync and to remove folders."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sluice-run-", dir=memory if memory.is_dir() else None) as folder:
        run = Path(folder) / "run"
        (run / run_files.LEDGER).mkdir(parents=True)
        (run / run_files.LEDGER / "payloads").touch()
        yield run


@pytest.mark.parametrize("step", [40, 50], ids=["of the same step", "of the next one"])
@in_a_child
def test_the_only_checkpoint_is_there_until_another_is(run: Path, step: int) -> None:
    save(run, 40, "old", keep=1)
    seen = []
    for again, killed in every_crash(run, lambda run: save(run, step, "new", keep=1)):
        found = Path(auto(again))
        (word,) = words(found)
        assert found.name == (f"step-{step:08d}" if word == '"new"' else "step-00000040")
        assert (again / run_files.LEDGER / "payloads").exists()
        assert sorted(path.name for path in (again / run_files.CHECKPOINTS).glob(".*")) == []
        assert killed or word == '"new"'
        seen.append(word)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 2  # what counts once counts from then on


@in_a_child
def test_a_crash_while_the_run_is_begun_again_changes_nothing(run: Path) -> None:
    save(run, 40, "old", keep=1)
    for crashed, _ in every_crash(run, lambda run: save(run, 40, "new", keep=1)):
        for number in range(100):
            killed = killed_before(number, lambda run=crashed: auto(run))  # type: ignore[misc]
            if not killed:
                break
        found = Path(auto(crashed))
        assert len(words(found)) == 1 and found.name == "step-00000040"


@pytest.mark.parametrize("keep", [1, 2])
@in_a_child
def test_a_run_that_goes_back_keeps_its_base_until_it_has_saved_and_the_branch_that_it_left(run: Path, keep: int) -> None:
    for step in (40, 50, 60):
        save(run, step, "old", keep=9)

    def goes_back(run: Path) -> None:
        checkpoint.set_aside(run, 40, 2)
        save(run, 45, "new", keep)

    for again, killed in every_crash(run, goes_back):
        places = {path.parent.name for path in (again / run_files.CHECKPOINTS).rglob(checkpoint.POSITION)}
        assert {"step-00000050", "step-00000060"} <= places
        found = Path(auto(again))
        assert not checkpoint.fault(found)
        if not killed:
            assert found.name == "step-00000045"
            assert checkpoint.steps(again) == ([40, 45] if keep == 2 else [45])
        elif found.name != "step-00000045":
            assert checkpoint.steps(again)[0] == 40


@in_a_child
def test_the_model_is_there_until_another_is(run: Path) -> None:
    save(run, 40, "old", keep=1)
    export(run, "old")
    seen = []
    for again, killed in every_crash(run, lambda run: export(run, "new")):
        auto(again)
        (word,) = words(again / run_files.MODEL)
        assert killed or word == "new"
        seen.append(word)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 2


def test_what_is_half_deleted_under_its_own_name_is_not_whole(run: Path) -> None:
    """As whoever removes files by hand leaves it."""
    save(run, 40, "old", keep=9)
    save(run, 50, "old", keep=9)
    newest = checkpoint.folder_for(run, 50)
    (newest / "model" / "__0_0.distcp").unlink()
    assert Path(auto(run)) == checkpoint.folder_for(run, 40)
    chosen = config.Config(run=config.Run(name="a", dir=str(run), resume=str(newest)))
    with pytest.raises(UserError, match=r"^run.resume: .*step-00000050 is not whole: .*__0_0.distcp"):
        run_folder.begin(run, chosen)


def test_one_of_which_a_bit_has_changed_is_left_out_and_said_whoever_took_the_checksums(tmp_path: Path) -> None:
    """A position without checksums, as earlier versions wrote it, is taken as it is."""
    save(tmp_path, 40, "old", keep=9)
    newest, partial = checkpoint.folder_for(tmp_path, 50), checkpoint.begin(checkpoint.folder_for(tmp_path, 50))
    names = ("model/__0_0.distcp", "model/__1_0.distcp", TRAINER, "critic/rng.safetensors")
    for name in names:
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(name)
    for rank in (0, 1):
        checkpoint.note_sums(partial, rank)
    checkpoint.note_sums(partial / checkpoint.CRITIC, 0)
    (partial / "later").write_text("of none of them")
    checkpoint.complete(partial, newest, Position(version=PolicyVersion(0, 50), stream=STREAM, trained=[]))
    assert {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()} == {
        *names,
        "later",
        "position.msgpack",
    }
    assert checkpoint.read_position(newest).sums == {
        name: xxhash.xxh3_128_hexdigest((newest / name).read_bytes()) for name in (*names, "later")
    }
    for name in (*names, "later", checkpoint.POSITION):
        said: list[str] = []
        whole = (newest / name).read_bytes()
        for bit in (0, 8 * (len(whole) // 2) + 3, 8 * len(whole) - 1):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            (newest / name).write_bytes(changed)
            assert checkpoint.resolve("auto", tmp_path, said.append) == str(checkpoint.folder_for(tmp_path, 40)), (name, bit)
            assert said[-1].startswith(f"run.resume: {newest} is left out: ")
        (newest / name).write_bytes(whole)
    checkpoint.reposition(newest, replace(checkpoint.read_position(newest), accuracy=0.5, trained=[(0, 6)]))
    assert checkpoint.resolve("auto", tmp_path) == str(newest)
    (tmp_path / run_files.LEDGER).mkdir()
    (tmp_path / run_files.LEDGER / DATABASE).write_text("no database")
    said = []
    assert auto(tmp_path, said.append) == str(newest)
    assert "it is set aside as ledger.broken-1" in said[1]
    assert "7 of the 7 groups that step-00000050 has trained" in said[2]
    former = replace(checkpoint.read_position(newest), sums={}, own_sum="")
    (newest / checkpoint.POSITION).write_bytes(types.encode(former))
    (newest / "later").write_text("of NONE of them")
    assert checkpoint.resolve("auto", tmp_path) == str(newest)
    if Path("/dev/zero").exists():  # what a stranger's position may name has no end
        endless = replace(former, files={"/dev/zero": 0}, sums={"/dev/zero": "0" * 32})
        (newest / checkpoint.POSITION).write_bytes(types.encode(endless))
        assert checkpoint.fault(newest) == "/dev/zero is no file"


# ----------------------------------------------------------------------------------------------------- the newest that is whole


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for step in (10, 20):
        save(tmp_path, step, "word", keep=9)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "left", "fault"),
    [
        ("model/__0_0.distcp", -1, "model/__0_0.distcp has 5 bytes instead of 6"),
        (TRAINER, 0, "trainer.json has 0 bytes instead of 6"),
        (checkpoint.POSITION, 5, "truncated"),
    ],
)
def test_one_that_is_not_whole_is_left_out_and_said(two: Path, name: str, left: int, fault: str) -> None:
    newest = checkpoint.folder_for(two, 20)
    said: list[str] = []
    assert checkpoint.resolve("auto", two, said.append) == str(newest)
    assert said == []
    (newest / name).write_bytes((newest / name).read_bytes()[:left])
    assert checkpoint.resolve("auto", two, said.append) == str(checkpoint.folder_for(two, 10))
    (line,) = said
    assert line.startswith(f"run.resume: {newest} is left out: ")
    assert fault in line and "\n" not in line


def test_a_run_without_a_whole_one_is_not_begun_anew(two: Path) -> None:
    for step in (10, 20):
        (checkpoint.folder_for(two, step) / TRAINER).unlink()
    with pytest.raises(UserError, match=r"^run.resume: no checkpoint of .* is whole; step-00000020: .*No such file"):
        checkpoint.resolve("auto", two)


# --------------------------------------------------------------------------------------------------------------- parts on nodes
OWN, OTHER = "5f", "77"  # runs


def position(step: int, run: str = OWN, **values: Any) -> Position:
    return Position(version=PolicyVersion(0, step), stream=STREAM, trained=[], run=run, **values)


def write(place: Path, made: Position, content: str = "{}") -> Path:
    """A whole checkpoint, or part of one, with files unless it is the coordinator's alone."""
    folder = checkpoint.folder_for(place, made.version.step)
    partial = checkpoint.begin(folder)
    if not made.parts:
        (partial / TRAINER).write_text(content)
    checkpoint.complete(partial, folder, made)
    return folder


def configured(run_dir: Path, **sections: Any) -> Config:
    run = {"name": "a", "dir": str(run_dir)} | sections.pop("run", {})
    return msgspec.convert({"run": run, "model": {"path": "/m"}, "cluster": {"shared_folder": False}, **sections}, Config)


def test_parts_of_steps_that_do_not_count_go_at_the_next_save(tmp_path: Path) -> None:
    place = checkpoint.part_root(tmp_path, "b", "trainer")
    for step in (2, 4, 6):
        write(place, position(step))
    partial = checkpoint.begin_part(place, 8, keep=(4,))
    assert checkpoint.steps(place) == [4]
    assert partial == checkpoint.partial_of(checkpoint.folder_for(place, 8))
    assert list(partial.iterdir()) == []


def test_a_node_tells_of_the_parts_that_are_whole(tmp_path: Path) -> None:
    write(checkpoint.part_root(tmp_path, "b", "trainer"), position(2))
    torn = write(checkpoint.part_root(tmp_path, "b", "trainer"), position(4))
    (torn / TRAINER).write_text("")
    write(checkpoint.part_root(tmp_path, "b", "critic"), position(2))
    write(checkpoint.part_root(tmp_path, "another", "trainer"), position(2))
    assert checkpoint.whole_parts(tmp_path, "b") == ["trainer/b/5f/0.2", "critic/b/5f/0.2"]


def test_a_coordinators_folder_without_files_is_whole_and_taken_up_as_it_names_parts(tmp_path: Path) -> None:
    folder = write(tmp_path, position(2, parts=["trainer/b"]))
    assert checkpoint.fault(folder) == ""
    folder.rename(checkpoint.partial_of(folder))  # the coordinator was killed before the last rename
    checkpoint.sweep(tmp_path)
    assert checkpoint.steps(tmp_path) == [2]
    checkpoint.reposition(folder, position(2, pending=[7]))  # at the end of a run
    assert (checkpoint.read_position(folder).parts, checkpoint.read_position(folder).pending) == (["trainer/b"], [7])


def test_checkpoints_go_by_the_run_that_began_them_through_all_its_starts(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"\x12\x34")
    assert checkpoint.lineage(configured(tmp_path)) == "1234"
    folder = write(tmp_path, position(2, parts=["trainer/b"]))
    assert checkpoint.lineage(configured(tmp_path)) == OWN
    elsewhere = write(tmp_path / "elsewhere", position(2, run=OTHER))
    assert checkpoint.lineage(configured(tmp_path, run={"resume": str(elsewhere)})) == OTHER
    checkpoint.discard(folder)
    assert checkpoint.lineage(configured(tmp_path, run={"resume": str(folder)})) == "1234"


def told(run_dir: Path, found: list[str], **sections: Any) -> Nodes:
    """Node a is the coordinator's, node b has told `found`."""
    nodes = Nodes(configured(run_dir, **sections), True, Register())
    nodes._own_name = "a"
    for name, has in (("a", []), ("b", found)):
        nodes.roster.there[name] = nodes.roster.nodes[name] = None  # type: ignore[assignment]
        nodes.report_paths(NodePaths(node=name, parts=has))
    return nodes


@pytest.mark.parametrize(
    ("found", "newest"),
    [
        (["trainer/b/5f/0.2", "trainer/b/5f/0.4"], 4),
        (["trainer/b/5f/0.2", "trainer/b/5f/1.4"], 2),  # its step 4 is of another branch
        (["trainer/b/5f/0.2", "critic/b/5f/0.4"], 2),
        (["trainer/b/5f/0.4"], 4),
        ([], 0),
    ],
)
def test_it_goes_on_from_the_newest_step_that_is_whole_on_every_node(tmp_path: Path, found: list[str], newest: int) -> None:
    folders = {step: write(tmp_path, position(step, parts=["trainer/b"])) for step in (2, 4)}
    nodes = told(tmp_path, found, run={"resume": "auto"})
    if newest:
        assert nodes.resume() == str(folders[newest])
        return
    with pytest.raises(
        UserError, match=rf"^run.resume: no checkpoint of {tmp_path} is whole; step-00000004: node b has no complete "
    ):
        nodes.resume()


def test_one_that_is_named_is_taken_or_refused(tmp_path: Path) -> None:
    folders = {step: write(tmp_path, position(step, parts=["trainer/b", "trainer/c"])) for step in (2, 4)}
    nodes = told(tmp_path, ["trainer/b/5f/0.2"], run={"resume": str(folders[2])})
    with pytest.raises(UserError, match=r"is not whole: node c has no complete part of the trainer, or is not in this run$"):
        nodes.resume()


def test_another_runs_parts_are_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"\x12\x34")
    with pytest.raises(
        UserError, match=rf"^run.dir: {tmp_path}/parts of node b has checkpoints of another run; move it away, or "
    ):
        told(tmp_path, ["trainer/b/5f/0.2"])
    told(tmp_path, ["trainer/b/1234/0.2"])
    told(tmp_path, ["trainer/b/5f/0.2"], run={"overwrite": True})


TWO = {"nodes": [{"name": "a"}, {"name": "b"}]}
REFUSED = "is for nodes that share a folder, and cluster.shared_folder is false; must be left out"
REACHED = {"coordinator": {"host": "10.0.0.1", "port": 7000}}


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({}, ""),
        ({"services": {"coordinator": REACHED["coordinator"] | {"standby": "b"}}}, f"services.coordinator.standby: {REFUSED}"),
        (
            {"cluster": TWO, "checkpoint": {"gather": True}},
            "checkpoint.gather: true, but with cluster.shared_folder all is in one folder; must be false",
        ),
    ],
)
def test_what_needs_a_shared_folder_is_refused_without_one(tmp_path: Path, sections: dict[str, Any], line: str) -> None:
    given = {"cluster": TWO | {"shared_folder": False}, "services": REACHED, "network": {"interface": "auto"}} | sections
    found = [fault for fault in semantic_faults(configured(tmp_path, **given)) if "shared_folder" in fault]
    assert found == ([line] if line else [])


def test_nodes_that_share_no_folder_need_the_secret_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = configured(tmp_path, cluster=TWO | {"shared_folder": False})
    monkeypatch.setattr("launcher.node.local_node.own_address", lambda *_: "192.0.2.7")
    monkeypatch.delenv("SLUICE_SECRET", raising=False)
    with pytest.raises(UserError, match=r"^SLUICE_SECRET: missing; cluster.shared_folder is false, so it must be set"):
        check_secret(alone)
    check_secret(replace(alone, network=replace(alone.network, security="none")))
    monkeypatch.setenv("SLUICE_SECRET", "5" * 64)
    check_secret(alone)
    assert on_this_machine(alone).network.interface == "192.0.2.7"
