"""What `sluice bench packing` measures: steps of the embedded trainer, and of one that pads, on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.random_groups import GroupLengths, draw_groups, draw_lengths
from runtime import types
from runtime.config import Config
from runtime.models.forward import cut_by_length
from runtime.types import GroupPayload, PolicyVersion, Sample, TrainGroup

if TYPE_CHECKING:
    from runtime.trainer.step import ModelTrainer

PACKED, SORTED, UNSORTED = "packed", "padded, sorted", "padded, unsorted"
WAYS = (PACKED, SORTED, UNSORTED)
TREES, APART = "trees", "branches apart"  # episodes whose branches share tokens, and the same branches as episodes of their own
BRANCHES, BRANCH_TOKENS, SHARED_TOKENS, PROMPT_TOKENS = 8, 640, 480, 64  # of a tree; the prompt is in both that follow it


def cut_as_they_come(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """`cut_by_length` without its sorting."""
    batches: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = length
    return batches


def cut(way: str, lengths: Sequence[int], budget: int) -> list[list[int]]:
    return cut_as_they_come(lengths, budget) if way == UNSORTED else cut_by_length(lengths, budget)


class PackingTrial:
    """Trains a model, one step a batch, in each of WAYS; each begins with the model's weights and is built when first used."""

    def __init__(self, config: Config):
        self._config = config

    def step(self, way: str, index: int) -> tuple[float, float]:
        """One optimizer step on batch `index`: its loss, and the norm of its gradient."""
        if way != PACKED:
            return self._padding[way].step(self._samples[index])
        self._engine.begin_step(self._engine.step)
        self._engine.accumulate(self.groups[index])
        metrics = self._engine.apply().metrics
        return metrics["actor/pg_loss"], metrics["actor/grad_norm"]

    def tree_step(self, way: str) -> tuple[float, float]:
        """As `step`, on TREES or APART."""
        self._engine.begin_step(self._engine.step)
        self._engine.accumulate([_two_trees(number, apart=way == APART) for number in range(2)])
        metrics = self._engine.apply().metrics
        return metrics["actor/pg_loss"], metrics["actor/grad_norm"]

    @cached_property
    def lengths(self) -> list[list[GroupLengths]]:
        return draw_lengths(self._config)

    @property
    def real_tokens(self) -> int:
        """Of all batches."""
        return sum(sum(group.samples) for batch in self.lengths for group in batch)

    @cached_property
    def groups(self) -> list[list[TrainGroup]]:
        return draw_groups(self._config)

    @cached_property
    def _samples(self) -> list[list[PaddedSample]]:
        return [[sample for group in batch for sample in padded_samples(group)] for batch in self.groups]

    @cached_property
    def _engine(self) -> ModelTrainer:
        from runtime.trainer.step import policy_trainer

        return policy_trainer(self._config)

    @cached_property
    def _padding(self) -> dict[str, PaddedTrainer]:
        return {way: PaddedTrainer(self._config, way) for way in (SORTED, UNSORTED)}


TREE_TOKENS = 4 * BRANCHES * BRANCH_TOKENS  # of a step on trees, each branch whole


def _two_trees(number: int, apart: bool) -> TrainGroup:
    """A group of two trees of random tokens, one of them rewarded; what a branch shares is trained in the first."""
    random, trunk = np.random.default_rng(number), SHARED_TOKENS - PROMPT_TOKENS

    def tree() -> list[Sample]:
        tokens = random.integers(0, 256, (BRANCHES, BRANCH_TOKENS - PROMPT_TOKENS)).astype(np.int32)
        tokens[:, :trunk] = tokens[0, :trunk]
        masks = np.ones(tokens.shape, np.uint8)
        masks[1:, :trunk] = 0
        versions = np.full(tokens.shape[1], PolicyVersion(0, 0).pack(), np.int64)
        return [
            Sample(tokens=row, loss_mask=mask, logprobs=np.float32(-5.5) * mask, versions=versions, finish_reason="stop")
            for row, mask in zip(tokens, masks, strict=True)
        ]

    prompt = random.integers(0, 256, PROMPT_TOKENS).astype(np.int32)
    branches = [1] * 2 * BRANCHES if apart else [BRANCHES] * 2
    payload = GroupPayload.of(number, prompt, [*tree(), *tree()], branches)
    return TrainGroup(
        group_id=number,
        tokens=TREE_TOKENS // 2,
        payload=types.encode(payload),
        rewards=np.repeat(np.arange(2, dtype=np.float32), len(branches) // 2),
        valid=np.ones(len(branches), np.uint8),
    )


class PaddedSample(NamedTuple):
    prompt: list[int]
    reply: list[int]
    behaviour: np.ndarray  # float32 [R]
    advantage: float


def padded_samples(group: TrainGroup) -> list[PaddedSample]:
    """The samples of `group`, and their advantages within it (GRPO, arXiv:2402.03300, section 4.1.2)."""
    payload = types.decode(GroupPayload, group.payload)
    rewards = group.rewards.astype(np.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    prompt = payload.prompt.tolist()
    return [
        PaddedSample(prompt, sample.tokens.tolist(), sample.logprobs, float(advantage))
        for sample, advantage in zip(payload.samples, advantages, strict=True)
    ]


class PaddedTrainer:
    """The stock model with torch's fused attention, one row a sample, padded on the right. Causality hides the padding, so that
    attention takes no mask and runs its fastest kernel."""

    def __init__(self, config: Config, way: str):
        from torch.optim import AdamW
        from transformers import AutoModelForCausalLM

        factory: Any = AutoModelForCausalLM
        self._model = factory.from_pretrained(config.model.path, attn_implementation="sdpa").float().train()
        self._model.get_input_embeddings().padding_idx = None  # the samples' tokens are any of the vocabulary
        options = config.training.optimizer
        self._optimizer = AdamW(
            self._model.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=0.0, fused=True
        )
        self._way = way
        self._limit = options.max_grad_norm
        self._cap = config.algorithm.loss_options.get("weight_cap", 2.0)
        self._budget = config.training.max_tokens_per_microbatch

    def step(self, samples: Sequence[PaddedSample]) -> tuple[float, float]:
        """The decoupled loss with one update a batch, the mean over reply tokens (arXiv:2505.24298, equation 5)."""
        import torch

        from benchmarks.plain_loop import logprobs, padded

        count = sum(len(sample.reply) for sample in samples)
        total = 0.0
        for rows in cut(self._way, [len(sample.prompt) + len(sample.reply) for sample in samples], self._budget):
            chosen = [samples[row] for row in rows]
            tokens, mask = padded([sample.prompt for sample in chosen], [sample.reply for sample in chosen])
            behaviour = torch.zeros_like(mask)
            behaviour[mask.bool()] = torch.from_numpy(np.concatenate([sample.behaviour for sample in chosen]))
            logp = logprobs(self._model, tokens)
            proximal = logp.detach()
            weight = (proximal - behaviour).exp().clamp(max=self._cap)
            advantages = torch.tensor([sample.advantage for sample in chosen])[:, None]
            loss = -((logp - proximal).exp() * weight * advantages * mask).sum() / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._limit)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, norm.item()
