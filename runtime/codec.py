"""msgpack for bulk and internal messages: numpy arrays travel as raw little-endian buffers and arrive as views.

An array is the msgpack extension `ARRAY`: one byte that indexes `_DTYPES`, then the buffer. There is no pickle: a message
can only hold the types of its Struct.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from runtime.errors import InvalidMessage

T = TypeVar("T")

ARRAY = 1
_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "|u1", "<i8", "<f8", "<u4", "<u2"))
_ARRAY32, _BIN32, _EMPTY = b"\xdd", b"\xc6", b"\xc4\x00"  # https://github.com/msgpack/msgpack/blob/master/spec.md
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if value.ndim != 1 or value.dtype not in _INDEX:
        raise InvalidMessage(f"cannot encode an array of dtype {value.dtype} and shape {value.shape}")
    return msgspec.msgpack.Ext(ARRAY, b"".join((bytes((_INDEX[value.dtype],)), np.ascontiguousarray(value).data)))


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY or not data.nbytes or data[0] >= len(_DTYPES):
        raise InvalidMessage(f"unknown extension {code} in a message")
    dtype = _DTYPES[data[0]]
    if (data.nbytes - 1) % dtype.itemsize:
        raise InvalidMessage(f"an array of {dtype} has {data.nbytes - 1} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype, offset=1)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


@cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, ext_hook=_decode_array)


def encode(message: Any) -> bytes:
    """msgpack bytes of a Struct or plain container. Raises InvalidMessage for an array not 1-D or of an unlisted dtype."""
    return _encoder.encode(message)


SMALL = 1 << 13  # bytes of a payload that is copied: parts of a message cost more
Parts = list[bytes | memoryview]
"""Bytes that follow one another, each where it lies."""
Body = bytes | Parts
"""A message, in parts where it is large."""


def encode_body(message: Any) -> Body:
    """What `encode` gives, without a copy of large payloads: of a Struct whose last field is `payload`, or of a list of such.
    Raises as `encode` does."""
    if len(getattr(message, "payload", b"")) > SMALL:
        head = encode(replace(message, payload=b"")).removesuffix(_EMPTY)
        return [head + _BIN32 + len(message.payload).to_bytes(4, "big"), message.payload]
    if isinstance(message, list) and any(len(getattr(each, "payload", b"")) > SMALL for each in message):
        bodies = [encode_body(each) for each in message]
        return [_ARRAY32 + len(message).to_bytes(4, "big"), *(part for body in bodies for part in parts_of(body))]
    return _encoder.encode(message)


def parts_of(body: Body) -> Parts:
    return [body] if isinstance(body, bytes) else body


def decode(type_: type[T], data: bytes | memoryview) -> T:
    """Decode `data` as `type_`; arrays are read-only views into `data`. Raises InvalidMessage, with the path of the fault."""
    try:
        return _decoder(type_).decode(data)  # type: ignore[arg-type]
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not a {getattr(type_, '__name__', type_)}: {error}") from error
