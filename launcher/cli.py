"""The console command `sluice`. Nothing heavy is imported before a command is known."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.commands import options as of_command
from runtime.errors import SluiceError, UserError
from runtime.process.command_line import CommandParser, ended_as_by_ctrl_c

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.node.local_node import LocalNode
    from launcher.view import View
    from runtime.config import Config

T = TypeVar("T")

EXIT_CODES = """exit codes:
  0    done; or stopped in order by Ctrl-C or SIGTERM, what was learnt being saved
  1    a fault, which the last line names; of accept: a check has failed
  2    the user's to mend: the command, the configuration, what it names, a full disk; each fault is a line
  130  stopped at once, by a second Ctrl-C or because stopping in order took too long"""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sluice",
        description="Post-train language models by asynchronous RL, without Ray.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a whole topology on this machine")
    tune = commands.add_parser("tune", help="supervised fine-tuning of a configuration's model on the replies of its data")
    evaluate = commands.add_parser("eval", help="evaluate the model of a configuration; train nothing")
    validate = commands.add_parser("validate", help="check a configuration; start nothing")
    simulate = commands.add_parser("simulate", help="what a configuration would do, and what would change it; start nothing")
    play = commands.add_parser("play", help="play one task of a configuration, and print the conversation; train nothing")
    play.add_argument("--task", type=int, default=0, metavar="N", help="which one, from 0 (default: 0)")
    for command in (train, tune, evaluate, play, validate, simulate):
        command.add_argument("config", type=Path, help="a YAML file")
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    serve = commands.add_parser("serve", help="an endpoint for agents, in OpenAI's and Anthropic's API; train nothing")
    serve.add_argument("model", help="a Hugging Face folder, or a run's")
    serve.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    for command in (train, tune, evaluate, play, serve):
        command.add_argument("-v", "--verbose", action="store_true", help="show what each process writes to its log")

    of_command.add_simulate(simulate)
    commands.add_parser("schema", help="print the configuration's JSON Schema")
    of_command.add_render(commands.add_parser("render", help="write the files that start a run on several machines"))

    of_command.add_looking(commands)
    of_command.add_files(commands)
    of_command.add_measuring(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends with one of EXIT_CODES."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no more positional arguments behind an option.
    if not hasattr(options, "overrides") or any(each.startswith("-") or "=" not in each for each in rest):
        parser.parse_args(arguments)  # which says what is wrong
    else:
        options.overrides += rest
    sys.exit(run_and_report(lambda: _COMMANDS[options.command](options)))


def run_and_report(work: Callable[[], int]) -> int:
    """The exit code of `work`, or that of the error out of it, which the user is told of."""
    try:
        return work()
    except UserError as error:
        _tell(*str(error).splitlines())
        return 2
    except SluiceError as error:
        _tell(str(error))
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _tell(*lines: str) -> None:
    from runtime.telemetry.shown import shown

    for line in lines:
        print(shown(f"error: {line}"), file=sys.stderr)


def _train(options: argparse.Namespace) -> int:
    from launcher.node.local_node import LocalNode
    from runtime.config import loading

    config = loading.resolve(loading.load(options.config, options.overrides))
    return run_training(config, LocalNode.of(config), options.verbose)


def run_training(config: Config, here: LocalNode, verbose: bool = False) -> int:
    """Train, with this machine as the coordinator's node, and print what came of it; `verbose`: and what each process here
    writes. Raises SluiceError."""
    from launcher.node.fork_server import ForkServer, forked_roles

    fork_server = ForkServer(forked_roles(config, True, here.machine))  # it imports while this process does
    from rich.console import Console

    from launcher.commands.train import train
    from runtime.evaluation import results as evaluation
    from runtime.evaluation.table import render
    from runtime.telemetry import summary
    from runtime.telemetry.shown import say, shown

    console = Console()
    result = _watched(console, verbose, lambda view: train(config, view, here, fork_server))
    console.print(summary.render(result))
    if found := evaluation.read(Path(config.run.dir)):
        console.print(render([found[0], *found[1:][-1:]]))
    say(console, f"run folder: {config.run.dir}")
    if result.mismatch_alarm:
        print(shown(f"alarm: {summary.alarm(result)}"), file=sys.stderr)
    return 0


def _watched(console: Console, verbose: bool, work: Callable[[View], Coroutine[Any, Any, T]]) -> T:
    """What `work` gives, whose progress is shown meanwhile. Ends with its exit code where it was interrupted."""
    from launcher.job import Interrupted
    from launcher.view import View
    from runtime.telemetry.shown import say

    try:
        with View(console, verbose=verbose) as view:
            return asyncio.run(work(view))
    except Interrupted as how:
        say(console, str(how))
        sys.exit(how.code)


def _tune(options: argparse.Namespace) -> int:
    from launcher.commands.tune import tune

    return _said(options, tune)


def _eval(options: argparse.Namespace) -> int:
    from rich.console import Console

    from launcher.commands.evaluate import evaluate, own_folder
    from runtime.config import loading
    from runtime.evaluation import results as evaluation
    from runtime.evaluation.table import render
    from runtime.telemetry.shown import say

    console = Console()
    config = own_folder(loading.resolve(loading.load(options.config, options.overrides)))
    result = _watched(console, options.verbose, lambda view: evaluate(config, view))
    console.print(render([result]))
    say(console, f"results and replies: {evaluation.folder_for(Path(config.run.dir), result.step)}")
    return 0


def _play(options: argparse.Namespace) -> int:
    from launcher.commands.play import play, shown

    async def played(config: Config, view: View) -> str:
        return shown(await play(config, options.task, view))

    return _said(options, played)


def _said(options: argparse.Namespace, work: Callable[[Config, View], Coroutine[Any, Any, str]]) -> int:
    """Print what a command on a configuration says in the end."""
    from rich.console import Console

    from runtime.config import loading
    from runtime.telemetry.shown import say

    console = Console()
    config = loading.resolve(loading.load(options.config, options.overrides))
    say(console, _watched(console, options.verbose, lambda view: work(config, view)))
    return 0


def _serve(options: argparse.Namespace) -> int:
    from rich.console import Console

    from launcher.commands.serve import serve

    _watched(Console(), options.verbose, lambda view: serve(options.model, options.overrides, view))
    return 0


def _schema(options: argparse.Namespace) -> int:
    import json

    from launcher.config_reference import schema

    print(json.dumps(schema(), indent=2))
    return 0


def _page(options: argparse.Namespace) -> int:
    from launcher.page.server import serve

    with ended_as_by_ctrl_c():
        asyncio.run(serve(options.folder, options.host, options.port, lambda address: print(address, flush=True)))
    return 0


def _bench(options: argparse.Namespace) -> int:
    root = Path(__file__).parents[1]
    if not (root / "benchmarks").is_dir():
        raise UserError(f"bench {options.name}: the benchmarks are not installed; take `sluice` from a clone of the source")
    sys.path.append(str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))  # of what they start
    from benchmarks import command

    given = {field: getattr(options, field) for field in command.Options.__struct_fields__}
    command.run(options.name, command.Options(**given))
    return 0


def _run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """`run` of a command's module in `launcher`, which gives its exit code, None for 0."""

    def run(options: argparse.Namespace) -> int:
        code: int | None = importlib.import_module(f"launcher.{module}").run(options)
        return code or 0

    return run


_COMMANDS = {
    "train": _train,
    "tune": _tune,
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
    "report": _run_of("commands.report"),
    "why": _run_of("commands.why"),
    "trace": _run_of("commands.trace"),
    "page": _page,
    "data": _run_of("commands.prepare"),
    "score": _run_of("commands.score"),
    "convert": _run_of("commands.convert"),
    "check-template": _run_of("commands.check_template"),
    "import-mindspeed": _run_of("commands.import_mindspeed"),
    "bench": _bench,
    "accept": _run_of("accept.command"),
}

if __name__ == "__main__":
    main()
