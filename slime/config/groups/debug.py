"""Looking before running, and running one half alone."""

from dataclasses import dataclass

from slime.config.flag import at_least, between, flag
from slime.config.planned_cluster import cluster_complaint


@dataclass(frozen=True, kw_only=True)
class DebugFlags:
    """Debugging"""

    dry_run: bool = flag(False, "print the plan (processes, batches, memory, files) and exit")
    plan_cluster: str | None = flag(
        None,
        "make the plan for GPUs that are not here: nodes, GPUs of each and GiB of each GPU (8x8x80); neither weights "
        "nor prompts need to be there",
        metavar="NODESxGPUSxGIB",
        check=cluster_complaint,
    )
    ci_test: bool = flag(
        False, "end the run when its log-probs contradict each other: KL before any update, trainer against engine"
    )
    ci_disable_kl_checker: bool = flag(False, "--ci-test without the two checks of the KL before any update")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "--ci-test: most that trainer and engine may differ in log-probs, on average", check=at_least(0)
    )
    ci_save_grad_norm: str | None = flag(
        None, "write gradient norms to this file; {role}, {rollout_id} and {step_id} are filled in", metavar="FILE"
    )
    ci_load_grad_norm: str | None = flag(
        None, "end the run when a gradient norm differs by more than 1 % from that in this file", metavar="FILE"
    )
    debug_rollout_only: bool = flag(False, "generate and score, train nothing: no training process is started")
    debug_train_only: bool = flag(False, "train without engines, on dumped rollouts or what the rollout function makes")
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
