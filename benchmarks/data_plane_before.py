"""The data plane as it was while samples were Python lists (commit 7894217): what `data_plane.py` compares with.

Nothing of the project uses this. Each function is the old code, with what a benchmark does not need left out.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zstandard


@dataclass
class ListSample:
    """The columns of a sample as lists."""

    index: int = 0
    group_index: int = 0
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float = 0.0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    version_spans: list[list[Any]] = field(default_factory=list)

    def append(self, tokens: Sequence[int], log_probs: Sequence[float], text: str, version: str) -> None:
        new_tokens = [int(token) for token in tokens]
        new_log_probs = [float(value) for value in log_probs]
        self.version_spans = [*self.version_spans, [version, len(new_tokens)]]
        self.tokens = [*self.tokens, *new_tokens]
        self.response_length += len(new_tokens)
        self.loss_mask = list(self.loss_mask) + [int(i >= 0) for i in range(len(new_tokens))]
        self.rollout_log_probs = list(self.rollout_log_probs) + new_log_probs
        self.response += text


def make_answer(body: bytes, sample: ListSample) -> ListSample:
    """From the body of an engine's answer to the columns of a sample."""
    answer = json.loads(body.decode(errors="replace"))
    meta_info = answer["meta_info"]
    pairs = _pairs(meta_info["output_token_logprobs"])
    if pairs is None or answer["output_ids"] != [token_id for _, token_id in pairs]:
        raise ValueError("malformed")
    ids, log_probs = [token_id for _, token_id in pairs], [log_prob for log_prob, _ in pairs]
    sample.append(ids, log_probs, answer["text"], meta_info["weight_version"])
    return sample


def _pairs(entries: object) -> list[tuple[float, int]] | None:
    if not isinstance(entries, list):
        return None
    pairs: list[tuple[float, int]] = []
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) < 2:
            return None
        log_prob, token_id = entry[0], entry[1]
        if isinstance(log_prob, bool) or not isinstance(log_prob, int | float) or not math.isfinite(log_prob):
            return None
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            return None
        pairs.append((float(log_prob), token_id))
    return pairs


def journal_payload(sample: ListSample) -> bytes:
    """The columns of a sample as the journal's bytes; all of it happened on the event loop."""
    value = {
        "tokens": _packed(sample.tokens),
        "loss_mask": _packed(sample.loss_mask),
        "rollout_log_probs": _packed_floats(sample.rollout_log_probs),
        "version_spans": sample.version_spans,
    }
    return bytes(zstandard.ZstdCompressor(level=1).compress(msgpack.packb(value)))


def _packed(value: list[int]) -> msgpack.ExtType | None:
    if set(map(type, value)) != {int}:
        return None
    for code in ("b", "i", "q"):
        try:
            return msgpack.ExtType(3, code.encode() + array(code, value).tobytes())
        except OverflowError:
            continue
    return None


def _packed_floats(value: list[float]) -> msgpack.ExtType | None:
    if set(map(type, value)) != {float}:
        return None
    wide = np.frombuffer(array("d", value))
    narrow = wide.astype("<f4")
    return msgpack.ExtType(3, b"f" + narrow.tobytes()) if bool((narrow == wide).all()) else None


def refuse_stale(ready: list[list[ListSample]], rollout_id: int, bound: int) -> list[list[ListSample]]:
    """The groups that are too old; every arrival looked at every token of every group that was ready."""
    return [group for group in ready if rollout_id - _group_version(group) > bound]


def _group_version(group: list[ListSample]) -> int:
    return min(_oldest(sample) for sample in group)


def _oldest(sample: ListSample) -> int:
    oldest, position = [], 0
    for version, length in sample.version_spans:
        if any(sample.loss_mask[position : position + length]):
            oldest.append(int(version))
        position += length
    return min(oldest)


def arrays(samples: Sequence[ListSample]) -> dict[str, list[np.ndarray]]:
    """The columns of a batch, as training gets them."""
    return {
        "tokens": [np.asarray(sample.tokens, dtype=np.int64) for sample in samples],
        "loss_masks": [np.asarray(sample.loss_mask, dtype=np.float32) for sample in samples],
        "rollout_log_probs": [np.asarray(sample.rollout_log_probs, dtype=np.float32) for sample in samples],
    }


def share_of_rank(columns: dict[str, list[np.ndarray]], steps: Sequence[Any], rank: int) -> dict[str, Any]:
    """What one rank was told of the steps; the sum over the whole step was taken once for every rank."""
    positions = [position for step in steps for members in step.ranks[rank] for position in members]
    local = {position: place for place, position in enumerate(positions)}
    masks = columns["loss_masks"]
    plans = [
        {
            "num_tokens": int(sum(masks[position].sum() for position in step.positions)),
            "micro_batches": [[local[position] for position in members] for members in step.ranks[rank]],
        }
        for step in steps
    ]
    return {"batch": {name: [column[p] for p in positions] for name, column in columns.items()}, "steps": plans}
