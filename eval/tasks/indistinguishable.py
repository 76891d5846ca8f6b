"""Texts that a model's tokenizer turns into the same tokens, so that no model can tell them apart.

They differ in what the tokenizer drops (letter case, spacing, Unicode form) or behind the context length. Published
class lists contain such names ("missile" is two classes of ImageNet), so scores are computed as elsewhere: between
such texts rounding or the order of classes decides. One line per dataset says how many images that concerns.

Letters in shape comments: N images, C classes.
"""

from collections.abc import Sequence

import torch

from clipkit.count_progress import counted
from clipkit.zero_shot import indistinguishable_classes, token_numbers
from eval.dataset import some
from eval.subject import Subject

__all__ = ["report_captions", "report_choices", "report_classes"]

_SHOWN = 60  # characters of a text in a message


def report_classes(subject: Subject) -> None:
    """Warn of classes whose prompts all have the same tokens."""
    dataset, labels = subject.dataset, subject.dataset.labels
    groups = indistinguishable_classes(subject.encoder.model.tokenizer, dataset.prompts())
    if not groups or labels is None:
        return
    numbers = torch.tensor([number for group in groups for number in group])
    affected = torch.isin(labels, numbers) if labels.dim() == 1 else labels[:, numbers].any(dim=1)  # (N,)
    named = [" = ".join(f"{dataset.class_names[i][:_SHOWN]!r} ({i})" for i in group) for group in groups]
    subject.warn(
        f"{int(affected.sum()):,} of {counted(len(dataset), 'image')} have a label that the model cannot tell from "
        f"another, because all prompts of these classes have the same tokens: {some(named)}"
    )


def report_captions(subject: Subject) -> None:
    """Warn of captions that have the same tokens as another caption of another image."""
    images: dict[str, set[int]] = {}
    for number, own in enumerate(subject.dataset.caption_prompts()):
        for text in own:
            images.setdefault(text, set()).add(number)
    same: dict[int, list[str]] = {}
    for text, tokens in zip(
        images, token_numbers(subject.encoder.model.tokenizer, list(images)), strict=True
    ):
        same.setdefault(tokens, []).append(text)
    affected = [
        text for group in same.values() for text in group if any(images[text] != images[one] for one in group)
    ]
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(images), 'distinct caption')} have the same tokens as a caption of "
            f"another image, so the model cannot tell them apart: {_shown(affected)}"
        )


def report_choices(subject: Subject) -> None:
    """Warn of images whose right caption has the same tokens as a different, wrong one."""
    choices = subject.dataset.choices
    if choices is None:
        return
    texts = list({text: None for own in choices for text in own})
    tokens = dict(zip(texts, token_numbers(subject.encoder.model.tokenizer, texts), strict=True))
    affected = [
        own[0] for own in choices if any(one != own[0] and tokens[one] == tokens[own[0]] for one in own[1:])
    ]
    if affected:
        subject.warn(
            f"{len(affected):,} of {counted(len(choices), 'image')} have a right caption with the same tokens as a "
            f"wrong one, so the model cannot tell them apart: {_shown(affected)}"
        )


def _shown(texts: Sequence[str]) -> str:
    return some([repr(text[:_SHOWN]) for text in texts])
