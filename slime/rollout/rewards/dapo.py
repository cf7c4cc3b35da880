"""`--rm-type dapo`: the last `Answer: ...` line in the end of the response against the label, as DAPO scores it:
`{"score": +1 or -1, "acc": bool, "pred": text}`. Equality is of normalised text, or of plain numbers."""

from __future__ import annotations

import re
from typing import Any

from slime.data.labels import accepted, label_text
from slime.rollout.rewards.answers import last_boxed, plain_number

NO_ANSWER = "[INVALID]"
_TAIL_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = re.compile(
    r"\b(?:square|cubic|ways|integers?|dollars?|mph|inches|hours?|minutes?|seconds?|days?|years?|meters?|meals|edges|"
    r"students|points|degrees?|units?|cents?|feet|miles?|km|cm|mm|kg|cm\^2|people|apples|percent)\b"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline|underline)\s*\{([^{}]*)\}")
_FRACTION_WITHOUT_BRACES = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_ROOT_WITHOUT_BRACES = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\[!,;: ]|\^\s*\{?\\circ\}?|\\%|%|\\?\$|\s+|\\$")


def dapo_reward(response: str, label: Any) -> dict[str, Any]:
    """Score the end of one response."""
    found = _ANSWER.findall(response[-_TAIL_CHARACTERS:])
    prediction = normalized(found[-1]) if found else NO_ANSWER
    correct = bool(found) and any(_same(prediction, normalized(label_text(one))) for one in accepted(label))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def normalized(answer: str) -> str:
    """An answer without its wrapping: equation side, box, dollar signs, text commands, units, spaces, grouping."""
    text = answer.strip().strip("*").strip()
    text = text.rpartition("=")[2]
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    text = _WRAPPER.sub(r"\1", text)
    text = _UNITS.sub("", text)
    text = _NOISE.sub("", text)
    text = _FRACTION_WITHOUT_BRACES.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _ROOT_WITHOUT_BRACES.sub(r"\\sqrt{\1}", text)
    text = text.strip().strip("*").rstrip(".")
    number = plain_number(text)
    return text.replace(",", "").replace("{}", "") if number is not None else text


def _same(prediction: str, expected: str) -> bool:
    if prediction == expected:
        return bool(expected)
    left, right = plain_number(prediction), plain_number(expected)
    return left is not None and left == right
