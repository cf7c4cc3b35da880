"""`--rm-type math`: 1.0 when the response's last boxed answer means the same as the label, else 0.0.

Plain numbers are compared here, exactly; everything else by math-verify in a guarded process, because a model can
write expressions that take for ever.
"""

from __future__ import annotations

from typing import Any

from slime.cluster.devices import cpu_cores
from slime.data.prompt_rows import accepted, label_text
from slime.rollout.rewards.answers import last_boxed, marked_answer, plain_number
from slime.rollout.rewards.guard import GuardedPool

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
