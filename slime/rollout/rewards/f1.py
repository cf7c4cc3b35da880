"""`--rm-type f1`: word overlap of response and label, as question-answering benchmarks count it (SQuAD, HotpotQA)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from slime.data.prompt_rows import accepted, label_text

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_reward(response: str, label: Any) -> float:
    """The best F1 over the labels (one, or a list of accepted ones)."""
    return max((f1_score(response, label_text(one))[0] for one in accepted(label)), default=0.0)


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall over normalised words; yes, no and noanswer count only when they are the whole."""
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
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())
