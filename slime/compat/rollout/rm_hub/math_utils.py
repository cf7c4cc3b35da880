"""Comparison of mathematical answers, under the import path of slime plugins."""

from __future__ import annotations

import re
from typing import Any

from slime.data.prompt_rows import label_text
from slime.rollout.rewards.math import answer_is
from slime.rollout.rewards.math import answer_is as grade_answer_mathd
from slime.rollout.rewards.math import boxed_answer_is as grade_answer_verl
from slime.rollout.rewards.simple import last_boxed, plain_number

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl"]

_UNITS = re.compile(
    r"(?:degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?"
    r" *(?:\^\d+)?"
)
_POWERS = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_DELIMITERS = re.compile(r"\\(?:left|right)(?![a-z])|(?<!\\)\\[()\[\]]|(?<=\d),\\!(?=\d{3})")
_SPACES = re.compile(r"(?<!\\)\\[ ,;:]|~")
_WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|mathrm) *\{([^{}]*)\}")
_FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
_ENDS = "()[]"


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, or None."""
    return last_boxed(passage)


def extract_boxed_answer(solution: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, or None."""
    return last_boxed(solution)


def grade_answer_sympy(given_answer: Any, ground_truth: Any) -> bool:
    """Compare an answer with the ground truth, in the ground truth's form.

    A fraction must have the same terms, an integer equals only an integer, and tuples and intervals must have the same
    brackets. Everything else is compared by math-verify.
    """
    if given_answer is None or ground_truth is None:
        return False
    given, truth = _bare(label_text(given_answer)), _bare(label_text(ground_truth))
    if given == truth:
        return True
    given_parts, truth_parts = _parts(given), _parts(truth)
    if not given or not truth or len(given_parts) != len(truth_parts):
        return False
    if len(truth_parts) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return all(map(_meets, given_parts, truth_parts))


def _bare(answer: str) -> str:
    """Normalise an answer: remove units, currency, spaces, case, and LaTeX around words, fractions and brackets."""
    text = _WORDS.sub(r"\1", _SPACES.sub(" ", _DELIMITERS.sub("", answer)))
    text = re.sub(r"^\\text\{(.+?)\}$", r"\1", text.strip())
    text = re.sub(r"\\?[$%]|\^ *\{?\\circ\}?", "", text).replace(" or ", ",").replace(" and ", ",")
    for word, power in _POWERS.items():
        text = re.sub(rf"{word}\b", power, text)
    text = _UNITS.sub("", text).strip()
    text = re.sub(r"(\d) *\\[dt]?frac", r"\1+\\frac", text)
    text = re.sub(r"\\[dt]?frac *(?:\{([^{}]*)\} *\{([^{}]*)\}|(\d) *(\d))", r"\1\3/\2\4", text)
    text = re.sub(r"(\d) +(\d)", r"\1+\2", text).replace(" ", "").lower()
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    number = plain_number(text)
    return text if number is None or number.denominator != 1 else str(number)


def _parts(text: str) -> list[str]:
    """Split a tuple or interval into its elements; any other text is one element."""
    inner = text[1:-1]
    if len(text) > 2 and text[0] in _ENDS and text[-1] in _ENDS and not set(inner) & set(_ENDS):
        return [str(_bare(one)) for one in inner.split(",")]
    return [text]


def _meets(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(truth):
        return False
    if _is_whole(given) != _is_whole(truth):
        return False
    return answer_is(given, truth)


def _is_whole(text: str) -> bool:
    number = plain_number(text)
    return number is not None and number.denominator == 1
