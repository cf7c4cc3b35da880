"""How Megatron-Core cuts the model over training processes, under Megatron's names.

The layout is `tensor x pipeline x context x data` processes; of a mixture of experts the same processes are also
`expert tensor x expert x pipeline x expert data`. With `--train-backend fsdp` none of these flags changes anything, and
a run that is given one says so. Whatever else Megatron's classes of settings have is a flag of its Megatron name too
(`slime.config.megatron_flags`).
"""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.fields import at_least, flag

RECOMPUTED_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""What Megatron can recompute by itself instead of a whole layer."""

HOOKS = (
    "custom_model_provider_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)
"""Functions of the user's that Megatron's side alone calls: another backend refuses them."""


@dataclass(frozen=True, kw_only=True)
class MegatronFlags:
    """Megatron: how `--train-backend megatron` cuts the model"""

    tensor_model_parallel_size: int = flag(1, "processes that share each matrix (TP)", check=at_least(1))
    sequence_parallel: bool = flag(
        False, "processes of TP share the tokens too where a layer does not mix them: less memory, the same numbers"
    )
    pipeline_model_parallel_size: int = flag(1, "processes that share the layers, in order (PP)", check=at_least(1))
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleaved PP: layers of one stage, several of which a process has", check=at_least(1)
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleaved PP: stages of one process, the other way to say it", check=at_least(1)
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "interleaved PP: micro-batches that one stage takes in a row",
        check=at_least(1),
        derived="--pipeline-model-parallel-size",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first process of PP; the others share the rest", check=at_least(1)
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last process of PP; the others share the rest", check=at_least(1)
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "the embedding counts as a layer when PP shares them")
    account_for_loss_in_pipeline_split: bool = flag(False, "the output layer counts as a layer when PP shares them")
    pipeline_model_parallel_layout: str | None = flag(
        None, "layers of every stage, written out as Megatron does: Et*3|(tt|)*2tL", metavar="TEXT"
    )
    expert_model_parallel_size: int = flag(1, "processes that share the experts (EP)", check=at_least(1))
    expert_tensor_parallel_size: int | None = flag(
        None,
        "processes that share each matrix of an expert",
        check=at_least(1),
        derived="--tensor-model-parallel-size",
    )
    use_distributed_optimizer: bool = flag(
        True, "processes with other samples share the optimizer's state instead of having a copy each"
    )
    overlap_grad_reduce: bool = flag(False, "gradients are summed while others are still computed")
    overlap_param_gather: bool = flag(False, "updated weights are gathered when the next pass comes to them")
    recompute_granularity: str | None = flag(
        None,
        "recompute activations in the backward pass: of whole layers, or of --recompute-modules",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "full: every --recompute-num-layers layers keep their input, or the first so many layers of a stage do alone",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "the number of layers it means", check=at_least(1))
    recompute_modules: list[str] | None = flag(
        None,
        f"selective: which modules, of {', '.join(RECOMPUTED_MODULES)}",
        metavar="NAME",
        derived="core_attn",
    )
    distribute_saved_activations: bool = flag(False, "processes of TP share what recomputation keeps")
    make_vocab_size_divisible_by: int = flag(
        128, "rows of the embedding are padded to a multiple of this times TP; no padding leaves", check=at_least(1)
    )
    transformer_impl: str | None = flag(
        None,
        "whose layers are used; local: plain torch",
        choices=("transformer_engine", "local"),
        derived="transformer_engine on a GPU where it is installed, else local",
    )
    attention_backend: str = flag(
        "auto",
        "kernels of attention in Transformer Engine's layers",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "how tokens reach the processes of their experts; allgather becomes alltoall, as upstream",
        choices=("alltoall", "allgather", "flex"),
    )
    custom_model_provider_path: str | None = flag(
        None,
        "function (pre_process, post_process, vp_stage=None) -> model that makes each stage of the model",
        metavar="PATH",
    )
    custom_megatron_init_path: str | None = flag(
        None, "function (args) that is called when Megatron's groups are there", metavar="PATH"
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None,
        "function (args, model, store_prefix) before a pass without gradients; the prefix is '', 'ref_' or 'teacher_'",
        metavar="PATH",
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler) before the passes of a step",
        metavar="PATH",
    )
