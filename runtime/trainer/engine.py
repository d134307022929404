"""What the trainer service asks of a training engine, on every rank of its group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from runtime.types import StepResult, TrainGroup, ValueRequest, Values

if TYPE_CHECKING:
    import torch

    from runtime.weights.plan import TensorSpec


class UpdateEngine(ABC):
    """Policy or critic under training. Calls come from one thread, in the same order on every rank; each may be a collective
    over the service's group.

    A step is `begin_step`, `accumulate` any number of times, `apply`. Gradients are sums, unnormalised, until `apply`
    divides them by what the aggregation counts over all accumulated groups of all ranks (tokens or rows), so that a
    step's result depends neither on sharding nor on how its groups were split over calls. Where advantages need the whole
    batch, or a step makes several updates, `accumulate` checks and holds the groups, and `apply` computes.
    """

    phases: dict[str, float] = {}  # noqa: RUF012 - of those that account for none
    """Seconds of the step's parts on this rank, by metric, until the next begins. They are within the result's `seconds`."""

    @abstractmethod
    def begin_step(self, step: int) -> None: ...

    @abstractmethod
    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        """Add the gradient of this rank's `groups` (perhaps none: the ranks still run the same collectives).

        `last`, the same on all ranks: nothing more is added before `apply`, so that what ranks sum up may begin now.
        """

    @abstractmethod
    def apply(self) -> StepResult:
        """The step's optimizer updates: one, or one a mini-batch and epoch."""

    @abstractmethod
    def begin_save(self, folder: str) -> Callable[[], None]:
        """Begin to write model, optimizer, schedule and RNG under `folder`, which exists and is empty. The caller makes it
        atomic.

        What it returns writes the rest, and returns when all ranks have. With `checkpoint.async_save` that may be in another
        thread, while the engine goes on: what is written was copied before.
        """

    def save(self, folder: str) -> None:
        self.begin_save(folder)()

    @abstractmethod
    def load(self, folder: str) -> None:
        """Restore what `save` wrote, bit for bit. Raises UserError when it does not fit the model."""

    @abstractmethod
    def offload(self) -> None:
        """Take what `offload_train_*` of its service name off the device, gradients included, which are 0 between steps. Until
        `onload` nothing is called but `values`."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back what `offload` took off, bit for bit."""


class TrainEngine(UpdateEngine):
    """The policy's."""

    @abstractmethod
    def compare(self, probes: Sequence[bytes]) -> list[float]:
        """Compare log-probabilities under the weights as they are with those that came with `probes`, encoded groups whose
        every token these weights are to have sampled. Between `begin_step` and `apply`, whose `mismatch/*` have them too.

        All ranks are given all probes. Returns on rank 0, for each, the mean |rollout's − trainer's| over its tokens, in nats;
        NaN where one is not a number. Raises InvalidMessage for what cannot be decoded, or does not fit the model.
        """

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

    @abstractmethod
    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""


class CriticEngine(UpdateEngine):
    """The value model's."""

    @abstractmethod
    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        """The values of this rank's `groups` (perhaps none), in their order, under the weights as they are.

        Raises InvalidMessage, computing nothing, for a payload that cannot be decoded, or token ids outside the vocabulary.
        """
