"""Encodes request bodies and decodes response bodies, with their numbers as arrays.

Invariant: the value of a body does not depend on the JSON parser. orjson parses plain JSON; what it refuses (NaN, lone
surrogates, broken UTF-8) goes to Python's parser, which decides.
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

from slime.data.columns import exact_floats, exact_ints
from slime.storage.json_types import JsonMapping

COLUMNS_HEADER = {"X-Slime-Columns": "1"}
"""Requests the tokens of a response as two columns from an embedded engine; other engines ignore it."""
_LOG_PROB, _TOKEN_ID = itemgetter(0), itemgetter(1)
_EMPTY = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


def parse_json(body: bytes) -> Any:
    """Parse a body; raises `ValueError` if it is not JSON. Broken UTF-8 is read with replacement characters."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body.decode(errors="replace"))


def request_body(payload: JsonMapping) -> bytes:
    """Encode a request as JSON: its token ids with orjson, the rest with Python's `json`.

    Token ids may be an array, which is the fastest.
    """
    ids = payload.get("input_ids")
    if isinstance(ids, list | np.ndarray):
        try:
            written = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:
            return json.dumps(payload).encode()
        rest = json.dumps({name: value for name, value in payload.items() if name != "input_ids"}).encode()
        return b'{"input_ids": ' + written + (b"}" if rest == b"{}" else b", " + rest[1:])
    return json.dumps(payload).encode()


def token_columns(entries: object) -> tuple[np.ndarray, np.ndarray] | None:
    """(ids, log-probs) of a list of `[finite log-prob, token id, ...]`, or of the columns that replace it; None if
    `entries` has another form."""
    if isinstance(entries, dict):
        # {"ids": base64 of int32, "logprobs": base64 of float32 or float64}, both little-endian
        try:
            received_ids = np.frombuffer(base64.b64decode(entries["ids"], validate=True), dtype="<i4")
            raw = base64.b64decode(entries["logprobs"], validate=True)
            received = np.frombuffer(raw, dtype="<f4" if len(raw) == 4 * len(received_ids) else "<f8")
        except (KeyError, TypeError, ValueError, binascii.Error):
            return None
        if len(received) != len(received_ids) or not np.isfinite(received).all():
            return None
        return received_ids.astype(np.int32), exact_floats(received.astype(np.float64))
    if not isinstance(entries, list):
        return None
    if not entries:
        return _EMPTY
    try:
        log_probs, ids = list(map(_LOG_PROB, entries)), list(map(_TOKEN_ID, entries))
    except (IndexError, KeyError, TypeError):
        return None
    if not set(map(type, log_probs)) <= {float, int} or set(map(type, ids)) != {int}:
        return None
    try:
        values = np.frombuffer(array("d", log_probs))
        numbers: np.ndarray
        try:
            numbers = np.frombuffer(array("i", ids), dtype=np.int32)
        except OverflowError:
            numbers = np.frombuffer(array("q", ids), dtype=np.int64)
    except OverflowError:
        return None
    return (exact_ints(numbers), exact_floats(values)) if np.isfinite(values).all() else None
