"""What the trainer computed for single tokens: their log-probabilities at the step's beginning, and their advantages.

Each rank appends what it had of a step, up to `mismatch.keep_tokens` tokens, to a file of its own in the run's folder. The file
is begun anew at half of the size that both parts may have, and the part before it stays: the newest steps are kept.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from runtime import codec, run_files
from runtime.process import progress

MOST_BYTES = 64 << 20  # of a rank's two parts
SUFFIX, OLDER = ".tokens", ".tokens.1"
_HEAD = struct.Struct("<II")  # step, bytes that follow

log = logging.getLogger("sluice")


class TrainedTokens(Struct):
    """N tokens of one step: token `position` of row `row` of group `group`, each int64 [N]; float32 [N] for the rest."""

    step: int
    group: np.ndarray
    row: np.ndarray
    position: np.ndarray
    logprob: np.ndarray
    advantage: np.ndarray


class TrainedTokenLog:
    """Of one rank."""

    def __init__(self, run: Path, name: str):
        self._path = run / run_files.TRAINED / f"{name}{SUFFIX}"
        self._broken, self._new = False, True

    def append(self, tokens: TrainedTokens) -> None:
        """A disk without room costs what is appended, and the rest of the run's."""
        if self._broken or not len(tokens.group):
            return
        body = codec.encode(tokens)
        with progress.at(progress.DISK, str(self._path)):
            self._write(tokens.step, body)

    def _write(self, step: int, body: bytes) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            if self._path.exists() and self._path.stat().st_size + len(body) > MOST_BYTES // 2:
                self._path.replace(self._path.with_suffix(OLDER))
            record = _HEAD.pack(step, len(body)) + body
            with self._path.open("ab", buffering=0) as file:
                at = file.tell()
                if self._new and (whole := _whole(self._path)) < at:  # a kill tore the last one
                    file.truncate(at := whole)
                self._new = False
                if file.write(record) < len(record):
                    file.truncate(at)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._broken = True
            log.warning("%s: no more log-probabilities of trained tokens are kept: %s", self._path, error)


def _whole(path: Path) -> int:
    """Bytes of the records that are whole."""
    whole, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            end = file.seek(_HEAD.unpack(head)[1], os.SEEK_CUR)
            if end > size:
                break
            whole = end
    return whole


def read(run: Path, step: int) -> Iterator[TrainedTokens]:
    """What all ranks have kept of `step`; of a step that was done again also what was computed before."""
    for path in sorted((run / run_files.TRAINED).glob(f"*{SUFFIX}*")):
        with run_files.regular(path, None).open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                found, length = _HEAD.unpack(head)
                if found != step:
                    file.seek(length, 1)
                elif len(body := file.read(length)) == length:
                    yield codec.decode(TrainedTokens, body)
