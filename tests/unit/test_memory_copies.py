"""Where mirrors go, which version a group goes on from, what other ranks take of its copies, and what is refused."""

from __future__ import annotations

import errno
import os
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvariantViolated, UserError
from runtime.process import os_process, platform
from runtime.trainer.backend import RankInfo, TrainingPosition
from runtime.trainer.backend import StatePart as Part
from runtime.trainer.memory import Held, Made, MemoryCopies, choose, mirrors, overlaps
from runtime.types import PolicyVersion


@given(st.integers(1, 5), st.integers(1, 4), st.randoms())
def test_mirrors_are_on_another_node_and_spread_evenly(nodes: int, ranks: int, random: st.DataObject) -> None:
    of_ranks = [f"node-{node}" for node in range(nodes) for _ in range(ranks)]
    random.shuffle(of_ranks)  # type: ignore[attr-defined]
    holders = mirrors(of_ranks)
    if nodes == 1:
        assert holders == [-1] * ranks
        return
    assert all(of_ranks[holder] != node for holder, node in zip(holders, of_ranks, strict=True))
    assert Counter(holders) == Counter(range(len(of_ranks)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_mirrors_of_nodes_of_any_size(nodes: list[int]) -> None:
    holders = mirrors([str(node) for node in nodes])
    for rank, holder in enumerate(holders):
        assert (holder == -1) == (len(set(nodes)) == 1)
        assert holder == -1 or nodes[holder] != nodes[rank]
    loads = Counter(holders)
    for node in set(nodes) if len(set(nodes)) > 1 else ():
        of_node = [loads[rank] for rank, own in enumerate(nodes) if own == node]
        assert max(of_node) - min(of_node) <= 1


VERSIONS = [(step, begun, world) for step in (2, 3) for begun in (1, 2) for world in (1, 2, 3)]


@given(st.dictionaries(st.sampled_from(VERSIONS), st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 3), unique=True))))
def test_the_newest_whole_version_is_chosen(found: dict[Made, dict[int, list[int]]]) -> None:
    chosen = choose(found)
    expected = max((made for made in found if all(found[made].get(owner) for owner in range(made[2]))), default=None)
    assert (chosen and chosen[0]) == expected
    for owner, reader in enumerate(chosen[1] if chosen else ()):
        ranks = found[chosen[0]][owner]
        assert reader == owner if owner in ranks else reader in ranks


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4), st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_parts_make_up_what_is_wanted(size: int, old: list[int], new: list[int], more: bool) -> None:
    """A flat tensor, cut at `old`, is cut at `new`; with `more`, more is wanted than there is."""
    whole, slots, held, wanted = torch.arange(size, dtype=torch.float32), [], [], []
    bounds = [0, *sorted(min(each, size) for each in old), size]
    for start, end in pairwise(bounds):
        slots.append(torch.cat([torch.full((3,), -1.0), whole[start:end]]).view(torch.uint8))
        held.append([Held("other", 0, 3, "float32", 0), Held("t", start, end - start, "float32", 12)])
    bounds = [0, *sorted(min(each, size) for each in new), size + more]
    for start, end in pairwise(bounds):
        wanted.append(Held("t", start, end - start, "float32", 0))
    parts = overlaps(wanted, held)
    assert (parts is None) == more
    got = [torch.full((each.numel,), -2.0) for each in wanted]
    for index, owner, offset, first, nbytes in parts or ():
        got[index].view(torch.uint8)[first : first + nbytes] = slots[owner][offset : offset + nbytes]
    if not more:
        assert torch.equal(torch.cat(got), whole)
    assert overlaps([Held("t", 0, 1, "uint8", 0)], held) is None


def trainer_of(pieces: list[Part]) -> Any:
    """A trainer, of one rank, of nothing but `pieces`. `restored` is what it goes on with."""
    backend = SimpleNamespace(rank_info=RankInfo(0, 1, torch.device("cpu")), pieces=lambda: pieces, counters=dict)
    trainer = SimpleNamespace(backend=backend, role="critic", position=lambda: TrainingPosition(1, None), restored=None)
    trainer.restored = lambda *numbers: setattr(trainer, "restored", numbers)
    return trainer


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(os_process.MEMORY, str(os.memfd_create("copies")))
    kept = torch.arange(5.0)
    copies, version = MemoryCopies(trainer_of([Part("t", 0, kept)]), 1.0), PolicyVersion(0, 1)
    finish = copies.keep(version, b"of 1")
    with pytest.raises(InvariantViolated, match=r"the copies of the version before 0\.2 are not finished"):
        copies.keep(PolicyVersion(0, 2), b"")
    finish()
    for pieces in ([Part("t", 0, torch.zeros(6))], [Part("t", 0, torch.zeros(5).half())], [Part("u", 0, torch.zeros(5))]):
        other = MemoryCopies(trainer_of(pieces), 1.0)
        reason = "version 0.1: the copies of 1 ranks do not fit this model and layout"
        assert other.recall(version) == (None, b"", reason)
        assert not pieces[0].data.any()
    same = trainer_of([Part("t", 0, torch.zeros(5))])
    assert MemoryCopies(same, 1.0).recall(PolicyVersion(0, 0)) == (version, b"of 1", "")
    assert torch.equal(same.backend.pieces()[0].data, kept)
    assert same.restored == ({}, TrainingPosition(1, None))
    for least in (PolicyVersion(0, 2), PolicyVersion(1, 1)):
        assert MemoryCopies(same, 1.0).recall(least).version is None


def test_memory_that_is_missing_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    large, told = (trainer_of([Part("t", 0, torch.zeros(1 << 28))]), "needs 2.0 GiB of host memory on this node for the copies")
    monkeypatch.setattr(platform, "memory", lambda _: platform.DeviceMemory(1 << 30, 1 << 30))
    with pytest.raises(UserError, match=rf"checkpoint\.in_memory: {told} of its ranks, 1\.0 GiB are available; must be off"):
        MemoryCopies(large, 1.0)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full)
    copies = MemoryCopies(trainer_of([Part("t", 0, torch.zeros(5))]), 1.0)
    with pytest.raises(UserError, match=r"checkpoint\.in_memory: needs 0\.0 GiB"):
        copies.keep(PolicyVersion(0, 1), b"")
