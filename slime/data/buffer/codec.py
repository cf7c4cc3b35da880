"""Lossless encoding of sample values as bytes: msgpack, zstd-compressed if long.

Invariant: `unpack(pack(value)) == value`, types included: tuples stay tuples, arrays keep their dtype and shape. Long
lists of integers or floats become packed arrays (log-probs float32 wherever that is exact). Nothing is unpickled; a
value of an unsupported type raises a `UserError` that names it.
"""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import numpy as np
import zstandard

from slime.data.columns import PackedArray, exact_array
from slime.errors import UserError

ARRAY, SCALAR, NUMBERS, TUPLE, BIG_INT = 1, 2, 3, 4, 5
"""Msgpack extension types."""

_COMPRESS_FROM = 256
_LIST_FROM = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LEAST, _MOST = -(2**63), 2**64 - 1
_NUMBER_TYPES = {b"b": "<i1", b"i": "<i4", b"q": "<i8", b"f": "<f4", b"d": "<f8"}
_CODES = {np.dtype(code.decode()): code for code in _NUMBER_TYPES}


class Codec:
    """Thread-safe encoder and decoder."""

    def __init__(self) -> None:
        self._local = threading.local()

    def pack(self, value: object, where: str) -> bytes:
        """Encode `value`; `where` names it in the error if it contains an unsupported type."""
        content: bytes = msgpack.packb(_plain(value, where), unicode_errors="surrogatepass")
        if len(content) < _COMPRESS_FROM:
            return content
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=1)
        return bytes(self._local.compressor.compress(content))

    def unique_bytes(self, value: object, where: str) -> bytes:
        """Return bytes unique to the value, faster than `pack`; `unpack` does not read them."""
        try:
            content: bytes = msgpack.packb(
                value, default=lambda item: _plain(item, ""), strict_types=True, unicode_errors="surrogatepass"
            )
        except UserError:
            content = self.pack(value, where)  # raises an error that names the place
        return content

    def unpack(self, content: bytes) -> Any:
        """Invert `pack`."""
        if content.startswith(_ZSTD_MAGIC):
            content = zstandard.ZstdDecompressor().decompress(content)
        return _unpacked(content)


def _unpacked(content: bytes) -> Any:
    return msgpack.unpackb(
        content, ext_hook=_decoded, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(content)
    )


def _plain(value: object, where: str) -> object:
    """Convert `value` to the types that msgpack supports."""
    kind = type(value)
    if value is None or kind in (str, bool, float, bytes):
        return value
    if type(value) is list:
        return _plain_list(value, where)
    if type(value) is PackedArray:
        return _numbers(value.array)
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            if key is not None and not isinstance(key, str | int | float | bytes | tuple):
                raise UserError(
                    f"{where}: a key of type {type(key).__name__} cannot be kept in the journal; use text as keys"
                )
            plain_key = _plain(key, where)
            plain[plain_key] = _plain(item, f"{where}.{key}")  # type: ignore[str-bytes-safe]
        return plain
    if isinstance(value, tuple):
        return _extension(TUPLE, [_plain(item, where) for item in value])
    if isinstance(value, np.generic | np.ndarray):
        if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
            raise UserError(f"{where}: an array of {value.dtype} cannot be kept in the journal; keep numbers in arrays")
        if isinstance(value, np.generic):
            return _extension(SCALAR, [value.dtype.str, value.tobytes()])
        return _extension(ARRAY, [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()])
    if isinstance(value, int):
        return int(value) if _LEAST <= value <= _MOST else msgpack.ExtType(BIG_INT, str(int(value)).encode())
    if isinstance(value, list):
        return _plain_list(list(value), where)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UserError(f"{where}: a {kind.__name__} cannot be kept in the journal; keep only plain values in samples")


def _plain_list(value: list, where: str) -> object:
    numbers = exact_array(value, narrow=True) if len(value) >= _LIST_FROM else None
    return [_plain(item, where) for item in value] if numbers is None else _numbers(numbers)


def _numbers(numbers: np.ndarray) -> msgpack.ExtType:
    code = _CODES[numbers.dtype]
    return msgpack.ExtType(NUMBERS, code + numbers.astype(_NUMBER_TYPES[code], copy=False).tobytes())


def _extension(code: int, parts: list[object]) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(parts, unicode_errors="surrogatepass"))


def _decoded(code: int, data: bytes) -> object:
    if code == NUMBERS:
        return np.frombuffer(data, dtype=_NUMBER_TYPES[data[:1]], offset=1).tolist()
    if code == TUPLE:
        return tuple(_unpacked(data))
    if code == BIG_INT:
        return int(data)
    if code == SCALAR:
        dtype, content = msgpack.unpackb(data)
        return np.frombuffer(content, dtype=dtype)[0]
    if code == ARRAY:
        dtype, shape, content = msgpack.unpackb(data)
        return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    raise ValueError(f"unknown extension type {code}")
