"""On-policy distillation with two user functions, as upstream documents it.

The reward is the teacher's scores of a sample, in the format of `/generate`'s response; before training its log-probs
become `teacher_log_probs`, and the reward becomes 0. With ``--use-opd`` the rollout has already requested the teacher's
log-probs, so no second request is sent and the numbers are those of ``--use-opd`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.rewards.remote import Teacher, input_log_probs

TIMEOUT_S = 3600.0
"""Timeout of one request; in a run --reward-timeout may end it sooner."""


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Return ``{"meta_info": {"input_token_logprobs": [[log-prob, id], ...]}}`` from the last prompt token on."""
    tokens = sample.token_array().tolist()
    length = sample.response_length
    taught = sample.column_array("teacher_log_probs")
    known = [] if taught is None else taught.tolist()
    if len(known) != length:
        known = await _asked(args, tokens, length)
    before = [[None, token] for token in tokens[: len(tokens) - length][-1:]]
    response = tokens[len(tokens) - length :]
    entries = [[value, token] for value, token in zip(known, response, strict=True)]
    return {"meta_info": {"input_token_logprobs": before + entries}}


def post_process_rewards(args: Any, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Move the teacher's log-probs from the samples' rewards to `teacher_log_probs`; return rewards of 0."""
    for sample in samples:
        answer = sample.get_reward_value(args)
        if answer is None or not sample.response_length:
            continue  # it failed, and is not trained on
        response = sample.token_array()[-sample.response_length :].tolist()
        found = input_log_probs(answer, response) if isinstance(answer, dict) else None
        if found is None:
            raise UserError(
                f"sample {sample.index}: its reward has no meta_info.input_token_logprobs for its "
                f"{len(response)} tokens: give --custom-rm-path slime.rollout.on_policy_distillation.reward_func"
            )
        sample.teacher_log_probs = found
    nothing = [0.0] * len(samples)
    return nothing, list(nothing)


async def _asked(args: Any, tokens: list[int], length: int) -> list[float]:
    if args.rm_url is None:
        raise UserError("slime.rollout.on_policy_distillation asks the teacher that is served at --rm-url: name one")
    teacher = Teacher.at(args.rm_url, timeout_s=TIMEOUT_S, concurrency=1)
    try:
        return await teacher.log_probs(tokens, length)
    finally:
        await teacher.aclose()
