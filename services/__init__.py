"""The processes. Importing the package settles what gRPC has to know before it is imported itself."""

from __future__ import annotations

import os
import time

BEGAN = time.monotonic()  # the interpreter is up, and nothing is imported yet

# Whatever is forked here becomes another program at once. Without this gRPC stops its own threads around every fork, which
# now and then (in one start of a reward service in fourteen, with four workers) leaves calls under way without an answer.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Of every stranger's attempt to connect gRPC would write a line or more. What matters of it is told by `services.rpc`.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
