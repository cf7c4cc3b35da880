"""Before the log-probs of the policy ("") or of a frozen model ("ref_", "teacher_") are taken.

--train-backend megatron --custom-megatron-before-log-prob-hook-path examples/plugins/before_log_prob.py
"""

from pathlib import Path


def before_log_prob(args, model, store_prefix):
    """`model` is the list of this process's stages, in evaluation mode."""
    weights = sum(parameter.numel() for stage in model for parameter in stage.parameters())
    with open(Path(args.output_dir) / f"log_probs_{args.rank}.txt", "a") as log:
        log.write(f"{store_prefix or 'policy'} {weights}\n")
