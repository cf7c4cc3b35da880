"""Tables of Megatron-LM's flags and of the fields of Megatron-Core's config classes, and what each does here.

Megatron-LM flags that existing slime scripts pass are parsed with their type and carried through under their name. Each
belongs to one of four classes, and none is ignored silently. SHAPE: the shape of the model; the trainer reads it from
the Hugging Face config, and a flag with another number is refused (`megatron_model_flags`). NUMBERS: the flag changes
the computation; only the values in `NEUTRAL`, which have no effect here, are accepted. SPEED: kernels and their
rounding, which cannot change what is learned; Megatron gets them, and with FSDP plan and run report the given ones.
OTHERS: tasks that slime handles itself with both backends, such as files and logs; the given ones are reported.

Invariant: every field of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig is one of these, and a
test compares the tables with the classes: a flag of the config; a flag of Megatron-LM, of which SPEED is passed to its
class as given; a flag of `FIELD_FLAGS`, which is too; one of `REFUSED_FIELDS`, with the reason; or one of `MADE`, which
cannot be written as text. Values passed to the classes change speed, memory or rounding, never what is learned.
"""

from __future__ import annotations

from slime.storage.json_types import JsonMapping, JsonObject

SWITCH, INT, FLOAT, NUMBER, TEXT, TEXTS = "switch", "int", "float", "number", "text", "texts"
SHAPE, NUMBERS, SPEED, OTHERS = "shape", "numbers", "speed", "others"

_TABLE: dict[tuple[str, str], str] = {
    (SHAPE, SWITCH): """
        group-query-attention qk-layernorm swiglu quick-geglu squared-relu add-qkv-bias disable-bias-linear
        untie-embeddings-and-output-weights apply-layernorm-1p attention-output-gate use-gated-attention
        multi-latent-attention post-self-attn-layernorm post-mlp-layernorm use-rotary-position-embeddings
        no-position-embedding use-rope-scaling rotary-interleaved moe-router-pre-softmax moe-router-enable-expert-bias
        moe-shared-expert-gate
        """,
    (SHAPE, INT): """
        num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size
        max-position-embeddings original-max-position-embeddings seq-length
        num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-topk moe-router-num-groups
        moe-router-group-topk q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        window-attn-skip-freq
        linear-num-key-heads linear-num-value-heads linear-key-head-dim linear-value-head-dim linear-conv-kernel-dim
        dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
        """,
    (SHAPE, FLOAT): """
        norm-epsilon layernorm-epsilon rotary-percent rotary-scaling-factor rope-scaling-factor mscale mscale-all-dim
        beta-fast beta-slow moe-router-topk-scaling-factor glu-linear-offset activation-func-clamp-value
        """,
    (SHAPE, NUMBER): "rotary-base",
    (SHAPE, TEXT): """
        normalization position-embedding-type softmax-type window-size
        rope-type moe-layer-freq linear-attention-freq moe-router-score-function
        experimental-attention-variant
        """,
    (SHAPE, TEXTS): "spec",
    (NUMBERS, SWITCH): """
        fp16 fp8-param-gather moe-router-force-load-balancing moe-pad-expert-input-to-capacity finetune
        use-checkpoint-opt-param-scheduler
        """,
    (NUMBERS, FLOAT): """
        attention-dropout hidden-dropout moe-aux-loss-coeff moe-z-loss-coeff moe-router-bias-update-rate
        moe-expert-capacity-factor moe-input-jitter-eps
        """,
    (NUMBERS, NUMBER): "rotary-seq-len-interpolation-factor",
    (NUMBERS, TEXT): """
        fp8-format moe-router-load-balancing-type main-grads-dtype main-params-dtype
        """,
    (SPEED, SWITCH): """
        tp-comm-overlap no-rope-fusion moe-grouped-gemm
        moe-permute-fusion moe-router-fusion moe-shared-expert-overlap moe-enable-deepep moe-layer-recompute
        attention-softmax-in-fp32 no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-gelu-fusion
        no-bias-swiglu-fusion no-bias-dropout-fusion no-persist-layer-norm deterministic-mode
        overlap-moe-expert-parallel-comm delay-wgrad-compute
        """,
    (SPEED, INT): "moe-deepep-num-sms",
    (SPEED, TEXT): "moe-flex-dispatcher-backend moe-router-dtype",
    (SPEED, TEXTS): "cp-comm-type",
    (OTHERS, SWITCH): """
        overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer moe-use-legacy-grouped-gemm
        moe-router-padding-for-fp8 moe-extended-tp use-tp-pp-dp-mapping
        accumulate-allreduce-grads-in-fp32 variable-seq-lengths bf16 no-check-for-nan-in-loss-and-grad
        cross-entropy-loss-fusion use-flash-attn use-cpu-initialization no-save-rng use-pytorch-profiler
        use-checkpoint-args auto-detect-ckpt-format ckpt-fully-parallel-load override-opt-param-scheduler
        no-create-attention-mask-in-dataloader log-throughput log-params-norm enable-experimental profile manual-gc
        ckpt-assume-constant-structure no-ckpt-fully-parallel-save log-timers-to-tensorboard log-memory-to-tensorboard
        """,
    (OTHERS, INT): """
        train-iters train-samples profile-step-start profile-step-end log-interval tensorboard-queue-size
        empty-unused-memory-level num-workers manual-gc-interval timing-log-level
        """,
    (OTHERS, FLOAT): """
        optimizer-offload-fraction init-method-std loss-scale initial-loss-scale min-loss-scale sgd-momentum
        """,
    (OTHERS, TEXT): """
        fp8-recipe fp8-amax-compute-algo moe-token-drop-policy ckpt-format cross-entropy-fusion-impl tokenizer-type
        tokenizer-model tensorboard-dir dist-ckpt-strictness
        """,
    (OTHERS, TEXTS): "profile-ranks",
}  # fmt: skip

MEGATRON_FLAGS: dict[str, str] = {name: kind for (_, kind), names in _TABLE.items() for name in names.split()}
"""Flag (without leading dashes) -> type of value."""
MEGATRON_CLASSES: dict[str, str] = {name: role for (role, _), names in _TABLE.items() for name in names.split()}
"""Flag -> SHAPE, NUMBERS, SPEED or OTHERS."""

_HALF_PRECISION = "training computes in float32 or bfloat16, --dtype chooses: drop it"
_STATE = "gradients and master weights are float32: give fp32, or drop it"
_ROUTER = "there is no auxiliary loss for experts: give 0, or drop it"
_TOKENS = "no token of an expert is dropped: drop it"

NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "attention-dropout": ((0,), "there is no dropout in training: give 0, or drop it"),
    "hidden-dropout": ((0,), "there is no dropout in training: give 0, or drop it"),
    "moe-aux-loss-coeff": ((0,), _ROUTER),
    "moe-z-loss-coeff": ((0,), _ROUTER),
    "moe-router-bias-update-rate": ((0,), "expert biases are not updated: give 0, or drop it"),
    "moe-router-load-balancing-type": (
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        "tokens go to the experts that score best: give none, or drop it",
    ),
    "moe-router-force-load-balancing": ((), "tokens go to the experts that score best: drop it"),
    "moe-expert-capacity-factor": ((), _TOKENS),
    "moe-pad-expert-input-to-capacity": ((), _TOKENS),
    "moe-input-jitter-eps": ((0,), "routers see their inputs without noise: give 0, or drop it"),
    "rotary-seq-len-interpolation-factor": (
        (1,),
        "positions are encoded as in the model's config.json: set its rope scaling there, and drop it",
    ),
    "fp16": ((), _HALF_PRECISION),
    "fp8-format": ((), _HALF_PRECISION),
    "fp8-param-gather": ((), _HALF_PRECISION),
    "main-grads-dtype": (("fp32",), _STATE),
    "main-params-dtype": (("fp32",), _STATE),
    "use-checkpoint-opt-param-scheduler": ((), "learning rate and weight decay are those of the flags: drop it"),
    "finetune": (
        (),
        "--load resumes a run; to start fresh from its weights, give its folder as --ref-load instead",
    ),
}
"""Flag that changes the computation -> the values that have no effect here, and why others are refused. `finetune` is
accepted if there is no checkpoint to resume from."""

_MOMENT_STORAGE = "moments are float32 on the device of the weights: drop it, or use --train-backend fsdp"

REFUSED_BY_MEGATRON: dict[str, str] = {
    "use-precision-aware-optimizer": _MOMENT_STORAGE,
    "overlap-cpu-optimizer-d2h-h2d": _MOMENT_STORAGE,
    "optimizer-offload-fraction": _MOMENT_STORAGE,
    "moe-use-legacy-grouped-gemm": "megatron-core 0.16 is about to drop it: drop the flag",
    "moe-router-padding-for-fp8": _HALF_PRECISION,
    "moe-extended-tp": "megatron-core has removed it: give --expert-tensor-parallel-size",
    "use-tp-pp-dp-mapping": "ranks are ordered by tensor, context, data and pipeline: drop it",
}
"""Flags that FSDP ignores and Megatron does not support here."""

IMPLIED_FLAGS = ("bf16", "accumulate-allreduce-grads-in-fp32", "variable-seq-lengths")
"""Flags that are always on, or set by other flags: their effect is not reported."""


_SETTABLE: dict[str, str] = {
    SWITCH: """
        use_te_rng_tracker tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 ep_overlap_early_attn_memory_release batch_p2p_sync
        use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush cpu_offloading
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering barrier_with_L1_time
        gradient_accumulation_fusion async_tensor_model_parallel_allreduce disable_bf16_reduced_precision_matmul
        bias_activation_fusion masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion
        apply_rope_fusion use_fused_weighted_squared_relu moe_per_layer_logging
        clone_scatter_output_in_embedding batch_invariant_mode use_te_activation_func
        fine_grained_activation_offloading align_param_gather pad_buckets_for_high_nccl_busbw
        reduce_scatter_with_fp32_accumulation nccl_ub disable_symmetric_registration
        """,
    INT: """
        num_microbatches_with_partial_activation_checkpoints cpu_offloading_num_layers moe_hybridep_num_sms
        min_offloaded_tensor_size bucket_size
        """,
    TEXT: """
        pipeline_model_parallel_comm_backend tp_comm_bootstrap_backend symmetric_ar_type config_logger_dir
        """,
    TEXTS: "offload_modules",
}

CHOICES: dict[str, tuple[str, ...]] = {
    "pipeline_model_parallel_comm_backend": ("nccl", "ucc"),
    "tp_comm_bootstrap_backend": ("nccl", "mpi", "gloo"),
    "symmetric_ar_type": ("two_shot", "one_shot", "multimem_all_reduce"),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "moe_router_dtype": ("fp32", "fp64"),
    "cp_comm_type": ("p2p", "all_gather", "a2a"),
}
"""Field -> its allowed values."""

FIELD_FLAGS: dict[str, str] = {
    name.replace("_", "-"): kind for kind, names in _SETTABLE.items() for name in names.split()
}
"""Flag -> type of value, for the fields that have no Megatron-LM flag of the same name."""

_NEGATED_FIELDS: dict[str, tuple[str, bool]] = {
    "no-rope-fusion": ("apply_rope_fusion", False),
    "no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "no-bias-gelu-fusion": ("bias_activation_fusion", False),
    "no-bias-swiglu-fusion": ("bias_activation_fusion", False),
    "no-bias-dropout-fusion": ("bias_dropout_fusion", False),
    "no-persist-layer-norm": ("persist_layer_norm", False),
}
"""Flags of Megatron-LM that set a field of another name: flag -> (field, value)."""

_QUANTISED = "training computes in float32 or bfloat16, --dtype chooses: drop it"
_MODEL = "the model is defined by its config.json: drop it"
_GRAPHS = "row lengths vary, which CUDA graphs do not support: drop it"
_ENGINES = "engines generate, trainers never do: drop it"
_SHARDED = "Megatron's own FSDP is not used: --train-backend fsdp shards the model over all processes"
_ADAM = "the optimizer is AdamW: drop it"
_SUMMED = "gradients are summed in float32 over all samples, and every token has its final weight: drop it"
_MOMENTS = "moments are float32 on the device of the weights: drop it"
_HALF = "losses are not scaled in float32 or bfloat16: drop it"
_CLIPPED = "attention is not clipped: drop it"
_PREDICTS = "layers that predict several tokens at once are not trained: drop it"
_MTP = "gradients of the output layer are computed with the chunks of log-probs, not deferred: drop it"
_CUT = "sequences are split evenly over --context-parallel-size processes: drop it"
_FINITE = "a non-finite gradient norm is always detected: drop it"
_PACKED = "rows hold several sequences, which it does not support: drop it"
_RATE = "all weights have one learning rate, --lr and --min-lr: drop it"

_REFUSED_BY_REASON: dict[str, str] = {
    _QUANTISED: """
        fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_wgrad
        fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention
        kitchen_attention_backend fp4 fp4_recipe fp4_param fp4_quantizer_factory activation_func_fp8_input_store
        reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache moe_router_padding_for_quantization
        disable_parameter_transpose_cache enable_autocast
        """,
    _MODEL: """
        softmax_scale fp32_residual_connection apply_residual_connection_post_layernorm
        layernorm_zero_centered_gamma add_bias_linear gated_linear_unit
        num_moe_experts qk_l2_norm no_rope_freq mrope_section is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        heterogeneous_block_specs hetereogenous_dist_checkpoint moe_latent_size moe_apply_probs_on_input
        apply_query_key_layer_scaling dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss moe_token_dropping
        moe_router_topk_limited_devices
        """,
    _GRAPHS: """
        enable_cuda_graph external_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps cuda_graph_impl cuda_graph_scope
        """,
    _ENGINES: """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents
        """,
    _SHARDED: """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer
        fsdp_manual_registration suggested_communication_unit_size preserve_fp32_weights
        num_distributed_optimizer_instances
        """,
    _ADAM: """
        muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps
        muon_tp_mode muon_extra_scale_factor decoupled_weight_decay apply_wd_to_qk_layernorm
        overlap_param_gather_with_optimizer_step log_num_zeros_in_grad
        """,
    _SUMMED: "average_in_collective gradient_reduce_div_fusion grad_reduce_in_fp32",
    _MOMENTS: "store_param_remainders use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params",
    _HALF: "loss_scale_window hysteresis",
    _CLIPPED: "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
    _PREDICTS: "mtp_standalone",
    _MTP: "defer_embedding_wgrad_compute wgrad_deferral_limit",
    _CUT: "hierarchical_context_parallel_sizes hybrid_context_parallel",
    _FINITE: "check_for_nan_in_grad check_for_large_grads",
    _RATE: "decoupled_lr decoupled_min_lr",
    _PACKED: "fused_single_qkv_rope",
    "it follows from the layout: drop it": "overlap_p2p_comm batch_p2p_comm",
    "weights are read from a folder: drop it": "embedding_init_method_std",
    "give --num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "give --decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "give --decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "give --microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "give --use-routing-replay": "moe_enable_routing_replay",
    "give --max-tokens-per-gpu with --use-dynamic-batch-size": "max_seqlen_per_dp_cp_rank",
}  # fmt: skip

REFUSED_FIELDS: dict[str, str] = {
    name.replace("_", "-"): why for why, names in _REFUSED_BY_REASON.items() for name in names.split()
}
"""Flag -> why it is not supported, and what to do."""

TRAINER_FIELDS = (
    "params_dtype", "pipeline_dtype", "autocast_dtype", "timers", "finalize_model_grads_func", "grad_scale_func",
    "no_sync_func", "grad_sync_func", "param_sync_func", "perform_initialization", "_cpu_offloading_context",
    "activation_func", "init_method", "output_layer_init_method", "embedding_init_method",
    "init_model_with_meta_device", "test_mode", "quant_recipe",
)  # fmt: skip
"""Fields that hold functions, dtypes and similar objects: the trainer sets them, and they have no flags."""


_ENGINE_FIELDS = """
    attention_backend cp_comm_type masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm
    apply_rope_fusion moe_permute_fusion moe_router_fusion use_te_activation_func use_te_rng_tracker
    gradient_accumulation_fusion symmetric_ar_type batch_invariant_mode use_precision_aware_optimizer
    store_param_remainders cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
    """
TRANSFORMER_ENGINE_FIELDS = frozenset(_ENGINE_FIELDS.split())
"""Fields for kernels of Transformer Engine's layers, which layers of plain torch do not get."""
_GPU_FIELDS = """
    nccl_ub disable_symmetric_registration fine_grained_activation_offloading offload_modules
    min_offloaded_tensor_size pin_cpu_grads pin_cpu_params
    """
GPU_FIELDS = frozenset(_GPU_FIELDS.split())
"""Fields without effect on a CPU."""


def unused_fields(*, transformer_engine: bool, on_gpu: bool) -> frozenset[str]:
    """Return the fields without effect if layers are not Transformer Engine's, or if there is no GPU."""
    return (frozenset() if transformer_engine else TRANSFORMER_ENGINE_FIELDS) | (frozenset() if on_gpu else GPU_FIELDS)


def given_settings(carried: JsonMapping) -> JsonObject:
    """Return the fields of Megatron's config classes that carried flags set, with their values."""
    found: JsonObject = {}
    for name, value in carried.items():
        flag = name.replace("_", "-")
        if flag in _NEGATED_FIELDS:
            field, said = _NEGATED_FIELDS[flag]
            if value:
                found[field] = said
        elif flag in FIELD_FLAGS or MEGATRON_CLASSES.get(flag) == SPEED:
            found[name] = value
    kinds = found.get("cp_comm_type")
    if isinstance(kinds, list) and len(kinds) == 1:
        found["cp_comm_type"] = kinds[0]
    return found
