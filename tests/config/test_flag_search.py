from __future__ import annotations

import re

import pytest

from slime.config.config import FLAG_SPECS
from slime.config.help import search_flags
from slime.errors import UserError

DECIDED = {"sglang-tp-size": "--rollout-num-gpus-per-engine"}


def find_names(*words: str) -> list[str]:
    """Return the names of the flags in the search result, in order."""
    text = search_flags(words, DECIDED, width=100)
    return [match[1] for line in text.splitlines() if (match := re.match(r"  (\S+)", line)) and line[2] != " "]


def test_search_needs_every_word_in_name_help_or_group() -> None:
    names = find_names("batch", "size")
    assert {"--rollout-batch-size", "--global-batch-size", "--micro-batch-size"} <= set(names)
    assert "--lr" not in names
    assert "--clip-grad" in find_names("gradient")  # matches the help text
    whole_group = {spec.flag for spec in FLAG_SPECS.values() if spec.group == "Evaluation"}
    assert whole_group <= set(find_names("evaluation"))


def test_search_ranks_names_and_slime_flags_first_in_any_spelling() -> None:
    names = find_names("reward")
    assert names[0] == "--reward-key"
    assert names.index("--disable-rewards-normalization") < names.index("--metadata-key")  # of an earlier group
    names = find_names("optimizer")
    assert names.index("--global-batch-size") < names.index("--overlap-cpu-optimizer-d2h-h2d")  # Megatron's flag
    for word in ("rollout-batch-size", "--rollout-batch-size", "ROLLOUT_BATCH_SIZE"):
        assert find_names(word)[0] == "--rollout-batch-size"


def test_search_finds_carried_rejected_and_foreign_flags() -> None:
    assert "--tensor-model-parallel-size N" in search_flags(["tensor", "parallel"], DECIDED, width=100)
    text = search_flags(["permute"], DECIDED, width=100)
    assert "--moe-permute-fusion" in text
    assert "Megatron-LM's, carried through under their names\n" in text
    assert "refused: it is decided by --rollout-num-gpus-per-engine" in search_flags(["sglang-tp"], DECIDED, width=100)
    assert "--sglang-*" in find_names("sglang")
    assert "is not supported" in search_flags(["release-train"], width=100)
    assert "WANDB_API_KEY" in search_flags(["wandb-key"], width=100)
    elsewhere = search_flags(["num_generations"], width=100)
    assert "a name of TRL: here it is --n-samples-per-prompt" in elsewhere
    assert "trainer.save_freq" in find_names("save-freq")
    assert len(find_names("megatron")) > 100


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["temprature"], "no flag has 'temprature' in its name, help or group: did you mean temperature?"),
        (["zzzzqqq"], "no flag has 'zzzzqqq' in its name, help or group (slime flags lists all)"),
        (["lr", "wandb"], "no flag has all of 'lr', 'wandb': search with fewer words"),
    ],
)
def test_search_without_match_raises_an_error_with_a_hint(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        search_flags(words)
    assert str(error.value) == sentence
