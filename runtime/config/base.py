"""The base of all sections, and types with bounds and units. A unit is an annotation of the JSON Schema, and a column of the
reference (docs/configuration-reference.md). `...Or0`: 0 has a meaning of its own, which the key's description gives."""

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
HoursOr0 = Annotated[float, in_unit("hours", ge=0)]
Bytes = Annotated[int, in_unit("bytes", ge=1)]
BytesOr0 = Annotated[int, in_unit("bytes", ge=0)]
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
VersionsOr0 = Annotated[int, in_unit("versions", ge=0)]
Processes = Annotated[int, in_unit("processes", ge=1)]
Layers = Annotated[int, in_unit("layers", ge=1)]


def computed_dtype(dtype: DType, policy: DType, on_cpus: bool) -> str:
    """Return the name of a compute dtype. "auto": that of `policy`; if that is "auto" too, float32 on CPUs, else bfloat16."""
    chosen = (each for each in (dtype, policy) if each != "auto")
    return next(chosen, "float32" if on_cpus else "bfloat16")


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section. Immutable; unknown keys are errors. The string under a field is its description."""


class FromEnvironment(Section, frozen=True, rename={"variable": "from"}):
    """`{from: NAME}`: the environment variable NAME of the machine where the process runs. The form of secrets."""

    variable: str
    """Name of the variable."""


class RemoteServer(Section, frozen=True, kw_only=True):
    """Your own gRPC server, in any language, that Sluice calls."""

    address: str
    """`HOST:PORT`."""
    ca: str = ""
    """TLS: a PEM file with the authorities of the server's certificate. `system`: gRPC's own authorities. Empty: plain text."""
    token: FromEnvironment | None = None
    """The variable of the calling service's environment with the token of each call, as `authorization: Bearer VALUE`. To other
    machines only with TLS. Null: none."""
    plaintext: bool = False
    """`true` allows an address of another machine without `ca`: nothing is encrypted."""
