"""What training the policy means, whatever kind of model it is: the algorithm's objective on the samples of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from runtime import codec
from runtime.config import Config
from runtime.models import hf_policy
from runtime.trainer import rows as train_rows
from runtime.trainer.batch import Columns, MicroBatch
from runtime.trainer.engine import TrainEngine
from runtime.trainer.loop import UpdateLoop
from runtime.trainer.objective import Objective, add_mismatch
from runtime.trainer.rows import Rows
from runtime.types import GroupPayload, ValueRequest


class PolicyLoop(UpdateLoop, TrainEngine):
    """The outputs of its model are the logits [N, V] that give the trained tokens."""

    role = "trainer"
    averaged = "actor/pg_loss"
    _objective: Objective

    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        coefficient = self._kl_control.coefficient
        self._objective.kl_coefficient = coefficient
        self._report_rows(rows)
        with self._phase("adv", "non_overlap_adv"):  # no pass runs meanwhile
            advantages = self._advantages(rows, coefficient, self._statistics)
        if self._config.critic is not None:
            self._report_advantages(rows, advantages)
        columns = self._objective.columns(rows, advantages, self._step)
        if self._several_updates:
            with self._phase("old_log_p"):
                columns["proximal"] = self._forward_only(rows)
        return columns, self._objective.has_gradient(advantages)

    def compare(self, probes: Sequence[bytes]) -> list[float]:
        with self._timed():
            ids = [codec.decode(GroupPayload, probe).group_id for probe in probes]
            groups = [ValueRequest(group_id=group, tokens=0, payload=probe) for group, probe in zip(ids, probes, strict=True)]
            rows = train_rows.decode_samples(groups if self._place == 0 else [], self._vocab_size)
            own = self._forward_only(_prompts_shared(rows))
            add_mismatch(self._statistics, *map(self._and_nothing, (rows.behaviour, own, rows.mask)))
        gaps, counted = rows.by_group(np.abs(rows.behaviour - own)), rows.by_group(rows.mask)
        return [float(gap[mask].mean(dtype=np.float64)) for gap, mask in zip(gaps, counted, strict=True)]

    def _and_nothing(self, flat: np.ndarray) -> torch.Tensor:
        """On the device, float32, with a 0 behind: there may be none."""
        return torch.from_numpy(np.append(flat, 0).astype(np.float32)).to(self._device)

    def _numbers(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return self._objective.logprobs(outputs, batch.targets)[0]

    def _loss(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return self._objective(batch, outputs, self._statistics)

    def _count_masked(self, samples: int) -> None:
        self._objective.count_masked(samples, self._statistics)

    def _report_rows(self, rows: Rows) -> None:
        prompts = rows.prompt_length[rows.group]
        for name, values in (
            ("response_length", rows.length),
            ("prompt_length", prompts),
            ("grpo/score", rows.rewards[rows.valid]),
        ):
            self._statistics.mean(f"{name}/mean", float(values.sum(dtype=np.float64)), float(len(values)))
            self._statistics.maximum(f"{name}/max", float(values.max()) if len(values) else -math.inf)
            self._statistics.minimum(f"{name}/min", float(values.min()) if len(values) else math.inf)
        age = (self._step - rows.steps)[rows.mask]
        self._statistics.mean("staleness/token_mean", float(age.sum()), float(len(age)))

    def _report_advantages(self, rows: Rows, advantages: np.ndarray) -> None:
        mask = rows.grid(rows.mask, np.arange(len(rows.length))) > 0
        counted = np.broadcast_to(advantages, mask.shape)[mask]
        self._statistics.mean("critic/advantages/mean", float(counted.sum()), float(len(counted)))
        self._statistics.maximum("critic/advantages/max", float(counted.max(initial=-math.inf)))
        self._statistics.minimum("critic/advantages/min", float(counted.min(initial=math.inf)))

    def _close_step(self) -> dict[str, float]:
        metrics = super()._close_step()
        metrics["actor/lr"] = metrics.pop("lr")
        if "grad_norm" in metrics:
            metrics["actor/grad_norm"] = metrics["grad_norm"]  # MindSpeed-RL's documentation has the one, its code the other
        return metrics


def _prompts_shared(rows: Rows) -> Rows:
    """As if samples of equal prompts were of one group, whose prompt is computed once."""
    spans = zip(rows.prompt_start, rows.prompt_length, strict=True)
    prompts = [rows.prompts[start : start + length].tobytes() for start, length in spans]
    return replace(rows, group=np.array([prompts.index(prompt) for prompt in prompts], np.int64)[rows.group])


def wire_dtype(config: Config) -> torch.dtype:
    """What the policy is published and exported in."""
    for name in (config.publication.dtype, config.model.dtype):
        if name != "auto":
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return hf_policy.declared_dtype(config.model.path)
