"""Flags of logging, trackers, plans and debugging."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.devices import check_planned_cluster
from slime.config.fields import at_least, between, flag


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
        "W&B API key; it is in no file of the run, but other users can read command lines: prefer WANDB_API_KEY",
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
        False, "no random suffix in W&B names", no_effect="names in W&B never get a random suffix"
    )
    log_passrate: bool = flag(False, "report pass@k of the training rollouts")
    log_multi_turn: bool = flag(False, "report lengths with and without observations, and turns")
    log_reward_category: str | None = flag(None, "entry of dict rewards whose values are counted", metavar="KEY")
    log_correct_samples: bool = flag(False, "report the lengths of rewarded samples separately")
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


@dataclass(frozen=True, kw_only=True)
class DebugFlags:
    """Debugging"""

    dry_run: bool = flag(False, "print the plan (processes, batches, memory, files) and exit")
    plan_cluster: str | None = flag(
        None,
        "make the plan for another cluster: nodes, GPUs per node and GiB per GPU (8x8x80); neither weights nor prompts "
        "need to exist",
        metavar="NODESxGPUSxGIB",
        check=check_planned_cluster,
    )
    ci_test: bool = flag(
        False, "end the run if its log-probs are inconsistent: KL before any update, trainer against engine"
    )
    ci_disable_kl_checker: bool = flag(False, "--ci-test without the two checks of the KL before any update")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "--ci-test: most that trainer and engine may differ in log-probs, on average", check=at_least(0)
    )
    ci_save_grad_norm: str | None = flag(
        None, "write gradient norms to this file; {role}, {rollout_id} and {step_id} are filled in", metavar="FILE"
    )
    ci_load_grad_norm: str | None = flag(
        None, "end the run if a gradient norm differs by more than 1 % from that in this file", metavar="FILE"
    )
    debug_rollout_only: bool = flag(False, "generate and score, train nothing: no training process is started")
    debug_train_only: bool = flag(False, "train without engines, on dumped rollouts or those of the rollout function")
    save_debug_rollout_data: str | None = flag(
        None, "write the samples of each rollout to this file; {rollout_id} is filled in", metavar="FILE"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on samples written with --save-debug-rollout-data; no engines are started", metavar="FILE"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        "share of each dump to train on: half from its head, half from its tail",
        check=between(0, 1, low_open=True),
    )
    save_debug_train_data: str | None = flag(
        None, "write what training computed for each sample (log-probs, advantages) to this file", metavar="FILE"
    )
    dump_details: str | None = flag(None, "folder for both dumps of every rollout", metavar="DIR")
