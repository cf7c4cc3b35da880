"""The reward of an evaluation dataset that names an `rm_type`, whatever reward function training has.

A custom function goes before any type, so such a dataset's samples carry this function as their own.
"""

from __future__ import annotations

import copy

from slime.config import Config
from slime.data.sample import Reward, Sample
from slime.rollout.runtime import runtime_for

BY_RM_TYPE = f"{__name__}.by_rm_type"


async def by_rm_type(args: Config, sample: Sample) -> Reward:
    """What the built-in verifier named in the sample's metadata says."""
    plain = copy.copy(sample)
    plain.custom_rm_path = None
    return await runtime_for(args).state.typed_hub.score(plain)
