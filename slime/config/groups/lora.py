"""Adapters that are trained in the place of all weights."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.flag import above, at_least, flag


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA: two small matrices beside each frozen one"""

    lora_rank: int = flag(
        0,
        "rows of the one and columns of the other matrix; 0: all weights are trained",
        check=at_least(0),
        derived="0; that of --lora-load",
    )
    lora_alpha: float | None = flag(
        None,
        "their product is added to the weights, times alpha / rank",
        check=above(0),
        derived="twice --lora-rank; that of --lora-load",
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "linear layers that get them, by their names or the last parts of these (q_proj, mlp.down_proj); all-linear: "
        "every one but the output layer",
        metavar="NAME",
        derived="all-linear; those of --lora-load",
    )
    lora_load: str | None = flag(
        None, "adapter to start from, a folder as PEFT saves it and --save-hf does in adapter/", metavar="DIR"
    )
    lora_sync: str = flag(
        "merged",
        "what the engines get: all weights with the adapter added to them, or the adapter alone, which they add to "
        "the weights of --hf-checkpoint",
        choices=("merged", "adapter"),
    )
