"""What the launcher gives each process: devices, the ports of HCCL, jemalloc, and a file of variables by role."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.node.local_node import Machine, jemalloc_paths, this_machine
from launcher.node.topology import port_ranges, service_specs
from runtime.cluster.nodes import Launch, NodeRegistration, launches
from runtime.cluster.placement import NodeResources, place
from runtime.config import Config, loading
from runtime.config.service_checks import device_faults

PORTS = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def npus(count: int, **others: Any) -> Machine:
    return Machine(kind="npu", devices=tuple(map(str, range(count))), **others)


def environments(machine: Machine, **sections: Any) -> dict[str, dict[str, Any]]:
    config, here = make(**sections), NodeRegistration(name="here", address="127.0.0.1")
    placement = place(config, [NodeResources("here", len(machine.devices))])
    started = launches(config, placement, {"here": here}, {}, b"")["here"]
    specs = service_specs(config, started, Path("c.yaml"), "python", "host:1", 8, machine)
    return {name: dict(spec.env) for name, spec in specs.items()}


class TestPorts:
    SHARED: Any = {"rollout": {"replicas": 2, "colocate": "trainer"}, "trainer": {"processes": 2}}  # noqa: RUF012

    def test_processes_that_share_an_npu_meet_on_ports_of_their_own(self) -> None:
        found = environments(npus(8), services=self.SHARED)
        ranges = {tuple(found[name][port] for port in PORTS) for name in ("trainer-0", "rollout-0", "rollout-1")}
        assert ranges == {("60000-60050", "61000-61050"), ("60051-60101", "61051-61101"), ("60102-60152", "61102-61152")}
        assert not set(PORTS) & found["reward-0"].keys()

    def test_whatever_names_its_own_ports_keeps_them(self) -> None:
        services = {"rollout": {"colocate": "trainer"}, "trainer": {"env": {PORTS[1]: "auto"}}}
        assert environments(npus(1), services=services)["trainer-0"][PORTS[1]] == "auto"

    OVER_HCCL: Any = {  # noqa: RUF012
        "weight_sync": {"backend": "hccl"},
        "services": {"rollout": {"engine": "vllm", "parallel": {"tensor": 2}}},
    }

    def test_a_rollout_that_receives_beside_its_workers_has_ports_and_so_have_all(self) -> None:
        """vLLM's first worker and the rollout's own process are on one NPU, and take ports of one range."""
        found = environments(npus(4), **self.OVER_HCCL)
        assert [tuple(found[name][port] for port in PORTS) for name in ("rollout-0", "trainer-0")] == [
            ("60000-60050", "61000-61050"),
            ("60051-60101", "61051-61101"),
        ]
        trainer_alone = {"rollout": {"replicas": 1, "placement": ["other"]} | self.OVER_HCCL["services"]["rollout"]}
        there = make(**self.OVER_HCCL | {"services": trainer_alone})
        launch = Launch(role="trainer", name="trainer-0", ranks=[0], devices=[0])
        env = service_specs(there, [launch], Path("c.yaml"), "python", "host:1", 8, npus(1))["trainer-0"].env
        assert env[PORTS[0]] == "60000-60050"

    @pytest.mark.parametrize(
        "other",
        [
            {"weight_sync": {}},  # shared memory, on one machine
            {"weight_sync": {"backend": "gloo", "transport": "collective"}},
            {"services": {"rollout": {"engine": "vllm"}}},  # whose one worker meets nobody
        ],
    )
    def test_there_are_none_where_nothing_is_shared_nor_received_beside(self, other: dict[str, Any]) -> None:
        apart = {"services": {"rollout": {"replicas": 2}, "trainer": {"processes": 2}}}
        for found in (
            environments(npus(4), **self.OVER_HCCL | other),
            environments(npus(4), **apart),
            environments(Machine(), services=self.SHARED),  # without NPUs
        ):
            assert not any(set(PORTS) & env.keys() for env in found.values())

    def test_between_machines_auto_is_hccl(self) -> None:
        sections = self.OVER_HCCL | {"weight_sync": {}, "network": {"interface": "10.1.0.1"}}
        assert set(PORTS) <= environments(npus(4), **sections)["rollout-0"].keys()

    @pytest.mark.parametrize("count", [1, 2, 19, 20, 200, 1000])
    def test_ranges_are_distinct_and_within_their_bounds(self, count: int) -> None:
        ranges = [tuple(map(int, text.split("-"))) for text in port_ranges((64_536, 65_535), count)]
        assert len(ranges) == count
        assert all(64_536 <= first <= last <= 65_535 for first, last in ranges)
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(ranges))

    def test_more_processes_than_ports_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="3 processes do not fit into the ports 60000 to 60001"):
            port_ranges((60_000, 60_001), 3)


class TestDevices:
    def test_each_process_sees_its_own(self) -> None:
        services = {"rollout": {"replicas": 2, "devices": [4, 5]}, "trainer": {"processes": 4, "devices": [0, 1, 2, 3]}}
        seen = {"rollout-0": "4", "rollout-1": "5", "reward-0": None, "trainer-0": "0,1,2,3"}
        found = environments(npus(8), services=services)
        assert {name: env.get("ASCEND_RT_VISIBLE_DEVICES") for name, env in found.items()} == seen
        found = environments(Machine(kind="cuda", devices=tuple(map(str, range(8)))), services=services)
        assert {name: env.get("CUDA_VISIBLE_DEVICES") for name, env in found.items()} == seen

    def test_they_are_counted_among_those_that_the_launcher_sees(self) -> None:
        found = environments(Machine(kind="cuda", devices=("5", "GPU-8f2e")), services={"rollout": {"devices": [1]}})
        assert (found["trainer-0"]["CUDA_VISIBLE_DEVICES"], found["rollout-0"]["CUDA_VISIBLE_DEVICES"]) == ("5", "GPU-8f2e")

    @pytest.mark.parametrize(
        ("services", "said"),
        [
            (
                {"rollout": {"replicas": 2, "devices": [0, 1, 2]}},
                "services.rollout.devices: 3 of them, but its processes take 2",
            ),
            ({"trainer": {"processes": 2, "devices": [0]}}, "services.trainer.devices: 1 of them, but its processes take 2"),
            (
                {"trainer": {"processes": 2, "devices": [0, 0]}},
                "services.trainer.devices: names 0 twice; must name each device once",
            ),
        ],
    )
    def test_a_number_that_does_not_fit_is_one_line(self, services: dict[str, Any], said: str) -> None:
        (fault,) = device_faults(make(services=services), trains=True)
        assert fault.startswith(said)


class TestJemalloc:
    FOUND = "/usr/lib64/libjemalloc.so.2"

    def test_auto_preloads_it_on_npu_machines_into_what_computes(self) -> None:
        found = environments(npus(2, jemalloc=self.FOUND, preload="/other.so"))
        assert found["trainer-0"]["LD_PRELOAD"] == found["rollout-0"]["LD_PRELOAD"] == f"{self.FOUND}:/other.so"
        assert "LD_PRELOAD" not in found["reward-0"]
        assert "LD_PRELOAD" not in environments(Machine(jemalloc=self.FOUND))["trainer-0"]
        assert "LD_PRELOAD" not in environments(npus(2))["trainer-0"]

    @pytest.mark.parametrize("asked", ["/mine.so", ""])
    def test_a_roles_own_variable_stands_over_it(self, asked: str) -> None:
        found = environments(npus(2, jemalloc=self.FOUND), services={"trainer": {"env": {"LD_PRELOAD": asked}}})
        assert found["trainer-0"]["LD_PRELOAD"] == asked


class TestMachine:
    @pytest.mark.parametrize("folder", ["usr/lib/aarch64-linux-gnu", "usr/lib64"], ids=["ubuntu", "openeuler"])
    def test_npus_and_jemalloc_are_found_by_their_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
    ) -> None:
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,0")
        for file in ("dev/davinci0", "dev/davinci1", "dev/davinci_manager", f"{folder}/libjemalloc.so.2"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        found = this_machine(tmp_path)
        assert (found.kind, found.devices, found.jemalloc) == ("npu", ("1", "0"), f"/{folder}/libjemalloc.so.2")
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
        assert this_machine(tmp_path).devices == ("0", "1")
        assert "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2" in jemalloc_paths("x86_64")

    def test_a_machine_without_either(self, tmp_path: Path) -> None:
        assert this_machine(tmp_path) == Machine(
            cpus=frozenset(os.sched_getaffinity(0)), preload=os.environ.get("LD_PRELOAD", ""), variables=frozenset(os.environ)
        )

    def test_gpus_are_found_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (tmp_path / "dev").mkdir()
        for file in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (tmp_path / "dev" / file).touch()
        assert (this_machine(tmp_path).kind, this_machine(tmp_path).devices) == ("cuda", ("0", "1"))


class TestFileOfVariables:
    def test_variables_of_ones_own_stand_over_the_files(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("run: {name: a}\nservices:\n  platform: ascend\n  trainer: {env: {HCCL_BUFFSIZE: '512', A: b}}\n")
        services = loading.load(path, ["services.rollout.max_num_seqs=7"]).services
        trainer = services.trainer.env
        assert (trainer["HCCL_BUFFSIZE"], trainer["A"], trainer["HCCL_CONNECT_TIMEOUT"]) == ("512", "b", "1800")
        assert (services.rollout.env["VLLM_ASCEND_ENABLE_NZ"], services.rollout.max_num_seqs) == ("0", 7)

    def test_a_resolved_file_outlives_it(self, tmp_path: Path) -> None:
        preset, path, again = tmp_path / "mine.yaml", tmp_path / "c.yaml", tmp_path / "again.yaml"
        preset.write_text("rollout: {env: {A: b}, max_num_seqs: 3}\n")
        path.write_text(f"run: {{name: a}}\nservices: {{platform: {preset}, rollout: {{max_num_seqs: 9}}}}\n")
        first = loading.load(path)
        assert (first.services.rollout.env, first.services.rollout.max_num_seqs) == ({"A": "b"}, 9)
        preset.unlink()
        again.write_text(loading.to_yaml(first))
        assert loading.load(again) == first

    def test_naming_every_role_does_not_switch_it_off(self, tmp_path: Path) -> None:
        roles = ["coordinator", "reward", "reward_model", "reference", "critic", "rollout"]
        path = tmp_path / "c.yaml"
        path.write_text(
            "run: {name: a}\nservices:\n  platform: ascend\n  trainer: {processes: 1}\n"
            + "".join(f"  {role}: {{cpus: ''}}\n" for role in roles)
        )
        assert loading.load(path).services.trainer.env["TASK_QUEUE_ENABLE"] == "2"

    def test_every_file_that_is_delivered_is_whole(self, tmp_path: Path) -> None:
        assert loading.preset_names("services.platform") == ["ascend"]
        for name in loading.preset_names("services.platform"):
            path = tmp_path / "c.yaml"
            path.write_text(f"run: {{name: a}}\nservices: {{platform: {name}}}\n")
            assert loading.load(path).services != loading.load(path, ["services.platform=''"]).services
