"""The console command `sluice`. Heavy modules are imported only once the command is known."""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from launcher.commands import options as of_command
from runtime.errors import SluiceError, UserError
from runtime.process.os_process import CommandParser, ended_as_by_ctrl_c

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.node.local_node import LocalNode
    from launcher.view import View
    from runtime.config import Config

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
    sys.exit(run_and_report(lambda: _COMMANDS[options.command](options), options.command in _SHOWING))


def run_and_report(work: Callable[[], int | None], shows: bool = False) -> int:
    """Run `work` and return its exit code, None for 0, or that of its error, which is printed. SIGUSR1 writes the stacks, as in
    every process of a run. Work that only `shows` something ends with its reader."""
    with suppress(OSError, RuntimeError):  # a stderr that is no file
        faulthandler.register(signal.SIGUSR1)
    outlive_readers(shows)
    try:
        return work() or 0
    except UserError as error:
        _print_errors(*str(error).splitlines())
        return 2
    except SluiceError as error:
        _print_errors(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def _print_errors(*lines: str) -> None:
    from runtime.telemetry.shown import shown

    for line in lines:
        print(shown(f"error: {line}"), file=sys.stderr)


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


def _config(options: argparse.Namespace) -> Config:
    from runtime.config import loading

    return loading.resolve(loading.load(options.config, options.overrides))


def _train(options: argparse.Namespace) -> int:
    from launcher.node.local_node import LocalNode

    config = _config(options)
    return run_training(config, LocalNode.of(config), options.verbose)


def _quickstart(options: argparse.Namespace) -> None:
    from rich.console import Console

    from launcher.commands import quickstart
    from runtime.telemetry.shown import shown

    options.config = quickstart.PRETRAINED if options.pretrained else quickstart.FILE
    if options.pretrained:
        quickstart.prepare(_config(options), lambda line: print(shown(line), flush=True))
    if options.write is not None:
        lines = quickstart.write(options.config, options.write, options.overrides)
    else:
        _train(options)  # raises if it fails
        config = _config(options)
        if options.pretrained and (table := quickstart.replies(config)):
            Console().print(table)
        lines = quickstart.advice(config.run.dir, "quickstart --pretrained" if options.pretrained else "quickstart")
    print("\n".join(map(shown, lines)))


def run_training(config: Config, here: LocalNode, verbose: bool = False) -> int:
    """Train, with this machine as the coordinator's node, and print the result. `verbose`: each process's output too. Raises
    SluiceError."""
    from runtime.process import os_process

    os_process.close_to_others()
    from rich.console import Console

    from launcher.commands.train import train
    from runtime.evaluation import results as evaluation
    from runtime.evaluation.results import render
    from runtime.telemetry import summary
    from runtime.telemetry.shown import say, shown

    console = Console()
    result = _watched(console, verbose, lambda view: train(config, view, here))
    console.print(summary.render(result))
    if found := evaluation.read(Path(config.run.dir)):
        console.print(render([found[0], *found[1:][-1:]]))
    say(console, f"run folder: {config.run.dir}")
    if result.mismatch_alarm:
        print(shown(f"alarm: {summary.alarm(result)}"), file=sys.stderr)
    return 0


def _watched(console: Console, verbose: bool, work: Callable[[View], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work`, and show its progress meanwhile. Exits with the code of an interruption."""
    from launcher.job import Interrupted
    from launcher.view import View
    from runtime.telemetry.shown import say

    try:
        with View(console, verbose=verbose) as view:
            return asyncio.run(work(view))
    except Interrupted as how:
        say(console, str(how))
        sys.exit(how.code)


def _sft(options: argparse.Namespace) -> None:
    from launcher.commands.sft import sft

    _say_result(options, sft)


def _eval(options: argparse.Namespace) -> None:
    from rich.console import Console

    from launcher.commands.evaluate import evaluate, own_folder
    from runtime.evaluation import results as evaluation
    from runtime.evaluation.results import render
    from runtime.telemetry.shown import say

    console = Console()
    config = own_folder(_config(options))
    result = _watched(console, options.verbose, lambda view: evaluate(config, view))
    console.print(render([result]))
    say(console, f"results and replies: {evaluation.folder_for(Path(config.run.dir), result.step)}")


def _play(options: argparse.Namespace) -> None:
    from launcher.commands.play import play, shown

    async def played(config: Config, view: View) -> str:
        return shown(await play(config, options.task, view))

    _say_result(options, played)


def _say_result(options: argparse.Namespace, work: Callable[[Config, View], Coroutine[Any, Any, str]]) -> None:
    """Print the last text of a command on a configuration."""
    from rich.console import Console

    from runtime.telemetry.shown import say

    console, config = Console(), _config(options)
    say(console, _watched(console, options.verbose, lambda view: work(config, view)))


def _serve(options: argparse.Namespace) -> None:
    from rich.console import Console

    from launcher.commands.serve import serve

    _watched(Console(), options.verbose, lambda view: serve(options.model, options.overrides, view))


def _schema(options: argparse.Namespace) -> None:
    import json

    from launcher.config_reference import schema

    print(json.dumps(schema(), indent=2))


def _page(options: argparse.Namespace) -> None:
    from launcher.page.server import serve

    with ended_as_by_ctrl_c():
        asyncio.run(serve(options.folder, options.host, options.port, lambda address: print(address, flush=True)))


def _bench(options: argparse.Namespace) -> None:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "command.py").is_file():
        raise UserError(f"bench {options.name}: the benchmarks are not installed; take `sluice` from a clone of the source")
    sys.path.append(str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))  # for children
    from benchmarks import command

    given = {field: getattr(options, field) for field in command.Options.__struct_fields__}
    command.run(options.name, command.Options(**given))


def _run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """Return a call of `run` of a command's module in `launcher`: its exit code, None for 0."""

    def run(options: argparse.Namespace) -> int:
        code: int | None = importlib.import_module(f"launcher.{module}").run(options)
        return code or 0

    return run


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "quickstart": _quickstart,
    "train": _train,
    "sft": _sft,
    "eval": _eval,
    "play": _play,
    "serve": _serve,
    "validate": _run_of("commands.validate"),
    "simulate": _run_of("commands.simulate"),
    "schema": _schema,
    "render": _run_of("render.command"),
    "status": _run_of("commands.status"),
    "scale": _run_of("commands.scale"),
    "profile": _run_of("commands.profile"),
    "samples": _run_of("commands.samples"),
    "report": _run_of("page.report"),
    "why": _run_of("commands.why"),
    "trace": _run_of("commands.trace"),
    "page": _page,
    "data": _run_of("commands.prepare"),
    "score": _run_of("commands.score"),
    "convert": _run_of("commands.convert"),
    "check-template": _run_of("commands.check_template"),
    "import-mindspeed": _run_of("commands.importing"),
    "import-verl": _run_of("commands.importing"),
    "bench": _bench,
    "accept": _run_of("accept.checks"),
}

_SHOWING = ("samples", "score", "status", "why")

if __name__ == "__main__":
    main()
