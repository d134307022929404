"""A plain GRPO loop in one process, as a competent user would write it by hand: what the benches compare Sluice with.

It generates, scores, asks the reference and trains in turn, on the same model and prompts. Generation has a static
key-value cache, fused projections, one prefill a prompt, and drops finished rows from the batch; training has length-sorted
micro-batches. Weights are shared between both, so that nothing has to be sent.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.inputs import answer_pattern
from runtime.config import Config
from runtime.data.prepared import training_prompts
from runtime.data.tokenizer import Tokenizer

MICRO_BATCHES = 4
COMPACT_BELOW = 0.875  # finished rows leave the batch once fewer than this share are alive


class Replies(NamedTuple):
    """The replies to one batch of prompts, rows in the order of the prompts, each repeated for its group."""

    tokens: list[list[int]]  # each ends with its stop token, unless it was cut
    decoded: int  # tokens that came out of decode steps: all but the first of each reply


class PlainLoop:
    """`step` is one whole iteration. Qwen2 and Llama with tied embeddings only, float32, on the CPU."""

    def __init__(self, config: Config, seed: int = 0):
        factory: Any = AutoModelForCausalLM
        self._model = factory.from_pretrained(config.model.path, attn_implementation="sdpa").float().train()
        optimizer = config.training.optimizer
        rate, betas, ramp = optimizer.learning_rate, optimizer.betas, max(1, optimizer.warmup_steps)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / ramp))
        self._beta = config.algorithm.kl_coefficient
        self._reference = copy.deepcopy(self._model).eval().requires_grad_(False) if self._beta else self._model
        self._group_size = config.sampling.group_size
        self._groups = config.training.groups_per_step
        self._limit = config.sampling.max_new_tokens
        weights = {rule.name: rule.weight for rule in config.rewards.rules}
        self._correct, self._form = config.rewards.rules[0].weight, weights.get("format_answer", 0.0)
        self._answer = re.compile(answer_pattern(config), re.DOTALL)
        self._tokenizer = Tokenizer(config.model.path)
        self._stops = torch.tensor(self._tokenizer.eos_ids)
        self._prompts = training_prompts(config.data, self._tokenizer)
        self._random = torch.Generator().manual_seed(seed)
        shape = self._model.config
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._head_dim = shape.hidden_size // shape.num_attention_heads
        self._eps = shape.rms_norm_eps
        frequencies = shape.rope_theta ** (-torch.arange(0, self._head_dim, 2) / self._head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    @property
    def samples_per_step(self) -> int:
        return self._groups * self._group_size

    def prompts(self) -> tuple[list[list[int]], list[str]]:
        """The next batch: tokens and labels."""
        chosen = torch.randint(len(self._prompts.problems), (self._groups,), generator=self._random).tolist()
        tokens, problems = self._prompts.tokens, self._prompts.problems
        return [tokens[index].tolist() for index in chosen], [problems[index].label for index in chosen]

    def step(self) -> None:
        """Generate, score, train."""
        prompts, labels = self.prompts()
        replies = self.generate(prompts).tokens
        rewards = torch.tensor(self._score(replies, labels)).view(self._groups, self._group_size)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        repeated = [prompt for prompt in prompts for _ in range(self._group_size)]
        self._train(repeated, replies, advantages.flatten())

    def accuracy(self, prompts: Sequence[Sequence[int]], labels: Sequence[str]) -> float:
        """The share of greedy replies, one to each prompt, that end with the label."""
        found = self._answers(self.generate(prompts, greedy=True).tokens)
        return sum(answer == label for answer, label in zip(found, labels, strict=True)) / len(labels)

    # ------------------------------------------------------------------------------------------ generation

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], greedy: bool = False) -> Replies:
        """`group_size` sampled replies to each prompt, or the greedy one."""
        weights = self._fused()
        width = max(map(len, prompts))
        padding = torch.tensor([width - len(prompt) for prompt in prompts])
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        total = width + self._limit
        cache = [torch.zeros(2, len(prompts), self._kv_heads, total, self._head_dim) for _ in range(len(weights))]
        columns = torch.arange(total)
        seen = (columns[None, None, :] <= columns[:width, None]) & (columns >= padding[:, None])[:, None]
        seen |= torch.eye(width, total, dtype=torch.bool)  # padding sees itself: no row of the softmax is empty
        positions = (columns[:width] - padding[:, None]).clamp(min=0)
        logits = self._forward(weights, tokens, positions, cache, 0, seen)[:, -1]

        repeat = torch.arange(len(prompts)).repeat_interleave(1 if greedy else self._group_size)
        cache = [layer.index_select(1, repeat) for layer in cache]
        logits, padding = logits[repeat], padding[repeat]
        visible = columns >= padding[:, None]
        rows = torch.arange(len(repeat))  # which reply each row of the batch is
        alive = torch.ones(len(rows), dtype=torch.bool)
        replies: list[list[int]] = [[] for _ in rows]
        decoded = 0
        for column in range(width, total):
            chosen = logits.argmax(-1) if greedy else self._sample(logits)
            for row, token in zip(rows[alive].tolist(), chosen[alive].tolist(), strict=True):
                replies[row].append(token)
            decoded += int(alive.sum()) if column > width else 0
            alive &= ~torch.isin(chosen, self._stops)
            left = int(alive.sum())
            if not left or column == total - 1:
                break
            if left < COMPACT_BELOW * len(rows):
                kept = alive.nonzero().squeeze(1)
                cache = [layer.index_select(1, kept) for layer in cache]
                rows, padding, visible, chosen, alive = rows[kept], padding[kept], visible[kept], chosen[kept], alive[kept]
            mask = visible[:, None, : column + 1]
            logits = self._forward(weights, chosen[:, None], column - padding[:, None], cache, column, mask)[:, -1]
        return Replies(replies, decoded)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """By inverse CDF: torch.multinomial draws an exponential number for every entry of the vocabulary."""
        cumulative = torch.softmax(logits, -1).cumsum(-1)
        drawn = torch.rand(len(logits), 1, generator=self._random) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, drawn, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    def _fused(self) -> list[dict[str, Any]]:
        """The layers' weights of now, projections that share their input joined."""
        out = []
        for layer in self._model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            out.append(
                {
                    "input_norm": layer.input_layernorm.weight,
                    "qkv": torch.cat([projection.weight for projection in projections]),
                    "qkv_bias": None if attention.q_proj.bias is None else torch.cat([each.bias for each in projections]),
                    "output": attention.o_proj.weight,
                    "mlp_norm": layer.post_attention_layernorm.weight,
                    "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
                    "down": mlp.down_proj.weight,
                }
            )
        return out

    def _forward(
        self,
        weights: Sequence[dict[str, Any]],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Sequence[torch.Tensor],
        column: int,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [B, 1, vocab] of the last of `tokens` [B, t], which go to `column` of the cache and on.

        `seen` is bool [B, t, columns or more].
        """
        batch, length = tokens.shape
        end, hidden = column + length, (self._model.config.hidden_size,)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        mask = seen[:, None, :, :end]
        embedding = self._model.model.embed_tokens.weight
        x = F.embedding(tokens, embedding)
        for layer, held in zip(weights, cache, strict=True):
            qkv = F.linear(F.rms_norm(x, hidden, layer["input_norm"], self._eps), layer["qkv"], layer["qkv_bias"])
            qkv = qkv.view(batch, length, -1, self._head_dim).transpose(1, 2)
            rotated, value = qkv.split((self._heads + self._kv_heads, self._kv_heads), 1)
            first, second = rotated.chunk(2, -1)
            rotated = rotated * cos + torch.cat((-second, first), -1) * sin
            query, key = rotated.split((self._heads, self._kv_heads), 1)
            held[0][:, :, column:end] = key
            held[1][:, :, column:end] = value
            keys, values = held[:, :, :, :end].unbind()
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + F.linear(out.transpose(1, 2).flatten(2), layer["output"])
            gate, up = F.linear(F.rms_norm(x, hidden, layer["mlp_norm"], self._eps), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(F.rms_norm(x[:, -1:], hidden, self._model.model.norm.weight, self._eps), embedding)

    # ------------------------------------------------------------------------------------------ training

    def _answers(self, replies: Sequence[Sequence[int]]) -> list[str | None]:
        found = [self._answer.search(text) for text in self._tokenizer.texts.decode_batch(replies)]
        return [match and match.group(1) for match in found]

    def _score(self, replies: Sequence[Sequence[int]], labels: Sequence[str]) -> list[float]:
        return [
            self._correct * (answer == labels[row // self._group_size]) + self._form * (answer is not None)
            for row, answer in enumerate(self._answers(replies))
        ]

    def _train(self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], advantages: torch.Tensor) -> None:
        """One optimizer step of GRPO with a KL term, the mean over all reply tokens."""
        count = sum(map(len, replies))
        order = sorted(range(len(replies)), key=lambda row: len(prompts[row]) + len(replies[row]))
        size = -(-len(order) // MICRO_BATCHES)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            tokens, mask = padded([prompts[row] for row in rows], [replies[row] for row in rows])
            logp = logprobs(self._model, tokens)
            with torch.no_grad():
                reference = logprobs(self._reference, tokens) if self._beta else logp
            behind = reference - logp
            # One update a batch: the policy that sampled is the one being trained, so the ratio is 1 and only carries gradient.
            loss = self._beta * (behind.expm1() - behind) - (logp - logp.detach()).exp() * advantages[rows, None]
            ((loss * mask).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


def padded(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B, T], padded right, and a float mask [B, T - 1] of the reply tokens that each position predicts."""
    width = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width - 1)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        end = len(prompt) + len(reply)
        tokens[row, :end] = torch.tensor([*prompt, *reply])
        mask[row, len(prompt) - 1 : end - 1] = 1.0
    return tokens, mask


def logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """log p of each next token, [B, T - 1]. Padding on the right needs no mask: causality hides it."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)
