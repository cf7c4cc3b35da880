"""Flags of upstream's run scripts in whole runs: used flags, printed notes, and a key that must not leak."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runs import MARK, TRAIN, TRAINER, records, run
from tests.tiny_models import make_model_folder

KEY = "0123456789abcdef-the-key"
TRACKER = f"""
import json, os, pathlib

def init(**options):
    mark = os.environ[{MARK!r}]
    processes = []
    for folder in pathlib.Path("/proc").iterdir():
        try:
            environ = (folder / "environ").read_bytes().decode(errors="replace")
            if folder.name.isdigit() and mark in environ and int(folder.name) != os.getpid():
                processes.append([(folder / "cmdline").read_bytes().decode(errors="replace"), environ])
        except OSError:
            pass
    seen = {{"key": os.environ.get("WANDB_API_KEY"), "options": repr(options), "processes": processes}}
    pathlib.Path("seen_by_tracker.json").write_text(json.dumps(seen))
    return Run()

class Run:
    id = "a1b2c3d4"

    def define_metric(self, *args, **kwargs): pass
    def log(self, values): pass
    def finish(self): pass

class Table:
    def __init__(self, **kwargs): pass
"""
"""Replaces the package wandb and inspects the other processes of the run while they are alive."""

SFT = """
    --hf-checkpoint model --rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data chats.jsonl
    --input-key messages --rollout-shuffle --num-epoch 2 --rollout-batch-size 2 --global-batch-size 2
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only
    --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu 9216
    --optimizer adam --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-fraction 0.5 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0.0 --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
    --num-layers 2 --swiglu --rollout-num-gpus 0 --train-backend fsdp --no-offload-train --num-gpus-per-node 8
    --use-wandb --wandb-project slime-dev --wandb-group sft --disable-wandb-random-suffix
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --device cpu --output-dir sft
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flags")
    make_model_folder(folder / "model")
    chats = [
        [{"role": "user", "content": f"what is {i}+{i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]
        for i in range(4)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(TRACKER)
    return folder


def test_sft_run_notes_ignored_flags_and_hides_the_wandb_key(place: Path) -> None:
    train_async = [TRAIN[0], str(Path(TRAIN[1]).with_name("train_async.py"))]
    variables = json.dumps({"MY_OWN_VARIABLE": "seven"})
    flags = [*SFT.split(), "--wandb-key", KEY, "--train-env-vars", variables]
    packages = os.pathsep.join(filter(None, [str(place / "packages"), os.environ.get("PYTHONPATH")]))
    done = run([*train_async, *flags], place, PYTHONPATH=packages)
    assert (done.code, done.err) == (0, "")

    steps = records(place / "sft", "train")
    assert [step["train/lr-pg_0"] for step in steps] == pytest.approx([0.0, 5e-4, 1e-3, 5.5e-4])
    losses = [step["train/loss"] for step in steps]
    assert losses[3] < losses[0]

    log = (place / "sft" / "logs" / "driver.log").read_text()
    for sentence in (
        "Megatron flags without effect on the FSDP trainer: --sequence-parallel, --recompute-method, "
        "--recompute-num-layers, --attention-backend, --accumulate-allreduce-grads-in-fp32, "
        "--attention-softmax-in-fp32 (--train-backend megatron uses them; fsdp is the default here)",
        "the model is built from its config.json, with which these flags are only compared: --num-layers, --swiglu",
        "--disable-wandb-random-suffix has no effect: names in W&B never get a random suffix",
    ):
        assert done.out.count(f"note: {sentence}\n") == 1, sentence
        assert log.count(sentence) == 1, sentence
    assert "dropout" not in done.out
    assert "--num-gpus-per-node" not in done.out

    seen = json.loads((place / "seen_by_tracker.json").read_text())
    assert seen["key"] == KEY
    assert KEY not in seen["options"]
    others = [(command, environ) for command, environ in seen["processes"] if "train_async.py" not in command]
    assert [command for command, environ in others if KEY in command + environ] == []
    trainers = [environ for command, environ in others if TRAINER in command and "reaper.py" not in command]
    assert len(trainers) == 1
    assert "MY_OWN_VARIABLE=seven" in trainers[0]
    files = [file for file in (place / "sft").rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl", "driver.log", "trainer-0.log"} <= {file.name for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in done.out + done.err
