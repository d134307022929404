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
    **dict.fromkeys(("train", "quickstart", "tune"), "stopped before training began: there is nothing to save"),
    **dict.fromkeys(("eval", "play"), "stopped before the evaluation began"),
    "serve": "stopped before it served",
    "node": "stopped before this node took part",
}
"""What the commands that end in order say where they are told to before they have begun."""

RENDEZVOUS = "sluice"  # torchrun's --rdzv-backend under which an agent is started (`sluice.rendezvous`)


def command(module: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command line that runs `module` as a process: `python` is an interpreter that has what the module imports."""
    return (python, __file__, module, *arguments)


def end_early(told: str) -> None:
    """Let each signal that ends a command in order end this process at once, with the line `told` and exit code 0, until other
    handlers are there. Where `told` is empty, Ctrl-C ends it with 130, and no traceback of an import."""

    def end(*_: object) -> None:
        try:
            os.write(1, f"{told}\n".encode() if told else b"")
        finally:  # also where nobody reads it
            os._exit(0 if told else 130)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if told else (signal.SIGINT,):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def own_packages() -> None:
    """Import Sluice's packages from beside this one, wherever else on the path there are others of these names.

    Raises ImportError when another package of such a name has been imported already.
    """
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
            raise ImportError(
                f"the package {name!r} of {list(known.__path__)} has the name of one of Sluice's: import sluice before it"
            )


def _ours_first() -> None:
    """Folders on the path that have a package of such a name, and are no installation of Sluice, come last: what this process
    spawns by multiprocessing (as vLLM its engine) gets the path, and nothing that is imported here."""
    from importlib.machinery import PathFinder
    from pathlib import Path

    def hides_ours(folder: str) -> bool:
        found = (PathFinder.find_spec(name, [folder]) for name in PACKAGES)
        return any(spec and spec.loader for spec in found) and not Path(folder, "sluice", "start.py").is_file()

    sys.path.sort(key=hides_ours)  # which keeps their order otherwise


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
