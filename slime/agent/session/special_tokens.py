"""Encodes rendered conversations so that the text of control tokens in a message stays text.

Invariant: the id of a control token appears only where the chat template wrote that token. If a user, a tool or a
client wrote the text of a control token, a sentinel splits it before it is rendered, if possible at a border of the
tokenizer's pre-tokenization, and the two sides are encoded separately. A control token of one character is replaced by
a placeholder character, which is encoded without the tokenizer's added tokens. Other text is encoded as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from slime.agent.session.limits import TemplateRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Trie = dict[str, "Trie"]
"""A prefix tree of characters; the key "" marks the end of a word."""

_PRIVATE_USE = (range(0xF8FF, 0xDFFF, -1), range(0x10FFFD, 0xFFFFF, -1), range(0xFFFFD, 0xEFFFF, -1))
"""Unicode's private-use characters, which are rare in conversations."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>|</?(think\w*|tool_\w+)>")
"""Matches added tokens that count as control tokens even if they are not marked special and not in the template."""


class SpecialTokenEncoder:
    """The control tokens of a tokenizer under a template, and an encoder that does not create them from text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        self._inner = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.ids: dict[str, int] = {
            token.content: int(id_)
            for id_, token in tokenizer.added_tokens_decoder.items()
            if not token.content.isspace()
            and (token.special or token.content in template or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        """The control tokens. Added tokens for ordinary text (Gemma's `<table>`, runs of blanks) are not among them."""
        self.pattern = longest_match_pattern(self.ids)
        self._singles = [token for token in self.ids if len(token) == 1]
        self._cuts = {token: _inner_border(tokenizer, token) for token in self.ids}
        self._reserved = "\0".join((template, *self.ids))
        self._newline = self._plain("\n")
        self._prefixes = self._newline + self._plain("a") != self._plain("\na")
        self._single_ids = [self._literal(token) for token in self._singles]

    def marks_for(self, values: object) -> str | None:
        """Choose marks: characters that appear nowhere in `values`; None if no text in them contains a control token.

        The first mark is the sentinel, the others are placeholders for the control tokens of one character.
        """
        text = "\0".join(iter_texts(values))
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
        """Return `value` with every control token in its text split by the sentinel or replaced by its placeholder."""
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
        """Encode a rendering to ids and remove the marks; the control tokens left in the text are the template's."""
        if marks is None:
            return self._plain(text)
        for mark in marks:
            text = text.replace(_escaped(mark), mark)
        first, *others = re.split(f"([{marks}])", text)
        ids = self._plain(first)
        for mark, piece in zip(others[::2], others[1::2], strict=True):
            if mark != marks[0]:
                ids += self._single_ids[marks.index(mark) - 1]
            if self._prefixes:  # some tokenizers put a blank before the beginning of a text
                after_newline = self._plain("\n" + piece)
                if after_newline[: len(self._newline)] == self._newline:
                    ids += after_newline[len(self._newline) :]
                    continue
            ids += self._plain(piece)
        return ids

    def _cut(self, token: str, marks: str) -> str:
        if len(token) == 1:
            return marks[1 + self._singles.index(token)]
        at = self._cuts[token]
        return token[:at] + marks[0] + token[at:]

    def _literal(self, token: str) -> list[int]:
        """Encode the text of a control token to ordinary ids; if there are none, encode a replacement character."""
        control = set(self.ids.values())
        for text in (token, "\ufffd", "?"):
            ids = self._without_added("\n" + text)[len(self._without_added("\n")) :]
            if ids and control.isdisjoint(ids):
                return ids
        return []

    def _without_added(self, text: str) -> list[int]:
        """Encode text as the tokenizer would without its added tokens."""
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
        except TypeError:  # an unpaired surrogate, which no tokenizer accepts
            return self._encoded(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _encoded(self, text: str) -> list[int]:
        """Encode text; without Python's wrapper if the backend tokenizer has its default settings."""
        inner = self._inner
        if inner is None or inner.encode_special_tokens or inner.truncation is not None or inner.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def longest_match_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches the longest of these words, in time independent of their number."""
    trie: Trie = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(trie) if trie else "(?!)")


def iter_texts(value: object) -> Iterator[str]:
    """Yield every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from iter_texts(key)
            yield from iter_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_texts(item)


def _alternatives(node: Trie) -> str:
    """Return the pattern for the words below a node of a trie."""
    branches = []
    for char, below in node.items():
        if not char:
            continue
        chars = char
        while len(below) == 1 and "" not in below:
            [(next_char, below)] = below.items()
            chars += next_char
        branches.append(re.escape(chars) + (_alternatives(below) if any(below) else ""))
    both = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{both})?" if "" in node and branches else both


def _inner_border(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Return the index at which to split a token's text: a border that no merge crosses, if there is one inside."""
    if tokenizer.is_fast and len(token) > 1:
        splitter = tokenizer.backend_tokenizer.pre_tokenizer
        pieces = splitter.pre_tokenize_str(token) if splitter is not None else []
        inner = [start for _, (start, _) in pieces if 0 < start < len(token)]
        if inner:
            return int(inner[0])
    return 1


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]
