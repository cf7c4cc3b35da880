"""Before the passes of an optimizer step: what it is going to be made with.

--train-backend megatron --custom-megatron-before-train-step-hook-path examples/plugins/before_train_step.py
"""

from pathlib import Path


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """`optimizer` is Megatron's; the last has the `learning_rate` and the `weight_decay` of the step."""
    with open(Path(args.output_dir) / f"steps_{args.rank}.txt", "a") as log:
        log.write(f"{rollout_id} {step_id} {opt_param_scheduler.learning_rate:g} {len(optimizer.param_groups)}\n")
