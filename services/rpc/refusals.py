"""What the log says of messages that are refused: little, however many a stranger sends."""

from __future__ import annotations

import logging
from urllib.parse import unquote

from runtime.process.counted_log import counted

log = logging.getLogger("sluice")


def tell(peer: str, why: str) -> None:
    """Log the first message of a host that is refused, the tenth, the hundredth and so on. `peer`: as gRPC names it,
    `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT`."""
    host = unquote(peer.rpartition(":")[0] or peer)
    if count := counted(host):
        log.warning("%s: %d refused so far: %s", host, count, why)


class OneLine(logging.Filter):
    """Of gRPC's log: no traceback of a message that is none, as health and reflection may be sent, and as few lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or getattr(record.exc_info[0], "__name__", "") != "DecodeError":
            return True
        record.exc_info = None
        return bool(counted(record.getMessage()))


logging.getLogger("grpc._cython.cygrpc").addFilter(OneLine())
