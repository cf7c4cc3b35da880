"""Extraction of answers and plain numbers from text, and the rewards that need no worker: f1, gpqa and random.

`--rm-type f1` scores the word overlap of response and label, as question-answering benchmarks do (SQuAD, HotpotQA).

`--rm-type gpqa` gives 1.0 or 0.0 for a multiple-choice letter. The expected letter is `metadata["correct_letter"]`, or
comes from the label: a letter, the index of a choice, or the text of one of `metadata["choices"]`. The given letter is
the one that the response commits to (`chosen_letter`). If one of the two is unknown, the reward is 1.0 if the response
contains the words of the right choice, of `correct_answer` or `answer_text` in the metadata, or of a label that is not
a letter.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from slime.data.prompt_rows import accepted, label_text
from slime.storage.json_types import JsonMapping

_BRACES = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\boxed\s+(?P<bare>[^\s${}]+)|\\.|[{}]", re.DOTALL)
_LONGEST_NUMBER = 1000
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:(?:,|\{,\}|\\,|\\ | )\d{3})+)(?:\.\d*)?|[+-]?\.\d+")
_GROUPING = re.compile(r"\{,\}|\\,|\\ |[, ]")
_END_OF_THINKING = "</think>"


def last_boxed(text: str) -> str | None:
    r"""Extract the content of the last complete `\boxed{...}` (or `\fboxed{...}`, or `\boxed 5`); None without one.

    One pass over any text, because failing models tend to repeat an opening brace thousands of times.
    """
    last_start, content = -1, None
    open_braces: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        if match["boxed"]:
            open_braces.append((True, match.end()))
        elif match["bare"]:
            last_start, content = match.start("bare"), match["bare"]
        elif match[0] == "{":
            open_braces.append((False, match.end()))
        elif match[0] == "}" and open_braces:
            is_boxed, start = open_braces.pop()
            if is_boxed and start > last_start:
                last_start, content = start, text[start : match.start()].strip()
    return content


def answer_after_marker(label: str) -> str:
    """Extract the answer of a label with a worked solution: the text after the last `####`, as in GSM8K, else all."""
    return label.rpartition("####")[2].strip()


def after_thinking(text: str) -> str:
    """The text after the last `</think>`; the whole text without one."""
    return text.rpartition(_END_OF_THINKING)[2]


def plain_number(text: str) -> Fraction | None:
    """Parse an integer or decimal as people write them (`-1,234.50`, `$7`, `1{,}000`) exactly; None otherwise."""
    bare = text.strip().strip("$").strip().removeprefix("\\$").rstrip(".").strip()
    if len(bare) > _LONGEST_NUMBER or not _NUMBER.fullmatch(bare):
        return None
    return Fraction(_GROUPING.sub("", bare))


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_reward(response: str, label: object) -> float:
    """Best F1 over the labels (one, or a list of accepted ones)."""
    return max((f1_score(response, label_text(one))[0] for one in accepted(label)), default=0.0)


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall over normalised words; yes, no and noanswer count only as the whole text."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, expected = normalized(prediction), normalized(ground_truth)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return 0.0, 0.0, 0.0
    predicted_words, expected_words = predicted.split(), expected.split()
    common = sum((Counter(predicted_words) & Counter(expected_words)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted_words), common / len(expected_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def normalized(text: str) -> str:
    """Normalise text: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


_USUAL_LETTERS, _MORE_LETTERS = "ABCDEFGH", "IJ"
_WORDS = re.compile(r"(?<![^\W_])[-+]?\d+(?:\.\d+)?|[^\W_]+")
_ANSWER = r"\banswer\b\W*(?:(?:is|would be|must be)\b\W*)?(?:(?:option|choice)\b\W*)?"
_OPTION = r"\b(?:option|choice)\b\W*(?:(?:is|would be|must be)\b\W*)?"
_REFUTED = re.compile(
    r"\W*(?:(?:is|are|was|would be)\s+(?:not|wrong|incorrect|false|impossible|invalid|excluded|eliminated|ruled out)"
    r"|isn't|cannot|can't|does not|doesn't|fails)\b",
    re.IGNORECASE,
)
_AFTER_A_LETTER = "because|since|as|and|or|but|due|for|is|was|seems|must|would|given"
_BEGINS_A_REASON = "the|this|that|these|it|we|i|you|in|by|from|to|if|so|thus|hence|therefore|explanation|reasoning"
_WORD_FOLLOWS = re.compile(rf"\s+(?!(?:{_AFTER_A_LETTER})\b)[a-z]")
_NAME_FOLLOWS = re.compile(rf"[^\S\n]+(?!(?:{_AFTER_A_LETTER}|{_BEGINS_A_REASON})\b)[^\W_]", re.IGNORECASE)
"""Matches a name or number on the same line, as in "a Lewis acid" and "a 2-step process"."""
_SENTENCE_BEGINS = re.compile(r"(?:^|[.!?:\n]\s*)$")
_SENTENCE_ENDS = re.compile(r"[.!?][^\S\n]+$")


def gpqa_reward(response: str | None, label: object, metadata: JsonMapping | None = None) -> float:
    """Judge the letter, or the text of the choice, that the response gives."""
    if response is None:
        return 0.0
    metadata = metadata or {}
    letters = _letters(metadata, label)
    value = metadata.get("choices")
    texts = list(value.values()) if isinstance(value, Mapping) else list(value or ())
    choices = {letter: str(text) for letter, text in zip(letters, texts, strict=False)}
    expected = _expected_letter(label, metadata, letters, choices)
    given = chosen_letter(response, letters, choices)
    if given is not None and expected is not None:
        return 1.0 if given == expected else 0.0
    text = "" if label is None else label_text(label).strip()
    right_ones = [choices.get(expected or "", ""), "" if len(text) == 1 else text]
    right_ones += [str(metadata.get(name) or "") for name in ("correct_answer", "answer_text")]
    response_words = f" {_words(after_thinking(response))} "
    return 1.0 if any(words and f" {words} " in response_words for words in map(_words, right_ones)) else 0.0


def chosen_letter(response: str, letters: Sequence[str], choices: Mapping[str, str]) -> str | None:
    """Find the letter that a response commits to after its thinking; None without one.

    In this order: a boxed letter, one announced as the answer, one judged correct, one alone on the last line, the last
    option that is not refuted, the letter of a choice's text, the last capital letter by itself.
    """
    text = after_thinking(response)
    one_of = f"[{''.join(map(re.escape, letters))}]"
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", boxed).strip()
        # Only a letter by itself counts: "A" and "(A) text" do, "Aluminium" does not.
        alone = re.fullmatch(rf"\(?({one_of})\)?[.:)]?", bare, re.IGNORECASE) or re.match(rf"\(?({one_of})\b", bare)
        return alone[1].upper() if alone else _letter_of_text(bare, choices)
    if announced := [letter for letter, _ in _letters_after(_ANSWER, text, one_of)]:
        return announced[-1]
    for answer in reversed(list(re.finditer(_ANSWER, text, re.IGNORECASE))):
        sign = re.search(r"[-+]?$", answer[0])
        line = f"{_words(text[answer.end() - len(sign[0] if sign else '') :].partition(chr(10))[0])} "
        for letter, choice in choices.items():
            if _words(choice) and line.startswith(f"{_words(choice)} "):
                return letter
    judged = re.findall(rf"\b({one_of})\b\W*(?:is|must be|would be)\s+(?:the\s+)?(?:correct|right)\b", text)
    if judged:
        return str(judged[-1])
    lines = [line for line in text.strip().splitlines() if line.strip()]
    alone = re.fullmatch(rf"\W*({one_of})\W*|\W*({one_of})[.:)]\s.*", lines[-1].strip()) if lines else None
    if alone:
        return alone[1] or alone[2]
    options = [letter for letter, rest in _letters_after(_OPTION, text, one_of) if not _REFUTED.match(rest)]
    if options:
        return options[-1]
    by_itself = [found[1] for found in re.finditer(rf"\b({one_of})\b(?!')", text) if not _is_pronoun_or_article(found)]
    return (_letter_of_text(lines[-1], choices) if lines else None) or (by_itself[-1] if by_itself else None)


def _letters_after(words: str, text: str, one_of: str) -> Iterator[tuple[str, str]]:
    """Yield each letter after these words, as a capital, and the text that follows it."""
    for found in re.finditer(rf"{words}({one_of})\b(?!')", text, re.IGNORECASE):
        rest = text[found.end() :]
        is_word = found[1] in ("a", "i", "I") and _WORD_FOLLOWS.match(rest)
        is_word = is_word or (found[1] == "a" and _NAME_FOLLOWS.match(rest))
        if not is_word:
            yield found[1].upper(), rest


def _is_pronoun_or_article(found: re.Match[str]) -> bool:
    """True if a capital by itself is the pronoun "I", or the article at the beginning of a sentence."""
    text, letter = found.string, found[1]
    if letter == "A" and _NAME_FOLLOWS.match(text, found.end()) and _SENTENCE_ENDS.search(text, 0, found.start()):
        return True
    if not _WORD_FOLLOWS.match(text, found.end()):
        return False
    return letter == "I" or (letter == "A" and _SENTENCE_BEGINS.search(text, 0, found.start()) is not None)


def _letters(metadata: JsonMapping, label: object) -> list[str]:
    """The letters of the choices: those of the metadata, or the usual ones."""
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    choices = metadata.get("choices")
    if choices:
        named = [str(name).upper() for name in choices] if isinstance(choices, Mapping) else []
        is_lettered = bool(named) and all(len(name) == 1 and name.isalpha() for name in named)
        return named if is_lettered else list(string.ascii_uppercase[: len(choices)])
    right = str(metadata.get("correct_letter") or label).strip("(). ").upper()
    return list(_USUAL_LETTERS + (_MORE_LETTERS if right in tuple(_MORE_LETTERS) else ""))


def _expected_letter(
    label: object, metadata: JsonMapping, letters: list[str], choices: Mapping[str, str]
) -> str | None:
    """The letter of the right choice, from the metadata or the label; None if it is unknown."""
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
        if _words(choice) and _words(choice) == _words(text):
            return letter
    return None


def _words(text: str) -> str:
    """Words and numbers in lower case, without punctuation except signs and decimal points of numbers."""
    return " ".join(_WORDS.findall(text.lower()))


def random_reward() -> float:
    """Flip a fair coin, 0.0 or 1.0 (`--rm-type random`), to run a pipeline without a verifier."""
    return float(random.randint(0, 1))
