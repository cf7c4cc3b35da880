"""One prompt, two training samples: an answer, and a second one that was asked to be shorter.

    --custom-generate-function-path examples/plugins/fan_out_generate.py

Samples of one rollout share its `rollout_id`, stay in one optimizer step and count as one in the loss.
"""

import copy

from slime.rollout.sglang_rollout import generate


async def fan_out_generate(args, sample, sampling_params):
    """The sample, and a copy whose prompt asks for less."""
    sample.rollout_id = sample.index
    shorter = copy.deepcopy(sample)
    shorter.prompt = f"In one word: {sample.prompt}"
    await generate(args, sample, sampling_params)
    await generate(args, shorter, sampling_params)
    return [sample, shorter]
