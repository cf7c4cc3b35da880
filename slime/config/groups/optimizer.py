"""How gradients move the weights."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, between, flag


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer"""

    optimizer: str = flag("adam", "optimizer (AdamW)", choices=("adam",), later=("sgd",))
    lr: float = flag(1e-6, "peak learning rate", check=at_least(0))
    min_lr: float = flag(0.0, "learning rate at the end of the decay", check=at_least(0))
    lr_decay_style: str = flag(
        "constant",
        "shape of the decay",
        choices=("constant", "linear", "cosine"),
        later=("inverse-square-root", "WSD"),
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", check=at_least(0))
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr", check=at_least(1), derived="all steps of the run"
    )
    weight_decay: float = flag(0.0, "decoupled weight decay", check=at_least(0))
    adam_beta1: float = flag(0.9, "decay of the first moment", check=between(0, 1, high_open=True))
    adam_beta2: float = flag(0.95, "decay of the second moment", check=between(0, 1, high_open=True))
    adam_eps: float = flag(1e-8, "added to the denominator", check=above(0))
    clip_grad: float = flag(1.0, "largest global gradient norm; 0: no clipping", check=at_least(0))
