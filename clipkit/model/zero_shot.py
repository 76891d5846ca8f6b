"""Class heads, and zero-shot classifiers from class names and templates (Radford et al. 2021, section 3.1.4).

Letters: C classes, T templates, O embedding dimension.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError, DataError
from clipkit.model.architectures import ClassTable
from clipkit.model.clip import CLIP
from clipkit.model.cpu import run_parallel
from clipkit.model.tokenizer import Tokenizer, convert_strings

DEFAULT_TEMPLATES = ("a photo of a {c}.",)
_SHOWN = 80  # characters of a class name in a message


def zero_shot_classifier(
    model: CLIP,
    class_names: Sequence[str],
    templates: Sequence[str] = DEFAULT_TEMPLATES,
    *,
    batch_size: int = 256,
    allow_indistinguishable: bool = False,
) -> Tensor:
    """Build one weight vector per class: the normalized mean of its prompts' unit embeddings.

    Args:
        model: a CLIP; used in evaluation mode, and its mode is restored.
        class_names: C names, in the order of the labels.
        templates: T prompts in which ``{c}`` (or ``{}``) is replaced by the class name. Ignored for a model with a
            classification head (``ClassTable``), which reads only names.
        batch_size: number of prompts encoded at a time.
        allow_indistinguishable: accept class names whose prompts have the same tokens, which the model cannot
            tell apart, for published lists that contain such names ("missile" is two classes of ImageNet).

    Returns:
        (O, C) float32 with unit columns, on the model's device.

    Raises:
        DataError: there are no classes or templates, one is not a string, a template has no placeholder, or two
            class names have the same tokens in every prompt.
        ConfigError: ``batch_size`` is not a positive integer.
    """
    for name, value in (("class_names", class_names), ("templates", templates)):
        if isinstance(value, str):
            raise DataError(f"{name} must be a list, not the one string {value!r}")
    names = convert_strings(class_names, "class_names")
    templates = convert_strings(templates, "templates")
    if not names or not templates:
        raise DataError("a zero-shot classifier needs at least one class name and one template")
    if model.architecture.text.classes:
        templates = ["{c}"]
    prompts = [[fill_template(template, name) for template in templates] for name in names]
    if not allow_indistinguishable:
        _check_distinguishable(model.tokenizer, names, prompts)
    features = encode_prompts(model, list(chain.from_iterable(prompts)), batch_size=batch_size)  # (C * T, O)
    per_class = features.view(len(names), len(templates), -1).mean(dim=1)  # (C, O)
    return F.normalize(per_class, dim=-1).T.contiguous()


def _check_distinguishable(tokenizer: Tokenizer, names: list[str], prompts: list[list[str]]) -> None:
    groups = find_indistinguishable_classes(tokenizer, prompts)
    if not groups:
        return
    first, second = [repr(names[i][:_SHOWN]) for i in groups[0][:2]]
    others = sum(map(len, groups)) - 2
    more = f" (so do {others:,} more names)" if others else ""
    raise DataError(
        f"class names {first} and {second} have the same tokens in every prompt{more}, so the model cannot "
        "tell them apart: remove one, or rename it"
    )


def find_indistinguishable_classes(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[str]]
) -> list[tuple[int, ...]]:
    """Find the classes that a model cannot tell apart, because all their prompts have the same tokens.

    Only classes that agree in their first prompts are compared in the others, so that the usual cost is that of
    tokenizing one prompt of each class.

    Args:
        tokenizer: the model's own, which may or may not ignore case and which cuts long texts.
        prompts: for each of C classes at least one prompt, in the same order of templates.

    Returns:
        Groups of two classes or more, by number in increasing order.
    """
    first_prompts = number_texts(tokenizer, [texts[0] for texts in prompts])
    sizes = Counter(first_prompts)
    groups: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
    for i, texts in enumerate(prompts):
        if sizes[first_prompts[i]] > 1:
            tokens = tokenizer(texts)
            groups.setdefault((tuple(tokens.shape), tokens.numpy().tobytes()), []).append(i)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def number_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Number texts by their tokens: texts with the same number are identical to the model."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(row.tobytes(), len(numbers)) for row in tokenizer(texts).numpy()]


def check_batch_size(batch_size: int) -> None:
    """Raise ConfigError unless ``batch_size`` is a positive integer."""
    if not isinstance(batch_size, SupportsIndex) or batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size!r} is not a whole number of at least 1")


def fill_template(template: str, name: str) -> str:
    """Insert a class name into a template; other braces are kept."""
    for placeholder in ("{c}", "{}"):
        if placeholder in template:
            return template.replace(placeholder, name)
    raise DataError(f"template {template!r} has no {{c}} where the class name goes")


@torch.no_grad()  # not inference_mode: a probe may be trained on what comes out
def encode_prompts(
    model: CLIP, prompts: Sequence[str], *, batch_size: int = 256, pooled: bool = False
) -> Tensor:
    """Encode texts: (N, O) float32 unit-norm features on the model's device. Repeated texts are encoded once.

    With ``pooled``, they are those of ``CLIP.pool_texts``.
    """
    check_batch_size(batch_size)
    prompts = convert_strings(prompts, "texts")
    device = model.logit_scale.device
    distinct = list(dict.fromkeys(prompts))
    # batches of similar lengths, as a batch is padded to its longest
    by_length = sorted(range(len(distinct)), key=lambda i: len(distinct[i]))
    rows: dict[str, Tensor] = {}
    starts = range(0, len(by_length), batch_size)
    batches = [[distinct[i] for i in by_length[start : start + batch_size]] for start in starts]
    with evaluation_mode(model):
        tokens = (model.tokenizer(texts).to(device) for texts in batches)
        encode = model.pool_texts if pooled else model.encode_text
        for texts, features in zip(batches, run_parallel(model, encode, tokens), strict=True):
            rows.update(zip(texts, features.float(), strict=True))
    if not rows:
        return torch.zeros(0, model.dim, device=device)
    return torch.stack([rows[prompt] for prompt in prompts])


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of each of its modules afterwards."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def attach_class_head(model: CLIP, names: Sequence[str], rows: Tensor) -> CLIP:
    """Replace the text tower by a classification head with the given rows.

    With the rows of a zero-shot classifier it predicts like that classifier, as in WiSE-FT (Wortsman et al. 2022,
    https://arxiv.org/abs/2109.01903).

    Args:
        names: names of C classes, see ``ClassTable``.
        rows: (C, O), such as the transposed zero-shot classifier.
    """
    text = ClassTable(names=tuple(names))
    shape = replace(model.architecture, text=text, logit_bias=False, decoder=None, masked=None, words=None)
    head = CLIP(shape, name=model.name, preprocess=model.preprocess)
    values = {name: value for name, value in model.state_dict().items() if name.startswith("visual.")}
    head.load_state_dict({**values, "logit_scale": model.logit_scale, "text.weight": rows})
    return head.to(model.logit_scale.device).eval()
