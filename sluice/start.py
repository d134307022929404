"""Starts a module of Sluice as a process, whatever packages the working folder has: `python FILE MODULE [ARGUMENT ...]`.

`python -m MODULE` would look into the working folder first. A project that has a package called `services`, `runtime` or
`launcher` would then be taken for Sluice, and the process would end with "No module named services.trainer". Here Sluice's own
packages are imported first, and the working folder comes last on the path, for what the user's own files import.
"""

from __future__ import annotations

import os
import signal
import sys

PACKAGES = ("sluice", "runtime", "services", "launcher")
STOPPED = {
    **dict.fromkeys(("train", "quickstart", "sft"), "stopped before training began: there is nothing to save"),
    **dict.fromkeys(("eval", "play"), "stopped before the evaluation began"),
    "serve": "stopped before it served",
    "node": "stopped before this node took part",
}
"""The last line of each command that is stopped before its work has begun."""

RENDEZVOUS = "sluice"  # torchrun's --rdzv-backend under which an agent is started (`sluice.rendezvous`)


def command(module: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command line that runs `module` as a process. `python`: an interpreter that has what the module imports."""
    return (python, __file__, module, *arguments)


def end_early(line: str) -> None:
    """Let each signal that ends a command in order end this process at once, with `line` and exit code 0, until other handlers
    are set. If `line` is empty, only Ctrl-C does so, with exit code 130 and no traceback of an import."""

    def end(*_: object) -> None:
        try:
            os.write(1, f"{line}\n".encode() if line else b"")
        finally:  # also if no process reads it
            os._exit(0 if line else 130)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if line else (signal.SIGINT,):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def own_packages() -> None:
    """Import Sluice's packages from beside this one, whatever packages of these names the path has. Raises ImportError if
    another package of such a name has been imported already."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    root = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(root)])
        if spec is None or spec.loader is None:
            raise ImportError(f"Sluice's package {name!r} is not in {root}: install Sluice again")
        if (known := sys.modules.get(name)) is None:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        elif list(known.__path__) != spec.submodule_search_locations:
            taken = f"the package {name!r} of {list(known.__path__)} has the name of one of Sluice's"
            raise ImportError(f"{taken}: import sluice before it")


def _ours_first() -> None:
    """Move folders that have packages of these names, and are no installation of Sluice, to the end of the path. A process that
    multiprocessing spawns, such as vLLM's engine, gets the path but not the imports of this process."""
    from importlib.machinery import PathFinder
    from pathlib import Path

    def hides_ours(folder: str) -> bool:
        found = (PathFinder.find_spec(name, [folder]) for name in PACKAGES)
        return any(spec and spec.loader for spec in found) and not Path(folder, "sluice", "start.py").is_file()

    sys.path.sort(key=hides_ours)  # the sort keeps their order otherwise


def main() -> None:
    import runpy
    from contextlib import suppress
    from pathlib import Path

    own_packages()
    with suppress(FileNotFoundError):
        sys.path.append(str(Path.cwd()))  # for what the user's own files import
    _ours_first()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    here = __file__.rpartition("/")[0]
    sys.path[:] = [folder for folder in sys.path if folder != here]  # Python puts a script's folder first
    main()
