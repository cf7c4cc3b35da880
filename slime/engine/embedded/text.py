"""Text of a growing token sequence, for streams and stop strings.

Invariant: `text` is a prefix of what decoding all tokens at once gives; a trailing piece that may still change with
the next token (an unfinished UTF-8 character) is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Decodes token by token and looks for stop strings in what is new."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._offset = 0  # tokens before it are settled in `text`
        self._context = 0  # tokens between it and `_offset` give the decoder its context
        self.text = ""
        self._searched = 0
        self._longest = max((len(s) for s in self._stops), default=0)

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string that is now complete, if any."""
        self._ids.append(token)
        settled = self._decode(self._ids[self._context : self._offset])
        window = self._decode(self._ids[self._context :])
        if len(window) > len(settled) and not window.endswith("\ufffd"):
            self.text += window[len(settled) :]
            self._context, self._offset = self._offset, len(self._ids)
        return self._find_stop()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def _find_stop(self) -> str | None:
        start = max(0, self._searched - self._longest + 1)
        self._searched = len(self.text)
        found = [(self.text.find(s, start), s) for s in self._stops]
        hits = [(at, s) for at, s in found if at >= 0]
        return min(hits)[1] if hits else None


def final_text(
    tokenizer: Any, ids: Sequence[int], matched: int | str | None, *, skip_special_tokens: bool, keep_stop: bool
) -> str:
    """Text of a finished response; what stopped it is cut off unless `keep_stop`."""
    ids = list(ids)
    if isinstance(matched, int) and not keep_stop and ids and ids[-1] == matched:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    if isinstance(matched, str) and not keep_stop and matched in text:
        text = text[: text.rindex(matched)]
    return text
