"""What the pages show in blocks and in `code` is what the code takes: configurations, commands, settings, files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import psutil
import pytest

from launcher import cli
from launcher.commands import quickstart, serve
from launcher.commands.validate import validate
from launcher.node import __main__ as node
from launcher.node import local_node
from launcher.node.local_node import Machine, placement_table, this_machine
from launcher.registered_names import known_names
from launcher.render import files as render
from runtime import registry, run_files
from runtime.algorithms import interfaces
from runtime.cluster.topology import processes, teachers
from runtime.config import Config, model_checks
from runtime.config.loading import load
from runtime.config.yaml_text import dump, read_value
from runtime.data import prepare
from runtime.data.handlers import HANDLERS
from runtime.errors import ConfigError
from runtime.models.tiny_model import write_tokenizer
from runtime.registry import Registry
from runtime.rewards.rules import RULES
from tests.unit import reference_page
from tests.unit.config_cases import without_name
from tests.unit.docs_blocks import KINDS, PAGES, ROOT, Block, blocks, commands, inline, own_files, read
from tests.unit.model_dimensions import CONFIGS
from tests.unit.zh_pages import GENERATED

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
    monkeypatch.syspath_prepend(str(ROOT / "configs" / "agents"))
    code = compile(block.text, str(block), "exec")
    if re.search(r"^from (sluice|trl_environment)\b", block.text, re.MULTILINE):
        try:
            exec(code, {"__file__": str(Path.cwd() / (block.file or "block.py"))})
        except ModuleNotFoundError as error:  # of an adapter: the reader's interpreter has what it is for
            assert error.name == "mcp"


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
    """`section.key: value` and `section.key=value`; keys that stand alone are held to the reference below."""
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


# What a fragment is merged over. It lacks nothing, and has nothing that a fragment could contradict.
BASE: dict[str, Any] = {
    "run": {"name": "base"},
    "model": {"path": "/models/Qwen2.5-7B"},
    "data": {"train": "data/train.jsonl", "handler": "gsm8k"},
    "rewards": {"rules": [{"name": "gsm8k"}]},
}
_REGISTRIES: list[Registry[Any]] = [
    *(RULES, HANDLERS, interfaces.ADVANTAGES, interfaces.POLICY_LOSSES),
    *(interfaces.CORRECTIONS, interfaces.AGGREGATIONS, interfaces.KL_ESTIMATORS),
]
known_names()  # registers what is built in
_BUILT_IN = [(each, dict(each._entries)) for each in _REGISTRIES]
_ABSOLUTE = re.compile(r"(?<![\w.:/~*])/(?=[a-z]+/)")


class Workplace:
    """`folder` becomes the working directory until the test ends."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self._folder = folder
        patch.chdir(folder)
        patch.setattr(model_checks, "_installed", lambda: True)
        cpus = this_machine().cpus
        machine = Machine(kind="cuda", devices=tuple(map(str, range(64))), cpus=cpus)
        patch.setattr(local_node, "this_machine", lambda: machine)
        # As of an accelerator: the embedded engine's cache is there, not in this host's memory.
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
        # The table has a row for each of 64 devices, and drawing it takes half of the time of these tests.
        patch.setattr(sys.modules[validate.__module__], "placement_table", lambda *given: placement_table(*given).row_count)
        patch.setattr(registry, "_execute", cache(registry._execute.__wrapped__))
        for each, entries in _BUILT_IN:
            patch.setattr(each, "_entries", dict(entries))  # what is registered here is gone afterwards
        (folder / "configs").symlink_to(ROOT / "configs")
        verls = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."
        for name, text in {**own_files(), "my_reward.py": verls}.items():
            self._file(Path(name)).write_text(text, encoding="utf-8")

    def validate(self, config: str, overrides: Sequence[str] = ()) -> None:
        """As `sluice validate` of a file with the text `config`, whole or a fragment. Raises ConfigError, UserError."""
        path = self._shown(config)
        validate(path, self.supplied(path, overrides))

    def _shown(self, config: str) -> Path:
        given = read_value(self._here(config))
        assert isinstance(given, dict), "not a mapping"
        whole = given if "run" in given else _merged(read_value(self._here(dump(BASE))), given)
        path = self._folder / "shown.yaml"
        path.write_text(dump(whole), encoding="utf-8")
        return path

    def file(self, name: str) -> Path:
        """What a command calls so: a configuration of this repository, one that a page shows, else any of the reader's own."""
        if name.startswith("configs/"):
            assert (ROOT / name).is_file(), f"{name} is not in the repository"
            return Path(name)
        return self._shown(own_files().get(name, dump(BASE)))

    def supplied(self, path: Path, overrides: Sequence[str]) -> list[str]:
        """The overrides, with paths below this folder; the files that they and the configuration name are there."""
        here = [self._here(override) for override in overrides]
        self._supply(load(path, here))
        return here

    def prepare(self, path: Path, overrides: Sequence[str]) -> None:
        """As the beginning of `sluice data prepare`: the file of options is of its schema, and has what it names."""
        options = {key: read_value(value) for key, _, value in (here.partition("=") for here in map(self._here, overrides))}
        options = read_value(path.read_text(encoding="utf-8")) | options
        for name in options["input"] if isinstance(options["input"], list) else [options["input"]]:
            self._file(Path(name)).write_text("{}\n")
        _model(options["tokenizer_name_or_path"])
        prepare.load(path, [self._here(override) for override in overrides])

    def _here(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self._folder}/", text)

    def _supply(self, config: Config) -> None:
        """Make what the configuration names."""
        for name in _data(config):
            if not Path(name).exists():
                self._file(Path(name)).write_text("{}\n")
        reward = config.rewards.model
        others = {config.model.reference, config.critic.path if config.critic else ""}
        models = {config.model.path, *others, *teachers(config).values()}
        for name in models:
            _model(name)
        if reward:
            _model(reward.path, architectures=["Qwen2ForSequenceClassification"], id2label={"0": "score"})
        interpreters = {process.python for process in processes(config).values()}
        for name in interpreters:
            if name and not Path(name).exists():
                python = self._file(Path(name))
                python.touch()
                python.chmod(0o755)

    def _file(self, path: Path) -> Path:
        path = self._folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _data(config: Config) -> Iterator[str]:
    train = config.data.train
    yield from [train] if isinstance(train, str) else (source.path for source in train)
    yield config.data.eval
    yield from (entry.path for entry in config.evaluation.sets)


def _model(name: str, **described: Any) -> None:
    """A folder with a model's description and a tokenizer alone: of the sizes that its name says, else of Qwen2.5-1.5B's."""
    folder = Path(name)
    if not name or name.startswith("tiny:") or folder.exists():
        return
    key = folder.name.lower().replace("qwen2.5", "qwen25").removesuffix("-instruct").replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(CONFIGS.get(key, CONFIGS["qwen25_1.5b"]) | {"torch_dtype": "bfloat16"} | described)
    )
    write_tokenizer(folder)
    (folder / "model.safetensors").touch()


def _merged(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    both = {
        key: _merged(base[key], over[key]) for key in over if isinstance(base.get(key), dict) and isinstance(over[key], dict)
    }
    return base | over | both


FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^()\s>]+)>?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
DASHES = re.compile(r"\|( *:?-+:? *\|)+")
NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def links(text: str) -> Iterator[str]:
    """What a page links to within the repository."""
    found = LINK.findall(CODE.sub("`", FENCE.sub("", text)))
    yield from (link for link in found if not re.match(r"[a-z]+:", link))


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as GitHub makes them: small letters, no punctuation, the second of a name `-1`."""
    found: set[str] = set(NAMED.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        times = sum(1 for one in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", one))
        found.add(f"{name}-{times}" if times else name)
    return found


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text(encoding="utf-8"))


def dead(page: Path, text: str) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link in links(text):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if target != page and not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in (anchors_of(target) if target != page else anchors(text)):
            yield f"{link}: no such heading"


def torn(text: str) -> Iterator[str]:
    """Lines for which no reader shows a table: a head without dashes below it, a row of another number of cells."""
    for table in TABLE.findall(FENCE.sub("", text)):
        head, *rest = [re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()]
        if not DASHES.fullmatch(table.partition("\n")[2].partition("\n")[0]):
            yield table.partition("\n")[0]
        yield from (line for line, cells in zip(table.splitlines()[1:], rest, strict=True) if cells != head)


def test_every_link_leads_somewhere_and_every_table_is_one() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert (list(dead(page, text)), list(torn(text))) == ([], []), page


def test_keys_that_are_named_exist() -> None:
    """A dotted name in code that begins with a section of the configuration is one of its keys, or a section.

    In the tables of the page on migration the first column is another system's.
    """
    parts = list(reference_page.parts())
    plain = {path.replace("[]", "") for part in parts for path in (part.path, *(key.path for key in part.keys))}
    sections = {path.partition(".")[0] for path in plain}
    others = ("model.embed_tokens.", "model.norm.", "model.safetensors", run_files.METRICS, "metrics.png")  # tensors, and files
    for page in (each for each in PAGES if each.name != "configuration-reference.md"):
        text = GENERATED.sub("", page.read_text(encoding="utf-8"))
        if page.name == "migration.md":
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?=[`:=])", text))
        wrong = {name for name in set(map(without_name, named)) - plain if name.partition(".")[0] in sections}
        assert {name for name in wrong if not name.startswith(others)} == set(), page
