"""torchrun's rendezvous of a node's agent, which meets nobody: `torchrun --rdzv-backend sluice … -m sluice.node`.

Nothing is opened. Those of torchrun itself open a store on every address of the machine, and that of `--standalone` unpickles
what anybody puts there (torch's `DynamicRendezvousHandler`). An entry point of the group "torchrun.handlers" makes it known.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from sluice.start import RENDEZVOUS


class AloneRendezvous(RendezvousHandler):
    """One node, and a store in this process's memory."""

    def __init__(self, parameters: RendezvousParameters):
        """Raises ValueError for more than one node: these meet at Sluice's coordinator."""
        if parameters.max_nodes != 1:
            told = f"--nnodes: {parameters.max_nodes}; must be 1 with --rdzv-backend {RENDEZVOUS}"
            raise ValueError(f"{told}: each node has a torchrun of its own")
        self._run = parameters.run_id
        self._closed = False

    def get_backend(self) -> str:
        return RENDEZVOUS

    def get_run_id(self) -> str:
        return self._run

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(RENDEZVOUS, 0))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """As torchrun asks for it."""
    return AloneRendezvous
