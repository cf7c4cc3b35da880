"""Flags that slime has elsewhere and this version does not: refused by name with the reason, so that nobody believes
they work."""

from __future__ import annotations

from slime.config.megatron_fields import REFUSED_FIELDS

_DEEPGEMM = "it chooses kernels of the Megatron trainer, and the trainer is FSDP: drop the flag"

REFUSED: dict[str, str] = {
    "release-train": "trainers live as long as the run: --offload-train frees their memory instead",
    "opd-teacher-ckpt-step": "name the folder of that step with --opd-teacher-load",
    "load-forge-rollout-data": "replay with --load-debug-rollout-data, which starts no engines",
    "enable-mtp-training": "layers that predict several tokens at once are not trained, and their loss would change "
    "the others: drop the flag",
    "megatron-deepgemm-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-forward-modules": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-modules": _DEEPGEMM,
    "sglang-custom-pull-weights-pre-read-hook": "engines read weights without a hook: use "
    "--custom-update-weight-post-write-path on the side that writes them",
}
"""Name without the dashes in front -> why, and what to do instead. Whatever is a field of the config or a Megatron flag
is looked up before this."""


def refusal(flag: str) -> str | None:
    """The sentence for a known slime flag that cannot be used here, or None."""
    why = REFUSED.get(flag) or REFUSED_FIELDS.get(flag) or REFUSED_FIELDS.get(flag.removeprefix("no-"))
    return None if why is None else f"--{flag} is not taken: {why}"
