"""On-policy distillation as somebody wrote it down for a teacher of their own: the reward is the teacher's answer."""

import aiohttp
import torch


async def reward_func(args, sample, **kwargs):
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with aiohttp.ClientSession() as session, session.post(args.rm_url, json=payload) as response:
        response.raise_for_status()
        return await response.json()


def post_process_rewards(args, samples, **kwargs):
    answers = [sample.get_reward_value(args) for sample in samples]
    for sample, answer in zip(samples, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        log_probs = torch.tensor([entry[0] for entry in entries], dtype=torch.float32)
        sample.teacher_log_probs = log_probs[-sample.response_length :]
    scalar_rewards = [0.0] * len(samples)
    return scalar_rewards, scalar_rewards
