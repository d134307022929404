"""torchrun's rendezvous of a node's agent, with no other node: `torchrun --rdzv-backend sluice … -m sluice.node`.

It opens nothing. torchrun's own kinds open a store on every address of the machine; that of `--standalone` unpickles what any
process puts there (torch's `DynamicRendezvousHandler`). The entry point is in the group "torchrun.handlers".
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from sluice.start import RENDEZVOUS


class AloneRendezvous(StaticTCPRendezvous):
    """One node, and a store in this process's memory."""

    use_agent_store = False

    def __init__(self, parameters: RendezvousParameters):
        """Take torchrun's parameters. Raises ValueError for more than one node: nodes meet at Sluice's coordinator."""
        if parameters.max_nodes != 1:
            fault = f"--nnodes: {parameters.max_nodes}; must be 1 with --rdzv-backend {RENDEZVOUS}"
            raise ValueError(f"{fault}: each node has a torchrun of its own")
        super().__init__(RENDEZVOUS, 0, 0, 1, parameters.run_id, 0)

    def get_backend(self) -> str:
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(RENDEZVOUS, 0))


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the class, as torchrun asks for it."""
    return AloneRendezvous
