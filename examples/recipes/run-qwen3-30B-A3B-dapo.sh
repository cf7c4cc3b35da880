#!/usr/bin/env bash
# GRPO with Qwen3-30B-A3B, 128 experts of which a token meets 8, on DAPO-Math-17k.
#
#   hf download Qwen/Qwen3-30B-A3B --local-dir /models/Qwen3-30B-A3B
#   hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir /data/dapo
#   hf download BytedTsinghua-SIA/AIME-2024 --repo-type dataset --local-dir /data/aime
#   export HF_CHECKPOINT=/models/Qwen3-30B-A3B PROMPT_DATA=/data/dapo/data/dapo-math-17k.parquet
#   export EVAL_DATA=/data/aime/data/aime-2024.parquet
#   examples/recipes/run-qwen3-30B-A3B-dapo.sh               # eight GPUs; NUM_GPUS=1 trains an adapter, NUM_GPUS=64: eight machines
#   PLAN=80 examples/recipes/run-qwen3-30B-A3B-dapo.sh       # what it takes; lib.sh says what else there is
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

sizes 8 1 64
model qwen3-30B-A3B Qwen/Qwen3-30B-A3B
data dapo /data/dapo/data/dapo-math-17k.parquet /data/aime/data/aime-2024.parquet

case $NUM_GPUS in
    1)
        # prompts of a step, learning rate, GPUs of an engine and its share of each
        PROMPTS=32 RATE=1e-5 ENGINE=1 SHARE=0.85
        SIZE_ARGS=(
            --recompute-activations           # layers keep their inputs only and compute the rest again
            --lora-rank 32                    # adapters beside the frozen model, not in its experts
        )
        ;;
    8)
        PROMPTS=64 RATE=1e-6 ENGINE=2 SHARE=0.7
        SIZE_ARGS=(
            --recompute-activations           # layers keep their inputs only and compute the rest again
        )
        ;;
    64)
        PROMPTS=256 RATE=1e-6 ENGINE=2 SHARE=0.7
        SIZE_ARGS=(
            --train-backend megatron          # Megatron-Core cuts the layers: pip install 'slime[megatron]'
            --tensor-model-parallel-size 2    # attention and embeddings are cut over two GPUs
            --sequence-parallel               # and so are the norms between them
            --expert-model-parallel-size 8    # the 128 experts are shared out over eight
            --expert-tensor-parallel-size 1   # an expert is not cut
            --recompute-granularity full      # layers keep their inputs only and compute the rest again
            --recompute-method uniform        # all layers alike
            --recompute-num-layers 1          # one at a time
        )
        ;;
esac

CLUSTER_ARGS=(
    --actor-num-nodes "$NODES"                  # machines that train; several: start Ray on them first (docs/cluster.md)
    --actor-num-gpus-per-node "$GPUS_PER_NODE"  # GPUs of each of them, a training process on each
    --colocate                                  # engines generate on the same GPUs
    --offload                                   # in turns: whoever waits gives its GPU memory back
)

CKPT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"  # weights, config.json and tokenizer as downloaded; nothing has to be converted
    --save "$SAVE_DIR"                # checkpoints: weights, optimizer, place in the data
    --load "$SAVE_DIR"                # goes on from the last one there; begins anew if there is none
    --save-interval 20                # rollout steps between two checkpoints
)

ROLLOUT_ARGS=(
    --input-key prompt                # the column with the prompt: a chat, which says how to answer
    --label-key "${LABEL_KEY:-reward_model.ground_truth}"  # the answer inside an object; LABEL_KEY=label for flat copies
    --streaming-data                  # rows are read when they are needed: the published file has each about 100 times
    --apply-chat-template             # prompts are written by the model's own template
    --rollout-shuffle                 # another order of the prompts in each epoch
    --num-rollout 500                 # steps of the whole run: generate, score, train, send the weights back
    --rollout-batch-size "$PROMPTS"   # prompts of one such step
    --n-samples-per-prompt 8          # answers to each of them, which GRPO compares with each other
    --over-sampling-batch-size $((PROMPTS * 2))  # prompts asked for at a time, until there are enough that teach something
    # prompts whose answers are all right or all wrong teach nothing and are dropped
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len 8192   # tokens after which an answer is cut off
    --rollout-temperature 1           # how varied answers are; 1 is what the loss assumes
    --global-batch-size $((PROMPTS * 8))  # answers of one optimizer step: all of a rollout, so training is on-policy
    --balance-data                    # long and short answers are shared out so that all trainers end together
)

REWARD_ARGS=(
    --rm-type dapo                    # +1 when the last "Answer:" line equals the label, else -1
    --reward-key score                # of what that verdict says (score, acc, pred), the score is trained on
    --eval-reward-key acc             # and the share of right answers is what evaluations report
)

EVAL_HOW=(
    --eval-interval 20                # rollout steps between two evaluations; one comes before training, too
    --n-samples-per-eval-prompt 1     # answers to each row; the published file has each of its 30 problems 32 times
    --eval-max-response-len 16384  # tokens after which they are cut off
    --eval-top-p 0.95                 # the least likely twentieth is left out
)

GRPO_ARGS=(
    --advantage-estimator grpo        # an answer counts by how much better it is than the others to its prompt
    --eps-clip 0.2                    # how far a step may lower the probability of a token
    --eps-clip-high 0.28              # and raise it: a little more, so that rare tokens get their chance (DAPO)
    --entropy-coef 0                  # no bonus for variety
)
# To stay near the first model: --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl (a second copy of the weights)

OPTIMIZER_ARGS=(
    --optimizer adam                  # AdamW
    --lr "$RATE"                      # learning rate
    --lr-decay-style constant         # which stays as it is
    --weight-decay 0.1                # weights shrink by that much of the learning rate
    --adam-beta1 0.9                  # memory of the gradient
    --adam-beta2 0.98                 # and of its square
)

PERF_ARGS=(
    --use-dynamic-batch-size          # a forward pass is filled with answers of any length
    --max-tokens-per-gpu 8192         # up to so many tokens; lower it first when memory is short
    ${SIZE_ARGS[@]+"${SIZE_ARGS[@]}"}  # what this number of GPUs needs, above
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE"   # GPUs of an engine; more than one: SGLang
    --sglang-mem-fraction-static "$SHARE"   # share of the GPU for weights and KV cache, where SGLang generates
    --engine-mem-fraction 0.6               # share for the KV cache of what the weights leave free, where slime's own engine does
)

run "$@"
