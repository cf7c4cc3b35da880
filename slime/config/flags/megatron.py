"""Flags of Megatron-Core's parallelism, recomputation and hooks, under Megatron's names.

The layout is `tensor x pipeline x context x data` processes; for a mixture of experts the same processes are also
`expert tensor x expert x pipeline x expert data`. With `--train-backend fsdp` these flags have no effect, and a run
reports the given ones. The other fields of Megatron's config classes also are flags with Megatron's names
(`slime.config.megatron_flags`).
"""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.fields import at_least, flag

RECOMPUTED_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Modules that Megatron can recompute instead of a whole layer."""

HOOKS = (
    "custom_model_provider_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)
"""Flags of plugins that only the Megatron backend calls; other backends refuse them."""


@dataclass(frozen=True, kw_only=True)
class MegatronFlags:
    """Megatron: parallelism with `--train-backend megatron`"""

    tensor_model_parallel_size: int = flag(1, "processes that share each matrix (TP)", check=at_least(1))
    sequence_parallel: bool = flag(
        False, "TP processes also share the tokens in layers that do not mix them: less memory, the same results"
    )
    pipeline_model_parallel_size: int = flag(1, "processes that share the layers, in order (PP)", check=at_least(1))
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleaved PP: layers per stage, with several stages per process", check=at_least(1)
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleaved PP: stages per process, instead of layers per stage", check=at_least(1)
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "interleaved PP: consecutive micro-batches of one stage",
        check=at_least(1),
        derived="--pipeline-model-parallel-size",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first process of PP; the others share the rest", check=at_least(1)
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last process of PP; the others share the rest", check=at_least(1)
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as a layer of PP")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the output layer as a layer of PP")
    pipeline_model_parallel_layout: str | None = flag(
        None, "layers of every stage in Megatron's notation: Et*3|(tt|)*2tL", metavar="TEXT"
    )
    expert_model_parallel_size: int = flag(1, "processes that share the experts (EP)", check=at_least(1))
    expert_tensor_parallel_size: int | None = flag(
        None,
        "processes that share each matrix of an expert",
        check=at_least(1),
        derived="--tensor-model-parallel-size",
    )
    use_distributed_optimizer: bool = flag(
        True, "shard the optimizer's state over data-parallel processes instead of keeping a copy on each"
    )
    overlap_grad_reduce: bool = flag(False, "sum gradients while others are still computed")
    overlap_param_gather: bool = flag(False, "gather updated weights when the next pass needs them")
    recompute_granularity: str | None = flag(
        None,
        "recompute activations in the backward pass: of whole layers, or of --recompute-modules",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "full: keep the input of each group of --recompute-num-layers layers, or recompute only that many first layers",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "number of layers of --recompute-method", check=at_least(1))
    recompute_modules: list[str] | None = flag(
        None,
        f"selective: which modules, of {', '.join(RECOMPUTED_MODULES)}",
        metavar="NAME",
        derived="core_attn",
    )
    distribute_saved_activations: bool = flag(False, "TP processes share the activations that recomputation keeps")
    make_vocab_size_divisible_by: int = flag(
        128,
        "rows of the embedding are padded to a multiple of this times TP; padding is never exported",
        check=at_least(1),
    )
    transformer_impl: str | None = flag(
        None,
        "implementation of the layers; local: plain torch",
        choices=("transformer_engine", "local"),
        derived="transformer_engine on a GPU where it is installed, else local",
    )
    attention_backend: str = flag(
        "auto",
        "attention kernels in Transformer Engine's layers",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "how tokens are sent to the processes of their experts; allgather becomes alltoall, as in upstream",
        choices=("alltoall", "allgather", "flex"),
    )
    custom_model_provider_path: str | None = flag(
        None,
        "function (pre_process, post_process, vp_stage=None) -> model that builds each stage of the model",
        metavar="PATH",
    )
    custom_megatron_init_path: str | None = flag(
        None, "function (args) that is called once Megatron's process groups exist", metavar="PATH"
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
