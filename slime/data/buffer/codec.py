"""Values of samples as bytes and back, exactly.

Invariant: `unpack(pack(value)) == value`, types included: tuples stay tuples, arrays keep their dtype and shape. Long
lists of whole numbers or floats become packed arrays (log-probs float32 wherever that loses nothing). Nothing is ever
unpickled; a value that is not plain is a `UserError` which names it.

The bytes are msgpack, inside a zstd frame when there are many of them.
"""

from __future__ import annotations

import threading
from array import array
from typing import Any

import msgpack
import numpy as np
import zstandard

from slime.data.columns import Packed
from slime.errors import UserError

ARRAY, SCALAR, NUMBERS, TUPLE, BIG_INT = 1, 2, 3, 4, 5
"""Extension types of the msgpack."""

_COMPRESS_FROM = 256
_LIST_FROM = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LEAST, _MOST = -(2**63), 2**64 - 1
_NUMBER_TYPES = {b"b": "<i1", b"i": "<i4", b"q": "<i8", b"f": "<f4", b"d": "<f8"}
_CODES = {"int8": b"b", "int32": b"i", "int64": b"q", "float32": b"f", "float64": b"d"}


class Codec:
    """Packs and unpacks; usable from several threads."""

    def __init__(self) -> None:
        self._local = threading.local()

    def pack(self, value: Any, where: str) -> bytes:
        """`value` as bytes; `where` names it when it holds something that cannot be kept."""
        content: bytes = msgpack.packb(_plain(value, where), unicode_errors="surrogatepass")
        if len(content) < _COMPRESS_FROM:
            return content
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=1)
        return bytes(self._local.compressor.compress(content))

    def told_apart(self, value: Any, where: str) -> bytes:
        """Bytes that no other value has, quickly; they are not for `unpack`."""
        try:
            content: bytes = msgpack.packb(value, default=_unusual, strict_types=True, unicode_errors="surrogatepass")
        except UserError:
            content = self.pack(value, where)  # which says where it is
        return content

    def unpack(self, content: bytes) -> Any:
        """The inverse of `pack`."""
        if content.startswith(_ZSTD_MAGIC):
            content = zstandard.ZstdDecompressor().decompress(content)
        return _unpacked(content)


def _unpacked(content: bytes) -> Any:
    return msgpack.unpackb(
        content, ext_hook=_decoded, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(content)
    )


def _plain(value: Any, where: str) -> Any:
    """`value` in the types that msgpack knows."""
    kind = type(value)
    if value is None or kind in (str, bool, float, bytes):
        return value
    if kind is list:
        return _plain_list(value, where)
    if kind is Packed:
        return _packed_column(value.array)
    if isinstance(value, dict):
        return {_plain_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return _extension(TUPLE, [_plain(item, where) for item in value])
    if isinstance(value, np.generic | np.ndarray):
        return _plain_array(value, where)
    if isinstance(value, int):
        return int(value) if _LEAST <= value <= _MOST else msgpack.ExtType(BIG_INT, str(int(value)).encode())
    if isinstance(value, list):
        return _plain_list(list(value), where)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UserError(f"{where}: a {kind.__name__} cannot be kept in the journal; keep only plain values in samples")


def _unusual(value: Any) -> Any:
    return _plain(value, "")


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float | bytes | tuple) or key is None:
        return _plain(key, where)
    raise UserError(f"{where}: a key of type {type(key).__name__} cannot be kept in the journal; use text as keys")


def _plain_list(value: list[Any], where: str) -> Any:
    if len(value) >= _LIST_FROM:
        kinds = set(map(type, value))
        if kinds == {int}:
            packed = _packed_ints(value)
            if packed is not None:
                return packed
        elif kinds == {float}:
            return _packed_floats(value)
    return [_plain(item, where) for item in value]


def _packed_ints(value: list[int]) -> msgpack.ExtType | None:
    for code in (b"b", b"i", b"q"):
        try:
            numbers = array(code.decode(), value)
        except OverflowError:
            continue
        return msgpack.ExtType(NUMBERS, code + _little_endian(numbers, code))
    return None


def _packed_column(numbers: np.ndarray) -> msgpack.ExtType:
    code = _CODES[numbers.dtype.name]
    return msgpack.ExtType(NUMBERS, code + numbers.astype(_NUMBER_TYPES[code], copy=False).tobytes())


def _packed_floats(value: list[float]) -> msgpack.ExtType:
    numbers = array("d", value)
    wide = np.frombuffer(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
    if bool((narrow == wide).all()) or np.array_equal(narrow.astype(np.float64), wide, equal_nan=True):
        return msgpack.ExtType(NUMBERS, b"f" + narrow.tobytes())
    return msgpack.ExtType(NUMBERS, b"d" + _little_endian(numbers, b"d"))


def _little_endian(numbers: array[Any], code: bytes) -> bytes:
    return np.frombuffer(numbers, dtype=numbers.typecode).astype(_NUMBER_TYPES[code], copy=False).tobytes()


def _plain_array(value: np.generic | np.ndarray, where: str) -> msgpack.ExtType:
    if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
        raise UserError(f"{where}: an array of {value.dtype} cannot be kept in the journal; keep numbers in arrays")
    if isinstance(value, np.generic):
        return _extension(SCALAR, [value.dtype.str, value.tobytes()])
    return _extension(ARRAY, [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()])


def _extension(code: int, parts: list[Any]) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(parts, unicode_errors="surrogatepass"))


def _decoded(code: int, data: bytes) -> Any:
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
