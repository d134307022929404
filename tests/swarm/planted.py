"""How many planted bugs the swarm finds, and after how many seeds: `python -m tests.swarm.planted [NAME …] [--seeds 2000]`.

Each bug (bugs.yaml) is one change of the product, made as the module is imported, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import yaml


class Bug(NamedTuple):
    kind: str
    module: str
    right: str
    wrong: str
    first: int = 0  # the seed from which a test looks for one that few seeds show


BUGS: dict[str, Bug] = {
    name: Bug(**fields) for name, fields in yaml.safe_load(Path(__file__).with_name("bugs.yaml").read_text()).items()
}


class _Planting(importlib.machinery.SourceFileLoader):
    bug: Bug

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        source = Path(self.path).read_text()
        assert source.count(self.bug.right) == 1, f"{fullname} does not have, once: {self.bug.right}"
        return compile(source.replace(self.bug.right, self.bug.wrong), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug):
        self._bug = bug

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):  # type: ignore[no-untyped-def]
        if fullname != self._bug.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _Planting(fullname, spec.origin)
        loader.bug = self._bug
        return importlib.util.spec_from_loader(fullname, loader)


def plant(name: str) -> None:
    """Before the module is imported."""
    assert BUGS[name].module not in sys.modules
    sys.meta_path.insert(0, _Finder(BUGS[name]))


def hunt(name: str, seeds: int, seconds: float, first: int = 0) -> str:
    """What the swarm says of it: "after N seeds: …", or that it found nothing."""
    code = (
        f"from tests.swarm import planted; planted.plant({name!r}); from tests.swarm import swarm; "
        f"print(swarm.hunt(range({first}, {first + seeds}), {seconds}))"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=seconds + 120)
    return (found.stdout.strip() or found.stderr.strip()).rpartition("\n")[2][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BUGS))
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0, help="of one bug, at most")
    options = parser.parse_args()
    print("| planted bug | found |\n| --- | --- |")
    for name in options.names:
        print(f"| {BUGS[name].kind} (`{name}`) | {hunt(name, options.seeds, options.seconds)} |", flush=True)


if __name__ == "__main__":
    main()
