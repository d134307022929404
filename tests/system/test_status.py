"""Looking at a run while it is under way, and the commands that start nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.system.runs import LONG, ROOT, Live, check_gone, eventually, one_line, sluice, started, write_config

pytestmark = pytest.mark.timeout(400)

PATIENCE = 150.0  # seconds that one answer may take on a busy machine
MEMBERS = {
    "coordinator": "Coordinator",
    "rollout-0": "Rollout",
    "rollout-1": "Rollout",
    "reward-0": "Reward",
    "reference-0": "Reference",
    "trainer-0": "Trainer",
    "trainer-1": "Trainer",
}


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run with a trainer of two ranks, in the middle of its training."""
    folder = tmp_path_factory.mktemp("live")
    config = write_config(folder / "config.yaml", tiny, services={"trainer": {"processes": 2}})
    with started(config, *LONG, folder=folder / "run") as run:
        run.reaches(3)
        yield run
        run.interrupt()
        run.wait(2 * PATIENCE)
        check_gone(run.folder)


def table(text: str) -> dict[str, list[str]]:
    """The cells of each process's row in the first table."""
    first = text[: text.index("└")]
    rows = ([cell.strip() for cell in line.strip("│ \n").split("│")] for line in first.splitlines() if "│" in line)
    return {row[0]: row for row in rows}


def addresses(live: Live) -> dict[str, str]:
    return {name: row[-1] for name, row in table(sluice("status", str(live.folder)).stdout).items()}


def test_status_shows_every_process(live: Live) -> None:
    ended = sluice("status", str(live.folder), timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "training" in ended.stdout
    assert "weights by shared_memory" in " ".join(ended.stdout.split())
    rows = table(ended.stdout)
    assert rows.keys() == MEMBERS.keys()
    for name, row in rows.items():
        assert row[1] == "ready", row
        rank = 1 if name == "trainer-1" else 0
        assert int(row[-2]) == live.member(name.replace("-1", "-0") if rank else name, rank).pid
    for name in ("rollout-0", "trainer-0", "trainer-1"):
        assert int(rows[name][2].partition(".")[2]) >= 1  # it has come to a version of its own


def test_status_takes_an_address_too_with_the_runs_secret(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    address = (live.folder / "coordinator.address").read_text().strip()
    asked = "needs a key of this run"
    for secret, said in ((None, asked), ("00" * 32, asked), ("1", "64 hexadecimal digits")):
        if secret is not None:
            monkeypatch.setenv("SLUICE_SECRET", secret)
        ended = sluice("status", address, timeout=PATIENCE)
        assert ended.returncode == 2 and said in one_line(ended.stderr)
    monkeypatch.setenv("SLUICE_SECRET", (live.folder / ".secret").read_text())
    assert table(sluice("status", address, timeout=PATIENCE).stdout).keys() == MEMBERS.keys()


class Shown(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds a header, as grpcurl does."""

    def __init__(self, header: str):
        key, _, value = header.partition(":")
        self._metadata = ((key, value),)

    def _with(self, details: Any) -> Any:
        return details._replace(metadata=self._metadata)

    def intercept_unary_unary(self, go_on: Any, details: Any, request: Any) -> Any:
        return go_on(self._with(details), request)

    def intercept_stream_stream(self, go_on: Any, details: Any, requests: Any) -> Any:
        return go_on(self._with(details), requests)


def test_every_process_answers_health_and_reflection(live: Live) -> None:
    found = addresses(live)
    assert len(set(found.values())) == len(MEMBERS)  # each has a port of its own
    for name, address in found.items():
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            plain, _, header, asked = sluice("status", str(live.folder), "--grpcurl", name, timeout=PATIENCE).stdout.split()
            assert (plain, asked) == ("-plaintext", address)
            with pytest.raises(grpc.RpcError, match="needs a key of this run"):
                ProtoReflectionDescriptorDatabase(channel).get_services()
            database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, Shown(header)))
            assert {f"sluice.v1.{MEMBERS[name]}", "sluice.v1.Process", "grpc.health.v1.Health"} <= set(database.get_services())
            service = DescriptorPool(database).FindServiceByName(f"sluice.v1.{MEMBERS[name]}")
            assert service.methods


def test_a_second_run_in_the_same_folder_is_refused(live: Live) -> None:
    ended = sluice("train", str(live.folder / "config.yaml"), "run.resume=auto", timeout=PATIENCE)
    assert ended.returncode == 2
    assert str(live.folder) in one_line(ended.stderr)
    assert live.process.poll() is None


def test_samples_can_be_looked_at_meanwhile(live: Live) -> None:
    ended = sluice("samples", str(live.folder), "--jsonl", "--limit", "2", "--state", "retired", timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2 * 4


def test_validate_says_what_would_run(config: Path) -> None:
    ended = sluice("validate", str(config), "services.trainer.processes=2", timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "coordinator: " in ended.stdout
    (row,) = (line for line in ended.stdout.splitlines() if "trainer-0" in line)  # of this machine, which has no accelerators
    assert {name.strip() for name in row.split("│")[-2].split(",")} == set(MEMBERS) - {"coordinator"}


@pytest.mark.parametrize("name", ["quickstart.yaml", "gsm8k.yaml"])
def test_a_configuration_that_is_shipped_is_valid_as_it_is(name: str) -> None:
    ended = sluice("validate", str(ROOT / "configs" / name), timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr


def test_the_schema_describes_every_section() -> None:
    ended = sluice("schema", timeout=PATIENCE)
    schema = json.loads(ended.stdout)
    assert schema["$schema"].endswith("2020-12/schema")
    sections = schema["$defs"]["Config"]["properties"]
    assert {"run", "model", "data", "training", "services", "algorithm"} <= sections.keys()
    assert schema["$defs"]["Training"]["properties"]["staleness"]["minimum"] == 0


def test_help_names_the_commands() -> None:
    said = sluice("--help", timeout=PATIENCE).stdout
    assert all(command in said for command in ("train", "validate", "schema", "status", "samples", "bench"))


def test_a_run_is_scaled_up_and_down_while_it_trains(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", tiny)
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.reaches(3)
        assert sluice("scale", "rollout=3", str(run.folder), timeout=PATIENCE).stdout == "started: rollout-2\n"

        def serves() -> bool:
            row = table(sluice("status", str(run.folder), timeout=PATIENCE).stdout).get("rollout-2", [""] * 3)
            return row[1] == "ready" and int(row[2].partition(".")[2]) > 0  # it has weights of a step, and groups to make

        eventually(serves, PATIENCE, "rollout-2 serves")
        assert sluice("scale", "rollout=1", str(run.folder), timeout=PATIENCE).stdout == "stopped: rollout-1, rollout-2\n"
        run.reaches(run.steps() + 3)
