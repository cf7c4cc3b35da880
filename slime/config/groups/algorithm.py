"""From rewards to a loss."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, flag, minus_one_or_at_least


@dataclass(frozen=True, kw_only=True)
class AlgorithmFlags:
    """Algorithm: advantages and losses"""

    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=("grpo",),
        later=("gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    )
    loss_type: str = flag(
        "policy_loss", "what is minimised", choices=("policy_loss", "sft_loss"), later=("custom_loss",)
    )
    eps_clip: float = flag(0.2, "lower clip range of the policy ratio", check=at_least(0))
    eps_clip_high: float = flag(None, "upper clip range of the policy ratio", check=at_least(0), derived="--eps-clip")
    eps_clip_c: float | None = flag(None, "dual clip: bound on the loss of negative advantages", check=above(1))
    use_kl_loss: bool = flag(False, "keep a frozen reference model and report (and weigh) the KL to it")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss")
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    disable_grpo_std_normalization: bool = flag(False, "only subtract the group mean (Dr.GRPO)")
    disable_rewards_normalization: bool = flag(False, "use raw rewards as advantages")
    calculate_per_token_loss: bool = flag(False, "average the loss over tokens instead of over responses")
    normalize_advantages: bool = flag(False, "whiten advantages over the whole batch")
    ref_load: str | None = flag(None, "reference model folder", metavar="DIR", derived="--hf-checkpoint")
    log_probs_chunk_size: int = flag(
        -1, "rows of logits held at once when log-probs are computed; -1: automatic", check=minus_one_or_at_least(1)
    )
