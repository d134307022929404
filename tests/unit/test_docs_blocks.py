"""What the pages show in blocks and in `code` is what the code takes: configurations, commands, settings, files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli
from launcher.commands import quickstart, serve
from launcher.commands.validate import validate
from launcher.node import __main__ as node
from launcher.render import command as render
from runtime.config import Config
from runtime.config.loading import load
from runtime.config.yaml_text import dump
from runtime.errors import ConfigError
from tests.unit.docs_blocks import KINDS, PAGES, ROOT, Block, blocks, commands, inline, own_files, read, split
from tests.unit.docs_workplace import BASE, Workplace

# Programs whose arguments nothing here knows.
OTHERS = (
    *(".", "cd", "git", "grep", "gunzip", "gzip", "mkdir", "npu-smi", "openenv", "pip", "source", "sudo"),
    *("grpcurl", "kubectl", "prometheus", "protoc", "sbatch", "uvicorn"),
)

FILE = re.compile(
    r"(?:[\w./-]*/)?[\w*{},]+\.py|(?:runtime|services|launcher|tests|configs|docs|proto|requirements)/[\w./*{},-]*"
)
# Settings as their shape, or another system's.
SHAPES = (
    *("training.staleness: η", "rewards.rules.0.name=...", "services.coordinator: {host, port}"),
    *("services.preset: my/layout.yaml", "network.port_range: [first, last]"),
    "algorithm.norm_adv_by_std_in_grpo: false",  # verl's
    "services.environment: ascend",  # of 0.1
)
# Files of other projects, and placeholders.
THEIRS = (
    *("FILE.py", "convert_ckpt.py", "convert_ckpt_v2.py", "docs/zh/algorithms/{grpo,ppo,dapo}.md"),
    *("configs/r1_zero.yaml", "configs/envs/runtime_env.yaml", "configs/dapo_qwen3_30b_a3b_A3.yaml"),
)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    return Workplace(tmp_path, monkeypatch)


def by_page(*kinds: str) -> Any:
    """The blocks of these kinds, a case for each page that has any."""
    pages: dict[str, list[Block]] = {}
    for block in blocks(*kinds):
        pages.setdefault(block.page, []).append(block)
    return pytest.mark.parametrize("shown", pages.values(), ids=pages)


def test_every_block_says_what_it_is_and_json_can_be_read() -> None:
    """A whole value, or one on each line."""
    unknown = [f"{block}: {block.kind}" for page in PAGES for block in read(page) if block.kind not in KINDS]
    assert unknown == [], f"none of {', '.join(KINDS)}; for another kind, write what holds it to something"
    for block in blocks("json"):
        one_a_line = [line for line in block.text.splitlines() if line.startswith("{") and line.endswith("}")]
        for text in one_a_line if one_a_line == block.text.splitlines() else [block.text]:
            json.loads(text)


@by_page("yaml")
def test_a_configuration_is_valid(shown: list[Block], workplace: Workplace) -> None:
    for block in shown:
        workplace.validate(block.text)


@by_page("", "bash")
def test_commands_are_taken(shown: list[Block], workplace: Workplace) -> None:
    for block in shown:
        for words in commands(block.text):
            run(words, workplace)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports from this project is run, which registers what it has; the rest can be compiled."""
    monkeypatch.setitem(sys.modules, "httpx", SimpleNamespace(AsyncClient=lambda: None))  # the reader's own choice
    code = compile(block.text, str(block), "exec")
    if re.search(r"^from sluice\b", block.text, re.MULTILINE):
        try:
            exec(code, {"__file__": str(Path.cwd() / (block.file or "block.py"))})
        except ImportError as error:  # of an adapter: the reader's interpreter has what it is for
            assert " is not installed: " in str(error)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("sluice train my.yaml traning.steps=5", "traning: unknown key"),
        ("sluice train configs/none.yaml", "not in the repository"),
        ("cd a && python -m services.none", "services.none"),
        ("make all", "all"),
        ("docker run --rm sluice:cuda accept --device tpu", "^2$"),
        ("sluice train my.yaml sampling.group_size=1", "needs at least 2"),
        ("sluice serve tiny:qwen2 gateway.contexts=5", "gateway.contexts: unknown key"),
        ("kubctl get pods", "kubctl is none of"),
        ("training.stepps=5", "stepps"),
    ],
)
def test_a_wrong_command_is_found(shown: str, said: str, workplace: Workplace) -> None:
    with pytest.raises((AssertionError, ConfigError, SystemExit), match=said):
        for words in commands(shown):
            run(words, workplace)


def test_blocks_and_commands_are_told_apart() -> None:
    page = "```\na \\\n  b 'c d' | e > f   # g\n```\n1. x\n\n   ```yaml\n   a: 1\n   ```\n"
    first, second = split(page, "p")
    assert commands(first.text) == [["a", "b", "c d"], ["e"]]
    assert (second.kind, str(second)) == ("yaml", "p:7")
    with pytest.raises(ValueError, match="p:1: the block does not end"):
        split("```", "p")


def test_commands_in_the_text_are_there() -> None:
    """`sluice COMMAND` with its options, also as a synopsis; `make TARGET`, `python -m MODULE`."""
    wrong: list[str] = []
    for page in PAGES:
        shown = [line for block in read(page) if block.kind == "text" for line in block.text.splitlines()]
        for code in [*inline(page), *shown]:
            words = re.sub(r"[\[\]]", " ", code).split()
            if words[:1] == ["sluice"]:
                wrong += [f"{page}: {fault}" for fault in synopsis_faults(words[1:])]
            elif words[:1] == ["make"] and len(words) > 1:
                wrong += [f"{page}: make {words[1]}"] if words[1] not in targets() else []
            elif words[:2] == ["python", "-m"]:
                wrong += [f"{page}: {code}"] if not is_module(words[2]) else []
    assert wrong == []


def test_settings_in_the_text_are_taken(tmp_path: Path) -> None:
    """`section.key: value` and `section.key=value`; test_docs_links.py has the keys that stand alone."""
    (tmp_path / "base.yaml").write_text(dump(BASE), encoding="utf-8")
    pages = {code: page for page in PAGES for code in inline(page) if code not in SHAPES}
    settings = {code: re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:=|: ?)(.+)", code) for code in pages}
    wrong: list[str] = []
    for code, setting in settings.items():
        if setting and setting[1].partition(".")[0] in Config.__struct_fields__:
            fleets = ["services.rollout=[{}, {}]"] if setting[1].startswith("services.rollout.1") else []
            try:
                load(tmp_path / "base.yaml", [*fleets, f"{setting[1]}={setting[2]}"])
            except ConfigError as error:
                wrong.append(f"{pages[code]}: `{code}`: {error}")
    assert wrong == []


def test_files_that_are_named_exist() -> None:
    """By path, or by the end of it: Python files, and all in this repository's folders. What a page writes is there too."""
    wrong: list[str] = []
    for page in PAGES:
        texts = (block.text for block in read(page) if block.kind == "text")
        pictures = (word for text in texts for word in re.findall(r"(?<![\w./*])[\w/]+\.py\b", text))
        named = [found[1] for code in inline(page) if (found := re.fullmatch(rf"({FILE.pattern})(?::\w+)?", code))]
        wrong += [f"{page}: {name}" for name in (*named, *pictures) if not exists(name) and name not in THEIRS]
    assert wrong == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.mutmut]")[2]
    mutated = re.findall(r'"((?:runtime|tests)/[^"]+)"', settings)
    assert mutated and [path for path in mutated if not any(ROOT.glob(path))] == []


def run(words: list[str], workplace: Workplace) -> None:
    """Hold a command to what takes it. Raises AssertionError, ConfigError, UserError."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, rest = words[0].rpartition("/")[2], words[1:]
    if re.match(r"[a-z_.]+=", words[0]):
        workplace.validate(dump(BASE), words)
    elif program == "sluice":
        sluice(rest, workplace)
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= targets()
    elif program in ("python", "python3", "torchrun") and "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :]
        assert is_module(module), module
        if module == "sluice.node":
            on_each_node(arguments, workplace)
    elif program in ("python", "python3") and rest[0] == "-c":
        compile(rest[1], "-c", "exec")
    elif program == "bash" and rest[0] == "launcher/node.sh":
        on_each_node(rest[1:], workplace)
    elif program in ("bash", "python", "python3"):
        assert exists(rest[0]), rest[0]
    elif program == "docker":
        in_a_container(rest, workplace)
    else:
        assert program in OTHERS, f"{program} is none of {', '.join(OTHERS)}; for another one, write what holds it to something"


def sluice(arguments: list[str], workplace: Workplace) -> None:
    if arguments == ["--help"]:
        return
    options = parser().parse_args(arguments)
    if options.command == "data":
        workplace.prepare(workplace.file(str(options.config)), options.overrides)
    elif options.command == "serve":
        serve.config_for(options.model, options.overrides)
    elif options.command == "quickstart":
        load(quickstart.FILE, options.overrides)
    elif "overrides" in options:
        options.config = workplace.file(str(options.config))
        options.overrides = workplace.supplied(options.config, options.overrides)
        {"render": render.render}.get(options.command, checked)(options)


def on_each_node(arguments: list[str], workplace: Workplace) -> None:
    options = node._parser().parse_intermixed_args(arguments)
    options.config = workplace.file(str(options.config))
    checked(argparse.Namespace(config=options.config, overrides=workplace.supplied(options.config, options.overrides)))


def checked(options: argparse.Namespace) -> None:
    """What `sluice validate` finds before a run or an evaluation of the same."""
    validate(options.config, options.overrides)


def in_a_container(arguments: list[str], workplace: Workplace) -> None:
    """`docker build` makes a stage of the Dockerfile; what it runs, the image having `sluice` as entry point, is a command."""
    if arguments[0] == "build":
        stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
        assert "--target" not in arguments or arguments[arguments.index("--target") + 1] in stages
    elif arguments[0] == "run" or arguments[:2] == ["compose", "exec"]:
        (at,) = [index for index, word in enumerate(arguments) if re.fullmatch(r"sluice(:\w+)?", word)]
        sluice(arguments[at + 1 :], workplace)


@cache
def parser() -> argparse.ArgumentParser:
    return cli._parser()


def synopsis_faults(words: list[str]) -> list[str]:
    """Of the words after `sluice`, placeholders among them: the commands and options that there are not."""
    wrong: list[str] = []
    parsers = [parser()]
    for word in words:
        choices = {name: each for parser in parsers for name, each in subparsers(parser).items()}
        if word.startswith("--"):
            options = {name for parser in parsers for name in parser._option_string_actions}
            wrong += [word] if word.partition("=")[0] not in options else []
        elif choices:
            wrong += [name for name in word.split("|") if name not in choices]
            parsers = [choices[name] for name in word.split("|") if name in choices]
    return [f"sluice {' '.join(words)}: {each}" for each in wrong]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def is_module(name: str) -> bool:
    """Of this project, of the standard library, or of a package that the project's own tools need."""
    return find_spec(name) is not None


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def files() -> list[str]:
    """All of this repository that a page may name, from its root."""
    folders = ("sluice", "runtime", "services", "launcher", "tests", "configs", "docs", "proto", "requirements")
    return [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")]


@cache
def exists(name: str) -> bool:
    """Whether a file or folder of this repository has this path, or one that ends with it, or a page writes it."""
    if braces := re.search(r"\{(.*?)\}", name):
        return all(exists(name.replace(braces[0], each)) for each in braces[1].split(","))
    pattern = re.sub(r"\b[A-Z_]{3,}\b", "*", name).rstrip("/")
    return name in own_files() or any(ROOT.glob(pattern)) or any(f"/{path}".endswith(f"/{name}") for path in files())
