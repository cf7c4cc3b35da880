"""Tokens to text and back without transformers, which takes longer to import than a model takes to load.

Invariant: `PlainTokenizer` gives what transformers' tokenizer of the same folder gives. Folders of which that is not
certain (`plain_tokenizer` returns None) are left to transformers. It knows no chat templates: these are transformers'
business (`ChatTokenizer`), which is imported for the first chat. Doing so at once, in another thread, would take the
interpreter from the steps of the first requests.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slime.data.chat_template import load_tokenizer
from slime.engine.embedded.refusals import BadRequest

log = logging.getLogger(__name__)

_READ_AS_THEY_ARE = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""Classes of transformers that take tokenizer.json as it is."""
_QWEN = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
"""Those that build what follows around its vocabulary, whatever it says."""
_QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ODD_WHERE_SET = ("add_prefix_space", "split_special_tokens", "auto_map", "fix_mistral_regex", "gguf_file")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBES = ("Hello, world!  It's 12+34 = 46?\n\n\tdef f(x):\n", "naïve café — 北京 😀 \u0301e", " <|im_end|>\r\n 's")


class PlainTokenizer:
    """The names and meanings of transformers' methods, as far as the engine uses them."""

    def __init__(self, file: Path, eos_token: str | None) -> None:
        self._own: Any = Tokenizer.from_file(str(file))
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
        """On all cores, while other threads of Python go on."""
        texts: list[str] = self._own.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return texts

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._own.get_vocab(with_added_tokens=True)
        return vocab

    def agrees_with(self, other: Any) -> bool:
        """Whether another tokenizer makes the same of some texts that are hard to agree on."""
        for text in (*_PROBES, "".join(_PROBES)):
            ids = self.encode(text)
            if ids != list(other.encode(text)) or self.decode(ids) != other.decode(ids):
                return False
            if self.decode(ids, skip_special_tokens=True) != other.decode(ids, skip_special_tokens=True):
                return False
        return bool(self.eos_token_id == other.eos_token_id)


class NoTokenizer:
    """In the place of a tokenizer with `--skip-tokenizer-init`: requests are token ids, and answers have no text."""

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
        """What a request is told that cannot be served."""
        return BadRequest(f"{field} needs a tokenizer, and the engine has --skip-tokenizer-init: send input_ids", field)


class ChatTokenizer:
    """transformers' tokenizer of a folder, loaded when it is first asked for."""

    def __init__(self, folder: str, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._trust_remote_code = trust_remote_code
        self._loading = threading.Lock()
        self._loaded: Any = None

    def get(self) -> Any:
        """May take seconds, for whoever asks at the same time too."""
        with self._loading:
            if self._loaded is None:
                self._loaded = load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)
                plain = plain_tokenizer(self._folder)
                if plain is not None and not plain.agrees_with(self._loaded):
                    log.error(
                        "%s: transformers reads this tokenizer otherwise than it is written in tokenizer.json, which "
                        "/generate goes by: send token ids, or save the tokenizer anew with transformers",
                        self._folder,
                    )
            return self._loaded


def plain_tokenizer(folder: str | Path) -> PlainTokenizer | None:
    """The tokenizer of a folder; None where transformers has to be asked."""
    file, config = Path(folder) / "tokenizer.json", _json(Path(folder) / "tokenizer_config.json")
    facts = _json(file)
    if facts is None or config is None or not _is_plain(facts, config):
        return None
    return PlainTokenizer(file, _text(config.get("eos_token")))


def _is_plain(facts: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    kind = config.get("tokenizer_class")
    if kind not in _READ_AS_THEY_ARE | _QWEN or any(config.get(name) for name in _ODD_WHERE_SET):
        return False
    if facts.get("model", {}).get("type") != "BPE" and config.get("clean_up_tokenization_spaces"):
        return False  # of BPE nothing is ever cleaned up
    behind = facts.get("post_processor")
    adds_nothing = behind is None or behind.get("type") == "ByteLevel" or not behind.get("special_tokens", True)
    if not adds_nothing and (kind in _QWEN or "add_bos_token" in config or "add_eos_token" in config):
        return False
    if adds_nothing and (config.get("add_bos_token") or config.get("add_eos_token")):
        return False
    if kind in _QWEN and not _splits_as_qwen(facts):
        return False
    return _special_tokens_are_there(facts, config)


def _splits_as_qwen(facts: Mapping[str, Any]) -> bool:
    match facts.get("pre_tokenizer"):
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern == _QWEN_SPLITS:
            kinds = [(facts.get(part) or {}).get("type") for part in ("normalizer", "decoder")]
            return kinds == ["NFC", "ByteLevel"]
    return False


def _special_tokens_are_there(facts: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """transformers adds those that tokenizer_config.json names and tokenizer.json does not have as special tokens."""
    added = {token["content"]: token for token in facts.get("added_tokens") or ()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [*(config.get(name) for name in _NAMED), *(extra.values() if isinstance(extra, Mapping) else extra)]
    wanted = [text for token in named if (text := _text(token)) is not None]
    if config.get("tokenizer_class") in _QWEN:
        wanted.append("<|endoftext|>")  # stands in for what is not named
    if not all(text in added and added[text].get("special") for text in wanted):
        return False
    listed = config.get("added_tokens_decoder") or {}
    return all(
        added.get(_text(token) or "", {}).get("id") == int(number)
        and bool(added[_text(token) or ""].get("special")) == bool(token.get("special"))
        for number, token in listed.items()
    )


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
