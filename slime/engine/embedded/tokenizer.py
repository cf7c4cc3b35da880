"""Encodes and decodes text without transformers, whose import takes longer than loading a model.

Invariant: `PlainTokenizer` returns what transformers' tokenizer of the same folder returns. Folders for which that is
not certain (`plain_tokenizer` returns None) are left to transformers. Chat templates need transformers
(`ChatTokenizer`), which is imported for the first chat: importing it at the start, in another thread, would take the
interpreter from the steps of the first requests.

`TextStream` decodes a growing sequence, for streams and stop strings. Invariant: what `take` returned, concatenated, is
a prefix of the final text: an incomplete character is held back, and so is text that may be the beginning of a stop
string. Stop strings are searched in the text of all tokens, special ones included; the match that begins first counts.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from slime.data.chat_template import load_tokenizer
from slime.engine.embedded.errors import BadRequest
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_UNCHANGED_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""Classes of transformers that use tokenizer.json unchanged."""
_QWEN = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
"""Classes that use its vocabulary only, with the following splits."""
_QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNSUPPORTED_SETTINGS = ("add_prefix_space", "split_special_tokens", "auto_map", "fix_mistral_regex", "gguf_file")
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBES = ("Hello, world!  It's 12+34 = 46?\n\n\tdef f(x):\n", "naïve café — 北京 😀 \u0301e", " <|im_end|>\r\n 's")

_MOST_PENDING = 16  # tokens that may wait for an incomplete character
_LONGEST_CHARACTER = 4  # bytes, and so tokens at most


class EngineTokenizer(Protocol):
    """The part of transformers' tokenizer interface that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def batch_decode(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...


class PlainTokenizer:
    """An `EngineTokenizer` over the `tokenizers` library."""

    def __init__(self, file: Path, eos_token: str | None) -> None:
        self._own = Tokenizer.from_file(str(file))
        self._own.no_truncation()
        self._own.no_padding()
        self.eos_token_id: int | None = None if eos_token is None else self._own.token_to_id(eos_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._own.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._own.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Decode on all cores; other Python threads run at the same time."""
        texts: list[str] = self._own.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return texts

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._own.get_vocab(with_added_tokens=True)
        return vocab

    def agrees_with(self, other: PreTrainedTokenizerBase) -> bool:
        """True if another tokenizer encodes and decodes some texts, which tokenizers often treat differently, alike."""
        for text in (*_PROBES, "".join(_PROBES)):
            ids = self.encode(text)
            if ids != list(other.encode(text)) or self.decode(ids) != other.decode(ids):
                return False
            if self.decode(ids, skip_special_tokens=True) != other.decode(ids, skip_special_tokens=True):
                return False
        return bool(self.eos_token_id == other.eos_token_id)


class NoTokenizer:
    """The tokenizer of `--skip-tokenizer-init`: requests are token ids, and answers have no text."""

    eos_token_id: int | None = None
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise self.refusal("text")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return ""

    def batch_decode(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [""] * len(lists)

    def get_vocab(self) -> dict[str, int]:
        raise self.refusal("text")

    @staticmethod
    def refusal(field: str) -> BadRequest:
        """Make the error for a request with a field that needs a tokenizer."""
        return BadRequest(f"{field} needs a tokenizer, and the engine has --skip-tokenizer-init: send input_ids", field)


class ChatTokenizer:
    """transformers' tokenizer of a folder, loaded on first use."""

    def __init__(self, folder: str, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._trust_remote_code = trust_remote_code
        self._loading = threading.Lock()
        self._loaded: PreTrainedTokenizerBase | None = None

    def get(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; the first call may take seconds, and concurrent calls wait for it."""
        with self._loading:
            if self._loaded is None:
                self._loaded = load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)
                plain = plain_tokenizer(self._folder)
                if plain is not None and not plain.agrees_with(self._loaded):
                    log.error(
                        "%s: transformers' tokenizer differs from tokenizer.json, which /generate uses: send token "
                        "ids, or save the tokenizer again with transformers",
                        self._folder,
                    )
            return self._loaded


def plain_tokenizer(folder: str | Path) -> PlainTokenizer | None:
    """Load the tokenizer of a folder; None if transformers has to, as it does not use tokenizer.json unchanged."""
    file, config = Path(folder) / "tokenizer.json", _read_json_object(Path(folder) / "tokenizer_config.json")
    facts = _read_json_object(file)
    if facts is None or config is None:
        return None
    kind = config.get("tokenizer_class")
    if kind not in _UNCHANGED_CLASSES | _QWEN or any(config.get(name) for name in _UNSUPPORTED_SETTINGS):
        return None
    if facts.get("model", {}).get("type") != "BPE" and config.get("clean_up_tokenization_spaces"):
        return None  # transformers never cleans up the text of BPE tokens
    behind = facts.get("post_processor")
    adds_nothing = behind is None or behind.get("type") == "ByteLevel" or not behind.get("special_tokens", True)
    if not adds_nothing and (kind in _QWEN or "add_bos_token" in config or "add_eos_token" in config):
        return None
    if adds_nothing and (config.get("add_bos_token") or config.get("add_eos_token")):
        return None
    if kind in _QWEN:
        match facts.get("pre_tokenizer"):
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            } if pattern == _QWEN_SPLITS:
                pass
            case _:
                return None
        if [(facts.get(part) or {}).get("type") for part in ("normalizer", "decoder")] != ["NFC", "ByteLevel"]:
            return None
    # tokenizer.json must have the special tokens of tokenizer_config.json: transformers would add missing ones
    added = {token["content"]: token for token in facts.get("added_tokens") or ()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [
        *(config.get(name) for name in _SPECIAL_TOKEN_KEYS),
        *(extra.values() if isinstance(extra, Mapping) else extra),
    ]
    wanted = [text for token in named if (text := _token_text(token)) is not None]
    if kind in _QWEN:
        wanted.append("<|endoftext|>")  # the default of tokens that are not named
    if not all(text in added and added[text].get("special") for text in wanted):
        return None
    listed = config.get("added_tokens_decoder") or {}
    for number, token in listed.items():
        same = added.get(_token_text(token) or "", {})
        if same.get("id") != int(number) or bool(same.get("special")) != bool(token.get("special")):
            return None
    return PlainTokenizer(file, _token_text(config.get("eos_token")))


def _token_text(token: object) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _read_json_object(file: Path) -> JsonObject | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class _IncrementalDecoder:
    """Decodes tokens one by one; holds text back that the next token may still change."""

    def __init__(self, tokenizer: EngineTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens whose text was returned last, as context, and tokens after them
        self._told = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text that is new and final."""
        self._window.append(token)
        before, text = self._decode(self._window[: self._told]), self._decode(self._window)
        new = text[len(before) :]
        if new and not text.endswith("\ufffd"):
            return self._tell(new, len(self._window))
        if len(self._window) - self._told <= _MOST_PENDING:
            return ""
        if not new:  # tokens without text, such as special ones that are skipped
            del self._window[self._told :]
            return ""
        # The bytes form no characters: the text of all tokens except the last few is final.
        for kept in range(_LONGEST_CHARACTER, 2 * _LONGEST_CHARACTER):
            end = len(self._window) - kept
            head = self._decode(self._window[:end])
            if len(head) > len(before) and text.startswith(head):
                return self._tell(head[len(before) :], end)
        return ""

    def _tell(self, new: str, end: int) -> str:
        """Return `new`, the text of the window's tokens up to `end`, and keep these as context."""
        self._window, self._told = self._window[self._told :], end - self._told
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class TextStream:
    """Decodes token by token, searches for stop strings, and returns the text that is final."""

    def __init__(
        self, tokenizer: EngineTokenizer, stops: Sequence[str], *, skip_special_tokens: bool, streamed: bool
    ) -> None:
        self._stops = tuple(stops)
        self._reach = max((len(s) for s in self._stops), default=1) - 1  # a match begins at most so far back
        self._shown = _IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        both = bool(self._stops) and skip_special_tokens
        self._whole = _IncrementalDecoder(tokenizer, skip_special_tokens=False) if both else None
        self._streamed = streamed
        self._tail = ""  # the last `_reach` characters of the whole text
        self._begun = [0] * len(self._stops)  # characters of each stop string that ended the text at the last check
        self._unseen = 0  # characters since that check
        self._marks = deque([(0, 0)])  # pairs of lengths of the whole text and of the shown one, as they grew
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
        begin = len(self._tail) + 1  # a match ends in the new text
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
        """Return the final text that was not taken yet: without an end that may begin a stop string.

        Each string is compared once for every new character and once for every character that is dropped from a
        partial match, so the whole text takes time linear in its length.
        """
        certain = len(self._untaken)
        if self._stops:
            for place, stop in enumerate(self._stops):
                count = min(self._begun[place] + self._unseen, len(stop) - 1, len(self._tail))
                while count and not self._tail.endswith(stop[:count]):
                    count -= 1
                self._begun[place] = count
            self._unseen = 0
            certain = self._shown_place(self._marks[-1][0] - max(self._begun)) - self._taken
        piece, self._untaken = self._untaken[: max(0, certain)], self._untaken[max(0, certain) :]
        self._taken += len(piece)
        return piece

    def _shown_place(self, place: int) -> int:
        """Convert a position in the whole text to one in the shown text."""
        before, after = self._marks[0], self._marks[-1]
        for mark in reversed(self._marks):  # most positions are near the end
            if mark[0] <= place:
                before = mark
                break
            after = mark
        return before[1] + min(place - before[0], after[1] - before[1])


@dataclass(frozen=True)
class FinalText:
    """The text of a finished response; without `keep_stop`, its stop token or the text from `cut` on is removed."""

    ids: list[int]
    matched: int | str | None
    skip_special_tokens: bool
    keep_stop: bool
    cut: int | None

    def text(self, tokenizer: EngineTokenizer) -> str:
        return self._trimmed(tokenizer.decode(self._shown_ids(), skip_special_tokens=self.skip_special_tokens))

    @staticmethod
    def together(tokenizer: EngineTokenizer, wanted: Sequence[FinalText]) -> list[str]:
        """Decode many texts, with one call of the tokenizer for each value of `skip_special_tokens`."""
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
