"""A launch script: GRPO on a tiny model."""

import slime.utils.external_utils.command_utils as U

MODEL_NAME = "model"
MODEL_TYPE = "qwen3-0.6B"
NUM_GPUS = 8


def prepare():
    U.convert_checkpoint(
        model_name=MODEL_NAME,
        megatron_model_type=MODEL_TYPE,
        num_gpus_per_node=NUM_GPUS,
        dir_dst="models",
        hf_checkpoint=MODEL_NAME,
    )


def execute():
    ckpt_args = f"--hf-checkpoint {MODEL_NAME} --ref-load models/{MODEL_NAME}_torch_dist "

    rollout_args = (
        "--prompt-data sums.jsonl "
        "--input-key messages "
        "--label-key label "
        "--apply-chat-template "
        '--apply-chat-template-kwargs \'{"note": "costs $5"}\' '
        "--rollout-shuffle "
        "--custom-rm-path rewards.reward_func "
        "--num-rollout 1 "
        "--rollout-batch-size 2 "
        "--n-samples-per-prompt 2 "
        "--rollout-max-response-len 4 "
        "--rollout-temperature ${TEMPERATURE} "
        "--global-batch-size 4 "
    )
    grpo_args = (
        "--advantage-estimator grpo "
        "--use-kl-loss "
        "--kl-loss-coef 0.01 "
        "--kl-loss-type low_var_kl "
        "--eps-clip 0.2 "
        "--eps-clip-high 0.28 "
    )
    optimizer_args = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 "
    misc_args = "--device cpu --output-dir 'a launched run' "

    U.execute_train(
        train_args=f"{ckpt_args} {rollout_args} {grpo_args} {optimizer_args} "
        f"{U.get_default_wandb_args(__file__)} {misc_args} ",
        num_gpus_per_node=NUM_GPUS,
        megatron_model_type=MODEL_TYPE,
        extra_env_vars={"TEMPERATURE": 0.9},
        before_ray_job_submit=lambda: print("about to start"),
    )


if __name__ == "__main__":
    prepare()
    execute()
