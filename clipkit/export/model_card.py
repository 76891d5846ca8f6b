"""The README.md of an exported model: what it is, how each library loads it, and what is known about it."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clipkit import __version__
from clipkit.export import EXPORTS
from clipkit.export.checks import TEXTS
from clipkit.files.urls import without_secrets
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import ClipTokenizer

__all__ = ["KnownScore", "Source", "model_card", "source_of", "usage"]


# --------------------------------------------------------------------------------------------------------------
# The examples in a model card: how each library loads an export and compares a picture with texts.

_CLIPKIT = """
import clipkit

model = clipkit.load("{folder}")
print(clipkit.classify("cat.jpg", ["cat", "dog"], model))
"""
# measured as the docstring of clipkit/export/transformers.py tells
_PICTURES_NOTE = (
    "The checks say that the model is the same, not that every picture reaches it as the same pixels. transformers "
    "and sentence-transformers resize by another library than clipkit and open_clip do, and may cut one pixel "
    "beside: of 20 drawn pictures half differed by less than 0.004 of 255 in the mean. Palette pictures and those "
    "with an alpha channel must be made RGB first, as above; clipkit and open_clip do that after resizing, and "
    "half of those pictures differed by more than 15 (palette) and 8 (alpha) of 255 in the mean."
)
_TEXTS_NOTE = (
    "Their tokenizer does not repair texts: with HTML entities, typographic quotes, ligatures, full-width letters "
    "or a wrong encoding, tokens are others than clipkit's unless the text goes through "
    "`html.unescape(ftfy.fix_text(text))` first. And `<|startoftext|>` or `<|endoftext|>` inside a text are "
    "special there and plain characters here; what stands behind the latter is not read."
)


def usage(model: CLIP, targets: Mapping[str, Any], *, folder: str) -> str:
    """How to load an export, as Markdown: a heading and an example for each library.

    Args:
        model: what was exported.
        targets: for which libraries, with the record of each (see ``clipkit.export``).
        folder: its folder's name.
    """
    parts = []
    for name in targets:
        target, code = EXPORTS[name], EXPORTS[name].example(model).strip().replace("{folder}", folder)
        kinds = "images and texts" if target.texts else "images"
        parts.append(f"### {target.display}\n\n```python\n{code}\n```{_checked(targets[name], kinds)}")
    if any(EXPORTS[name].loads for name in targets):
        code = _CLIPKIT.strip().replace("{folder}", folder)
        parts.append(f"### clipkit\n\n```python\n{code}\n```")
    if any(EXPORTS[name].resizes for name in targets):
        parts.append(_PICTURES_NOTE)
        if isinstance(model.tokenizer, ClipTokenizer):
            parts.append(_TEXTS_NOTE)
    return "\n\n".join(parts)


def _checked(record: Mapping[str, Any], kinds: str) -> str:
    by, largest = record.get("checked_by"), record.get("difference")
    if not by or not isinstance(largest, float):
        return ""
    samples = f"{len(TEXTS)} drawn pictures of exactly the model's size"
    if "text" in kinds:
        samples += f" and {len(TEXTS)} plain texts"
    return (
        f"\n\nChecked on {samples}: with {by} embeddings differ from clipkit's by at most {largest:.1e}. "
        "Nothing was resized there."
    )


# --------------------------------------------------------------------------------------------------------------

_CHECKPOINT = "clipkit checkpoint "  # how the origin of such a model begins
# of a path in quotes; not of an address such as s3://bucket/name, but of file:///home/name
_FOLDERS = re.compile(r"""(?:file://|(?<![\w/.…:])~\w*|(?<![\w/.…])(?=/))/(?=[\w.])(?:[^/"'\n]+/)*""")
_LARGEST = 64 * 2**20  # bytes of a results file or a configuration


@dataclass(frozen=True, kw_only=True)
class KnownScore:
    """One score of the exported weights; ``low`` and ``high`` are the ends of the 95% interval.

    Values are 0–1, those of metrics called ``…_rank`` count from 1. ``chance`` is what guessing scores, where
    that is known; ``setting`` tells apart the scores of one task, such as "k=20".
    """

    dataset: str
    task: str
    metric: str
    value: float
    n: int
    low: float
    high: float
    chance: float | None = None
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is known of where weights come from.

    Attributes:
        run: the name of the clipkit run, or "".
        step: its step, or None.
        scores: of that step.
        config: the run's configuration in TOML, or "".
    """

    run: str = ""
    step: int | None = None
    scores: tuple[KnownScore, ...] = ()
    config: str = ""


def source_of(model: CLIP) -> Source:
    """What lies beside the checkpoint that a model was loaded from; for any other model, nothing."""
    if not model.origin.startswith(_CHECKPOINT):
        return Source()
    folder = Path(model.origin.removeprefix(_CHECKPOINT)).resolve()
    in_run = folder.parent.name == "checkpoints"
    run = folder.parent.parent if in_run else folder
    step = _object(_text(folder / "state.json")).get("step")
    step = step if type(step) is int else None
    config = _text(folder / "config.toml")
    try:
        tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        config = ""
    scores = _scores(_text(run / "results.jsonl"), step) if step is not None else ()
    return Source(run=run.name, step=step, scores=scores, config=config.strip())


def _scores(results: str, step: int) -> tuple[KnownScore, ...]:
    """The last line of each dataset, task, setting and metric at one step; unfinished lines are skipped."""
    latest: dict[tuple[str, str, str, str], KnownScore] = {}
    for text in results.splitlines():
        line = _object(text)
        wanted = {one.name: line.get(one.name) for one in fields(KnownScore)}
        wanted["setting"] = line.get("setting", "")
        kinds = {"dataset": str, "task": str, "setting": str, "metric": str, "n": int}
        right = all(
            (isinstance(value, kinds.get(name, int | float)) and not isinstance(value, bool))
            or (name == "chance" and value is None)
            for name, value in wanted.items()
        )
        if line.get("step") == step and right:
            score = KnownScore(**wanted)  # type: ignore[arg-type]
            latest[score.dataset, score.task, score.setting, score.metric] = score
    return tuple(latest.values())


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def model_card(model: CLIP, targets: Mapping[str, Any], source: Source, *, name: str) -> str:
    """The README.md of an export.

    Args:
        model: what was exported.
        targets: for which libraries, with the record of each (see ``clipkit.export``).
        source: what is known of it.
        name: of the folder it is exported to, by which the examples call it.
    """
    parts = [
        _front_matter(list(targets), classes=bool(model.architecture.text.classes)),
        f"# {name}",
        _what_it_is(model, source),
        "## Architecture\n\n" + _architecture(model),
        "## Preprocessing\n\n" + _preprocessing(model),
        "## How to use it\n\n" + usage(model, targets, folder=name),
    ]
    if source.scores:
        parts.append(f"## Scores\n\n{_score_table(source)}")
    if source.config:
        parts.append(
            f"## Training\n\nThe run's whole configuration:\n\n```toml\n{_published(source.config)}\n```"
        )
    return "\n\n".join(parts) + "\n"


def _front_matter(targets: Sequence[str], *, classes: bool) -> str:
    task = "image-classification" if classes else "zero-shot-image-classification"
    tags = ["clip", "clipkit", *targets]
    lines = [
        "---",
        f"library_name: {targets[0]}",
        *([] if "timm" in targets[:1] else [f"pipeline_tag: {task}"]),
        "tags:",
        *(f"- {tag}" for tag in dict.fromkeys(tags)),
        "# license: for the owner of the weights to fill in, such as mit or apache-2.0",
        "---",
    ]
    return "\n".join(lines)


def _what_it_is(model: CLIP, source: Source) -> str:
    text = (
        "The image encoder of a CLIP model ([Radford et al. 2021](https://arxiv.org/abs/2103.00020)) with a head "
        "of classes in the text encoder's place: a picture is of the class whose row lies nearest to it."
        if model.architecture.text.classes
        else "A CLIP model ([Radford et al. 2021](https://arxiv.org/abs/2103.00020)): an image encoder and a text "
        "encoder into one space, in which a picture lies near the texts that fit it."
    )
    known = f" It is of the architecture `{model.name}`." if model.name else ""
    if source.run:
        step = f" at step {source.step:,}" if source.step is not None else ""
        known += f" The weights are those of the clipkit run `{source.run}`{step}."
    return f"{text}{known} Exported by clipkit {__version__}."


def _architecture(model: CLIP) -> str:
    shape = model.architecture
    visual = sum(parameter.numel() for parameter in model.visual.parameters())
    every = sum(parameter.numel() for parameter in model.parameters())
    read = "" if shape.text.classes else f", up to {shape.text.context_length} tokens"
    rows = [
        (
            "image tower",
            f"{shape.vision.description}, {shape.vision.image_size} pixels, {visual:,} parameters",
        ),
        ("text tower", f"{shape.text.description}{read}, {every - visual:,} parameters"),
        ("activation", "QuickGELU" if shape.quick_gelu else "GELU"),
        ("embedding", f"{shape.embed_dim} numbers, unit norm"),
        ("exp(t), by which similarities are multiplied", f"{float(model.logit_scale.detach().exp()):.4f}"),
    ]
    if not shape.is_own:
        del rows[2]  # a library's tower has its own
    if model.logit_bias is not None:
        rows.append(("added to similarities", f"{float(model.logit_bias.detach()):.4f}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])


def _preprocessing(model: CLIP) -> str:
    preprocess = model.preprocess
    size = preprocess.image_size
    how = {
        "shortest": f"the shorter side is resized to {size} pixels and the centre of {size} x {size} is cut out",
        "longest": f"the longer side is resized to {size} pixels and a border makes it {size} x {size}",
        "squash": f"both sides are resized to {size} pixels",
    }[preprocess.resize_mode]
    mean, std = (", ".join(f"{one:g}" for one in values) for values in (preprocess.mean, preprocess.std))
    own = isinstance(model.tokenizer, ClipTokenizer)
    tokens = "CLIP's byte-pair encoding, lower case" if own else "the tokenizer that lies beside the weights"
    texts = f"{tokens}, cut to {model.architecture.text.context_length} tokens."
    if model.architecture.text.classes:
        texts = "the names of its classes, and no other."
    first = f"\n\n{todo}" if (todo := by_caller(model)) else ""
    return (
        f"Pictures: {how} ({preprocess.interpolation}); values in 0–1 have mean ({mean}) taken off and are "
        f"divided by ({std}).{first}\n\nTexts: {texts}"
    )


def by_caller(model: CLIP) -> str:
    """What other libraries' preprocessing cannot do of the model's own, and its callers must do; "" for nothing."""
    done = str(model.preprocess.decoding)
    return f"Before this, {done}: other libraries do not do so, and the caller must." if done else ""


def _score_table(source: Source) -> str:
    lines = [
        "| dataset | task | metric | value | 95% interval | chance | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for score in source.scores:
        task = f"{score.task} {score.setting}".strip()
        names = " | ".join(_cell(text) for text in (score.dataset, task, score.metric))
        scale, unit = (1, "") if score.metric.endswith("_rank") else (100, "%")
        value, low, high = (f"{scale * one:.1f}" for one in (score.value, score.low, score.high))
        chance = "" if score.chance is None else f"{scale * score.chance:.2f}{unit}"
        lines.append(f"| {names} | {value}{unit} | {low}–{high}{unit} | {chance} | {score.n:,} |")
    return "\n".join(lines)


def _published(config: str) -> str:
    """A configuration without secrets and without this machine's folders: absolute paths keep their last part."""
    return _FOLDERS.sub("…/", without_secrets(config))


def _cell(text: str) -> str:
    return re.sub(r"[|\s\\`<>]+", " ", text)
