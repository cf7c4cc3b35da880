"""`Tournament`: rewards a group's answers by rank, for `--group-rm`, with a judge that compares pairs.

Invariant: a match has a score or none. If a judge raises an exception or returns an invalid verdict, it is called again
a limited number of times, and then the match has no score; only a `UserError` and a cancellation are re-raised.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import inspect
import math
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from slime.config.plugins import is_async
from slime.data.json_samples import format_prompt
from slime.data.sample import Sample
from slime.engine.http.client import EngineClient, EngineRejected
from slime.errors import UserError
from slime.rollout.event_loop import DaemonThreads
from slime.rollout.outcomes import FailureLog, call_contained
from slime.rollout.rewards.worker_pool import RewardError

from .topologies import TOPOLOGIES, Pair, Score, play, rank_rewards


class JudgeFailed(RewardError):
    """A judge returned no valid verdict, for a reason unrelated to the answers."""


class Judge(Protocol):
    """Compares two answers to one prompt; may be a plain function, which is called in a thread."""

    def __call__(self, args: argparse.Namespace, first: Sample, second: Sample) -> float | Awaitable[float]:
        """Return 1 if the first is better, 0 if the second is, 1/2 for neither; raise if it cannot decide."""


@dataclass
class Calls:
    """Counts of a judge's calls, including retries, and of the calls that failed."""

    made: int = 0
    failed: int = 0


@dataclass
class Match:
    """Scores matches with one judge, with retries and a concurrency limit.

    With `swap`, a match is two calls with the answers in both orders, and the score is their mean. A judge that always
    prefers the same position returns 1 and then 0, which gives a tie.
    """

    judge: Judge
    swap: bool = True
    tries: int = 3
    first_pause_s: float = 0.5
    concurrency: int = 32
    failures: FailureLog = field(default_factory=FailureLog)

    def __post_init__(self) -> None:
        if self.tries < 1 or self.concurrency < 1:
            raise UserError(
                f"the tries and concurrency of a Match must be at least 1: tries is {self.tries}, concurrency is "
                f"{self.concurrency}"
            )
        self._seats = asyncio.Semaphore(self.concurrency)
        self._threads = DaemonThreads("judge", self.concurrency)
        weakref.finalize(self, self._threads.close)

    async def score(self, args: argparse.Namespace, first: Sample, second: Sample, calls: Calls) -> float | None:
        """Share of the point for the first answer; None if the judge gave no verdict in one of the orders."""
        orders = [self._asked(args, first, second, calls)]
        if self.swap:
            orders.append(self._asked(args, second, first, calls))
        verdicts = await asyncio.gather(*orders)
        if None in verdicts:
            return None
        shares = [share if place == 0 else 1 - share for place, share in enumerate(verdicts) if share is not None]
        return sum(shares) / len(shares)

    async def _asked(self, args: argparse.Namespace, first: Sample, second: Sample, calls: Calls) -> float | None:
        """Call the judge, with retries; an async judge is awaited here, a plain one runs in a thread."""
        for attempt in range(self.tries):
            if attempt:
                await asyncio.sleep(self.first_pause_s * 2 ** (attempt - 1))
            calls.made += 1
            try:
                async with self._seats:
                    call = partial(self.judge, args, first, second)
                    return _verdict_share(
                        await call_contained(
                            call if is_async(self.judge) else partial(self._result_of, call), "the judge"
                        )
                    )
            except UserError:
                raise
            except EngineRejected as error:  # the same request would be refused again
                calls.failed += 1
                self.failures.record("judge", error)
                return None
            except Exception as error:  # noqa: BLE001 - any exception of a judge is the outcome of this match
                calls.failed += 1
                self.failures.record("judge", error)
        return None

    async def _result_of(self, call: Callable[[], object]) -> object:
        """Run a plain judge in a thread, and await its result if that is awaitable."""
        result = await (await self._threads.begin(call, "the judge"))
        return await result if inspect.isawaitable(result) else result


def _verdict_share(verdict: Any) -> float:
    """Convert a verdict to a number in [0, 1]."""
    if isinstance(verdict, str | bytes) or not hasattr(verdict, "__float__"):
        raise JudgeFailed(f"a judge must return 1, 0 or 1/2, not {verdict!r:.80}")
    share = float(verdict)
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise JudgeFailed(f"a judge must return 1, 0 or 1/2, not {share}")
    return share


TOURNAMENT_KEY = "tournament"
"""Metadata key of a group's first sample for the tournament's counts, which `rollout/tournament_*` sum up."""


@dataclass(frozen=True)
class TournamentCounts:
    """Counts of a group's tournament, for metrics."""

    matches: int
    judge_calls: int
    judge_failures: int
    ties: int
    undecided: int


class Tournament:
    """Compares the answers of each group in pairs and rewards them by rank, from 0 for the last to 1 for the best.

    A player is a rollout: the samples that one attempt was split into play as one, represented by the last of them, and
    share its reward. Failed samples do not play. A player without any decided match is marked as failed, because the
    judge did not rank it; if no match is decided, the group fails. The draw depends only on the group's index.
    """

    def __init__(self, judge: Judge, topology: str = "seeded_single_elimination", **how: Any) -> None:
        """Create a tournament; `how` is passed to `Match`: swap, tries, first_pause_s, concurrency."""
        if topology not in TOPOLOGIES:
            near = difflib.get_close_matches(topology, TOPOLOGIES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"unknown tournament {topology!r}{hint}; known: {', '.join(TOPOLOGIES)}")
        self.topology = topology
        self._match = Match(judge, **how)

    async def rewards(self, args: argparse.Namespace, samples: Sequence[Sample]) -> list[float]:
        """Reward each sample, in order; samples without a decided match are marked as failed."""
        rollouts: dict[object, list[Sample]] = {}
        for position, sample in enumerate(samples):
            if sample.status is not Sample.Status.FAILED:
                own = ("alone", position) if sample.rollout_id is None else sample.rollout_id
                rollouts.setdefault(own, []).append(sample)
        if not rollouts:
            return [0.0] * len(samples)
        players = [members[-1] for members in rollouts.values()]
        calls = Calls()

        async def score_round(pairs: list[Pair]) -> Sequence[Score]:
            return await asyncio.gather(*(self._match.score(args, players[a], players[b], calls) for a, b in pairs))

        seeds = list(range(len(players)))
        random.Random(players[0].group_index or 0).shuffle(seeds)
        played = await play(TOPOLOGIES[self.topology], seeds, score_round)
        if all(level is None for level in played.levels):
            raise RewardError(
                f"the judge decided none of {len(played.matches)} matches ({calls.failed} of {calls.made} calls failed)"
            )
        earned: dict[int, float] = {}
        for members, reward in zip(rollouts.values(), rank_rewards(played.levels), strict=True):
            for sample in members:
                if reward is None:
                    sample.status = Sample.Status.FAILED
                    sample.failure = "reward: the judge decided none of its matches"
                earned[id(sample)] = 0.0 if reward is None else reward
        first = next(iter(rollouts.values()))[0]
        first.metadata[TOURNAMENT_KEY] = asdict(
            TournamentCounts(len(played.matches), calls.made, calls.failed, played.ties, played.undecided)
        )
        return [earned.get(id(sample), 0.0) for sample in samples]


PROMPT = """You compare two answers to the same request.

[Request]
{question}

[Answer A]
{first}

[Answer B]
{second}

Which answer serves the request better? Do not let their order or their length sway you. Think it over shortly, then \
end with [[A]], [[B]], or [[C]] if neither is better."""
"""Default prompt of a judge, for large models; most tasks define their own."""

_SHARES = {"A": 1.0, "B": 0.0, "C": 0.5, "TIE": 0.5}
_MARKED = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
_BARE = re.compile(r"\s*(A|B|C|tie)\s*\.?\s*", re.IGNORECASE)


def verdict_of(text: str) -> float:
    """Parse a judge's text into the first answer's share: by the last [[A]], [[B]] or [[C]], or by a letter alone.

    Other text raises `JudgeFailed`: an answer without a verdict is not a tie.
    """
    marked = _MARKED.findall(text)
    bare = _BARE.fullmatch(text)
    if marked:
        return _SHARES[marked[-1].upper()]
    if bare is not None:
        return _SHARES[bare[1].upper()]
    raise JudgeFailed(f"the judge's answer has no [[A]], [[B]] or [[C]]: {text[-80:]!r}")


def said_in_the_end(sample: Sample) -> str:
    """The part of an attempt that the judge sees: its last answer (`metadata["answer"]`, with tools), or all of it."""
    answer = sample.metadata.get("answer")
    return answer if isinstance(answer, str) else sample.response


def asked_for(sample: Sample) -> str:
    """The request that the judge sees: the prompt, or the last user message of a conversation."""
    if not isinstance(sample.prompt, list):
        return format_prompt(sample.prompt)
    return next((str(one["content"]) for one in reversed(sample.prompt) if one.get("role") == "user"), "")


@dataclass(frozen=True)
class ServedJudge:
    """A judge that is a model behind a chat endpoint: sends one `POST url/v1/chat/completions` for each call.

    `url` is a base URL. Without it, the requests go to the run's engines, so the judge is the current policy, or with
    `model` the frozen model of that name (`--sglang-config`). `prompt` has the fields {question}, {first} and {second},
    which `question_of` and `answer_of` fill in. `read` parses the model's text into a share. Sampling is greedy unless
    `temperature` is set.
    """

    url: str | None = None
    model: str | None = None
    prompt: str = PROMPT
    system: str | None = None
    question_of: Callable[[Sample], str] = asked_for
    answer_of: Callable[[Sample], str] = said_in_the_end
    read: Callable[[str], float] = verdict_of
    max_tokens: int = 512
    temperature: float = 0.0
    timeout_s: float = 120.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            filled = self.prompt.format(question="", first="<first>", second="<second>")
        except (LookupError, ValueError) as error:
            raise UserError(
                f"the judge's prompt cannot be filled in ({error!r}): its fields are {{question}}, {{first}} and "
                "{second}; write other braces twice"
            ) from error
        if "<first>" not in filled or "<second>" not in filled:
            raise UserError("the judge's prompt must have the fields {first} and {second} for the two answers")

    async def __call__(self, args: argparse.Namespace, first: Sample, second: Sample) -> float:
        """Return 1 if the model prefers the first, 0 for the second, 1/2 for neither; raise if there is no verdict."""
        content = self.prompt.format(
            question=self.question_of(first), first=self.answer_of(first), second=self.answer_of(second)
        )
        messages = [{"role": "user", "content": content}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        payload = {
            "model": self.model or "default",
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        async with EngineClient(self._address(args), timeout_s=self.timeout_s, api_key=self.api_key) as engine:
            return self.read(await engine.chat(payload))

    def _address(self, args: argparse.Namespace) -> str:
        """Base URL of the judge's server."""
        if self.url is not None:
            return self.url.rstrip("/").removesuffix("/v1")
        if self.model is None:
            return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        served: dict[str, tuple[str, int]] = args.sglang_model_routers
        if self.model not in served:
            there = ", ".join(served) or "none"
            raise UserError(
                f"no model {self.model!r} is served for the judge (there is: {there}): add it to --sglang-config or "
                "give ServedJudge a url"
            )
        host, port = served[self.model]
        return f"http://{host}:{port}"
