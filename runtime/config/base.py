"""What sections are made of: the base of them all, and types that carry bounds and units.

A unit is an annotation of the JSON Schema, and the column of the reference (`launcher.config_reference`). `...Or0`: 0 stands
for something else, which the key's meaning says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

UNIT = "x-unit"


def in_unit(unit: str, **bounds: Any) -> Meta:
    return Meta(extra_json_schema={UNIT: unit}, **bounds)


Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]
PositiveRate = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
DType = Literal["auto", "float32", "bfloat16"]
GroupBackend = Literal["auto", "gloo", "nccl", "hccl"]

Seconds = Annotated[float, in_unit("seconds", gt=0)]
SecondsOr0 = Annotated[float, in_unit("seconds", ge=0)]
HoursOr0 = Annotated[float, in_unit("hours", ge=0)]
Bytes = Annotated[int, in_unit("bytes", ge=1)]
Tokens = Annotated[int, in_unit("tokens", ge=1)]
TokensOr0 = Annotated[int, in_unit("tokens", ge=0)]
Prompts = Annotated[int, in_unit("prompts", ge=1)]
PromptsOr0 = Annotated[int, in_unit("prompts", ge=0)]
Samples = Annotated[int, in_unit("samples", ge=1)]
SamplesOr0 = Annotated[int, in_unit("samples", ge=0)]
Problems = Annotated[int, in_unit("problems", ge=1)]
ProblemsOr0 = Annotated[int, in_unit("problems", ge=0)]
Steps = Annotated[int, in_unit("steps", ge=1)]
StepsOr0 = Annotated[int, in_unit("steps", ge=0)]
Passes = Annotated[int, in_unit("passes", ge=1)]
PassesOr0 = Annotated[int, in_unit("passes", ge=0)]
Versions = Annotated[int, in_unit("versions", ge=1)]
VersionsOr0 = Annotated[int, in_unit("versions", ge=0)]
Processes = Annotated[int, in_unit("processes", ge=1)]
Layers = Annotated[int, in_unit("layers", ge=1)]


def computed_dtype(dtype: DType, policy: DType, on_cpus: bool) -> str:
    """Return the name of the dtype that a process computes in. "auto" is `policy`, the configured `model.dtype`; and if that is
    "auto" too, float32 on CPUs and bfloat16 on accelerators."""
    chosen = (each for each in (dtype, policy) if each != "auto")
    return next(chosen, "float32" if on_cpus else "bfloat16")


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: immutable, and unknown keys are errors. The string under a field is its meaning."""


class FromEnvironment(Section, frozen=True, rename={"variable": "from"}):
    """`{from: NAME}`: what the environment variable NAME has on the machine where the process runs. So a secret is given."""

    variable: str
    """Its name."""


class RemoteServer(Section, frozen=True, kw_only=True):
    """A gRPC server of your own, in any language, that Sluice calls."""

    address: str
    """`HOST:PORT`."""
    ca: str = ""
    """TLS: a file with the authorities of which the server's certificate may be, PEM; `system`: those that gRPC comes with.
    Empty: plain text."""
    token: FromEnvironment | None = None
    """The variable of the calling service's environment that each call carries, as `authorization: Bearer VALUE`. Off this
    machine with TLS alone. Null: none."""
    plaintext: bool = False
    """True allows an address that is not this machine's without `ca`: nothing is encrypted."""
