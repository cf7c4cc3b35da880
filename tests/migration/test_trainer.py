"""Losses, corrections and launchers written for upstream slime, each in a whole run."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.rollout.debug_data import read_dump
from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import TRAIN, records, run
from tests.tiny_models import make_model_folder

PLUGINS = Path(__file__).parent / "plugins"
REWARD = """\
async def reward_func(args, sample, **kwargs):
    return sum(sample.tokens) % 7 / 7
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's working folder: a model, sums as prompts, a reward, and the plugin files."""
    folder = tmp_path_factory.mktemp("upstream")
    make_model_folder(folder / "model")
    sums = [
        {"messages": [{"role": "user", "content": f"what is {i}+{i + 1}?"}], "label": str(2 * i + 1)} for i in range(12)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "rewards.py").write_text(REWARD)
    for file in PLUGINS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return folder


def flags(*, num_rollout: int = 1) -> list[str]:
    """Flags for two updates per rollout of 16 samples."""
    words = grpo_flags()
    hook = words.index("--rollout-sample-hook-path")
    del words[hook : hook + 2]
    words[words.index("plugins.py:token_sum")] = "rewards.reward_func"
    return [*words, "--num-rollout", str(num_rollout)]


def test_custom_loss_from_upstream_helpers_equals_the_builtin_loss(place: Path) -> None:
    custom = ["--loss-type", "custom_loss", "--custom-loss-function-path", "custom_loss.loss_function"]
    done = run([*TRAIN, *flags(), *custom, "--output-dir", "loss"], place)
    assert done.code == 0, done.err
    steps = records(place / "loss", "train")
    assert len(steps) == 2
    for step in steps:
        assert step["train/loss"] == pytest.approx(step["train/shipped_loss"], rel=1e-4, abs=1e-6)
        assert step["train/my_samples"] == pytest.approx(1.0)  # 8 samples, of 8 rollouts
        assert step["train/grad_norm"] > 0
        assert step["train/kl_loss"] >= 0
    assert steps[1]["train/kl_loss"] > 0  # the second update starts from moved weights


def test_plugin_metrics_and_traces_are_recorded(place: Path) -> None:
    mine = ["--custom-rm-path", "measured.reward_func", "--custom-rollout-log-function-path", "measured.log_rollout"]
    mine += ["--rollout-data-postprocess-path", "measured.log_train_data", "--use-tensorboard"]
    dumps = ["--save-debug-rollout-data", "measured/{rollout_id}.pt", "--output-dir", "measured"]
    done = run([*TRAIN, *flags(), *mine, *dumps], place)
    assert done.code == 0, done.err
    (rollout,) = records(place / "measured", "rollout")
    first, second = records(place / "measured", "plugin")
    assert first["rollout/my_reward/mean"] == pytest.approx(rollout["rollout/raw_reward"])
    assert first["rollout/count_is_measured"] == 1.0
    assert second["mine/advantage_spread"] > 0
    assert [(record["step"], record["rollout_id"]) for record in (first, second)] == [(0, 0), (0, 0)]
    events = EventAccumulator(str(place / "measured" / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("rollout/my_reward/mean")]
    assert shown == pytest.approx([first["rollout/my_reward/mean"]])
    samples = [sample for group in read_dump(place / "measured" / "0.pt") for sample in group]
    assert len(samples) == 16
    for sample in samples:
        trace = sample.trace
        assert (trace["version"], trace["sample_id"], trace["group_id"]) == (1, sample.index, sample.group_index)
        assert [(event["type"], event["name"]) for event in trace["events"]] == [
            ("span_start", "generate_and_rm_group"),
            ("span_start", "generate_and_rm"),
            ("span_start", "sglang_generate"),
            ("span_end", "sglang_generate"),
            ("span_start", "reward_model"),
            ("span_start", "my_reward"),
            ("span_start", "count_tokens"),
            ("span_end", "count_tokens"),
            ("event", "scored"),
            ("span_end", "my_reward"),
            ("span_end", "reward_model"),
            ("span_end", "generate_and_rm"),
            ("span_end", "generate_and_rm_group"),
        ]
        assert trace["events"][7]["attrs"] == {"reward": sample.reward}


def test_launch_script_with_execute_train_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Environment variables set the tiny model's sizes in the model script."""
    facts = json.loads((place / "model" / "config.json").read_text())
    numbers = {
        "NUM_LAYERS": "num_hidden_layers", "HIDDEN_SIZE": "hidden_size", "FFN_HIDDEN_SIZE": "intermediate_size",
        "NUM_ATTENTION_HEADS": "num_attention_heads", "NUM_QUERY_GROUPS": "num_key_value_heads",
        "KV_CHANNELS": "head_dim", "VOCAB_SIZE": "vocab_size",
    }  # fmt: skip
    for name, key in numbers.items():
        monkeypatch.setenv(f"MODEL_ARGS_{name}", str(facts[key]))
    monkeypatch.setenv("MODEL_ARGS_ROTARY_BASE", str(int(facts["rope_parameters"]["rope_theta"])))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(place)
    runpy.run_path(str(place / "run_tiny.py"), run_name="__main__")
    out = capfd.readouterr().out
    assert out.index("about to start") < out.index("EXEC: ")
    (step,) = records(place / "a launched run", "train")
    assert step["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    config = (place / "a launched run" / "config.yaml").read_text()
    assert "rollout_temperature: 0.9\n" in config
    assert "note: costs $5\n" in config


def test_yaml_config_enables_masked_importance_sampling(place: Path) -> None:
    """The YAML file enables the correction and sets flags and extra values; the command line does not."""
    custom = ["--custom-config-path", "mis.yaml", "--custom-tis-function-path", "mis.compute_mis_weights_with_cp"]
    done = run([*TRAIN, *flags(), *custom, "--output-dir", "mis"], place)
    assert done.code == 0, done.err
    steps = records(place / "mis", "train")
    assert len(steps) == 2
    for step in steps:
        assert step["train/mis_ratio"] == pytest.approx(1.0, abs=1e-3)  # engine and trainer agree
        assert step["train/mis_tis_clipped"] == step["train/mis_rejected"] == 0.0
        assert step["train/grad_norm"] > 0
    config = (place / "mis" / "config.yaml").read_text()
    for line in ("use_tis: true", "use_rs: true", "tis_mode: truncate", "rs_level: sequence", "rs_lower_bound: null"):
        assert f"{line}\n" in config
    assert "  tis_upper_bound: 2.0\n" in config  # not a flag: read by the function
