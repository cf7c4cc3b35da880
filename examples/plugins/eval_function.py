"""An evaluation of one's own: how long the model's answers to three fixed questions are.

--eval-function-path examples/plugins/eval_function.py --eval-prompt-data lengths any.jsonl --eval-interval 1
"""

import asyncio

from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.async_utils import run
from slime.utils.types import Sample

QUESTIONS = ("what is 1+1?", "what is 2+2?", "what is 3+3?")


def eval_function(args, rollout_id, data_source, evaluation=True):
    """{dataset: {"rewards": [...], "samples": [...]}}; the mean reward is logged as eval/<dataset>."""
    params = {**GenerateState(args).sampling_params, "temperature": 0.0}
    samples = [Sample(prompt=question, index=i, group_index=i) for i, question in enumerate(QUESTIONS)]

    async def answer_all():
        await asyncio.gather(*(generate(args, sample, params) for sample in samples))

    run(answer_all())
    return {"lengths": {"rewards": [float(sample.response_length) for sample in samples], "samples": samples}}
