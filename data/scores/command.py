"""``python -m data score``: score image–caption pairs, and find duplicates and evaluation images among them.

First, each shard is encoded, and its features and scores are stored by content, so that they are computed once for
any list of shards. Then each image is compared with all images of earlier shards, those before it in its shard, and
the evaluation images. Blocks of images are read from the disk, so memory does not grow with their number.
"""

import base64
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from clipkit.errors import ConfigError, DataError
from clipkit.files import (
    CountProgress,
    check_page,
    counted,
    load_prompts,
    lock_output,
    printable,
    replacing,
    templates,
    write_atomic,
    write_page,
)
from clipkit.inference import Item, PairEncoder, Sample, closest
from clipkit.samples import Shard, ShardSamples, decode_image, open_image, pillow_errors
from clipkit.samples.remote import ShardCache, ShardFile, shard_cache
from data.captions import CaptionRule, Filter
from data.inspect.samples import encode_webp
from data.options import ScoreOptions
from data.scores.table import (
    COLUMNS,
    PERMILLE,
    PREFIX,
    PRESET,
    PRESETS,
    parse_filters,
    parse_scored_filters,
    scores_folder,
)
from data.shards.samples import find_all_shards

_VERSION = 1  # of columns and features; increase it when one is computed differently
_ROWS = 2048  # samples encoded, compared and written at a time
_BINS = 2_000_000  # of clip scores from -1 to 1, for quantiles
_BASIC = (
    ("key", "string"), ("cause", "string"), ("clip", "float32"), ("characters", "int32"), ("words", "int32"),
    ("language", "string"), ("language_probability", "float32"), ("imagenet", "bool_"), ("width", "int32"),
    ("height", "int32"), ("shorter_side", "int32"), ("aspect_ratio", "float32"),
)  # fmt: skip
_MATCHES = (("similarity", "duplicate", "duplicate_of"), ("contamination", "contaminated", "contaminated_by"))


@dataclass(frozen=True, kw_only=True)
class _Shard:
    file: ShardFile
    table: Path
    rows: int

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the features of ``_ROWS`` images at a time."""
        for start in range(0, self.rows, _ROWS):
            try:
                features = np.load(self.table.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise _describe_damage(self.table.with_suffix(".npy"), error) from error
            yield np.array(features[start : start + _ROWS])

    def name(self, row: int) -> str:
        """Return shard and key of a row."""
        return f"{self.file.shown}/{_keys(self.table)[row].as_py()}"


@lru_cache(maxsize=8)
def _keys(path: Path) -> Any:
    return pq.read_table(path, columns=["key"]).column("key")


def _describe_damage(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is damaged ({' '.join(str(error).split())}): delete it and run the same command"
    )


def run_score(options: ScoreOptions) -> int:
    """Run the command and return its exit status."""
    shards = find_all_shards(options.sources, split=options.split)
    against = find_all_shards(options.against, split="test")
    cache = shard_cache([*options.sources, *options.against], options.cache_gb)
    rule = CaptionRule(fields=options.captions)
    if options.filters and options.html is None:
        raise ConfigError("--filters has no effect without --html; training filters with data.filters")
    check_page("--html", options.html)
    columns = [name for name, _ in _BASIC[2:]]
    for names, searched in zip(_MATCHES, (options.duplicates, bool(against)), strict=True):
        columns += names if searched else ()
    check_filters(options.filters, columns)
    encoder = PairEncoder(options)
    image = options.image
    settings = f"{_VERSION} {encoder.identity} {rule.which()}{image}"
    identity = hashlib.sha256(settings.encode()).hexdigest()[:16]
    folder = scores_folder() / "features" / identity
    folder.mkdir(parents=True, exist_ok=True)
    with lock_output(folder, "process", lock=folder / ".lock"):
        encoded: list[_Shard] = []
        with CountProgress("scoring samples", total=None, shown=not options.quiet) as progress:
            for file in [*shards, *against]:
                done = sum(shard.rows for shard in encoded)
                encoded.append(_encode(file, folder, encoder, rule, image, cache, progress, done))
        for line in encoder.notes():
            print(line, file=sys.stderr)
        trained = {shard.table: shard for shard in encoded[: len(shards)]}  # of equal shards the last
        evaluated = {shard.table: shard for shard in encoded[len(shards) :]}
        same = len(shards) - len(trained)
        if same:
            print(f"note: {same:,} of {len(shards):,} shards have the content of others; remove them")
        compared = [[table.name for table in part] for part in (trained, evaluated)]
        which = f"{identity} {compared} {options.threshold} {options.duplicates}"
        slug = (
            re.sub(r"[^\w-]+", "-", options.model.rstrip("/").rpartition("/")[2])[:40].strip("-") or "model"
        )
        name = f"{slug}-{hashlib.sha256(which.encode()).hexdigest()[:8]}"
        manifest = _score_shards([*trained.values()], [*evaluated.values()], scores_folder() / name, options)
    _report(name, manifest, options)
    if options.html is not None:
        files = [*trained.values()]

        def read(index: int, row: int) -> tuple[str, bytes]:
            shard = Shard(files[index].file, cache)
            (data,) = shard.read(row, (image,))
            caption = rule.caption(_fields(shard, row, rule), 0, None) or ""
            return f"{caption} ({shard.index.key(row)})", data or b""

        tables = [scores_folder() / name / shard.table.name for shard in files]
        write_filters(options.html, name, tables, options.filters, read)
        print(f"\nwrote {printable(str(options.html))}")
    return 0


# --------------------------------------------------------------------------------------------------------------
# Features and scores of one shard.


def _encode(
    file: ShardFile,
    folder: Path,
    encoder: PairEncoder,
    rule: CaptionRule,
    image: str,
    cache: ShardCache | None,
    progress: CountProgress,
    done: int,
) -> _Shard:
    """Score the samples of a shard unless they are stored; ``done`` samples of other shards are finished."""
    if file.is_remote and cache is None:
        raise ConfigError("remote shards are scored in the cache: set --cache-gb above 0")
    samples = ShardSamples([file], cache)
    shard = samples.open_shard(0)
    table = folder / f"{shard.index.digest}-{shard.index.content}.parquet"
    rows = len(shard.index)
    encoded = _Shard(file=file, table=table, rows=rows)
    if table.is_file():
        return encoded
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in _BASIC])
    with (
        replacing(table) as path,
        replacing(table.with_suffix(".npy")) as features,
        features.open("wb") as out,
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
    ):
        header = {"descr": encoder.dtype.descr, "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(out, header)
        for start in range(0, rows, _ROWS):
            numbers = range(start, min(start + _ROWS, rows))
            items, facts = zip(*(_facts(samples, row, rule, image) for row in numbers), strict=True)
            pairs = encoder.encode(items)
            out.write(pairs.images.tobytes())
            for fact, value, cause in zip(facts, pairs.scores.tolist(), pairs.causes, strict=True):
                fact["clip"] = None if math.isnan(value) else value
                fact["cause"] = fact.get("cause") or cause or None
            writer.write_table(pa.Table.from_pylist(facts, schema=schema))
            progress.show(done + numbers.stop)
    return encoded


def _facts(samples: ShardSamples, row: int, rule: CaptionRule, member: str) -> tuple[Item, dict[str, Any]]:
    shard = samples.open_shard(0)
    facts: dict[str, Any] = {"key": shard.index.key(row)}
    caption = None
    image = None
    fields = dict[str, Any]()
    try:
        fields = _fields(shard, row, rule)
        caption = rule.caption(fields, 0, None)
    except DataError as error:
        facts["cause"] = str(error)
    if caption is not None:
        language, probability = _languages().classify(caption)
        facts |= {"characters": len(caption), "words": len(caption.split()), "language": language}
        facts |= {"language_probability": probability, "imagenet": _names_class(caption)}
    try:
        data = samples.read(row, member)
        image = Sample(samples=samples, i=row, image=member)
        with pillow_errors():
            size = open_image(data).size
        original = [fields.get("original_width"), fields.get("original_height")]
        sides = [side for side in original if type(side) is int and 0 < side < 2**31]
        width, height = sides if len(sides) == 2 else size
        facts |= {"width": width, "height": height, "shorter_side": min(width, height)}
        facts["aspect_ratio"] = max(width, height) / min(width, height)
    except DataError as error:
        facts["cause"] = str(error)
    return Item(source="", key="", image=image, caption=caption, cause="" if image else "no image"), facts


def _fields(shard: Shard, row: int, rule: CaptionRule) -> dict[str, Any]:
    return rule.parse(shard.read_present(row, rule.members_and_json(shard.index.members(row))))


@cache
def _languages() -> Any:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _load_class_words() -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(_words(str(name))) for name in load_prompts("IMAGENET_CLASSNAMES"))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _names_class(caption: str) -> bool:
    words = _words(caption)
    names = _load_class_words()
    longest = max(map(len, names))
    return any(
        tuple(words[start : start + length]) in names
        for start in range(len(words))
        for length in range(1, longest + 1)
    )


# --------------------------------------------------------------------------------------------------------------
# Duplicates and evaluation images.


def _score_shards(
    trained: Sequence[_Shard], evaluated: Sequence[_Shard], folder: Path, options: ScoreOptions
) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        stored: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return stored
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    bins = np.zeros(_BINS, dtype=np.int64)
    counts = Counter[str]()
    causes = Counter[str]()
    searched = {"duplicate": options.duplicates, "contaminated": bool(evaluated)}
    extra = [(name, kind) for names in _MATCHES if searched[names[1]] for name, kind in
             zip(names, (pa.float32(), pa.bool_(), pa.string()), strict=True)]  # fmt: skip
    with CountProgress(
        "comparing images", total=sum(shard.rows for shard in trained), shown=not options.quiet
    ) as bar:
        for index, shard in enumerate(trained):
            target = folder / shard.table.name
            if not target.is_file():
                file = pq.ParquetFile(shard.table)
                schema = pa.schema([*file.schema_arrow, *extra])
                with replacing(target) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
                    for group, queries in enumerate(shard.blocks()):
                        columns = file.read_row_group(group).to_pydict()
                        valid = np.any(queries["embedding"] != 0, axis=1)
                        for names in _MATCHES:
                            if names[1] == "duplicate" and searched[names[1]]:
                                others = [*trained[:index], shard]
                                columns |= _find_matches(names, queries, others, group, valid, options)
                            elif searched[names[1]]:
                                columns |= _find_matches(names, queries, evaluated, None, valid, options)
                        writer.write_table(pa.table(columns, schema=schema))
                        bar.show(counts["samples"] + (group + 1) * _ROWS)
            digest.update(hashlib.sha256(target.read_bytes()).digest())
            _count_scores(pq.ParquetFile(target), bins, counts, causes)
            bar.show(counts["samples"])
    if not counts["scored"]:
        raise DataError(
            f"no sample could be scored: {counted(counts['samples'], 'sample')}, {_join_causes(causes)}"
        )
    above = bins[::-1].cumsum()[::-1]  # samples in each bin or a higher one
    ranks = [max(1, -(-permille * counts["scored"] // PERMILLE)) for permille in range(PERMILLE)]
    last = (
        np.searchsorted(-above, np.negative(ranks), side="right") - 1
    )  # the highest bin above which are enough
    top = [round(float(i) * 2 / _BINS - 1, 6) for i in last]
    manifest = {
        "version": _VERSION, "model": options.model, "sources": options.sources, "against": options.against,
        "threshold": options.threshold, "columns": [name for name, _ in _BASIC[2:]] + [name for name, _ in extra],
        "shards": len(trained), "counts": dict(counts), "causes": dict(causes.most_common(100)), "top": top,
        "digest": digest.hexdigest()[:32],
    }  # fmt: skip
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1))
    return manifest


def _find_matches(
    names: tuple[str, str, str],
    queries: npt.NDArray[Any],
    shards: Sequence[_Shard],
    group: int | None,
    valid: npt.NDArray[np.bool_],
    options: ScoreOptions,
) -> dict[str, list[Any]]:
    """Return three columns about the most similar image of each query, with these names.

    With ``group``, the queries are that block of the last shard and are compared with earlier images only.
    """

    def blocks() -> Iterator[npt.NDArray[Any]]:
        complete = shards if group is None else shards[:-1]
        for shard in complete:
            yield from shard.blocks()
        if group is not None:
            for _, block in zip(range(group), shards[-1].blocks(), strict=False):
                yield block
            yield queries

    similarity, matched = closest(queries, blocks(), options.device)
    starts = np.cumsum([0, *(shard.rows for shard in shards)])
    is_match = similarity >= options.threshold
    origins: list[str | None] = [None] * len(queries)
    for row in np.flatnonzero(is_match).tolist():
        shard = int(starts.searchsorted(matched[row], side="right")) - 1
        origins[row] = shards[shard].name(int(matched[row] - starts[shard]))
    columns = (similarity.tolist(), is_match.tolist(), origins)
    return {
        name: [value if has else None for value, has in zip(column, valid, strict=True)]
        for name, column in zip(names, columns, strict=True)
    }


def _count_scores(file: Any, bins: npt.NDArray[np.int64], counts: Counter[str], causes: Counter[str]) -> None:
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        clip = table.column("clip").drop_null().to_numpy().astype(np.float64)
        bins += np.bincount(((clip + 1) * (_BINS / 2)).astype(np.int64).clip(0, _BINS - 1), minlength=_BINS)
        causes.update(cause for cause in table.column("cause").to_pylist() if cause)
        counts.update(samples=len(table), scored=len(clip))
        for name in {"duplicate", "contaminated"} & {*table.column_names}:
            counts[name] += sum(map(bool, table.column(name).to_pylist()))


# --------------------------------------------------------------------------------------------------------------


def _join_causes(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {printable(cause, 80)}" for cause, count in list(causes.items())[:4])


def _report(name: str, manifest: dict[str, Any], options: ScoreOptions) -> None:
    counts = manifest["counts"]
    top = manifest["top"]
    print(
        f"scored {counts['scored']:,} of {counted(counts['samples'], 'sample')} "
        f"in {counted(manifest['shards'], 'shard')}"
    )
    if manifest["causes"]:
        print(f"  not scored       {_join_causes(manifest['causes'])}")
    print(
        "  clip score       "
        + ", ".join(f"top {percent}%: {top[percent * 10]:.4f}" for percent in (10, 30, 50, 90))
    )
    for column, what in (("duplicate", "near-duplicates"), ("contaminated", "contaminated")):
        if column in manifest["columns"]:
            print(f"  {what:<17}{counts.get(column, 0):,} (similarity of at least {options.threshold:g})")
    print(f"  stored in        {scores_folder() / name}")
    print(f"to select samples in training:\n  data.scores={name} data.filters='[\"score.clip >= top 30%\"]'")


# --------------------------------------------------------------------------------------------------------------
# The page that shows what each filter keeps and drops.

_EXAMPLES = 12  # that pass, and as many dropped
# of numbers; most frequent other values
_BARS = 24
_VALUES = 12
_SIDE = 128  # of images, in pixels
_CAPTION = 120  # characters

ShardRow = tuple[int, int]  # number of the shard, row


@dataclass
class _Effect:
    filter: Filter
    passed: int = 0
    dropped: int = 0
    missing: int = 0
    values: Counter[Any] = field(default_factory=Counter)  # (bin or value, passes) → samples
    edges: list[float] = field(default_factory=list)  # of the bins of numbers
    examples: dict[bool, list[tuple[float, ShardRow]]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def column(self) -> str:
        return self.filter.name.removeprefix(PREFIX)

    def add(self, value: Any, sample: ShardRow, priority: float) -> bool:
        passes = self.filter.passes({"score": {self.column: value}})
        if passes is None:
            self.missing += 1
            return False
        self.passed = self.passed + passes
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
        """Return label, passed and dropped samples of each bin or frequent value, and the largest number."""
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
                effect.edges = np.linspace(low, high, _BARS + 1)[:-1].tolist()
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

    def example(sample: ShardRow) -> dict[str, str]:
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
