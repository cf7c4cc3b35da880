"""Solvers, critics and a judge, all played by the one policy, and who earns what.

--custom-generate-function-path examples/multi_agent/team.py:generate
--custom-reward-post-process-path examples/multi_agent/team.py:by_role
--custom-rollout-log-function-path examples/multi_agent/team.py:log_roles
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from task import CRITIC, JUDGE, RIGHT, SOLVER, SOLVERS, WRONG, is_right, judged_well, to_check, to_choose

from slime.agent.conversation import converse
from slime.agent.messages import Message
from slime.algorithms.rewards import RewardGroups, normalize_group_rewards
from slime.data.sample import Sample

TEAM_SHARE = 0.2
"""The part of a role's reward that is the team's success; the rest is for its own work."""


class Part(NamedTuple):
    """What one agent said, and the samples of its session."""

    said: str
    samples: list[Sample]


async def act(args: Any, sample: Sample, params: Mapping[str, Any], role: str, text: str) -> Part:
    """One agent: a session of its own, with the prompt of its role."""
    async with converse(args, sample, params) as talk:
        reply = await talk.ask([Message("system", role), Message("user", text)])
        return Part(reply.content.strip(), talk.finish(metadata={"role": role}))


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Several solvers at once, a critic on each answer, all at once, then the judge; every session is a sample.

    In training one more critic practises on a wrong answer that is planted and that the judge never sees. An evaluation
    has the judge's sample alone, so that it counts the team's success.
    """
    question, label = str(sample.prompt[0]["content"]), str(sample.label)
    solvers = await asyncio.gather(*(act(args, sample, sampling_params, SOLVER, question) for _ in range(SOLVERS)))
    answers = [part.said for part in solvers]
    checked = answers if evaluation else [*answers, planted_answer(question, label, sample)]
    critics = await asyncio.gather(
        *(act(args, sample, sampling_params, CRITIC, to_check(question, answer)) for answer in checked)
    )
    verdicts = [part.said for part in critics[:SOLVERS]]
    judge = await act(args, sample, sampling_params, JUDGE, to_choose(question, answers, verdicts))
    team = float(is_right(judge.said, label))
    _pay([judge], [team], team)
    if evaluation:
        return judge.samples
    _pay(solvers, [float(is_right(answer, label)) for answer in answers], team)
    _pay(critics, [float(judged_well(c.said, a, label)) for c, a in zip(critics, checked, strict=True)], team)
    for critic, answer in zip(critics, checked, strict=True):
        for one in critic.samples:
            one.metadata["truth"] = RIGHT if is_right(answer, label) else WRONG
    if not any(is_right(answer, label) for answer in answers):
        for one in judge.samples:  # it had nothing to choose from: neither praise nor blame
            one.remove_sample = True
    return [one for part in (*solvers, *critics, judge) for one in part.samples]


def planted_answer(question: str, label: str, sample: Sample) -> str:
    """A wrong answer to practise on: solvers who have learned leave critics too few to learn from."""
    wrong = [number for number in question.split() if number != label]
    return random.Random(f"planted {sample.index} {question}").choice(wrong)


def _pay(parts: Sequence[Part], own: Sequence[float], team: float) -> None:
    for part, earned in zip(parts, own, strict=True):
        for one in part.samples:
            one.reward = (1 - TEAM_SHARE) * earned + TEAM_SHARE * team
            one.metadata["own"] = earned


def by_role(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Rewards, and rewards compared with those who had the same work to do.

    A critic's work is easier than a solver's: measured against one common mean it would be praised for being a critic.
    Solvers and judges are compared with those of the same question. And while most answers are wrong, one who says so
    of all of them is mostly right: critics are compared with all critics of the step whose answers are as right or as
    wrong as theirs, and both kinds of answers have the same weight, however many there are. So a word that pays on the
    one kind costs as much on the other.
    """
    raw = [0.0 if sample.reward is None else float(sample.reward) for sample in samples]
    left_out = [sample.remove_sample or sample.reward is None for sample in samples]
    truths = [sample.metadata.get("truth") for sample in samples]
    work = [
        (sample.metadata.get("role"), sample.group_index if truth is None else truth)
        for sample, truth in zip(samples, truths, strict=True)
    ]
    shaped = normalize_group_rewards(raw, RewardGroups(work, excluded=left_out))
    count = Counter(truth for truth, out in zip(truths, left_out, strict=True) if truth is not None and not out)
    return raw, [
        value if truth is None or not count[truth] else value * count.total() / (2 * count[truth])
        for value, truth in zip(shaped, truths, strict=True)
    ]


def well_done(samples: Sequence[Sample]) -> dict[str, float]:
    """How well each role worked: the share of solvers, critics and judges whose own work was right.

    For critics it is the mean of two shares, of right answers and of wrong ones that they saw for what they are, so
    that saying the same of all answers is 1/2.
    """
    own: dict[tuple[str, str | None], list[float]] = {}
    for sample in samples:
        if "own" in sample.metadata and not sample.remove_sample:
            work = (sample.metadata["role"], sample.metadata.get("truth"))
            own.setdefault(work, []).append(sample.metadata["own"])
    shares: dict[str, list[float]] = {}
    for (role, _), values in sorted(own.items(), key=str):
        shares.setdefault(role, []).append(fmean(values))
    return {role: fmean(values) for role, values in shares.items()}


def log_roles(rollout_id: int, args: Any, samples: Sequence[Sample], extra: Any, seconds: float) -> bool:
    """How well each role worked, a line a rollout in roles.jsonl; the usual metrics are logged as well."""
    line = {"rollout_id": rollout_id, **well_done(samples)}
    with open(Path(args.output_dir) / "roles.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return False
