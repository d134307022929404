"""The embedded training engine: a Hugging Face model, AdamW, and FSDP2 when there is more than one rank."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from runtime import platform
from runtime.chosen_algorithm import choose, kl_control
from runtime.config import Config
from runtime.engines import hf_policy, train_batch, train_sharding, train_state
from runtime.engines.lr_schedule import learning_rate
from runtime.engines.train_advantages import RowAdvantages
from runtime.engines.train_base import TrainEngine
from runtime.engines.train_batch import MicroBatch, Rows
from runtime.engines.train_objective import Objective
from runtime.engines.train_statistics import StepStatistics
from runtime.errors import InvariantViolated, ServiceFault, UserError
from runtime.types import StepResult, TrainGroup
from runtime.weights.plan import TensorSpec

_GRADIENT = "gradient/squared"


class TorchTrainEngine(TrainEngine):
    """float32 master weights; computed in bfloat16 on accelerators and float32 on the CPU unless `model.dtype` says otherwise.

    With `world_size` > 1 the caller has initialised torch's default process group, which spans the trainer's ranks.
    """

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the policy from `config.model.path`. Raises UserError for what the configuration or the folder gets wrong."""
        self._config = config
        self._rank, self._world_size, self._device = rank, world_size, torch.device(device)
        self._algorithm = choose(config)
        self._kl_control = kl_control(config.algorithm)
        self._needs_reference = config.algorithm.kl_coefficient != 0
        self._objective = Objective(config, self._algorithm)
        self._advantages = RowAdvantages(
            config, self._algorithm, partial(train_sharding.batch_sum, device=self._device, world_size=world_size)
        )
        self._compute = _compute_dtype(config, self._device)
        _check_offload(config, self._device, world_size)
        self._model = hf_policy.load_policy(config.model.path)
        self._wire_dtype = _wire_dtype(config)
        trainer = config.services.trainer
        if trainer.activation_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model.train()
        if world_size > 1:
            train_sharding.shard(self._model, self._device, world_size, self._compute, trainer.cpu_offload)
        else:
            self._model.to(self._device)
        # Tied tensors come once, under their first name, as in a Hugging Face export.
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = _optimizer(config, self._parameters)
        self._step = 0
        self._begin(0)

    @property
    def step(self) -> int:
        """The step that comes next, or is under way: the weights are those of version `step`."""
        return self._step

    def begin_step(self, step: int) -> None:
        if step != self._step:
            raise InvariantViolated(f"the trainer's weights are of step {self._step}, but step {step} begins")
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._statistics = StepStatistics(self._device)
        self._seconds = 0.0
        self._held: list[Rows] = []

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Under an algorithm that is not streamable, only check and hold the groups: `apply` trains on the whole batch."""
        with self._timed():
            rows = train_batch.decode_groups(groups, self._model.config.vocab_size, self._needs_reference)
            if self._algorithm.streamable:
                self._train(rows)
            else:
                self._held.append(rows)

    def _train(self, rows: Rows) -> None:
        """Add the gradient of `rows`, of which ranks may have different numbers."""
        self._objective.kl_coefficient = self._kl_control.coefficient
        advantages = self._advantages(rows, self._kl_control.coefficient, self._statistics)
        self._report_rows(rows)
        trained, live = rows.trained(), self._objective.has_gradient(advantages)
        budget = self._config.training.max_tokens_per_microbatch
        plans = [train_batch.plan(rows, np.flatnonzero(trained & kind), budget) for kind in (~live, live)]
        counts = train_sharding.largest([len(plan) for plan in plans], self._device, self._world_size)
        for backward, (plan, count) in enumerate(zip(plans, counts, strict=True)):
            for index in range(count):
                if index < len(plan):
                    batch = train_batch.pack(rows, plan[index], advantages, self._step, self._device)
                else:
                    batch = train_batch.nothing(self._needs_reference, self._device)
                self._run(batch, bool(backward))

    def _run(self, batch: MicroBatch, backward: bool) -> None:
        """One forward pass, and the backward pass that adds to the gradients."""
        with torch.set_grad_enabled(backward), self._precision():
            logits = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                packing=batch.packing,
                logits_to_keep=batch.predictors,
                use_cache=False,
            ).logits[0]
        with torch.set_grad_enabled(backward):
            loss = self._objective(batch, logits, self._statistics)
        if backward:
            loss.backward()

    def _precision(self) -> contextlib.AbstractContextManager:
        """FSDP2 casts by itself; a single rank computes under autocast, its parameters being the master weights."""
        if self._world_size > 1 or self._compute == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._compute)

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

    def apply(self) -> StepResult:
        with self._timed():
            if not self._algorithm.streamable:
                self._train(train_batch.join(self._held or [train_batch.decode_groups([], 0, self._needs_reference)]))
            if self._world_size > 1:
                train_sharding.reshard(self._model)
            gradients = self._gradients()
            norms = torch.stack(torch._foreach_norm(gradients)).double()
            self._statistics.mean(_GRADIENT, norms.square().sum(), 1.0)
            means, extremes = self._statistics.reduce(self._world_size)
            # What the losses were averaged over; nothing was trained when it is missing, and the gradient is 0.
            denominator = means["actor/pg_loss"].count if "actor/pg_loss" in means else 1.0
            norm = math.sqrt(means.pop(_GRADIENT).total) / denominator
            self._step_optimizer(gradients, norm, denominator)
        metrics = {name: mean.value for name, mean in means.items()} | extremes
        metrics |= {"grad_norm": norm, "actor/lr": self._optimizer.param_groups[0]["lr"]}
        if "actor/kl" in means:
            metrics["actor/kl_coefficient"] = self._kl_control.coefficient
            self._kl_control = self._kl_control.after(means["actor/kl"].value, means["response_length/mean"].count)
        self._step += 1
        return StepResult(step=self._step - 1, metrics=metrics, seconds=self._seconds)

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the summed gradients. A parameter that saw no backward pass has gradient 0, not none."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [train_sharding.local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]

    def _step_optimizer(self, gradients: list[torch.Tensor], norm: float, denominator: float) -> None:
        if not math.isfinite(norm):
            raise ServiceFault("trainer", "apply", f"step {self._step}: the gradient norm is {norm}; the weights are unchanged")
        optimizer = self._config.training.optimizer
        limit = optimizer.max_grad_norm
        clip = limit / norm if limit and norm > limit else 1.0
        torch._foreach_mul_(gradients, clip / denominator)
        rate = learning_rate(self._step, self._config.training.steps, optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin

    def tensor_specs(self) -> list[TensorSpec]:
        dtype = str(self._wire_dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, tuple(parameter.shape)) for name, parameter in self._parameters.items()]

    @torch.no_grad()
    def snapshot(self, out: Sequence[torch.Tensor] | None) -> None:
        if self._world_size == 1:
            torch._foreach_copy_(list(out or ()), list(self._parameters.values()) if out else [])
            return
        for index, parameter in enumerate(self._parameters.values()):
            whole = train_sharding.full(parameter)
            if out is not None:
                out[index].copy_(whole)

    def save(self, folder: str) -> None:
        train_state.save(Path(folder), self._training_state(), self._config.model.path)

    def load(self, folder: str) -> None:
        position = train_state.load(Path(folder), self._training_state())
        self._step = position.step
        self._kl_control = kl_control(self._config.algorithm, position.kl_coefficient)
        self._begin(self._step)

    def export(self, folder: str) -> None:
        train_state.write_model(Path(folder), self._parameters, self._rank, self._wire_dtype, self._config.model.path)

    def _training_state(self) -> train_state.TrainingState:
        return train_state.TrainingState(
            self._parameters,
            self._optimizer,
            train_state.Position(self._step, self._kl_control.coefficient),
            self._rank,
            self._world_size,
            self._device,
        )


def _compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype: 'float16' cannot be trained (its gradients underflow); must be one of auto, float32, bfloat16"
        )
    return platform.resolve_dtype(config.model.dtype, device)


def _wire_dtype(config: Config) -> torch.dtype:
    """What the policy is published and exported in."""
    for name in (config.publication.dtype, config.model.dtype):
        if name != "auto":
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return hf_policy.declared_dtype(config.model.path)


def _check_offload(config: Config, device: torch.device, world_size: int) -> None:
    if config.services.trainer.cpu_offload and (world_size == 1 or device.type == "cpu"):
        raise UserError(
            "services.trainer.cpu_offload: true needs accelerators and services.trainer.processes > 1 "
            f"(here: {device.type}, {world_size}); must be false"
        )


def _optimizer(config: Config, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay. Fused where there is a kernel: on a CPU it takes a third of foreach's time."""
    options = config.training.optimizer
    kinds = {parameter.device.type for parameter in parameters.values()}
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=kinds <= {"cpu", "cuda"},
    )
