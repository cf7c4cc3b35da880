"""Exact match of short answers."""

import re
import string


def normalize_answer(text):
    text = text.lower()
    text = "".join(char for char in text if char not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def em_check(prediction, golden_answers):
    if isinstance(golden_answers, str):
        golden_answers = [golden_answers]
    return int(any(normalize_answer(golden) == normalize_answer(prediction) for golden in golden_answers))


def extract_solution(solution_str):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


def compute_score_em(solution_str, ground_truth, format_score=0.0, score=1.0):
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if em_check(answer, ground_truth["target"]) else format_score
