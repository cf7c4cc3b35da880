"""`--rm-type math`: 1.0 when the response's last boxed answer means the same as the label, else 0.0.

Plain numbers are compared here, exactly; everything else by math-verify in a guarded process, because a model can
write expressions that take for ever.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from slime.cluster.devices import cpu_cores
from slime.data.prompt_rows import accepted, label_text
from slime.rollout.rewards.simple import last_boxed, marked_answer, plain_number
from slime.rollout.rewards.worker_pool import GuardedPool

JUDGED_WITHIN_S = 10.0
_LONGEST_ANSWER = 4096


def default_workers() -> int:
    """Half of the cores, from 2 to 16: engines and trainers need theirs."""
    return max(2, min(16, cpu_cores() // 2))


class MathVerifier:
    """Compares answers; owns the worker processes that do so."""

    def __init__(self, *, workers: int = 2, deadline_s: float = JUDGED_WITHIN_S) -> None:
        self.pool = GuardedPool("slime.rollout.rewards.math_worker", size=workers, deadline_s=deadline_s)

    async def grade(self, response: str, label: Any) -> float:
        r"""Judge the last `\boxed{}` of `response`; without one there is no answer."""
        return await self.grade_answer(last_boxed(response) or "", label)

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    async def grade_answer(self, answer: str, label: Any) -> float:
        """Judge an answer that was extracted already. A list of labels means: any of them."""
        if not answer or len(answer) > _LONGEST_ANSWER:
            return 0.0
        labels = accepted(label)
        for one in labels:
            if await self._is_equal(answer, _label_text(one)):
                return 1.0
        return 0.0

    async def _is_equal(self, answer: str, label: str) -> bool:
        if answer == label:
            return True
        number, expected = plain_number(answer), plain_number(label)
        if number is not None and expected is not None:
            return number == expected
        reply = await self.pool.ask({"prediction": answer, "label": label})
        return bool(reply["equal"])


def _label_text(label: Any) -> str:
    text = marked_answer(label_text(label))
    boxed = last_boxed(text)
    return text if boxed is None else boxed


# `--rm-type dapo`: the last `Answer: ...` line in the end of the response against the label, as DAPO scores it:
# `{"score": +1 or -1, "acc": bool, "pred": text}`. Equality is of texts in Minerva's normal form or in ours, which
# leaves out more wrapping, or of plain numbers. A strict verdict goes by the last box alone, whose content must be the
# label.

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


_REPLACED = (
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
_LEFT_OUT = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}"),
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}"),
    *("\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)
"""What Minerva's evaluation takes out of answers, in its order (Lewkowycz et al. 2022, appendix D.1), and the ends of
turns that a response may still have in its text."""


def dapo_reward(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Score the end of one response.

    A strict verdict looks at the last 100 characters, or from 100 before the last of four `pause_tokens_index` on.
    """
    if strict_box_verify:
        correct, prediction = _strictly_boxed(solution_str, ground_truth, pause_tokens_index)
    else:
        correct, prediction = _answered(solution_str[-_TAIL_CHARACTERS:], ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def _strictly_boxed(solution: str, label: Any, pause_tokens_index: Sequence[int] | None) -> tuple[bool, str | None]:
    if pause_tokens_index is None:
        answer = last_boxed(solution[-_STRICT_TAIL_CHARACTERS:])
    elif len(pause_tokens_index) != 4:
        raise ValueError(f"pause_tokens_index must have 4 entries, not {len(pause_tokens_index)}")
    else:
        answer = last_boxed(solution[max(0, pause_tokens_index[-1] - _STRICT_TAIL_CHARACTERS) :])
    return answer is not None and answer in map(label_text, accepted(label)), answer


def _answered(tail: str, label: Any) -> tuple[bool, str]:
    found = _ANSWER.findall(tail)
    if not found:
        return False, NO_ANSWER
    labels = [marked_answer(label_text(one)) for one in accepted(label)]
    as_minerva = normalize_final_answer(found[-1])
    if as_minerva and as_minerva in map(normalize_final_answer, labels):
        return True, as_minerva
    prediction = normalized(found[-1])
    return any(_same(prediction, normalized(one)) for one in labels), prediction


def normalize_final_answer(final_answer: Any) -> str:
    """An answer, a text or a number, in the normal form of Minerva's evaluation."""
    text = str(final_answer).rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for words in _LEFT_OUT:
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


# `--rm-type deepscaler`: the boxed answer after the thinking, 1.0 or 0.0; a response that never ended its thinking (no
# `</think>`, no `###Response`) has no answer. What follows the last `</think>` counts, or what stands between the
# first `###Response` and the next.

_END_OF_THINKING = "</think>"
_RESPONSE = "###Response"


async def deepscaler_reward(verifier: MathVerifier, response: str, label: Any) -> float:
    """Judge the last boxed answer that follows the end of thinking."""
    if _END_OF_THINKING in response:
        solution = response.rpartition(_END_OF_THINKING)[2]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0.0
    answer = last_boxed(solution)
    return 0.0 if answer is None or label == "" else await verifier.grade_answer(answer, label)


# Verdicts of the math verifier for code without `await`, wherever it runs: on an event loop's thread too.
#
# One verifier serves all such calls of a process, so that its workers start once; they end with the process.


def deepscaler_blocking(response: str, label: Any) -> float:
    """1.0 when the boxed answer after the thinking is the label, else 0.0."""
    return _judged(lambda verifier: deepscaler_reward(verifier, response, label))


def boxed_answer_is(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last `\boxed{}` of the solution means the same as the ground truth; an empty one is never met."""
    answer = last_boxed(solution_str)
    return answer is not None and ground_truth not in (None, "") and answer_is(answer, ground_truth)


def answer_is(given_answer: str | None, ground_truth: Any) -> bool:
    """Whether an answer that was extracted already means the same as the ground truth."""
    if given_answer is None:
        return False
    return _judged(lambda verifier: verifier.grade_answer(given_answer, ground_truth)) == 1.0


def _judged(ask: Callable[[MathVerifier], Coroutine[Any, Any, float]]) -> float:
    """Wait for what `ask` asks of the verifier; the calling thread does nothing else meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="reward-blocking") as thread:
        return thread.submit(asyncio.run, ask(_shared_verifier())).result()


@cache
def _shared_verifier() -> MathVerifier:
    return MathVerifier()
