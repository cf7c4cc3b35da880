from __future__ import annotations

from typing import Any

import pytest

from slime.rollout.rewards.math import dapo_reward
from slime.rollout.rewards.simple import f1_reward, gpqa_reward, random_reward
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer


@pytest.mark.parametrize(
    ("response", "label", "correct", "prediction"),
    [
        ("Steps.\nAnswer: 34", "34", True, "34"),
        ("Steps.\nanswer : $34$", "34", True, "34"),
        ("Steps.\n**Answer: 34**", "34", True, "34"),
        ("Answer: \\boxed{34}", "34", True, "34"),
        ("Answer: x = 34", "34", True, "34"),
        ("Answer: 1,234", "1234", True, "1234"),
        ("Answer: 34 degrees", "34", True, "34"),
        ("Answer: 34.0", 34, True, "34.0"),
        ("Answer: 34", ["33", 34], True, "34"),
        ("Answer: 34", [{"role": "assistant", "content": [{"type": "text", "text": "34"}]}], True, "34"),
        ("Answer: 5\nAnswer: 34", "34", True, "34"),
        ("Answer: \\frac12", "\\dfrac{1}{2}", True, "\\frac{1}{2}"),
        ("Answer: 35", "34", False, "35"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        ("The result is 34", "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
    ],
)
def test_dapo_score_and_prediction(response: str, label: Any, correct: bool, prediction: str) -> None:
    assert dapo_reward(response, label) == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def test_f1_counts_words_like_squad() -> None:
    assert f1_score("The Eiffel Tower!", "eiffel tower") == (1.0, 1.0, 1.0)
    # 2 common words, 4 predicted, 3 expected: precision 1/2, recall 2/3, F1 = 4/7.
    assert f1_score("big red dog barks", "red dog runs") == pytest.approx((4 / 7, 1 / 2, 2 / 3))
    assert f1_score("dog dog", "dog") == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert f1_score("Yes.", "yes") == (1.0, 1.0, 1.0)
    assert f1_score("", "x") == (0.0, 0.0, 0.0)
    assert f1_reward("red dog", ["cat", "a red dog"]) == 1.0
    assert f1_reward("red dog", 5) == 0.0


CHOICES = ["Aluminium", "Boron", "Carbon monoxide", "Dubnium"]


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is (C).", "C", {}, 1.0),
        ("The answer is B, no: the correct answer is C", "C", {}, 1.0),
        ("Answer: C", "(c)", {}, 1.0),
        ("Answer: **C**", 2, {}, 1.0),
        ("<think>Answer: B</think> Option C", "C", {}, 1.0),
        ("so $\\boxed{C}$", "C", {}, 1.0),
        ("so \\boxed{\\text{(C)}}", "C", {}, 1.0),
        ("so \\boxed{C. Carbon monoxide}", "C", {}, 1.0),
        ("so \\boxed{Carbon monoxide}", "C", {"choices": CHOICES}, 1.0),
        ("so \\boxed{Aluminium}", "C", {"choices": CHOICES}, 0.0),
        ("so \\boxed{Aluminium}", "Aluminium", {"choices": CHOICES}, 1.0),
        ("I pick\nC) Carbon monoxide", "C", {"choices": CHOICES}, 1.0),
        ("it must be\nCarbon monoxide.", "C", {"choices": CHOICES}, 1.0),
        ("C", "C", {}, 1.0),
        ("The answer is D", "C", {}, 0.0),
        ("A cat sat", "C", {}, 0.0),
        ("", "C", {}, 0.0),
        ("Answer: B", "whatever", {"correct_letter": "b"}, 1.0),
        ("Answer: C", "A", {"valid_letters": ["A", "B"]}, 0.0),
        ("Answer: Y", "Y", {"valid_letters": "XYZ"}, 1.0),
    ],
)
def test_gpqa_reads_the_answer_letter_or_choice(response: str, label: Any, metadata: dict, reward: float) -> None:
    assert gpqa_reward(response, label, metadata) == reward


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("B is correct", "B", None, 1.0),
        ("I think B is the correct one, not A", "B", None, 1.0),
        ("Between A and D I take D", "D", None, 1.0),
        ("final answer: (h)", "H", None, 1.0),
        ("The answer depends on Boron", "B", {"choices": CHOICES}, 1.0),  # upstream reads the D of "depends"
        ("it can only be carbon monoxide, so be it", "Carbon monoxide", {"choices": CHOICES}, 1.0),
        ("that is helium, I say", "helium", None, 1.0),
        ("that is lithium, I say", "helium", {"choices": CHOICES}, 0.0),
        ("Answer: A", "helium", {"choices": CHOICES}, 0.0),
        ("Answer: C", 2.0, None, 1.0),
        ("Answer: C", 9, None, 0.0),
        ("Answer: B", None, {"correct_letter": "B"}, 1.0),
        ("Answer: B", None, None, 0.0),
        (None, "A", None, 0.0),
        ("Answer: C", "A", {"valid_letters": ["A", "B"]}, 0.0),  # upstream finds an "a" in "answer"
        ("Answer: boron", "B", {"choices": {"A": "Aluminium", "B": "Boron"}}, 1.0),
    ],
)
def test_gpqa_plugin_function_accepts_lenient_formats(response: Any, label: Any, metadata: Any, reward: float) -> None:
    assert compute_gpqa_reward(response, label, metadata) == reward


@pytest.mark.parametrize(
    ("response", "label", "pred"),
    [
        ("Answer: 34", 34, "34"),
        ("Answer: The value is $34$ units.", 34, "34"),
        ("Answer: $1,234$", "1234", "1234"),
        ("Answer: \\text{34 dollars}", "34", "34"),
        ("Answer: $\\frac12$", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: x = 90^\\circ", "90", "90"),
        ("Answer: -7", -7, "-7"),
        ("Answer: 34<|im_end|>", "34", "34"),
        ("Answer: 34<|endoftext|>", "34", "34"),
    ],
)
def test_dapo_normalizes_answers_like_minerva(response: str, label: Any, pred: str) -> None:
    assert compute_score(response, label) == {"score": 1.0, "acc": True, "pred": pred}
    assert normalize_final_answer(label) == pred


def test_strict_dapo_grades_only_the_box() -> None:
    wrong = {"score": -1.0, "acc": False}
    assert compute_score(r"so \boxed{34}", "34", True) == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score(r"so \boxed{34}", 34, strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"so \boxed{034}", "34", True) == {**wrong, "pred": "034"}
    assert compute_score("Answer: 34", "34", True) == {**wrong, "pred": None}
    assert compute_score(r"\boxed{34}" + " " * 100, "34", True) == {**wrong, "pred": None}
    early = r"\boxed{34}" + " " * 100 + "the end"
    assert compute_score(early, "34", True, [1, 2, 3, 50])["score"] == 1.0
    assert compute_score(early, "34", True, [1, 2, 3, 117])["pred"] is None
    with pytest.raises(ValueError, match="must have 4 entries, not 3"):
        compute_score(early, "34", True, pause_tokens_index=[1, 2, 3])


def test_f1_of_a_missing_response_is_zero() -> None:
    assert f1_score(None, "x") == (0.0, 0.0, 0.0)
    assert normalize_answer("The  Eiffel Tower!") == "eiffel tower"


def test_random_reward_is_0_or_1() -> None:
    assert {random_reward() for _ in range(200)} == {0.0, 1.0}
