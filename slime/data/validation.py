"""Validates samples from outside (plugins, files, journal rows) before they are trained on.

Invariant: a sample that passes `check_sample` can be encoded, counted and converted to arrays by all later code; a
rejected one is described in one sentence. `check_sample` modifies nothing; `mend` resets the invalid fields of a
rejected sample. `keep_bad_sample` saves samples with NaN or infinite values in `<run folder>/not_finite/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import numpy as np

from slime.data.columns import PackedArray
from slime.data.counters import PrefixCacheInfo, SpecInfo
from slime.data.routed_experts import RouterDimensions
from slime.data.sample import Sample, SampleStatus
from slime.storage.json_types import JsonObject

_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str, list, dict, Real),
    "apply_chat_template_kwargs": (dict,),
    "response": (str,),
    "response_length": (Integral,),
    "weight_versions": (list,),
    "version_spans": (list,),
    "remove_sample": (bool, np.bool_),
    "status": (SampleStatus,),
    "failure": (str, _NONE),
    "metadata": (dict,),
    "generate_function_path": (str, _NONE),
    "custom_rm_path": (str, _NONE),
    "train_metadata": (dict, _NONE),
    "non_generation_time": (Real,),
    "spec_info": (SpecInfo,),
    "prefix_cache_info": (PrefixCacheInfo,),
}


_PLAIN: dict[type, type] = {Integral: int, Real: float}
_USUAL = {name: tuple(_PLAIN.get(kind, kind) for kind in kinds) for name, kinds in _TYPES.items()}
"""The usual exact types, for a fast check before the general one."""

FOLDER = "not_finite"


class BadSample(ValueError):
    """Raised for a sample with invalid or inconsistent fields."""


@dataclass(frozen=True)
class Bounds:
    """Limits that a run's model sets for its samples: the vocabulary size, and the router dimensions if routing is
    replayed. None: no limit."""

    vocab_size: int | None = None
    routed: RouterDimensions | None = None


UNBOUND = Bounds()


def check_sample(sample: Sample, bounds: Bounds = UNBOUND) -> None:
    """Raise `BadSample` for the first problem found in a sample."""
    for name, usual in _USUAL.items():
        value = getattr(sample, name)
        if type(value) not in usual and not _is_one_of(value, kinds := _TYPES[name]):
            raise BadSample(f"{name} is {value!r:.80}, expected {kinds[0].__name__.lower()}")
    if not all(isinstance(version, str) for version in sample.weight_versions):
        raise BadSample(f"weight_versions is {sample.weight_versions!r:.80}, expected a list of texts")
    for span in sample.version_spans:
        is_pair = isinstance(span, list | tuple) and len(span) == 2
        if not is_pair or not _is_one_of(span[0], (str, _NONE)) or not _is_one_of(span[1], (Integral,)):
            raise BadSample(f"version_spans has {span!r:.80}, expected [version, number of tokens]")
    token_ids = _column(sample, "tokens")
    if token_ids is None:
        raise BadSample("tokens is None: it must be a list of token ids")
    if len(token_ids):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise BadSample("tokens must be a list of whole numbers")
        low, high = _extent(sample, "tokens", token_ids)
        if low < 0 or (bounds.vocab_size is not None and high >= bounds.vocab_size):
            wrong = int(low if low < 0 else high)
            known = "" if bounds.vocab_size is None else f": the vocabulary has {bounds.vocab_size} ids"
            raise BadSample(f"tokens has {wrong}, which is not a token id{known}")
    total, length = len(token_ids), sample.response_length
    if not 0 <= length <= total:
        raise BadSample(f"response_length is {length}, but there are {total} tokens")
    if length and length == total:
        raise BadSample(f"all {total} tokens are the response: it needs at least one token of a prompt before it")
    mask = _numbers(sample, "loss_mask", length)
    if mask is not None and len(mask):
        low, high = _extent(sample, "loss_mask", mask)
        if not (low >= 0 and high <= 1):
            raise BadSample("loss_mask has entries that are not 0 or 1")
    _numbers(sample, "rollout_log_probs", length)
    _numbers(sample, "teacher_log_probs", length)
    ids, offsets = _column(sample, "rollout_top_p_token_ids"), _column(sample, "rollout_top_p_token_offsets")
    if (ids is None) != (offsets is None):
        raise BadSample("only one of rollout_top_p_token_ids and rollout_top_p_token_offsets is there")
    if ids is not None and offsets is not None and (len(offsets) != length + 1 or int(offsets[-1]) != len(ids)):
        raise BadSample(f"rollout_top_p_token_offsets do not span {length} response tokens and {len(ids)} ids")
    turn_rewards(sample)
    _check_experts(sample, total, mask, bounds.routed)


def turn_rewards(sample: Sample) -> list[tuple[int, int, float]]:
    """Return `metadata["turn_rewards"]`: `(start, stop, reward)` per turn, with positions in the response.

    A value of another form belongs to user code and is ignored.
    """
    given = sample.metadata.get("turn_rewards")
    if not isinstance(given, list) or not all(isinstance(one, list | tuple) and len(one) == 3 for one in given):
        return []
    for start, stop, reward in given:
        is_span = _is_one_of(start, (Integral,)) and _is_one_of(stop, (Integral,))
        if not is_span or not 0 <= start < stop <= sample.response_length:
            raise BadSample(f"turn_rewards has {start!r:.40} to {stop!r:.40}, which is not a part of the response")
        if not _is_one_of(reward, (Real,)) or not np.isfinite(reward):
            raise BadSample(f"turn_rewards has {reward!r:.80}, expected a finite number")
    return [(int(start), int(stop), float(reward)) for start, stop, reward in given]


def reset_invalid_fields(sample: Sample) -> None:
    """Reset fields of a wrong type to their default values."""
    blank = Sample()
    for name, kinds in _TYPES.items():
        if not _is_one_of(getattr(sample, name), kinds):
            setattr(sample, name, getattr(blank, name))


def _is_one_of(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _numbers(sample: Sample, name: str, length: int) -> np.ndarray | None:
    """Return a column after checking that it has one finite number per response token; None if it is absent."""
    values = _column(sample, name)
    if values is None:
        return None
    if values.ndim != 1 or len(values) != length:
        raise BadSample(f"{name} has {len(values) if values.ndim else 'no'} entries for {length} response tokens")
    if length and values.dtype.kind not in "iufb":
        raise BadSample(f"{name} must be a list of numbers")
    if length and values.dtype.kind == "f":
        held = vars(sample)[name]
        if isinstance(held, PackedArray):
            held.look()
            is_finite = bool(held.is_finite)
        else:
            is_finite = bool(np.isfinite(values).all())
        if not is_finite:
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise BadSample(f"{name}[{at}] is {values[at]}: it must be finite")
    return values


def _extent(sample: Sample, name: str, values: np.ndarray) -> tuple[float, float]:
    """Return minimum and maximum of a non-empty column; a packed column computes them only once."""
    held = vars(sample)[name]
    if isinstance(held, PackedArray) and values.dtype.kind == "i":
        held.look()
        if held.low is not None and held.high is not None:
            return held.low, held.high
    return values.min(), values.max()


def _check_experts(sample: Sample, total: int, mask: np.ndarray | None, routed: RouterDimensions | None) -> None:
    """Check that every token from which a trained token is predicted has a row; later rows may be missing."""
    experts = sample.rollout_routed_experts
    if experts is None and routed is None:
        return
    trained = np.arange(sample.response_length) if mask is None else np.flatnonzero(mask)
    needed = 0 if sample.remove_sample or not len(trained) else total - sample.response_length + int(trained[-1])
    if experts is None:
        ended = sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED)
        if routed is not None and needed and not ended:
            raise BadSample(
                "rollout_routed_experts is missing, but --use-rollout-routing-replay trains with it: requests need "
                '"return_routed_experts": true'
            )
        return
    if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu" or experts.ndim != 3:
        raise BadSample("rollout_routed_experts must be an array of whole numbers, tokens x layers x experts")
    if not needed <= len(experts) <= max(0, total - 1):
        raise BadSample(
            f"rollout_routed_experts must have {max(0, total - 1)} rows for {total} tokens, not {len(experts)}"
        )
    if experts.size and experts.min() < 0:
        raise BadSample(f"rollout_routed_experts has {int(experts.min())}, which is not an expert id")
    if routed is not None and (wrong := routed.mismatch_with(experts)) is not None:
        raise BadSample(f"rollout_routed_experts {wrong}")


def _column(sample: Sample, name: str) -> np.ndarray | None:
    try:
        column = sample.column_array(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadSample(f"{name} must be a list of numbers ({error})") from error
    if column is not None and column.ndim == 0:
        raise BadSample(f"{name} is {column.item()!r:.80}, expected a list")
    return column


def keep_bad_sample(run_dir: str | None, rollout_id: int | None, index: int | None, facts: JsonObject) -> Path:
    """Write the data of a sample to a JSON file for inspection, and return its path."""
    where = "sample" if rollout_id is None else f"rollout_{rollout_id}-sample"
    path = Path(run_dir or ".") / FOLDER / f"{where}_{index}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1, default=str))
    return path
