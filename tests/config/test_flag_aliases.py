"""Names of TRL, verl and OpenRLHF raise errors that name the slime flag: on the command line, in files, in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slime
from slime.config import Config
from slime.config.config import FLAG_SPECS
from slime.config.flag_aliases import FOREIGN_FLAGS, REFUSED
from slime.config.megatron_flags import MEGATRON_FLAGS
from slime.config.parser import parse_flags
from slime.errors import UserError

FLAGS = {spec.flag for spec in FLAG_SPECS.values()}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--learning-rate", "1e-5"], "--learning-rate is a name of TRL: here it is --lr"),
        (["--num_generations", "8"], "--num-generations is a name of TRL: here it is --n-samples-per-prompt"),
        (
            ["--per_device_train_batch_size=8"],
            "--per-device-train-batch-size is a name of TRL: here it is --micro-batch-size (samples of one forward "
            "pass); samples of one optimizer step are --global-batch-size",
        ),
        (["--pretrain", "x"], "--pretrain is a name of OpenRLHF: here it is --hf-checkpoint"),
        (
            ["--init_kl_coef", "0.1"],
            "--init-kl-coef is a name of OpenRLHF: here it is --kl-coef (in the reward), or --use-kl-loss with "
            "--kl-loss-coef",
        ),
        (
            ["--gradient-accumulation-steps", "2"],
            "--gradient-accumulation-steps is a name of TRL: it follows from --global-batch-size and "
            "--micro-batch-size: drop it",
        ),
        (
            ["--lora-dropout", "0.1"],
            "--lora-dropout is a name of TRL: there is no dropout in training: drop it",
        ),
        (
            ["actor_rollout_ref.rollout.n=5"],
            "actor_rollout_ref.rollout.n is a name of verl: here it is --n-samples-per-prompt",
        ),
        (
            ["--lr", "1e-5", "+data.train_files=a.parquet"],
            "data.train_files is a name of verl: here it is --prompt-data",
        ),
        (["--trainer.total_epochs", "3"], "--trainer.total-epochs is a name of verl: here it is --num-epoch"),
    ],
)
def test_flags_of_other_libraries_raise_an_error_with_the_slime_flag(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_flags(words)
    assert str(caught.value) == sentence


def test_flag_values_that_look_like_settings_stay_values() -> None:
    assert parse_flags(["--rollout-stop", "a.b=c", "x=1"]).rollout_stop == ["a.b=c", "x=1"]


def test_config_file_keys_get_the_same_hint(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("max_completion_length = 8\n")
    with pytest.raises(UserError) as caught:
        parse_flags(["--config", str(file)])
    assert str(caught.value) == (
        f"{file}: max_completion_length is a name of TRL: here it is --rollout-max-response-len"
    )


def test_python_keywords_get_the_same_hints() -> None:
    for keyword, sentence in {
        "learning_rate": "learning_rate is a name of TRL: here it is lr",
        "release_train": "release_train is not supported: trainers live as long as the run: offload_train frees their "
        "memory instead",
        "lora_r": "lora_r is a name of TRL: here it is lora_rank",
    }.items():
        with pytest.raises(UserError) as caught:
            slime.run(**{keyword: 1})
        assert str(caught.value) == sentence
    with pytest.raises(UserError, match=r"^unknown config key rollout_batchsize: did you mean rollout_batch_size\?$"):
        Config.from_dict({"rollout_batchsize": 1})


def test_hints_name_existing_flags_and_foreign_names_are_not_slime_flags() -> None:
    for name, (_, remedy) in FOREIGN_FLAGS.items():
        for flag in re.findall(r"--[a-z][a-z0-9-]*", remedy):
            assert flag in FLAGS or flag == "--sglang-mem-fraction-static", (name, flag)
        assert f"--{name}" not in FLAGS
        assert name not in {*MEGATRON_FLAGS, *REFUSED}, name
    assert len(FOREIGN_FLAGS) > 100
