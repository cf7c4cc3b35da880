"""Mixes prompts of several datasets in fixed proportions.

Invariant: for every t, each dataset has supplied its share of the first t prompts, rounded down or up; so a batch
deviates by at most one prompt on either side. The mixture is deterministic: the next dataset follows from the number of
prompts that each has supplied. Each dataset has its own epochs and its own order.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from slime.data.prompt_rows import BY_RM_TYPE
from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from argparse import Namespace

    from slime.config.datasets import TrainDataset

logger = logging.getLogger(__name__)


class PromptCursor(Protocol):
    """A resumable cursor over the prompts of one dataset, epoch after epoch."""

    def __len__(self) -> int: ...
    def next_prompt(self) -> Sample: ...
    def state_dict(self) -> JsonObject: ...
    def load_state_dict(self, state: JsonObject, *, origin: str) -> None: ...


@dataclass
class MixtureMember:
    """One dataset of a mixture, and the number of prompts it has supplied under the current weights."""

    recipe: TrainDataset
    walk: PromptCursor
    given: int = 0


class Mixture:
    """Supplies prompts of all datasets in proportion to their weights, each tagged with its dataset."""

    def __init__(self, parts: Sequence[MixtureMember]) -> None:
        self.parts = list(parts)
        self._weights = [Fraction(str(part.recipe.weight)) for part in self.parts]

    def __len__(self) -> int:
        """The number of prompts of all datasets together."""
        return sum(len(part.walk) for part in self.parts)

    def next_prompt(self) -> Sample:
        """Return a prompt of the next dataset, tagged with its name and its reward and generate functions."""
        part = self.parts[next_dataset_index(self._weights, [part.given for part in self.parts])]
        recipe, prototype = part.recipe, part.walk.next_prompt()
        prompt = copy.copy(prototype)
        prompt.task = recipe.name
        prompt.generate_function_path = recipe.custom_generate_function_path
        prompt.custom_rm_path = recipe.custom_rm_path or (None if recipe.rm_type is None else BY_RM_TYPE)
        typed = {} if recipe.rm_type is None else {"rm_type": recipe.rm_type}
        prompt.metadata = {**prototype.metadata, **typed, **recipe.metadata_overrides}
        part.given += 1
        return prompt

    def state_dict(self) -> JsonObject:
        """Return the position in each dataset as JSON values."""
        return {
            part.recipe.name: {"weight": part.recipe.weight, "given": part.given, "position": part.walk.state_dict()}
            for part in self.parts
        }

    def load_state_dict(self, state: JsonObject, *, origin: str) -> None:
        """Resume at a saved position in the same datasets; changed weights apply from this position on."""
        names = [part.recipe.name for part in self.parts]
        if sorted(state) != sorted(names):
            raise UserError(
                f"{origin}: is a position in the datasets {', '.join(state)}, but --prompt-config has "
                f"{', '.join(names)}; resume with the same data or start without --load"
            )
        saved = [Fraction(str(state[name]["weight"])) for name in names]
        same = [share * sum(saved) for share in self._weights] == [share * sum(self._weights) for share in saved]
        if not same:
            shown = ", ".join(f"{name} {state[name]['weight']:g}" for name in names)
            logger.warning("%s was saved with the weights %s: the proportions of prompts have changed", origin, shown)
        for part in self.parts:
            own = state[part.recipe.name]
            part.walk.load_state_dict(own["position"], origin=f"{origin}, dataset {part.recipe.name}")
            part.given = int(own["given"]) if same else 0


def next_dataset_index(weights: Sequence[Fraction], given: Sequence[int]) -> int:
    """Return the index of the dataset that supplies the next prompt; ties go to the first.

    The quota method of Balinski and Young (1975): of the datasets below their share of the prompts including the next
    one, choose the one whose next prompt is due first. Starting from zero counts, this keeps every count at its share
    rounded down or up.
    """
    total, place = sum(weights), sum(given) + 1
    behind = [part for part, weight in enumerate(weights) if given[part] * total < place * weight]
    return min(behind, key=lambda part: (given[part] + 1) / weights[part])


def reading(recipe: TrainDataset, args: Namespace) -> JsonObject:
    """Return the flags for reading one dataset that differ from those of the run.

    Each dataset has its own seed, so that datasets of the same length are shuffled differently.
    """
    own_judge = recipe.rm_type is not None or recipe.custom_rm_path is not None
    generate = recipe.custom_generate_function_path or args.custom_generate_function_path
    return {
        "prompt_data": recipe.path,
        "prompt_config": None,
        "input_key": recipe.input_key,
        "is_input_key_given": True,
        "label_key": recipe.label_key,
        "metadata_key": recipe.metadata_key,
        "tool_key": recipe.tool_key,
        "prompt_suffix": recipe.prompt_suffix,
        "apply_chat_template": recipe.apply_chat_template,
        "apply_chat_template_kwargs": recipe.apply_chat_template_kwargs,
        "rollout_max_prompt_len": recipe.max_prompt_len,
        "rm_type": recipe.rm_type if own_judge else args.rm_type,
        "custom_rm_path": recipe.custom_rm_path if own_judge else args.custom_rm_path,
        "custom_generate_function_path": generate,
        "rollout_seed": args.rollout_seed + zlib.crc32(recipe.name.encode()),
    }
