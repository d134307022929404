"""The interface of a model under training, whether one process holds it, FSDP2 shards it (`fsdp/`), or a layout of
megatron-core does (`megatron/`)."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime import run_files
from runtime.config import Config, Optimizer, Trainer
from runtime.errors import UserError
from runtime.models.adapters import HostOffload
from runtime.models.families.memory import CHUNK_ELEMENTS
from runtime.models.forward import exact_on_cpu
from runtime.process import platform, spans
from runtime.trainer.micro_batch import ALL_ROUTED, Columns, MicroBatch, RoutedShare, empty_batch, pack, plan
from runtime.trainer.rows import Routes, Rows

if TYPE_CHECKING:
    from runtime.weights.group import Shard
    from runtime.weights.plan import Cut, TensorSpec

# ---- Ranks: a process's rank in its group, the same number of passes on every rank, and tensors that ranks share by rows.


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in its service's group. `group`: another process group of the same ranks; None: the default group."""

    rank: int
    world_size: int
    device: torch.device
    group: Any = None

    def largest(self, counts: list[int]) -> list[int]:
        """Return the elementwise maximum over ranks."""
        if self.world_size == 1:
            return counts
        tensor = torch.tensor(counts, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.tolist()

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part` over ranks, in its dtype and on its device."""
        if self.world_size == 1:
            return part
        # NPUs reduce nothing wider than float32.
        whole = part.to(self.device, torch.float32 if self.device.type == "npu" else torch.float64)
        dist.all_reduce(whole, group=self.group)
        return whole.to(part)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the rows of `part` [n, k] of all ranks, in the order of ranks, on the host."""
        if self.world_size == 1:
            return part
        longest = self.largest([len(part)])[0]
        padded = torch.zeros(longest + 1, part.shape[1], dtype=part.dtype, device=self.device)
        padded[0, 0] = len(part)
        padded[1 : len(part) + 1] = part.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, self.group)
        return torch.cat([each[1 : int(each[0, 0]) + 1] for each in parts]).cpu()


def micro_batches(
    rows: Rows,
    chosen: np.ndarray,
    columns: Columns,
    budget: int,
    rank_info: RankInfo,
    packs: bool = True,
    routed: RoutedShare = ALL_ROUTED,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of the rows `chosen` (bool [B]), each within `budget` tokens. `packs`, `routed`: as in ModelBackend.
    Every rank yields the same number of micro-batches, so that all ranks take part in the collectives of each."""
    made = plan(rows, np.flatnonzero(chosen), budget, packs)
    device = rank_info.device
    for index in range(rank_info.largest([len(made)])[0]):
        if index < len(made):
            yield pack(rows, made[index], columns, device, packs, routed)
        else:
            yield empty_batch(columns, device)


def full(tensor: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole parameter or moment on every rank. With `own`, return the whole tensor of the same shape that has `own`
    as this rank's rows. `full_tensor` is not used: its gather crashes over gloo on CUDA."""
    own = local(tensor) if own is None else own
    if not (ranks := holders(tensor)):
        return own
    if is_sharded(tensor):
        sharded: Any = tensor
        own = own.to(sharded.device_mesh.device_type)  # the group's device: with `cpu_offload` the shard is on the host
    padded = own.new_zeros(-(-tensor.shape[0] // len(ranks)), *tensor.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(len(ranks) * len(padded), *tensor.shape[1:])
    if len(ranks) == dist.get_world_size():
        dist.all_gather(list(whole.chunk(len(ranks))), padded)
    else:
        for rank, part in zip(ranks, whole.chunk(len(ranks)), strict=True):
            if rank == dist.get_rank():
                part.copy_(padded)
            dist.broadcast(part, rank)
    return whole[: tensor.shape[0]]


def wholes(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole of each of `tensors`, in order; one whole tensor at a time is in memory."""
    for name, tensor in tensors.items():
        yield name, full(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached[local_rows(tensor)] if holders(tensor) else detached


def local_rows(tensor: Any) -> slice:
    """Return the rows of the whole that `local(tensor)` holds: FSDP2 gives each rank `ceil(rows / ranks)`, the last fewer."""
    if not is_sharded(tensor):
        return slice(0, 0 if holders(tensor) else tensor.shape[0])
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size())
    begin = min(tensor.shape[0], mesh.get_local_rank() * share)
    return slice(begin, begin + local(tensor).shape[0])


def holders(tensor: Any) -> tuple[int, ...]:
    """Return the ranks that have `tensor` by rows, of each part the rank; () if every rank has the whole. A stand-in for a
    tensor whose rows are all on other ranks names these as its `holders`."""
    return tuple(tensor.device_mesh.mesh.tolist()) if is_sharded(tensor) else getattr(tensor, "holders", ())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing that class, which takes half a second."""
    return hasattr(tensor, "device_mesh")


# ---- Statistics
# Sums, extremes and histograms of an update, gathered over its micro-batches and ranks and read back once at its end.
# A bin spans a sixteenth of an octave: a quantile is at most 4.3 % (1 - 2^(-1/16)) below the exact one, and never above.


Number = torch.Tensor | float

BINS_PER_OCTAVE = 16
LOWEST, HIGHEST = -30, 8  # exponents of 2; smaller numbers count as 0, larger ones as 2^HIGHEST
BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 2
NAMED = 8  # samples named in a message about NaN or infinity


@dataclass(frozen=True)
class Reduced:
    """The result of `StepStatistics.reduce`; `+` joins those of several updates. `sums` by name: (total,), (total, count) of a
    mean, or the counts of a histogram's bins. A minimum is the maximum of negated numbers, and its name begins with "-"."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Reduced) -> Reduced:
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, numbers in other.sums.items():
            sums[name] = [a + b for a, b in zip(sums[name], numbers, strict=True)] if name in sums else numbers
        for name, value in other.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
        return Reduced(sums, maxima)

    def mean(self, name: str) -> tuple[float, float]:
        """Return the total and the count of a mean; 0 and 0 if nothing was counted."""
        total, count = self.sums.get(name, (0.0, 0.0))
        return (total, count) if count else (0.0, 0.0)

    def finite(self) -> Reduced:
        """Return the statistics without NaN and infinite ones."""
        return Reduced(
            {name: numbers for name, numbers in self.sums.items() if all(map(math.isfinite, numbers))},
            {name: value for name, value in self.maxima.items() if math.isfinite(value)},
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, without a mean or a quantile of nothing."""
        found = {name.removeprefix("-"): -value if name.startswith("-") else value for name, value in self.maxima.items()}
        for name, numbers in self.sums.items():
            if len(numbers) == 1:
                found[name] = numbers[0]
            elif len(numbers) == 2 and numbers[1]:
                found[name] = numbers[0] / numbers[1]
            elif len(numbers) == BINS and any(numbers):
                found[name] = quantile(numbers, 0.99)
        return found


class StepStatistics:
    """Add 0-dimensional tensors of the device, or floats. All ranks must add the same names, with any values."""

    def __init__(self, device: torch.device):
        self.device = device
        # Large steps have more tokens than float32 counts exactly; NPUs reduce nothing wider than float32.
        self.dtype = torch.float32 if device.type == "npu" else torch.float64
        self._sums: dict[str, list[Number]] = {}
        self._maxima: dict[str, Number] = {}

    def total(self, name: str, *numbers: Number) -> None:
        known = self._sums.get(name)
        self._sums[name] = list(numbers) if known is None else [a + b for a, b in zip(known, numbers, strict=True)]

    def mean(self, name: str, total: Number, count: Number) -> None:
        self.total(name, total, count)

    def maximum(self, name: str, value: Number) -> None:
        known = self._maxima.get(name, -torch.inf)
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            self._maxima[name] = torch.maximum(known, value)  # max() would wait for the device
        else:
            self._maxima[name] = max(known, value)

    def minimum(self, name: str, value: Number) -> None:
        self.maximum(f"-{name}", -value)

    def histogram(self, name: str, values: torch.Tensor, counted: torch.Tensor) -> None:
        """Add `values` >= 0 where `counted` is 1 to the histogram of the metric `name`_p99; tensors of one shape."""
        exponents = values.detach().float().nan_to_num(nan=torch.inf).log2()
        places = ((exponents - LOWEST) * BINS_PER_OCTAVE).floor().clamp(-1, BINS - 2).long() + 1
        bins = torch.zeros(BINS, dtype=self.dtype, device=values.device)
        self.total(f"{name}_p99", bins.index_add_(0, places.flatten(), counted.to(self.dtype).flatten()))

    def reduce(self, world_size: int, group: dist.ProcessGroup | None = None) -> Reduced:
        """Reduce over the ranks of `group` (None: all) with one synchronisation. An extreme without a value is left out."""
        parts = {name: self._vector(numbers) for name, numbers in self._sums.items()}
        sums, maxima = torch.cat([self._vector([]), *parts.values()]), self._vector(self._maxima.values())
        if world_size > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        numbers, extremes = iter(sums.tolist()), zip(self._maxima, maxima.tolist(), strict=True)
        return Reduced(
            {name: list(islice(numbers, len(part))) for name, part in parts.items()},
            {name: value for name, value in extremes if value != -torch.inf},
        )

    def _vector(self, numbers: Iterable[Number]) -> torch.Tensor:
        parts = [torch.as_tensor(number, dtype=self.dtype, device=self.device).flatten() for number in numbers]
        return torch.cat([torch.zeros(0, dtype=self.dtype, device=self.device), *parts])


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the lower edge of the bin with the number of rank ceil(`share` · n) of n. `counts` by bin, not all 0."""
    below = np.cumsum(counts)
    place = int(np.searchsorted(below, math.ceil(share * below[-1])))
    return 2.0 ** (LOWEST + (place - 1) / BINS_PER_OCTAVE) if place else 0.0


class NonFiniteReport:
    """The samples that made a loss or a gradient NaN or infinite, found by training on one micro-batch at a time. All ranks
    call alike. `RUN/nonfinite/ROLE-step-00000012.json` has `{"step": 12, "micro_batches": [[[GROUP, SAMPLE], ...], ...]}`."""

    def __init__(self, role: str, step: int, rank_info: RankInfo):
        self._role, self._step, self._rank_info = role, step, rank_info
        self._tried: list[np.ndarray] = []  # int64 [samples, (micro-batch, group, sample, whether it is named)] of this rank

    def add(self, rows: Rows, batch: MicroBatch, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Add one micro-batch of each rank, with its `loss` and this rank's shards of the gradients of this micro-batch alone.
        Gradients are sums over ranks: a gradient that is not finite while all losses are finite counts for every rank."""
        bad_loss = not torch.isfinite(loss)
        bad_gradient = not all(torch.isfinite(gradient).all() for gradient in gradients)
        any_loss, any_gradient = self._rank_info.largest([bad_loss, bad_gradient])
        named, chosen = bad_loss or (any_gradient and not any_loss), batch.samples
        columns = len(self._tried), rows.group_id[rows.group[chosen]], rows.sample[chosen], named
        self._tried.append(np.stack(np.broadcast_arrays(*columns), 1))

    def write(self, folder: Path) -> str:
        """Write the file in the run's `folder`, and return one line that names the samples."""
        own = torch.from_numpy(np.concatenate([np.zeros((0, 4), np.int64), *self._tried]))
        # Ranks that hold parts of one model name the same samples.
        tried = list(dict.fromkeys(map(tuple, self._rank_info.gathered(own).tolist())))
        # Finite one by one, but not together: all micro-batches are named.
        named = [each for each in tried if each[3]] or tried
        path = folder / run_files.NONFINITE / f"{self._role}-step-{self._step:08d}.json"
        if self._rank_info.rank == 0:
            batches = [[[group, sample] for _, group, sample, _ in rows] for _, rows in groupby(named, lambda each: each[0])]
            with spans.at(spans.DISK, str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"step": self._step, "micro_batches": batches}) + "\n", encoding="utf-8")
        samples = ", ".join(f"{group}:{sample}" for _, group, sample, _ in named[:NAMED])
        more = f" and {len(named) - NAMED} more" * (len(named) > NAMED)
        return f"the loss or its gradient is NaN or infinite in the micro-batch of samples {samples}{more} (see {path})"


# ---- Head: from its inputs to numbers of tokens, in chunks. The logits of all tokens are never in memory at once.

CPU_CHUNK_ELEMENTS = 1 << 24  # logits of one chunk on a CPU, which is busy with small chunks: 64 MiB
LEFT_OUT = -1e30  # logit of a token without probability: finite at any temperature, so that 0 times it is 0

PerToken = tuple[torch.Tensor, torch.Tensor]


def token_numbers(
    numbers: Callable[[torch.Tensor, torch.Tensor], PerToken],
    outputs: torch.Tensor,
    weight: torch.Tensor | None,
    width: int,
    batch: MicroBatch,
    start: int = 0,
) -> PerToken:
    """Return `numbers(logits, tokens)`, [N] each, of the trained tokens of `batch`. The head's `weight` [v, H] makes the logits
    from `outputs` [N, H]; without `weight` the outputs are the logits. The first logit is that of token `start`. Logits are
    `confined` to the tokens that sampling allowed, and divided by the column "temperature" if there is one. `width`: the number
    of logits of a token, by which chunks are cut; the same on ranks that share a vocabulary. The logits of a single chunk are
    kept; those of several chunks are computed again in the backward pass."""
    temperature = batch.of_tokens("temperature") if "temperature" in batch.columns else None

    def of_chunk(logits: torch.Tensor, own: slice) -> PerToken:
        scaled = logits if temperature is None else logits.float() / temperature[own, None]
        kept = None if batch.kept is None else batch.kept[own]
        return numbers(confined(scaled, kept, start), batch.targets[own])

    if weight is not None:
        outputs, weight = exact_on_cpu(outputs, weight)
    size = max(1, (CPU_CHUNK_ELEMENTS if outputs.device.type == "cpu" else CHUNK_ELEMENTS) // max(1, width))
    if len(outputs) <= size:
        return of_chunk(_logits(outputs, weight), slice(None))
    found: PerToken = _InChunks.apply(outputs, weight, of_chunk, size)
    return found


def _logits(outputs: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return outputs if weight is None else F.linear(outputs, weight)


class _InChunks(torch.autograd.Function):
    """Numbers of tokens, chunk by chunk. The gradient of the weight is summed in one float32 buffer."""

    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, weight: torch.Tensor | None, of_chunk: Callable[..., PerToken], size: int
    ) -> PerToken:
        ctx.save_for_backward(outputs, weight)
        ctx.asked = of_chunk, size
        found = [of_chunk(_logits(outputs[own], weight), own) for own in _chunks(outputs, size)]
        logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        of_chunk, size = ctx.asked
        of_outputs, of_weight = torch.empty_like(outputs), None
        for own in _chunks(outputs, size):
            logits = _logits(outputs[own], weight).detach().requires_grad_()
            with torch.enable_grad():
                found = of_chunk(logits, own)
            asked = [(each, gradient[own]) for each, gradient in zip(found, gradients, strict=True) if each.requires_grad]
            (of_logits,) = torch.autograd.grad([each for each, _ in asked], logits, [gradient for _, gradient in asked])
            del logits, found, asked
            of_outputs[own] = of_logits if weight is None else of_logits @ weight
            if ctx.needs_input_grad[1]:
                if of_weight is None:
                    of_weight = torch.zeros_like(weight, dtype=torch.float32)
                if weight.dtype == torch.float32:
                    of_weight.addmm_(of_logits.T, outputs[own])
                else:
                    of_weight += of_logits.T @ outputs[own]
        return of_outputs, of_weight if of_weight is None else of_weight.to(weight.dtype), None, None


def _chunks(outputs: torch.Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, len(outputs), size)]


def confined(logits: torch.Tensor, kept: torch.Tensor | None, start: int = 0) -> torch.Tensor:
    """Return `logits` [N, v], of the vocabulary's part from `start` on, with the tokens that the sampler's filters left out at
    LEFT_OUT. `kept`: uint8 [N, bytes], a bit for each token of the vocabulary, the lowest of a byte first; None: all."""
    if kept is None:
        return logits
    width, first = logits.shape[1], start // 8
    bits = kept[:, first : -(-(start + width) // 8), None] >> torch.arange(8, dtype=torch.uint8, device=kept.device) & 1
    begin = start - 8 * first
    return logits.masked_fill(bits.flatten(1)[:, begin : begin + width] == 0, LEFT_OUT)


T = TypeVar("T")

BatchOutputs = Callable[["MicroBatch", torch.Tensor], torch.Tensor]
"""Computes a loss (a sum, 0-dimensional) or a number for each trained token ([N]) from the model's outputs of a micro-batch."""


class TrainingPosition(NamedTuple):
    """Progress of training: the next step, and the KL term's coefficient; None if a checkpoint has no coefficient."""

    step: int
    kl_coefficient: float | None


class StatePart(NamedTuple):
    """A part of the training state. `start`: its first element within the whole of `name`, flat, which several ranks may have
    parts of. `data`: a view of the state in use, one-dimensional and contiguous."""

    name: str
    start: int
    data: torch.Tensor


class TrainedRole:
    """The configuration of the model that a role, trainer or critic, trains. `source`: the model's Hugging Face folder."""

    def __init__(self, config: Config, role: str):
        self.role, self.has_value_head = role, role == "critic"
        own = config.critic.path if self.has_value_head and config.critic is not None else ""
        self.source = own or config.model.path
        self.options: Optimizer = config.optimizer_of("critic" if self.has_value_head else "trainer")
        self.settings: Trainer = getattr(config.services, role)


ROW_WEIGHT = "row_weight"  # column [B, 1]: the derivative of the loss by a number that is added to all tokens of the row


class ModelBackend(ABC):
    """A model, its gradients and its optimizer. All ranks make the same calls in the same order: each may be a collective."""

    def __init__(self, rank_info: RankInfo, vocab_size: int, shares: RankInfo, leads: bool = True):
        """Set up the interface. `shares`: this rank's position among the ranks that each have a share of the data."""
        self.rank_info, self.vocab_size = rank_info, vocab_size
        self._shares, self.share = shares, shares.rank  # index of this rank's share of the data, from 0
        self.leads = leads  # whether this rank answers for its share, which other ranks may compute with it
        self.packs = True  # whether sequences run packed; otherwise each sequence is a row of its own

    def of_share(self, items: Sequence[T], kind: type[T]) -> Sequence[T]:
        """Return `items`, messages of this `kind` that the first rank of a share has, on all ranks of the share."""
        return items

    # ------------------------------------------------------------------------------------------ passes

    @abstractmethod
    def run(self, batches: Iterable[MicroBatch], loss: BatchOutputs, backward: bool, last: bool = False) -> list[torch.Tensor]:
        """Run forward passes, with `backward` also backward passes that add to the gradients; return each batch's loss, a sum.
        `last`: no gradient is added after these before `reduce`, so that ranks may begin to reduce."""

    @abstractmethod
    def infer(self, batches: Iterable[MicroBatch], output: BatchOutputs) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Yield each of `batches` with its `output` [N]; no gradients."""

    @abstractmethod
    def token_logprobs(
        self, outputs: torch.Tensor, batch: MicroBatch, temperature: float, *, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `algorithms.losses.token_logprobs` of the trained tokens of `batch`, [N] each. `outputs` are the model's for
        these tokens. The head makes logits from them, a chunk of tokens at a time."""

    routes: Routes | None = None  # as in `Needs.experts`, if tokens go to the experts that they took in the rollout

    routed: RoutedShare = ALL_ROUTED  # what this rank's routers see of a micro-batch

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        """Return what the last forward pass, of `batch`, adds to the loss of each token of a row, [B, 1]; None for nothing. A
        backend whose passes add it themselves weighs it by the column `ROW_WEIGHT`."""
        return None

    adapters: Any = None  # the adapters in the model; within `adapters.off()` it computes as if it had none

    # ------------------------------------------------------------------------------------------ gradients and updates

    def batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part` over all shares of the data, in its dtype and on its device."""
        return self._shares.summed(part)

    @abstractmethod
    def reduce(self, statistics: StepStatistics) -> tuple[Reduced, float]:
        """Return the update's statistics and the squared norm of the summed gradients (perhaps NaN), over all shares."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of the gradients."""

    @abstractmethod
    def clear_gradients(self) -> None: ...

    @abstractmethod
    def update(self, scale: float, rate: float) -> None:
        """Run one AdamW update with the gradients times `scale`, at the learning rate `rate`."""

    # ------------------------------------------------------------------------------------------ device and state

    on_host: Mapping[str, HostOffload]  # by kind, what `offload` takes off the device

    def offload(self) -> None:
        """Take what `offload` of its service names off the device. Until `onload`, only `ModelTrainer.values` is called."""
        for each in self.on_host.values():
            each.offload()
        platform.release(self.rank_info.device)

    def onload(self) -> None:
        """Move what `offload` took off back to the device, bit for bit."""
        for each in self.on_host.values():
            each.onload()

    @abstractmethod
    def begin_save(self, folder: Path, position: TrainingPosition) -> Callable[[], None]:
        """Do what `ModelTrainer.begin_save` says."""

    def needed(self, folder: Path) -> set[str]:
        """Return the files `*.distcp` of the checkpoint `folder` that this rank reads. All other files are there already."""
        return set()

    @abstractmethod
    def load(self, folder: Path) -> TrainingPosition:
        """Do what `ModelTrainer.load` says; return the progress of training."""

    @abstractmethod
    def pieces(self) -> list[StatePart]:
        """Return this rank's part of everything that updates change, besides `counters`. It is on its device."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return the numbers that updates change, by name."""

    @abstractmethod
    def restored(self, counters: Mapping[str, int]) -> None:
        """Take over `counters` and the content of `pieces`, which the caller has overwritten."""

    # ------------------------------------------------------------------------------------------ weight sync and export

    @abstractmethod
    def tensor_specs(self) -> list[TensorSpec]:
        """Return the specs of the policy's tensors under Hugging Face names. The same on all ranks."""

    @abstractmethod
    def cuts(self) -> list[Cut]:
        """Return the layout of each of `tensor_specs` over the ranks. The same on all ranks."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield all parts of the policy that this rank holds, as `cuts` has them, without empty ones. Matrices come first. The
        blocks have the dtype of the weights, and may share their memory. No rank waits for another."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward passes. Raises UserError for float16."""
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype: 'float16' cannot be trained (its gradients underflow); must be one of auto, float32, bfloat16"
        )
    return platform.resolve_dtype(config.model.dtype, device)


def wire_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of the policy in a weight sync: by default the trainer's compute dtype, and 16 bits for deltas."""
    otherwise = "bfloat16" if config.weight_sync.encoding == "delta" else config.model.dtype
    return platform.resolve_dtype(config.weight_sync.dtype, device, otherwise)
