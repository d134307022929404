"""A tiny policy and groups to train it on, for the tests of the training engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from runtime import types
from runtime.config import Algorithm, Config, Model, Optimizer, Run, Sampling, Training
from runtime.types import (
    GroupPayload,
    Logprobs,
    PolicyVersion,
    RoutedExperts,
    Sample,
    TokenSets,
    TrainGroup,
    TurnReward,
    Values,
    encode_set,
)

VOCAB = 61


def make_policy(folder: Path, *, tied: bool = True, layers: int = 2, **options: Any) -> str:
    """Save a random Qwen2 model with a stand-in for tokenizer files; returns its path."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "tie_word_embeddings": tied,
                "initializer_range": 0.3,
                **options,
            }
        )
    )
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return str(folder)


def make_config(path: str, *, dtype: str = "auto", trainer: Any = None, **sections: Any) -> Config:
    """A configuration for `path`; `sections` overrides keys of algorithm, optimizer, training and sampling. The learning
    rate is as configured, however old the samples of `make_groups` are."""
    algorithm = Algorithm(**sections.get("algorithm", {}))
    optimizer = Optimizer(**{"learning_rate": 1e-3, **sections.get("optimizer", {})})
    config = Config(
        run=Run(name="test"),
        model=Model(path=path, dtype=dtype),
        algorithm=algorithm,
        training=Training(optimizer=optimizer, **{"lr_staleness_power": 0.0, **sections.get("training", {})}),
        sampling=Sampling(**sections.get("sampling", {})),
    )
    if trainer is None:
        return config
    import msgspec

    return msgspec.structs.replace(config, services=msgspec.structs.replace(config.services, trainer=trainer))


def make_groups(seed: int, sizes: tuple[int, ...] = (4, 3, 5), *, step: int = 0, longest: int = 12) -> list[TrainGroup]:
    """Random groups with a tool's masked gap here and there, one invalid sample and one that is not trained on at all."""
    rng = np.random.default_rng(seed)
    return [_group(rng, index, size, step, longest) for index, size in enumerate(sizes)]


def _group(rng: np.random.Generator, group_id: int, size: int, step: int, longest: int) -> TrainGroup:
    samples = []
    for index in range(size):
        length = int(rng.integers(1, longest + 1))
        mask = np.ones(length, np.uint8)
        if length > 4:
            mask[2:4] = 0
        if group_id == 1 and index == 2:
            mask[:] = 0
        versions = np.full(length, PolicyVersion(3, max(0, step - int(rng.integers(0, 2)))).pack(), np.int64)
        samples.append(
            Sample(
                tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                logprobs=(rng.normal(-4.0, 0.5, length) * mask).astype(np.float32),
                versions=versions,
                finish_reason="stop",
            )
        )
    prompt = rng.integers(0, VOCAB, int(rng.integers(1, 7))).astype(np.int32)
    valid = np.ones(size, np.uint8)
    if group_id == 0:
        valid[1] = 0
    total = sum(len(sample.tokens) for sample in samples)
    return TrainGroup(
        group_id=group_id,
        tokens=total + size * len(prompt),
        payload=types.encode(GroupPayload.of(group_id, prompt, samples)),
        rewards=rng.normal(size=size).astype(np.float32),
        valid=valid,
        reference=types.encode(Logprobs(group_id=group_id, values=rng.normal(-4.0, 0.5, total).astype(np.float32))),
        values=types.encode(Values(group_id=group_id, values=rng.normal(0.0, 0.3, total).astype(np.float32))),
    )


def with_sets(group: TrainGroup, rng: np.random.Generator) -> TrainGroup:
    """Each sampled token with a random set that it is in, some of them the whole vocabulary."""
    payload = types.decode(GroupPayload, group.payload)
    sets = []
    for token in payload.tokens[payload.loss_mask.expand() != 0]:
        others = rng.permutation(np.delete(np.arange(VOCAB), token))[: rng.choice([0, 1, 5, 40, VOCAB - 1])]
        sets.append(encode_set(np.append(others, token).astype(np.int32), VOCAB))
    return replace(group, payload=types.encode(replace(payload, kept=TokenSets.of(sets, VOCAB))))


def with_swaps(group: TrainGroup) -> TrainGroup:
    """Return the group with a swap in flight: version 0 sampled the first half of each second reply, version 1 the rest."""
    payload = types.decode(GroupPayload, group.payload)
    samples = list(payload.samples)
    for place, sample in list(enumerate(samples))[::2]:
        half = len(sample.tokens) // 2
        versions = np.repeat([PolicyVersion(3, step).pack() for step in (0, 1)], [half, len(sample.tokens) - half])
        samples[place] = replace(sample, versions=versions)
    return replace(group, payload=types.encode(GroupPayload.of(group.group_id, payload.prompt, samples)))


def fed_tokens(payload: GroupPayload) -> int:
    """Of prompt and rows."""
    return len(payload.prompt) + sum(max(int(length) - 1, 0) for length in payload.lengths)


def with_random_experts(payload: GroupPayload, shape: tuple[int, int, int]) -> GroupPayload:
    """Each token fed with experts of no router's, no two of a token alike; `shape` as of `ExpertShape.routes`."""
    layers, per_token, count = shape
    picks = np.random.default_rng(payload.group_id).random((fed_tokens(payload), layers, count)).argsort(-1)
    return replace(payload, experts=RoutedExperts.of(picks[..., :per_token].astype(np.uint8)))


def random_experts(groups: list[TrainGroup], shape: tuple[int, int, int]) -> list[TrainGroup]:
    """The same of `groups`."""
    payloads = [with_random_experts(types.decode(GroupPayload, group.payload), shape) for group in groups]
    return [replace(group, payload=types.encode(each)) for group, each in zip(groups, payloads, strict=True)]


def make_episodes(seed: int, sizes: tuple[int, ...] = (3, 4, 2), *, step: int = 0, turns: bool = False) -> list[TrainGroup]:
    """Random groups of episodes of one to three branches. A branch begins with a part of the one before, which is not trained
    again, and has turns of two to four tokens with an environment's between. The second group has no common prompt, one episode
    of the first is not valid, and one of the second has nothing that is trained. `turns`: rewards of some turns."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id, size in enumerate(sizes):
        branches = [int(rng.integers(1, 4)) for _ in range(size)]
        rows = [row for index, count in enumerate(branches) for row in _branches(rng, count, step, (group_id, index) == (1, 0))]
        prompt = rng.integers(0, VOCAB, 0 if group_id == 1 else int(rng.integers(1, 7))).astype(np.int32)
        ends = [(at, int(token)) for at, row in enumerate(rows) for token in _last_of_turns(row) if rng.random() < 0.7]
        rewards = [TurnReward(at, token, float(rng.normal())) for at, token in ends]
        total = sum(len(row.tokens) for row in rows)
        groups.append(
            TrainGroup(
                group_id=group_id,
                tokens=total + len(rows) * len(prompt),
                payload=types.encode(GroupPayload.of(group_id, prompt, rows, branches, rewards if turns else ())),
                rewards=rng.normal(size=size).astype(np.float32),
                valid=np.array([(group_id, index) != (0, 1) for index in range(size)], np.uint8),
                reference=types.encode(Logprobs(group_id=group_id, values=rng.normal(-4.0, 0.5, total).astype(np.float32))),
                values=types.encode(Values(group_id=group_id, values=rng.normal(0.0, 0.3, total).astype(np.float32))),
            )
        )
    return groups


def _branches(rng: np.random.Generator, count: int, step: int, untrained: bool) -> list[Sample]:
    rows: list[Sample] = []
    for _ in range(count):
        shared = int(rng.integers(1, len(rows[-1].tokens))) if rows else 0
        lengths = [
            shared,
            *rng.integers(1, 3, 1),
            *rng.integers(2, 5, 2 * int(rng.integers(1, 4)) - 1),
        ]  # given, trained, given...
        mask = np.repeat([0, *(index % 2 for index in range(len(lengths) - 1))], lengths).astype(np.uint8) * (not untrained)
        tokens = rng.integers(0, VOCAB, len(mask)).astype(np.int32)
        tokens[:shared] = rows[-1].tokens[:shared] if rows else tokens[:0]
        rows.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                logprobs=(rng.normal(-4.0, 0.5, len(mask)) * mask).astype(np.float32),
                versions=np.full(len(mask), PolicyVersion(3, step).pack(), np.int64),
                finish_reason="length" if rng.random() < 0.3 else "stop",
            )
        )
    return rows


def _last_of_turns(row: Sample) -> np.ndarray:
    return np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), append=0) == -1)
