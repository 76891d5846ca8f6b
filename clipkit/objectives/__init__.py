"""Training objectives and local terms by name.

To add an objective, copy ``siglip.py`` or ``words.py``: a class derived from ``Objective`` with its loss, in a file
of its own. If it has settings, it is a frozen dataclass of them. To add a local term, which needs no other sample
of the batch, copy ``image_gpt.py``, a class derived from ``Term``. Then add the class to a dict below.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import torch

from clipkit.config import Config, Section, require_use
from clipkit.model.architectures import Architecture
from clipkit.objectives.base import (
    Objective,
    ObjectiveState,
    Outputs,
    Targets,
    Term,
    TermBatch,
    compare_pairs,
)
from clipkit.objectives.caption import Caption
from clipkit.objectives.caption_words import CaptionWords
from clipkit.objectives.classes import Classes
from clipkit.objectives.clip import Clip
from clipkit.objectives.global_clip import GlobalClip
from clipkit.objectives.image_gpt import ImageGpt
from clipkit.objectives.masked import Masked
from clipkit.objectives.none import NoComparison
from clipkit.objectives.siglip import SigLip
from clipkit.objectives.views import Views
from clipkit.objectives.words import Words

__all__ = [
    "OBJECTIVES",
    "TERMS",
    "Objective",
    "ObjectiveState",
    "Outputs",
    "Targets",
    "Term",
    "TermBatch",
    "check_objectives",
    "compare_pairs",
    "create_state",
    "objective_sections",
    "select_objective",
    "select_terms",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": Clip,
    "siglip": SigLip,
    "global_clip": GlobalClip,
    "classes": Classes,
    "words": Words,
    "none": NoComparison,
}
TERMS: dict[str, type[Term]] = {
    "caption": Caption,
    "masked": Masked,
    "image_gpt": ImageGpt,
    "views": Views,
    "words": CaptionWords,
}


def objective_sections() -> dict[str, type[Section]]:
    """Return the sections of the configuration that objectives and terms declare, by name."""
    objectives = {name: kind for name, kind in OBJECTIVES.items() if is_dataclass(kind)}
    return {**objectives, **TERMS}


def select_objective(config: Config) -> Objective:
    """Return the objective of ``loss.name`` with its settings."""
    kind = OBJECTIVES[config.loss.name]
    if not is_dataclass(kind):  # without settings; the section of this name may be a term's
        return kind()
    objective = config.objectives[config.loss.name]
    assert isinstance(objective, Objective)
    return objective


def select_terms(config: Config) -> dict[str, Term]:
    """Return the local terms with a weight, by name."""
    return {name: config.objectives[name] for name in TERMS if config.objectives[name].weight}


def create_state(
    objective: Objective,
    terms: Mapping[str, Term],
    shape: Architecture,
    *,
    samples: int,
    device: torch.device,
) -> ObjectiveState:
    """Return the state of a run that begins, on a device; ``samples`` is the number of training samples."""
    tensors = objective.create_state(samples)
    for term in terms.values():
        tensors |= term.create_state(shape)
    return ObjectiveState({name: tensor.to(device) for name, tensor in tensors.items()})


def check_objectives(config: Config) -> None:
    """Raise ConfigError if the objective or a term does not fit other settings, or another objective has some."""
    for name, kind in OBJECTIVES.items():
        if is_dataclass(kind) and name != config.loss.name:
            for entry in fields(kind):
                value = getattr(config.objectives[name], entry.name)
                require_use(f"{name}.{entry.name}", value, f"loss.name={name}", value == entry.default)
    select_objective(config).check(config)
    for term in config.terms.values():
        term.check(config)
