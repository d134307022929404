"""msgpack for bulk and internal messages: numpy arrays travel as raw little-endian buffers and arrive as views.

An array is the msgpack extension `ARRAY`: one byte that indexes `_DTYPES`, then the buffer. There is no pickle: a message
can only hold the types of its Struct.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from runtime.errors import InvalidMessage

T = TypeVar("T")

ARRAY = 1
_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "|u1", "<i8", "<f8", "<u4"))
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if value.ndim != 1 or value.dtype not in _INDEX:
        raise InvalidMessage(f"cannot encode an array of dtype {value.dtype} and shape {value.shape}")
    return msgspec.msgpack.Ext(ARRAY, bytes((_INDEX[value.dtype],)) + value.tobytes())


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


def decode(type_: type[T], data: bytes | memoryview) -> T:
    """Decode `data` as `type_`; arrays are read-only views into `data`. Raises InvalidMessage, with the path of the fault."""
    try:
        return _decoder(type_).decode(data)  # type: ignore[arg-type]
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not a {getattr(type_, '__name__', type_)}: {error}") from error
