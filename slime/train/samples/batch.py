"""Converts `Sample`s to the arrays that training needs.

Invariant: position i of every list belongs to sample i, in the order of the rollout. A sample that failed or was
aborted without a score stays in the lists (it is counted) with an all-zero loss mask and a normalised reward of zero,
and it does not affect its group's statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any

import numpy as np

from slime.cluster.rpc.messages import ConcatenatedArrays
from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.data.columns import PackedArray, constant_mask
from slime.data.counters import VersionRuns
from slime.data.routed_experts import narrow_expert_ids
from slime.data.sample import Sample
from slime.data.validation import keep_bad_sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject
from slime.train.samples.batch_columns import SampleFields, first_not_finite, is_trained_on, mask_totals
from slime.train.samples.reward_shaping import placed_turn_rewards, shape_rewards

_FAILED, _ABORTED, _TRUNCATED = Sample.Status.FAILED, Sample.Status.ABORTED, Sample.Status.TRUNCATED
BY_TOKEN = ("tokens", "loss_masks", "rollout_log_probs", "teacher_log_probs", "turn_rewards", "rollout_routed_experts")


@dataclass
class TrainBatch:
    """Columns of a batch, a list entry per sample; log-prob columns are None unless all trained samples have them.

    Arrays are those of the samples where possible, in their narrow dtypes, and must not be written.
    """

    tokens: list[np.ndarray]
    response_lengths: list[int]
    loss_masks: list[np.ndarray]
    rewards: list[float]
    raw_reward: list[float]
    truncated: list[int]
    excluded: list[bool]
    sample_indices: list[int]
    group_indices: list[int]
    rollout_ids: list[int]
    rollout_mask_sums: list[int]
    rollout_log_probs: list[np.ndarray] | None
    teacher_log_probs: list[np.ndarray] | None
    train_metadata: list[JsonObject | None]
    version_spans: list[VersionRuns] | None = None  # runs of tokens by the weights that sampled them
    turn_rewards: list[np.ndarray] | None = None  # rewards of single turns, each at a token of its turn
    rollout_routed_experts: list[np.ndarray] | None = None  # [rows, layers, experts per token], if they are replayed
    mask_totals: list[int] | None = None  # the integer part of each mask's sum, if it is known
    extra: dict[str, list[object]] = field(default_factory=dict)  # columns of a user's conversion

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        return list(map(len, self.tokens))

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(tokens) - own for tokens, own in zip(self.tokens, self.response_lengths, strict=True)]

    @property
    def trained_tokens(self) -> list[int]:
        """The number of trained tokens of each sample."""
        return mask_totals(self.loss_masks) if self.mask_totals is None else self.mask_totals

    @property
    def trainable(self) -> list[bool]:
        """For each sample, whether it has a trained token; the others need no forward pass."""
        pairs = zip(self.trained_tokens, self.loss_masks, strict=True)
        return [count > 0 or is_trained_on(mask) for count, mask in pairs]

    def select(self, positions: Sequence[int]) -> TrainBatch:
        """Return the rows at these positions, in their order."""
        getter = itemgetter(*positions) if len(positions) > 1 else None  # it returns a tuple only for two or more

        def pick(column: list[Any]) -> list[Any]:
            return list(getter(column)) if getter is not None else [column[position] for position in positions]

        columns = self.to_dict()
        extra = {name: pick(column) for name, column in columns.pop("extra").items()}
        lists: dict[str, Any] = {name: None if column is None else pick(column) for name, column in columns.items()}
        return TrainBatch(**lists, extra=extra)

    def followed_by(self, other: TrainBatch) -> TrainBatch:
        """Concatenate this batch's rows and the other's; a column that one of them lacks is dropped.

        Missing turn rewards become 0 instead, and missing expert choices become empty, so that routers choose again.
        """
        mine, theirs = self.to_dict(), other.to_dict()
        for one, two in ((mine, theirs), (theirs, mine)):
            if one["turn_rewards"] is None and two["turn_rewards"] is not None:
                one["turn_rewards"] = [np.zeros(length, dtype=np.float32) for length in one["response_lengths"]]
            if one["rollout_routed_experts"] is None and two["rollout_routed_experts"] is not None:
                empty = [rows[:0] for rows in two["rollout_routed_experts"][:1]]
                one["rollout_routed_experts"] = empty * len(one["tokens"])
        extra, others = mine.pop("extra"), theirs.pop("extra")
        lists: dict[str, Any] = {
            name: None if column is None or theirs[name] is None else column + theirs[name]
            for name, column in mine.items()
        }
        return TrainBatch(**lists, extra={name: extra[name] + others[name] for name in extra if name in others})

    def to_message(self) -> JsonObject:
        """Convert to a message for other processes, with one array per column instead of one per sample.

        Nothing is copied before it is sent; arrays whose numbers are all equal, as in most masks, take no space.
        `open_share` (`dp_shards.py`) inverts it.
        """
        columns = self.to_dict()
        for name in BY_TOKEN:
            if (parts := columns[name]) is not None:
                constant: dict[int, float] = {}
                if name == "loss_masks":
                    constant = {i: part.item(0) for i, part in enumerate(parts) if part.strides == (0,) and len(part)}
                dtype = np.result_type(*{part.dtype for part in parts}) if parts else None
                others = [part for place, part in enumerate(parts) if place not in constant] if constant else parts
                joined = ConcatenatedArrays(others, dtype)
                columns[name] = {"lengths": list(map(len, parts)), "constant": constant, "values": joined}
        return columns

    def to_dict(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def flatten_samples(nested: Iterable[Any]) -> list[Sample]:
    """Flatten groups, and groups of fanned-out rollouts; samples without ids get the ids that the nesting implies.

    Samples in one list are in one group, and samples in one list inside a group belong to one rollout. Existing ids are
    kept. A sample that is in no list implies nothing about others.
    """
    items = list(nested)
    if all(type(item) is list and set(map(type, item)) == {Sample} for item in items):  # the common case
        flat: list[Sample] = list(chain.from_iterable(items))
        if None not in [sample.group_index for sample in flat]:
            return flat
    groups: list[list[list[Sample]]] = [  # groups of rollouts of samples
        [_leaves(member) if isinstance(member, list | tuple) else [member] for member in item]
        if isinstance(item, list | tuple)
        else [[item]]
        for item in items
    ]
    flat = [sample for rollouts in groups for rollout in rollouts for sample in rollout]
    new_group = _first_unused([sample.group_index for sample in flat])
    new_rollout = _first_unused([sample.rollout_id for sample in flat])
    for rollouts in groups:
        members = [sample for rollout in rollouts for sample in rollout]
        if len(members) > 1:
            _fill_ids(members, "group_index", next(new_group))
        for rollout in rollouts:
            if len(rollout) > 1:
                _fill_ids(rollout, "rollout_id", next(new_rollout))
    return flat


def _leaves(nested: Iterable[Any]) -> list[Sample]:
    """Flatten nested lists of samples."""
    return [leaf for item in nested for leaf in (_leaves(item) if isinstance(item, list | tuple) else [item])]


def _first_unused(ids: Sequence[int | None]) -> Iterator[int]:
    """Count from the first id above all of these."""
    return count(max([value for value in ids if value is not None], default=-1) + 1)


def _fill_ids(together: Sequence[Sample], name: str, new: int) -> None:
    """Give samples of a list without an id the id of the others, or a new one."""
    values = [getattr(sample, name) for sample in together]
    if None not in values:
        return
    known = set(values) - {None}
    shared = known.pop() if len(known) == 1 else new
    for sample in together:
        if getattr(sample, name) is None:
            setattr(sample, name, shared)


def make_train_batch(config: Config, samples: Sequence[Sample]) -> TrainBatch:
    """Make the batch of one rollout."""
    held = SampleFields.by(samples)
    outcomes = zip(held.status, held.reward, held.response_length, strict=True)
    excluded = [
        status is _FAILED or (reward is None and (status is _ABORTED or length == 0))
        for status, reward, length in outcomes
    ]
    groups, rollout_ids = _group_and_rollout_ids(held.group_index, held.rollout_id)
    if config.loss_type == "sft_loss":
        raw_reward, rewards = [0.0] * len(samples), [0.0] * len(samples)
    else:
        raw_reward, rewards = shape_rewards(config, samples, groups, rollout_ids, excluded)
    masks, totals = _loss_masks(samples, held, excluded)
    trained = [total > 0 or is_trained_on(mask) for total, mask in zip(totals, masks, strict=True)]
    mask_sums: dict[int, int] = {}
    for rollout_id, total in zip(rollout_ids, totals, strict=True):
        mask_sums[rollout_id] = mask_sums.get(rollout_id, 0) + total
    log_probs = partial(_log_prob_column, samples, masks, trained, config.output_dir)
    fresh_index = _first_unused(held.index)  # samples without an index get one each
    return TrainBatch(
        tokens=[
            column.array if type(column) is PackedArray else sample.token_array()
            for column, sample in zip(held.tokens, samples, strict=True)
        ],
        response_lengths=list(map(len, masks)),
        loss_masks=masks,
        rewards=[0.0 if skip else float(reward) for reward, skip in zip(rewards, excluded, strict=True)],
        raw_reward=raw_reward,
        truncated=[1 if one is _TRUNCATED else 0 for one in held.status],
        excluded=excluded,
        sample_indices=[next(fresh_index) if index is None else index for index in held.index],
        group_indices=groups,
        rollout_ids=rollout_ids,
        rollout_mask_sums=[mask_sums[rollout_id] for rollout_id in rollout_ids],
        rollout_log_probs=log_probs("rollout_log_probs", held.rollout_log_probs),
        teacher_log_probs=log_probs("teacher_log_probs", held.teacher_log_probs),
        train_metadata=list(held.train_metadata),
        version_spans=[sample.version_spans for sample in samples] if config.keep_old_actor else None,
        turn_rewards=placed_turn_rewards(config, samples, masks, excluded),
        rollout_routed_experts=_routed_experts(samples, trained) if config.use_rollout_routing_replay else None,
        mask_totals=totals,
    )


CONVERT = "--custom-convert-samples-to-train-data-path"
CONVERTED = ("tokens", "response_lengths", "rewards")
"""Columns that a user's conversion must return."""


def make_custom_batch(config: Config, samples: Sequence[Sample]) -> TrainBatch:
    """Make the batch of one rollout with the user's conversion function, whose result is checked.

    Missing columns are filled in as if every sample were alone in its group and rollout; unknown columns are passed to
    custom losses and hooks under their own names.
    """
    path = config.custom_convert_samples_to_train_data_path
    assert path is not None
    hook = load_function(path, what=CONVERT, params=("args", "samples"))
    found = hook(plugin_args(config), list(samples))
    if not isinstance(found, Mapping):
        raise UserError(f"{CONVERT}: {path} returned a {type(found).__name__}; it must return a dict of lists")
    for name in CONVERTED:
        if name not in found:
            raise UserError(f"{CONVERT}: {path} returned no {name!r}; it must return at least {', '.join(CONVERTED)}")
    count = len(found["tokens"])
    for name, column in found.items():
        if len(column) != count:
            raise UserError(f"{CONVERT}: {path} returned {len(column)} entries of {name!r} and {count} of 'tokens'")
    if config.use_rollout_routing_replay and found.get("rollout_routed_experts") is None:
        raise UserError(
            f"{CONVERT}: {path} returned no 'rollout_routed_experts': --use-rollout-routing-replay needs them"
        )
    made: dict[str, list[Any]] = {name: list(column) for name, column in found.items()}
    tokens = [np.asarray(ids, dtype=np.int64) for ids in made.pop("tokens")]
    lengths = [int(length) for length in made.pop("response_lengths")]
    rewards = [float(reward) for reward in made.pop("rewards")]
    masks = made.pop("loss_masks", None) or [np.ones(length) for length in lengths]
    loss_masks = [np.asarray(mask, dtype=np.float32) for mask in masks]
    rollout_ids = [int(i) for i in made.pop("rollout_ids", range(count))]
    sums: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0) + int(mask.sum())
    experts = made.pop("rollout_routed_experts", None)
    log_probs = {
        name: [np.asarray(values, dtype=np.float32) for values in made.pop(name)] if name in made else None
        for name in ("rollout_log_probs", "teacher_log_probs")
    }
    made.pop("rollout_mask_sums", None)  # computed here
    made.pop("total_lengths", None)
    return TrainBatch(
        tokens=tokens,
        response_lengths=lengths,
        loss_masks=loss_masks,
        rewards=rewards,
        raw_reward=[float(reward) for reward in made.pop("raw_reward", rewards)],
        truncated=[int(flag) for flag in made.pop("truncated", [0] * count)],
        excluded=[bool(flag) for flag in made.pop("excluded", [False] * count)],
        sample_indices=[int(i) for i in made.pop("sample_indices", range(count))],
        group_indices=[int(i) for i in made.pop("group_indices", range(count))],
        rollout_ids=rollout_ids,
        rollout_mask_sums=[sums[rollout_id] for rollout_id in rollout_ids],
        rollout_log_probs=log_probs["rollout_log_probs"],
        teacher_log_probs=log_probs["teacher_log_probs"],
        train_metadata=made.pop("train_metadata", [None] * count),
        rollout_routed_experts=None if experts is None else [narrow_expert_ids(np.asarray(rows)) for rows in experts],
        extra=dict(made),
    )


def batch_metrics(batch: TrainBatch, *, with_rewards: bool = True) -> dict[str, float]:
    """Compute means of the per-sample numbers under `rollout/`; excluded samples are counted, not averaged.

    Rewards are averaged over rollouts, independently of the number of samples per rollout.
    """
    kept = np.flatnonzero(~np.array(batch.excluded, dtype=bool))
    columns: dict[str, Sequence[float]] = {
        "truncated": batch.truncated,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
    }
    metrics: dict[str, float] = {}
    if len(kept):
        metrics |= {f"rollout/{name}": float(np.mean(np.array(column)[kept])) for name, column in columns.items()}
    if with_rewards and len(kept):
        _, rollout, siblings = np.unique(np.array(batch.rollout_ids)[kept], return_inverse=True, return_counts=True)
        weights = 1 / siblings[rollout]
        for name, column in (("rewards", batch.rewards), ("raw_reward", batch.raw_reward)):
            metrics[f"rollout/{name}"] = float(np.average(np.array(column)[kept], weights=weights))
    metrics["rollout/excluded_samples"] = float(len(batch) - len(kept))
    return metrics


def _loss_masks(
    samples: Sequence[Sample], held: SampleFields, excluded: Sequence[bool]
) -> tuple[list[np.ndarray], list[int]]:
    """Return the checked masks and the integer parts of their sums, which most samples already have.

    A mask is all zeros if the sample is excluded or removed.
    """
    masks, totals, unknown = [], [], []
    columns = zip(held.loss_mask, held.tokens, held.response_length, held.remove_sample, excluded, strict=True)
    for place, (own, tokens, length, is_removed, skip) in enumerate(columns):
        known = type(own) is PackedArray and own.total is not None and type(tokens) is PackedArray
        if known and own.length == length < tokens.length and not skip and not is_removed:
            masks.append(own.array)
            totals.append(own.total)
            continue
        sample, size = samples[place], samples[place].total_length
        mask: np.ndarray | None
        if skip:
            mask = constant_mask(0, length if 0 <= length < size else 0)
        elif not 0 <= length <= size:
            raise UserError(f"sample {sample.index} has response_length {length} but {size} tokens")
        elif length and length == size:
            raise UserError(f"sample {sample.index} has no prompt token before its response: give it at least one")
        elif is_removed:
            mask = constant_mask(0, length)
        elif (mask := sample.loss_mask_array()) is None:
            mask = constant_mask(1, length)
        elif len(mask) != length:
            raise UserError(f"sample {sample.index} has {len(mask)} loss-mask entries for {length} tokens")
        elif mask.dtype.kind != "i" or mask.itemsize != 1:
            mask = mask.astype(np.float32)
        masks.append(mask)
        totals.append(0)
        unknown.append(place)
    for place, total in zip(unknown, mask_totals([masks[place] for place in unknown]), strict=True):
        totals[place] = total
    return masks, totals


def _group_and_rollout_ids(
    named_groups: Sequence[int | None], named_rollouts: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """Return the groups and the rollouts of the samples, so that every rollout is in one group.

    A sample without a group is in the group of its rollout; the same rollout id in another group is another rollout.
    """
    new_group, new_rollout = _first_unused(named_groups), _first_unused(named_rollouts)
    if None not in named_groups and named_rollouts.count(None) == len(named_rollouts):  # the common case
        return list(named_groups), list(islice(new_rollout, len(named_rollouts)))  # type: ignore[arg-type]
    groups: list[int] = []
    rollouts: list[int] = []
    group_of: dict[int, int] = {}  # of rollouts without a group
    renamed: dict[tuple[int, int], int] = {}
    owner: dict[int, int] = {}
    for group, rollout in zip(named_groups, named_rollouts, strict=True):
        if group is None:
            group = next(new_group) if rollout is None else group_of.setdefault(rollout, next(new_group))
        if rollout is None:
            rollout = next(new_rollout)
        elif owner.setdefault(rollout, group) != group:
            rollout = renamed.setdefault((group, rollout), next(new_rollout))
        groups.append(group)
        rollouts.append(rollout)
    return groups, rollouts


def _log_prob_column(
    samples: Sequence[Sample],
    masks: Sequence[np.ndarray],
    trained: Sequence[bool],
    run_dir: str | None,
    name: str,
    held: Sequence[object],
) -> list[np.ndarray] | None:
    """Make a column of log-probs, a float32 array per sample; return None if a trained sample has no values.

    A sample that is not trained on (it failed, or was removed) gets zeros if it has none, or unusable ones.
    """
    if held.count(None) == len(held) and any(trained):
        return None
    columns, unknown = [], []
    for place, (own, mask, is_trained) in enumerate(zip(held, masks, trained, strict=True)):
        if type(own) is PackedArray and own.is_finite and own.length == len(mask) and own.array.itemsize == 4:
            columns.append(own.array)
            continue
        if own is None and is_trained:
            return None
        sample = samples[place]
        values = sample.column_array(name)
        column = np.asarray([] if values is None else values, dtype=np.float32)
        if is_trained:
            unknown.append(place)
            if len(column) != sample.response_length:
                kind = name.replace("_log_probs", " log-probs")
                raise UserError(f"sample {sample.index} has {len(column)} {kind} for {sample.response_length} tokens")
        elif len(column) != len(mask) or not np.isfinite(column).all():
            column = np.zeros(len(mask), dtype=np.float32)
        columns.append(column)
    if (bad := first_not_finite([columns[place] for place in unknown])) is not None:
        sample, column = samples[unknown[bad]], columns[unknown[bad]]
        at = int(np.flatnonzero(~np.isfinite(column))[0])
        path = keep_bad_sample(run_dir, None, sample.index, sample.to_dict())
        raise UserError(f"sample {sample.index} has {name}[{at}] = {column[at]}: log-probs must be finite; see {path}")
    return columns


def _routed_experts(samples: Sequence[Sample], trained: Sequence[bool]) -> list[np.ndarray]:
    """Return the expert choices, an array per sample; they may be missing in samples that are not trained on."""
    columns, shape = [], (0, 0)
    for sample, is_trained in zip(samples, trained, strict=True):
        experts = sample.rollout_routed_experts
        if experts is None and is_trained:
            raise UserError(
                f"sample {sample.index} has no rollout_routed_experts, which --use-rollout-routing-replay trains with: "
                'its generate function must send "return_routed_experts": true'
            )
        columns.append(experts)
        shape = shape if experts is None else experts.shape[1:]
    return [np.zeros((0, *shape), np.uint8) if experts is None else experts for experts in columns]
