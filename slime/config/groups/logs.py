"""What a run leaves behind for people to look at."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class LoggingFlags:
    """Logging"""

    output_dir: str = flag(
        None, "run folder: config, metrics, logs, plots", metavar="DIR", derived="--save, else outputs/<time>"
    )
    run_name: str | None = flag(None, "name of the run in trackers and plots")
    use_tensorboard: bool = flag(True, "write TensorBoard logs into the run folder")
    tb_project_name: str | None = flag(None, "TensorBoard project: a folder level")
    tb_experiment_name: str | None = flag(None, "TensorBoard experiment: a folder level")
    use_wandb: bool = flag(False, "log to Weights & Biases (API key in WANDB_API_KEY)")
    wandb_key: str | None = flag(
        None,
        "W&B API key; no file of the run has it, but a command line is seen by others: better in WANDB_API_KEY",
        secret=True,
    )
    wandb_mode: str | None = flag(None, "W&B mode", choices=("online", "offline", "disabled"))
    wandb_dir: str | None = flag(None, "W&B folder", metavar="DIR", derived="the run folder")
    wandb_host: str | None = flag(None, "W&B server", metavar="URL")
    wandb_team: str | None = flag(None, "W&B entity")
    wandb_project: str | None = flag(None, "W&B project")
    wandb_group: str | None = flag(None, "W&B group")
    wandb_run_id: str | None = flag(None, "W&B run to continue")
    wandb_always_use_train_step: bool = flag(False, "W&B counts optimizer steps on every axis, not rollout steps")
    disable_wandb_random_suffix: bool = flag(
        False, "as upstream has it", no_effect="names in W&B never get a random suffix"
    )
    log_passrate: bool = flag(False, "report pass@k of the training rollouts")
    log_multi_turn: bool = flag(False, "report lengths with and without observations, and turns")
    log_reward_category: str | None = flag(None, "entry of dict rewards whose values are counted", metavar="KEY")
    log_correct_samples: bool = flag(False, "report the lengths of rewarded samples apart")
    custom_rollout_log_function_path: str | None = flag(
        None, "function (rollout_id, args, samples, rollout_extra_metrics, rollout_time); True: nothing else is logged"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "function (rollout_id, args, data, extra_metrics); True: nothing else is logged"
    )
    progress: str = flag(
        "auto", "progress display; auto: rich on a terminal, plain elsewhere", choices=("auto", "rich", "plain", "none")
    )
    log_level: str = flag("info", "least severe message that is logged", choices=("debug", "info", "warning", "error"))
