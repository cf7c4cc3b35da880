"""`RewardHub`: finds the right verifier for a sample and returns its verdict.

Invariant: a verdict is a finite number or a dict; a verifier that cannot judge raises (`RewardError`, or whatever a
custom function raised), and a flag that makes no sense is a `UserError`. Nothing turns into a reward of 0 here. A
function of the user that returns something else (None, a text, a list, no finite number) is wrong for every sample: a
`UserError` that names function and sample. A reward service that answers so fails the sample it was asked about.
Every call ends within --reward-timeout, not counting the time it waits for others of our own making: an async function
is cancelled, a plain one is left behind in its thread, a worker is killed.

Custom functions (`--custom-rm-path`, or a sample's own `custom_rm_path`, which goes first) may be plain or async. They
take one sample, or a list of them when their second parameter is called `samples`, when they are a class with
`compute_reward`, or when `--group-rm` is on and the function is the flag's.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from threading import Lock
from typing import Any

from slime.cluster.watchdog import Wait, wait_for, waiting
from slime.config import Config
from slime.config.flags.rollout import RM_TYPES, compares_with_label
from slime.config.plugins import is_async, load_plugin, takes_samples
from slime.config.plugins.args import run_mark
from slime.config.plugins.view import plugin_args
from slime.data.prompt_rows import BY_RM_TYPE
from slime.data.sample import Reward, Sample
from slime.errors import UserError
from slime.rollout.event_loop import DaemonThreads
from slime.rollout.legacy_signatures import as_reward
from slime.rollout.outcomes import contained
from slime.rollout.rewards.ifbench import ifbench_reward
from slime.rollout.rewards.math import JUDGED_WITHIN_S, MathVerifier, dapo_reward, deepscaler_reward, default_workers
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.simple import f1_reward, gpqa_reward, last_boxed, random_reward
from slime.rollout.rewards.worker_pool import RewardError

BOXED_PREFIX = "boxed_"
GIVEN = "the given reward function"
FLAG = "--custom-rm-path"
TIMEOUT_FLAG = "--reward-timeout"
_JUDGED_BY_WORKERS = ("math", "deepscaler")
_KEPT_HUBS = 8


class RewardTimeout(RewardError):
    """A reward function did not answer within --reward-timeout."""


@dataclass(frozen=True)
class RewardSettings:
    """The flags that rewards depend on; those that a namespace of the user's lacks have their defaults."""

    rm_type: str | None = None
    rm_url: str | None = None
    custom_rm_path: str | None = None
    group_rm: bool = False
    reward_key: str | None = None
    eval_reward_key: str | None = None
    reward_timeout: float = 600.0
    reward_workers: int | None = None

    @classmethod
    def of(cls, args: Any) -> RewardSettings:
        """As a config, or any other object with some of these attributes, says."""
        values: dict[str, Any] = {one.name: getattr(args, one.name, one.default) for one in fields(cls)}
        return cls(**values)


class RewardHub:
    """Scores samples as `--rm-type` and `--custom-rm-path` say; owns the processes its verifiers use."""

    def __init__(self, flags: Any, function: Callable[..., Any] | None = None, *, args: Any = None) -> None:
        """`function` takes the place of --custom-rm-path; it comes from callers that have it as an object.

        `flags` is a config or a namespace; `args` is what functions are called with, unless a call brings its own.
        """
        self._flags = flags
        self.settings = settings = RewardSettings.of(flags)
        self.args = _for_plugins(flags) if args is None else args
        self._verifier = MathVerifier(
            workers=settings.reward_workers or default_workers(),
            deadline_s=min(JUDGED_WITHIN_S, settings.reward_timeout),
        )
        self._functions: dict[str, Callable[..., Any]] = {}
        self._threads = DaemonThreads("reward")
        weakref.finalize(self, self._threads.close)
        self._given_name = GIVEN if function is None else f"{GIVEN} {_name_of(function)}"
        if function is not None:
            self._functions[GIVEN] = as_reward(function, flags, self.args, GIVEN)

    async def score(self, sample: Sample, args: Any = None) -> Reward:
        """The reward of one sample."""
        args = self.args if args is None else args
        path = self._custom_path(sample)
        if path is None:
            rm_type = self._rm_type(sample)
            who = f"--rm-type {rm_type}"
            if rm_type.removeprefix(BOXED_PREFIX) in _JUDGED_BY_WORKERS:
                with waiting(who, "to be judged, perhaps behind others", timeout_s=None):
                    verdict = await self._builtin(sample)  # its time begins when a worker takes it up
            else:
                verdict = await self._within_deadline(self._builtin(sample), who)
            return self._checked(verdict, who, sample, wrong=RewardError)
        function = self._function(path)
        if self._in_list(sample, function):
            return (await self._call_with_list(path, function, args, [sample]))[0]
        return self._checked(await self._call(path, function, args, sample), self._who(path), sample)

    async def score_group(self, samples: Sequence[Sample], args: Any = None) -> list[Reward]:
        """The rewards of several samples, in their order; all are judged before the first error, if any, is raised."""
        rewards: list[Reward] = []
        for outcome in await self.outcomes(samples, args):
            if isinstance(outcome, Exception):
                raise outcome
            rewards.append(outcome)
        return rewards

    async def outcomes(self, samples: Sequence[Sample], args: Any = None) -> list[Reward | Exception]:
        """For each sample its reward, or why it has none; samples with one custom list function are judged together."""
        args = self.args if args is None else args
        together: dict[str, list[int]] = {}
        alone: list[int] = []
        for position, sample in enumerate(samples):
            path = self._custom_path(sample)
            if path is not None and self._in_list(sample, self._function(path)):
                together.setdefault(path, []).append(position)
            else:
                alone.append(position)
        calls = [self._score_as_list(samples[position], args) for position in alone]
        calls += [
            self._call_with_list(path, self._function(path), args, [samples[position] for position in positions])
            for path, positions in together.items()
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[int, Reward | Exception] = {}
        for positions, result in zip(
            [[position] for position in alone] + list(together.values()), results, strict=True
        ):
            if isinstance(result, Exception):
                found.update(dict.fromkeys(positions, result))
            elif isinstance(result, BaseException):
                raise result
            else:
                found.update(zip(positions, result, strict=True))
        return [found[position] for position in range(len(samples))]

    async def aclose(self) -> None:
        """End the verifier processes."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the verifier processes; for callers without an event loop."""
        self._threads.close()
        self._verifier.close()

    def _custom_path(self, sample: Sample) -> str | None:
        if sample.custom_rm_path == BY_RM_TYPE:
            return None
        return sample.custom_rm_path or (GIVEN if GIVEN in self._functions else self.settings.custom_rm_path)

    def _function(self, path: str) -> Callable[..., Any]:
        if path not in self._functions:
            self._functions[path] = as_reward(load_plugin(path, FLAG), self._flags, self.args, f"{FLAG} {path}")
        return self._functions[path]

    def _in_list(self, sample: Sample, function: Callable[..., Any]) -> bool:
        """Whether the function gets lists; --group-rm speaks of the flag's function, not of a sample's own."""
        return takes_samples(function) or (self.settings.group_rm and sample.custom_rm_path is None)

    async def _score_as_list(self, sample: Sample, args: Any) -> list[Reward]:
        return [await self.score(sample, args)]

    async def _call_with_list(
        self, path: str, function: Callable[..., Any], args: Any, samples: list[Sample]
    ) -> list[Reward]:
        rewards = await self._call(path, function, args, samples)
        if isinstance(rewards, (str, dict)) or not hasattr(rewards, "__len__") or len(rewards) != len(samples):
            raise UserError(
                f"{self._who(path)} got {len(samples)} samples and must return a list of as many rewards, but it "
                f"returned {rewards!r:.80} ({type(rewards).__name__}): correct it"
            )
        who = self._who(path)
        return [self._checked(reward, who, sample) for reward, sample in zip(rewards, samples, strict=True)]

    async def _call(self, path: str, function: Callable[..., Any], args: Any, subject: Sample | list[Sample]) -> Any:
        """Await an async function; run a plain one in a thread, where it may take its time.

        What a plain function writes into samples is taken over when it has answered: after the deadline nothing is.
        """
        who = self._who(path)
        if is_async(function):
            return await self._within_deadline(contained(partial(function, args, subject), who), who)
        samples = [subject] if isinstance(subject, Sample) else subject
        twins = [_twin(sample) for sample in samples]
        before = [dict(vars(twin)) for twin in twins]
        given = twins[0] if isinstance(subject, Sample) else twins
        result = await contained(partial(self._call_plain, who, partial(function, args, given)), who)
        for sample, twin, known in zip(samples, twins, before, strict=True):
            vars(sample).update({k: v for k, v in vars(twin).items() if known.get(k, known) is not v})
        return result

    async def _call_plain(self, who: str, verdict: Callable[[], Any]) -> Any:
        """What a plain function returns; its time begins when a thread takes it up."""
        result = await self._within_deadline(await self._threads.begin(verdict, who), who)
        return (
            await self._within_deadline(contained(lambda: result, who), who) if inspect.isawaitable(result) else result
        )

    def _who(self, path: str) -> str:
        return self._given_name if path == GIVEN else f"the reward function {path}"

    async def _within_deadline(self, verdict: Awaitable[Any], who: str) -> Any:
        limit_s = self.settings.reward_timeout
        late = partial(_too_late, who)
        return await wait_for(verdict, who, "to answer", timeout_s=limit_s, flag=TIMEOUT_FLAG, failure=late)

    def _checked(self, reward: Any, who: str, sample: Sample, wrong: type[Exception] = UserError) -> Reward:
        """The reward as a float, or as the dict it is, whose entries that flags name are numbers."""
        if not isinstance(reward, dict):
            return _finite(reward, "the reward", who, sample, wrong)
        for key in (self.settings.reward_key, self.settings.eval_reward_key):
            if key is not None and key in reward:
                _finite(reward[key], f"the reward's {key}", who, sample, wrong)
        return reward

    def _rm_type(self, sample: Sample) -> str:
        rm_type = str(sample.metadata.get("rm_type") or self.settings.rm_type or "").strip()
        if not rm_type:
            raise UserError(
                "samples have no reward; name a verifier with --rm-type or a function with --custom-rm-path"
            )
        return rm_type

    async def _builtin(self, sample: Sample) -> Any:
        rm_type = self._rm_type(sample)
        response = sample.response
        kind = rm_type.removeprefix(BOXED_PREFIX)
        if kind not in RM_TYPES:
            raise _unknown_rm_type(rm_type)
        if rm_type.startswith(BOXED_PREFIX):
            response = last_boxed(response) or ""
        if sample.label is None and compares_with_label(rm_type, sample.metadata):
            raise UserError(f"--rm-type {rm_type} compares with a label and this sample has none; set --label-key")
        match kind:
            case "math":
                if rm_type.startswith(BOXED_PREFIX):
                    return await self._verifier.grade_answer(response, sample.label)
                return await self._verifier.grade(response, sample.label)
            case "deepscaler":
                return await deepscaler_reward(self._verifier, response, sample.label)
            case "dapo":
                return dapo_reward(response, sample.label)
            case "f1":
                return f1_reward(response, sample.label)
            case "gpqa":
                return gpqa_reward(response, sample.label, sample.metadata)
            case "ifbench":
                return await asyncio.to_thread(ifbench_reward, response, sample.label, sample.metadata)
            case "random":
                return random_reward()
        if not self.settings.rm_url:
            raise UserError("--rm-type remote_rm needs the reward server's address in --rm-url")
        return await RemoteReward(self.settings.rm_url).score(sample, response)


class HubCache:
    """One hub for all `args` of a run that say the same about rewards, for callers that have nothing else. A namespace
    of no run has its own: the hub keeps it alive, so an id means one namespace. Hubs beyond the few used last are
    dropped, and end their processes when nobody uses them any more."""

    def __init__(self) -> None:
        self._hubs: dict[tuple[RewardSettings, str | int], RewardHub] = {}
        self._lock = Lock()

    def get(self, args: Any) -> RewardHub:
        """The hub for what these args say."""
        mark = args.overlay.mark if isinstance(args, Config) else run_mark(args)
        key = (RewardSettings.of(args), id(args) if mark is None else mark)
        with self._lock:
            hub = self._hubs.pop(key, None) or RewardHub(args)
            self._hubs[key] = hub
            while len(self._hubs) > _KEPT_HUBS:
                del self._hubs[next(iter(self._hubs))]
            return hub


_hubs = HubCache()


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """Score one sample, for plugins that have only `args`."""
    return await _hubs.get(args).score(sample, _for_plugins(args))


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """Score several samples, for plugins that have only `args`."""
    return await _hubs.get(args).score_group(samples, _for_plugins(args))


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """What the reward server of `--rm-url` answers about a sample, whatever it is; asked at most so often."""
    return await RemoteReward(args.rm_url, tries=max_retries).score(sample, sample.response)


def _for_plugins(args: Any) -> Any:
    """What functions are called with: the writable view of a config, any other object as it is."""
    return plugin_args(args) if isinstance(args, Config) else args


def _twin(sample: Sample) -> Sample:
    """The same sample as another object, with the same values."""
    twin = object.__new__(type(sample))
    vars(twin).update(vars(sample))
    return twin


def _too_late(who: str, wait: Wait) -> RewardTimeout:
    return RewardTimeout(f"{who} did not answer within {wait.timeout_s:g} s ({TIMEOUT_FLAG})")


def _name_of(function: Callable[..., Any]) -> str:
    """A function by its own name, an object by its class's."""
    is_named = inspect.isroutine(function) or inspect.isclass(function)
    return function.__qualname__ if is_named else type(function).__qualname__


def _finite(value: Any, what: str, who: str, sample: Sample, wrong: type[Exception]) -> float:
    """A number, numpy and torch scalars included, as a float; `wrong` is raised for what is none."""
    number = math.nan
    is_number = hasattr(value, "__float__") and not isinstance(value, (str, bytes))
    if is_number:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
            is_number = False
    if not is_number:
        shown = "None (is a return missing?)" if value is None else f"{value!r:.80} ({type(value).__name__})"
        raise wrong(
            f"{who}: {what} of sample {sample.index} must be a number or a dict, got {shown}: return one, or raise an "
            "exception to fail this sample alone"
        )
    if not math.isfinite(number):
        raise UserError(f"{who}: {what} of sample {sample.index} is {number}, which is no finite number: correct it")
    return number


def _unknown_rm_type(rm_type: str) -> UserError:
    near = difflib.get_close_matches(rm_type, RM_TYPES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UserError(f"unknown reward type {rm_type!r}{hint}; known: {', '.join(RM_TYPES)}, each also as boxed_<type>")
