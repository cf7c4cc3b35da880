"""An attempt: the model writes a kernel, reads what compiler, tests and clock say, and may write another.

`--custom-generate-function-path generate.py:generate`, `--custom-rm-path generate.py:reward`, and two log functions.
What kernels are written in, where they run and where the verdicts are kept (`kernel_language`, `kernel_card`,
`kernel_verdicts`) comes from the file of `--custom-config-path`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from judge import Judge, Judgement
from languages import LANGUAGES
from problems import problem_of

from slime.agent.conversation import converse
from slime.agent.messages import Message
from slime.agent.session.limits import LimitReached
from slime.agent.tools import opening_messages
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.runtime import runtime_for
from slime.utils.tracking_utils import log

LATER = 0.85
"""What a kernel of the second turn is worth, compared with the same one at once; of the third its square."""
TOO_LONG = Judgement(False, False, 0.0, "too long")
"""Of a kernel that was cut off at --rollout-max-response-len: there is nothing to compile."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Up to --max-turns kernels; the attempt ends early with one that cannot be better."""
    judge = judge_of(args)
    try:
        problem = problem_of(str(sample.label))
    except ValueError as error:
        raise UserError(f"{error}: correct the labels of the prompt file") from error
    judged: list[Judgement] = []
    async with converse(args, sample, sampling_params) as talk:
        told = opening_messages(args, sample)
        try:
            while not judged or (judged[-1].reward < 1 and len(judged) < args.max_turns):
                reply = await talk.ask(told)
                is_cut = talk.last_turn.finish_reason == "length"
                judged.append(TOO_LONG if is_cut else await judge.of(problem, reply.content))
                told = [Message("user", judged[-1].feedback)]
        except LimitReached:  # noted in the session: the sample is TRUNCATED
            pass
        return talk.finish(metadata={"kernels": summary(judged)})


def summary(judged: Sequence[Judgement]) -> dict[str, float]:
    """What an attempt came to; its reward is that of its best kernel, less for every turn before it."""
    if not judged:  # the first prompt was too long already
        names = ("reward", "turns", "cut", "compiles_at_once", "right_at_once", "right", "speed")
        return dict.fromkeys(names, 0.0)
    worth = [kernel.reward * LATER**turn for turn, kernel in enumerate(judged)]
    best = max(range(len(judged)), key=worth.__getitem__)
    return {
        "reward": worth[best],
        "turns": len(judged),
        "cut": float(TOO_LONG in judged),
        "compiles_at_once": float(judged[0].compiled),
        "right_at_once": float(judged[0].right),
        "right": float(any(kernel.right for kernel in judged)),
        "speed": judged[best].speed,
    }


def reward(args: Any, sample: Sample) -> float:
    """As `generate` noted it: there is nothing of the kernels left to look at."""
    return float(sample.metadata["kernels"]["reward"])


def judge_of(args: Any) -> Judge:
    """The run's judge; its sandboxes end with the run."""
    return runtime_for(args).owned(
        "kernel judge",
        lambda: make_judge(args.kernel_language, args.sandbox, args.kernel_card, Path(args.kernel_verdicts)),
        Judge.aclose,
    )


def make_judge(name: str, sandbox: str, card: int, verdicts: Path) -> Judge:
    """A judge of kernels in a language."""
    language = LANGUAGES[name]
    return Judge(language.bench(sandbox, card), language.naive, verdicts, sizes=language.timed)


def shares(samples: Iterable[Sample]) -> dict[str, float]:
    """Means over attempts; the speed (times the naive kernel's) is the geometric one of those with a right kernel."""
    rows: list[Mapping[str, float]] = [sample.metadata["kernels"] for sample in samples if "kernels" in sample.metadata]
    if not rows:
        return {}
    names = ("compiles_at_once", "right_at_once", "right", "turns", "cut")
    fast = [row["speed"] for row in rows if row["right"]]
    return {name: fmean(row[name] for row in rows) for name in names} | (
        {"speed": geometric_mean(fast)} if fast else {}
    )


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict[str, Any], rollout_time: float
) -> bool:
    """Beside the run's own metrics: what the kernels of a rollout were like, and how many were new."""
    verdicts = judge_of(args).verdicts
    counts = {"asked": verdicts.asked, "judged": verdicts.judged}
    metrics = {f"kernels/{name}": value for name, value in (shares(samples) | counts).items()}
    log(args, {**metrics, "rollout/step": rollout_id}, "rollout/step")
    return False


def log_evaluation(rollout_id: int, args: Any, data: Mapping[str, Any], extra_metrics: dict[str, Any]) -> bool:
    """The same of the held-out problems."""
    metrics = {
        f"eval/{name}/{what}": value
        for name, result in data.items()
        for what, value in shares(result["samples"]).items()
    }
    log(args, {**metrics, "eval/step": rollout_id}, "eval/step")
    return False
