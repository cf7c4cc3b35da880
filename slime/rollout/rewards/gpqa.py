"""`--rm-type gpqa`: a multiple-choice letter, 1.0 or 0.0.

The right letter is `metadata["correct_letter"]`, or the label: a letter, the index of a choice, or the text of one of
`metadata["choices"]`. The given letter is the last one the response commits to after its thinking, else the last
capital letter that stands alone. Where one of the two is not known, the words of the right choice, or of a label that
is no letter, count when the response has them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from slime.data.labels import label_text
from slime.rollout.rewards.answers import after_thinking, last_boxed
from slime.rollout.rewards.f1 import normalized

_DEFAULT_LETTERS = "ABCDEFGH"


def gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Judge the letter, or the text of the choice, that the response gives."""
    if response is None:
        return 0.0
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"))
    letters = _letters(metadata, choices)
    expected = _expected_letter(label, metadata, letters, choices)
    given = chosen_letter(response, letters, choices)
    if given is not None and expected is not None:
        return 1.0 if given == expected else 0.0
    text = "" if label is None else label_text(label).strip()
    right_ones = [choices.get(expected or "", ""), "" if len(text) == 1 else text]
    said = f" {normalized(after_thinking(response))} "
    return 1.0 if any(words and f" {words} " in said for words in map(normalized, right_ones)) else 0.0


def chosen_letter(response: str, letters: Sequence[str], choices: Mapping[str, str]) -> str | None:
    """The letter a response commits to: boxed, announced as the answer or as correct, alone on the last line, that of
    a choice's text, or the last capital letter by itself."""
    text = after_thinking(response)
    one_of = f"[{''.join(letters)}]"
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", boxed).strip()
        letter = re.fullmatch(rf"\(?({one_of})\)?[.:)]?.*", bare)
        # Only a letter that stands by itself counts: "A" and "(A) text" do, "Aluminium" does not.
        if letter and not re.match(rf"\(?{one_of}\w", bare):
            return letter[1]
        return _letter_of_text(bare, choices)
    announced = re.findall(
        rf"(?:answer|option|choice)\b\W*(?:(?:is|would be|must be)\b\W*)?(?:(?:option|choice)\b\W*)?({one_of})\b(?!')",
        text,
        re.IGNORECASE,
    )
    if announced:
        return announced[-1].upper()
    judged = re.findall(rf"\b({one_of})\b\W*(?:is|must be|would be)\s+(?:the\s+)?(?:correct|right)\b", text)
    if judged:
        return judged[-1]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    alone = re.fullmatch(rf"\W*({one_of})\W*|\W*({one_of})[.:)]\s.*", lines[-1].strip()) if lines else None
    if alone:
        return alone[1] or alone[2]
    by_itself = re.findall(rf"\b({one_of})\b(?!')", text)
    return (_letter_of_text(lines[-1], choices) if lines else None) or (by_itself[-1] if by_itself else None)


def _choices(value: Any) -> dict[str, str]:
    if not value:
        return {}
    if isinstance(value, Mapping):
        return {str(letter).upper(): str(text) for letter, text in value.items()}
    return {string.ascii_uppercase[index]: str(text) for index, text in enumerate(value)}


def _letters(metadata: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    return list(choices) or list(_DEFAULT_LETTERS)


def _expected_letter(
    label: Any, metadata: Mapping[str, Any], letters: list[str], choices: Mapping[str, str]
) -> str | None:
    if metadata.get("correct_letter"):
        return str(metadata["correct_letter"]).strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool):
        return letters[int(label)] if 0 <= label < len(letters) else None
    text = "" if label is None else label_text(label).strip()
    if text.strip("().").upper() in letters:
        return text.strip("().").upper()
    return _letter_of_text(text, choices)


def _letter_of_text(text: str, choices: Mapping[str, str]) -> str | None:
    for letter, choice in choices.items():
        if normalized(choice) and normalized(choice) == normalized(text):
            return letter
    return None
