"""From a Python function to the description of a tool: its signature is the schema, its docstring says the rest. Pure."""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

GIVEN = "episode"  # a parameter of this name is not the model's
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    inspect.Parameter.empty: {},
}
ARRAYS = (list, collections.abc.Sequence, collections.abc.Iterable)
OBJECTS = (dict, collections.abc.Mapping)
SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$")
ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
FIELD = re.compile(r":(?:param\s+(?:\w+\s+)?(\w+)|\w+(?:\s+\w+)?):\s*(.*)")


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """As an entry of a request's `tools`. Raises TypeError for a parameter that JSON cannot give."""
    text, said = described(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"the tool {function.__name__}: {error}") from None
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == GIVEN or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"the tool {function.__name__}: {name} cannot be given by name")
        try:
            schema = type_schema(hints.get(name, parameter.empty))
        except TypeError as error:
            raise TypeError(f"the tool {function.__name__}: {name}: {error}") from None
        properties[name] = {**schema, **({"description": said[name]} if name in said else {})}
        if parameter.default is parameter.empty:
            required.append(name)
        elif isinstance(parameter.default, (str, int, float, bool)):
            properties[name]["default"] = parameter.default
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": function.__name__, "description": text, "parameters": parameters}}


def type_schema(hint: Any) -> dict[str, Any]:
    """Of an annotation. Raises TypeError for one whose values JSON does not have."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        texts = [text for text in inner[1:] if isinstance(text, str)]
        return {**type_schema(inner[0]), **({"description": texts[0]} if texts else {})}
    if origin is typing.Literal:
        kinds = {type(value) for value in inner}
        return {**(PLAIN[kinds.pop()] if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(each) for each in inner]}
    if origin in ARRAYS:
        return {"type": "array", "items": type_schema(inner[0])}
    if origin in OBJECTS and inner[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    if typing.is_typeddict(hint):
        fields = {name: type_schema(each) for name, each in typing.get_type_hints(hint).items()}
        return {"type": "object", "properties": fields, "required": sorted(hint.__required_keys__)}
    try:
        return dict(PLAIN[hint])
    except (KeyError, TypeError):
        known = "str, int, float, bool, None, list, dict, Literal, TypedDict, Any and unions of them"
        raise TypeError(f"{hint} is no type of a tool's parameter: {known} are") from None


def described(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter: Google's sections, or `:param name: text`."""
    about: list[str] = []
    said: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in doc.splitlines():
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if not depth and SECTION.match(line):
            section, name, indent = text[:3], "", 0
        elif match := FIELD.match(text):
            section, name = "field", match[1] or ""
            said.update({name: match[2]} if name else {})
        elif section in ("Arg", "Par") and (match := ENTRY.match(text)) and (not indent or depth <= indent):
            indent, name = depth, match[1]
            said[name] = match[2]
        elif section and name and text:
            said[name] = f"{said[name]} {text}".strip()
        elif not section:
            about.append(text)
    return "\n".join(about).strip(), said
