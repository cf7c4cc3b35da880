"""Once the files of a version of the weights are written: note them, or copy them to where engines are.

--update-weight-transport disk --custom-update-weight-post-write-path examples/plugins/post_write.py
"""

import json
from pathlib import Path


def post_write(args, version_dir, rollout_engines):
    """`version_dir` is the finished folder; `rollout_engines` are the clients of the engines that will read it."""
    files = sorted(Path(version_dir).glob("*.safetensors"))
    note = {"version": Path(version_dir).name, "bytes": sum(file.stat().st_size for file in files)}
    with open(Path(args.output_dir) / "versions.jsonl", "a") as log:
        log.write(json.dumps(note) + "\n")
