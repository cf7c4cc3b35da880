"""`RewardHub`: selects the verifier or custom function of each sample and returns its reward.

Invariant: a reward is a finite number or a dict. A verifier that cannot judge raises `RewardError`, a custom function
may raise any exception, and an invalid flag is a `UserError`. No failure becomes a reward of 0 here. If a custom
function returns anything else (None, a string, a list, a non-finite number), it is wrong for every sample: the hub
raises a `UserError` that names the function and the sample. If a reward server returns such a value, only that sample
fails. Every call ends within --reward-timeout, not counting the time it is queued behind other calls: an async function
is cancelled, a plain one is abandoned in its thread, a worker is killed.

Custom functions (`--custom-rm-path`, or a sample's own `custom_rm_path`, which has priority) may be plain or async.
They take one sample, or a list of samples if their second parameter is called `samples`, if they are a class with
`compute_reward`, or if `--group-rm` is on and the function is the one of the flag.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from threading import Lock
from typing import Any, SupportsFloat, TypeGuard

from slime.cluster.watchdog import Wait, wait_for, waiting
from slime.config import Config
from slime.config.flags.rollout import RM_TYPES, compares_with_label
from slime.config.plugins import is_async, load_plugin, takes_samples
from slime.config.plugins.args import run_mark
from slime.config.plugins.view import plugin_args
from slime.data.prompt_rows import BY_RM_TYPE
from slime.data.sample import Reward, Sample
from slime.data.validation import keep_bad_sample
from slime.errors import UserError
from slime.rollout.event_loop import DaemonThreads
from slime.rollout.legacy_signatures import as_reward
from slime.rollout.metrics import has_number
from slime.rollout.outcomes import call_contained
from slime.rollout.rewards.ifbench import ifbench_reward
from slime.rollout.rewards.math import JUDGED_WITHIN_S, MathVerifier, dapo_reward, deepscaler_reward, default_workers
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.simple import f1_reward, gpqa_reward, last_boxed, random_reward
from slime.rollout.rewards.worker_pool import RewardError

BOXED_PREFIX = "boxed_"
GIVEN_FUNCTION = "the given reward function"
FLAG = "--custom-rm-path"
TIMEOUT_FLAG = "--reward-timeout"
_MAX_CACHED_HUBS = 8


class RewardTimeout(RewardError):
    """A reward function did not return within --reward-timeout."""


@dataclass(frozen=True)
class RewardSettings:
    """The flags that rewards depend on; flags missing in a user's namespace have their defaults."""

    rm_type: str | None = None
    rm_url: str | None = None
    custom_rm_path: str | None = None
    group_rm: bool = False
    reward_key: str | None = None
    eval_reward_key: str | None = None
    reward_timeout: float = 600.0
    reward_workers: int | None = None

    @classmethod
    def of(cls, args: object) -> RewardSettings:
        """Read the settings from a config, or from any object with some of these attributes."""
        values: dict[str, Any] = {one.name: getattr(args, one.name, one.default) for one in fields(cls)}
        return cls(**values)


class RewardHub:
    """Scores samples according to `--rm-type` and `--custom-rm-path`; owns the processes of its verifiers."""

    def __init__(
        self,
        flags: Config | argparse.Namespace,
        function: Callable[..., object] | None = None,
        *,
        args: argparse.Namespace | None = None,
    ) -> None:
        """Create a hub; `function`, given as an object, replaces --custom-rm-path.

        `args` is the namespace that functions are called with, unless a call passes its own.
        """
        self._flags = flags
        self.settings = settings = RewardSettings.of(flags)
        self.args = _plugin_namespace(flags) if args is None else args
        self._verifier = MathVerifier(
            workers=settings.reward_workers or default_workers(),
            deadline_s=min(JUDGED_WITHIN_S, settings.reward_timeout),
        )
        self._functions: dict[str, Callable[..., object]] = {}
        self._threads = DaemonThreads("reward")
        weakref.finalize(self, self._threads.close)
        self._given_name = GIVEN_FUNCTION
        if function is not None:
            is_named = inspect.isroutine(function) or inspect.isclass(function)
            self._given_name = f"{GIVEN_FUNCTION} {function.__qualname__ if is_named else type(function).__qualname__}"
            self._functions[GIVEN_FUNCTION] = as_reward(function, flags, self.args, GIVEN_FUNCTION)

    async def score(self, sample: Sample, args: argparse.Namespace | None = None) -> Reward:
        """Compute the reward of one sample."""
        args = self.args if args is None else args
        path = self._custom_path(sample)
        if path is not None:
            function = self._function(path)
            if self._takes_list(sample, function):
                return (await self._call_with_list(path, function, args, [sample]))[0]
            return self._checked(await self._call(path, function, args, sample), self._function_name(path), sample)

        rm_type = str(sample.metadata.get("rm_type") or self.settings.rm_type or "").strip()
        if not rm_type:
            raise UserError(
                "samples have no reward; name a verifier with --rm-type or a function with --custom-rm-path"
            )
        source, kind = f"--rm-type {rm_type}", rm_type.removeprefix(BOXED_PREFIX)
        if kind not in RM_TYPES:
            near = difflib.get_close_matches(rm_type, RM_TYPES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            known = ", ".join(RM_TYPES)
            raise UserError(f"unknown reward type {rm_type!r}{hint}; known: {known}, each also as boxed_<type>")
        response, label = sample.response, sample.label
        if rm_type.startswith(BOXED_PREFIX):
            response = last_boxed(response) or ""
        if label is None and compares_with_label(rm_type, sample.metadata):
            raise UserError(f"--rm-type {rm_type} compares with a label and this sample has none; set --label-key")
        verdict: object
        match kind:
            case "math" | "deepscaler":
                with waiting(source, "to be judged, perhaps behind others", timeout_s=None):
                    if kind == "math":  # its deadline starts when a worker receives the request
                        verdict = await self._verifier.grade(sample.response, label)
                    else:
                        verdict = await deepscaler_reward(self._verifier, response, label)
            case "dapo":
                verdict = dapo_reward(response, label)
            case "f1":
                verdict = f1_reward(response, label)
            case "gpqa":
                verdict = gpqa_reward(response, label, sample.metadata)
            case "random":
                verdict = random_reward()
            case "ifbench":
                judging = asyncio.to_thread(ifbench_reward, response, label, sample.metadata)
                verdict = await self._within_deadline(judging, source)
            case _:
                if not self.settings.rm_url:
                    raise UserError("--rm-type remote_rm needs the reward server's address in --rm-url")
                asking = RemoteReward(self.settings.rm_url).score(sample, response)
                verdict = await self._within_deadline(asking, source)
        return self._checked(verdict, source, sample, wrong=RewardError)

    async def score_group(self, samples: Sequence[Sample], args: argparse.Namespace | None = None) -> list[Reward]:
        """Compute the rewards of several samples, in order; an error is raised after all calls have finished."""
        rewards: list[Reward] = []
        for outcome in await self.outcomes(samples, args):
            if isinstance(outcome, Exception):
                raise outcome
            rewards.append(outcome)
        return rewards

    async def outcomes(
        self, samples: Sequence[Sample], args: argparse.Namespace | None = None
    ) -> list[Reward | Exception]:
        """Compute the reward or the error of each sample; samples of the same list function are scored in one call."""
        args = self.args if args is None else args
        together: dict[str, list[int]] = {}
        alone: list[int] = []
        for position, sample in enumerate(samples):
            path = self._custom_path(sample)
            if path is not None and self._takes_list(sample, self._function(path)):
                together.setdefault(path, []).append(position)
            else:
                alone.append(position)

        async def score_alone(sample: Sample) -> list[Reward]:
            return [await self.score(sample, args)]

        calls = [score_alone(samples[position]) for position in alone]
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
        """Path of the custom function of a sample; None if a built-in verifier scores it."""
        if sample.custom_rm_path == BY_RM_TYPE:
            return None
        return sample.custom_rm_path or (
            GIVEN_FUNCTION if GIVEN_FUNCTION in self._functions else self.settings.custom_rm_path
        )

    def _function(self, path: str) -> Callable[..., object]:
        """Load the custom function of a path, once."""
        if path not in self._functions:
            self._functions[path] = as_reward(load_plugin(path, FLAG), self._flags, self.args, f"{FLAG} {path}")
        return self._functions[path]

    def _takes_list(self, sample: Sample, function: Callable[..., object]) -> bool:
        """True if the function takes lists; --group-rm applies to the function of the flag, not to a sample's own."""
        return takes_samples(function) or (self.settings.group_rm and sample.custom_rm_path is None)

    async def _call_with_list(
        self, path: str, function: Callable[..., object], args: argparse.Namespace, samples: list[Sample]
    ) -> list[Reward]:
        """Call a function of lists, and check that it returns one valid reward per sample."""
        rewards = await self._call(path, function, args, samples)
        if isinstance(rewards, (str, dict)) or not hasattr(rewards, "__len__") or len(rewards) != len(samples):
            raise UserError(
                f"{self._function_name(path)} got {len(samples)} samples and must return a list of as many rewards, "
                "but it "
                f"returned {rewards!r:.80} ({type(rewards).__name__}): correct it"
            )
        source = self._function_name(path)
        return [self._checked(reward, source, sample) for reward, sample in zip(rewards, samples, strict=True)]

    async def _call(
        self, path: str, function: Callable[..., object], args: argparse.Namespace, subject: Sample | list[Sample]
    ) -> Any:
        """Await an async function, or run a plain one in a thread, where it may block.

        A plain function gets copies of the samples. What it writes into them is copied back after it has returned in
        time, so a late function cannot change samples.
        """
        source = self._function_name(path)
        if is_async(function):
            return await self._within_deadline(call_contained(partial(function, args, subject), source), source)
        samples = [subject] if isinstance(subject, Sample) else subject
        twins = []
        for sample in samples:
            twin = object.__new__(type(sample))
            vars(twin).update(vars(sample))
            twins.append(twin)
        before = [dict(vars(twin)) for twin in twins]
        given = twins[0] if isinstance(subject, Sample) else twins

        async def in_thread() -> object:  # the deadline starts when a thread begins the call
            returned = await self._within_deadline(
                await self._threads.begin(partial(function, args, given), source), source
            )
            if inspect.isawaitable(returned):
                return await self._within_deadline(call_contained(lambda: returned, source), source)
            return returned

        result = await call_contained(in_thread, source)
        for sample, twin, known in zip(samples, twins, before, strict=True):
            vars(sample).update({k: v for k, v in vars(twin).items() if known.get(k, known) is not v})
        return result

    def _function_name(self, path: str) -> str:
        """Name of a custom function in messages."""
        return self._given_name if path == GIVEN_FUNCTION else f"the reward function {path}"

    async def _within_deadline(self, verdict: Awaitable[Any], source: str) -> Any:
        """Await a call under --reward-timeout."""

        def late(wait: Wait) -> RewardTimeout:
            return RewardTimeout(f"{source} did not answer within {wait.timeout_s:g} s ({TIMEOUT_FLAG})")

        limit_s = self.settings.reward_timeout
        return await wait_for(verdict, source, "to answer", timeout_s=limit_s, flag=TIMEOUT_FLAG, failure=late)

    def _checked(self, reward: object, source: str, sample: Sample, wrong: type[Exception] = UserError) -> Reward:
        """Return the reward as a float, or as a dict after checking the entries that the reward key flags name."""
        if not isinstance(reward, dict):
            return _finite_number(reward, "the reward", source, sample, wrong)
        for key in (self.settings.reward_key, self.settings.eval_reward_key):
            if key is not None and key in reward:
                _finite_number(reward[key], f"the reward's {key}", source, sample, wrong)
        return reward


class HubCache:
    """Hubs for callers that have only `args`: one for all namespaces of a run with the same reward settings.

    A namespace that belongs to no run has its own hub, which keeps it alive, so that its id stays unique. Only the few
    hubs used last are kept; others are dropped and end their processes when they are no longer in use.
    """

    def __init__(self) -> None:
        self._hubs: dict[tuple[RewardSettings, str | int], RewardHub] = {}
        self._lock = Lock()

    def get(self, args: Config | argparse.Namespace) -> RewardHub:
        """Find or create the hub for the reward settings of `args`."""
        mark = args.overlay.mark if isinstance(args, Config) else run_mark(args)
        key = (RewardSettings.of(args), id(args) if mark is None else mark)
        with self._lock:
            hub = self._hubs.pop(key, None) or RewardHub(args)
            self._hubs[key] = hub
            while len(self._hubs) > _MAX_CACHED_HUBS:
                del self._hubs[next(iter(self._hubs))]
            return hub


_hubs = HubCache()


async def async_rm(args: Config | argparse.Namespace, sample: Sample, **kwargs: object) -> Reward:
    """Score one sample, for plugins that have only `args`."""
    return await _hubs.get(args).score(sample, _plugin_namespace(args))


async def batched_async_rm(
    args: Config | argparse.Namespace, samples: Sequence[Sample], **kwargs: object
) -> list[Reward]:
    """Score several samples, for plugins that have only `args`."""
    return await _hubs.get(args).score_group(samples, _plugin_namespace(args))


async def remote_rm(args: argparse.Namespace, sample: Sample, max_retries: int = 10) -> object:
    """Request a sample's reward from the server of `--rm-url`, at most `max_retries` times; return it unchecked."""
    return await RemoteReward(args.rm_url, tries=max_retries).score(sample, sample.response)


def _plugin_namespace(args: Config | argparse.Namespace) -> argparse.Namespace:
    """The namespace that functions are called with: the writable view of a config, any other object unchanged."""
    return plugin_args(args) if isinstance(args, Config) else args


def _finite_number(value: Any, what: str, source: str, sample: Sample, wrong: type[Exception]) -> float:
    """Convert a number, including numpy and torch scalars, to a float; raise `wrong` for other values."""
    number = math.nan
    is_one = is_number(value)
    if is_one:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
            is_one = False
    if not is_one:
        shown = "None (is a return missing?)" if value is None else f"{value!r:.80} ({type(value).__name__})"
        raise wrong(
            f"{source}: {what} of sample {sample.index} must be a number or a dict, got {shown}: return one, or raise "
            "an exception to fail this sample alone"
        )
    if not math.isfinite(number):
        raise UserError(
            f"{source}: {what} of sample {sample.index} is {number}, which is not a finite number: correct it"
        )
    return number


def refuse_bad_rewards(args: Config, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
    """Raise a `UserError` for the first reward that is not a finite number, from any source."""
    for sample in samples:
        if sample.reward is None or not (evaluation or has_number(args, sample)):
            continue
        value = sample.reward_number(args, evaluation=evaluation)
        if not is_number(value):
            raise UserError(
                f"sample {sample.index}: {_reward_source(args, sample)} gave {value!r:.80}, which is not a number"
            )
        if not math.isfinite(float(value)):
            raise UserError(
                f"sample {sample.index}: {_reward_source(args, sample)} gave the reward {float(value)}, which would "
                "corrupt "
                "every weight of the model: return a finite number, or raise to fail the sample; the sample is in "
                f"{keep_bad_sample(args.output_dir, None, sample.index, sample.to_dict())}"
            )


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    return hasattr(value, "__float__") and not isinstance(value, str | bytes)


def _reward_source(args: Config, sample: Sample) -> str:
    """Describe the function that gave a sample its reward, from the flags and the sample."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return f"the reward function {path}"
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if rm_type is not None:
        return f"the reward type {rm_type}"
    generate = sample.generate_function_path or args.custom_generate_function_path
    return f"the generate function {generate}" if generate is not None else "the reward function"
