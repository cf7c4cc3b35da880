"""The value model of PPO."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, between, flag


@dataclass(frozen=True, kw_only=True)
class CriticFlags:
    """Critic: the value model of PPO"""

    lambd: float = flag(1.0, "lambda of generalised advantage estimation", check=between(0, 1))
    value_clip: float = flag(0.2, "how far a value may move from the old one in one rollout", check=above(0))
    num_critic_only_steps: int = flag(0, "rollouts at the start that train the critic alone", check=at_least(0))
    critic_hf_checkpoint: str | None = flag(
        None, "model folder the critic starts from", metavar="DIR", derived="--hf-checkpoint"
    )
    critic_load: str | None = flag(
        None, "checkpoints the critic resumes from", metavar="DIR", derived="critic/ under --load, if it is there"
    )
    critic_save: str | None = flag(None, "the critic's checkpoints", metavar="DIR", derived="critic/ under --save")
    critic_lr: float | None = flag(None, "the critic's learning rate", check=at_least(0), derived="--lr")
    critic_lr_warmup_iters: int | None = flag(
        None, "the critic's warm-up", check=at_least(0), derived="--lr-warmup-iters"
    )
    critic_config: str | None = flag(
        None, "TOML or YAML file of flags that differ for the critic (lr, weight_decay, clip_grad ...)", metavar="FILE"
    )
    megatron_config_path: str | None = flag(
        None,
        "YAML file of overrides by role, as slime has it: megatron: [{role: critic, overrides: {lr: 1e-5}}]",
        metavar="FILE",
    )
