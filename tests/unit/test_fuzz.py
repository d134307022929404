"""Broken files of every kind, the same each time; and that what breaks the rules is noticed (tests/fuzz)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import settings

from tests.fuzz.targets import TARGETS

DEADLINE = 100.0
OWN = "(folder / 'own').write_bytes(data)"  # which breaks no rule
BREAKS = (
    "os.system('true')",
    "pickle.loads(pickle.dumps(pathlib.Path))",
    "(folder.parent / 'beside').write_bytes(b'')",
    "os.remove(folder.parent / 'beside')",
    "raise ValueError(data)",
    "raise UserError('two\\n lines')",
    "bytearray(1 << 31)",
    "[... for _ in iter(int, 1)]",
)
PROGRAM = """
import os, pathlib, pickle, sys
from runtime.errors import UserError
from tests.fuzz import __main__ as fuzz

_, corpus, examples, *planted = sys.argv
sys.argv[1:] = [*fuzz.TARGETS, "--examples", examples]
print("all", fuzz.main())
fuzz.TIME = 0.2
for number, does in enumerate(planted):
    fuzz.CORPUS = pathlib.Path(corpus, str(number))
    fuzz.CORPUS.mkdir()
    exec(f"def read(data, folder): {does}")
    fuzz.TARGETS["yaml"].read = read
    sys.argv[1:] = ["yaml", "--examples", "1"]
    print(number, fuzz.main())
"""


def test_broken_files_end_well_and_what_breaks_the_rules_is_kept_and_told(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), str(settings().max_examples // 2), OWN, *BREAKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    assert "all 0" in told, done.stdout + done.stderr
    assert all(any(line.startswith(f"{name}: ") for line in told) for name in TARGETS)
    assert [line for line in told if line[0].isdecimal()] == ["0 0", *(f"{number} 1" for number in range(1, len(BREAKS) + 1))]
    assert [len(list((tmp_path / str(number)).rglob("yaml/*"))) for number in range(len(BREAKS) + 1)] == [0] + [1] * len(BREAKS)


def test_the_corpus_is_small() -> None:
    files = [path for path in (Path(__file__).parents[1] / "fuzz" / "corpus").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000
