"""The text of token ids as they come.

Invariant: the pieces, put together, are the text of all ids but the silent ones; a piece never ends within a character.
The cost of a piece is that of its own ids and of a few before it.
"""

from __future__ import annotations

import re
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


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes of each token, which need not be whole characters; together they are the text of all of them."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    added = tokenizer.get_added_vocab()
    is_byte_level = "".join(tokenizer.tokenize("é")).endswith("Ã©")
    alphabet = _byte_alphabet() if is_byte_level else {}
    found = []
    for token, piece in zip(ids, pieces, strict=True):
        if piece in added:
            found.append(str(piece).encode())
        elif is_byte_level and all(letter in alphabet for letter in piece):
            found.append(bytes(alphabet[letter] for letter in piece))
        elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
            found.append(bytes([int(piece[3:5], 16)]))
        elif "\u2581" in piece:  # SentencePiece's blank, which decoding one token alone may drop
            found.append(piece.replace("\u2581", " ").encode())
        else:
            found.append(tokenizer.decode([token], skip_special_tokens=False).encode())
    return found


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as: printable ones stand for themselves, others follow 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
