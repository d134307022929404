"""SIMULATION of torch_npu.profiler: the folder that a profile leaves, with nothing in it that CANN would have recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[Any], None]:
    def handle(_: Any) -> None:
        folder = Path(dir_name or ".") / "host_1_ascend_pt"
        folder.mkdir(parents=True)
        (folder / "analysed").write_text(str(analyse_flag))

    return handle


class profile:
    def __init__(self, *, on_trace_ready: Callable[[Any], None] | None = None):
        self._ready = on_trace_ready

    def start(self) -> None:
        pass

    def stop(self) -> None:
        if self._ready is not None:
            self._ready(self)
