"""`PromptDataset`: a sequence of `Sample` prototypes read from a prompt file.

Invariant: with and without streaming, inline or with workers, the same file and flags give the same prototypes in the
same order. Without streaming, over-long prompts are dropped before indices are assigned; with streaming, they are
detected on access.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, overload

import numpy as np

from slime.data.prompt_rows import BuiltPrototype, LabelUse, LocatedRow, PrototypeBuilder
from slime.data.readers import file_bytes, open_rows
from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ROWS_PER_CHUNK = 512


class StreamedPromptTooLong(UserError):
    """Raised on access to a streamed prompt longer than the limit; the data source skips and counts it."""


class PromptDataset:
    """Prompts from a JSONL or Parquet file, or from a slice `path@[a:b]` of one.

    Prompts longer than `max_prompt_len` are dropped. `max_context` is the model's limit: a prompt that leaves no room
    for a response within it is an error unless `max_prompt_len` drops it. `origin_samples` are in file order, `samples`
    in the order of the last `shuffle`; callers may replace `samples`.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        input_key: str | None = None,
        label_key: str | None = None,
        label_use: LabelUse = "any",
        metadata_key: str | None = "metadata",
        tool_key: str | None = "tools",
        multimodal_keys: Mapping[str, str] | None = None,
        prompt_suffix: str | None = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: JsonObject | None = None,
        max_prompt_len: int | None = None,
        max_context: int | None = None,
        any_prompt: bool = False,
        num_workers: int = 0,
        streaming: bool = False,
        seed: int = 42,
    ) -> None:
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        self.max_prompt_len = max_prompt_len
        self.max_context = max_context
        self.streaming = streaming
        limits = [limit for limit in (max_prompt_len, max_context) if limit is not None]
        builder = PrototypeBuilder(
            tokenizer=tokenizer,
            input_key=input_key,
            label_key=label_key,
            label_use=label_use,
            metadata_key=metadata_key,
            tool_key=tool_key,
            multimodal_keys=dict(multimodal_keys or {}),
            prompt_suffix=prompt_suffix,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=dict(apply_chat_template_kwargs or {}),
            shortest_limit=min(limits, default=None),
            any_prompt=any_prompt,
        )
        self._rows = open_rows(path, columns=builder.columns)
        self._builder = builder.with_prompt_key(LocatedRow(self._rows.where(0), self._rows[0]))
        self._position_of_row: np.ndarray | None = None
        self.origin_samples: Sequence[Sample]
        if streaming:
            self._builder.build(LocatedRow(self._rows.where(0), self._rows[0]))
            self.origin_samples = StreamedSamples(self, np.arange(len(self._rows)))
        else:
            self.origin_samples = self._read_whole(num_workers)
        self.samples = self.origin_samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        """Return the prototype at `index`; without streaming it is shared, so copy it before changing it."""
        return self.samples[index]

    def shuffle(self, new_epoch_id: int) -> None:
        """Put `samples` into the order of an epoch; a repeated call keeps samples that callers replaced since."""
        if self.epoch_id == new_epoch_id:
            return
        order = self.epoch_order(self.seed, new_epoch_id, True)
        self.samples = (
            StreamedSamples(self, order) if self.streaming else [self.origin_samples[index] for index in order]
        )
        self.epoch_id = new_epoch_id

    def read_row(self, row: int) -> Sample:
        """Read one row of the file and build its prototype."""
        built = self._builder.build_all([LocatedRow(self._rows.where(row), self._rows[row])])[0]
        if not self._fits(built):
            raise StreamedPromptTooLong(
                f"{built.where}: the prompt has {built.prompt_tokens} tokens, more than {self.max_prompt_len}"
            )
        return built.sample

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all prototypes, skipping over-long ones."""
        for index in range(len(self)):
            try:
                yield self[index]
            except StreamedPromptTooLong:
                continue

    def epoch_order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the indices of one epoch: file order, or a permutation seeded with `seed + epoch`."""
        row_count = len(self._rows)
        order = np.random.default_rng(seed + epoch).permutation(row_count) if shuffle else np.arange(row_count)
        if self._position_of_row is None:
            return order
        positions = self._position_of_row[order]
        return positions[positions >= 0]

    def identity(self) -> JsonObject:
        """Return the facts that must be unchanged for a saved position in this dataset to be valid."""
        return {"path": self.path, "length": len(self.origin_samples), "file_bytes": file_bytes(self.path)}

    def _read_whole(self, num_workers: int) -> list[Sample]:
        kept: list[Sample] = []
        positions = np.full(len(self._rows), -1, dtype=np.int64)
        for row, built in enumerate(self._build_all(num_workers)):
            if self._fits(built):
                positions[row] = len(kept)
                kept.append(built.sample)
        dropped = len(positions) - len(kept)
        if dropped == len(positions):
            raise UserError(
                f"prompt data {self.path}: all {dropped} prompts are longer than {self.max_prompt_len} tokens; "
                "raise --rollout-max-prompt-len"
            )
        if dropped:
            self._position_of_row = positions
            log_dropped(dropped, len(positions), self.max_prompt_len)
        return kept

    def _build_all(self, num_workers: int) -> Iterator[BuiltPrototype]:
        rows = self._rows.rows_from(0)
        chunks = iter(lambda: list(islice(rows, _ROWS_PER_CHUNK)), [])
        if num_workers <= 0:
            for chunk in chunks:
                yield from self._builder.build_all(chunk)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=_start_worker, initargs=(self._builder,)
        ) as pool:
            for built in pool.map(_build_in_worker, chunks):
                yield from built

    def _fits(self, built: BuiltPrototype) -> bool:
        count = built.prompt_tokens
        if count is None:
            return True
        if self.max_prompt_len is not None and count > self.max_prompt_len:
            return False
        if self.max_context is not None and count >= self.max_context:
            raise UserError(
                f"{built.where}: the prompt has {count} tokens and leaves no room for a response in the model's "
                f"context of {self.max_context}; shorten it, or drop such prompts with --rollout-max-prompt-len"
            )
        return True


class StreamedSamples(Sequence[Sample]):
    """Prototypes of a streamed file in a given order; each is read on access."""

    def __init__(self, dataset: PromptDataset, order: np.ndarray) -> None:
        self._dataset = dataset
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> StreamedSamples: ...

    def __getitem__(self, index: int | slice) -> Sample | StreamedSamples:
        if isinstance(index, slice):
            return StreamedSamples(self._dataset, self._order[index])
        return self._dataset.read_row(int(self._order[index]))


def short_enough(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, max_prompt_len: int | None
) -> list[Sample]:
    """Return, in order, the samples whose prompts have at most `max_prompt_len` tokens; logs the number dropped."""
    builder = PrototypeBuilder(tokenizer=tokenizer, input_key="", shortest_limit=max_prompt_len)
    counts = builder.prompt_tokens(samples)
    kept = [
        sample
        for sample, count in zip(samples, counts, strict=True)
        if count is None or max_prompt_len is None or count <= max_prompt_len
    ]
    if len(kept) < len(samples):
        log_dropped(len(samples) - len(kept), len(samples), max_prompt_len)
    return kept


def log_dropped(dropped: int, total: int, limit: int | None) -> None:
    """Log the number of prompts that a length limit dropped."""
    logger.warning("dropped %d of %d prompts longer than %s tokens", dropped, total, limit)


# Set once when a worker process starts: sending the tokenizer with every chunk costs more than the work itself.
_worker_builder: PrototypeBuilder


def _start_worker(builder: PrototypeBuilder) -> None:
    global _worker_builder
    _worker_builder = builder


def _build_in_worker(chunk: list[LocatedRow]) -> list[BuiltPrototype]:
    return _worker_builder.build_all(chunk)
