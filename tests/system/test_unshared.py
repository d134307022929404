"""A run over three nodes that share no folder: each has its own mounts, with a folder of its own for the run and for the model.

The ranks of the trainer are on two of them, neither of which is the coordinator's.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from runtime.ledger import checkpoint
from tests.system.chaos import check_ledger
from tests.system.cluster import NAMES, Cluster, cluster
from tests.system.runs import one_line, steps, write_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces")]

START = 180.0  # seconds, as of test_cluster
FIRST, SECOND, THIRD = NAMES
SECTIONS = {
    "cluster": {"nodes": [{"name": name} for name in NAMES], "shared_folder": False},
    "checkpoint": {"every": 2, "keep": 9},
    "deadlines": {"keepalive": 5.0, "stop": 60.0},
    "algorithm": {"kl_coefficient": 0.0},
    "services": {
        "trainer": {"processes": 2, "placement": [SECOND, THIRD]},
        "reward": {"placement": [FIRST]},
        "rollout": {"replicas": 1, "placement": [FIRST]},
    },
}
no_megatron = importlib.util.find_spec("megatron") is None
ENGINES = [
    pytest.param(["services.trainer.engine=torch"], id="torch", marks=() if no_megatron else pytest.mark.long),
    pytest.param(
        ["services.trainer.engine=megatron", "services.trainer.parallel.pipeline=2"],
        id="megatron",
        marks=pytest.mark.skipif(no_megatron, reason="needs megatron-core: make install-dev"),
    ),
]


@pytest.fixture
def own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What each node has for itself: the run's folder, and one with a copy of the model; the first has the data there too."""
    folders = [tmp_path / "run", tmp_path / "tiny"]
    for folder in folders:
        folder.mkdir()
        for name in NAMES:
            folder.with_name(f"{folder.name}.{name}").mkdir()
    for name in NAMES:
        shutil.copytree(tiny / "model", tmp_path / f"tiny.{name}" / "model")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(tiny / name, tmp_path / f"tiny.{FIRST}")
    monkeypatch.setenv("SLUICE_SECRET", "5" * 64)
    return folders


def part(run: Cluster, name: str, step: int) -> Path:
    return checkpoint.folder_for(checkpoint.part_root(run.place(name, run.own[0]), name, "trainer"), step)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_are_killed_and_it_goes_on_from_the_newest_step_that_is_whole_on_every_node(
    tmp_path: Path, own: list[Path], engine: list[str]
) -> None:
    """One node has another model at first, and is named."""
    made = write_config(tmp_path / "config.yaml", own[1], **SECTIONS)
    settings = tmp_path / f"tiny.{THIRD}" / "model" / "config.json"
    right = settings.read_text()
    with cluster(made, *engine, "training.steps=100000", folder=own[0], own=own, start=2) as run:
        settings.write_text(right + "\n")
        run.start(THIRD, torchrun=False)
        assert run.agents[THIRD].wait(START) == 2
        told = rf"error: model\.path: {own[1]}/model is not the same on node {THIRD} \(hash \w+\) as on {FIRST} \(\w+\)"
        assert re.fullmatch(told, one_line(run.agents[THIRD].errors))
        settings.write_text(right)
        run.start(THIRD)
        run.run.comes(lambda: len(checkpoint.steps(run.folder)) > 1, START, "two checkpoints")
        for name in (THIRD, FIRST, SECOND):  # in the middle of whatever they do
            run.node(name).kill()
    *_, older, newest = checkpoint.steps(run.folder)
    assert [path.name for path in checkpoint.folder_for(run.folder, older).iterdir()] == [checkpoint.POSITION]
    assert (part(run, SECOND, older) / "trainer.json").exists()
    if "megatron" in engine[0]:
        written = [sorted(path.name for path in part(run, name, older).rglob("*.distcp")) for name in (SECOND, THIRD)]
        assert written == [["__0_0.distcp"], ["__1_0.distcp"]]
    (torn := part(run, SECOND, newest) / "trainer.json").write_bytes(b"{")

    with cluster(
        made, *engine, f"training.steps={newest + 2}", "run.resume=auto", "checkpoint.gather=true", folder=own[0], own=own
    ) as run:
        assert [run.agents[name].wait(2 * START) for name in NAMES] == [0, 0, 0], run.said()
    said = f"step-{newest:08d} is left out: node {SECOND} has no complete part of the trainer"
    assert said in run.log("coordinator")
    assert torn.read_bytes() != b"{"  # it was set aside on both, and written anew
    for kept in (checkpoint.folder_for(run.folder, newest), torn.parent):
        assert (kept.parent / "dead-1" / kept.name / checkpoint.POSITION).exists()
    assert [point["step"] for point in steps(run.folder)][-(newest + 2 - older) :] == list(range(older + 1, newest + 3))
    check_ledger(run.folder / "ledger")
    last = checkpoint.folder_for(run.folder, newest + 2)
    assert checkpoint.read_position(last).parts == [f"trainer/{SECOND}"]
    if "megatron" in engine[0]:  # gathered
        assert len(list(part(run, SECOND, newest + 2).rglob("*.distcp"))) == 2
    assert (run.place(SECOND, own[0]) / "model" / "model.safetensors").exists()
