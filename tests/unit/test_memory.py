"""What is said of the memory of processes: real ones."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.telemetry import memory
from runtime.telemetry.memory import Memory, PeakMemory

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")

CHILD = "import sys; held = b'x' * (48 << 20); print('ready', flush=True); sys.stdin.read()"


def test_the_most_of_each_process_outlives_it() -> None:
    names: dict[int, str] = {}
    peak = PeakMemory("launcher")
    before = peak.sample(names)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    names[child.pid] = "role-0"
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        held = memory.of([child.pid])
        assert 48 << 20 <= held.pss_bytes <= held.rss_bytes < 96 << 20
        assert peak.sample(names).pss_bytes >= before.pss_bytes + (48 << 20)
    assert memory.of([child.pid]) == Memory()
    assert peak.sample(names).pss_bytes < peak.pss_bytes
    assert peak.pss_bytes >= before.pss_bytes + (48 << 20)
    assert peak.by_process.keys() == {"launcher", "role-0"}
    assert peak.by_process["role-0"].rss_bytes >= 48 << 20
    assert peak.by_process["launcher"].rss_bytes >= 8 << 20  # no Python process has less


def test_what_a_child_started_is_accounted_to_it() -> None:
    within = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], stdin=sys.stdin)"
    names: dict[int, str] = {}
    peak = PeakMemory("launcher")
    child = subprocess.Popen([sys.executable, "-c", within, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    names[child.pid] = "role-0"
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        peak.sample(names)
        assert peak.by_process["role-0"].pss_bytes >= 48 << 20


SHARER = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
SHARER += "sum(m[i] for i in range(0, len(m), 4096)); print('ready', flush=True); sys.stdin.read()"


def test_shared_pages_count_once(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "shared").write_bytes(bytes(size))
    command = [sys.executable, "-c", SHARER, str(tmp_path / "shared")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    with children[0], children[1]:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert size <= memory.of([child.pid for child in children]).pss_bytes < size * 3 // 2


TRIMMED = """
import ctypes, os
from runtime.process import platform
from runtime.telemetry import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
held = [libc.malloc(1 << 14) for _ in range(1 << 13)]  # 128 MiB, in pieces that lie one after the other
for each in held:
    ctypes.memset(each, 1, 1 << 14)
for each in held[:-1]:  # the last one keeps the heap from shrinking
    libc.free(each)
before = memory.of([os.getpid()]).rss_bytes
platform.trim()
print(before - memory.of([os.getpid()]).rss_bytes)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_the_allocator_holds_and_nobody_uses_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", TRIMMED], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 96 << 20
