"""What `test_process` has forked: it tells what it is, in a line of JSON, and ends as it is told.

`python -m tests.loopback.forked_program CODE`: with that exit code, or "wait": not by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil

from runtime.process import keys


def main() -> None:
    told = {
        "parent": os.getppid(),
        "session": os.getsid(0),
        "modules": [name for name in ("torch", "transformers") if name in sys.modules],
        "environment": {name: os.environ.get(name) for name in ("MINE", "OMP_NUM_THREADS", "NOT_MINE")},
        "secret": keys.SECRET.encode() in Path("/proc/self/environ").read_bytes(),
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0,
        "command": [word for word in psutil.Process().cmdline() if word],
        "input": sys.stdin.read(),
    }
    sys.stderr.write(json.dumps(told) + "\n")
    if sys.argv[1] == "wait":
        time.sleep(600)  # its parent ends it
    sys.exit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
