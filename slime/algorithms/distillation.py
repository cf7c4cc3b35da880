"""A teacher's log-probs of the student's own tokens, as a penalty on the advantages.

On-policy distillation (Thinking Machines Lab 2025; the on-policy, reverse-KL case of GKD, Agarwal et al. 2024):
    A_t <- A_t - coef (log pi_student(y_t) - log pi_teacher(y_t))
Over the student's samples the bracket has the reverse KL as its mean. It is a constant of the loss: no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """[T]: log pi_student - log pi_teacher of the sampled tokens."""
    return (student - teacher).detach()


def distilled(
    advantages: Sequence[Tensor], student: Sequence[Tensor], teacher: Sequence[Tensor], coef: float
) -> list[Tensor]:
    """Each sample's advantages less the weighted reverse KL of its tokens."""
    return [
        advantage - coef * reverse_kl(own, other)
        for advantage, own, other in zip(advantages, student, teacher, strict=True)
    ]
