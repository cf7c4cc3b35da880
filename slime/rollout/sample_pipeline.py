"""Processes a sample, or a group of samples, from prompt to reward: generate, check, hooks, teacher, reward, record.

Invariant: every dispatched sample comes back exactly once, as data, as ABORTED (to be resumed), or as a failure with
its cause. Exceptions of generate functions, hooks and reward functions become failures here. Only a `UserError` (no
sample of the run could succeed) and cancellation are passed on.
Invariant: the identity of a sample (group, index, rollout, session, row of the journal) comes from the dispatched
sample and is never read from the result. A new `Sample`, or a list of them, replaces the dispatched one. All samples
from one dispatched sample share a rollout id and are different objects, and no object belongs to two dispatched samples
(`SampleOwners`). A sample with inconsistent fields becomes a failure with its cause. It is never journaled as data, so
a restart does not read it.
"""

from __future__ import annotations

import asyncio
import copy
import math
import uuid
from collections.abc import Sequence
from contextlib import nullcontext

from slime.cluster.watchdog import acting_as
from slime.data.sample import Sample
from slime.data.trace import trace_next_attempt
from slime.data.validation import BadSample, Bounds, check_sample, reset_invalid_fields
from slime.engine.http.protocol import sampling_seed
from slime.errors import UserError
from slime.rollout.event_loop import gather_or_cancel
from slime.rollout.gate import (
    MAX_RESUMES,
    AbortedTooOften,
    SampleClock,
    SampleTimeout,
    as_evaluation,
    current_ticket,
    evaluating,
)
from slime.rollout.generate import generate, set_sample_seed
from slime.rollout.outcomes import (
    FailureLog,
    GivenUp,
    Group,
    Nested,
    Produced,
    SampleOwners,
    SampleTaken,
    detached_copy,
    forget_response,
    leaves,
    mark_failed,
    prompt_tokens,
    reset_to_prompt,
)
from slime.rollout.rewards.hub import is_number
from slime.rollout.runtime import RolloutRuntime, accepts
from slime.storage.json_types import JsonObject
from slime.storage.sqlite_store import JournalFailed

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Backoff between two calls of a generate function that returns its sample as aborted during the rollout."""
UNSCORED_AFTER_S = 0.25
"""After this time a response is recorded in the journal without its reward."""


async def generate_and_rm_group(
    runtime: RolloutRuntime,
    group: Sequence[Produced],
    sampling_params: JsonObject,
    evaluation: bool = False,
    generated: dict[int, Produced] | None = None,
) -> Group:
    """Generate and score all samples of one prompt; fan-outs that an earlier rollout finished are only checked.

    A group reward is computed only if no sample of the group was aborted. The result of each member is stored in
    `generated`, under the `id` of the member, when its generation ends and when it is scored.
    """
    config, pulse = runtime.args, runtime.eval_pulse if evaluation else runtime.pulse
    for sample in leaves(group):
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())

    async def process(member: Produced) -> Produced:
        """Generate one sample with its own copy of the sampling parameters.

        The copy has the limits of the sample's dataset and a seed that depends only on the run's seed and the sample's
        index. Each request with this seed gets a different derived seed.
        """
        if not isinstance(member, Sample):
            for sample in member:
                DispatchedSample(sample).settle(sample, "rollout", runtime.failures, runtime.bounds)
            return member
        limits = runtime.task_params.get(member.task, {}) if member.task is not None and not evaluation else {}
        params = copy.deepcopy({**sampling_params, **limits})  # a function may write into its lists
        if member.index is not None:
            purpose = "eval" if evaluation else "train"
            params.setdefault("sampling_seed", sampling_seed(config.rollout_seed, purpose, member.index))
            set_sample_seed(params["sampling_seed"])
        before = member.response_length
        with acting_as(f"sample {member.index} of group {member.group_index}"):
            produced = await generate_and_rm(runtime, member, params, evaluation, generated)
        if not _is_aborted(produced):
            pulse.finished(sum(sample.response_length for sample in leaves([produced])) - before)
        for sample in leaves([produced]):
            sample.compact()
        if not evaluation:
            await _record(runtime, member, produced)
        return produced

    with as_evaluation() if evaluation else nullcontext(), runtime.span(list(group), "generate_and_rm_group"):
        results: Group = await gather_or_cancel(process(member) for member in group)
    samples = list(leaves(results))
    if config.group_rm and not _is_aborted(results):
        with acting_as(f"group {samples[0].group_index}"), pulse.judging():
            await score_together(runtime, samples)
        with as_evaluation() if evaluation else nullcontext():
            bounds = runtime.bounds
        for member, result in zip(group, results, strict=True):
            for sample in leaves([result]):
                DispatchedSample(sample).settle(sample, "reward", runtime.failures, bounds)
            if not evaluation:
                await _record(runtime, member, result)
    return results


async def generate_and_rm(
    runtime: RolloutRuntime,
    sample: Sample,
    sampling_params: JsonObject,
    evaluation: bool = False,
    generated: dict[int, Produced] | None = None,
) -> Produced:
    """Generate one sample, run the hooks, and score it; group rewards are computed later for the whole group.

    If the reward of a complete response is slow, the response is recorded in the journal without it.
    """
    if runtime.traces and sample.status is not Sample.Status.PENDING:
        trace_next_attempt(sample)
    config, pulse = runtime.args, runtime.eval_pulse if evaluation else runtime.pulse
    origin, clock = DispatchedSample(sample, runtime.claims), SampleClock(config.rollout_sample_timeout)
    produced: Produced = sample
    was_complete = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    generated = {} if generated is None else generated

    with runtime.span(sample, "generate_and_rm"):
        if not was_complete:
            if sample.status is Sample.Status.FAILED:
                reset_to_prompt(sample)  # a failed sample that was handed out again
            async with runtime.semaphore:
                if runtime.state.aborted:
                    sample.status = Sample.Status.ABORTED
                    return sample
                if config.mask_offpolicy_in_partial_rollout and sample.status is Sample.Status.ABORTED:
                    sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
                with pulse.sample():
                    produced = await _call_until_complete(runtime, origin, clock, sample, sampling_params, evaluation)
            if config.rollout_sample_hook_path:
                produced = await apply_hooks(runtime, produced, None, evaluation, clock)
        if evaluation or _is_aborted(produced):
            await score(runtime, origin, produced, evaluation, was_complete)
            generated[id(sample)] = produced
            return produced
        unscored = copy.deepcopy(produced) if any(map(_wants_reward, leaves([produced]))) else produced
        generated[id(sample)] = unscored
        scoring = asyncio.ensure_future(score(runtime, origin, produced, evaluation, was_complete))
        try:
            done, _ = await asyncio.wait({scoring}, timeout=UNSCORED_AFTER_S)
            if not done:
                await _record(runtime, sample, unscored)
            await scoring
        finally:
            scoring.cancel()  # does nothing to one that is done
            await asyncio.gather(scoring, return_exceptions=True)
        generated[id(sample)] = produced
        return produced


# generate functions, and what they return


_IDENTITY_FIELDS = ("group_index", "index", "rollout_id", "session_id", "journal_id")
_INHERITED_FIELDS = (
    "prompt",
    "label",
    "metadata",
    "apply_chat_template_kwargs",
    "multimodal_inputs",
    "generate_function_path",
    "custom_rm_path",
    "task",
)
"""Fields that a new sample takes from its dispatched sample, unless it sets them itself."""

_STATUSES = {status.value for status in Sample.Status}


class DispatchedSample:
    """A sample as it was dispatched; all results of its generation belong to it."""

    def __init__(self, sample: Sample, claims: SampleOwners | None = None, *, is_checked: bool = False) -> None:
        self._sample = sample
        self._claims = SampleOwners() if claims is None else claims
        self._key = (evaluating.get(), sample.session_id, sample.group_index, sample.index)
        self._claims.take(sample, self._key)
        self._given = {name: getattr(sample, name) for name in _IDENTITY_FIELDS}
        self._inherited = {name: getattr(sample, name) for name in _INHERITED_FIELDS}
        self._prompt: list[int] = []
        try:
            if not is_checked:
                check_sample(sample)
        except BadSample:
            return
        self._prompt = prompt_tokens(sample)

    def claim_result(self, result: object, who: str) -> Produced:
        """Check what `who` returned (one or several samples), assign all of it to this origin, and return it.

        A sample that occurs twice in the list is replaced by a copy the second time.
        """
        if isinstance(result, Sample):
            self.claim(result, who)
            return result
        if not isinstance(result, list) or not result or not all(isinstance(item, Sample) for item in result):
            raise TypeError(f"{who} must return a Sample or a list of them, not {result!r:.200}")
        if len(result) > 1 and self._given["rollout_id"] is None:
            self._given["rollout_id"] = self._given["index"]
        seen: set[int] = set()
        siblings: list[Sample] = []
        for sample in result:
            self._refuse_taken(sample, who)
            siblings.append(copy.deepcopy(sample) if id(sample) in seen else sample)
            seen.add(id(sample))
        for sibling in siblings:
            self.claim(sibling, who)
        return siblings

    def claim(self, sample: Sample, who: str, siblings: Sequence[Sample] = ()) -> None:
        """Assign a sample to this origin; a status given as its string value becomes a `Sample.Status`.

        Raises `SampleTaken`, without a change, for a sample of another origin or one of the `siblings`.
        """
        self._refuse_taken(sample, who, siblings)
        self._claims.take(sample, self._key)
        if isinstance(sample.status, str) and sample.status in _STATUSES:
            sample.status = Sample.Status(sample.status)
        for name, value in self._given.items():
            setattr(sample, name, value)
        if sample is self._sample:
            return
        for name, value in self._inherited.items():
            if not getattr(sample, name):
                setattr(sample, name, copy.deepcopy(value))

    def _refuse_taken(self, sample: Sample, who: str, siblings: Sequence[Sample] = ()) -> None:
        owner = self._claims.owner(sample)
        if any(sample is sibling for sibling in siblings):
            already = "another sample of its fan-out"
        elif owner is not None and owner != self._key:
            already = f"sample {owner[-1]} of group {owner[-2]}"
        else:
            return
        raise SampleTaken(
            f"{who} returned for sample {self._given['index']} an object that is already {already}: return the sample "
            "it was given, or a copy.deepcopy of a result that it keeps"
        )

    def again(self, given_up: Sample) -> Sample:
        """Return the sample for the next call of the function: the aborted one, or the dispatched one from its prompt.

        The dispatched one is used if the function replaced the prompt, because it expects the original prompt.
        """
        if given_up.prompt == self._inherited["prompt"]:
            return given_up
        for name, value in {**self._given, **self._inherited}.items():
            setattr(self._sample, name, value)
        self.forget_response(self._sample)
        self._sample.status, self._sample.reward = Sample.Status.ABORTED, None
        return self._sample

    def forget_response(self, sample: Sample) -> None:
        """Reset a result to the dispatched prompt."""
        reset_invalid_fields(sample)
        forget_response(sample, self._prompt)

    def settle(self, produced: Produced, stage: str, log: FailureLog, bounds: Bounds) -> None:
        """Mark samples that `stage` left in an invalid state as failed, and give every failed sample a cause."""
        for sample in leaves([produced]):
            cause = sample.failure
            try:
                check_sample(sample, bounds)
            except BadSample as error:
                self.forget_response(sample)
                cause = cause or log.record(stage, error)
                sample.status = Sample.Status.FAILED
            if sample.status is Sample.Status.FAILED:
                mark_failed([sample], str(cause or f"{stage}: the {stage} function gave this sample up"))
            elif sample.status is Sample.Status.PENDING:
                sample.status = Sample.Status.COMPLETED  # the function has returned


async def _call_until_complete(
    runtime: RolloutRuntime,
    origin: DispatchedSample,
    clock: SampleClock,
    sample: Sample,
    sampling_params: JsonObject,
    evaluation: bool,
) -> Produced:
    """Call the generate function, again for a sample that it returns as aborted, and check its result."""
    path = sample.generate_function_path or runtime.args.custom_generate_function_path
    try:
        async with clock.running(path or "generate"):
            for attempt in range(MAX_RESUMES):
                produced: Produced
                if path is None:
                    produced = await generate(runtime, sample, sampling_params)
                else:
                    custom = runtime.function(
                        path, flag="--custom-generate-function-path", params=("args", "sample", "sampling_params")
                    )
                    extra = {"evaluation": evaluation} if accepts(custom, "evaluation") else {}
                    result = await runtime.call_function(
                        custom, path, runtime.plugin_args, sample, sampling_params, **extra
                    )
                    produced = origin.claim_result(result, path)
                origin.settle(produced, "generate", runtime.failures, runtime.bounds)
                if not isinstance(produced, Sample):
                    if not _is_batch_full(runtime):  # a fan-out is not generated again: its aborted samples fail
                        cut = [sample for sample in produced if sample.status is Sample.Status.ABORTED]
                        mark_failed(cut, "generate: it was returned as aborted during the rollout")
                    return produced
                if produced.status is not Sample.Status.ABORTED:
                    return produced
                sample = origin.again(produced)
                if _is_batch_full(runtime):
                    return sample
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
                if _is_batch_full(runtime):
                    return sample
            raise AbortedTooOften(f"{path} returned its sample as aborted {MAX_RESUMES} times")
    except (UserError, JournalFailed):
        raise
    except GivenUp:
        origin.forget_response(sample)
        sample.status = Sample.Status.ABORTED
        return sample
    except Exception as error:  # noqa: BLE001 - any error of a generate function fails only this sample
        sample = detached_copy(sample) if isinstance(error, SampleTimeout) else sample
        origin.forget_response(sample)
        mark_failed([sample], runtime.failures.record("generate", error))
        return sample


def _is_aborted(produced: Nested) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in leaves(produced))


def _is_batch_full(runtime: RolloutRuntime) -> bool:
    """Return whether the batch is full, so that an aborted sample goes back to the buffer or is held."""
    ticket = current_ticket()
    return runtime.state.aborted or (ticket is not None and not ticket.gate.is_open)


# hooks


async def apply_hooks(
    runtime: RolloutRuntime,
    produced: Produced,
    rollout_id: int | None = None,
    evaluation: bool = False,
    clock: SampleClock | None = None,
    *,
    is_checked: bool = True,
) -> Produced:
    """Run the hooks on a sample, or on each sample of a fan-out; `rollout_id` defaults to the running rollout."""
    if not runtime.args.rollout_sample_hook_path:
        return produced
    if rollout_id is None:
        rollout_id = runtime.state.evaluation_id if evaluation else runtime.state.rollout_id
    clock = clock or SampleClock(runtime.args.rollout_sample_timeout)
    offered: dict[str, object] = {"rollout_id": rollout_id, "evaluation": evaluation}
    hooked = list(leaves([produced]))
    for place, sample in enumerate(hooked):
        if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
            continue
        siblings = [one for one in hooked if one is not sample]
        origin = DispatchedSample(sample, runtime.claims, is_checked=is_checked)
        try:
            for path in runtime.args.rollout_sample_hook_path:
                hook = runtime.function(path, flag="--rollout-sample-hook-path", params=("args", "sample"))
                wanted = {name: value for name, value in offered.items() if accepts(hook, name)}
                async with clock.running(path):
                    result = await runtime.call_function(hook, path, runtime.plugin_args, sample, **wanted)
                if result is not None and not isinstance(result, Sample):
                    raise TypeError(f"a sample hook must return a Sample or None, not {type(result).__name__}")
                origin.claim(sample if result is None else result, path, siblings)
                sample = sample if result is None else result
                if sample.status is Sample.Status.ABORTED:
                    raise ValueError("a sample hook must not abort a sample: raise, or make it FAILED, to give it up")
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a hook fails only this sample
            sample = detached_copy(sample) if isinstance(error, SampleTimeout) else sample
            mark_failed([sample], runtime.failures.record("hook", error))
        origin.settle(sample, "hook", runtime.failures, runtime.bounds)
        hooked[place] = sample
    return hooked[0] if isinstance(produced, Sample) else hooked


# rewards


async def score(
    runtime: RolloutRuntime, origin: DispatchedSample, produced: Produced, evaluation: bool, was_complete: bool
) -> None:
    """Set the reward of a sample, unless it has one, failed or was aborted; group rewards are computed later.

    Samples that only built-in code has seen since their generation and hooks are not checked again: `was_complete` ones
    were generated by an earlier rollout.
    """
    teacher, pulse = runtime.state.teacher, runtime.eval_pulse if evaluation else runtime.pulse
    if teacher is not None and not evaluation:
        await teacher.teach(list(leaves([produced])), runtime.failures)
    if runtime.args.group_rm:
        return
    with pulse.judging():
        if not isinstance(produced, Sample):
            await score_together(runtime, produced)
        elif _wants_reward(produced) and runtime.state.needs_no_reward(produced):
            produced.reward = 0.0
        elif _wants_reward(produced):
            try:
                with runtime.span(produced, "reward_model"):
                    produced.reward = await runtime.hub.score(produced, runtime.plugin_args)
                _refuse_abort(produced)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a reward function fails only this sample
                mark_failed([produced], runtime.failures.record("reward", error))
    by_user = runtime.has_user_reward or any(one.custom_rm_path is not None for one in leaves([produced]))
    if was_complete or by_user or teacher is not None:
        origin.settle(produced, "reward", runtime.failures, runtime.bounds)


async def score_together(runtime: RolloutRuntime, samples: Sequence[Sample]) -> None:
    """Set the rewards of samples; the samples of one call to a list function fail together, others individually."""
    for sample in samples:
        if _wants_reward(sample) and runtime.state.needs_no_reward(sample):
            sample.reward = 0.0
    unscored = [sample for sample in samples if _wants_reward(sample)]
    if not unscored:
        return
    with runtime.span(unscored, "group_reward_model"):
        outcomes = await runtime.hub.outcomes(unscored, runtime.plugin_args)
    for outcome in outcomes:
        if isinstance(outcome, UserError):
            raise outcome
    for sample, outcome in zip(unscored, outcomes, strict=True):
        try:
            if isinstance(outcome, Exception):
                raise outcome
            _refuse_abort(sample)
            sample.reward = outcome
        except Exception as error:  # noqa: BLE001 - any error of a reward function fails only this sample
            mark_failed([sample], runtime.failures.record("reward", error))


def _refuse_abort(sample: Sample) -> None:
    """Raise an error if a reward function aborted a complete sample, which would then be generated forever."""
    if sample.status is Sample.Status.ABORTED:
        raise ValueError("a reward function must not abort a sample: raise, or make it FAILED, to give it up")


def _wants_reward(sample: Sample) -> bool:
    return sample.reward is None and sample.status not in (Sample.Status.FAILED, Sample.Status.ABORTED)


# the journal


async def _record(runtime: RolloutRuntime, dispatched: Produced, produced: Produced) -> None:
    """Record the result of a sample in the journal, before anything else uses it.

    An engine failure is not recorded: a run that it ends resumes from the earlier state of the sample. A reward that
    ends the run is not recorded either, so the sample is scored again by the corrected function.
    """
    if runtime.journal is None or not isinstance(dispatched, Sample):
        return
    for sample in leaves([produced]):
        reward: object = sample.reward
        if isinstance(reward, dict):
            reward = reward.get(runtime.args.reward_key)
        if reward is not None and not (is_number(reward) and math.isfinite(float(reward))):
            return
    if not any((sample.failure or "").startswith("engine: ") for sample in leaves([produced])):
        await runtime.journal.record(dispatched, produced)
        if not _is_aborted(produced):
            for callback in runtime.when_recorded:
                await callback(dispatched)
