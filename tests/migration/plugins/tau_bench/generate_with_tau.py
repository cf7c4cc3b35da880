from tau_env import Env
from trainable_agents import InteractionResult, Status, TrainableToolCallingAgent

from slime.utils.types import Sample

TAU_CONFIGS = {"max_num_steps": 4}


def res_to_sample(res: InteractionResult, task_index: int) -> Sample:
    status_mapping = {
        Status.COMPLETED: "completed",
        Status.TRUNCATED: "truncated",
        Status.ABORTED: "aborted",
    }
    sample = Sample(
        index=task_index,
        prompt=res.prompt,
        tokens=res.tokens,
        response=res.response,
        reward=res.reward,
        loss_mask=res.loss_mask,
        status=status_mapping.get(res.status),
        metadata=res.info,
    )
    sample.response_length = res.response_length
    return sample


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for tau-bench interactions."

    # the prompt is the number of a task
    task_index = int(sample.prompt)
    env = Env(task_index)
    agent = TrainableToolCallingAgent(
        tools_info=env.tools_info, wiki=env.wiki, rollout_args=args, sampling_params=sampling_params
    )
    result = await agent.asolve(env, max_num_steps=TAU_CONFIGS["max_num_steps"])
    return res_to_sample(result, task_index)
