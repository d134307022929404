"""Checkpoints whose parts lie on nodes that share no folder: which parts stay, and which checkpoints count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from launcher.node.machine import on_this_machine
from runtime.cluster.nodes import NodePaths
from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.coordinator.register import Register
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.ledger import checkpoint, node_checkpoints
from runtime.ledger.position import Position
from runtime.types import PolicyVersion
from services.nodes import Nodes

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
OWN, OTHER = "5f", "77"  # runs


def position(step: int, run: str = OWN, **values: Any) -> Position:
    return Position(version=PolicyVersion(0, step), stream=STREAM, trained=[], run=run, **values)


def write(place: Path, made: Position, content: str = "{}") -> Path:
    """A whole checkpoint, or part of one, with files unless it is the coordinator's alone."""
    folder = checkpoint.folder_for(place, made.version.step)
    partial = checkpoint.begin(folder)
    if not made.parts:
        (partial / checkpoint.TRAINER).write_text(content)
    checkpoint.complete(partial, folder, made)
    return folder


def config(run_dir: Path, **sections: Any) -> Config:
    run = {"name": "a", "dir": str(run_dir)} | sections.pop("run", {})
    return msgspec.convert({"run": run, "model": {"path": "/m"}, "cluster": {"shared_folder": False}, **sections}, Config)


def test_parts_of_steps_that_do_not_count_go_at_the_next_save(tmp_path: Path) -> None:
    place = node_checkpoints.root(tmp_path, "b", "trainer")
    for step in (2, 4, 6):
        write(place, position(step))
    partial = node_checkpoints.begin(place, 8, keep=(4,))
    assert checkpoint.steps(place) == [4]
    assert partial == checkpoint.partial_of(checkpoint.folder_for(place, 8))
    assert list(partial.iterdir()) == []


def test_a_node_tells_of_the_parts_that_are_whole(tmp_path: Path) -> None:
    write(node_checkpoints.root(tmp_path, "b", "trainer"), position(2))
    torn = write(node_checkpoints.root(tmp_path, "b", "trainer"), position(4))
    (torn / checkpoint.TRAINER).write_text("")
    write(node_checkpoints.root(tmp_path, "b", "critic"), position(2))
    write(node_checkpoints.root(tmp_path, "another", "trainer"), position(2))
    assert node_checkpoints.whole(tmp_path, "b") == ["trainer/b/5f/0.2", "critic/b/5f/0.2"]


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
    assert node_checkpoints.lineage(config(tmp_path)) == "1234"
    folder = write(tmp_path, position(2, parts=["trainer/b"]))
    assert node_checkpoints.lineage(config(tmp_path)) == OWN
    elsewhere = write(tmp_path / "elsewhere", position(2, run=OTHER))
    assert node_checkpoints.lineage(config(tmp_path, run={"resume": str(elsewhere)})) == OTHER
    checkpoint.discard(folder)
    assert node_checkpoints.lineage(config(tmp_path, run={"resume": str(folder)})) == "1234"


def told(run_dir: Path, found: list[str], **sections: Any) -> Nodes:
    """Node a is the coordinator's, node b has told `found`."""
    nodes = Nodes(config(run_dir, **sections), True, Register())
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
        UserError, match=rf"^run.resume: no checkpoint of {tmp_path} is whole; step-00000004: node b has not the "
    ):
        nodes.resume()


def test_one_that_is_named_is_taken_or_refused(tmp_path: Path) -> None:
    folders = {step: write(tmp_path, position(step, parts=["trainer/b", "trainer/c"])) for step in (2, 4)}
    nodes = told(tmp_path, ["trainer/b/5f/0.2"], run={"resume": str(folders[2])})
    with pytest.raises(
        UserError, match=r"is not whole: node c has not the trainer's part of it whole, or takes no part in it$"
    ):
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
        (
            {"publication": {"transport": "files", "folder": "/tmp/w"}},
            f"publication.folder: {REFUSED}",
        ),
        (
            {"services": {"coordinator": REACHED["coordinator"] | {"standby": "b"}}},
            f"services.coordinator.standby: {REFUSED}",
        ),
        (
            {"cluster": TWO, "checkpoint": {"gather": True}},
            "checkpoint.gather: true, but with cluster.shared_folder all is in one folder; must be false",
        ),
    ],
)
def test_what_needs_a_shared_folder_is_refused_without_one(tmp_path: Path, sections: dict[str, Any], line: str) -> None:
    given = {"cluster": TWO | {"shared_folder": False}, "services": REACHED, "network": {"interface": "auto"}} | sections
    found = [fault for fault in semantic_faults(config(tmp_path, **given)) if "shared_folder" in fault]
    assert found == ([line] if line else [])


def test_nodes_that_share_no_folder_need_the_secret_in_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = config(tmp_path, cluster=TWO | {"shared_folder": False})
    monkeypatch.setattr("launcher.node.machine.own_address", lambda *_: "192.0.2.7")
    monkeypatch.delenv("SLUICE_SECRET", raising=False)
    with pytest.raises(UserError, match=r"^SLUICE_SECRET: missing; cluster.shared_folder is false, so it must be set"):
        on_this_machine(alone)
    on_this_machine(replace(alone, network=replace(alone.network, security="none")))
    monkeypatch.setenv("SLUICE_SECRET", "5" * 64)
    assert on_this_machine(alone).network.interface == "192.0.2.7"
