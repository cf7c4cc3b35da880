"""Every finished group of a rollout, those that a filter dropped included: kept in a file.

--rollout-all-samples-process-path examples/plugins/all_samples_process.py
"""

import json
from pathlib import Path

from slime.rollout.base_types import leaves


def all_samples_process(args, all_groups, data_source):
    """Called once per rollout, after the batch is complete; `data_source` may be given groups back."""
    with open(Path(args.output_dir) / "all_samples.jsonl", "a", encoding="utf-8") as file:
        for sample in leaves(all_groups):
            line = {"index": sample.index, "response": sample.response, "reward": sample.reward}
            file.write(json.dumps(line) + "\n")
