"""`sluice render`: what all targets have in common, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.render import compose, kubernetes, slurm
from launcher.render.plan import label, shared_folder
from runtime.errors import ConfigError
from tests.unit.render_cases import auto, listed, made

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_plan_has_as_many_nodes_as_the_run_waits_for() -> None:
    assert [node.devices for node in made("cuda", 8, **auto(3)).nodes] == [8, 8, 8]
    assert len(made().nodes) == 1
    named = made("npu", 4, **listed(a=8, b=None))
    assert [(node.name, node.devices) for node in named.nodes] == [("a", 8), ("b", 4)]


def test_the_device_follows_from_the_environment_unless_it_is_said() -> None:
    assert made(services={"platform": "ascend"}, devices=8).device == "npu"
    assert made("cpu", services={"platform": "ascend"}).device == "cpu"
    assert made().device == "cpu"


def test_loopback_is_left_for_an_address_that_others_reach() -> None:
    assert made().config.network.interface == "auto"
    assert made(network={"interface": "::1"}).config.network.interface == "auto"
    assert made(network={"interface": "eth1"}).config.network.interface == "eth1"


@pytest.mark.parametrize(("text", "made_of_it"), [("My run_1", "my-run-1"), ("--", ""), ("grpo/v2.", "grpo-v2")])
def test_names_become_those_of_hosts(text: str, made_of_it: str) -> None:
    assert label(text) == made_of_it


@pytest.mark.parametrize(
    ("directory", "folder"),
    [("runs/x", "/home/sluice/runs"), ("/shared/team/x", "/shared/team"), ("a/b/x", "/home/sluice/a/b")],
)
def test_the_folder_above_the_runs_is_shared(directory: str, folder: str) -> None:
    assert shared_folder(made(run={"name": "x", "dir": directory}).config) == folder


@pytest.mark.parametrize("directory", ["x", "/x", "/home/x", "runs/../x"])
def test_a_folder_that_would_hide_others_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match=f"run.dir: '{directory}' needs a folder of its own"):
        shared_folder(made(run={"name": "x", "dir": directory}).config)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "cuda"}, "--devices: missing; with --device cuda"),
        ({"device": "npu", **listed(a=8, b=None)}, "cluster.nodes.1.devices: not set; with --device npu"),
        ({"devices": 8}, "--devices: 8, but --device is cpu"),
        ({"device": "cuda", "devices": 0}, "--devices: 0 is not an integer of at least 1"),
        (listed(a=8), "cluster.nodes.0.devices: 8, but --device is cpu"),
        ({"cluster": {"nodes": []}}, "cluster.nodes: empty"),
        (
            {"cluster": {"nodes": [{"name": "a"}, {"name": "a"}]}},
            "cluster.nodes.1.name: 'a' is that of another node; must be its own",
        ),
        ({"run": {"name": "..."}}, "run.name: '...' has neither"),
    ],
)
def test_what_cannot_be_planned_is_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**arguments)
    assert [said in fault for fault in refused.value.faults] == [True]


@pytest.mark.parametrize("target", [kubernetes, compose])
def test_nodes_that_cannot_name_hosts_are_refused(target: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        target.render(made(cluster={"nodes": [{"name": "Node_1"}, {"name": "b"}, {"name": "c-"}]}))
    assert [fault.partition(":")[0] for fault in refused.value.faults] == ["cluster.nodes.0.name", "cluster.nodes.2.name"]


@pytest.mark.parametrize("target", [slurm, kubernetes, compose])
def test_the_same_run_gives_the_same_files_which_say_where_they_are_from(target: Any) -> None:
    files = target.render(made("cuda", 2, **auto(2)))
    assert files == target.render(made("cuda", 2, **auto(2)))
    name = target.__name__.rpartition(".")[2]
    first = next(iter(files.values())).splitlines()[:2]
    assert any(line.startswith(f"# Written by `sluice render {name}`") for line in first)


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "compose"])
def test_the_command_writes_files_and_spares_what_was_changed(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("render", target, ROOT / "configs" / "quickstart.yaml", "cluster.min_nodes=2", "--output", tmp_path / "out")
    assert command(*arguments) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    assert command(*arguments) == 0
    paths[0].write_text("mine")
    capsys.readouterr()
    assert command(*arguments) == 2
    assert capsys.readouterr().err == f"error: --output: {paths[0]} is there and differs; remove it, or name another folder\n"
    assert paths[0].read_text() == "mine"


def test_a_mistake_in_the_configuration_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "configs" / "quickstart.yaml"
    assert command("render", "slurm", config, "cluster.min_node=2", "--output", tmp_path / "out") == 2
    assert "cluster.min_node: unknown key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
