"""When Megatron's groups are formed: set up what belongs to the process, and note which rank it is.

--train-backend megatron --custom-megatron-init-path examples/plugins/megatron_init.py
"""

from pathlib import Path


def megatron_init(args):
    """Called once in every trainer, before any model is built; `args.rank` is its number."""
    note = f"rank {args.rank} of {args.world_size}, TP {args.tensor_model_parallel_size}\n"
    (Path(args.output_dir) / f"megatron_{args.rank}.txt").write_text(note)
