"""The page beside a run: `python -m launcher.page FOLDER HOST PORT`, which ends with the process that started it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from launcher.cli import run_and_report
from launcher.page.server import serve
from runtime.process import os_process
from runtime.process.os_process import ended_as_by_ctrl_c


def main() -> None:
    os_process.die_with_parent(os.getppid())
    folder, host, port = sys.argv[1:]
    with ended_as_by_ctrl_c():
        asyncio.run(serve(Path(folder), host, int(port), lambda address: print(address, flush=True)))


if __name__ == "__main__":
    sys.exit(run_and_report(main))
