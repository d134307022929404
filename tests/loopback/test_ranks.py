"""The ranks of a group as real processes: where they meet, and how they end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from runtime.process import network, os_process
from sluice import start

DEADLINE = 60.0
# Meets the others, adds up what all have, and says where it listens.
MEETS = """
import os, sys
from datetime import timedelta
import psutil, torch
import torch.distributed as dist
from runtime.trainer.rank_group import _store
rank, world, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60)
store = _store(world, limit, "gloo")
store.add("there", 1)
listens = {one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
value = torch.tensor(float(rank + 1))
dist.all_reduce(value)
sys.stdout.write(f"rank {rank} {os.environ['LOCAL_RANK']} {value.item():g} {sorted(listens)}\\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""
# Says what it was given.
TELLS = """
import os, socket, sys
from runtime.process import os_process
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", os_process.STORE_KEY)
given = os.environ.get(os_process.STORE)
listens = socket.socket(fileno=int(given)).getsockname() if given else None
sys.stdout.write(f"{[os.environ[name] for name in names]} {listens}\\n")
"""
# Rank 1 does what its argument says; the other waits for ever.
ENDS = """
import os, sys, time
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
time.sleep(600)
"""


@contextmanager
def ranks(
    folder: Path, script: str, *arguments: str, here: str = "0,1", at: Sequence[str] = (), name: str = "rank.py"
) -> Iterator[subprocess.Popen[str]]:
    path = folder / name
    path.write_text(script)
    options = ("--group", "trainer-0", "--ranks", here, "--world", "2", *at, str(path), *arguments)
    command = start.command("launcher.node.ranks", *options)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)


@pytest.mark.ranks
def test_ranks_meet_on_loopback_alone(tmp_path: Path) -> None:
    with ranks(tmp_path, MEETS) as group:
        out, errors = group.communicate(timeout=DEADLINE)
    assert group.returncode == 0, errors
    assert sorted(out.splitlines()) == ["rank 0 0 3 ['127.0.0.1']", "rank 1 1 3 []"]


@pytest.mark.ranks
def test_an_address_that_a_stranger_planted_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_STORE_KEY", "5e" * 32)
    with network.listen("127.0.0.1", None, 1) as free:
        host, port = free.getsockname()[:2]
    at, waits = ("--at", network.host_port(host, port)), MEETS.replace('store.add("there", 1)', "sys.stdin.readline()")
    with ranks(tmp_path, MEETS, here="0", at=at) as first:
        stranger = dist.TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=DEADLINE), wait_for_workers=False)
        with ranks(tmp_path, waits, here="1", at=at, name="waits.py") as second:
            give_up = time.monotonic() + DEADLINE
            while len(left := [name for name in stranger.list_keys() if "init/" not in name]) < 2:  # a counter and an address
                assert time.monotonic() < give_up and first.poll() is None
            for name in left:
                stranger.set(name, b"planted")
            errors = second.communicate("go\n", timeout=DEADLINE)[1]
    assert second.returncode and re.search(r"RuntimeError|ForgedValue", errors)
    assert "0/0 in the group's store was written by a process that does not have the group's key" in errors
    assert "5e5e" not in errors


def test_ranks_of_two_nodes_are_given_one_address_at_which_rank_0_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with network.listen("127.0.0.1", None, 1) as free:
        host, port = free.getsockname()[:2]
    monkeypatch.setenv(os_process.STORE_KEY, "5e" * 32)
    for here, listens in (("1", None), ("0", (host, port))):
        with ranks(tmp_path, TELLS, here=here, at=("--at", network.host_port(host, port))) as group:
            told, errors = group.communicate(timeout=DEADLINE)
        assert told == f"{[here, '0', '2', '1', host, str(port), '5e' * 32]} {listens}\n", errors


@pytest.mark.parametrize(
    ("does", "code", "told"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit(7)", 7, ""),
        ("os.kill(os.getpid(), 9)", 1, "error: trainer-0: run: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_one_that_ends_takes_the_others_along_and_says_how(tmp_path: Path, does: str, code: int, told: str) -> None:
    with ranks(tmp_path, ENDS, does) as group:
        below = psutil.Process(group.pid).children()
        _, errors = group.communicate(timeout=DEADLINE)
        assert (group.returncode, errors) == (code, told)
        assert not psutil.wait_procs(below, DEADLINE)[1]


def test_who_starts_them_hands_on_the_wish_for_their_stacks_and_lives(tmp_path: Path) -> None:
    waits = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\nsys.stdout.write('here\\n')\n"
    with ranks(tmp_path, f"{waits}sys.stdout.flush()\nsignal.pause()", here="1", at=("--at", "127.0.0.1:1")) as group:
        assert group.stdout is not None
        assert group.stdout.readline() == "here\n"
        group.send_signal(signal.SIGUSR1)
        assert group.wait(DEADLINE) == 7  # its rank's


def test_they_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with ranks(tmp_path, "import sys, time\nsys.stdout.write('here\\n')\nsys.stdout.flush()\ntime.sleep(600)") as group:
        assert group.stdout is not None
        assert [group.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        below = psutil.Process(group.pid).children()
        group.terminate()  # which a scheduler sends to all: each rank answers it for itself
        assert group.poll() is None
        group.kill()
        assert len(below) == 2
        assert not psutil.wait_procs(below, DEADLINE)[1]
