"""A group is killed, started again, and goes on from the copies in its nodes' memory as if it had never stopped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Moe
from runtime.trainer.memory import HEAD, REGION
from tests.loopback.megatron_member import Layout
from tests.loopback.memory_member import INCARNATION, STEPS, Case, member
from tests.loopback.ranks import run_ranks
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_policy

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
NEEDS_MEGATRON = pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
# Each rank's rows of a matrix are whole blocks of 8 bits, as they are of models of any use.
LARGE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "initializer_range": 0.02}
Found = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_policy(folder / "policy", tied=False, **LARGE)
    return folder


def _file(stack: ExitStack) -> int:
    """Return an empty memory file."""
    descriptor = os.memfd_create("copies")
    stack.callback(os.close, descriptor)
    return descriptor


def copied(descriptor: int, stack: ExitStack) -> int:
    """Return another file with the same content."""
    target, size, end = _file(stack), os.fstat(descriptor).st_size, 0
    os.ftruncate(target, size)
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # a hole until the end
            break
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        os.pwrite(target, os.pread(descriptor, end - begin, begin), begin)
    return target


def with_wrong_byte(descriptor: int, owner: int, step: int) -> int:
    """Change one byte of a piece in the copy of `owner`, and return `descriptor`."""
    place = owner * REGION + step % 2 * REGION // 2 + HEAD + 1000
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 1]), place)
    return descriptor


def run(folder: Path, work: str, cases: Sequence[Case]) -> dict[str, Found]:
    """Let new processes do `work` in each case. Return what the ranks found, by the case's name."""
    ranks = cases[0].layout.processes
    run_ranks(member, folder, ranks, work, os.getpid(), cases)
    found = [torch.load(folder / f"{work}-{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {case.name: [of_rank[case.name] for of_rank in found] for case in cases}


def assert_equal(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Everything that training changes is the same to the bit."""
    for kind in ("pieces", "published"):
        assert got[kind].keys() == expected[kind].keys()
        assert [name for name, tensor in got[kind].items() if not torch.equal(tensor, expected[kind][name])] == []
    assert got["counters"] == expected["counters"]
    assert got["position"] == expected["position"]


def assert_goes_on(found: Found, kept: Found, step: int = STEPS) -> None:
    """Every rank has version `step`, trains the next, and is where a group is that was not stopped, and kept nothing."""
    for rank, (got, expected) in enumerate(zip(found, kept, strict=True)):
        version, result, reason = got["recalled"]
        assert ((version.incarnation, version.step), result, reason) == ((INCARNATION, step), f"{step} of {rank}".encode(), "")
        _, recalled, after = got["states"]
        assert torch.equal(got["random"], expected["random"][step - 1])
        assert_equal(recalled, expected["states"][step - 1])
        assert_equal(after, expected["states"][step])


def wholes(found: Found, state: int) -> dict[str, torch.Tensor]:
    """The tensors, flat, that the ranks' pieces make."""
    parts = {place: data for of_rank in found for place, data in of_rank["states"][state]["pieces"].items()}
    names = dict.fromkeys(name for name, _ in parts)
    return {each: torch.cat([parts[place] for place in sorted(parts) if place[0] == each]) for each in names}


def assert_cut_anew(found: Found, kept: Found, step: int = STEPS) -> None:
    """Another number of ranks has the same state of version `step`."""
    got, expected = wholes(found, 1), wholes(kept, step - 1)
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    for of_rank in found:
        for name in ("counters", "position"):
            assert of_rank["states"][1][name] == kept[0]["states"][step - 1][name]
        assert of_rank["recalled"][0].step == step


def test_ranks_of_engine_torch_go_on_from_their_copies_or_mirrors(folder: Path) -> None:
    one, two = Layout(0), Layout(0, processes=2)
    kinds = {"adamw": (two, "adamw"), "muon": (two, "muon"), "lora": (two._replace(lora="all"), "adamw")}
    kinds |= {"adamw_8bit": (two, "adamw_8bit")} if HAS_TORCHAO else {}
    with ExitStack() as stack:
        own = {name: [_file(stack)] for name in (*kinds, "one")}
        both = [_file(stack), _file(stack)]
        cases = [Case(name, layout, own[name], optimizer) for name, (layout, optimizer) in kinds.items()]
        kept = run(folder, "keep", [*cases, Case("nodes", two, both)])
        kept_by_one = run(folder, "keep", [Case("one", one, own["one"])])

        def planted(*nodes: int) -> list[int]:
            """The two nodes' files, with a wrong byte in the copy of rank 1 on some."""
            made = [copied(each, stack) for each in both]
            return [with_wrong_byte(each, 1, STEPS) if node in nodes else each for node, each in enumerate(made)]

        again = run(
            folder,
            "recall",
            [
                *cases,
                Case("lost", two, [copied(both[0], stack), _file(stack)]),
                Case("wrong", two, planted(1)),
                Case("older", two, planted(0, 1), least=STEPS - 1),
                Case("gone", two, planted(0, 1)),
                Case("empty", two, [_file(stack)]),
                Case("of one", two, [copied(own["one"][0], stack)]),
            ],
        )
        told = (folder / "rank-0.log").read_text(), (folder / "rank-1.log").read_text()
        assert os.pread(own["adamw"][0], HEAD, REGION).strip(b"\0")
        of_two = {name: Case(name, one, own[name], kinds[name][1], STEPS + 1) for name in kinds if name != "lora"}
        by_one = run(folder, "recall", [Case("one", one, own["one"]), *of_two.values()])
        assert not os.pread(own["adamw"][0], HEAD, REGION).strip(b"\0")  # a rank that is no more
    for name in kinds:
        assert_goes_on(again[name], kept[name])
    assert_goes_on(again["lost"], kept["nodes"])
    assert_goes_on(again["wrong"], kept["nodes"])
    assert_goes_on(again["older"], kept["nodes"], step=STEPS - 1)
    gone = f"rank 1: its mirror of step {STEPS} on node node-0 has wrong bytes"
    wrong = f"rank 1: its own copy of step {STEPS} on node node-1 has wrong bytes"
    assert f"trainer: {gone}\n" in told[0]
    assert f"trainer: {wrong}\n" in told[1]
    lost = f"{wrong}; {gone}; of version {INCARNATION}.{STEPS} no copy of ranks 1 is left"
    for name, reason in (("gone", lost), ("empty", f"no node has a copy of version {INCARNATION}.{STEPS} or the next")):
        for of_rank in again[name]:
            assert of_rank["recalled"] == (None, b"", reason)
            assert_equal(of_rank["states"][1], of_rank["states"][0])
    assert_goes_on(by_one["one"], kept_by_one["one"])
    for name in of_two:
        assert_cut_anew(by_one[name], kept[name], STEPS + 1)
    assert_cut_anew(again["of one"], kept_by_one["one"])


def test_a_copy_that_is_torn_leaves_the_version_before_it(folder: Path) -> None:
    with ExitStack() as stack:
        case = Case("torn", Layout(0, processes=2), [_file(stack)], torn=True)
        kept = run(folder, "keep", [case])
        assert "trainer rank 0: copies: version 4.4: a rank is lost" in (folder / "torn-0").read_text()
        assert_goes_on(run(folder, "recall", [case])["torn"], kept["torn"])


def test_spread_experts_go_on_from_copies_of_more_ranks(tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "glm4_moe")
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    four = Layout(0, processes=4, expert=2)
    with ExitStack() as stack:
        case = Case("spread", four, [_file(stack)])
        kept = run(tmp_path, "keep", [case])["spread"]
        cut = {"spread": four._replace(processes=2), "whole": Layout(0, processes=2)}
        cases = [Case(name, layout, [copied(case.files[0], stack)]) for name, layout in cut.items()]
        assert_goes_on(run(tmp_path, "recall", [case])["spread"], kept)
        for found in run(tmp_path, "recall", cases).values():
            assert_cut_anew(found, kept)


@NEEDS_MEGATRON
def test_ranks_of_megatron_core_go_on_from_their_copies_or_mirrors(folder: Path) -> None:
    stages, blocks = Layout(2, pipeline=2, processes=4), Layout(1, processes=2)
    with ExitStack() as stack:
        four = Case("stages", stages, [_file(stack), _file(stack)])
        kept = run(folder, "keep", [four])
        four = four._replace(files=[_file(stack), four.files[1]])  # the first node is lost
        assert_goes_on(run(folder, "recall", [four])["stages"], kept["stages"])

        cases = [
            Case("blocks", blocks, [_file(stack)]),
            Case("bfloat16", blocks._replace(dtype="bfloat16"), [_file(stack)]),
            Case("lora", blocks._replace(lora="all"), [_file(stack)]),
        ]
        kept = run(folder, "keep", cases)
        one = Case("blocks", Layout(1), [copied(cases[0].files[0], stack)])
        assert_cut_anew(run(folder, "recall", [one])["blocks"], kept["blocks"])
        again = run(folder, "recall", cases)
    for case in cases:
        assert_goes_on(again[case.name], kept[case.name])


@NEEDS_MEGATRON
def test_what_corrects_the_scores_of_experts_is_in_the_copies(tmp_path: Path) -> None:
    save_model(tmp_path / "policy", "deepseek_v3")
    with ExitStack() as stack:
        layout = Layout(1, 2, processes=2, moe=Moe(bias_update=0.01))
        case = Case("experts", layout, [_file(stack)])
        kept = run(tmp_path, "keep", [case])
        assert_goes_on(run(tmp_path, "recall", [case])["experts"], kept["experts"])
