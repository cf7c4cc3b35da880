#!/usr/bin/env bash
# GRPO with Qwen3-0.6B on GSM8K: the smallest recipe, for one GPU.
#
#   hf download Qwen/Qwen3-0.6B --local-dir /models/Qwen3-0.6B
#   hf download openai/gsm8k --repo-type dataset --local-dir /data/gsm8k
#   export HF_CHECKPOINT=/models/Qwen3-0.6B PROMPT_DATA=/data/gsm8k/main/train-00000-of-00001.parquet
#   export EVAL_DATA=/data/gsm8k/main/test-00000-of-00001.parquet
#   examples/recipes/run-qwen3-0.6B-gsm8k.sh                   # one GPU; NUM_GPUS=8 for a machine of eight
#   PLAN=80 examples/recipes/run-qwen3-0.6B-gsm8k.sh           # what it takes; lib.sh says what else there is
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

sizes 1 8 64
model qwen3-0.6B Qwen/Qwen3-0.6B
data gsm8k /data/gsm8k/main/train-00000-of-00001.parquet /data/gsm8k/main/test-00000-of-00001.parquet

case $NUM_GPUS in
    1) PROMPTS=32 ;;  # prompts of a step; 8 samples of each
    8) PROMPTS=64 ;;
    64) PROMPTS=256 ;;
esac
SIZE_ARGS=(
    --fsdp-shard-size 1      # every GPU has the whole model: only gradients are exchanged
)

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
    --input-key question              # the column with the prompt
    --label-key answer                # the column with the answer; what follows its #### is compared
    --prompt-suffix $'\nPlease reason step by step, and put your final answer within \\boxed{}.'  # follows each question
    --apply-chat-template             # questions become turns of a chat, as the model's own template writes them
    --apply-chat-template-kwargs '{"enable_thinking": false}'  # Qwen3 answers at once instead of thinking aloud first
    --rollout-shuffle                 # another order of the prompts in each epoch
    --num-rollout 200                 # steps of the whole run: generate, score, train, send the weights back
    --rollout-batch-size "$PROMPTS"   # prompts of one such step
    --n-samples-per-prompt 8          # answers to each of them, which GRPO compares with each other
    --rollout-max-response-len 1024   # tokens after which an answer is cut off
    --rollout-temperature 1           # how varied answers are; 1 is what the loss assumes
    --global-batch-size $((PROMPTS * 8))  # answers of one optimizer step: all of a rollout, so training is on-policy
    --balance-data                    # long and short answers are shared out so that all trainers end together
)

REWARD_ARGS=(
    --rm-type math                    # 1 when the last \boxed{} equals the label, else 0
)

EVAL_HOW=(
    --eval-interval 20                # rollout steps between two evaluations; one comes before training, too
    --n-samples-per-eval-prompt 1     # answers to each question of the test set
    --eval-max-response-len 1024      # tokens after which they are cut off
    --eval-temperature 0              # always the most likely token
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
    --lr 1e-6                         # learning rate
    --lr-decay-style constant         # which stays as it is
    --weight-decay 0.1                # weights shrink by that much of the learning rate
    --adam-beta1 0.9                  # memory of the gradient
    --adam-beta2 0.98                 # and of its square
)

PERF_ARGS=(
    --use-dynamic-batch-size          # a forward pass is filled with answers of any length
    --max-tokens-per-gpu 16384        # up to so many tokens; lower it first when memory is short
    ${SIZE_ARGS[@]+"${SIZE_ARGS[@]}"}  # what this number of GPUs needs, above
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1     # an engine on every GPU
    --sglang-mem-fraction-static 0.7    # share of the GPU for weights and KV cache, where SGLang generates
    --engine-mem-fraction 0.6           # share for the KV cache of what the weights leave free, where slime's own engine does
)

run "$@"
