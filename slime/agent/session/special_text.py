"""Text to ids where text of control tokens in a message stays text.

Invariant: an id of a control token stands only where the chat template wrote that token. What a user, a tool or a
client wrote that looks like one is cut in two by a sentinel before the template sees it, at a border at which the
tokenizer cuts anyway where there is one, and the two sides are encoded apart. Other text is encoded as usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SENTINELS = tuple(chr(code) for code in range(0xF8FF, 0xE000, -1))
"""Characters for private use: a conversation has few of them, if any."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>|</?(think\w*|tool_\w+)>")
"""Added tokens that count as control tokens even where neither the tokenizer nor the template says so."""


class SpecialText:
    """The control tokens of a tokenizer under a template, and how text is encoded without making any."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._inner = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.ids: dict[str, int] = {
            token.content: int(id_)
            for id_, token in tokenizer.added_tokens_decoder.items()
            if not token.content.isspace()
            and (token.special or token.content in template or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        """Added tokens that are ordinary text (Gemma's `<table>`, runs of blanks) are none."""
        self.pattern = any_of(self.ids)
        self._cuts = {token: _inner_border(tokenizer, token) for token in self.ids}
        self._newline = self._plain("\n")
        self._prefixes = self._newline + self._plain("a") != self._plain("\na")

    def sentinel_for(self, values: Any) -> str | None:
        """None where no text in `values` reads like a control token; else a character that they do not contain."""
        text = "\0".join(texts_in(values))
        if not self.pattern.search(text):
            return None
        return next(char for char in _SENTINELS if char not in text and _escaped(char) not in text)

    def broken(self, value: Any, sentinel: str) -> Any:
        """`value` with every occurrence of a control token cut in two."""
        if isinstance(value, str):
            while self.pattern.search(value):
                value = self.pattern.sub(lambda match: self._cut(match[0], sentinel), value)
            return value
        if isinstance(value, Mapping):
            return {self.broken(key, sentinel): self.broken(item, sentinel) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, sentinel) for item in value]
        return value

    def encode(self, text: str, sentinel: str | None = None) -> list[int]:
        """Ids of a rendering, in which each control token is the template's own and the sentinel leaves no trace."""
        if sentinel is None:
            return self._plain(text)
        first, *others = text.replace(_escaped(sentinel), sentinel).split(sentinel)
        ids = self._plain(first)
        for piece in others:
            ids += self._inside(piece)
        return ids

    def _cut(self, token: str, sentinel: str) -> str:
        at = self._cuts[token]
        return token[:at] + sentinel + token[at:]

    def _plain(self, text: str) -> list[int]:
        try:
            return self._encoded(text)
        except TypeError:  # half of a surrogate pair: no text of any encoding, and no tokenizer takes it
            return self._encoded(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _encoded(self, text: str) -> list[int]:
        """What the tokenizer makes of it: asked without detours where nobody left a switch of it on."""
        inner = self._inner
        if inner is None or inner.encode_special_tokens or inner.truncation is not None or inner.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _inside(self, piece: str) -> list[int]:
        """Ids of a text that others come before: without the blank that some tokenizers put at the beginning."""
        if not self._prefixes:
            return self._plain(piece)
        ids = self._plain("\n" + piece)
        if ids[: len(self._newline)] != self._newline:
            return self._plain(piece)
        return ids[len(self._newline) :]


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """What matches the longest of these words, in time that does not grow with their number."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(trie) if trie else "(?!)")


def texts_in(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def _alternatives(node: Mapping[str, Any]) -> str:
    branches = [_branch(char, below) for char, below in node.items() if char]
    both = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{both})?" if "" in node and branches else both


def _branch(char: str, node: Mapping[str, Any]) -> str:
    chars = char
    while len(node) == 1 and "" not in node:
        [(char, node)] = node.items()
        chars += char
    return re.escape(chars) + (_alternatives(node) if any(node) else "")


def _inner_border(tokenizer: Any, token: str) -> int:
    """Where to cut a token's text: at a border that no merge crosses, if it has one inside."""
    if tokenizer.is_fast and len(token) > 1:
        splitter = tokenizer.backend_tokenizer.pre_tokenizer
        pieces = splitter.pre_tokenize_str(token) if splitter is not None else []
        inner = [start for _, (start, _) in pieces if 0 < start < len(token)]
        if inner:
            return int(inner[0])
    return 1


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"
