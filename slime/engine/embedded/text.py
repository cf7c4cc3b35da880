"""Text of a growing token sequence, for streams and stop strings.

Invariant: what `take` has given, put together, is a prefix of the final text: a character that is not finished is held
back, and so is text that may turn out to be the beginning of a stop string. A stop string is looked for in the text of
all tokens, special ones too, and the match that begins first counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_PENDING = 16  # tokens that may wait for a character to be finished
_LONGEST_CHARACTER = 4  # bytes, and so tokens at most


class _Decoded:
    """The text of tokens as they come; what the next token may still change is held back."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # the tokens told last, which give the decoder its context, and those untold
        self._told = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text that is new and final."""
        self._window.append(token)
        told, text = self._decode(self._window[: self._told]), self._decode(self._window)
        new = text[len(told) :]
        if new and not text.endswith("\ufffd"):
            return self._tell(new, len(self._window))
        if len(self._window) - self._told <= _MOST_PENDING:
            return ""
        if not new:  # tokens without text, such as special ones that are skipped
            del self._window[self._told :]
            return ""
        return self._tell_settled(told, text)

    def _tell_settled(self, told: str, text: str) -> str:
        """Bytes that are no characters: all but the last few tokens have become what they will be."""
        for kept in range(_LONGEST_CHARACTER, 2 * _LONGEST_CHARACTER):
            end = len(self._window) - kept
            head = self._decode(self._window[:end])
            if len(head) > len(told) and text.startswith(head):
                return self._tell(head[len(told) :], end)
        return ""

    def _tell(self, new: str, end: int) -> str:
        self._window, self._told = self._window[self._told :], end - self._told
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class TextStream:
    """Decodes token by token, looks for stop strings, and hands out what is certain to stay."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, skip_special_tokens: bool, streamed: bool) -> None:
        self._stops = tuple(stops)
        self._reach = max((len(s) for s in self._stops), default=1) - 1  # a match may begin so far back
        self._shown = _Decoded(tokenizer, skip_special_tokens=skip_special_tokens)
        both = bool(self._stops) and skip_special_tokens
        self._whole = _Decoded(tokenizer, skip_special_tokens=False) if both else None
        self._streamed = streamed
        self._tail = ""  # the last `_reach` characters of the whole text
        self._begun = [0] * len(self._stops)  # characters of each stop string that the text ended with at the last look
        self._unseen = 0  # characters since then
        self._marks = deque([(0, 0)])  # lengths of the whole text and of the shown one, as they grew together
        self._untaken = ""
        self._taken = 0
        self.cut: int | None = None  # where a stop string begins in the shown text

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string that is now complete, if any."""
        shown = self._shown.push(token)
        whole = shown if self._whole is None else self._whole.push(token)
        if self._streamed:
            self._untaken += shown
        if not self._stops:
            return None
        length, shown_length = self._marks[-1]
        self._marks.append((length + len(whole), shown_length + len(shown)))
        text, start = self._tail + whole, length - len(self._tail)
        begin = len(self._tail) + 1  # a match ends in what is new
        hits = [(at, len(s), s) for s in self._stops if (at := text.find(s, max(0, begin - len(s)))) >= 0]
        if hits:
            at, _, matched = min(hits)
            self.cut = self._shown_place(start + at)
            return matched
        self._tail = text[max(0, len(text) - self._reach) :]
        self._unseen += len(whole)
        while len(self._marks) > 1 and self._marks[1][0] <= length + len(whole) - self._reach:
            self._marks.popleft()
        return None

    def take(self) -> str:
        """What may be shown and has not been taken yet."""
        if self._stops:
            length, _ = self._marks[-1]
            certain = self._shown_place(length - self._held()) - self._taken
        else:
            certain = len(self._untaken)
        piece, self._untaken = self._untaken[: max(0, certain)], self._untaken[max(0, certain) :]
        self._taken += len(piece)
        return piece

    def _held(self) -> int:
        """Characters at the end with which a stop string may have begun.

        Each string is compared once for every new character and once for every character that is given up again, so
        the whole text takes time linear in its length.
        """
        tail = self._tail
        for place, stop in enumerate(self._stops):
            count = min(self._begun[place] + self._unseen, len(stop) - 1, len(tail))
            while count and not tail.endswith(stop[:count]):
                count -= 1
            self._begun[place] = count
        self._unseen = 0
        return max(self._begun)

    def _shown_place(self, place: int) -> int:
        """The place in the shown text of one in the whole text."""
        before, after = self._marks[0], self._marks[-1]
        for mark in reversed(self._marks):  # most places are near the end
            if mark[0] <= place:
                before = mark
                break
            after = mark
        return before[1] + min(place - before[0], after[1] - before[1])


@dataclass(frozen=True)
class FinalText:
    """Text of a finished response. Unless `keep_stop`, the token that ended it is left out, or all from `cut` on."""

    ids: list[int]
    matched: int | str | None
    skip_special_tokens: bool
    keep_stop: bool
    cut: int | None

    def text(self, tokenizer: Any) -> str:
        return self._trimmed(tokenizer.decode(self._shown_ids(), skip_special_tokens=self.skip_special_tokens))

    @staticmethod
    def together(tokenizer: Any, wanted: Sequence[FinalText]) -> list[str]:
        """The same for many, in one call of the tokenizer for each way of decoding."""
        texts: dict[int, str] = {}
        for skip in {each.skip_special_tokens for each in wanted}:
            places = [place for place, each in enumerate(wanted) if each.skip_special_tokens == skip]
            decoded = tokenizer.batch_decode([wanted[p]._shown_ids() for p in places], skip_special_tokens=skip)
            texts |= {place: wanted[place]._trimmed(text) for place, text in zip(places, decoded, strict=True)}
        return [texts[place] for place in range(len(wanted))]

    def _shown_ids(self) -> list[int]:
        is_stop = isinstance(self.matched, int) and not self.keep_stop and self.ids[-1:] == [self.matched]
        return self.ids[:-1] if is_stop else self.ids

    def _trimmed(self, text: str) -> str:
        return text if self.keep_stop else text[: self.cut]
