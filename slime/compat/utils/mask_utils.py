"""Loss masks of conversations, under the import path of slime plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slime.data.turn_mask import mask_turns


class MultiTurnLossMaskGenerator:
    """Makes token ids and loss masks of conversations from the chat template; `tokenizer_type` has no effect."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of the conversation, and a mask with 1 for each token of the assistant."""
        masked = mask_turns(self.tokenizer, messages, tools=tools)
        return masked.token_ids, masked.loss_mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return, for each mask, the number of tokens from the first trained one to the end."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the texts that are trained on, one for each run of ones."""
        stretches = groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in stretch]) for bit, stretch in stretches if bit]
