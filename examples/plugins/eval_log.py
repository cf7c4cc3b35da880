"""Own numbers about each evaluation, in a file of their own.

--custom-eval-rollout-log-function-path examples/plugins/eval_log.py
"""

import json
from pathlib import Path


def eval_log(rollout_id, args, data, extra_metrics):
    """`data` is {dataset: {"rewards": [...], ...}}. True: the usual evaluation metrics are not logged."""
    best = {name: max(result["rewards"]) for name, result in data.items()}
    with open(Path(args.output_dir) / "evaluations.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"rollout_id": rollout_id, "best": best}) + "\n")
    return False
