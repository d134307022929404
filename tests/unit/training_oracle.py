"""A policy's and a critic's step written out: one sample a forward pass, stock attention, torch's AdamW, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from runtime import types
from runtime.config import Algorithm, Config
from runtime.types import GroupPayload, Logprobs, Sample, TrainGroup, Values


class Row(NamedTuple):
    """A branch of an episode, or a reply."""

    group: TrainGroup
    index: int  # the episode's, in its group
    sample: Sample
    reference: torch.Tensor  # float64 [T]
    every_logp: torch.Tensor  # [T, vocabulary]
    logp: torch.Tensor  # [T]


class Oracle:
    """One step written out: one sample a forward pass, stock attention, float64."""

    def __init__(self, path: str):
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        for module in self.model.modules():
            if type(module).__name__ in ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"):  # float32 whatever the model is of
                module.register_forward_hook(lambda _module, _inputs, found: (found[0], found[1].double()))

    def rows(self, groups: Sequence[TrainGroup], temperature: float = 1.0) -> Iterator[Row]:
        for group in groups:
            payload = types.decode(GroupPayload, group.payload)
            known = np.zeros(len(payload.tokens)) if group.reference is None else types.decode(Logprobs, group.reference).values
            references = np.split(known.astype(np.float64), np.cumsum(payload.lengths)[:-1])
            owners = np.repeat(np.arange(payload.n), payload.rows).tolist()
            for index, sample, reference in zip(owners, payload.samples, references, strict=True):
                ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens]).astype(np.int64))
                before = torch.arange(len(sample.tokens)) + len(payload.prompt) - 1
                every_logp = torch.log_softmax(self.model(ids[None]).logits[0, before] / temperature, -1)
                logp = every_logp.gather(1, ids[len(payload.prompt) :, None])[:, 0]
                yield Row(group, index, sample, torch.from_numpy(reference), every_logp, logp)

    @torch.no_grad()
    def trained_logprobs(self, groups: Sequence[TrainGroup]) -> np.ndarray:
        """Flat: of each trained token; 0 elsewhere."""
        return np.concatenate(
            [row.logp.numpy() * row.sample.loss_mask * row.group.valid[row.index] for row in self.rows(groups)]
        )

    def gradients(self, groups: Sequence[TrainGroup], config: Config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """What a step of GRPO reports, and the gradient by parameter."""
        algorithm, sums = config.algorithm, _Sums(config.algorithm)
        for row in self.rows(groups, config.sampling.temperature):
            kept = np.flatnonzero(row.sample.loss_mask)
            rewards, valid = row.group.rewards.astype(np.float64), row.group.valid
            if not valid[row.index]:
                continue
            among = rewards[valid == 1]
            advantage = (rewards[row.index] - among.mean()) / (among.std(ddof=1) + 1e-6)
            logp, behaviour = row.logp[kept], torch.from_numpy(row.sample.logprobs.astype(np.float64)[kept])
            start = logp.detach()
            ratio = torch.exp(logp - (start if algorithm.loss == "decoupled" else behaviour))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            loss = torch.maximum(-ratio * advantage, -clipped * advantage)
            if algorithm.loss == "decoupled":
                loss = torch.exp(start - behaviour).clamp(max=algorithm.loss_options.get("weight_cap", 2.0)) * loss
            x = logp - row.reference[kept]
            entropy = -(row.every_logp[kept].exp() * row.every_logp[kept]).sum(-1)
            sums.add((id(row.group), row.index), loss, (torch.exp(-x) - 1 + x).clamp(max=10), entropy)
        means = sums.means(sum(len(group.rewards) for group in groups))
        loss = means[0] + algorithm.kl_coefficient * means[1] - algorithm.entropy_coefficient * means[2]
        self.model.zero_grad()
        loss.backward()
        named = zip(("actor/pg_loss", "actor/kl_loss", "actor/entropy"), means, strict=True)
        metrics = {name: mean.item() for name, mean in named if algorithm.kl_coefficient or name != "actor/kl_loss"}
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        metrics["actor/grad_norm"] = math.sqrt(sum(float(g.square().sum()) for g in gradients.values() if g is not None))
        return metrics, gradients


class _Sums:
    """Aggregates loss, divergence and entropy of rows that are valid."""

    def __init__(self, algorithm: Algorithm):
        self._algorithm = algorithm
        self._rows: dict[Any, list[torch.Tensor]] = {}  # by episode

    def add(self, episode: Any, *values: torch.Tensor) -> None:
        self._rows.setdefault(episode, []).append(torch.stack(values, 1))

    def means(self, episodes: int) -> torch.Tensor:
        """float64 [3]. `episodes`: all of the step, be they valid or not."""
        rows = [row for of_one in self._rows.values() for row in of_one]
        match self._algorithm.aggregation:
            case "dr_grpo":
                return torch.cat(rows).sum(0) / (self._algorithm.aggregation_norm * episodes)
            case "seq_mean_token_mean":
                return torch.stack([row.mean(0) for row in rows if len(row)]).mean(0)
            case "episode_mean_token_mean":
                whole = [torch.cat(of_one) for of_one in self._rows.values()]
                return torch.stack([each.mean(0) for each in whole if len(each)]).mean(0)
            case _:
                return torch.cat(rows).mean(0)


class Token(NamedTuple):
    """One trained token: its sample (group, index), its place in the reply, and how old the version is that sampled it."""

    sample: tuple[int, int]
    t: int
    age: int


def tokens_of(groups: Sequence[TrainGroup], step: int) -> list[Token]:
    out = []
    for g, group in enumerate(groups):
        for i, sample in enumerate(types.decode(GroupPayload, group.payload).samples):
            ages = step - (sample.versions & 0xFFFFFFFF)
            out += [Token((g, i), int(t), int(ages[t])) for t in np.flatnonzero(sample.loss_mask * group.valid[i])]
    return out


def per_sample(
    groups: Sequence[TrainGroup], run: Callable[[np.ndarray, np.ndarray], Any], only: Container[tuple[int, int]] | None = None
) -> dict[tuple[int, int], Any]:
    """`run(prompt, reply)` of every sample, or of some."""
    payloads = [types.decode(GroupPayload, group.payload) for group in groups]
    samples = [(g, i, p.prompt, sample.tokens) for g, p in enumerate(payloads) for i, sample in enumerate(p.samples)]
    return {(g, i): run(prompt, reply) for g, i, prompt, reply in samples if only is None or (g, i) in only}


def flat_values(groups: Sequence[TrainGroup]) -> dict[tuple[int, int], np.ndarray]:
    """The recorded values of each sample."""
    out = {}
    for g, group in enumerate(groups):
        rest = types.decode(Values, group.values).values
        for i, sample in enumerate(types.decode(GroupPayload, group.payload).samples):
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
        rest = types.decode(Logprobs, group.reference).values.astype(np.float64)
        for i, sample in enumerate(types.decode(GroupPayload, group.payload).samples):
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
    def logprobs(self, groups: Sequence[TrainGroup], only: Any = None) -> dict[tuple[int, int], torch.Tensor]:
        def run(prompt: np.ndarray, reply: np.ndarray) -> torch.Tensor:
            ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
            logits = self.model(ids[None]).logits[0, len(prompt) - 1 : -1] / self.config.sampling.temperature
            return torch.log_softmax(logits, -1)[torch.arange(len(reply)), ids[len(prompt) :]]

        return per_sample(groups, run, only)

    def step(self, groups: Sequence[TrainGroup], step: int, advantages: dict) -> None:
        """The decoupled loss, averaged over tokens."""
        algorithm = self.config.algorithm
        with torch.no_grad():
            start = self.logprobs(groups)
        samples = (types.decode(GroupPayload, group.payload).samples for group in groups)
        behaviour = {(g, i): sample.logprobs for g, own in enumerate(samples) for i, sample in enumerate(own)}

        def loss(tokens: list[Token]) -> torch.Tensor:
            logp, terms = self.logprobs(groups, {token.sample for token in tokens}), []
            for token in tokens:
                new, old = logp[token.sample][token.t], float(behaviour[token.sample][token.t])
                proximal = start[token.sample][token.t]
                if algorithm.proximal == "interpolated":
                    share = 1 / token.age if token.age else 0.0
                    proximal = share * old + (1 - share) * new.detach()
                weight = min(math.exp(proximal - old), algorithm.loss_options.get("weight_cap", 2.0))
                ratio, advantage = torch.exp(new - proximal), advantages[token.sample, token.t]
                clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                terms.append(weight * torch.max(-ratio * advantage, -clipped * advantage))
            return torch.stack(terms).mean()

        self.update(groups, step, loss)


class CriticLoop(Loop):
    def values(self, groups: Sequence[TrainGroup], only: Any = None) -> dict[tuple[int, int], torch.Tensor]:
        def run(prompt: np.ndarray, reply: np.ndarray) -> torch.Tensor:
            ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
            hidden = self.model.model(ids[None]).last_hidden_state[0]
            return self.model.score(hidden)[len(prompt) - 1 : -1, 0]

        return per_sample(groups, run, only)

    def step(self, groups: Sequence[TrainGroup], step: int, returns: dict) -> None:
        recorded, clip = flat_values(groups), self.config.critic.value_clip or math.inf  # type: ignore[union-attr]

        def loss(tokens: list[Token]) -> torch.Tensor:
            values, terms = self.values(groups, {token.sample for token in tokens}), []
            for token in tokens:
                value, old = values[token.sample][token.t], recorded[token.sample][token.t]
                near = old + (value - old).clamp(-clip, clip)
                target = returns[token.sample, token.t]
                terms.append(0.5 * torch.max((value - target) ** 2, (near - target) ** 2))
            return torch.stack(terms).mean()

        self.update(groups, step, loss)
