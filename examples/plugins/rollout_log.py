"""Own numbers about each rollout, in a file of their own.

--custom-rollout-log-function-path examples/plugins/rollout_log.py
"""

import json
from pathlib import Path


def rollout_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """True: the rollout's own metrics are not logged. False: they are, too."""
    empty = sum(not sample.response.strip() for sample in samples)
    line = {"rollout_id": rollout_id, "empty": empty, "samples": len(samples), "seconds": rollout_time}
    with open(Path(args.output_dir) / "rollouts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return False
