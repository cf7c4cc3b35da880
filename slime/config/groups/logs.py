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
    wandb_mode: str | None = flag(None, "W&B mode", choices=("online", "offline", "disabled"))
    wandb_dir: str | None = flag(None, "W&B folder", metavar="DIR")
    wandb_host: str | None = flag(None, "W&B server", metavar="URL")
    wandb_team: str | None = flag(None, "W&B entity")
    wandb_project: str | None = flag(None, "W&B project")
    wandb_group: str | None = flag(None, "W&B group")
    wandb_run_id: str | None = flag(None, "W&B run to continue")
    progress: str = flag(
        "auto", "progress display; auto: rich on a terminal, plain elsewhere", choices=("auto", "rich", "plain", "none")
    )
    log_level: str = flag("info", "least severe message that is logged", choices=("debug", "info", "warning", "error"))
