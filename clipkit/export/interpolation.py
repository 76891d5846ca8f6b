"""``clipkit interpolate``: interpolate the weights of two models (WiSE-FT, https://arxiv.org/abs/2109.01903).

A fine-tuned model may score worse on other data than its initial model; interpolated weights lose less. Compare
several values of alpha with ``python -m eval``. The mean of several fine-tuned models, a uniform soup (Wortsman et
al. 2022, https://arxiv.org/abs/2203.05482), often scores better than each; ``python -m eval soup`` selects models.
"""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from clipkit.api import load
from clipkit.errors import ConfigError
from clipkit.files.writing import resolve_output
from clipkit.formats.checkpoint import check_free, model_hash, save_model
from clipkit.model.clip import CLIP
from clipkit.options import InterpolateOptions

# texts that distinguish tokenizers: case, accents, numbers, scripts, length
_PROBES = (
    "a photo of a cat",
    "A  Photo, of Zürich's 1,234 cafés &amp; bars!",
    "naïve 鳥の写真 фото 🙂",
    "x" * 40,
    "of " * 300,
)


@torch.no_grad()
def interpolate(first: CLIP, second: CLIP, alpha: float, *, into: CLIP | None = None) -> CLIP:
    """Interpolate all weights, including the temperature: (1 − alpha) · first + alpha · second.

    Batch norm statistics are interpolated too; integer counts are taken from the first model. With alpha = 1 / n,
    the result is the mean of n models if ``first`` is that of n − 1. Heads that predict words are removed from both
    models, since each training begins with another one.

    Args:
        first: a model; determines the device, dtype and tokenizer of the result.
        second: a model of the same architecture; determines how transparent and rotated images are treated, which
            fine-tuning may have changed.
        alpha: 0 (the first model) to 1 (the second).
        into: ``first`` or ``second``, whose weights the result replaces, to save memory; None creates a model.
    """
    if not (math.isfinite(alpha) and 0 <= alpha <= 1):
        raise ConfigError(f"alpha = {alpha!r} is invalid: expected 0 (the first model) to 1 (the second)")
    for model in (first, second):
        model.set_words(None)
    _check_alike(first, second)
    result_model = deepcopy(first) if into is None else into
    weights = first.state_dict()
    theirs = second.state_dict()
    done = set[int]()
    for name, result in result_model.state_dict().items():
        weight = weights[name]
        if result.data_ptr() in done:  # two names of one tensor
            continue
        done.add(result.data_ptr())
        if weight.is_floating_point():
            kind = torch.promote_types(weight.dtype, torch.float32)
            weight = torch.lerp(weight.to(kind), theirs[name].to(weight.device, kind), alpha)
        result.copy_(weight)
    result_model.preprocess = second.preprocess
    result_model.tokenizer = first.tokenizer
    result_model.origin = (
        f"{1 - alpha:g} of {first.origin or 'a model'} and {alpha:g} of {second.origin or 'another'}"
    )
    return result_model


def _check_alike(first: CLIP, second: CLIP) -> None:
    names = [model.origin or model.name or "a model" for model in (first, second)]
    for name, model in zip(names, (first, second), strict=True):
        if next(model.visual.parameters(), None) is None:
            raise ConfigError(f"{name} cannot be interpolated: use the model that it was made from")
    what = ""
    ignored: dict[str, Any] = {"background": None, "upright": False, "pixel_range": "auto"}
    most, other = (model.architecture.vision.image_tokens for model in (first, second))
    if most != other:
        what = f"largest number of patches ({most} and {other})"
    elif first.architecture != second.architecture:
        what = "architecture"
    elif replace(first.preprocess, **ignored) != replace(second.preprocess, **ignored):
        what = "image preprocessing"
    elif type(first.tokenizer) is not type(second.tokenizer):
        what = "tokenizer"
    elif first.tokenizer != second.tokenizer:  # from different folders: compare their tokens
        a, b = first.tokenizer(_PROBES), second.tokenizer(_PROBES)
        what = "" if torch.equal(a, b) else "tokenizer"
    if what:
        raise ConfigError(
            f"{names[0]} and {names[1]} differ in their {what}: only models trained from the same initial weights "
            "can be interpolated"
        )
    for name, model in zip(names, (first, second), strict=True):
        if model.adapters is not None:  # the mean of products is not the product of means
            raise ConfigError(f"{name} has adapters: store and load it, which merges them")


def load_interpolatable(
    sources: Sequence[str],
    *,
    name: str = "",
    device: str = "cpu",
    **sizes: Any,
) -> Iterator[CLIP]:
    """Load models one by one at sizes of ``clipkit.load``; refuse those unlike the first, and duplicates."""
    first: CLIP | None = None
    sources_by_hash: dict[str, str] = {}
    for source in sources:
        model = load(source, name=name, device=device, **sizes)
        model.set_words(None)  # see ``interpolate``
        if first is None:
            first = model
        _check_alike(first, model)
        digest = model_hash(model)
        other = sources_by_hash.get(digest)
        if other is not None:
            raise ConfigError(f"{other} and {source} are the same model: name each model once")
        sources_by_hash[digest] = source
        yield model


def run_interpolate(options: InterpolateOptions) -> int:
    """Run the command; return the exit status."""
    sources = [options.first, options.second, *options.more]
    if options.more and options.alpha:
        raise ConfigError("--alpha needs two models: the mean of more is written")
    alphas = list(dict.fromkeys(options.alpha or (0.5,)))
    out = resolve_output(options.out)
    folders = [out]
    if len(alphas) > 1:  # such as alpha_0.5, alpha_1
        folders = [out / f"alpha_{float(abs(alpha))!r}".removesuffix(".0") for alpha in alphas]
    for folder in folders:
        check_free(folder)
    models = load_interpolatable(
        sources,
        name=options.name,
        image_size=options.image_size,
        image_tokens=options.image_tokens,
        context_length=options.context_length,
    )
    first = next(models)
    origins, ground = [first.origin], first.preprocess
    print(first.origin)
    for count, second in enumerate(models, start=2):
        print(second.origin)
        origins.append(second.origin)
        if ground != second.preprocess and count == len(sources):
            print(f"transparent and rotated images are treated as in {second.origin}")
        if options.more:
            interpolate(first, second, 1 / count, into=first)
            first.origin = origins[0]  # for messages
    if options.more:
        save_model(first, out, made_from={"mean": origins})
        print(f"wrote {out}: the mean of {len(sources)} models")
        return 0
    for alpha, folder in zip(alphas, folders, strict=True):
        made_from = {"first": origins[0], "second": origins[1], "alpha": alpha}
        save_model(interpolate(first, second, alpha), folder, made_from=made_from)
        print(f"wrote {folder}: {1 - alpha:g} × the first + {alpha:g} × the second")
    return 0
