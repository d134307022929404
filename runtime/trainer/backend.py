"""What a step asks of the model under training, wherever it lies: in `fsdp/` in one process, or spread over several by
FSDP2; in `megatron/` in any layout of megatron-core.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from runtime.config import Config, Optimizer, Spread, Trainer
from runtime.errors import UserError
from runtime.process import platform
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.rows import Routes

if TYPE_CHECKING:
    from runtime.trainer.statistics import Reduced, StepStatistics
    from runtime.weights.plan import TensorSpec
    from runtime.weights.shard_delta import Shard


T = TypeVar("T")

BatchOutputs = Callable[["MicroBatch", torch.Tensor], torch.Tensor]
"""A loss (a sum, of no dimension) or a number for each trained token ([N]), from what the model gives for a micro-batch."""


@dataclass(frozen=True)
class RankInfo:
    """This process's place in its service's group; `group` is another one of the same ranks."""

    rank: int
    world_size: int
    device: torch.device
    group: Any = None

    def largest(self, counts: list[int]) -> list[int]:
        """The elementwise maximum over ranks."""
        if self.world_size == 1:
            return counts
        tensor = torch.tensor(counts, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.tolist()

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of `part` over ranks, of its dtype and on its device."""
        if self.world_size == 1:
            return part
        # NPUs reduce nothing wider than float32.
        whole = part.to(self.device, torch.float32 if self.device.type == "npu" else torch.float64)
        dist.all_reduce(whole, group=self.group)
        return whole.to(part)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The rows of `part` [n, k] of all ranks, one rank's after the other's, on the host."""
        if self.world_size == 1:
            return part
        longest = self.largest([len(part)])[0]
        padded = torch.zeros(longest + 1, part.shape[1], dtype=part.dtype, device=self.device)
        padded[0, 0] = len(part)
        padded[1 : len(part) + 1] = part.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, self.group)
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

    def __init__(self, rank_info: RankInfo, vocab_size: int, shares: RankInfo, leads: bool = True):
        """`shares`: this rank's place among those that have a share of the data each."""
        self.rank_info, self.vocab_size = rank_info, vocab_size
        self._shares, self.share = shares, shares.rank
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

    routes: Routes | None = None
    """As of `Needs.experts`, where tokens are given to the experts that they took in the rollout."""

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        """What the newest forward pass, of `batch`, adds to the loss of each token of a row, [B, 1]; None for nothing."""
        return None

    _adapters: Any = None  # that were put into the model

    def adapters_off(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model computes what it did before adapters were put into it."""
        return self._adapters.off()  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------ gradients and updates

    def batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of `part` over all shares of the data, of its dtype and on its device."""
        return self._shares.summed(part)

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

    def needed(self, folder: Path) -> set[str]:
        """The files `*.distcp` that this rank reads of the checkpoint `folder`, which has the others already."""
        return set()

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


def wire_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype in which the policy is published. The default is what the trainer computes in: rollouts then have its
    numbers. Deltas have 16 bits."""
    publication = config.publication
    return platform.resolve_dtype(
        publication.dtype, device, "bfloat16" if publication.encoding == "delta" else config.model.dtype
    )
