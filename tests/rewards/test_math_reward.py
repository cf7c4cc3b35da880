r"""The math verifier against a table of expected verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from slime.rollout.rewards.math import MathVerifier, deepscaler_reward
from slime.rollout.rewards.simple import after_thinking, last_boxed, plain_number


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(workers=1)
    yield made
    made.close()


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac12"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"1\frac{1}{2}", "1.5"),
    ("42", "42"),
    ("042", "42"),
    ("1,234", "1234"),
    (r"1{,}234", "1234"),
    (r"1\,234\,567", "1234567"),
    (r"\$12.50", "12.5"),
    ("-3", "-3.0"),
    ("2^{10}", "1024"),
    (r"1.5\times 10^3", "1500"),
    ("7!", "5040"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    ("2x+1", "1+2x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=5", "5"),
    ("y=2x+3", "y=3+2x"),
    ("3+4i", "4i+3"),
    ("(1,2]", "(1, 2]"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"[3,\infty)", r"x \geq 3"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("{1,2,3}", "{3,1,2}"),
    ("(3, 4)", "(3,4)"),
    (r"5\text{ cm}", "5"),
    ("5 cm", r"5 \text{ cm}"),
    (r"50\%", "0.5"),
    (r"90^\circ", "90"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\text{Evelyn}", "Evelyn"),
    ("evelyn", r"\text{Evelyn}"),
    (r"\text{A}", "A"),
    ("abc", "cab"),
    ("x - y - z", "x - z - y"),
    ("a - b - c", "a - c - b"),
    ("7", r"\boxed{7}"),
    ("7", "$7$"),
]

DIFFERENT = [
    ("0.5", "0.25"),
    ("43", "42"),
    ("-5", "5"),
    ("(1,2)", "[1,2]"),
    ("(4,3)", "(3,4)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("2x+1", "2x-1"),
    ("1/3", "0.333"),
    ("B", "A"),
    ("silent", "listen"),
    ("Maria", "Evelyn"),
    (r"\frac{", "5"),
    ("no idea", "5"),
    ("", "5"),
    ("x", "5"),
    ("9" * 5000, "5"),
]


def grade(verifier: MathVerifier, response: str, label: Any) -> float:
    return asyncio.run(verifier.grade(response, label))


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal_answers_get_reward_1(verifier: MathVerifier, answer: str, label: str) -> None:
    assert grade(verifier, f"Thus $\\boxed{{{answer}}}$.", label) == 1.0


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_answers_get_reward_0(verifier: MathVerifier, answer: str, label: str) -> None:
    assert grade(verifier, f"Thus $\\boxed{{{answer}}}$.", label) == 0.0


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is 42.", "42", 0.0),
        (" 46", "46", 0.0),
        ("", "46", 0.0),
        (r"so \boxed{46}", 46, 1.0),
        (r"\boxed{yes}", "Yes", 1.0),
        (r"\boxed{1} was wrong, so \boxed{2}", "2", 1.0),
        (r"\boxed{1} was wrong, so \boxed{2}", "1", 0.0),
        (r"\boxed{3} or", ["2", "3"], 1.0),
        (r"\boxed{4} or", ["2", "3"], 0.0),
    ],
)
def test_last_box_of_a_response_is_graded(verifier: MathVerifier, response: str, label: Any, reward: float) -> None:
    assert grade(verifier, response, label) == reward


def test_plain_numbers_need_no_worker_process() -> None:
    verifier = MathVerifier()
    assert grade(verifier, r"\boxed{1,000}", "1000") == 1.0
    assert grade(verifier, r"\boxed{7}", "8") == 0.0
    assert verifier.pool.worker_pids() == []
    verifier.close()


def test_deepscaler_requires_the_end_of_thinking(verifier: MathVerifier) -> None:
    def reward(response: str, label: str = "1/2") -> float:
        return asyncio.run(deepscaler_reward(verifier, response, label))

    assert reward(r"<think>\boxed{9}</think> so \boxed{0.5}") == 1.0
    assert reward(r"###Response \boxed{\frac12}") == 1.0
    assert reward(r"<think>\boxed{0.5}</think> so \boxed{9}") == 0.0
    assert reward(r"<think>\boxed{0.5}</think> it is 0.5") == 0.0
    assert reward(r"\boxed{0.5}") == 0.0
    assert reward(r"###Response \boxed{0.5} ###Response \boxed{9}") == 1.0
    assert reward(r"###Response \boxed{9}</think> so \boxed{0.5}") == 1.0
    assert reward(r"</think> \boxed{}", "") == 0.0
    assert reward(r"</think> \boxed{7}", "so \\boxed{7}") == 1.0


def test_last_boxed_returns_the_last_complete_box() -> None:
    assert last_boxed(r"a \boxed{\frac{1}{2}} b \boxed{ x_{1} }") == "x_{1}"
    assert last_boxed(r"\boxed{1} then \boxed{2") == "1"
    assert last_boxed(r"$\boxed 5$ units") == "5"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed("none") is None
    assert last_boxed("\\boxed{") is None
    assert last_boxed("\\boxed $") is None
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed(r"} \boxed{ 5 } }") == "5"
    assert last_boxed(r"\boxed{1} and \boxed 2") == "2"
    assert last_boxed("\\boxed{" * 200_000) is None


def test_plain_number_parses_decimals_and_rejects_other_text() -> None:
    assert plain_number("-1,234.50") == Fraction(-2469, 2)
    assert plain_number("$7$") == 7
    assert plain_number(".5") == Fraction(1, 2)
    assert plain_number("5.") == 5
    assert plain_number("12,34") is None
    assert plain_number("1/2") is None
    assert plain_number("") is None
    assert after_thinking("a</think>b</think> c") == " c"
