"""Published wheels of packages that cannot be installed here: fetched by exact version, and read, never imported.

They stay in .contract/ (about 70 MB), which `make clean` removes and `make contract-wheels` fills.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Set
from functools import cache
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".contract"
PINS = {"torch-npu": "2.10.0.post4", "vllm-ascend": "0.23.0"}  # a pair, by vllm-ascend's own requirements
FETCH_SECONDS = 100.0
PLATFORM = [flag for glibc in ("2_28", "2_34") for flag in ("--platform", f"manylinux_{glibc}_aarch64")]


class NotToBeHad(Exception):
    """There is no network, or the index lacks the version."""


class Wheel:
    """What a wheel says about its modules."""

    def __init__(self, path: Path):
        self._zip = zipfile.ZipFile(path)
        self.names = self._zip.namelist()

    def bytes(self, name: str) -> bytes:
        return self._zip.read(name)

    @cache  # noqa: B019  a wheel lives as long as the tests
    def tree(self, module: str) -> ast.Module:
        """The parsed source of a module. Raises KeyError when the wheel has none of that name."""
        path = module.replace(".", "/")
        name = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.names), f"{path}.py")
        return ast.parse(self.bytes(name))

    def definition(self, module: str, name: str) -> ast.stmt | None:
        """The def or class that `module` has under `name`, found through its imports of the package's own modules.

        None when it is there, but not written in Python. Raises KeyError when it is not there.
        """
        for node in reversed(self.tree(module).body):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
                return None
            if not isinstance(node, ast.ImportFrom):
                continue
            source = _absolute(module, node)
            if taken := [alias for alias in node.names if (alias.asname or alias.name) == name]:
                return self.definition(source, taken[0].name) if self._has(source) else None
            if node.names[0].name == "*" and self._has(source) and name in self._exported(source):
                return self.definition(source, name)
        raise KeyError(f"{module}.{name}")

    def _exported(self, module: str) -> list[str]:
        """What `__all__` lists."""
        for node in self.tree(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return []

    def _has(self, module: str) -> bool:
        path = module.replace(".", "/")
        return f"{path}.py" in self.names or f"{path}/__init__.py" in self.names

    def anywhere(self, texts: Set[str]) -> set[str]:
        """Which of them a file, Python or compiled, contains."""
        found: set[str] = set()
        for ending in (".py", ".so"):
            for name in self.names:
                if name.endswith(ending) and found != texts:
                    content = self.bytes(name)
                    found |= {text for text in texts if text.encode() in content}
        return found


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a package's `from ... import` names."""
    base = module.split(".")[: len(module.split(".")) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def wheel(package: str) -> Wheel:
    """Raises NotToBeHad."""
    version = PINS[package]
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(CACHE.glob(pattern)):
        fetch(package, version)
    return Wheel(next(CACHE.glob(pattern)))


def fetch(package: str, version: str) -> None:
    CACHE.mkdir(exist_ok=True)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
    ]
    command = [*download, *PLATFORM, f"{package}=={version}", "--dest", str(CACHE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"{package}=={version}: not fetched within {FETCH_SECONDS:g} s") from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise NotToBeHad(f"{package}=={version}: {last[-1]}")


if __name__ == "__main__":
    for name in PINS:
        print(f"{name}=={PINS[name]}: {len(wheel(name).names)} files")
