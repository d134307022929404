"""A model on megatron-core, and passes through it: micro-batches through the pipeline, and the last stage's results for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func

from runtime.config import Moe, Spread
from runtime.errors import UserError
from runtime.models import hf_folder
from runtime.models.forward import Packing, query_rows
from runtime.models.limits import uncut
from runtime.process.spans import at
from runtime.trainer.backend import BatchOutputs, PerToken, token_numbers
from runtime.trainer.megatron import facade
from runtime.trainer.megatron.experts import StageExperts
from runtime.trainer.megatron.grid import ProcessGrid
from runtime.trainer.megatron.model import PackedModel
from runtime.trainer.megatron.weights import ModelWeights, held_by
from runtime.trainer.micro_batch import ALL_ROUTED, MicroBatch, RoutedShare

# ---- Context parallelism: each rank of a group computes a part of each micro-batch's tokens.
# With C ranks the packed tokens are cut into 2C chunks. Rank c has chunks c and 2C - 1 - c: under the causal mask later tokens
# are more work, and so all ranks have about as much. Queries stay where they are; keys and values are gathered, in the order of
# ranks. A rank has the logits of the trained tokens that it predicts, and computes a number of each. These numbers are gathered
# before they are arranged by samples. Every rank then has the whole loss, and the gradient of its own tokens.


@dataclass(frozen=True)
class ContextShard(MicroBatch):
    """A rank's part of a micro-batch: its tokens, and its n `predictors` and `targets`. Other fields are of the whole."""

    chosen: torch.Tensor  # int64 [n], which of the N trained tokens this rank predicts
    group: dist.ProcessGroup

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N] values of all trained tokens, given `values` [n] of this rank's. Gradients reach only this rank's."""
        found = values.new_zeros(len(self.cells))
        found[self.chosen] = values.detach()
        dist.all_reduce(found, group=self.group)
        return found.index_copy(0, self.chosen, values)

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        return super().grid(self.whole(values))

    def of_tokens(self, name: str) -> torch.Tensor:
        return super().of_tokens(name)[self.chosen]


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Pad `batch` at the end with tokens that no token attends to, so that T is a multiple of `multiple`."""
    missing = -batch.input_ids.shape[1] % multiple
    if not missing:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, missing)),
        position_ids=F.pad(batch.position_ids, (0, missing)),
        packing=replace(batch.packing, cells=F.pad(batch.packing.cells, (0, missing)), in_order=False),
    )


def part_of(batch: MicroBatch, group: dist.ProcessGroup, multiple: int = 1) -> ContextShard:
    """Return this rank's part of `batch`, with a number of tokens that is a multiple of `multiple`."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    before = batch.input_ids.shape[1]
    batch = padded(batch, 2 * count * multiple)
    total, device = batch.input_ids.shape[1], batch.input_ids.device
    paths = np.concatenate([batch.paths, np.arange(before, total)])  # padding attends to itself
    sequences = np.concatenate([batch.sequences, [[len(batch.paths), 0, total - before]]])
    where = np.concatenate([tokens_of(each, count, total) for each in range(count)])
    own = tokens_of(rank, count, total)
    place = np.full(total, -1)  # index among this rank's tokens
    place[own] = np.arange(len(own))
    predictors = place[batch.predictors.cpu().numpy()]
    chosen = np.flatnonzero(predictors >= 0)

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    index = send(own)
    packing = packing_of(paths, sequences, own, np.argsort(where), device)
    changed = {
        "input_ids": batch.input_ids[:, index],
        "position_ids": batch.position_ids[:, index],
        "packing": packing,
        "predictors": send(predictors[chosen]),
        "targets": batch.targets[send(chosen)],
        "kept": None if batch.kept is None else batch.kept[send(chosen)],
    }
    known = {field.name: getattr(batch, field.name) for field in fields(MicroBatch)}
    return ContextShard(**known | changed, chosen=send(chosen), group=group)


def tokens_of(rank: int, count: int, total: int) -> np.ndarray:
    """Return the packed tokens of a rank, int64 [total / count], ascending; `total` is a multiple of 2 · `count`."""
    return np.arange(total).reshape(2 * count, -1)[[rank, 2 * count - 1 - rank]].ravel()


def packing_of(paths: np.ndarray, sequences: np.ndarray, own: np.ndarray, place: np.ndarray, device: torch.device) -> Packing:
    """Return how the tokens `own` attend; `paths` and `sequences` as in MicroBatch. `place`, int64 [T]: index of each packed
    token's key among the gathered keys."""
    asks = np.full(len(place), -1)
    asks[own] = np.arange(len(own))
    return query_rows(paths, _stretches(paths, sequences, own), asks, place, device, 1.0)


def _stretches(paths: np.ndarray, sequences: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the stretches of consecutive tokens of one sequence in one chunk, int64 [stretches, 3]: (start of the sequence in
    `paths`, tokens of the sequence before the stretch, tokens in the stretch)."""
    path, shared, tokens = sequences[sequences[:, 2] > 0].T
    begin = paths[path + shared]
    size, found = len(own) // 2, []
    for half in range(2):
        first = own[half * size]
        low, high = np.maximum(begin, first), np.minimum(begin + tokens, first + size)
        found.append(np.stack((path, shared + low - begin, high - low), 1)[low < high])
    return np.concatenate(found)


# ---- Vocab parallel
# Log-probability and entropy from logits whose vocabulary is sharded over the ranks of a group; no rank has a whole row.
# x are the logits of one token, divided by the temperature; m their maximum, Z = Σ exp(x − m), p = exp(x − m) / Z. Then
# log p_t = x_t − m − log Z, H = m + log Z − Σ p x, ∂ log p_t / ∂x_j = [j = t] − p_j, ∂H / ∂x_j = −p_j (log p_j + H).


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, group: dist.ProcessGroup, start: int, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `algorithms.losses.token_logprobs` from the logits [N, v] of the vocabulary's tokens `start` … `start + v - 1`.
    tokens int64 [N] -> log-probabilities [N], entropies [N], on every rank of `group`; half precision is computed in float32.
    Two collectives in the forward pass and none in the backward pass: the gradient is that of this rank's logits."""
    scaled = logits if logits.dtype.itemsize >= 4 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(scaled, tokens - start, group)
    logp, entropy = result
    return logp, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both numbers. `local`: the tokens, counted from this rank's first."""
        size = logits.shape[1]
        largest = logits.amax(1) if size else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        mine = (local >= 0) & (local < size)
        index = torch.where(mine, local, 0)[:, None]
        chosen = torch.where(mine, shifted.gather(1, index)[:, 0], 0.0) if size else torch.zeros_like(largest)
        weights = shifted.exp()
        sums = torch.stack([chosen, weights.sum(1), (weights * shifted).sum(1)])
        dist.all_reduce(sums, group=group)
        chosen, total, weighted = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(shifted.sub_(log_total[:, None]), index, mine, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of_logp, of_entropy = gradients
        logp, index, mine, entropy = ctx.saved_tensors
        out = logp.exp()
        out.mul_(-of_logp[:, None] - of_entropy[:, None] * (logp + entropy[:, None]))
        if logp.shape[1]:
            out.scatter_add_(1, index, torch.where(mine, of_logp, 0.0)[:, None])
        return out, None, None


class MegatronPasses:
    """A model on megatron-core, for training or inference. `facade.prepare` must have been called in this process."""

    def __init__(self, source: str, settings: Spread, compute: torch.dtype, grid: ProcessGrid, value_head: bool) -> None:
        """Load this rank's part of the folder `source`. Raises UserError for a wrong folder or layout."""
        family, shape = hf_folder.read_family(source, value_head), hf_folder.read_config(source)
        grid.layout.require(family.shape)
        if fault := uncut(family.tied, settings.parallel.pipeline, megatron.core.__version__):
            raise UserError(fault)
        with facade.moving(grid.device):
            made = PackedModel(shape, settings, compute, grid.layout.padded_vocab(family.shape), value_head)
        self.model = made.to(grid.device, compute)
        self.weights = ModelWeights(family, held_by(self.model), grid)
        self.weights.load(source)
        self.shape, self.family = shape, family
        self.grid = grid
        self._multiple = settings.parallel.tensor if settings.parallel.sequence else 1
        self.experts: StageExperts | None = None
        self.routed = ALL_ROUTED  # what this rank's routers see of a micro-batch
        self.passed: torch.nn.Module = self.model  # the module of the passes: the model, perhaps wrapped

    def watch_experts(self, moe: Moe, replays: bool) -> None:
        """Make the experts, if the model has any, do what `moe` says; with `replays` their routes are replayed."""
        if self.shape.experts is not None:
            self.experts = StageExperts(self.model.decoder.layers, self.shape.experts, moe, replays)
            self.routed = RoutedShare(self.experts.layers, self._routed_tokens)

    def _routed_tokens(self, packed: int) -> np.ndarray:
        """Do what `RoutedShare.tokens` says."""
        group, ranks = self.grid.context_group, self.grid.context_group.size()
        multiple = self._multiple * (2 * ranks if ranks > 1 else 1)
        total = packed + -packed % multiple
        own = tokens_of(dist.get_rank(group), ranks, total) if ranks > 1 else np.arange(total)
        if self._multiple > 1:  # sequence parallelism
            own = own.reshape(self._multiple, -1)[self.grid.tensor_rank]
        return np.where(own < packed, own, -1)

    def infer(self, batches: Iterable[MicroBatch], output: BatchOutputs) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Yield each of `batches` with its `output`, on every stage; no gradients."""
        held = list(batches)
        sizes = [len(batch.targets) for batch in held]

        def report(batch: MicroBatch, outputs: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            found = output(batch, outputs)
            return batch.whole(found) if isinstance(batch, ContextShard) else found

        with torch.no_grad():
            found = self.pipeline(held, report, forward_only=True, collect_non_loss_data=True)
        yield from zip(held, self.of_last_stage(found, sizes), strict=True)

    def pipeline(self, batches: list[MicroBatch], report: Any, counts: bool = False, **options: Any) -> list[torch.Tensor]:
        """Return the value of `report` for each of `batches` on the last stage; nothing on the others. `counts`: the passes are
        those of a loss, whose routing counts."""

        def step(waiting: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            with at("forward"):  # a span for each micro-batch, so that the run shows progress
                whole = next(waiting)
                batch, routing = self._share(whole), None
                if self.experts is not None:
                    own = self._routed_tokens(whole.input_ids.shape[1]) if counts else None
                    routing = self.experts.routing(whole, own)
                return model(batch, routing), partial(report, batch)

        if not batches:
            return []
        phase = "forward" if options["forward_only"] else "backward"
        with facade.moving(self.grid.device), at(phase, f"{len(batches)} micro-batches"):
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self.passed],
                num_microbatches=len(batches),
                seq_length=1,  # stages send each other the real length of each micro-batch
                micro_batch_size=1,
                **options,
            )
        return found

    def _share(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of `batch`."""
        if self.grid.context_group.size() > 1:
            return part_of(batch, self.grid.context_group, self._multiple)
        return padded(batch, self._multiple)

    def token_logprobs(
        self, outputs: torch.Tensor, batch: MicroBatch, temperature: float = 1.0, *, entropy_gradient: bool = False
    ) -> PerToken:
        """Do what `ModelBackend.token_logprobs` says. The chunks are the same on all ranks that share the vocabulary."""
        start, width = self.model.vocabulary_start, self.shape.vocab_size // self.grid.layout.tensor
        group = self.grid.tensor_group
        numbers = partial(token_logprobs, temperature=temperature, group=group, start=start, entropy_gradient=entropy_gradient)
        return token_numbers(numbers, outputs, self.model.head_weight(), width, batch, start)

    def of_last_stage(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the last stage's `parts`, float32 of these sizes, on every stage."""
        flat = torch.empty(sum(sizes), device=self.grid.device)
        if self.grid.last and sizes:
            torch.cat([part.detach().float() for part in parts], out=flat)
        return list(self.grid.of_last_stage(flat).split(list(sizes)))
