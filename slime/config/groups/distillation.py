"""A teacher's opinion of the tokens that the student sampled."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class DistillationFlags:
    """On-policy distillation"""

    use_opd: bool = flag(False, "subtract the reverse KL to a teacher from the advantages")
    opd_type: str | None = flag(
        None,
        "where the teacher is: served by an engine (at --rm-url, or started from --opd-teacher-load), loaded in the "
        "trainer, or asked by the generate function, which sets teacher_log_probs (sample); sglang and megatron are "
        "other names of the first two",
        choices=("engine", "trainer", "sample", "sglang", "megatron"),
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL")
    opd_teacher_load: str | None = flag(None, "model folder of the teacher", metavar="DIR")
