r"""Rewards for mathematical answers: `--rm-type math`, `dapo` and `deepscaler`, and their blocking forms.

`math` gives 1.0 when the response's last boxed answer means the same as the label, else 0.0. Plain numbers are compared
here, exactly; everything else by math-verify in a guarded process, because a model can write expressions that never
finish.

`dapo` compares the last `Answer: ...` line in the end of the response with the label, as DAPO scores it, and returns
`{"score": +1 or -1, "acc": bool, "pred": text}`. Two answers are equal if they are the same text in Minerva's normal
form or in ours, which removes more wrapping, or the same plain number. A strict verdict uses only the last `\boxed{}`,
whose content must be the label.

`deepscaler` gives 1.0 or 0.0 for the boxed answer after the thinking: the text after the last `</think>`, or between
the first `###Response` and the next. A response with neither marker has not ended its thinking and has no answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from slime.cluster.devices import cpu_cores
from slime.data.prompt_rows import accepted, label_text
from slime.rollout.rewards.simple import answer_after_marker, last_boxed, plain_number
from slime.rollout.rewards.worker_pool import GuardedPool
from slime.storage.json_types import JsonObject

JUDGED_WITHIN_S = 10.0
_LONGEST_ANSWER = 4096


def default_workers() -> int:
    """Default number of workers: half of the CPU cores, from 2 to 16, because engines and trainers need the others."""
    return max(2, min(16, cpu_cores() // 2))


class MathVerifier:
    """Compares answers with labels; owns the worker processes that run math-verify."""

    def __init__(self, *, workers: int = 2, deadline_s: float = JUDGED_WITHIN_S) -> None:
        self.pool = GuardedPool("slime.rollout.rewards.math_worker", size=workers, deadline_s=deadline_s)

    async def grade(self, response: str, label: object) -> float:
        r"""Judge the last `\boxed{}` of `response`; without one there is no answer."""
        return await self.grade_answer(last_boxed(response) or "", label)

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    async def grade_answer(self, answer: str, label: object) -> float:
        """Judge an extracted answer; if the label is a list, any of its entries may match."""
        if not answer or len(answer) > _LONGEST_ANSWER:
            return 0.0
        for one in accepted(label):
            text = answer_after_marker(label_text(one))
            boxed = last_boxed(text)
            expected = text if boxed is None else boxed
            if answer == expected:
                return 1.0
            number, expected_number = plain_number(answer), plain_number(expected)
            if number is not None and expected_number is not None:
                is_equal = number == expected_number
            else:
                reply = await self.pool.ask({"prediction": answer, "label": expected})
                is_equal = bool(reply["equal"])
            if is_equal:
                return 1.0
        return 0.0


NO_ANSWER = "[INVALID]"
_TAIL_CHARACTERS = 300
_STRICT_TAIL_CHARACTERS = 100
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = re.compile(
    r"\b(?:square|cubic|ways|integers?|dollars?|mph|inches|hours?|minutes?|seconds?|days?|years?|meters?|meals|edges|"
    r"students|points|degrees?|units?|cents?|feet|miles?|km|cm|mm|kg|cm\^2|people|apples|percent)\b"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline|underline)\s*\{([^{}]*)\}")
_FRACTION_WITHOUT_BRACES = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_ROOT_WITHOUT_BRACES = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\[!,;: ]|\^\s*\{?\\circ\}?|\\%|%|\\?\$|\s+|\\$")


_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED_STRINGS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}"),
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}"),
    *("\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)
"""Strings that Minerva's evaluation removes from answers, in its order (Lewkowycz et al. 2022, appendix D.1), and
end-of-turn markers that may be left in the text of a response."""


def dapo_reward(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> JsonObject:
    """Score the end of one response with DAPO's rule.

    A strict verdict uses the last 100 characters, or the text from 100 characters before the last of the four entries
    of `pause_tokens_index`.
    """
    prediction: str | None
    if strict_box_verify:
        start = -_STRICT_TAIL_CHARACTERS
        if pause_tokens_index is not None:
            if len(pause_tokens_index) != 4:
                raise ValueError(f"pause_tokens_index must have 4 entries, not {len(pause_tokens_index)}")
            start = max(0, pause_tokens_index[-1] - _STRICT_TAIL_CHARACTERS)
        prediction = last_boxed(solution_str[start:])
        correct = prediction is not None and prediction in map(label_text, accepted(ground_truth))
    else:
        correct, prediction = _match_answer_line(solution_str[-_TAIL_CHARACTERS:], ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def _match_answer_line(tail: str, label: object) -> tuple[bool, str]:
    """Compare the last `Answer: ...` line with the label; return whether they are equal, and the answer."""
    found = _ANSWER.findall(tail)
    if not found:
        return False, NO_ANSWER
    labels = [answer_after_marker(label_text(one)) for one in accepted(label)]
    as_minerva = normalize_final_answer(found[-1])
    if as_minerva and as_minerva in map(normalize_final_answer, labels):
        return True, as_minerva
    prediction = normalize_math_answer(found[-1])
    number = plain_number(prediction)
    for expected in map(normalize_math_answer, labels):
        if prediction == expected:
            if expected:
                return True, prediction
        elif number is not None and number == plain_number(expected):
            return True, prediction
    return False, prediction


def normalize_final_answer(final_answer: object) -> str:
    """Convert an answer, a text or a number, to the normal form of Minerva's evaluation."""
    text = str(final_answer).rpartition("=")[2]
    for before, after in _REPLACEMENTS:
        text = text.replace(before, after)
    for words in _REMOVED_STRINGS:
        text = text.replace(words, "")
    formula = re.search(r"\$(.*?)\$", text)
    text = formula[1] if formula else text
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def normalize_math_answer(answer: str) -> str:
    """Remove an answer's wrapping: left side of an equation, box, dollar signs, text commands, units and spaces."""
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


_END_OF_THINKING = "</think>"
_RESPONSE = "###Response"


async def deepscaler_reward(verifier: MathVerifier, response: str, label: object) -> float:
    """Judge the last boxed answer after the end of the thinking."""
    if _END_OF_THINKING in response:
        solution = response.rpartition(_END_OF_THINKING)[2]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0.0
    answer = last_boxed(solution)
    return 0.0 if answer is None or label == "" else await verifier.grade_answer(answer, label)


def deepscaler_blocking(response: str, label: object) -> float:
    """Score a response with the `deepscaler` reward, blocking."""
    return _run_blocking(lambda verifier: deepscaler_reward(verifier, response, label))


def boxed_answer_is(solution_str: str, ground_truth: object) -> bool:
    r"""Compare the last `\boxed{}` of the solution with the ground truth, blocking; False for an empty ground truth."""
    answer = last_boxed(solution_str)
    return answer is not None and ground_truth not in (None, "") and answer_is(answer, ground_truth)


def answer_is(given_answer: str | None, ground_truth: object) -> bool:
    """Compare an extracted answer with the ground truth, blocking."""
    if given_answer is None:
        return False
    return _run_blocking(lambda verifier: verifier.grade_answer(given_answer, ground_truth)) == 1.0


def _run_blocking(ask: Callable[[MathVerifier], Coroutine[object, object, float]]) -> float:
    """Run `ask` with the shared verifier in a thread of its own and wait, also on an event loop's thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="reward-blocking") as thread:
        return thread.submit(asyncio.run, ask(_shared_verifier())).result()


@cache
def _shared_verifier() -> MathVerifier:
    """The verifier of all blocking calls of this process; its workers start once and end with the process."""
    return MathVerifier()
