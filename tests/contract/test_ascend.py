"""What Sluice calls of torch_npu and vllm-ascend is there, under these names and with these arguments.

Neither can be imported without CANN and an NPU, so their published wheels are read instead. What Sluice uses is read from its
own source: a call that is added tomorrow is checked tomorrow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import yaml

from launcher.node.local_node import VISIBLE
from runtime.process import platform
from runtime.rollout.vllm.worker import CHECK_FORMAT
from runtime.weights.collective import KINDS
from tests.contract.wheels import PINS, NotToBeHad, Wheel, wheel
from tests.unit.test_rules import ROOT, TREES

STAND_IN = ROOT / "tests" / "simulated_npu" / "torch_npu"
WORKER = "runtime/rollout/vllm/worker.py"  # what Sluice mixes into vLLM's workers
HEADER = "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"

pytestmark = pytest.mark.timeout(300)


def fetched(package: str) -> Wheel:
    try:
        return wheel(package)
    except NotToBeHad as why:
        pytest.skip(f"the contract with {package} is not checked: {why}")


@pytest.fixture(scope="module")
def torch_npu() -> Wheel:
    return fetched("torch-npu")


@pytest.fixture(scope="module")
def vllm_ascend() -> Wheel:
    return fetched("vllm-ascend")


# ------------------------------------------------------------------------------------------------ what Sluice uses


class Use(NamedTuple):
    """An attribute that Sluice's code takes of something, and how it calls it (None when it does not)."""

    where: str
    name: str
    call: ast.Call | None


MAKERS = ("_accelerator", "get_device_module", "getattr(torch,", "process_group_class", "_pg", "torch_npu")  # of such values


@cache
def uses(of: str) -> list[Use]:
    """Uses of the values that match the regular expression `of` as source, or of names that such values were given to."""
    return [use for file in _makers() for use in _uses(file, TREES[file], re.compile(of))]


@cache
def _makers() -> list[str]:
    """The files that can have such values at all: to take all apart would be slow."""
    return [file for file in TREES if any(maker in (ROOT / file).read_text() for maker in MAKERS)]


def _uses(file: str, tree: ast.Module, of: re.Pattern[str]) -> Iterator[Use]:
    assigned = list(_assignments(tree))
    holders = {target for target, value in assigned if of.fullmatch(value)}
    names = {holder.rpartition(".")[2] for holder in holders}
    holders |= {target for target, value in assigned if value.rpartition(".")[2] in names}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value = ast.unparse(node.value)
            if of.fullmatch(value) or value in holders:
                yield Use(f"{file}:{node.lineno}", node.attr, calls.get(id(node)))


def _assignments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(target, value) of every assignment, those of tuples one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), ast.unparse(node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(map(ast.unparse, target.elts), map(ast.unparse, node.value.elts), strict=True)
                else:
                    yield ast.unparse(target), ast.unparse(node.value)


def device_module_uses() -> list[Use]:
    """Of torch.npu, however Sluice comes by it: by platform's own function, by torch's, or by a device's type."""
    return uses(r"_accelerator\(.*\)|torch\.get_device_module\(.*\)|getattr\(torch, [\w.]*\.type\)")


def group_uses() -> list[Use]:
    return uses(r"platform\.process_group_class\(.*\)|group\(dist\.PrefixStore.*\)|group\.Options\(\)|self\._pg")


def methods(definition: ast.stmt | None) -> dict[str, ast.FunctionDef]:
    assert isinstance(definition, ast.ClassDef)
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def of_self(definition: ast.AST) -> set[str]:
    """The attributes of its own that a class takes."""
    return {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name)]


def accepts(definition: ast.stmt, call: ast.Call) -> str:
    """What a def, or the constructor of a class, does not take of a call; "" when it takes it."""
    if isinstance(definition, ast.ClassDef):
        makers = [made for name, made in methods(definition).items() if name in ("__new__", "__init__")]
        return accepts(makers[0], call) if makers else ""
    assert isinstance(definition, ast.FunctionDef)
    own = definition.args
    names = [argument.arg for argument in (*own.posonlyargs, *own.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    if len(call.args) > len(names) and own.vararg is None:
        return f"takes {len(names)} arguments, is given {len(call.args)}"
    keywords = {*names, *(argument.arg for argument in own.kwonlyargs)}
    unknown = [keyword.arg for keyword in call.keywords if keyword.arg not in keywords and own.kwarg is None]
    return f"has no argument {unknown[0]}" if unknown else ""


# ------------------------------------------------------------------------------------------------ torch_npu


def test_the_uses_are_found() -> None:
    """So that a change of style does not empty the lists that the tests below go through."""
    some = {"mem_get_info", "set_device", "Stream", "Event", "stream", "synchronize"}
    assert {use.name for use in device_module_uses()} >= some
    assert {use.name for use in group_uses()} >= {"Options", "_timeout", "broadcast", "abort_hccl_comm"}


def test_the_device_module_has_all_of_it(torch_npu: Wheel) -> None:
    for use in device_module_uses():
        definition = torch_npu.definition("torch_npu.npu", use.name)
        if definition is not None and use.call is not None:
            assert accepts(definition, use.call) == "", use.where


def test_the_process_group_is_made_as_torch_npu_makes_it(torch_npu: Wheel) -> None:
    registry = torch_npu.tree("torch_npu._init.registry.distributed")
    assert [len(call.args) for call in calls_of(registry, ".ProcessGroupHCCL")] == [4]
    (ours,) = calls_of(TREES["runtime/weights/collective.py"], "group")
    assert ast.unparse(ours.func) == "group" and len(ours.args) == 4
    text = ast.unparse(registry)
    assert "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()" in text
    assert "pg_options._timeout = " in text


def test_the_process_group_has_the_methods(torch_npu: Wheel) -> None:
    """Bound in C++: torch_npu's own Python imports and calls one as we do, the header declares the other."""
    assert {use.name for use in group_uses()} <= {"Options", "_timeout", "broadcast", "rootRank", "abort_hccl_comm", "abort"}
    own = ast.unparse(torch_npu.tree("torch_npu.distributed.distributed_c10d"))
    ours = {
        (node.module, alias.name)
        for file in _makers()
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_npu")
        for alias in node.names
    }
    assert ours == {("torch_npu._C._distributed_c10d", "ProcessGroupHCCL")}
    assert "from torch_npu._C._distributed_c10d import ProcessGroupHCCL" in own
    assert ".abort_hccl_comm('reinit')" in own
    assert "abort_hccl_comm('reinit')" in ast.unparse(TREES["runtime/weights/collective.py"])
    header = torch_npu.bytes(HEADER).decode()
    assert re.search(r"broadcast\(\s*std::vector<at::Tensor>& \w+,\s*const c10d::BroadcastOptions& ", header)


def test_a_profile_is_asked_for_as_torch_npu_has_it(torch_npu: Wheel) -> None:
    used = uses(r"importlib\.import_module\('torch_npu\.profiler'\)")
    assert {use.name for use in used} == {"profile", "tensorboard_trace_handler"}
    for use in used:
        definition = torch_npu.definition("torch_npu.profiler", use.name)
        assert definition is not None and use.call is not None
        assert accepts(definition, use.call) == "", use.where
    assert {"start", "stop"} <= methods(torch_npu.definition("torch_npu.profiler", "profile")).keys()


def test_the_backend_is_registered_under_our_name_for_our_device(torch_npu: Wheel) -> None:
    text = ast.unparse(torch_npu.tree("torch_npu._init.registry.distributed"))
    assert re.search(r"register_backend\('hccl', .*devices=\['npu'\]\)", text)
    assert KINDS["hccl"] == "npu"
    assert platform._BACKENDS["npu"] == "hccl"


def test_the_simulation_invents_nothing(torch_npu: Wheel) -> None:
    """Each function of the stand-in is one of torch_npu's, which takes the stand-in's arguments."""
    for node in ast.parse((STAND_IN / "npu.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            real = torch_npu.definition("torch_npu.npu", node.name)
            if isinstance(node, ast.FunctionDef) and real is not None:
                given = ast.Call(ast.Name("f"), [ast.Name(argument.arg) for argument in node.args.args], [])
                assert accepts(real, given) == "", node.name
    assert torch_npu.anywhere({"npu_fusion_attention", "npu_rotary_mul"}) == {"npu_fusion_attention", "npu_rotary_mul"}


# ------------------------------------------------------------------------------------------------ environment


def test_the_variables_that_we_set_are_read_by_one_of_them(torch_npu: Wheel, vllm_ascend: Wheel) -> None:
    roles = yaml.safe_load((ROOT / "configs" / "envs" / "ascend.yaml").read_text())
    ours = {name for section in roles.values() for name in section["env"]} | {VISIBLE["npu"]}
    theirs = vllm_ascend.anywhere(ours)
    assert ours - theirs - torch_npu.anywhere(ours - theirs) == set()


def test_weights_are_not_kept_in_a_layout_that_cannot_be_updated(vllm_ascend: Wheel) -> None:
    text = ast.unparse(vllm_ascend.tree("vllm_ascend.envs"))
    assert "'VLLM_ASCEND_ENABLE_NZ': lambda: int(os.getenv('VLLM_ASCEND_ENABLE_NZ', 1))" in text
    roles = yaml.safe_load((ROOT / "configs" / "envs" / "ascend.yaml").read_text())
    assert roles["rollout"]["env"]["VLLM_ASCEND_ENABLE_NZ"] == "0"
    config = ast.unparse(
        vllm_ascend.tree("vllm_ascend.ascend_config")
    )  # what the rollout engine sets, whatever the environment
    assert "self._get_config_value(additional_config, 'weight_nz_mode', 'VLLM_ASCEND_ENABLE_NZ'," in config
    assert "additional_config.get('enable_reduce_sample', False)" in config
    # What vllm-ascend's sleeping allocator refuses must not be set for a rollout.
    assert "expandable_segments:True" in ast.unparse(vllm_ascend.tree("vllm_ascend.device_allocator.camem"))
    assert "PYTORCH_NPU_ALLOC_CONF" not in roles["rollout"]["env"]


# ------------------------------------------------------------------------------------------------ vllm-ascend


def test_vllm_finds_the_platform_and_its_worker(vllm_ascend: Wheel) -> None:
    entry = next(name for name in vllm_ascend.names if name.endswith("entry_points.txt"))
    assert re.search(r"\[vllm\.platform_plugins\]\s+ascend = vllm_ascend:register\b", vllm_ascend.bytes(entry).decode())
    assert "'vllm_ascend.platform.NPUPlatform'" in ast.unparse(vllm_ascend.definition("vllm_ascend", "register") or ast.Pass())
    assert "'vllm_ascend.worker.worker.NPUWorker'" in ast.unparse(vllm_ascend.tree("vllm_ascend.platform"))


def test_the_worker_has_what_ours_is_mixed_into(vllm_ascend: Wheel) -> None:
    if WORKER not in TREES:
        pytest.skip("this source tree has no engine vllm")
    npu = vllm_ascend.definition("vllm_ascend.worker.worker", "NPUWorker")
    assert npu is not None
    theirs = methods(npu).keys()
    assert CHECK_FORMAT in theirs
    for mixin in (
        node for node in TREES[WORKER].body if isinstance(node, ast.ClassDef) and not (node.bases or node.decorator_list)
    ):
        own = methods(mixin).keys()
        assert of_self(mixin) - own <= of_self(npu) | theirs, mixin.name
        assert not own & theirs, f"{mixin.name} would be hidden by, or hide, a method of NPUWorker"


def test_weights_are_loaded_by_the_calls_that_its_own_worker_makes(vllm_ascend: Wheel) -> None:
    if WORKER not in TREES:
        pytest.skip("this source tree has no engine vllm")
    ours, theirs = _reloads(TREES[WORKER]), _reloads(vllm_ascend.tree("vllm_ascend.worker.worker"))
    assert ours
    assert ours <= theirs


def _reloads(tree: ast.Module) -> set[tuple[str, int]]:
    """The functions taken from vLLM's module for reloads, with the number of arguments that they are called with."""
    taken = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "vllm.model_executor.model_loader.reload"
        for alias in node.names
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {(ast.unparse(call.func), len(call.args)) for call in calls if ast.unparse(call.func) in taken}


def test_it_sleeps_and_wakes_with_the_arguments_that_vllm_passes(vllm_ascend: Wheel) -> None:
    npu = methods(vllm_ascend.definition("vllm_ascend.worker.worker", "NPUWorker"))
    arguments = {name: [argument.arg for argument in npu[name].args.args] for name in ("sleep", "wake_up")}
    assert arguments == {"sleep": ["self", "level"], "wake_up": ["self", "tags"]}


# ------------------------------------------------------------------------------------------------ pins


def test_the_pins_are_a_pair_and_the_same_everywhere(vllm_ascend: Wheel) -> None:
    metadata = next(name for name in vllm_ascend.names if name.endswith(".dist-info/METADATA"))
    needs = vllm_ascend.bytes(metadata).decode()
    assert f"Requires-Dist: torch-npu=={PINS['torch-npu']}\n" in needs
    (torch_version,) = re.findall(r"Requires-Dist: torch==(\S+)\n", needs)
    docker = (ROOT / "Dockerfile").read_text()
    guide = (ROOT / "docs" / "guides" / "ascend.md").read_text()
    for argument, version in (("TORCH", torch_version), ("TORCH_NPU", PINS["torch-npu"]), ("VLLM_ASCEND", PINS["vllm-ascend"])):
        assert f"ARG ASCEND_{argument}={version}\n" in docker
        assert version in guide
