"""Model card (README.md) of an export: architecture, example code for each library, scores and training."""

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clipkit import __version__
from clipkit.export.checks import TEXTS
from clipkit.export.targets import EXPORTS
from clipkit.files.open_clip import ENCODER
from clipkit.files.pages import templates
from clipkit.files.terminal import redact_secrets
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import ClipTokenizer

_CHECKPOINT = "clipkit checkpoint "  # prefix of the origin of a model loaded from a checkpoint
# folders in a quoted path, including file:///home/name, but not in a URL such as s3://bucket/name
_FOLDERS = re.compile(r"""(?:file://|(?<![\w/.…:])~\w*|(?<![\w/.…])(?=/))/(?=[\w.])(?:[^/"'\n]+/)*""")
_LARGEST = 64 * 2**20  # size limit of a results file or configuration, in bytes


@dataclass(frozen=True, kw_only=True)
class KnownScore:
    """A score of the exported weights, with its 95% interval from ``low`` to ``high``.

    Values are 0–1, except for metrics named ``…_rank``, which start at 1. ``chance`` is the score of random
    guessing, if known; ``setting`` distinguishes scores of the same task, such as "k=20".
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
    """The training run that produced the weights.

    Attributes:
        config: the run's configuration in TOML, or "".
    """

    run: str = ""
    step: int | None = None
    scores: tuple[KnownScore, ...] = ()
    config: str = ""


def find_source(model: CLIP) -> Source:
    """Read the run folder of the checkpoint that a model was loaded from; the result is empty for other models."""
    if not model.origin.startswith(_CHECKPOINT):
        return Source()
    folder = Path(model.origin.removeprefix(_CHECKPOINT)).resolve()
    in_run = folder.parent.name == "checkpoints"
    run = folder.parent.parent if in_run else folder
    step = _parse_object(_read_text(folder / "state.json")).get("step")
    step = step if type(step) is int else None
    config = _read_text(folder / "config.toml")
    try:
        tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        config = ""
    scores: dict[
        tuple[str, str, str, str], KnownScore
    ] = {}  # the last score for each dataset, task, setting and metric
    for line in _read_text(run / "results.jsonl").split("\n"):
        record = _parse_object(line)
        if step is not None and record.get("step") == step:
            with suppress(msgspec.ValidationError):
                score = msgspec.convert(record, KnownScore)
                scores[score.dataset, score.task, score.setting, score.metric] = score
    return Source(run=run.name, step=step, scores=tuple(scores.values()), config=config.strip())


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def render_card(model: CLIP, targets: Mapping[str, Any], source: Source, *, name: str) -> str:
    """Write the README.md of an export.

    Args:
        targets: the record of each target (see ``clipkit.export.write``).
        name: name of the export's folder, for the examples.
    """
    environment = templates(Path(__file__).with_name("templates"), html=False)
    environment.filters |= {"g": "{:g}".format, "cell": lambda text: re.sub(r"[|\s\\`<>]+", " ", text)}
    environment.filters |= {
        "loads": lambda target: EXPORTS[target].loads,
        "resizes": lambda target: EXPORTS[target].resizes,
        "approximate": lambda target: EXPORTS[target].approximate,
    }
    image_parameters = sum(parameter.numel() for parameter in model.visual.parameters())
    text: str = environment.get_template("model_card.md").render(
        model=model,
        shape=model.architecture,
        classes=bool(model.architecture.text.classes),
        tokenizer="clip" if isinstance(model.tokenizer, ClipTokenizer) else "library",
        resize_mode=model.preprocess.resize_mode,
        image_parameters=image_parameters,
        text_parameters=sum(parameter.numel() for parameter in model.parameters()) - image_parameters,
        architecture=_FOLDERS.sub("…/", model.name),
        caller_steps=_FOLDERS.sub("…/", describe_caller_steps(model)),
        targets=targets,
        exports=EXPORTS,
        samples=len(TEXTS),
        source=source,
        # shorten absolute paths to their last part
        config=_FOLDERS.sub("…/", redact_secrets(source.config)),
        name=name,
        version=__version__,
    )
    return text.rstrip() + "\n"


def describe_caller_steps(model: CLIP) -> str:
    """Describe what other libraries do not do or store, and the caller must do; "" for nothing."""
    steps = []
    if done := str(model.preprocess.decoding):
        steps.append(f"Before resizing, {done}. Other libraries do not do this: do it before calling them.")
    if model.architecture.text.local_config is not None:
        steps.append(
            "open_clip finds the configuration of the text tower by its path: after moving the export, set "
            f"hf_model_name in open_clip_config.json to the path of {ENCODER}, or load it with clipkit."
        )
    return " ".join(steps)
