"""What the model is told of a Python function that is a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest

from sluice.agents.schemas import described, function_schema, type_schema


class Place(TypedDict, total=False):
    name: str
    height: float


def search(text: str, limit: int = 5, *, order: Literal["new", "old"] = "new", tags: list[str] | None = None) -> str:
    """Search the archive.

    All of it, also what is old.

    Args:
        text: What to look for,
            language: any.
        limit (int): How many.

    Returns:
        What was found.
    """
    return f"{text} {limit} {order} {tags}"


def test_signature_and_docstring_are_the_schema() -> None:
    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.\n\nAll of it, also what is old.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "What to look for, language: any."},
                    "limit": {"type": "integer", "description": "How many.", "default": 5},
                    "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["text"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[dict[str, int]], {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}}),
        (Sequence[float], {"type": "array", "items": {"type": "number"}}),
        (Mapping[str, Any], {"type": "object", "additionalProperties": {}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045 - as others write it
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (Place, {"type": "object", "properties": {"name": {"type": "string"}, "height": {"type": "number"}}, "required": []}),
    ],
)
def test_annotations(hint: Any, schema: dict[str, Any]) -> None:
    assert type_schema(hint) == schema


@pytest.mark.parametrize("hint", [bytes, dict[int, str], Callable[[], int], tuple[int, int], complex])
def test_what_json_does_not_have_is_refused_by_name(hint: Any) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    with pytest.raises(TypeError, match=r"the tool tool: value: .* is no type of a tool's parameter"):
        function_schema(tool)


def test_the_episode_is_not_the_models_to_give() -> None:
    def tool(episode: Any, key: str, *more: Any, **rest: Any) -> None: ...

    assert list(function_schema(tool)["function"]["parameters"]["properties"]) == ["key"]

    def positional(key: str, /) -> None: ...

    with pytest.raises(TypeError, match="key cannot be given by name"):
        function_schema(positional)


def test_parameters_may_be_described_as_fields() -> None:
    about, said = described("Adds.\n\n:param int a: The one.\n:param b: The other,\n    or none.\n:returns: Their sum.")
    assert (about, said) == ("Adds.", {"a": "The one.", "b": "The other, or none."})
    assert described("") == ("", {})
