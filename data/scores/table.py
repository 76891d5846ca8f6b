"""Read stored scores of samples, and the filters that select by them.

``python -m data score`` stores the scores of a model for a list of shards in the cache folder, and ``python -m data
dynamics`` those of a training run:

    scores/NAME/manifest.json           model, sources, settings, counts, and a digest of all scores
    scores/NAME/INDEX-CONTENT.parquet   a shard's scores, one row per sample in the order of its index; the
                                        digests are those of ``ShardIndex``
    scores/features/ID/…                embeddings, and scores before the search for duplicates, by content, used
                                        for every list of shards

NAME identifies model, shards and settings, so that the scores of a name do not change. With ``data.scores=NAME``,
``data.filters`` can refer to the columns as ``score.clip``, ``score.language`` and so on.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import printable
from clipkit.samples import ShardIndex
from clipkit.samples.remote import cache_folder
from data.captions import Filter

COLUMNS = {
    "clip": "cosine similarity of image and caption",
    "characters": "length of the caption",
    "words": "words of the caption, separated by white space",
    "language": "ISO 639-1 code of the caption's most probable language (py3langid)",
    "language_probability": "its probability",
    "imagenet": "whether the caption contains the name of an ImageNet-1k class",
    "width": "pixels; the json's original_width if present",
    "height": "pixels; the json's original_height if present",
    "shorter_side": "pixels",
    "aspect_ratio": "longer side / shorter side",
    "similarity": "similarity to the most similar earlier image",
    "duplicate": "whether that similarity is at least the threshold",
    "duplicate_of": "shard and key of that image",
    "contamination": "similarity to the most similar evaluation image",
    "contaminated": "whether that similarity is at least the threshold",
    "contaminated_by": "shard and key of that image",
    "learnability": "how well a training run learned the pair, 0 to 1",
}
PERMILLE = 1000
_TOP = re.compile(r"\s*score\.(clip|learnability)\s*>=\s*top\s+([0-9]+(?:\.[0-9])?)\s*%\s*")
PREFIX = "score."
PRESET = "preset:"


class Preset(NamedTuple):
    """Filters of a published dataset.

    Attributes:
        filters: as in ``data.filters``.
        source: where the definition is from.
        differs: known differences.
    """

    filters: tuple[str, ...]
    source: str
    differs: str


_DATACOMP = "DataComp (Gadre et al. 2023, https://arxiv.org/abs/2304.14108), baselines/apply_filter.py"
_LANGUAGE = "the language is py3langid's, not fastText's or cld3's"
PRESETS = {
    "datacomp_basic": Preset(
        ("score.language = en", "score.words > 2", "score.characters > 5", "score.shorter_side >= 200",
         "score.aspect_ratio <= 3"),
        _DATACOMP, _LANGUAGE,
    ),
    "datacomp_clip_score": Preset(
        ("score.clip >= top 30%",), _DATACOMP, "the paper's model is OpenAI's ViT-L/14; any model can be used here",
    ),
    "laion2b": Preset(
        ("score.language = en", "score.clip >= 0.28"),
        f"{_DATACOMP}, after Schuhmann et al. 2022, LAION-5B (https://arxiv.org/abs/2210.08402)",
        f"{_LANGUAGE}; 0.28 belongs to OpenAI's ViT-B/32",
    ),
    "datacomp_text_based": Preset(
        ("score.language = en", "score.imagenet = true"), _DATACOMP,
        f"{_LANGUAGE}; captions must contain a name of open_clip's list of ImageNet-1k's classes, where DataComp "
        "looks up each word's first WordNet synset among those of ImageNet-21k",
    ),
}  # fmt: skip


def scores_folder() -> Path:
    """Return the folder of all scores."""
    return cache_folder() / "scores"


def find_scores(folder: Path, index: ShardIndex) -> Path | None:
    """Return the file of a shard, None if it has no scores."""
    for name in (f"{index.digest}-{index.content}.parquet", f"{index.digest}-.parquet"):
        path = folder / name
        if path.is_file():
            return path
    if not index.content:  # this index was read over the network, without the content
        paths = list(folder.glob(f"{index.digest}-*.parquet"))
        return paths[0] if len(paths) == 1 else None
    return None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Stored scores of the samples of many shards.

    Attributes:
        name: value of ``data.scores``.
        digest: changes with any of the scores.
        folder: see the module's documentation.
    """

    name: str
    digest: str
    folder: Path

    @classmethod
    def open(cls, name: str) -> tuple["Scores", dict[str, Any]]:
        """Open scores by name; return them with their manifest."""
        root = scores_folder()
        path = root / name / "manifest.json"
        if not re.fullmatch(r"[\w.-]+", name) or not path.is_file():
            names = sorted(manifest_path.parent.name for manifest_path in root.glob("*/manifest.json"))
            hint = f"{nearest(name, names)}" if names else "none are stored"
            raise ConfigError(
                f"data.scores = {printable(name, 80)!r}: no such scores in {root} ({hint}); create them with "
                "python -m data score"
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            return cls(name=name, digest=str(manifest["digest"]), folder=path.parent), manifest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}; delete its folder and score again") from error

    def rows(self, index: ShardIndex, shard: str, filters: Sequence[Filter]) -> list[dict[str, Any]]:
        """Return the columns that filters refer to, for each sample of a shard."""
        names = sorted(
            {filter_.name.removeprefix(PREFIX) for filter_ in filters if filter_.name.startswith(PREFIX)}
        )
        path = find_scores(self.folder, index)
        if path is None:
            raise DataError(
                f"shard {shard} has no scores in {self.name}, or has changed: score all shards of data.train with "
                "python -m data score, and set data.scores to the name that it prints"
            )
        import pyarrow.parquet

        try:
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, columns=names).to_pylist()
            if len(rows) != len(index):
                raise ValueError(f"{len(rows)} rows for {len(index)} samples")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({' '.join(str(error).split())}): delete its folder and score again"
            ) from error
        return rows


def parse_scored_filters(texts: Sequence[str], name: str) -> tuple[tuple[Filter, ...], Scores | None]:
    """Parse ``data.filters``: replace presets by their filters, and ``top P%`` by a number."""
    texts = [part for text in texts for part in _expand_preset(text)]
    uses = any(text.lstrip().startswith(PREFIX) for text in texts)
    if not name:
        presets = [text for text in texts if _TOP.fullmatch(text)]
        if presets:
            raise ConfigError(
                f"filter {presets[0]!r} needs data.scores=NAME, the name that python -m data score prints"
            )
        return tuple(map(Filter.of, texts)), None
    if not uses:
        raise ConfigError(
            f"data.scores = {name!r} has no effect: no filter names a column such as score.clip"
        )
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError("data.scores needs pyarrow: pip install 'pyarrow>=18'") from error
    scores, manifest = Scores.open(name)
    return parse_filters(texts, manifest["columns"], manifest["top"]), scores


def parse_filters(texts: Sequence[str], columns: Sequence[str], top: Sequence[float]) -> tuple[Filter, ...]:
    """Parse filters on scores; other filters are accepted, too.

    Args:
        columns: names of the scores.
        top: by per mille of the samples, the least score of those with the highest ones: of ``clip``, or of
            ``learnability`` if that is the table's column.
    """
    filters = []
    for text in [part for name in texts for part in _expand_preset(name)]:
        match = _TOP.fullmatch(text)
        if match:
            permille = round(float(match[2]) * 10)
            if not 0 < permille < PERMILLE:
                raise ConfigError(f"filter {text!r}: expected more than 0% and less than 100%")
            text = f"score.{match[1]} >= {top[permille]!r}"
        filter_ = Filter.of(text)
        column = filter_.name.removeprefix(PREFIX)
        if filter_.name != column and column not in columns:
            raise ConfigError(f"unknown column in filter {text!r}: {nearest(column, columns)}")
        filters.append(filter_)
    return tuple(filters)


def _expand_preset(text: str) -> Sequence[str]:
    if not text.startswith(PRESET):
        return (text,)
    name = text.removeprefix(PRESET).strip()
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {text!r}: {nearest(name, PRESETS)}")
    return PRESETS[name].filters
