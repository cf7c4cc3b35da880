"""A rollout function that only adds to the fully asynchronous one."""

from slime.rollout.fully_async_rollout import generate_rollout_fully_async


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout_fully_async(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    groups = output if isinstance(output, list) else output.samples
    assert len(groups) == args.rollout_batch_size
    return output
