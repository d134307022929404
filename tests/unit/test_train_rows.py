"""Rows of a step: their arrays, how they are shared out, packed, and cut into micro-batches and parts."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime import types
from runtime.config import Config, Optimizer
from runtime.errors import InvalidMessage
from runtime.models.forward import Packing, cut_by_length, length_buckets, packed_attention, starts, tree_paths
from runtime.models.hf_policy import load_policy
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import StepStatistics
from runtime.trainer.megatron import passes
from runtime.trainer.megatron.passes import packing_of, part_of, tokens_of
from runtime.trainer.micro_batch import REACH, MicroBatch, attention_rows, cut_trees, in_tree_order, pack, plan
from runtime.trainer.objective import RowAdvantages
from runtime.trainer.rows import Needs, Rows, balance, balance_each, check_groups
from runtime.trainer.step import learning_rate
from runtime.types import GroupPayload, Sample, TrainGroup, TurnReward
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups, make_policy

pytestmark = pytest.mark.numeric
BOTH = Needs(reference=True, values=True)


# ----------------------------------------------------------------------------- micro-batches and the balancing of loads

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


def test_micro_batches_are_cut_by_padded_size():
    # 2 x 5, then 2 x 8, then the 9 alone: three rows of 9 would be 27 tokens.
    assert cut_by_length([8, 3, 9, 5, 7], budget=16) == [[1, 3], [4, 0], [2]]


@given(LENGTHS, st.integers(1, 300))
def test_micro_batches_hold_everything_once_and_fit(lengths: list[int], budget: int):
    batches = cut_by_length(lengths, budget)
    flat = list(itertools.chain.from_iterable(batches))
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths)
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


@given(LENGTHS, st.floats(1, 4))
def test_length_buckets_bound_the_spread(lengths: list[int], ratio: float):
    ascending = sorted(lengths)
    sizes = length_buckets(ascending, ratio)
    assert sum(sizes) == len(lengths)
    begin = 0
    for size in sizes:
        assert ascending[begin + size - 1] <= ratio * ascending[begin] or size == 1
        begin += size


def test_balance_beats_greedy_and_differencing():
    # Greedy, largest first: 17 and 13; Karmarkar-Karp: 16 and 14.
    parts = balance([8, 7, 6, 5, 4], 2)
    assert [sum([8, 7, 6, 5, 4][i] for i in part) for part in parts] == [15, 15]


@pytest.mark.parametrize(("costs", "parts"), [([], 3), ([5], 3), ([1, 2], 2)])
def test_balance_of_few_items(costs: list[float], parts: int):
    shared = balance(costs, parts)
    assert len(shared) == parts
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(len(costs)))
    assert max((len(part) for part in shared), default=0) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_balance_spread_is_at_most_the_largest_item(costs: list[int], parts: int):
    shared = balance(costs, parts)
    sums = [sum(costs[i] for i in part) for part in shared]
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(len(costs)))
    assert max(sums) - min(sums) <= max(costs)
    assert shared == balance(costs, parts)


def group_tokens(tail: str, groups: int, seed: int) -> list[int]:
    """Tokens of groups of 8 whose replies have a long tail, prompts included; a Pareto tail of 1.2 has no variance."""
    rng = np.random.default_rng(seed)
    tails = {
        "lognormal": lambda: np.exp(rng.normal(5.0, 1.0, (groups, 8))),
        "pareto 2": lambda: 50 * (1 + rng.pareto(2.0, (groups, 8))),
        "pareto 1.2": lambda: 50 * (1 + rng.pareto(1.2, (groups, 8))),
    }
    replies = np.clip(tails[tail](), 1, 8192).astype(int)
    return (replies.sum(1) + 8 * rng.integers(20, 400, groups)).tolist()


@pytest.mark.parametrize("tail", ["lognormal", "pareto 2", "pareto 1.2"])
@given(
    spread=st.sampled_from([(2, 64), (4, 65), (8, 64), (8, 100), (16, 128), (16, 256), (16, 512)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_balance_of_long_tails_is_within_5_percent_of_the_mean(tail: str, spread: tuple[int, int], seed: int):
    """Or at the longest group, where that alone is above the mean: no sharing can be better."""
    parts, groups = spread
    tokens = group_tokens(tail, groups, seed)
    shared = balance(tokens, parts)
    assert sorted(itertools.chain.from_iterable(shared)) == list(range(groups))
    worst = max(sum(tokens[i] for i in part) for part in shared)
    assert worst <= 1.05 * max(sum(tokens) / parts, max(tokens))


@pytest.mark.parametrize(("tail", "seed"), [("lognormal", 328), ("pareto 2", 121), ("pareto 1.2", 196)])
def test_balance_where_differencing_alone_misses_5_percent(tail: str, seed: int):
    """Four groups a part."""
    tokens = group_tokens(tail, 64, seed)
    worst = max(sum(tokens[i] for i in part) for part in balance(tokens, 16))
    assert worst <= 1.05 * sum(tokens) / 16


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.8535533905932737, 0.55, 0.1 + 0.9 * 0.14644660940672624, 0.1]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]):
    options = Optimizer(learning_rate=1.0, min_learning_rate=0.1, schedule=schedule, warmup_steps=2)
    assert [learning_rate(step, 6, options) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(100, 6, options) == pytest.approx(expected[-1])


def test_each_kind_is_shared_out_for_itself() -> None:
    costs, kinds = [9, 1, 5, 5, 1, 9, 4, 4], [0, 0, 1, 1, 0, 0, 1, 1]
    shares = balance_each(costs, kinds, 2)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert all(share == sorted(share) for share in shares)
    for kind, half in ((0, 10), (1, 9)):
        assert [sum(costs[i] for i in share if kinds[i] == kind) for share in shares] == [half, half]
    assert balance_each([], [], 3) == [[], [], []]
    assert sorted(map(len, balance_each([1, 1], [0, 1], 2))) == [0, 2]  # fewer items of a kind than parts


# ----------------------------------------------------------------------------------------------------- episodes as rows

CPU = torch.device("cpu")


def decoded(groups: list[TrainGroup]) -> Rows:
    return train_rows.rows_of(check_groups(groups, VOCAB, BOTH), BOTH)


def payloads(groups: list[TrainGroup]) -> list[GroupPayload]:
    return [types.decode(GroupPayload, group.payload) for group in groups]


@pytest.mark.parametrize("seed", range(3))
def test_each_row_has_its_episode_s_reward(seed: int):
    groups, place, episode = make_episodes(seed, turns=True), 0, 0
    rows = decoded(groups)
    for at, (group, payload) in enumerate(zip(groups, payloads(groups), strict=True)):
        for index, branches in enumerate(payload.rows):
            for branch in range(branches):
                told = (rows.group[place], rows.sample[place], rows.episode[place], rows.leads[place], rows.valid[place])
                assert told == (at, index, episode, branch == 0, bool(group.valid[index]))
                assert rows.rewards[place] == group.rewards[index]
                assert rows.last[place] == place - branch + branches - 1
                place += 1
            episode += 1
    assert place == len(rows.length)
    tokens = np.concatenate([payload.tokens for payload in payloads(groups)])
    turns = [turn for payload in payloads(groups) for turn in payload.turn_rewards]
    assert rows.turn_rewards.tolist() == [turn.value for turn in turns] and len(turns) > 3
    begins = iter(np.concatenate([[0], np.cumsum([len(payload.tokens) for payload in payloads(groups)])]))
    expected = [
        begin + payload.lengths[: turn.row].sum() + turn.token
        for payload, begin in zip(payloads(groups), begins, strict=False)
        for turn in payload.turn_rewards
    ]
    assert rows.turn_tokens.tolist() == expected
    assert np.array_equal(rows.tokens, tokens)


def test_turns_begin_with_each_run_of_trained_tokens():
    rows = decoded(make_episodes(4))
    expected = []
    for start, length in zip(rows.start, rows.length, strict=True):
        mask = rows.mask[start : start + length].tolist()
        expected += [m and (t == 0 or not mask[t - 1]) for t, m in enumerate(mask)]
    assert rows.turn_begins().tolist() == expected
    plain = decoded(make_groups(0, longest=3))  # replies of up to three tokens: their first tokens alone, if trained
    begins = np.zeros(len(plain.mask), bool)
    begins[plain.start] = plain.mask[plain.start]
    assert plain.turn_begins().tolist() == begins.tolist()


def test_the_first_of_each_episode_is_among_the_chosen():
    rows = decoded(make_episodes(2))
    chosen = np.arange(len(rows.length)) % 2 == 1
    found = np.flatnonzero(rows.first_of_episode(chosen))
    expected = {int(rows.episode[row]): int(row) for row in reversed(np.flatnonzero(chosen))}
    assert found.tolist() == sorted(expected.values())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"turn_rewards": [TurnReward(0, 0, 1.0)]}, "is of a token that is not trained in this row"),
        ({"rewards": np.zeros(9, np.float32)}, "with 3 samples, with 9 rewards and 3 flags"),
    ],
)
def test_what_does_not_fit_the_episodes_is_refused(change: dict, complaint: str):
    group = make_episodes(0)[0]
    payload = payloads([group])[0]
    ours = {name: value for name, value in change.items() if name in GroupPayload.__struct_fields__}
    broken = structs.replace(
        group, payload=types.encode(structs.replace(payload, **ours)), **{k: v for k, v in change.items() if k not in ours}
    )
    with pytest.raises(InvalidMessage, match=f"^group 0: .*{complaint}$"):
        decoded([broken])


def shaped(config: Config, groups: list[TrainGroup]) -> tuple[Rows, np.ndarray]:
    class Alone:
        batch_sum = staticmethod(lambda part: part)

    from runtime.chosen_algorithm import choose

    rows = decoded(groups)
    inputs = RowAdvantages(config, choose(config), Alone())._inputs(rows, 0.1, StepStatistics(CPU))  # type: ignore[arg-type]
    return rows, inputs


def test_rewards_lie_at_the_end_of_each_branch_and_turns_at_their_own():
    groups = make_episodes(6, turns=True)
    rows, inputs = shaped(make_config("nowhere", algorithm={"advantage": "reinforce_plus_plus"}), groups)
    expected = np.zeros(inputs.token_rewards.shape)
    for row in range(len(rows.length)):
        mask = rows.mask[rows.start[row] : rows.start[row] + rows.length[row]]
        if mask.any():
            expected[row, np.flatnonzero(mask)[-1]] += rows.rewards[row]
    for place, value in zip(rows.turn_tokens, rows.turn_rewards, strict=True):
        row = int(np.flatnonzero((rows.start <= place) & (place < rows.start + rows.length))[0])
        expected[row, place - rows.start[row]] += value * rows.valid[row]
    np.testing.assert_allclose(inputs.token_rewards.numpy(), expected, rtol=1e-15)


def test_an_episode_s_penalties_are_those_of_all_its_rows():
    algorithm = {"kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1, "missing_eos_penalty": 0.5}
    rows, inputs = shaped(make_config("nowhere", algorithm=algorithm), make_episodes(7))
    gap = 0.1 * (rows.behaviour.astype(np.float64) - rows.reference) * rows.mask
    for row in range(len(rows.length)):
        own = [each for each in range(len(rows.length)) if rows.episode[each] == rows.episode[row]]
        penalty = sum(gap[rows.start[each] : rows.start[each] + rows.length[each]].sum() for each in own)
        reward = (rows.rewards[row] - 0.5 * rows.truncated[own[-1]]) * rows.valid[row]
        assert inputs.rewards[row].item() == pytest.approx(reward - penalty, rel=1e-12)


# ------------------------------------------------------------ rows that begin alike are computed once as far as they do
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
        payload=types.encode(payload),
        rewards=np.zeros(payload.n, np.float32),
        valid=np.ones(payload.n, np.uint8),
    )


def _decoded(groups: list[TrainGroup]) -> Rows:
    return train_rows.rows_of(check_groups(groups, LETTERS + 1, Needs()), Needs())


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


@settings(max_examples=10)  # each of two passes forward and back
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


# ------------------------------------------------------------------------------------------- parts of the packed tokens

HEADS, KV_HEADS, SIZE = 4, 2, 3


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[tokens, heads, size] each."""
    shaped = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return packed_attention(torch.nn.Module(), *shaped, None, packing=packing)[0][0]


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: np.ndarray, sequences: np.ndarray
) -> torch.Tensor:
    """Token by token."""
    out = torch.zeros_like(query)
    for begin, shared, own in sequences:
        for at in range(begin + shared, begin + shared + own):
            token, seen = paths[at], paths[begin : at + 1]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = torch.softmax(key[seen, kv_head] @ query[token, head] / SIZE**0.5, 0)
                out[token, head] = weights @ value[seen, kv_head]
    return out


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=9),
    count=st.integers(2, 3),
    seed=st.integers(0, 99),
)
def test_the_parts_together_are_the_whole(sizes: list[tuple[int, int]], count: int, seed: int) -> None:
    """Rows of a tree: each shares at most so many tokens with the one before, and has so many of its own."""
    lengths, known = [], []
    for shared, own in sizes:
        known.append(min(shared, lengths[-1] if lengths else 0))
        lengths.append(known[-1] + own)
    if not sum(lengths):
        return
    length, shares = np.array(lengths), np.array(known)
    paths, total = tree_paths(length, shares), int((length - shares).sum())
    padding = -total % (2 * count)
    found = np.concatenate([np.stack([starts(length), shares, length - shares], 1), [[len(paths), 0, padding]]])
    paths = np.concatenate([paths, np.arange(total, total + padding)])
    total += padding

    torch.manual_seed(seed)
    query, key, value = (torch.randn(total, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    order = np.concatenate([tokens_of(rank, count, total) for rank in range(count)])
    assert sorted(order) == list(range(total))
    expected = naive(query, key, value, paths, found)
    whole = attend(query, key, value, attention_rows(paths, found, CPU))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
    for rank in range(count):
        own = tokens_of(rank, count, total)
        packing = packing_of(paths, found, own, np.argsort(order), CPU)
        part = attend(query[own], key[order], value[order], packing)
        torch.testing.assert_close(part, expected[own], rtol=0, atol=1e-12)


def test_of_one_long_sequence_every_part_has_the_same_work() -> None:
    total, count = 64, 4
    work = [sum(token + 1 for token in tokens_of(rank, count, total)) for rank in range(count)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_has_of_a_column_what_it_predicts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(passes.dist, "get_world_size", lambda group: 2)
    rows = train_rows.rows_of(check_groups(make_groups(3), VOCAB, Needs()), Needs())
    columns = {"temperature": np.arange(len(rows.tokens), dtype=np.float32)}
    whole = pack(rows, np.flatnonzero(rows.trained()), columns, CPU)
    part = part_of(whole, None)  # type: ignore[arg-type]
    assert 0 < len(part.targets) < len(whole.targets)
    assert part.of_tokens("temperature").tolist() == whole.places[part.chosen.numpy()].tolist()
