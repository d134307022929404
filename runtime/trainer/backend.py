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
import torch.nn.functional as F

from runtime.config import Config, Optimizer, Spread, Trainer
from runtime.errors import UserError
from runtime.models.families.memory import CHUNK_ELEMENTS
from runtime.models.passes import exact_on_cpu
from runtime.process import platform
from runtime.trainer.collectives import RankInfo
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.rows import Routes

if TYPE_CHECKING:
    from runtime.trainer.micro_batch import MicroBatch
    from runtime.trainer.statistics import Reduced, StepStatistics
    from runtime.weights.delta import Shard
    from runtime.weights.plan import TensorSpec


# ---- Head
#
# From what the head of a language model takes to numbers of tokens, in chunks of these: logits of all tokens at once are
# never in memory.

CPU_CHUNK_ELEMENTS = 1 << 24  # of one chunk on a CPU, which needs no large ones to be busy: 64 MiB
LEFT_OUT = -1e30  # a logit without probability: finite at any temperature, so that 0 times it is 0

PerToken = tuple[torch.Tensor, torch.Tensor]


def token_numbers(
    numbers: Callable[[torch.Tensor, torch.Tensor], PerToken],
    outputs: torch.Tensor,
    weight: torch.Tensor | None,
    width: int,
    batch: MicroBatch,
    start: int = 0,
) -> PerToken:
    """`numbers(logits, tokens)`, [N] each, of the trained tokens of `batch` and the logits that the head's `weight` [v, H]
    makes of `outputs` [N, H]. Without `weight` the outputs are the logits. These, whose first is that of token `start`, are
    `confined` to what each token was sampled from, and divided by a column "temperature" where there is one.

    `width`: the logits of a token, by which chunks are cut; of ranks that share a vocabulary the same. Where there are several
    chunks, each one's logits are computed again in the backward pass. Few tokens, or a small vocabulary, are one chunk, whose
    logits are kept.
    """
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
    """The gradient of the weight is added up in one buffer, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        weight: torch.Tensor | None,
        of_chunk: Callable[[torch.Tensor, slice], PerToken],
        size: int,
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
    """`logits` [N, v] of the vocabulary, or of its part from `start` on, with those of tokens that the sampler's filters left
    out so low that they have no probability, nor a gradient.

    `kept`: uint8 [N, bytes], a bit for each token of the vocabulary, the lowest of a byte first; None: all are there.
    """
    if kept is None:
        return logits
    width, first = logits.shape[1], start // 8
    bits = kept[:, first : -(-(start + width) // 8), None] >> torch.arange(8, dtype=torch.uint8, device=kept.device) & 1
    begin = start - 8 * first
    return logits.masked_fill(bits.flatten(1)[:, begin : begin + width] == 0, LEFT_OUT)


T = TypeVar("T")

BatchOutputs = Callable[["MicroBatch", torch.Tensor], torch.Tensor]
"""A loss (a sum, of no dimension) or a number for each trained token ([N]), from what the model gives for a micro-batch."""


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
