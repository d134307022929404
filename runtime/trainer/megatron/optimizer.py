"""megatron-core's distributed optimizer: gradients summed over the blocks, master weights and Adam's moments sharded.

With several blocks both collectives of an update run beside computation. The gradients of a bucket are summed as soon as the
backward pass of the update has made them: the caller of `passes` says which call is the update's last. The new weights are
gathered while the next forward pass begins, and each layer waits for its own. Other readers wait for all (`settle`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig

from runtime.config import Optimizer
from runtime.trainer.backend import StatePart
from runtime.trainer.megatron import facade

KINDS = ("master", "exp_avg", "exp_avg_sq")  # the optimizer's state of each weight: the weight in float32, and Adam's moments


class MegatronOptimizer:
    """A model's gradients, as sums over all passes since they were cleared, and the model's updates by AdamW."""

    def __init__(self, model: torch.nn.Module, options: Optimizer, dtype: torch.dtype, device: torch.device):
        """Take over the weights of `model`; those that are trained are in `dtype`. Biases and norms do not decay."""
        self._decay = options.weight_decay
        self.device = device
        self._blocks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._expert_blocks = parallel_state.get_expert_data_parallel_group()
        self._config: Any = model.config
        several = dist.get_world_size(self._blocks) > 1
        how = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=several,
            overlap_param_gather=several,
            align_param_gather=True,  # `step` begins all gathers
        )
        self.model, self._overlaps = DistributedDataParallel(self._config, how, model), how.overlap_grad_reduce
        if self._overlaps:
            self._await_head(model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=options.learning_rate,
            min_lr=0.0,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # the step clips
        )
        with facade.moving(device):
            self.optimizer = core.get_megatron_optimizer(settings, [self.model], **_no_decay(settings))
        # A checkpoint's moments are loaded into existing tensors.
        for part in self._parts():
            for master in part.get_parameters():
                zeros = {kind: torch.zeros_like(master, requires_grad=False) for kind in KINDS[1:]}
                part.optimizer.state[master] = zeros
        self.set_count(0)

    def clear(self) -> None:
        for buckets in self._buckets():
            if buckets.grad_reduce_handle is not None:  # of an abandoned update
                buckets.grad_reduce_handle.wait()
                buckets.grad_reduce_handle = None
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's part of the model; before `finish`, the sums over its block only."""
        return [parameter.main_grad for parameter in self.model.parameters() if parameter.requires_grad]

    def passes(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a run of megatron-core's schedules. `last`: the update's last run; `finish` comes next."""
        # The schedule enters it around all backward passes except the last one.
        self._config.no_sync_func = self.model.no_sync if last else None
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if last else self.model.no_sync()
        return context

    def settle(self) -> None:
        """Wait until this rank has all weights of the last step."""
        for buckets in self._buckets():
            if buckets.param_gather_handle is not None:
                buckets.finish_param_sync(skip_next_bucket_dispatch=True)

    def finish(self) -> float:
        """Sum the gradients over the blocks. Return the squared norm of the whole model's gradients; perhaps NaN."""
        if self._overlaps:
            self.settle()  # perhaps no pass has run since the last step
            for buckets in self._buckets():
                # If the last groups have no gradient, no backward pass has begun the reduction. The first backward pass never
                # begins one, except with version 0.12.
                if buckets.grad_reduce_handle is None and not getattr(buckets, "is_first_batch", False):
                    buckets.start_grad_sync()
        finalize_model_grads([self.model], None)
        self.optimizer.prepare_grads()
        total = torch.zeros((), dtype=torch.float32 if self.device.type == "npu" else torch.float64, device=self.device)
        for part in self._parts():
            for gradient in part.get_main_grads_for_grad_norm():
                total += torch.linalg.vector_norm(gradient).to(total).square()
        dist.all_reduce(total)
        return float(total)

    def step(self, scale: float, rate: float) -> None:
        """Update the weights by the gradients from `finish`, times `scale`."""
        parameters = [parameter for part in self._parts() for parameter in part.get_parameters()]
        torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._decay * group.get("wd_mult", 1.0)
        self.optimizer.step_with_ready_grads()
        if self._overlaps:
            self.model.start_param_sync()
        self.count += 1

    def _buckets(self) -> Iterator[Any]:
        """Yield the groups of buckets that are reduced, or gathered, together."""
        yield from self.model.bucket_groups
        yield from self.model.expert_parallel_bucket_groups

    def _await_head(self, model: Any) -> None:
        """Make the head's weights ready before the final norm: the head's module, which would wait for them, is not called."""
        head = getattr(getattr(model, "output_layer", None), "weight", None)
        if head is not None and head.requires_grad:
            buckets = self.model.param_to_bucket_group[head]
            model.decoder.final_layernorm.register_forward_pre_hook(
                lambda *_: buckets.finish_param_sync(skip_next_bucket_dispatch=True)
            )

    def _parts(self) -> Iterator[Any]:
        yield from getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    # ------------------------------------------------------------------------------------------ state

    def tensors(self, kind: str) -> Iterator[torch.Tensor]:
        """Yield the device's tensors of the kind "param", "grad" or "optimizer": the buffers that the parameters or their
        gradients are views of, the untrained parameters, or the optimizer's own tensors."""
        buffers = [*self.model.buffers, *self.model.expert_parallel_buffers]
        if kind == "param":
            yield from (buffer.param_data for buffer in buffers)
            yield from (each.detach() for each in self.model.parameters() if not each.requires_grad)
        elif kind == "grad":
            yield from (buffer.grad_data for buffer in buffers)
        else:
            weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
            for part in self._parts():
                for master in part.get_parameters():
                    if master.untyped_storage().data_ptr() not in weights:  # in float32 the master is the weight itself
                        yield master
                    yield from self._moments(part, master).values()

    def set_count(self, count: int) -> None:
        """Set the number of Adam's steps, `count`, as it is before the first step or in a checkpoint."""
        self.count = count
        for part in self._parts():
            for group in part.optimizer.param_groups:
                if isinstance(part.optimizer, torch.optim.AdamW):
                    for parameter in group["params"]:
                        part.optimizer.state[parameter]["step"] = torch.tensor(float(count))
                else:  # a fused optimizer counts by group
                    group["step"] = count

    def pieces(self, stage: str, expert: int) -> Iterator[StatePart]:
        """Yield this rank's part of masters and moments. `stage`: the place within a block; `expert`: the expert rank."""
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad and (held := self._held(parameter)) is not None:
                part = stage if getattr(parameter, "allreduce", True) else f"{stage}.{expert}"
                for kind, data in held[2].items():
                    yield StatePart(f"{part}/{kind}/{name}", held[0], data.view(-1))

    def restored(self, count: int) -> None:
        """Take over masters and moments, which the caller has overwritten, after `count` steps. Collective."""
        self.set_count(count)
        for part in self._parts():
            part._copy_main_params_to_model_params()
        self.model.start_param_sync()
        self.settle()

    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return by kind the whole state, float32 of the parameter's shape, from all blocks. Collective over its holders."""
        wholes = torch.zeros(len(KINDS), parameter.numel(), device=self.device)
        held = self._held(parameter)
        if held is not None:
            begin, end, parts = held
            for whole, kind in zip(wholes, KINDS, strict=True):
                whole[begin:end] = parts[kind]
        # megatron-core so marks parameters that other expert ranks do not hold.
        everywhere = getattr(parameter, "allreduce", True)
        dist.all_reduce(wholes, group=self._blocks if everywhere else self._expert_blocks)
        return {kind: whole.view(parameter.shape) for kind, whole in zip(KINDS, wholes, strict=True)}

    @torch.no_grad()
    def scatter(self, parameter: torch.nn.Parameter, wholes: Mapping[str, torch.Tensor]) -> None:
        """Restore this rank's part of the state that `gather` returned."""
        held = self._held(parameter)
        if held is not None:
            begin, end, parts = held
            for kind, part in parts.items():
                part.copy_(wholes[kind].flatten()[begin:end])

    def _held(self, parameter: torch.nn.Parameter) -> tuple[int, int, dict[str, torch.Tensor]] | None:
        """Return the range of elements of `parameter` that this rank updates, and their state by kind; None: no elements."""
        for part in self._parts():
            if parameter in part.model_param_group_index_map:
                group, order = part.model_param_group_index_map[parameter]
                master = part.optimizer.param_groups[group]["params"][order]
                where = part._get_model_param_range_map(parameter)["param"]
                return where.start, where.end, {"master": master.detach(), **self._moments(part, master)}
        return None

    @staticmethod
    def _moments(part: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
        return {kind: part.optimizer.state[master][kind] for kind in KINDS[1:]}


def _no_decay(settings: OptimizerConfig) -> dict[str, Any]:
    """Return the option for no decay of biases and norms, which newer versions need and older ones do without."""
    if "config_overrides" in inspect.signature(core.get_megatron_optimizer).parameters:
        return {"config_overrides": core.get_standard_config_overrides(settings)}
    return {}
