"""Secrets of the roles' `env` and `engine_args`. The configuration has their names, `{from: NAME}`: the environment variable
NAME of the machine that needs one has its value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from runtime.config import Process
from runtime.config.yaml_text import changed
from runtime.errors import UserError

NOT_SHOWN = "(not shown)"
_WORDS = {"token", "key", "secret", "password", "passwd"}  # a key with one of these words has a secret as its value
_BETWEEN_WORDS = re.compile(r"[-_.]|(?<=[a-z])(?=[A-Z])")
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*:[^\s/@]+@")
_PASSWORD = re.compile(r"(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
_HOLDERS = ("env", "engine_args")
_HARMLESS = {
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "tokenizer_mode", "attention_backend", "moe_backend", "mode"),
    *("distributed_executor_backend", "scheduling_policy", "reasoning_parser", "tool_call_parser", "cudagraph_mode", "method"),
}
"""The keys of `engine_args` whose texts are words of vLLM's; another may be of a secret, whatever it is called."""


class _Entry(NamedTuple):
    """One value of a role's `env` or `engine_args`."""

    holder: Any  # the mapping or list that it is in
    key: Any
    path: str
    within: str  # of _HOLDERS
    is_secret: bool  # by its key, or one above it, or by itself

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def refused(section: Any, path: str) -> list[str]:
    """Return a line for each secret's value in `section`, part of a file at `path`. A reference replaces the value there."""
    found = [entry for entry in _entries(section, path) if entry.is_secret and _is_text(entry)]
    for entry in found:
        entry.holder[entry.key] = {"from": "NAME"}
    must = "must be {from: NAME}, the environment variable that has it"
    return [f"{entry.path}: a secret, whose value must not stand in the configuration; {must}" for entry in found]


def without_secrets(config: Any) -> Any:
    """Return a configuration, decoded or not, as plain values that may be shown. It has no value of `env`, no text of
    `engine_args` except the known harmless ones, and no password of a URL. References stay."""
    shown = msgspec.to_builtins(config)
    for entry in list(_entries(shown)):
        hidden = _is_text(entry) and (entry.is_secret or entry.key not in _HARMLESS)
        if not _is_reference(entry.value) and (entry.within == "env" or hidden):
            entry.holder[entry.key] = NOT_SHOWN
    return changed(shown, partial(_PASSWORD.sub, NOT_SHOWN))


def references(role: Process, path: str) -> dict[str, str]:
    """Return, by path, the variables that the role at `path` reads from its machine's environment."""
    given = msgspec.to_builtins(role)
    found = [entry for entry in _entries(given, path) if _is_reference(entry.value)]
    return {one.path: one.value["from"] for one in found if one.within == "env" or one.value["from"] not in given["env"]}


def resolved(value: Any, environment: Mapping[str, str], path: str) -> Any:
    """Return plain values with the variables of `environment` for references. Raises UserError, with `path`, if one lacks."""
    value = msgspec.to_builtins(value)
    if _is_reference(value):
        if (name := value["from"]) not in environment:
            raise UserError(missing(path, name))
        return environment[name]
    if isinstance(value, dict):
        return {key: resolved(one, environment, f"{path}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [resolved(one, environment, f"{path}.{index}") for index, one in enumerate(value)]
    return value


def missing(path: str, name: str) -> str:
    """Return the fault of a reference at `path` to the missing variable `name`."""
    return f"{path}: {{from: {name}}}: this machine's environment has no {name}"


def _entries(node: Any, path: str = "", within: str = "", is_secret: bool = False) -> Iterator[_Entry]:
    """Yield the values below `node`, without mappings and lists. `within` and `is_secret` are of the node."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        words = map(str.lower, _BETWEEN_WORDS.split(str(key)))
        named = is_secret or (bool(within) and not _WORDS.isdisjoint(words))
        if isinstance(value, dict | list) and not _is_reference(value):
            yield from _entries(value, f"{path}.{key}", within or (key if key in _HOLDERS else ""), named)
        elif within:
            yield _Entry(node, key, f"{path}.{key}", within, named or bool(_URL_WITH_PASSWORD.search(str(value))))


def _is_text(entry: _Entry) -> bool:
    """Return whether the value must be hidden. A number in `engine_args` is no secret: it may be a token's number."""
    value = entry.value
    return isinstance(value, str | int | float if entry.within == "env" else str) and value != ""


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["from"] and isinstance(value["from"], str)
