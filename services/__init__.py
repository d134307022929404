"""The processes of a run. Importing the package sets what gRPC reads from the environment when it is imported."""

from __future__ import annotations

import os
import time

BEGAN = time.monotonic()  # the interpreter is up, and nothing is imported yet

# A forked child here runs another program at once. Without this setting gRPC stops its threads around each fork. In one start
# of fourteen, a reward service with four workers then left calls without an answer.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC would write a line or more for each connection attempt from outside. `services.rpc` logs what matters of these.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
