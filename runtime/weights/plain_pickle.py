"""Reads untrusted pickles as plain values. A pickle can import, call or change only the objects named in this module.

The standard library's `pickletools` reads the opcodes, and a small machine executes them. The machine's stack has plain values,
`Function`, `Opaque` and `Attributes`. A pickle can neither read nor set attributes of these objects. Python's unpickler is not
used: it sets attributes of any function's result, hashes any key, and makes a memo of any length that a pickle names."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

# A tensor takes about 40 steps and 250 bytes, so these limits allow a rank with 100,000 tensors.
MOST_BYTES = 32 << 20
MOST_STEPS = 4_000_000
MOST_NAMES = 10_000
_LONGEST = 1000  # characters of a key, or a name


class RefusedPickle(Exception):
    """A pickle refers to a name that no table allows."""

    def __init__(self, full: str):
        full = full if full.isprintable() and len(full) <= 200 else excerpt(full)
        super().__init__(f"its pickle wants {full}, which no checkpoint needs; nothing of it was run")


class Malformed(Exception):
    """A pickle has something that no pickle of plain values has."""


# The exceptions that a malformed file causes. RuntimeError: a recursion.
FAULTS = (Malformed, ArithmeticError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


@dataclass(slots=True, eq=False, repr=False)
class Function:
    """A function that a pickle may call by name. `work` returns plain values, or objects closed to pickles."""

    name: str
    work: Callable[..., Any]


@dataclass(slots=True, eq=False, repr=False)
class Opaque:
    """A placeholder for an object of another program. Has only the object's name there."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(slots=True, eq=False, repr=False)
class Attributes:
    """An object with attributes, such as an `argparse.Namespace`. `name`: its class; `values`: a dict or a tuple."""

    name: str
    values: Any


def excerpt(value: Any) -> str:
    """Return an untrusted value for a message, short and on one line. Never formats a container: it may be infinite."""
    if isinstance(value, str) and value.isprintable() and len(value) <= 100:
        return repr(value)
    if value is None or isinstance(value, (str, int, float)):
        text = repr(value[:100] if isinstance(value, str) else value)
        return text if len(text) <= 110 else f"{text[:110]} ..."
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" else f"a {kind}"


def line(error: Exception) -> str:
    """Return an error for a message, on one line. The error may quote an untrusted file."""
    text = str(error)
    text = text if text.isprintable() and len(text) <= 300 else excerpt(text)
    return f"{type(error).__name__}: {text}" if type(error).__module__ == "builtins" else text  # such as KeyError


class UnpickleHooks(Protocol):
    """Resolves a pickle's references."""

    def named(self, full: str) -> Any:
        """Return the object for a full name. Raises RefusedPickle."""

    def outside(self, identity: Any) -> Any:
        """Return the object for a persistent identity."""


def load(code: bytes, surroundings: UnpickleHooks, scale: int = 1) -> Any:
    """Return the value of a pickle. `scale` multiplies the limits of bytes and steps.

    Raises RefusedPickle as `surroundings` does, and the exceptions of `FAULTS` for a malformed or too long pickle."""
    if len(code) > MOST_BYTES * scale:
        raise Malformed(f"its pickle has {len(code)} bytes; must be at most {MOST_BYTES * scale}")
    machine = _Machine(surroundings)
    for step, (opcode, argument, _) in zip(count(1), pickletools.genops(code), strict=False):
        if step > MOST_STEPS * scale:
            raise Malformed(f"its pickle has more than {MOST_STEPS * scale} steps")
        if opcode.name == "STOP":
            break
        if opcode.name in _ARGUMENTS:
            machine.stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif opcode.name in _CONSTANTS:
            machine.stack.append(_CONSTANTS[opcode.name])
        elif opcode.name in _EMPTY:
            machine.stack.append(_EMPTY[opcode.name]())
        elif (work := _STEPS.get(opcode.name)) is not None:
            work(machine, argument)
        elif opcode.name not in ("PROTO", "FRAME"):
            raise Malformed(f"its pickle has {opcode.name}, which torch.save does not write")
    return machine.stack.pop()


class _Machine:
    """The state of a pickle being read. Each method executes the opcodes that `_STEPS` maps to it."""

    def __init__(self, surroundings: UnpickleHooks):
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stack under each mark
        self._memo: dict[int, Any] = {}
        self._names: dict[str, Any] = {}
        self._surroundings = surroundings

    def mark(self, _: None) -> None:
        self._below.append(self.stack)
        self.stack = []

    def since_mark(self, _: None = None) -> list[Any]:
        found, self.stack = self.stack, self._below.pop()
        return found

    def pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    def memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def tuple_of(self, length: int) -> None:
        items = tuple(self.stack.pop() for _ in range(length))
        self.stack.append(items[::-1])

    def tuple_since_mark(self, _: None) -> None:
        items = tuple(self.since_mark())
        self.stack.append(items)

    def list_since_mark(self, _: None) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def append(self, _: None) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: None) -> None:
        self._extend(self.since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise Malformed(f"its pickle appends to {excerpt(target)}")

    def set_item(self, _: None) -> None:
        value = self.stack.pop()
        self._update([self.stack.pop(), value])

    def set_items(self, _: None) -> None:
        self._update(self.since_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[_key(key)] = value
        elif not isinstance(target, Opaque):
            raise Malformed(f"its pickle sets items of {excerpt(target)}")

    def name(self, pair: str) -> None:
        module, _, name = pair.partition(" ")
        self._name(module, name)

    def name_of_stack(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Malformed("its pickle has a name that is no text")
        if len(module) + len(name) > _LONGEST:
            raise Malformed(f"its pickle has the name {excerpt(name)}")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self._names:
            if len(self._names) == MOST_NAMES:
                raise Malformed(f"its pickle has more than {MOST_NAMES} names")
            self._names[full] = self._surroundings.named(full)
        self.stack.append(self._names[full])

    def call(self, _: None) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(called(function, arguments))

    def call_with_names(self, _: None) -> None:
        if not isinstance(named := self.stack.pop(), dict):
            raise Malformed(f"its pickle calls with {excerpt(named)}")
        self.call(None)

    def build(self, _: None) -> None:
        """Set the values of an `Attributes`. Ignores those of a dict or `Opaque`: an OrderedDict has a module's versions."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Attributes):
            if type(state) is not type(target.values):
                raise Malformed(f"its pickle has {excerpt(state)} as attributes")
            target.values = state
        elif not isinstance(target, (Opaque, dict)):
            raise Malformed(f"its pickle sets attributes of {excerpt(target)}")

    def stored_outside(self, _: None) -> None:
        self.stack.append(self._surroundings.outside(self.stack.pop()))


def called(function: Any, arguments: Any) -> Any:
    """Call `function` if it is a `Function`, and return the result. Raises Malformed otherwise."""
    if not isinstance(function, Function) or not isinstance(arguments, tuple):
        raise Malformed(f"its pickle calls {excerpt(function)}")
    return function.work(*arguments)


def _key(key: Any) -> Any:
    """Check and return a dict key. Raises Malformed for keys that allow slow lookups: a few with equal hashes take hours."""
    if isinstance(key, tuple):
        good = len(key) <= 8 and all(isinstance(item, str) and len(item) <= _LONGEST for item in key)
    elif isinstance(key, (str, bytes)):
        good = len(key) <= _LONGEST
    else:
        good = key is None or isinstance(key, (Opaque, Attributes)) or (isinstance(key, int) and abs(key) < 1 << 31)
    if not good:
        raise Malformed(f"its pickle has {excerpt(key)} as a key")
    return key


# Opcodes that torch.save writes with protocols 2 to 5: no LONG4, and no text opcodes except names.
_ARGUMENTS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# An empty set is a list: a set's items need not be hashable here.
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_DICT": dict}
_STEPS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.since_mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": _Machine.tuple_since_mark,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "FROZENSET": _Machine.list_since_mark,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "ADDITEMS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_of_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_with_names,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.stored_outside,
}
