"""A policy's and a critic's step written out: one sample a forward pass, stock attention, torch's AdamW, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime import codec
from runtime.config import Config
from runtime.types import GroupPayload, Logprobs, TrainGroup, Values


class Token(NamedTuple):
    """One trained token: its sample (group, index), its place in the reply, and how old the version is that sampled it."""

    sample: tuple[int, int]
    t: int
    age: int


def tokens_of(groups: Sequence[TrainGroup], step: int) -> list[Token]:
    out = []
    for g, group in enumerate(groups):
        for i, sample in enumerate(codec.decode(GroupPayload, group.payload).samples):
            ages = step - (sample.versions & 0xFFFFFFFF)
            out += [Token((g, i), int(t), int(ages[t])) for t in np.flatnonzero(sample.loss_mask * group.valid[i])]
    return out


def per_sample(groups: Sequence[TrainGroup], run: Callable[[np.ndarray, np.ndarray], Any]) -> dict[tuple[int, int], Any]:
    """`run(prompt, reply)` of every sample."""
    payloads = [codec.decode(GroupPayload, group.payload) for group in groups]
    return {(g, i): run(p.prompt, sample.tokens) for g, p in enumerate(payloads) for i, sample in enumerate(p.samples)}


def flat_values(groups: Sequence[TrainGroup]) -> dict[tuple[int, int], np.ndarray]:
    """The recorded values of each sample."""
    out = {}
    for g, group in enumerate(groups):
        rest = codec.decode(Values, group.values).values
        for i, sample in enumerate(codec.decode(GroupPayload, group.payload).samples):
            out[g, i], rest = rest[: len(sample.tokens)].astype(np.float64), rest[len(sample.tokens) :]
    return out


def gae(groups: Sequence[TrainGroup], gamma: float, lam: float) -> tuple[dict, dict]:
    """Advantages and returns of each token, by the recursion over the sample's trained tokens alone."""
    values, advantages, returns = flat_values(groups), {}, {}
    by_sample: dict[tuple[int, int], list[Token]] = {}
    for token in tokens_of(groups, 0):
        by_sample.setdefault(token.sample, []).append(token)
    for (g, i), tokens in by_sample.items():
        following, advantage = 0.0, 0.0
        for last, token in enumerate(reversed(tokens)):
            value = values[g, i][token.t]
            reward = float(groups[g].rewards[i]) if last == 0 else 0.0
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            advantages[token.sample, token.t], returns[token.sample, token.t] = advantage, advantage + value
    return advantages, returns


def whitened(values: dict) -> dict:
    array = np.array(list(values.values()))
    return {key: (value - array.mean()) / math.sqrt(array.var(ddof=1) + 1e-8) for key, value in values.items()}


def group_norm(groups: Sequence[TrainGroup]) -> dict:
    out = {}
    for token in tokens_of(groups, 0):
        g, i = token.sample
        rewards = groups[g].rewards.astype(np.float64)
        kept = rewards[groups[g].valid == 1]
        out[token.sample, token.t] = (rewards[i] - kept.mean()) / (kept.std(ddof=1) + 1e-6)
    return out


def divergences(groups: Sequence[TrainGroup]) -> dict:
    """Of each token, the log-probability as it was sampled less the reference's."""
    out = {}
    for g, group in enumerate(groups):
        rest = codec.decode(Logprobs, group.reference).values.astype(np.float64)
        for i, sample in enumerate(codec.decode(GroupPayload, group.payload).samples):
            own, rest = rest[: len(sample.tokens)], rest[len(sample.tokens) :]
            out |= {((g, i), t): float(sample.logprobs[t]) - own[t] for t in range(len(own))}
    return out


class Loop:
    """Epochs and mini-batches over AdamW. `loss(groups, tokens)` gives the mean over `tokens`."""

    def __init__(self, model: Any, config: Config, options: Any):
        self.model, self.config = model.double(), config
        self.clip = options.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, betas=options.betas, eps=options.eps, weight_decay=0.0
        )
        self.norms: list[float] = []

    def update(self, groups: Sequence[TrainGroup], step: int, loss: Callable[[list[Token]], torch.Tensor]) -> None:
        training, tokens = self.config.training, tokens_of(groups, step)
        count = training.groups_per_step // (training.mini_batch_size or training.groups_per_step)
        for _ in range(training.epochs):
            for index in range(count):
                chosen = [token for token in tokens if groups[token.sample[0]].mini_batch == index]
                self.optimizer.zero_grad()
                loss(chosen).backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf)
                self.norms.append(norm.item())
                self.optimizer.step()


class PolicyLoop(Loop):
    def logprobs(self, groups: Sequence[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
        def run(prompt: np.ndarray, reply: np.ndarray) -> torch.Tensor:
            ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
            logits = self.model(ids[None]).logits[0, len(prompt) - 1 : -1] / self.config.sampling.temperature
            return torch.log_softmax(logits, -1)[torch.arange(len(reply)), ids[len(prompt) :]]

        return per_sample(groups, run)

    def step(self, groups: Sequence[TrainGroup], step: int, advantages: dict) -> None:
        """The decoupled loss, averaged over tokens."""
        algorithm = self.config.algorithm
        start = {key: value.detach() for key, value in self.logprobs(groups).items()}
        behaviour = {
            (g, i): sample.logprobs
            for g, group in enumerate(groups)
            for i, sample in enumerate(codec.decode(GroupPayload, group.payload).samples)
        }

        def loss(tokens: list[Token]) -> torch.Tensor:
            logp, terms = self.logprobs(groups), []
            for token in tokens:
                new, old = logp[token.sample][token.t], float(behaviour[token.sample][token.t])
                proximal = start[token.sample][token.t]
                if algorithm.proximal == "interpolated":
                    share = 1 / token.age if token.age else 0.0
                    proximal = share * old + (1 - share) * new.detach()
                weight = min(math.exp(proximal - old), algorithm.behaviour_weight_cap)
                ratio, advantage = torch.exp(new - proximal), advantages[token.sample, token.t]
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                terms.append(weight * torch.max(-ratio * advantage, -clipped * advantage))
            return torch.stack(terms).mean()

        self.update(groups, step, loss)


class CriticLoop(Loop):
    def values(self, groups: Sequence[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
        def run(prompt: np.ndarray, reply: np.ndarray) -> torch.Tensor:
            ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
            hidden = self.model.model(ids[None]).last_hidden_state[0]
            return self.model.score(hidden)[len(prompt) - 1 : -1, 0]

        return per_sample(groups, run)

    def step(self, groups: Sequence[TrainGroup], step: int, returns: dict) -> None:
        recorded, clip = flat_values(groups), self.config.critic.value_clip or math.inf  # type: ignore[union-attr]

        def loss(tokens: list[Token]) -> torch.Tensor:
            values, terms = self.values(groups), []
            for token in tokens:
                value, old = values[token.sample][token.t], recorded[token.sample][token.t]
                near = old + (value - old).clamp(-clip, clip)
                target = returns[token.sample, token.t]
                terms.append(0.5 * torch.max((value - target) ** 2, (near - target) ** 2))
            return torch.stack(terms).mean()

        self.update(groups, step, loss)
