"""The console command `sluice`. Heavy modules are imported only once the command is known."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from launcher.commands import options as of_command
from runtime.errors import SluiceError, UserError
from runtime.process.os_process import CommandParser

T = TypeVar("T")

EXIT_CODES = """exit codes:
  0    done; or stopped in order by Ctrl-C, SIGTERM or a lost terminal, with its state saved
  1    a fault, which the last line names; of accept: a check has failed
  2    a mistake in the command, the configuration or a file that it names, or a full disk; each fault is a line
  130  stopped at once, by a second Ctrl-C or because stopping in order took too long"""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib.metadata import version

        print("sluice", version("sluice-rl"))
        parser.exit()


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sluice",
        description="Post-train language models by asynchronous RL, without Ray.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    of_command.add_running(commands)
    commands.add_parser("schema", help="print the configuration's JSON Schema")
    of_command.add_render(commands.add_parser("render", help="write the files that start a run on several machines"))

    of_command.add_looking(commands)
    of_command.add_files(commands)
    of_command.add_measuring(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with one of EXIT_CODES."""
    outlive_readers()
    parser = _parser()
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["tune"]:
        parser.error("tune: no longer a command: write sft")
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no more positional arguments behind an option.
    if not hasattr(options, "overrides") or any(each.startswith("-") or "=" not in each for each in rest):
        parser.parse_args(arguments)  # exits, and says what is wrong
    else:
        options.overrides += rest
    sys.exit(run_and_report(lambda: _run(options), options.command in _SHOWING))


def run_and_report(work: Callable[[], int | None], shows: bool = False) -> int:
    """Run `work` and return its exit code, None for 0, or that of its error, which is printed. SIGUSR1 writes the stacks, as in
    every process of a run. Work that only `shows` something ends with its reader."""
    with suppress(OSError, RuntimeError):  # a stderr that is no file
        faulthandler.register(signal.SIGUSR1)
    outlive_readers(shows)
    try:
        return work() or 0
    except UserError as error:
        return _failed(2, *str(error).splitlines())
    except SluiceError as error:
        return _failed(1, str(error))
    except KeyboardInterrupt:
        return 130


def _failed(code: int, *lines: str) -> int:
    from runtime.telemetry.shown import shown

    for line in lines:
        print(shown(f"error: {line}"), file=sys.stderr)
    return code


class _OutputStream:
    """A standard stream of this process. Discards output without a reader; a lost terminal also gives SIGHUP."""

    def __init__(self, stream: Any):
        self._stream, self._terminal = stream, stream.isatty()
        self.ends = False  # whether the process ends when its reader does

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text), len(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush, None)

    def _unless_lost(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except OSError as error:
            hung_up = error.errno == errno.EIO and self._terminal
            if error.errno != errno.EPIPE and not hung_up:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if hung_up:
                os.kill(os.getpid(), signal.SIGHUP)
            elif self.ends:
                sys.exit(0)
            return otherwise


def outlive_readers(ends: bool = False) -> None:
    """Let no failed write to a standard stream raise an error. Characters outside its encoding are replaced, and a lost
    terminal ends the process in order. After the end of its reader the process goes on; with `ends`, it ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115 - None: closed at the start
        if not isinstance(stream, _OutputStream):
            if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
                stream.reconfigure(errors="replace")
            stream = _OutputStream(stream)
            setattr(sys, name, stream)
        stream.ends = ends


def bench(options: argparse.Namespace) -> None:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "command.py").is_file():
        raise UserError(f"bench {options.name}: the benchmarks are not installed; take `sluice` from a clone of the source")
    sys.path.append(str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))  # for children
    from benchmarks import command

    given = {field: getattr(options, field) for field in command.Options.__struct_fields__}
    command.run(options.name, command.Options(**given))


def _run(options: argparse.Namespace) -> int | None:
    module, _, name = _MODULES.get(options.command, f"commands.{options.command}").partition(":")
    code: int | None = getattr(importlib.import_module(f"launcher.{module}"), name or "run")(options)
    return code


_MODULES = {  # of the commands that have no module of their name in launcher.commands, and the function if it is not run
    "accept": "accept.checks",
    "bench": "cli:bench",
    "check-template": "commands.check_template",
    "data": "commands.prepare",
    "eval": "commands.evaluate",
    "import-mindspeed": "commands.importing",
    "import-verl": "commands.importing",
    "page": "page.server",
    "play": "commands.evaluate:run_play",
    "profile": "commands.status:run_profile",
    "render": "render.files",
    "report": "page.report",
    "scale": "commands.status:run_scale",
    "schema": "config_reference",
    "trace": "commands.why:run_trace",
}
_SHOWING = ("samples", "score", "status", "why")

if __name__ == "__main__":
    main()
