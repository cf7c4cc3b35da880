"""`Tournament`: the rewards of a group by rank, for `--group-rm`."""

from __future__ import annotations

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
from slime.data.json_samples import prompt_text
from slime.data.sample import Sample
from slime.engine.http.client import EngineClient, EngineRejected
from slime.errors import UserError
from slime.rollout.event_loop import DaemonThreads
from slime.rollout.outcomes import FailureLog, contained
from slime.rollout.rewards.tournament.topologies import TOPOLOGIES, Pair, Played, Score, play, rank_rewards
from slime.rollout.rewards.worker_pool import RewardError

# Judges of two answers, and how patiently they are asked.
#
# Invariant: a match has a score or none. What a judge raises, or answers beside the point, is asked about again and
# then is a match without a score; only a `UserError` and cancellation pass.


class JudgeFailed(RewardError):
    """A judge gave no verdict, for a reason that says nothing about the answers."""


class Judge(Protocol):
    """Compares two answers to one prompt; may be a plain function, which is called in a thread."""

    def __call__(self, args: Any, first: Sample, second: Sample) -> float | Awaitable[float]:
        """1 if the first is better, 0 if the second is, 1/2 for neither; raises where it cannot say."""


@dataclass
class Calls:
    """How a judge was asked: calls (those again included) and those that failed."""

    made: int = 0
    failed: int = 0


@dataclass
class Match:
    """One judge and how it is asked.

    With `swap` a match is two calls, with the answers in both orders, and the score is their mean: a judge that prefers
    a place whatever stands there says 1 and then 0, which is a tie.
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
                f"a judge must be asked at least once, by at least one at a time: tries is {self.tries}, "
                f"concurrency {self.concurrency}"
            )
        self._seats = asyncio.Semaphore(self.concurrency)
        self._threads = DaemonThreads("judge", self.concurrency)
        weakref.finalize(self, self._threads.close)

    async def score(self, args: Any, first: Sample, second: Sample, calls: Calls) -> float | None:
        """The first one's share of the point, or None where the judge gave no verdict in one of the orders."""
        orders = [self._asked(args, first, second, calls)]
        if self.swap:
            orders.append(self._asked(args, second, first, calls))
        said = await asyncio.gather(*orders)
        if None in said:
            return None
        shares = [share if place == 0 else 1 - share for place, share in enumerate(said) if share is not None]
        return sum(shares) / len(shares)

    async def _asked(self, args: Any, first: Sample, second: Sample, calls: Calls) -> float | None:
        for attempt in range(self.tries):
            if attempt:
                await asyncio.sleep(self.first_pause_s * 2 ** (attempt - 1))
            calls.made += 1
            try:
                async with self._seats:
                    return _share(await self._verdict(args, first, second))
            except UserError:
                raise
            except EngineRejected as error:  # the same request would be refused again
                calls.failed += 1
                self.failures.record("judge", error)
                return None
            except Exception as error:  # noqa: BLE001 - whatever a judge raises is the outcome of this match
                calls.failed += 1
                self.failures.record("judge", error)
        return None

    async def _verdict(self, args: Any, first: Sample, second: Sample) -> Any:
        """What the judge returns: an async one is awaited here, a plain one runs in a thread."""
        call = partial(self.judge, args, first, second)
        return await contained(call if is_async(self.judge) else partial(self._result_of, call), "the judge")

    async def _result_of(self, call: Callable[[], Any]) -> Any:
        result = await (await self._threads.begin(call, "the judge"))
        return await result if inspect.isawaitable(result) else result


def _share(verdict: Any) -> float:
    """A verdict as a number of [0, 1]."""
    if isinstance(verdict, str | bytes) or not hasattr(verdict, "__float__"):
        raise JudgeFailed(f"a judge must say 1, 0 or 1/2, not {verdict!r:.80}")
    share = float(verdict)
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise JudgeFailed(f"a judge must say 1, 0 or 1/2, not {share}")
    return share


NOTED = "tournament"
"""Where a group's first sample carries what was played, which `rollout/tournament_*` are the sums of."""


@dataclass(frozen=True)
class Account:
    """What a group's tournament took."""

    matches: int
    judge_calls: int
    judge_failures: int
    ties: int
    undecided: int


class Tournament:
    """Compares the answers of each group in pairs and rewards them by rank, 0 for the last to 1 for the best.

    A player is a rollout: samples that one attempt was split into play as one, by the last of them, and share its
    reward. Failed samples do not play. A player whose matches all stayed undecided is given up as a failure, as the
    judge said nothing about it; if that is everybody the group fails. The draw depends on the group's index alone.
    """

    def __init__(self, judge: Judge, topology: str = "seeded_single_elimination", **how: Any) -> None:
        """`how` goes to `Match`: swap, tries, first_pause_s, concurrency."""
        if topology not in TOPOLOGIES:
            near = difflib.get_close_matches(topology, TOPOLOGIES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"unknown tournament {topology!r}{hint}; known: {', '.join(TOPOLOGIES)}")
        self.topology = topology
        self._match = Match(judge, **how)

    async def rewards(self, args: Any, samples: Sequence[Sample]) -> list[float]:
        """One reward for each sample, in their order; those of samples that are given up do not count."""
        rollouts: dict[Any, list[Sample]] = {}
        for position, sample in enumerate(samples):
            if sample.status is not Sample.Status.FAILED:
                own = ("alone", position) if sample.rollout_id is None else sample.rollout_id
                rollouts.setdefault(own, []).append(sample)
        if not rollouts:
            return [0.0] * len(samples)
        played, calls = await self._played(args, [members[-1] for members in rollouts.values()])
        earned: dict[int, float] = {}
        for members, reward in zip(rollouts.values(), rank_rewards(played.levels), strict=True):
            for sample in members:
                earned[id(sample)] = _settled(sample, reward)
        first = next(iter(rollouts.values()))[0]
        first.metadata[NOTED] = asdict(
            Account(len(played.matches), calls.made, calls.failed, played.ties, played.undecided)
        )
        return [earned.get(id(sample), 0.0) for sample in samples]

    async def _played(self, args: Any, players: Sequence[Sample]) -> tuple[Played, Calls]:
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
        return played, calls


def _settled(sample: Sample, reward: float | None) -> float:
    """The reward of a sample; without one it is given up."""
    if reward is None:
        sample.status, sample.failure = Sample.Status.FAILED, "reward: the judge decided none of its matches"
        return 0.0
    return reward


# A judge that is a model behind a chat endpoint: of the run's engines, of a frozen model beside it, or any other.

PROMPT = """You compare two answers to the same request.

[Request]
{question}

[Answer A]
{first}

[Answer B]
{second}

Which answer serves the request better? Do not let their order or their length sway you. Think it over shortly, then \
end with [[A]], [[B]], or [[C]] if neither is better."""
"""A judge prompt for models of a real size; a task usually has one of its own."""

_SHARES = {"A": 1.0, "B": 0.0, "C": 0.5, "TIE": 0.5}
_MARKED = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
_BARE = re.compile(r"\s*(A|B|C|tie)\s*\.?\s*", re.IGNORECASE)


def verdict_of(text: str) -> float:
    """What a judge wrote as the first answer's share: by the last [[A]], [[B]] or [[C]], or by a letter alone.

    Anything else raises `JudgeFailed`: a text without a verdict is no tie.
    """
    marked = _MARKED.findall(text)
    bare = _BARE.fullmatch(text)
    if marked:
        return _SHARES[marked[-1].upper()]
    if bare is not None:
        return _SHARES[bare[1].upper()]
    raise JudgeFailed(f"the judge's answer has no [[A]], [[B]] or [[C]]: {text[-80:]!r}")


def said_in_the_end(sample: Sample) -> str:
    """What the judge is shown of an attempt: its last answer (`metadata["answer"]`, with tools), or all of it."""
    answer = sample.metadata.get("answer")
    return answer if isinstance(answer, str) else sample.response


def asked_for(sample: Sample) -> str:
    """The request: the prompt, of a conversation the last message that the user wrote."""
    if not isinstance(sample.prompt, list):
        return prompt_text(sample.prompt)
    return next((str(one["content"]) for one in reversed(sample.prompt) if one.get("role") == "user"), "")


@dataclass(frozen=True)
class ServedJudge:
    """Asks `POST url/v1/chat/completions`, once for each call.

    `url` is a base URL; without one it is the engines of the run, the policy as it is now, or with `model` the frozen
    model of that name beside it (`--sglang-config`). `prompt` has the fields {question}, {first} and {second};
    `question_of` and `answer_of` say what is put there, and `read` makes a share of what comes back. Greedy, unless
    `temperature` says otherwise.
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
                "{second}, and other braces are written twice"
            ) from error
        if "<first>" not in filled or "<second>" not in filled:
            raise UserError("the judge's prompt must have the fields {first} and {second}: it is shown two answers")

    async def __call__(self, args: Any, first: Sample, second: Sample) -> float:
        """1 if the model prefers the first, 0 for the second, 1/2 for neither; raises where there is no verdict."""
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

    def _address(self, args: Any) -> str:
        if self.url is not None:
            return self.url.rstrip("/").removesuffix("/v1")
        if self.model is None:
            return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        served: dict[str, tuple[str, int]] = args.sglang_model_routers
        if self.model not in served:
            there = ", ".join(served) or "none"
            raise UserError(
                f"no model {self.model!r} is served for the judge (there is: {there}); name it in --sglang-config, or "
                "give ServedJudge a url"
            )
        host, port = served[self.model]
        return f"http://{host}:{port}"
