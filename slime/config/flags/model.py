"""Flags of the model, its precision, its trained parameters and LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, flag

# ruff: noqa: RUF009 (`flag` declares a dataclass field)


DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model: weights and precision"""

    hf_checkpoint: str = flag(
        None, "Hugging Face model folder: weights, config and tokenizer to start from", metavar="DIR", required=True
    )
    dtype: str = flag(
        "auto",
        "compute precision; auto: bfloat16 on CUDA and on a CPU with bfloat16 units (models of 50 M parameters and "
        "more), else float32",
        choices=DTYPES,
    )
    rollout_dtype: str = flag("auto", "precision of the inference engines; auto: same as --dtype", choices=DTYPES)
    fp8: bool = flag(
        False,
        "compute matrix products of the decoder layers in 8-bit floats (e4m3, a scale for each row) in the forward "
        "pass, in bfloat16 in the backward pass; needs GPUs of compute capability 8.9 or newer",
    )
    recompute_activations: bool = flag(
        False, "recompute activations in the backward pass: less memory, about a third more work"
    )
    share_prompts: bool | None = flag(
        None,
        "compute common prefixes of the samples of a micro-batch, such as prompts, once in the trainer: the same "
        "results up to rounding, less work for long prompts",
        derived="on where backend, layout and model allow it",
    )
    recompute_loss_function: bool = flag(
        False, "call custom losses again in the backward pass instead of keeping their intermediate results"
    )
    qwen_gdn_backend: str | None = flag(
        None,
        "kernels of gated delta nets (Qwen3-Next, Qwen3.5), which are refused if they cannot run; default: fla on "
        "GPUs where it is installed, else torch",
        choices=("fla", "flashqla"),
    )
    trust_remote_code: bool = flag(False, "run model code that ships inside the model folder")
    freeze_params_name_list: list[str] | None = flag(
        None, "regular expressions of parameter names that are not trained", metavar="REGEX"
    )
    freeze_indexer: bool = flag(False, "do not train the indexers of sparse attention")
    only_train_params_name_list: list[str] | None = flag(
        None, "regular expressions of the only parameter names that are trained", metavar="REGEX"
    )


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA: adapters of frozen weights"""

    lora_rank: int = flag(
        0,
        "rank of the adapters' matrices; 0: all weights are trained",
        check=at_least(0),
        derived="0; that of --lora-load",
    )
    lora_alpha: float | None = flag(
        None,
        "scale: the product of the two matrices is added to the weights, times alpha / rank",
        check=above(0),
        derived="twice --lora-rank; that of --lora-load",
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "linear layers with adapters, by their names or the last parts of these (q_proj, mlp.down_proj); all-linear: "
        "all except the output layer",
        metavar="NAME",
        derived="all-linear; those of --lora-load",
    )
    lora_load: str | None = flag(
        None, "folder of the adapter to start from, as saved by PEFT, or by --save-hf in adapter/", metavar="DIR"
    )
    lora_sync: str = flag(
        "merged",
        "weights sent to the engines: all weights with the adapter merged into them, or only the adapter, which they "
        "add to the weights of --hf-checkpoint",
        choices=("merged", "adapter"),
    )
