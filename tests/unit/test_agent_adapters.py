"""Parts of the adapters that need neither a gateway nor the packages that they are for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import sluice.agents
from sluice.agents.conversation import opening, package
from sluice.agents.episode import DataError
from sluice.agents.mcp_tools import innermost, untitled
from sluice.agents.trl_environment import methods_of, with_text
from tests.unit.docs_blocks import read

ROOT = Path(__file__).parents[2]
NAMES = ("GymnasiumText", "McpServer", "OpenEnvClient", "VerifiersTaskset")
EXAMPLES = sorted(file.name for file in (ROOT / "configs" / "agents").iterdir() if file.is_file() and file.name != "lookup.py")
PACKAGES = {"GymnasiumText": "gymnasium", "McpServer": "mcp", "OpenEnvClient": "openenv", "VerifiersTaskset": "verifiers"}


def test_the_standard_library_is_enough_to_import_them_all() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sluice.agents as a; [getattr(a, name) for name in a.__all__]"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_told_with_what_installs_it(name: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is installed")
    with pytest.raises(ImportError, match=rf" is not installed: {sys.executable} -m pip install '{PACKAGES[name]}"):
        getattr(sluice.agents, name)("x")


def test_what_a_package_itself_lacks_is_not_told_as_its_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import lacked")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'lacked'"):
        package("lacking", "lacking>=1")


def test_what_a_conversation_begins_with() -> None:
    asked = [{"role": "user", "content": "x"}]
    assert opening({"prompt": "x"}) == opening({"prompt": asked}) == opening({"messages": asked}) == asked
    assert opening({"prompt": "x"}, "Be short.") == [{"role": "system", "content": "Be short."}, *asked]
    with pytest.raises(DataError, match="neither messages nor a prompt; its columns are question"):
        opening({"question": "x"})


class Machine:
    """As TRL's documentation has an environment."""

    @property
    def state(self) -> str:
        raise AssertionError("nobody asked")

    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 0.0

    def push(self) -> str:
        return "pushed"

    def _own(self) -> None: ...


def test_the_public_methods_are_tools() -> None:
    assert [method.__name__ for method in methods_of(Machine())] == ["push"]


def test_what_reset_says_is_put_behind_the_task() -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert with_text(asked, " y") == [asked[0], {"role": "user", "content": "x y"}]
    assert with_text(asked, None) == asked and asked[1]["content"] == "x"
    assert with_text(asked[:1], "y") == [asked[0], {"role": "user", "content": "y"}]
    with pytest.raises(DataError, match="reset gave none"):
        with_text(asked[:1], None)


def test_titles_of_a_schema_go_and_properties_of_that_name_stay() -> None:
    schema = {
        "title": "Args",
        "properties": {"title": {"title": "Title", "type": "string"}, "many": {"anyOf": [{"title": "A"}]}},
    }
    assert untitled(schema) == {"properties": {"title": {"type": "string"}, "many": {"anyOf": [{}]}}}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_guide_has_the_examples_as_they_are(name: str) -> None:
    page = ROOT / "docs" / "guides" / "environments.md"
    assert (ROOT / "configs" / "agents" / name).read_text() in [block.text for block in read(page)]
    assert f"`configs/agents/{name}`" in page.read_text()


def test_the_first_of_a_group_of_exceptions_is_told() -> None:
    class Group(Exception):
        exceptions = (KeyError("x"),)

    assert repr(innermost(Group())) == "KeyError('x')"
