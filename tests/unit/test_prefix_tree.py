"""Rows that begin alike are computed once as far as they do, and nothing else changes: loss and gradient in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import codec
from runtime.models.hf_policy import load_policy
from runtime.trainer import rows as train_rows
from runtime.trainer.micro_batch import MicroBatch, pack, plan
from runtime.trainer.prefix_tree import REACH, cut_trees, in_tree_order, tree_paths
from runtime.trainer.rows import Needs, Rows
from runtime.types import GroupPayload, Sample, TrainGroup
from tests.unit.training_cases import make_policy

CPU = torch.device("cpu")
LETTERS = 3  # of the tokens that are drawn, so that rows share what nobody planned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """In float64 throughout: the norms of transformers are float32 whatever the model is."""
    torch.set_num_threads(1)
    model = load_policy(make_policy(tmp_path_factory.mktemp("policy")))
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen2RMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model.double()


@st.composite
def groups_of_trees(draw: st.DrawFn) -> list[TrainGroup]:
    """Groups of episodes whose rows fork anywhere, are beginnings of others, or are others; which tokens are trained is drawn,
    too, so that some are in two rows."""
    groups = []
    for group_id in range(draw(st.integers(1, 3))):
        prompt = np.array(draw(st.lists(st.integers(0, LETTERS), max_size=12)), np.int32)
        samples, branches = [], draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        for count in branches:
            known: list[list[int]] = [[]]
            for _ in range(count):
                old = draw(st.sampled_from(known))
                tokens = old[: draw(st.integers(0, len(old)))] + draw(
                    st.lists(st.integers(0, LETTERS), min_size=1, max_size=20)
                )
                known.append(tokens)
                mask = np.array(draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens))), np.uint8)
                mask[0] &= len(prompt) > 0
                samples.append(_sample(tokens, mask))
        payload = GroupPayload.of(group_id, prompt, samples, branches)
        groups.append(_group(payload))
    return groups


def _sample(tokens: list[int], mask: np.ndarray) -> Sample:
    size = len(tokens)
    return Sample(
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        logprobs=-np.arange(size, dtype=np.float32) * mask,
        versions=np.zeros(size, np.int64),
        finish_reason="stop",
    )


def _group(payload: GroupPayload) -> TrainGroup:
    return TrainGroup(
        group_id=payload.group_id,
        tokens=0,
        payload=codec.encode(payload),
        rewards=np.zeros(payload.n, np.float32),
        valid=np.ones(payload.n, np.uint8),
    )


def _decoded(groups: list[TrainGroup]) -> Rows:
    return train_rows.decode_groups(groups, LETTERS + 1, Needs())


def _logprobs(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """[N] float64."""
    packed = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "packing": batch.packing}
    logits = model(**packed, logits_to_keep=batch.predictors, use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).gather(1, batch.targets[:, None])[:, 0]


def _weighted(model: torch.nn.Module, batches: list[MicroBatch], rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A sum over trained tokens of every row, each with another weight, and its gradient."""
    weights = torch.linspace(-1, 2, len(rows.tokens), dtype=torch.float64)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total = total + (_logprobs(model, batch) * weights[torch.from_numpy(batch.places)]).sum()
    total.backward()
    return total.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@settings(max_examples=40, deadline=None)
@given(groups=groups_of_trees(), budget=st.sampled_from([1, 20, 60, 1 << 20]))
def test_loss_and_gradient_are_those_of_rows_alone(model: torch.nn.Module, groups: list[TrainGroup], budget: int) -> None:
    rows = _decoded(groups)
    chosen = np.flatnonzero(rows.trained())
    if not len(chosen):
        return
    alone = [pack(rows, chosen[[index]], {}, CPU) for index in range(len(chosen))]
    together = [pack(rows, part, {}, CPU) for part in plan(rows, chosen, budget)]
    assert sorted(np.concatenate([batch.places for batch in together])) == np.flatnonzero(rows.mask).tolist()
    (expected, wanted), (found, got) = _weighted(model, alone, rows), _weighted(model, together, rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11 * float(other.abs().max() + 1))


@settings(max_examples=100, deadline=None)
@given(groups=groups_of_trees())
def test_each_different_beginning_is_packed_once(groups: list[TrainGroup]) -> None:
    rows = _decoded(groups)
    chosen = np.flatnonzero(rows.trained())
    if not len(chosen):
        return
    batch = pack(rows, chosen, {}, CPU)
    beginnings, positions = set(), {}
    for row in chosen.tolist():
        group = rows.group[row]
        prompt = rows.prompts[rows.prompt_start[group] :][: rows.prompt_length[group]].tolist()
        whole = (*prompt, *rows.tokens[rows.start[row] :][: rows.length[row] - 1].tolist())
        for size in range(1, len(whole) + 1):
            owner = group if size <= len(prompt) else (group, rows.episode[row])
            beginnings.add((owner, whole[:size]))
    assert batch.input_ids.shape[1] == len(beginnings)
    for begin, shared, own in batch.sequences.tolist():  # each row's tokens lie at the positions 0, 1, ...
        positions |= dict(zip(batch.paths[begin : begin + shared + own].tolist(), range(shared + own), strict=True))
    assert batch.position_ids[0].tolist() == [positions[token] for token in range(len(beginnings))]


def test_only_rows_of_one_episode_share_beyond_the_prompt() -> None:
    """What two episodes happen to begin with is computed twice: a step does not depend on what others sampled."""
    ones = np.ones(3, np.uint8)
    samples = [_sample([1, 2, 3], ones), _sample([1, 2, 1], ones), _sample([1, 2, 0], ones)]
    rows = _decoded([_group(GroupPayload.of(0, np.array([3, 3], np.int32), samples, [2, 1]))])
    order, lengths, shared = in_tree_order(rows, np.arange(3))
    assert sorted(order[:2]) == [0, 1] and lengths.tolist() == [4, 4, 4]
    assert shared.tolist() == [0, 4, 2]


def test_paths_go_through_what_rows_before_packed() -> None:
    assert tree_paths(np.array([3, 4, 2, 5]), np.array([0, 2, 2, 1])).tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 0, 5, 6, 7, 8]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=30), budget=st.integers(1, 200))
def test_batches_hold_what_they_may(sizes: list[tuple[int, int]], budget: int) -> None:
    lengths, known = [], []
    for shared, own in sizes:
        known.append(min(shared, lengths[-1] if lengths else 0))
        lengths.append(known[-1] + own)
    batches = cut_trees(lengths, known, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    for batch in batches:
        packed = [lengths[batch[0]]]
        for before, index in pairwise(batch):
            packed.append(lengths[index] - (known[index] if index == before + 1 else 0))
        assert len(batch) == 1 or (sum(packed) <= budget and sum(lengths[index] for index in batch) <= REACH * budget)
    trees = np.split(np.arange(len(known)), np.flatnonzero(np.array(known) == 0)[1:]) if known else []
    for tree in trees:
        size = sum(lengths[index] - known[index] for index in tree)
        if size <= budget and sum(lengths[index] for index in tree) <= REACH * budget:
            assert any(set(tree.tolist()) <= set(batch) for batch in batches)
