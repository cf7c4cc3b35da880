"""Prompt files, under the import path of slime plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime.data.prompts import PromptDataset, short_enough
from slime.data.readers import Row, open_rows
from slime.data.sample import Sample
from slime.utils.processing_utils import build_processor_kwargs

__all__ = ["Dataset", "filter_long_prompt", "read_file"]


class Dataset(PromptDataset):
    """All prompts of a file; `samples` has the order of `shuffle(epoch)`, `origin_samples` that of the file."""

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            path,
            tokenizer=tokenizer,
            input_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key,
            multimodal_keys=multimodal_keys,
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
            max_prompt_len=max_length,
            seed=seed,
        )


def read_file(path: str) -> Iterator[Row]:
    """Yield the rows of a .jsonl or .parquet file; `path@[a:b]` selects a slice."""
    for located in open_rows(path, columns=set()).rows_from(0):
        yield located.row


def filter_long_prompt(
    origin_samples: Sequence[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Return the samples of at most `max_length` tokens, in their order.

    The length of messages is that of the rendered template; prompts with images are measured by the processor.
    """
    if max_length is None:
        return list(origin_samples)
    with_media = [processor is not None and any((one.multimodal_inputs or {}).values()) for one in origin_samples]
    text_only = [one for one, has_media in zip(origin_samples, with_media, strict=True) if not has_media]
    kept = {id(one) for one in short_enough(text_only, tokenizer, max_length)}
    for one, has_media in zip(origin_samples, with_media, strict=True):
        if has_media:
            inputs = build_processor_kwargs(one.multimodal_inputs)
            if len(processor(text=one.prompt, **inputs)["input_ids"][0]) <= max_length:
                kept.add(id(one))
    return [one for one in origin_samples if id(one) in kept]
