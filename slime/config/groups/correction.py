"""When trainer and engine, or old and new policy, drift apart."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, flag

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True, kw_only=True)
class CorrectionFlags:
    """Off-policy corrections"""

    use_tis: bool | None = flag(
        None,
        "importance weights between the engine's and the trainer's log-probs; not given: if samples have both",
        derived="on where samples may be older than the weights: asynchronous modes, --partial-rollout, "
        "--update-weights-interval above 1",
    )
    tis_clip: float = flag(2.0, "largest importance weight", check=above(0))
    tis_clip_low: float = flag(0.0, "smallest importance weight", check=at_least(0))
    tis_level: str = flag(
        "token", "the ratio of a token, of its sequence, or the sequence's geometric mean", choices=LEVELS
    )
    tis_mode: str = flag(
        "clip",
        "weights out of bounds: truncate from above, clip on both sides, or mask (IcePop)",
        choices=("truncate", "clip", "mask"),
    )
    tis_batch_normalize: bool = flag(False, "scale the weights of a step to a mean of 1")
    use_rs: bool = flag(False, "reject tokens or sequences whose ratio is out of bounds")
    rs_level: str = flag(None, "what the rejection looks at", choices=LEVELS, derived="--tis-level")
    rs_lower_bound: float = flag(None, "smallest ratio that is kept", check=at_least(0), derived="--tis-clip-low")
    rs_upper_bound: float = flag(None, "largest ratio that is kept", check=above(0), derived="--tis-clip")
    rs_veto_threshold: float | None = flag(
        None, "one token with a smaller ratio rejects its whole sequence", check=above(0)
    )
    custom_tis_function_path: str | None = flag(
        None,
        "function (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths) "
        "-> (pg_loss, masks, metrics)",
    )
    get_mismatch_metrics: bool = flag(False, "report what the correction sees without applying it")
    use_opsm: bool = flag(
        False, "mask sequences of negative advantage that have become less likely than when the engine sampled them"
    )
    opsm_delta: float = flag(
        0.05, "mean of engine's less trainer's log-probs above which --use-opsm masks a sequence", check=at_least(0)
    )
    use_routing_replay: bool = flag(
        False,
        "R2: in the updates of a rollout routers repeat which experts they chose in the log-prob pass before them",
        derived="on with --use-rollout-routing-replay",
    )
    use_rollout_routing_replay: bool = flag(
        False, "R3: the trainer's routers repeat what the engine's chose when it sampled the tokens"
    )
