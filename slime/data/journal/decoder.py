"""Token ids of a run back to text, special tokens included.

Invariant: the texts of neighbouring spans, one after the other, are the text of the whole as far as characters do not
fall between spans. Nothing of the model but its tokenizer is read, and no code of its folder is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from slime.data.tokenizer import load_tokenizer
from slime.errors import UserError

_CONTEXT = 4
"""Tokens before a span that it is decoded with: some tokenizers leave out a space at the beginning."""


class Decoder:
    """Decodes with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    def pieces(self, tokens: Sequence[int], start: int, stop: int) -> list[tuple[str, bool]]:
        """The text of `tokens[start:stop]` in pieces, each of which is special tokens or has none of them."""
        found = []
        for special, members in groupby(range(start, stop), key=lambda place: tokens[place] in self._special):
            places = list(members)
            if special:
                found.append(("".join(self._special[tokens[place]] for place in places), True))
            else:
                found.append((self._text(tokens, places[0], places[-1] + 1), False))
        return found

    def _text(self, tokens: Sequence[int], start: int, stop: int) -> str:
        first = max(0, start - _CONTEXT)
        before = self._decoded(tokens[first:start])
        whole = self._decoded(tokens[first:stop])
        return whole[len(before) :] if whole.startswith(before) else self._decoded(tokens[start:stop])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_decoder(folder: str) -> Decoder:
    """The decoder of a model folder; a `UserError` when its tokenizer cannot be used."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"{folder}: its tokenizer is written in Python; tokens are shown with tokenizer.json only")
        return Decoder(backend)
    from tokenizers import Tokenizer

    try:
        return Decoder(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{file}: does not load ({error})") from error


def model_of_run(run: Path) -> str | None:
    """The model folder that the config of a run names, if it is still there."""
    import yaml

    config = run / "config.yaml"
    if not config.is_file():
        return None
    try:
        facts = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{config}: is not readable YAML ({error})") from error
    folder = facts.get("hf_checkpoint") if isinstance(facts, dict) else None
    return folder if isinstance(folder, str) and Path(folder).is_dir() else None
