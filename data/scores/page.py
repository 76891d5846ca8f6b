"""A page that shows what each filter on scores keeps and drops."""

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clipkit.errors import ConfigError, DataError
from clipkit.files import printable, templates, write_page
from clipkit.samples import decode_image
from data.filters import Filter
from data.inspect.samples import encode_webp
from data.scores.table import COLUMNS, PERMILLE, PREFIX, PRESET, PRESETS, parse_filters, parse_scored_filters

_EXAMPLES = 12  # kept, and as many dropped
# of numbers; most frequent other values
_BINS = 24
_VALUES = 12
_SIDE = 128  # of images, in pixels
_CAPTION = 120  # characters

Sample = tuple[int, int]  # number of the shard, row


@dataclass
class _Effect:
    filter: Filter
    kept: int = 0
    dropped: int = 0
    missing: int = 0
    values: Counter[Any] = field(default_factory=Counter)  # (bin or value, passes) → samples
    edges: list[float] = field(default_factory=list)  # of the bins of numbers
    examples: dict[bool, list[tuple[float, Sample]]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def column(self) -> str:
        return self.filter.name.removeprefix(PREFIX)

    def add(self, value: Any, sample: Sample, priority: float) -> bool:
        passes = self.filter.passes({"score": {self.column: value}})
        if passes is None:
            self.missing += 1
            return False
        self.kept = self.kept + passes
        self.dropped = self.dropped + (not passes)
        bar = int(np.searchsorted(self.edges, value, side="right")) - 1 if self.edges else value
        self.values[bar, passes] += 1
        chosen = self.examples[passes]  # those of the smallest random numbers
        if len(chosen) < _EXAMPLES or priority < chosen[-1][0]:
            chosen.append((priority, sample))
            chosen.sort()
            del chosen[_EXAMPLES:]
        return passes

    def bars(self) -> tuple[list[tuple[str, int, int]], int]:
        """Return label, kept and dropped samples of each bin or frequent value, and the largest number."""
        totals: Counter[Any] = Counter()
        for (value, _), count in self.values.items():
            totals[value] += count
        labels: dict[Any, str] = {bin_: f"{edge:.3g}" for bin_, edge in enumerate(self.edges)}
        if not labels:
            labels = {value: str(value).lower() for value, _ in totals.most_common(_VALUES)}
        counts = self.values
        bars = [(text, counts[value, True], counts[value, False]) for value, text in labels.items()]
        return bars, max(totals.values(), default=1)


def check_filters(texts: Sequence[str], columns: Sequence[str]) -> None:
    """Check the filters of a page before anything is scored."""
    for filter_ in parse_filters(texts, columns, [0.0] * PERMILLE):
        if not filter_.name.startswith(PREFIX):
            raise ConfigError(
                f"filter '{filter_}' is not on scores: --html shows only filters such as 'score.clip > 0.28'"
            )


def write_filters(
    out: Path,
    name: str,
    tables: Sequence[Path],
    texts: Sequence[str],
    read: Callable[[int, int], tuple[str, bytes]],
) -> None:
    """Write the page."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    there = pq.read_schema(tables[0]).names
    optional = ("duplicate", "contaminated")
    flags = [f"{PREFIX}{flag} = false" for flag in optional if flag in there]
    texts = texts or [f"{PREFIX}clip >= top 30%", *flags, "preset:datacomp_basic"]
    filters, _ = parse_scored_filters(texts, name)
    presets = {}
    for text in texts:
        if text.startswith(PRESET):
            presets[text] = PRESETS[text.removeprefix(PRESET).strip()]
    effects = [_Effect(filter_) for filter_ in filters]
    for effect in effects:  # edges of histograms
        columns = (pq.read_table(path, columns=[effect.column]).column(0) for path in tables)
        if pq.read_schema(tables[0]).field(effect.column).type not in ("string", "bool"):
            ends = [pc.min_max(column).as_py() for column in columns]
            low = min(
                (column_ends["min"] for column_ends in ends if column_ends["min"] is not None), default=0
            )
            high = max(
                (column_ends["max"] for column_ends in ends if column_ends["max"] is not None), default=0
            )
            if high > low:
                effect.edges = np.linspace(low, high, _BINS + 1)[:-1].tolist()
    together = 0
    samples = 0
    random = np.random.default_rng(0)
    names = sorted({effect.column for effect in effects})
    for shard, path in enumerate(tables):
        rows = pq.read_table(path, columns=names).to_pylist()
        samples += len(rows)
        for row, (values, priority) in enumerate(zip(rows, random.random(len(rows)).tolist(), strict=True)):
            passed = [effect.add(values[effect.column], (shard, row), priority) for effect in effects]
            together += all(passed)

    def example(sample: Sample) -> dict[str, str]:
        try:
            text, data = read(*sample)
            image = encode_webp(decode_image(data), _SIDE)
        except DataError as error:
            return {"text": str(error), "image": ""}
        return {"text": printable(text, _CAPTION), "image": base64.b64encode(image).decode()}

    environment = templates(Path(__file__).parent.with_name("inspect") / "templates")
    page = environment.get_template("scores.html").render(
        title=name,
        lead=f"{together:,} of {samples:,} samples pass all filters ({together / max(1, samples):.1%})",
        notes=[
            f"{preset_name}: {preset.source}; {preset.differs}" for preset_name, preset in presets.items()
        ],
        effects=effects,
        columns=COLUMNS,
        samples=samples,
        example=example,
    )
    write_page(out, page)
