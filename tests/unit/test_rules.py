"""The rules of the source tree: which way imports run, what is pure, what loads nothing heavy."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "services", "launcher", "sluice")  # each may import those before it
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
    if not file.name.endswith("_pb2.py")
)
TREES = {file: ast.parse((ROOT / file).read_text()) for file in FILES}

PURE = (
    "runtime/algorithms/",
    "runtime/data/order.py",
    *(f"runtime/rewards/{name}.py" for name in ("accuracy", "extraction", "format", "numeric", "rules")),
    "runtime/models/families/",
    "runtime/models/rope.py",
    "runtime/weights/plain_pickle.py",
    "runtime/telemetry/report/lineages.py",
    "runtime/telemetry/report/thinning.py",
    "runtime/weights/plan.py",
    "runtime/ledger/states.py",
    "runtime/coordinator/staleness.py",
    "runtime/coordinator/weight_sync_protocol.py",
    "runtime/coordinator/register.py",
    "runtime/coordinator/device_schedule.py",
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


def imports(node: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere below `node`, by name; what `from` takes may be a module too.

    Imports for type checking alone are left out: they are never carried out.
    """
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import"
        assert node.module is not None
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))
    for child in children:
        yield from imports(child)


@cache
def imports_of(file: str) -> set[str]:
    return set(imports(TREES[file]))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offenders(files: list[str], forbidden: set[str]) -> list[str]:
    return [
        f"{file} imports {module}"
        for file in files
        for module in sorted(imports_of(file))
        if any(within(module, package) for package in forbidden)
    ]


def test_the_tree_is_there() -> None:
    assert len(FILES) > 60
    for name in (*PURE, *TRANSLATORS):
        assert any(file.startswith(name) for file in FILES), name


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    later = set(PACKAGES[PACKAGES.index(package) + 1 :])
    found = offenders([file for file in FILES if file.startswith(f"{package}/")], later)
    assert [each for each in found if each.partition(" imports ")[2] not in START] == []


def carried_out(node: ast.AST) -> Iterator[str]:
    """What is imported as `node`, a module, is: not what its functions import when they are called."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, functions) and not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from carried_out(child)
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield from imports(child)


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): TREES[file] for file in FILES}
    graph = {module: {one for one in carried_out(tree) if one in modules} - {module} for module, tree in modules.items()}
    while ends := [module for module, imported in graph.items() if not imported & graph.keys()]:
        for module in ends:
            del graph[module]
    assert graph == {}, "each of these imports another of them"


def test_a_folder_is_read_in_one_sitting_and_a_file_at_a_glance() -> None:
    folders = Counter(str(Path(file).parent) for file in FILES)
    assert {folder: count for folder, count in folders.items() if count > 24} == {}
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in FILES}
    assert {file: length for file, length in lengths.items() if length > 400} == {}


def test_nothing_outside_the_tests_imports_them() -> None:
    assert offenders(FILES, {"tests", "pytest", "hypothesis"}) == []


def test_nothing_but_the_command_imports_the_benches() -> None:
    files = [file for file in FILES if file != "launcher/cli.py" and not file.startswith("benchmarks/")]
    assert offenders(files, {"benchmarks"}) == []


def test_runtime_does_not_know_grpc_or_protobuf() -> None:
    files = [file for file in FILES if file.startswith("runtime/")]
    assert offenders(files, {"grpc", "google", "grpc_health", "grpc_reflection", "grpc_tools"}) == []


def test_the_coordinators_time_chance_and_threads_come_from_the_loop() -> None:
    """So that a simulation replaces the loop and the ports, and nothing else."""
    files = [file for file in FILES if file.startswith(("runtime/coordinator/", "runtime/ledger/"))]
    assert offenders(files, {"time", "datetime", "random", "secrets", "uuid", "threading", "multiprocessing"}) == []
    calls = [
        f"{file}:{node.lineno}: .{node.func.attr}()"
        for file in files
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("submit", "start", "urandom")
    ]
    assert calls == []


def test_pure_modules_import_nothing_impure() -> None:
    files = [file for file in FILES if file.startswith(PURE)]
    assert offenders(files, IMPURE) == []


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
    for file in FILES:  # nor at the top of it: the file must be importable everywhere
        if file == "runtime/process/platform.py":
            top = {
                module
                for node in TREES[file].body
                for module in imports(node)
                if isinstance(node, (ast.Import, ast.ImportFrom))
            }
            assert not any(within(module, package) for module in top for package in OPTIONAL), file


def test_there_is_no_pickle() -> None:
    assert offenders(FILES, PICKLES) == []
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert flags.get("weights_only") == "True", f"{file}:{node.lineno}: torch.load unpickles"


def test_no_except_is_bare() -> None:
    bare = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_top_level_names_are_sluices_alone() -> None:
    """An import of `services`, `runtime` or `launcher` finds Sluice's: no other distribution ships one."""
    owners = importlib.metadata.packages_distributions()
    taken = {name: set(owners.get(name, ())) - {"sluice-rl"} for name in PACKAGES}
    assert taken == {name: set() for name in PACKAGES}


# ------------------------------------------------------------------------------------------------ what stays light

HEAVY = ("torch", "transformers", "vllm", "megatron")


def loaded(code: str) -> list[str]:
    """The heavy packages that a fresh interpreter has after `code`."""
    report = f"\nimport json, sys\nsys.stdout.write('\\n' + json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import services.coordinator, runtime.coordinator.run, runtime.telemetry.trackers", id="coordinator"),
        pytest.param(
            "import services.reward, runtime.rewards.worker\n"
            "from runtime.rewards.catalogue import find_rule\n"
            "from runtime.config import Rewards, Rule\n"
            "from runtime.rewards.rules import RULES, RuleContext\n"
            "for name in RULES: find_rule(name).evaluate('\\\\boxed{5}', '5', RuleContext())",
            id="reward",
        ),
        pytest.param(
            "import services.rollout, services.trainer, services.critic, services.reference, services.reward_model",
            id="before-load",
        ),
        pytest.param("import runtime.algorithms, runtime.config.checks, runtime.models.tiny_model", id="checks"),
        pytest.param(
            "from launcher import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0",
            id="sluice-help",
        ),
        pytest.param(
            "from launcher.commands import evaluate, prepare, report, samples, score, status, train\n"
            "import launcher.accept.checks, launcher.registered_names, launcher.node.environment\n"
            "import runtime.telemetry.report.page\n"
            "import benchmarks.command",
            id="launcher",
        ),
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded(code) == []


def test_the_check_for_heavy_modules_can_fail() -> None:
    assert loaded("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == ["torch"]


def test_the_command_line_answers_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "usage: sluice" in done.stdout


def test_each_class_has_a_name_of_its_own() -> None:
    """Somebody who greps for a class finds one."""
    places: dict[str, list[str]] = {}
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


CALLABLES = 8  # constructor parameters and fields that are callables: no more than today; pass an object with a method


def callables() -> list[str]:
    """`file:class.name` of each parameter of `__init__`, and each field of a class, that is annotated as a Callable."""
    found = []
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            named = [(ast.unparse(one.target), one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)]
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    arguments = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
                    named += [(each.arg, each.annotation) for each in arguments if each.annotation is not None]
            found += [f"{file}:{node.name}.{name}" for name, kind in named if "Callable" in ast.unparse(kind)]
    return found


def test_callables_are_passed_to_few_constructors() -> None:
    assert len(callables()) <= CALLABLES, callables()
