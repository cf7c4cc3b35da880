"""From `Sample`s to the arrays that training needs.

Invariant: position i of every list speaks about sample i, in the order the rollout handed them over. A sample that
failed or was aborted unscored stays in the lists (it is counted) with an all-zero loss mask, a normalised reward of
zero and no say in its group's statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, islice
from operator import itemgetter
from typing import Any

import numpy as np

from slime.cluster.rpc.messages import Joined
from slime.config import Config
from slime.data.columns import Packed, mask_of
from slime.data.sample import Sample, SampleStatus
from slime.data.validation import keep_bad_sample
from slime.errors import UserError
from slime.train.samples.batch_columns import Held, first_not_finite, is_trained_on, mask_totals
from slime.train.samples.reward_shaping import placed_turn_rewards, shape_rewards

_FAILED, _ABORTED, _TRUNCATED = Sample.Status.FAILED, Sample.Status.ABORTED, Sample.Status.TRUNCATED
BY_TOKEN = ("tokens", "loss_masks", "rollout_log_probs", "teacher_log_probs", "turn_rewards", "rollout_routed_experts")


@dataclass
class TrainBatch:
    """Per-sample lists; a column of log-probs is None unless every sample that is trained on has them.

    Arrays are those of the samples wherever they can be, in their narrow types, and not to be written.
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
    train_metadata: list[dict[str, Any] | None]
    version_spans: list[list[list[Any]]] | None = None  # runs of tokens by the weights that sampled them
    turn_rewards: list[np.ndarray] | None = None  # rewards of single turns, each at a token of its turn
    rollout_routed_experts: list[np.ndarray] | None = None  # [rows, layers, experts per token], where they are replayed
    mask_totals: list[int] | None = None  # the whole part of each mask's sum, where it is known
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns of a user's own conversion

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
        """How many tokens of each sample are trained on."""
        return mask_totals(self.loss_masks) if self.mask_totals is None else self.mask_totals

    @property
    def trainable(self) -> list[bool]:
        """Which samples have a token that is trained on; the others cost no forward pass."""
        pairs = zip(self.trained_tokens, self.loss_masks, strict=True)
        return [count > 0 or is_trained_on(mask) for count, mask in pairs]

    def select(self, positions: Sequence[int]) -> TrainBatch:
        """The rows of these positions, in their order."""
        pick = _picker(positions)
        lists: dict[str, Any] = {name: None if column is None else pick(column) for name, column in self._columns()}
        return TrainBatch(**lists, extra={name: pick(column) for name, column in self.extra.items()})

    def followed_by(self, other: TrainBatch) -> TrainBatch:
        """This batch's rows, then the other's; a column that one of them lacks is dropped.

        Turn rewards are 0 there, and where nobody recorded what routers chose, they choose again.
        """
        if (self.turn_rewards is None) != (other.turn_rewards is None):
            return self._with_turn_rewards().followed_by(other._with_turn_rewards())
        if (self.rollout_routed_experts is None) != (other.rollout_routed_experts is None):
            return self._with_experts_like(other).followed_by(other._with_experts_like(self))
        theirs = dict(other._columns())
        lists = {
            name: None if column is None or theirs[name] is None else column + theirs[name]
            for name, column in self._columns()
        }
        extra = {name: column + other.extra[name] for name, column in self.extra.items() if name in other.extra}
        return TrainBatch(**lists, extra=extra)  # type: ignore[arg-type]

    def _with_turn_rewards(self) -> TrainBatch:
        if self.turn_rewards is not None:
            return self
        none = [np.zeros(length, dtype=np.float32) for length in self.response_lengths]
        return dataclasses.replace(self, turn_rewards=none)

    def _with_experts_like(self, other: TrainBatch) -> TrainBatch:
        if self.rollout_routed_experts is not None:
            return self
        none = [rows[:0] for rows in (other.rollout_routed_experts or ())[:1]] * len(self)
        return dataclasses.replace(self, rollout_routed_experts=none)

    def _columns(self) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "extra")

    def to_message(self) -> dict[str, Any]:
        """For other processes: the tokens of all samples end to end, one array a column instead of one a sample.

        Nothing is copied before it is sent; what is all one number, as most masks are, takes no room at all.
        """
        columns = self.to_dict()
        for name in BY_TOKEN:
            if columns[name] is not None:
                columns[name] = _column_message(columns[name], may_be_constant=name == "loss_masks")
        return columns

    @classmethod
    def from_message(cls, columns: dict[str, Any]) -> TrainBatch:
        """The inverse of `to_message`; the samples' arrays are views of the columns', or what a column lists."""
        parted = dict(columns)
        for name in BY_TOKEN:
            if isinstance(parted[name], dict):
                parted[name] = _column_parts(**parted[name])
        return cls(**parted)

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainBatch:
        return cls(**values)


def _picker(positions: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    if len(positions) < 2:  # of one an `itemgetter` gives no tuple, and of none there is no such thing
        return lambda column: [column[position] for position in positions]
    pick = itemgetter(*positions)
    return lambda column: list(pick(column))


def flatten_samples(nested: Iterable[Any]) -> list[Sample]:
    """Groups, and groups of fanned-out rollouts, to one list; samples without ids get those that the nesting implies.

    Who is in one list is in one group, and who is in one list inside a group is of one rollout. Ids that a sample has
    are left to it. A sample that stands by itself, in no list, says nothing about others.
    """
    items = list(nested)
    if all(type(item) is list and set(map(type, item)) == {Sample} for item in items):  # as they nearly always are
        flat: list[Sample] = list(chain.from_iterable(items))
        if None not in [sample.group_index for sample in flat]:
            return flat
    groups = [_rollouts_of(item) for item in items]
    flat = [sample for rollouts in groups for rollout in rollouts for sample in rollout]
    new_group = _first_unused([sample.group_index for sample in flat])
    new_rollout = _first_unused([sample.rollout_id for sample in flat])
    for rollouts in groups:
        members = [sample for rollout in rollouts for sample in rollout]
        if len(members) > 1:
            _share_id(members, "group_index", next(new_group))
        for rollout in rollouts:
            if len(rollout) > 1:
                _share_id(rollout, "rollout_id", next(new_rollout))
    return flat


def _rollouts_of(item: Any) -> list[list[Sample]]:
    """The rollouts of one group, each as the list of its samples."""
    if not isinstance(item, list | tuple):
        return [[item]]
    return [_leaves(member) if isinstance(member, list | tuple) else [member] for member in item]


def _leaves(nested: Iterable[Any]) -> list[Sample]:
    return [leaf for item in nested for leaf in (_leaves(item) if isinstance(item, list | tuple) else [item])]


def _first_unused(ids: Sequence[int | None]) -> Iterator[int]:
    return count(max([value for value in ids if value is not None], default=-1) + 1)


def _share_id(together: Sequence[Sample], name: str, new: int) -> None:
    """Give the id that the others of a list have, or a new one, to those that have none."""
    values = [getattr(sample, name) for sample in together]
    if None not in values:
        return
    known = set(values) - {None}
    shared = known.pop() if len(known) == 1 else new
    for sample in together:
        if getattr(sample, name) is None:
            setattr(sample, name, shared)


def make_train_batch(config: Config, samples: Sequence[Sample]) -> TrainBatch:
    """The batch of one rollout."""
    held = Held.by(samples)
    excluded = [_is_excluded(*one) for one in zip(held.status, held.reward, held.response_length, strict=True)]
    groups, rollout_ids = _identities(held.group_index, held.rollout_id)
    if config.loss_type == "sft_loss":
        raw_reward, rewards = [0.0] * len(samples), [0.0] * len(samples)
    else:
        raw_reward, rewards = shape_rewards(config, samples, groups, rollout_ids, excluded)
    masks, totals = _loss_masks(samples, held, excluded)
    trained = [total > 0 or is_trained_on(mask) for total, mask in zip(totals, masks, strict=True)]
    mask_sums: dict[int, int] = {}
    for rollout_id, total in zip(rollout_ids, totals, strict=True):
        mask_sums[rollout_id] = mask_sums.get(rollout_id, 0) + total
    columns = _LogProbs(samples, masks, trained, config.output_dir)
    return TrainBatch(
        tokens=[
            column.array if type(column) is Packed else sample.token_array()
            for column, sample in zip(held.tokens, samples, strict=True)
        ],
        response_lengths=list(map(len, masks)),
        loss_masks=masks,
        rewards=[0.0 if skip else float(reward) for reward, skip in zip(rewards, excluded, strict=True)],
        raw_reward=raw_reward,
        truncated=[1 if one is _TRUNCATED else 0 for one in held.status],
        excluded=excluded,
        sample_indices=_complete_ids(held.index),
        group_indices=groups,
        rollout_ids=rollout_ids,
        rollout_mask_sums=[mask_sums[rollout_id] for rollout_id in rollout_ids],
        rollout_log_probs=columns.of("rollout_log_probs", held.rollout_log_probs),
        teacher_log_probs=columns.of("teacher_log_probs", held.teacher_log_probs),
        train_metadata=list(held.train_metadata),
        version_spans=[sample.version_spans for sample in samples] if config.keep_old_actor else None,
        turn_rewards=placed_turn_rewards(config, samples, masks, excluded),
        rollout_routed_experts=_routed_experts(samples, trained) if config.use_rollout_routing_replay else None,
        mask_totals=totals,
    )


def batch_metrics(batch: TrainBatch, *, with_rewards: bool = True) -> dict[str, float]:
    """Means of the per-sample numbers under `rollout/`; excluded samples are counted, not averaged in.

    Of rewards it is the mean over rollouts, however many samples one became.
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


def _is_excluded(status: SampleStatus, reward: Any, response_length: int) -> bool:
    return status is _FAILED or (reward is None and (status is _ABORTED or response_length == 0))


def _loss_masks(samples: Sequence[Sample], held: Held, excluded: Sequence[bool]) -> tuple[list[np.ndarray], list[int]]:
    """The masks, and the whole part of each one's sum, which most samples know of theirs."""
    masks, totals, unknown = [], [], []
    columns = zip(held.loss_mask, held.tokens, held.response_length, held.remove_sample, excluded, strict=True)
    for place, (mask, tokens, length, is_removed, skip) in enumerate(columns):
        known = type(mask) is Packed and mask.total is not None and type(tokens) is Packed
        if known and mask.length == length < tokens.length and not skip and not is_removed:
            masks.append(mask.array)
            totals.append(mask.total)
        else:
            masks.append(_loss_mask(samples[place], skip))
            totals.append(0)
            unknown.append(place)
    for place, total in zip(unknown, mask_totals([masks[place] for place in unknown]), strict=True):
        totals[place] = total
    return masks, totals


def _loss_mask(sample: Sample, excluded: bool) -> np.ndarray:
    length = sample.response_length
    if excluded:
        return mask_of(0, length if 0 <= length < sample.total_length else 0)
    if not 0 <= length <= sample.total_length:
        raise UserError(f"sample {sample.index} says response_length {length} but has {sample.total_length} tokens")
    if length and length == sample.total_length:
        raise UserError(f"sample {sample.index} has no prompt token before its response: give it at least one")
    if sample.remove_sample:
        return mask_of(0, length)
    mask = sample.loss_mask_array()
    if mask is None:
        return mask_of(1, length)
    if len(mask) != length:
        raise UserError(f"sample {sample.index} has {len(mask)} loss-mask entries for {length} tokens")
    return mask if mask.dtype.kind == "i" and mask.itemsize == 1 else mask.astype(np.float32)


def _column_message(parts: Sequence[np.ndarray], *, may_be_constant: bool) -> dict[str, Any]:
    """`lengths` of all parts, `constant`: those of one number only, by place, and the `values` of the others."""
    constant = {}
    if may_be_constant:
        constant = {place: part.item(0) for place, part in enumerate(parts) if part.strides == (0,) and len(part)}
    dtype = np.result_type(*{part.dtype for part in parts}) if parts else None
    others = [part for place, part in enumerate(parts) if place not in constant] if constant else parts
    return {"lengths": list(map(len, parts)), "constant": constant, "values": Joined(others, dtype)}


def _column_parts(lengths: Sequence[int], constant: dict[int, Any], values: np.ndarray | Joined) -> list[np.ndarray]:
    """The inverse; parts are views of `values`."""
    whole = values.whole() if isinstance(values, Joined) else values
    real = [length for place, length in enumerate(lengths) if place not in constant]
    if len(whole) != sum(real):
        raise ValueError(f"a column of {len(whole)} numbers does not have parts of {sum(real)}")
    ends = accumulate(real)
    parts = [whole[end - length : end] for end, length in zip(ends, real, strict=True)]
    return with_constants(parts, lengths, constant, whole.dtype)


def with_constants(
    parts: Sequence[np.ndarray], lengths: Sequence[int], constant: dict[int, Any], dtype: np.dtype
) -> list[np.ndarray]:
    """All parts of a column in their order: those of one number only, in no memory, among the others."""
    if not constant:
        return list(parts)
    fills = {value: np.broadcast_to(dtype.type(value), (max(lengths),)) for value in set(constant.values())}
    others = iter(parts)
    return [
        fills[constant[place]][:length] if place in constant else next(others) for place, length in enumerate(lengths)
    ]


def _identities(
    named_groups: Sequence[int | None], named_rollouts: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """(group, rollout) of each sample: who shares both is of one rollout, which is in one group.

    Samples without a group are in that of their rollout; the same rollout id in another group is another rollout.
    """
    new_group, new_rollout = _first_unused(named_groups), _first_unused(named_rollouts)
    if None not in named_groups and named_rollouts.count(None) == len(named_rollouts):  # as they nearly always are
        return list(named_groups), list(islice(new_rollout, len(named_rollouts)))  # type: ignore[arg-type]
    groups: list[int] = []
    rollouts: list[int] = []
    group_of: dict[int, int] = {}  # of rollouts that name no group
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


def _complete_ids(ids: Sequence[int | None]) -> list[int]:
    """Samples without an id get a fresh one each, so that they share nothing with others."""
    fresh = _first_unused(ids)
    return [next(fresh) if value is None else value for value in ids]


class _LogProbs:
    """Makes columns of log-probs: an array per sample."""

    def __init__(
        self, samples: Sequence[Sample], masks: Sequence[np.ndarray], trained: Sequence[bool], run_dir: str | None
    ) -> None:
        self._samples, self._masks, self._trained, self._run_dir = samples, masks, trained, run_dir

    def of(self, name: str, held: Sequence[Any]) -> list[np.ndarray] | None:
        """The column, or None when a sample that is trained on has none.

        One that is not trained on (it failed, or was removed) has zeros where it lacks them: the others keep theirs.
        """
        if held.count(None) == len(held) and any(self._trained):
            return None
        columns, unknown = [], []
        for place, (own, mask, is_trained) in enumerate(zip(held, self._masks, self._trained, strict=True)):
            if type(own) is Packed and own.is_finite and own.length == len(mask) and own.array.itemsize == 4:
                columns.append(own.array)
                continue
            if own is None and is_trained:
                return None
            columns.append(self._array(name, place))
            if is_trained:
                unknown.append(place)
        if (bad := first_not_finite([columns[place] for place in unknown])) is not None:
            _blame(self._samples[unknown[bad]], name, columns[unknown[bad]], self._run_dir)
        return columns

    def _array(self, name: str, place: int) -> np.ndarray:
        sample, mask = self._samples[place], self._masks[place]
        values = sample.column_array(name)
        column = np.asarray([] if values is None else values, dtype=np.float32)
        if self._trained[place]:
            if len(column) != sample.response_length:
                kind = name.replace("_log_probs", " log-probs")
                raise UserError(f"sample {sample.index} has {len(column)} {kind} for {sample.response_length} tokens")
        elif len(column) != len(mask) or not np.isfinite(column).all():
            column = np.zeros(len(mask), dtype=np.float32)
        return column


def _routed_experts(samples: Sequence[Sample], trained: Sequence[bool]) -> list[np.ndarray]:
    """One array per sample; of a sample that is not trained on they may be missing."""
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


def _blame(sample: Sample, name: str, column: np.ndarray, run_dir: str | None) -> None:
    at = int(np.flatnonzero(~np.isfinite(column))[0])
    path = keep_bad_sample(run_dir, None, sample.index, sample.to_dict())
    raise UserError(f"sample {sample.index} has {name}[{at}] = {column[at]}: log-probs must be finite; it is in {path}")
