"""Episodes as rows of arrays: whose row is whose, what turns earned, groups without a common prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime import codec
from runtime.config import Config
from runtime.errors import InvalidMessage
from runtime.trainer import rows as train_rows
from runtime.trainer.megatron.context import packing_of
from runtime.trainer.micro_batch import pack, padded
from runtime.trainer.row_advantages import RowAdvantages
from runtime.trainer.rows import Needs, Rows
from runtime.trainer.statistics import StepStatistics
from runtime.types import GroupPayload, TrainGroup, TurnReward
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups

CPU = torch.device("cpu")


def decoded(groups: list[TrainGroup]) -> Rows:
    return train_rows.decode_groups(groups, VOCAB, Needs(reference=True, values=True))


def payloads(groups: list[TrainGroup]) -> list[GroupPayload]:
    return [codec.decode(GroupPayload, group.payload) for group in groups]


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


def test_parts_that_are_joined_are_one_batch():
    groups = make_episodes(1, (2, 3, 1, 4), turns=True)
    whole, parts = decoded(groups), [decoded(groups[:1]), decoded([]), decoded(groups[1:3]), decoded(groups[3:])]
    joined = train_rows.join(parts)
    for field in Rows.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(joined, field), getattr(whole, field), err_msg=field)


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
        group, payload=codec.encode(structs.replace(payload, **ours)), **{k: v for k, v in change.items() if k not in ours}
    )
    with pytest.raises(InvalidMessage, match=f"^group 0: .*{complaint}$"):
        decoded([broken])


def test_a_group_without_a_common_prompt_is_packed_as_its_rows():
    """Predictor and target of each trained token follow one another in the row; what each row attends to is the row alone."""
    group = make_episodes(5)[1]
    rows = decoded([group])
    batch = pack(rows, np.flatnonzero(rows.trained()), {}, CPU)
    tokens = batch.input_ids[0].numpy()
    assert rows.prompt_length.tolist() == [0]
    for predictor, target, place in zip(batch.predictors.tolist(), batch.targets.tolist(), batch.places, strict=True):
        assert target == rows.tokens[place]
        assert tokens[predictor] == rows.tokens[place - 1]
    cells = np.concatenate([part.numpy().ravel() for part in batch.packing.queries or []])
    assert np.array_equal(tokens[cells[batch.packing.cells.numpy()]], tokens)


def test_without_a_prompt_context_parallelism_attends_to_the_row_alone():
    rows = decoded([make_episodes(5)[1]])
    batch = padded(pack(rows, np.flatnonzero(rows.trained()), {}, CPU), 2)
    every = np.arange(batch.input_ids.shape[1])
    packing = packing_of(batch.paths, batch.sequences, every, every, CPU)
    attended: list[list[int]] = []  # of each cell
    for keys, queries in zip(packing.rows, packing.queries or [], strict=True):
        before = keys.shape[1] - queries.shape[1]
        attended += [row[: before + at + 1] for row in keys.tolist() for at in range(queries.shape[1])]
    for begin, shared, own in batch.sequences.tolist():
        for at in range(begin + shared, begin + shared + own):
            assert attended[packing.cells[batch.paths[at]]] == batch.paths[begin : at + 1].tolist()


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
