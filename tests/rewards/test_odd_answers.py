"""Expected rewards of unusually written answers, for every grader that depends on the form of an answer.

A row whose reward differs from upstream slime's on purpose states what upstream does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout.rewards.ifbench import ifbench_reward
from slime.rollout.rewards.math import MathVerifier, dapo_reward, deepscaler_reward
from slime.rollout.rewards.simple import f1_reward, gpqa_reward

Row = tuple[Any, ...]
FOUR = ["Aluminium", "Boron", "Carbon monoxide", "Dubnium"]
VOLTS = ["-1.5 V", "1.5 V", "15 V", "-15 V"]

GPQA: list[Row] = [
    # announced answers; the correct letter is C unless the row has another
    ("The answer is C", "C", 1),
    ("The answer is C.", "C", 1),
    ("The answer is: C", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is (C)", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is [C]", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is **C**", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("**The answer is C**", "C", 1),
    ("The answer is `C`.", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is $C$.", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is \"C\".", "C", 1, "upstream: the i of is, as a letter of its ten"),
    ("The answer is c.", "C", 1),
    ("the answer is c", "C", 1),
    ("THE ANSWER IS C", "C", 1),
    ("The answer would be C", "C", 1),
    ("The answer must be C", "C", 1),
    ("Answer: C", "C", 1),
    ("Answer:C", "C", 1),
    ("Answer - C", "C", 1),
    ("Answer = C", "C", 1),
    ("Answer\n\nC", "C", 1),
    ("Answer:\n- C", "C", 1),
    ("### Answer\n**C**", "C", 1),
    ("Final answer: C", "C", 1),
    ("FINAL ANSWER: (C)", "C", 1),
    ("My final answer is option C.", "C", 1),
    ("The correct answer is choice (c).", "C", 1),
    ("The correct option is C", "C", 1),
    ("Correct choice: C", "C", 1),
    ("Option C", "C", 1),
    ("I choose option C.", "C", 1),
    ("I would go with choice C here", "C", 1),
    ("Answer: C) Carbon monoxide", "C", 1),
    ("Answer: C. Carbon monoxide", "C", 1),
    ("Answer: C, because of the triple bond", "C", 1),
    ("The answer is C because of the triple bond", "C", 1),
    ("The answer is c because of the triple bond", "C", 1),
    # the article and the pronoun
    ("The correct answer is C. It is the only choice a chemist would make.", "C", 1),  # upstream too: its first match
    ("The correct answer is C. It is the only choice a chemist would make.", "A", 0),
    ("The answer is a chemist's favourite: C", "C", 1, "upstream: the article is A"),
    ("The answer is a chemist's favourite: C", "A", 0, "upstream: the article is A"),
    ("The answer is a matter of taste, I take C", "C", 1, "upstream: the article is A"),
    ("The answer is a Lewis acid, so I pick C", "C", 1, "upstream: the article is A"),
    ("The answer is a Lewis acid, so I pick C", "A", 0, "upstream: the article is A"),
    ("The correct answer is a Diels-Alder adduct: C.", "C", 1, "upstream: the article is A"),
    ("The correct answer is a Diels-Alder adduct: C.", "A", 0, "upstream: the article is A"),
    ("The answer is a 2-step process. So C", "C", 1, "upstream: the article is A"),
    ("The answer is a 2-step process. So C", "A", 0, "upstream: the article is A"),
    ("The answer is a β-lactam, hence C", "C", 1, "upstream: the article is A"),
    ("The answer is a Lewis acid", "A", 0, "upstream: the article is A"),
    ("Take D. A Lewis acid accepts a pair.", "D", 1, "upstream: the article is A"),
    ("Answer: a The others do not conduct", "A", 1),
    ("Answer: a So it conducts", "A", 1),
    ("Answer: a Because metals conduct", "A", 1),
    ("Answer: a, Boron does not conduct", "A", 1),
    ("Answer: a\n\nMetals conduct", "A", 1),
    ("Answer: a\n2 of them conduct", "A", 1),
    ("Answer: a Aluminium", "A", 1, {"choices": FOUR}),
    ("answer: a because metals conduct", "A", 1),
    ("The answer is A Because metals conduct", "A", 1),
    ("The answer is A Lewis acid", "A", 1),
    ("A Aluminium", "A", 1),
    ("A 1.5 V", "A", 1),
    ("The answer is a.", "A", 1),
    ("The answer is a", "A", 1),
    ("answer: (a)", "A", 1, "upstream: no bracket or asterisk before the letter"),
    ("answer: a) Aluminium", "A", 1),
    ("answer: **a**", "A", 1, "upstream: no bracket or asterisk before the letter"),
    ("The answer is a because metals conduct", "A", 1),
    ("The answer is A because metals conduct", "A", 1),
    ("Option A is what I choose", "A", 1),
    ("A cat sat. C", "C", 1),
    ("A metal conducts, so I take C", "C", 1),
    ("A metal conducts.", "A", 0, "upstream: the article that begins a sentence is A"),
    ("Take D. A metal conducts well.", "D", 1, "upstream: the article is A"),
    ("Hence D. It has a d orbital.", "D", 1),
    ("I think B, and I am sure", "B", 1, "upstream: the pronoun is the letter I of its ten"),
    ("So I choose the first, A", "A", 1),
    ("My choice, I think, is D", "D", 1),
    ("Answer: I", "I", 1),
    ("Answer: J", "J", 1),
    ("Answer: J", "A", 0),
    ("The answer is I", "i", 1),
    # several letters
    ("Option A is wrong, so the answer is C", "C", 1, "upstream: the first option that is named"),
    ("The answer is C, since option A is impossible", "C", 1),
    ("The answer is C, since option A is impossible", "A", 0),
    ("The answer is B. Wait, the answer is C", "C", 1, "upstream: the first answer, before the correction"),
    ("The answer is B. Wait, the answer is C", "B", 0, "upstream: the first answer, before the correction"),
    ("Option A is wrong. Option B is incorrect. Option C fits.", "C", 1, "upstream: the first option"),
    ("Option C fits. Option D is wrong.", "C", 1),
    ("Option C fits, but option D cannot.", "C", 1),
    ("Option B isn't it. Option C is.", "C", 1, "upstream: the first option"),
    ("Between A, B and C: C", "C", 1),
    ("A or C? C", "C", 1),
    ("Not A, not B, not D.\nC", "C", 1),
    ("C is correct", "C", 1),
    ("C is the correct one, not A", "C", 1),
    ("C must be right", "C", 1),
    ("(C) is correct. A is tempting.", "C", 1, "upstream: a bracket after the letter hides it, the last capital is A"),
    ("A is incorrect, C is correct", "C", 1),
    ("B is not correct.\nC", "C", 1),
    ("The answer isn't B but C", "C", 1),
    ("The answer to part A is C", "C", 1),
    # thinking
    ("<think>The answer is B</think>The answer is C", "C", 1),
    ("<think>The answer is B</think>C", "C", 1),
    ("The answer is B</think>C", "C", 1),
    ("<think>The answer is C", "C", 1),
    ("<think>The answer is C</think>", "C", 0),
    ("<think>a</think>B<think>b</think>C", "C", 1),
    # boxed
    (r"\boxed{C}", "C", 1),
    (r"\boxed{c}", "C", 1, "upstream: capitals only, where nothing is announced"),
    (r"\boxed{(C)}", "C", 1),
    (r"\boxed{C.}", "C", 1),
    (r"\boxed{\text{C}}", "C", 1),
    (r"\boxed{\mathbf{C}}", "C", 1),
    (r"\boxed{\textbf{(C)}}", "C", 1),
    (r"The answer is A? No: \boxed{C}", "C", 1, "upstream: boxes count for nothing"),
    (r"\boxed{C}, not A.", "C", 1, "upstream: boxes count for nothing, the last capital is A"),
    (r"\boxed{A} or rather \boxed{C}", "C", 1),
    (r"\boxed{Carbon monoxide}", "C", 1, {"choices": FOUR}),
    (r"\boxed{Aluminium}", "A", 1, {"choices": FOUR}),
    (r"\boxed{Aluminium}", "C", 0, {"choices": FOUR}),
    (r"\boxed{Cobalt}", "C", 0, {"choices": FOUR}),
    (r"\boxed{7}", "C", 0),
    # words in place of letters
    ("Answer: Carbon monoxide", "C", 1, {"choices": FOUR}),
    ("Answer: Carbon monoxide", "B", 0, {"choices": FOUR}),
    ("Answer: Boron (not C)", "B", 1, {"choices": FOUR}),
    ("Answer: boron", "B", 1, {"choices": FOUR}),
    ("The answer is carbon monoxide.", "C", 1, {"choices": FOUR}),
    ("It is carbon monoxide, by elimination", "C", 1, {"choices": FOUR}),
    ("It is carbon dioxide, by elimination", "C", 0, {"choices": FOUR}),
    ("Dubnium", "D", 1, {"choices": FOUR}),
    ("dubnium!", "D", 1, {"choices": FOUR}),
    ("Answer: 1.5 V", "B", 1, {"choices": VOLTS}),
    ("Answer: -1.5 V", "B", 0, {"choices": VOLTS}, "upstream: signs do not count"),
    ("Answer: -1.5 V", "A", 1, {"choices": VOLTS}),
    ("Answer: 15 V", "B", 0, {"choices": VOLTS}),
    ("It is 15 V", 2, 1, {"choices": VOLTS}),
    ("helium", "helium", 1),
    ("It is Helium.", "helium", 1),
    ("It is heliums", "helium", 0),
    ("so it is helium", "C", 1, {"correct_answer": "Helium"}),
    ("so it is helium", None, 1, {"answer_text": "helium"}),
    ("so it is neon", None, 0, {"answer_text": "helium"}),
    # labels and metadata
    ("C", "C", 1),
    ("c", "C", 0),
    (" C ", "c", 1),
    ("(C)", "(C)", 1),
    ("C.", "C.", 1),
    ("C)", "c)", 1),
    ("C", 2, 1),
    ("C", 2.0, 1),
    ("C", 9, 0),
    ("C", -1, 0),
    ("C", "2", 0),
    ("C", None, 0),
    ("C", "", 0),
    ("C", "Carbon monoxide", 1, {"choices": FOUR}),
    ("C", "carbon  MONOXIDE", 1, {"choices": FOUR}),
    ("B", "Carbon monoxide", 0, {"choices": FOUR}),
    ("C", "A", 1, {"correct_letter": "C"}),
    ("C", None, 1, {"correct_letter": " c "}),
    ("X", "X", 1, {"valid_letters": "WXYZ"}),
    ("Answer: X", "Boron", 1, {"valid_letters": "WXYZ", "choices": FOUR}),
    ("Answer: B", "Boron", 0, {"valid_letters": "WXYZ", "choices": FOUR}),
    ("Answer: B", "B", 1, {"choices": {"A": "x", "B": "y"}}),
    ("Answer: b", "y", 1, {"choices": {"a": "x", "b": "y"}}),
    ("Answer: B", "y", 1, {"choices": {"first": "x", "second": "y"}}),
    ("Answer: E", "E", 0, {"choices": FOUR}, "upstream: a label that is no choice counts as a word"),
    ("", "C", 0),
    ("   \n", "C", 0),
    (None, "C", 0),
    ("Cobalt", "C", 0),
    ("DNA", "D", 0),
    ("C's value", "C", 0, "upstream: a possessive is the letter"),
    ("vitamin C", "C", 1),
    ("I do not know", "D", 0),
]  # fmt: skip

DAPO: list[Row] = [
    # the label is 34 unless the row has another; a wrong answer scores -1
    ("Answer: 34", "34", 1),
    ("answer: 34", "34", 1),
    ("ANSWER : 34", "34", 1),
    ("Answer:34", "34", 1),
    ("Answer: 34.", "34", 1, "upstream: 34. is not 34"),
    ("Answer: 34.0", "34", 1, "upstream compares texts"),
    ("Answer: 034", "34", 1, "upstream compares texts"),
    ("Answer: +34", "34", 1, "upstream compares texts"),
    ("Answer: -34", "34", -1),
    ("Answer: -34", "-34", 1),
    ("Answer: $34$", "34", 1),
    ("Answer: $$34$$", "34", 1, "upstream reads what is between the first two dollars: nothing"),
    ("Answer: \\$34", "34", 1),
    ("Answer: **34**", "34", 1, "upstream keeps the asterisks"),
    ("**Answer: 34**", "34", 1, "upstream keeps the asterisks"),
    ("**Answer**: 34", "34", -1),
    ("Answer: \\boxed{34}", "34", 1),
    ("Answer: $\\boxed{34}$", "34", 1),
    ("Answer: \\boxed{\\text{34}}", "34", 1),
    ("Answer: x = 34", "34", 1),
    ("Answer: $x=34$", "34", 1),
    ("Answer: x = y = 34", "34", 1),
    ("Answer: 34 degrees", "34", 1),
    ("Answer: 34^\\circ", "34", 1),
    ("Answer: 34^{\\circ}", "34", 1),
    ("Answer: 34 cm", "34", 1),
    ("Answer: 34\\text{ cm}", "34", 1),
    ("Answer: 34 dollars", "34", 1),
    ("Answer: 34 apples", "34", 1, "upstream knows other units"),
    ("Answer: 34 bananas", "34", -1),
    ("Answer: 34%", "34", 1, "upstream keeps the percent sign"),
    ("Answer: 34\\%", "34", 1, "upstream keeps the percent sign"),
    ("Answer: 1,234", "1234", 1),
    ("Answer: 1{,}234", "1234", 1),
    ("Answer: 1,\\!234", "1234", 1),
    ("Answer: 1 234", "1234", 1),
    ("Answer: 12,34", "1234", 1),
    ("Answer: 1,234.5", "1234.5", 1, "upstream makes an integer of the label"),
    ("Answer: 34", 34, 1),
    ("Answer: 34", "34.0", 1),
    ("Answer: 34", 34.0, 1),
    ("Answer: 34", "so #### 34", 1, "upstream cannot read such a label"),
    ("Answer: 34", ["33", "34"], 1, "upstream takes one label"),
    ("Answer: 35", ["33", "34"], -1, "upstream takes one label"),
    ("Answer: 35\nAnswer: 34", "34", 1),
    ("Answer: 34\nAnswer: 35", "34", -1),
    ("Answer: 34\nThe end.", "34", 1),
    ("The final answer: 34", "34", 1),
    ("The answer is 34", "34", -1),
    ("34", "34", -1),
    ("Answer:\n34", "34", 1),
    ("Answer:", "34", -1),
    ("Answer: ", "34", -1),
    ("", "34", -1),
    ("Answer: thirty-four", "34", -1),
    ("Answer: 34 or 35", "34", -1),
    ("Answer: 34, 35", "34", -1),
    ("Answer: 3/4", "3/4", 1, "upstream takes integers alone"),
    ("Answer: \\frac34", "\\frac{3}{4}", 1, "upstream takes integers alone"),
    ("Answer: \\dfrac{3}{4}", "\\frac{3}{4}", 1, "upstream takes integers alone"),
    ("Answer: \\sqrt2", "\\sqrt{2}", 1, "upstream takes integers alone"),
    ("Answer: 0.75", "3/4", -1, "upstream takes integers alone"),
    ("Answer: a cat", "cat", 1, "upstream takes integers alone"),
    ("Answer: 34" + " " * 290, "34", 1),
    ("Answer: 34" + " " * 291, "34", -1),
    ("x" * 1000 + "Answer: 34", "34", 1),
]  # fmt: skip

F1: list[Row] = [
    ("red dog", "red dog", 1.0),
    ("Red Dog.", "red dog", 1.0),
    ("the red dog", "a red dog", 1.0),
    ("red  dog\n", "red dog", 1.0),
    ("dog red", "red dog", 1.0),
    ("red", "red dog", 2 / 3),
    ("red red dog", "red dog", 0.8),
    ("red cat", "red dog", 0.5),
    ("cat", "red dog", 0.0),
    ("", "red dog", 0.0),
    ("the", "red dog", 0.0),
    ("red dog", "", 0.0),
    ("the", "a", 0.0),
    ("yes", "yes", 1.0),
    ("Yes!", "yes", 1.0),
    ("yes sir", "yes", 0.0),
    ("yes", "yes sir", 0.0),
    ("no", "yes", 0.0),
    ("no", "no", 1.0),
    ("noanswer", "noanswer", 1.0),
    ("no answer", "noanswer", 0.0),
    ("no answer", "no answer", 1.0),
    ("well-known", "wellknown", 1.0),
    ("well known", "well-known", 0.0),
    ("don't", "dont", 1.0),
    ("U.S.A.", "usa", 1.0),
    ("1,000", "1000", 1.0),
    ("1.5", "15", 1.0),
    ("-5", "5", 1.0),
    ("5", 5, 1.0),
    ("5", ["6", "5"], 1.0, "upstream takes one label"),
    ("red dog", ["red", "red dog"], 1.0, "upstream takes one label"),
    ("red dog", [], 0.0, "upstream takes one label"),
    ("Straße", "straße", 1.0),
    ("東京", "東京", 1.0),
    ("東京 都", "東京", 2 / 3),
    ("theatre", "the atre", 0.0),
    ("an apple", "apple an", 1.0),
    (None, "x", 0.0),
]  # fmt: skip

MATH: list[Row] = [
    ("7", "7", 1),
    ("7", 7, 1),
    ("7.0", "7", 1),
    ("7.", "7", 1),
    ("07", "7", 1),
    ("+7", "7", 1),
    ("-7", "7", 0),
    ("- 7", "-7", 1),
    ("1,234", "1234", 1),
    ("12,345,678", "12345678", 1),
    (r"1{,}234", "1234", 1),
    (r"1\,234", "1234", 1),
    (r"\$5", "5", 1),
    ("$5$", "5", 1),
    (r"5\%", "5", 1),
    (r"\frac12", "1/2", 1),
    (r"\frac{1}{2}", "0.5", 1),
    ("0.5", "1/2", 1),
    (".5", "0.5", 1),
    (r"\tfrac{1}{2}", r"\frac12", 1),
    (r"\frac{2}{4}", r"\frac12", 1, "upstream wants fractions in lowest terms"),
    (r"-\frac{1}{2}", "-0.5", 1),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", 1),
    (r"\sqrt2", r"\sqrt{2}", 1),
    (r"\sqrt{8}", r"2\sqrt2", 1),
    ("x=7", "7", 1),
    (r"x = 7", "7", 1),
    ("2^3", "8", 1, "upstream: an integer is compared as text"),
    (r"2\cdot4", "8", 1, "upstream: an integer is compared as text"),
    (r"\pi", "3.14", 0),
    (r"2\pi", r"\pi\cdot 2", 1),
    (r"90^\circ", "90", 1),
    (r"7\text{ cm}", "7", 1),
    (r"7\text{ cm}^2", "7", 1),
    (r"\text{Monday}", "Monday", 1),
    ("monday", "Monday", 1),
    (r"\text{(A)}", "A", 1, "upstream keeps the brackets"),
    ("(1,2)", "(1, 2)", 1),
    ("(1,2)", "(2,1)", 0),
    ("[1,2)", "(1,2)", 0),
    (r"\left(1,2\right)", "(1,2)", 1),
    (r"(\frac12, 3)", "(0.5,3)", 1),
    (r"\{1,2\}", r"\{2,1\}", 1, "upstream compares sets as they are written"),
    ("x+1", "1+x", 1),
    ("(x+1)^2", "x^2+2x+1", 1),
    ("2x", "2y", 0),
    (r"\infty", r"\infty", 1),
    ("7.0000001", "7", 0, "upstream takes what is within 1e-7 of an integer for it"),
    ("1e3", "1000", 0, "upstream reads Python's floats"),
    ("seven", "7", 0),
    ("7 or 8", "7", 0),
    ("", "7", 0),
    (r"\text{}", "7", 0),
    ("7", r"\boxed{7}", 1),
    ("7", "so #### 7", 1, "upstream compares with the whole label"),
    ("7", ["6", "7"], 1, "upstream takes one label"),
    ("7", ["6", "8"], 0, "upstream takes one label"),
]  # fmt: skip


def row_id(row: Row) -> str:
    return f"{row[0]!r:.60} for {row[1]!r:.30}"


def metadata_of(row: Row) -> dict[str, Any]:
    return next((part for part in row[3:] if isinstance(part, dict)), {})


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(workers=1)
    yield made
    made.close()


@pytest.mark.parametrize("row", GPQA, ids=row_id)
def test_gpqa_reward_matches_the_table(row: Row) -> None:
    assert gpqa_reward(row[0], row[1], metadata_of(row)) == row[2]


@pytest.mark.parametrize("row", DAPO, ids=row_id)
def test_dapo_score_matches_the_table(row: Row) -> None:
    assert dapo_reward(row[0], row[1])["score"] == row[2]


@pytest.mark.parametrize("row", F1, ids=row_id)
def test_f1_reward_matches_the_table(row: Row) -> None:
    assert f1_reward(row[0], row[1]) == pytest.approx(row[2])


def test_math_and_deepscaler_rewards_match_the_table(verifier: MathVerifier) -> None:
    """Both grade the box in the same way; deepscaler also requires the end of thinking."""

    async def judged() -> list[tuple[str, Any, float, list[float]]]:
        found = []
        for answer, label, reward, *_ in MATH:
            boxed = rf"so \boxed{{{answer}}}"
            scores = [await verifier.grade(boxed, label)]
            scores += [
                await deepscaler_reward(verifier, f"{begin}{boxed}", label)
                for begin in ("</think>", "###Response ", "")
            ]
            found.append((answer, label, reward, scores))
        return found

    wrong = [row for row in asyncio.run(judged()) if row[3] != [row[2], row[2], row[2], 0]]
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "metadata", "reward"),
    [
        ("no commas", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 1.0),
        ("one, comma", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 0.0),
        ("no commas", {"instruction_id_list": ["punctuation:no_comma"]}, 1.0),
        ("no commas", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}, 1.0),
        ("no commas", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": {"unused": None}}, 1.0),
        ("tea", {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["tea"], "n": None}]}, 1.0),
        ("tea", {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}, 0.0),
        ('"tea"', {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}, 1.0),
        ("", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 0.0),
    ],
)  # fmt: skip
def test_ifbench_reward_matches_the_table(response: str, metadata: dict[str, Any], reward: float) -> None:
    assert ifbench_reward(response, None, metadata) == reward
