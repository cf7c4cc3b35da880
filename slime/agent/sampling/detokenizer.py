"""The text of token ids as they come.

Invariant: the pieces, put together, are the text of all ids but the silent ones; a piece never ends within a character.
The cost of a piece is that of its own ids and of a few before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MOST_PENDING = 16
"""Tokens that may wait for a character to be finished; bytes that are no text come out as they are behind that."""


class Detokenizer:
    """Ids in, text out; `silent` ids (those that end a turn) have none."""

    def __init__(self, tokenizer: Any, silent: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._told: list[int] = []
        """Those told last, which give the decoder its context."""
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now that these ids came too."""
        self._pending += [token for token in ids if token not in self._silent]
        if not self._pending:
            return ""
        new = self._new_text()
        if new.endswith(_HALF_A_CHARACTER) and len(self._pending) <= _MOST_PENDING:
            return ""
        return self._tell(new)

    def end(self) -> str:
        """What was held back."""
        return self._tell(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = len(self._decode(self._told))
        return self._decode(self._told + self._pending)[before:]

    def _tell(self, new: str) -> str:
        if new:
            self._told, self._pending = self._pending[-_MOST_PENDING:], []
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
