"""How a response is scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.flag import above, at_least, flag

RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm", "random")
LABEL_FREE_RM_TYPES = ("ifbench", "remote_rm", "random")
"""Those that judge without a label."""


def compares_with_label(rm_type: str, metadata: Mapping[str, Any]) -> bool:
    """Whether this verifier needs the sample's label; gpqa also takes the letter that a row's metadata names."""
    kind = rm_type.removeprefix("boxed_")
    return kind not in LABEL_FREE_RM_TYPES and not (kind == "gpqa" and metadata.get("correct_letter"))


def known_rm_type(value: str) -> str | None:
    """A built-in verifier, with or without the boxed_ prefix."""
    return None if value.removeprefix("boxed_") in RM_TYPES else f"must be one of {', '.join(RM_TYPES)}"


@dataclass(frozen=True, kw_only=True)
class RewardFlags:
    """Reward: scoring responses"""

    rm_type: str | None = flag(
        None,
        f"built-in verifier: {', '.join(RM_TYPES)}; the prefix boxed_ extracts the boxed answer first",
        check=known_rm_type,
    )
    rm_url: str | None = flag(None, "address of the reward service, for --rm-type remote_rm", metavar="URL")
    custom_rm_path: str | None = flag(None, "function (args, sample) that returns the reward")
    reward_key: str | None = flag(None, "entry to train on where rewards are dicts")
    eval_reward_key: str | None = flag(None, "entry to report in evaluation", derived="--reward-key")
    group_rm: bool = flag(False, "score all samples of a prompt in one call: custom function gets (args, samples)")
    reward_timeout: float = flag(600.0, "seconds until a reward function must have answered", check=above(0))
    reward_workers: int | None = flag(
        None,
        "processes that compare answers, for --rm-type math and deepscaler",
        check=at_least(1),
        derived="cores / 2",
    )
    custom_reward_post_process_path: str | None = flag(
        None, "function (args, samples) -> (raw_rewards, rewards) instead of group normalisation"
    )
