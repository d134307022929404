"""A process as the coordinator sees it, whatever its role."""

from __future__ import annotations

from runtime.config import Deadlines, Publication
from runtime.status import Status
from services.rpc.session import Session


class Peer:
    """A process of some role, behind one session."""

    def __init__(self, session: Session, deadlines: Deadlines, publication: Publication):
        self.session = session
        self.name = session.name
        self.machine = session.machine
        self._deadlines = deadlines
        self._publication = publication

    async def status(self) -> Status:
        return await self.session.unary("Process", "Status")
