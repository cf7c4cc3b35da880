"""A plan that does not fit in memory states the shortfall and suggests flags or GPUs with which it fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime.config import parse_args
from slime.driver.plan.plan import Plan, make_plan
from slime.driver.plan.schedule import planned_machines
from slime.models.catalog import published_model

GIB = 2**30
USUAL = (
    "--label-key label --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 9 --colocate "
    "--rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --dry-run"
)


def plan_for(folder: Path, model: str, cluster: str, more: str = "") -> Plan:
    published_model(model).write(folder)
    (folder / "prompts.jsonl").write_text(json.dumps({"input": "1+1", "label": "2"}) + "\n")
    nodes, gpus, _ = cluster.split("x")
    own = f"--hf-checkpoint {folder} --prompt-data {folder}/prompts.jsonl --output-dir {folder}/out --plan-cluster {cluster}"
    sizes = f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {gpus}"
    config = parse_args(f"{own} {sizes} {USUAL} {more}".split())
    found = planned_machines(config)
    return make_plan(config, device=found.device, gpu_count=found.gpus)


def memory_note(plan: Plan) -> str:
    (note,) = [note for note in plan.notes if "there are: " in note or "an engine lacks" in note]
    return note


def gib(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return round(float(found[1]) * GIB)


CASES = [
    ("qwen3-4B", "1x1x80", "", ["--offload", "--recompute-activations"]),
    ("qwen3-4B", "1x8x80", "--sglang-mem-fraction-static 0.7", ["--offload"]),
    ("glm4-9B", "1x1x80", "", ["--fsdp-cpu-offload"]),
    ("qwen3-30B-A3B", "1x8x80", "--offload", ["--recompute-activations"]),
    ("qwen3-30B-A3B", "2x8x80", "--offload --train-backend megatron --expert-model-parallel-size 8", ["full"]),
]


@pytest.mark.parametrize(("model", "cluster", "more", "wanted"), CASES)
def test_suggested_flags_make_the_plan_fit(
    model: str, cluster: str, more: str, wanted: list[str], tmp_path: Path
) -> None:
    plan = plan_for(tmp_path, model, cluster, more)
    note = memory_note(plan)
    assert plan.lacks is not None
    assert plan.lacks == pytest.approx(gib(r"is ([\d.]+) GiB more than the", note), abs=GIB / 100)
    named = re.search(r"with (.*?) it is ", note)
    assert named is not None, note
    assert set(wanted) <= set(named[1].split())
    better = plan_for(tmp_path, model, cluster, f"{more} {named[1]}")
    assert better.lacks == 0
    assert not [one for one in better.notes if "there are: " in one]
    said = gib(r"it is ([\d.]+) GiB", note)
    sizes = [process.memory.total for process in better.processes if process.memory is not None]
    in_turns = "--offload" in f"{more} {named[1]}".split()
    assert said == pytest.approx(max(sizes) if in_turns else sum(sizes), abs=GIB / 100)


def test_every_suggested_flag_is_needed(tmp_path: Path) -> None:
    note = memory_note(plan_for(tmp_path, "qwen3-4B", "1x1x80"))
    assert "with --offload --recompute-activations it is" in note
    for alone in ("--offload", "--recompute-activations"):
        assert plan_for(tmp_path, "qwen3-4B", "1x1x80", alone).lacks


def test_suggested_number_of_gpus_makes_the_plan_fit(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "glm4-9B", "1x1x141", "--offload")
    note = memory_note(plan)
    found = re.search(r"with --actor-num-nodes 1 --actor-num-gpus-per-node (\d) \(\1 GPUs\) it is ([\d.]+) GiB", note)
    assert found is not None, note
    enough = plan_for(tmp_path, "glm4-9B", f"1x{found[1]}x141", "--offload")
    assert enough.lacks == 0
    assert plan_for(tmp_path, "glm4-9B", f"1x{int(found[1]) // 2}x141", "--offload").lacks


def test_suggests_parallelism_or_a_smaller_model_if_no_flag_fits(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "deepseek-v3", "1x1x80")
    note = memory_note(plan)
    assert plan.lacks is not None
    assert plan.lacks > 10_000 * GIB
    assert note.endswith("cut the model (--train-backend megatron; slime models NAME --layout), or train a smaller one")
    assert "of the host's memory for each trainer" in note
    layout = (
        "--train-backend megatron --tensor-model-parallel-size 8 --sequence-parallel --expert-tensor-parallel-size 1"
    )
    small = memory_note(
        plan_for(tmp_path, "deepseek-v3", "8x8x80", f"{layout} --expert-model-parallel-size 8 --offload")
    )
    assert "cut the model into more parts (--tensor-model-parallel-size" in small


def test_plan_notes_an_engine_too_small_for_one_sample(tmp_path: Path) -> None:
    more = "--offload --recompute-activations --sglang-mem-fraction-static 0.7"
    plan = plan_for(tmp_path, "qwen3-30B-A3B", "1x8x80", more)
    note = memory_note(plan)
    # 56.87 GiB of weights and 8192 tokens of 48 layers x 2 x 4 heads x 128 x 2 bytes, in 70 % of 80 GiB
    assert plan.lacks == pytest.approx(56.87 * GIB + 8192 * 98304 - 56 * GIB, abs=GIB / 100)
    assert note.startswith(
        "an engine lacks 1.62 GiB for its weights and one sample of 8192 tokens: --sglang-mem-fraction-static 0.7 is too "
        "small; with --rollout-num-gpus-per-engine 2 it is "
    )
    assert plan_for(tmp_path, "qwen3-30B-A3B", "1x8x80", f"{more} --rollout-num-gpus-per-engine 2").lacks == 0
    assert plan_for(tmp_path, "qwen3-30B-A3B", "1x8x80", more.replace("0.7", "0.8")).lacks == 0


def test_sglang_memory_share_includes_the_weights(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "qwen3-4B", "1x8x80", "--offload --sglang-mem-fraction-static 0.7")
    (engine,) = [process.memory for process in plan.processes if process.name == "engine"]
    assert engine is not None
    assert engine.total == int(0.7 * 80 * GIB)
