"""Which model is trained, in which precision, and which of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, flag

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model: what is trained"""

    hf_checkpoint: str = flag(
        None, "Hugging Face model folder: weights, config and tokenizer to start from", metavar="DIR", required=True
    )
    dtype: str = flag(
        "auto",
        "compute precision; auto: bfloat16 on CUDA and on a CPU that has units for it (models of 50 M parameters and "
        "more), else float32",
        choices=DTYPES,
    )
    rollout_dtype: str = flag("auto", "precision of the inference engines; auto: same as --dtype", choices=DTYPES)
    fp8: bool = flag(
        False,
        "matrix products of the decoder layers are computed in 8-bit floats (e4m3, a scale for each row) in the "
        "forward, in bfloat16 in the backward; on GPUs of compute capability 8.9 and newer",
    )
    recompute_activations: bool = flag(
        False, "recompute activations in the backward pass: less memory, about a third more work"
    )
    share_prompts: bool | None = flag(
        None,
        "what samples of one micro-batch begin with in common, a prompt above all, is computed once in the trainer: "
        "the same numbers but for rounding, less work where prompts are long",
        derived="on where backend, layout and model allow it",
    )
    recompute_loss_function: bool = flag(
        False, "custom losses are called again in the backward pass instead of keeping what they computed"
    )
    qwen_gdn_backend: str | None = flag(
        None,
        "kernels of gated delta nets (Qwen3-Next, Qwen3.5), which are refused where they cannot run; default: fla on "
        "GPUs where it is installed, else torch",
        choices=("fla", "flashqla"),
    )
    trust_remote_code: bool = flag(False, "run model code that ships inside the model folder")
    freeze_params_name_list: list[str] | None = flag(
        None, "regular expressions of parameter names that are not trained", metavar="REGEX"
    )
    freeze_indexer: bool = flag(False, "the indexers of sparse attention are not trained")
    only_train_params_name_list: list[str] | None = flag(
        None, "regular expressions of the only parameter names that are trained", metavar="REGEX"
    )


# Adapters that are trained in the place of all weights.

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


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
