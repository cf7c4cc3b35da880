"""Text to ids where text of control tokens in a message stays text.

Invariant: an id of a control token stands only where the chat template wrote that token. What a user, a tool or a
client wrote that looks like one is cut in two by a sentinel before the template sees it, at a border at which the
tokenizer cuts anyway where there is one, and the two sides are encoded apart. A control token of one character is
replaced by a stand-in, which is encoded without the tokenizer's added tokens. Other text is encoded as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from slime.agent.session.limits import TemplateRefused

_PRIVATE_USE = (range(0xF8FF, 0xDFFF, -1), range(0x10FFFD, 0xFFFFF, -1), range(0xFFFFD, 0xEFFFF, -1))
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
        self._singles = [token for token in self.ids if len(token) == 1]
        self._cuts = {token: _inner_border(tokenizer, token) for token in self.ids}
        self._reserved = "\0".join((template, *self.ids))
        self._newline = self._plain("\n")
        self._prefixes = self._newline + self._plain("a") != self._plain("\na")
        self._single_ids = [self._literal(token) for token in self._singles]

    def marks_for(self, values: Any) -> str | None:
        """None where no text in `values` reads like a control token; else characters that appear nowhere in them: the
        sentinel, and a stand-in for each control token of one character."""
        text = "\0".join(texts_in(values))
        if not self.pattern.search(text):
            return None
        taken = text + self._reserved
        used = set(taken)
        chars = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
        free = islice((char for char in chars if _escaped(char) not in taken), 1 + len(self._singles))
        marks = "".join(free)
        if len(marks) <= len(self._singles):
            raise TemplateRefused("the conversation contains every private-use character of Unicode: remove some")
        return marks

    def broken(self, value: Any, marks: str) -> Any:
        """`value` with every occurrence of a control token cut in two or replaced by its stand-in."""
        if isinstance(value, str):
            while self.pattern.search(value):
                value = self.pattern.sub(lambda match: self._cut(match[0], marks), value)
            return value
        if isinstance(value, Mapping):
            return {self.broken(key, marks): self.broken(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, marks) for item in value]
        return value

    def encode(self, text: str, marks: str | None = None) -> list[int]:
        """Ids of a rendering, in which each control token is the template's own and the marks leave no trace."""
        if marks is None:
            return self._plain(text)
        for mark in marks:
            text = text.replace(_escaped(mark), mark)
        first, *others = re.split(f"([{marks}])", text)
        ids = self._plain(first)
        for mark, piece in zip(others[::2], others[1::2], strict=True):
            if mark != marks[0]:
                ids += self._single_ids[marks.index(mark) - 1]
            ids += self._inside(piece)
        return ids

    def _cut(self, token: str, marks: str) -> str:
        if len(token) == 1:
            return marks[1 + self._singles.index(token)]
        at = self._cuts[token]
        return token[:at] + marks[0] + token[at:]

    def _literal(self, token: str) -> list[int]:
        """Ids of a control token's text that are no control token's; of a replacement where the vocabulary has none."""
        control = set(self.ids.values())
        for text in (token, "\ufffd", "?"):
            ids = self._without_added("\n" + text)[len(self._without_added("\n")) :]
            if ids and control.isdisjoint(ids):
                return ids
        return []

    def _without_added(self, text: str) -> list[int]:
        """The tokenizer's ids if it had no added tokens."""
        inner = self._inner
        if inner is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        normal = text if inner.normalizer is None else inner.normalizer.normalize_str(text)
        splitter = inner.pre_tokenizer
        pieces = [normal] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(normal)]
        return [token.id for piece in pieces for token in inner.model.tokenize(piece)]

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
    return json.dumps(char)[1:-1]
