"""What a step asks of the model under training, wherever it lies: in `fsdp/` in one process, or spread over several by
FSDP2; in `megatron/` in any layout of megatron-core.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime.config import Config, Optimizer, Spread, Trainer
from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.models.hf_policy import Packing
from runtime.process import platform
from runtime.trainer.attention_rows import attention_rows, padded_rows
from runtime.trainer.prefix_tree import cut_trees, in_tree_order, tree_paths
from runtime.trainer.rows import Rows, cut_by_length, ramps, spans, starts

if TYPE_CHECKING:
    from runtime.trainer.statistics import Reduced, StepStatistics
    from runtime.weights.plan import TensorSpec
    from runtime.weights.shard_delta import Shard


T = TypeVar("T")

BatchOutputs = Callable[["MicroBatch", torch.Tensor], torch.Tensor]
"""A loss (a sum, of no dimension) or a number for each trained token ([N]), from what the model gives for a micro-batch."""


@dataclass(frozen=True)
class RankInfo:
    """This process's place in its service's group."""

    rank: int
    world_size: int
    device: torch.device

    def largest(self, counts: list[int]) -> list[int]:
        """The elementwise maximum over ranks."""
        if self.world_size == 1:
            return counts
        tensor = torch.tensor(counts, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The rows of `part` [n, k] of all ranks, one rank's after the other's, on the host."""
        if self.world_size == 1:
            return part
        longest = self.largest([len(part)])[0]
        padded = torch.zeros(longest + 1, part.shape[1], dtype=part.dtype, device=self.device)
        padded[0, 0] = len(part)
        padded[1 : len(part) + 1] = part.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([each[1 : int(each[0, 0]) + 1] for each in parts]).cpu()


@dataclass(frozen=True)
class TrainingPosition:
    """How far training is: the step that comes next, and the KL term's coefficient, None where a checkpoint has none."""

    step: int
    kl_coefficient: float | None


@dataclass(frozen=True)
class TrainedRole:
    """What the configuration says of the model that a role trains."""

    role: str  # "trainer" or "critic"
    source: str  # the Hugging Face folder that the model comes from
    options: Optimizer
    settings: Trainer

    @classmethod
    def of(cls, config: Config, role: str) -> TrainedRole:
        if role == "trainer":
            return cls(role, config.model.path, config.training.optimizer, config.services.trainer)
        assert config.critic is not None
        return cls(role, config.critic.path or config.model.path, config.critic.optimizer, config.services.critic)

    @property
    def has_value_head(self) -> bool:
        return self.role == "critic"

    @property
    def optimizer_key(self) -> str:
        """Where `options` are from."""
        return "critic.optimizer" if self.has_value_head else "training.optimizer"


class ModelBackend(ABC):
    """A model, its gradients and its optimizer. All ranks make the same calls in the same order: each may be a collective."""

    def __init__(self, rank_info: RankInfo, vocab_size: int, share: int, leads: bool = True):
        self.rank_info, self.vocab_size = rank_info, vocab_size
        self.share = share
        """Which share of the data is this rank's, from 0."""
        self.leads = leads
        """Whether this rank answers for its share, which others may compute with it."""
        self.packs = True
        """Whether sequences run packed; otherwise each is a row of its own."""

    def of_share(self, items: Sequence[T], kind: type[T]) -> Sequence[T]:
        """`items`, messages of this `kind` that the first rank of a share was given, on all of its ranks."""
        return items

    # ------------------------------------------------------------------------------------------ passes

    @abstractmethod
    def run(self, batches: Iterable[MicroBatch], loss: BatchOutputs, backward: bool, last: bool = False) -> list[torch.Tensor]:
        """Forward passes, and with `backward` those that add to the gradients; the losses, a sum for each of `batches`.

        `last`: nothing more is added before `reduce`, so that what ranks sum up may begin now.
        """

    @abstractmethod
    def infer(self, batches: Iterable[MicroBatch], output: BatchOutputs) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Each of `batches` with its `output` [N]; no gradients."""

    @abstractmethod
    def token_logprobs(
        self, outputs: torch.Tensor, batch: MicroBatch, temperature: float, *, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`algorithms.losses.token_logprobs` of the trained tokens of `batch`, [N] each, from what the model gives for them:
        `outputs`, of which the head makes logits, a chunk of tokens at a time."""

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model computes what it did before adapters were put into it."""
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------ gradients and updates

    @abstractmethod
    def batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of `part` over all shares of the data, of its dtype and on its device."""

    @abstractmethod
    def reduce(self, statistics: StepStatistics) -> tuple[Reduced, float]:
        """The update's statistics over all shares of the data, and the squared norm of the summed gradients (perhaps NaN)."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of the gradients."""

    @abstractmethod
    def clear_gradients(self) -> None: ...

    @abstractmethod
    def update(self, scale: float, rate: float) -> None:
        """One update by AdamW, of the gradients times `scale`, at the learning rate `rate`."""

    # ------------------------------------------------------------------------------------------ its device and its state

    @abstractmethod
    def offload(self) -> None:
        """Take what `offload_train_*` of its service name off the device, gradients included, which are 0 between steps."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back what `offload` took off, bit for bit."""

    @abstractmethod
    def begin_save(self, folder: Path, position: TrainingPosition) -> Callable[[], None]:
        """As `ModelTrainer.begin_save`."""

    @abstractmethod
    def load(self, folder: Path) -> TrainingPosition:
        """As `ModelTrainer.load`; returns how far training was."""

    # ------------------------------------------------------------------------------------------ the policy, as it leaves

    @abstractmethod
    def tensor_specs(self) -> list[TensorSpec]:
        """The policy's tensors in Hugging Face names, in the order in which `gather` gives them."""

    @abstractmethod
    def holders(self) -> list[tuple[int, ...]]:
        """For each of `tensor_specs`, the ranks that can be its target: those among which it is put together anyway."""

    @abstractmethod
    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        """The policy's tensors, whole, one at a time: each is to be copied before the next is asked for.

        `targets`: for each of `tensor_specs`, the rank that is given it, rank 0 or one of its `holders`; () for rank 0. The
        same on all ranks, each of which exhausts its iterator: in it they send each other what the targets lack.
        """

    def shards(self, targets: Sequence[int]) -> Iterator[Shard] | None:
        """This rank's own parts of the policy, in the dtype in which it leaves; all ranks' together are each tensor once.

        None where the policy is not what ranks hold. `targets`: as of `gather`; what several ranks hold comes from near them.
        """
        return None

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""


def load_backend(config: Config, role: str, rank_info: RankInfo) -> ModelBackend:
    """Load the model that `role` trains, on the engine that its service names. Raises UserError for what configuration or
    folder get wrong, or when the engine's package is missing."""
    trained = TrainedRole.of(config, role)
    if use_megatron(trained.settings, rank_info.device):
        from runtime.trainer.megatron.backend import MegatronBackend

        return MegatronBackend(config, trained, rank_info)
    from runtime.trainer.fsdp.backend import FsdpBackend

    return FsdpBackend(config, trained, rank_info)


def use_megatron(settings: Spread, device: torch.device) -> bool:
    """Whether the engine is on megatron-core, which is then ready to be imported. Raises UserError when it is missing."""
    if settings.engine != "megatron":
        return False
    from runtime.trainer.megatron import facade

    facade.prepare(device)
    return True


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What forward and backward passes compute in."""
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype: 'float16' cannot be trained (its gradients underflow); must be one of auto, float32, bfloat16"
        )
    return platform.resolve_dtype(config.model.dtype, device)


def wire_dtype(config: Config) -> torch.dtype:
    """What the policy is published and exported in."""
    for name in (config.publication.dtype, config.model.dtype):
        if name != "auto":
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return hf_policy.declared_dtype(config.model.path)


# ----------------------------------------------------------------------------------------------------------------------
# One forward pass's worth of rows, packed: from the host to tensors on the device, in one copy.
#
# B rows, R reply tokens of the longest, T packed tokens, N trained ones.


Columns = Mapping[str, np.ndarray]
"""What an objective computes on, by name: per reply token (flat, as in Rows), or per row ([B, R] or [B, 1])."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, and what the objective computes on: `columns`, by name."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    packing: Packing
    predictors: torch.Tensor  # int64 [N], packed index of the token whose logits give the trained one
    targets: torch.Tensor  # int64 [N]
    cells: torch.Tensor  # int64 [N], where the trained token lies in the flattened grid
    mask: torch.Tensor  # float32 [B, R]
    kept: torch.Tensor | None  # uint8 [N, bytes], what the tokens were sampled from, as of `confined`; None: all
    columns: Mapping[str, torch.Tensor]  # float32 [B, R] or [B, 1]
    samples: np.ndarray  # int64 [B], which of the rows; on the host
    places: np.ndarray  # int64 [N], where the trained token lies in the flat arrays; on the host
    paths: np.ndarray  # int64 flat: the packed tokens of each row from its first on; on the host
    sequences: np.ndarray  # int64 [B, (where it begins in `paths`, its tokens that a row before has, too, and those that are
    # its own, which are packed one behind the other)]; on the host
    padding: int  # cells of the attention rows that hold no token
    attended: int  # all cells of the attention rows

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N] of the trained tokens as [B, R], 0 elsewhere."""
        return values.new_zeros(self.mask.numel()).index_copy(0, self.cells, values).view(self.mask.shape)


def micro_batches(
    rows: Rows, chosen: np.ndarray, columns: Columns, budget: int, rank_info: RankInfo, packs: bool = True
) -> Iterator[MicroBatch]:
    """The rows `chosen` (bool [B]), each micro-batch within `budget` tokens. `packs`: as of ModelBackend.

    As many on every rank, so that all take part in the collectives of each.
    """
    made = plan(rows, np.flatnonzero(chosen), budget, packs)
    device = rank_info.device
    for index in range(rank_info.largest([len(made)])[0]):
        yield pack(rows, made[index], columns, device, packs) if index < len(made) else empty_batch(columns, device)


def plan(rows: Rows, chosen: np.ndarray, budget: int, packs: bool = True) -> list[np.ndarray]:
    """Cut the rows `chosen` into micro-batches within `budget` tokens, of which those that rows share count once; where they
    are not packed, every cell of theirs counts, padding as well."""
    if not packs:
        lengths = rows.prompt_length[rows.group[chosen]] + rows.length[chosen] - 1
        return [chosen[indices] for indices in cut_by_length(lengths.tolist(), budget)]
    order, lengths, shared = in_tree_order(rows, chosen)
    return [order[indices] for indices in cut_trees(lengths.tolist(), shared.tolist(), budget)]


def pack(rows: Rows, chosen: np.ndarray, columns: Columns, device: torch.device, packs: bool = True) -> MicroBatch:
    """Pack the rows `chosen`, each with a reply of at least one token; `columns` are of all rows.

    The last token of a reply predicts nothing and is left out; what rows share is there once. Where a prompt is empty, no
    reply's first token is trained.
    """
    chosen, lengths, shared = in_tree_order(rows, chosen)
    paths, begins = tree_paths(lengths, shared), starts(lengths)
    group, fed = rows.group[chosen], rows.length[chosen] - 1
    prompt = rows.prompt_length[group]
    whole = np.empty(len(paths), np.int64)  # the tokens of `paths`
    whole[spans(begins, prompt)] = rows.prompts[spans(rows.prompt_start[group], prompt)]
    whole[spans(begins + prompt, fed)] = rows.tokens[spans(rows.start[chosen], fed)]
    own = ramps(lengths) >= np.repeat(shared, lengths)

    where = spans(rows.start[chosen], rows.length[chosen])
    kept = rows.mask[where]
    row = np.repeat(np.arange(len(chosen)), rows.length[chosen])[kept]
    offset = ramps(rows.length[chosen])[kept]
    mask = rows.grid(rows.mask, chosen)
    width = mask.shape[1]

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def column(array: np.ndarray) -> torch.Tensor:
        return send(rows.grid(array, chosen) if array.ndim == 1 else array[chosen, :width].astype(np.float32))

    sequences = np.stack([begins, shared, lengths - shared], 1)
    packing = (attention_rows if packs else padded_rows)(paths, sequences, device)
    attended = sum(part.numel() for part in packing.rows)
    return MicroBatch(
        input_ids=send(whole[own][None]),
        position_ids=send(ramps(lengths)[own][None]),
        packing=packing,
        predictors=send(paths[(begins + prompt)[row] + offset - 1]),
        targets=send(rows.tokens[where][kept].astype(np.int64)),
        cells=send(row * width + offset),
        mask=send(mask),
        kept=None if rows.kept is None else send(rows.kept.bitmaps(where[kept])),
        columns={name: column(array) for name, array in columns.items()},
        samples=chosen,
        places=where[kept],
        paths=paths,
        sequences=sequences,
        padding=attended - int(lengths[lengths > shared].sum()),
        attended=attended,
    )


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """With tokens added at the end that nothing looks at, so that T is a multiple of `multiple`."""
    missing = -batch.input_ids.shape[1] % multiple
    if not missing:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, missing)),
        position_ids=F.pad(batch.position_ids, (0, missing)),
        packing=replace(batch.packing, cells=F.pad(batch.packing.cells, (0, missing))),
    )


def empty_batch(names: Iterable[str], device: torch.device) -> MicroBatch:
    """A micro-batch of one token that is not trained, for ranks that have fewer than others but share their collectives."""
    zero, none = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 1, device=device)
    return MicroBatch(
        input_ids=zero[None],
        position_ids=zero[None],
        packing=Packing(rows=[zero[None]], cells=zero),
        predictors=zero,
        targets=zero,
        cells=zero,
        mask=none,
        kept=None,
        columns=dict.fromkeys(names, none),
        samples=np.zeros(0, np.int64),
        places=np.zeros(0, np.int64),
        paths=np.zeros(1, np.int64),
        sequences=np.array([[0, 0, 1]]),
        padding=0,
        attended=0,
    )
