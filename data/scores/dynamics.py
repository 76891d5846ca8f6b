"""``python -m data dynamics RUN``: which pairs a training did not learn, forgot, or learned last.

With ``log.samples``, a run stores the losses and margins of each pair in each step, see ``SampleLosses`` in
clipkit/training/log.py. A pair is learned when its image and its caption are nearest to each other in the batch.
Pairs that are learned late, or never, often have a wrong caption (Toneva et al. 2019,
https://arxiv.org/abs/1812.05159; Swayamdipta et al. 2020, https://arxiv.org/abs/2009.10795).

The learnability of a pair is 1 minus the mean, over its draws and both directions, of how much nearer (in cosine)
the nearest other caption or image was than its own. Draws in which its own was the nearest count as 0 (area under
the margin, Pleiss et al. 2020, https://arxiv.org/abs/2001.10528, without the margins of what is memorized). Wrong
pairs are memorized in the end, so their loss and CLIP score after the training say little.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sized
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.config import load_config
from clipkit.errors import ConfigError, DataError
from clipkit.files import (
    CountProgress,
    check_page,
    counted,
    printable,
    replacing,
    templates,
    write_atomic,
    write_page,
)
from clipkit.samples import decode_image
from data.inspect.samples import encode_webp
from data.options import DynamicsOptions
from data.scores.table import PERMILLE, scores_folder
from data.shards.samples import Shards
from data.training_data import open_training_data

_SHOWN = 48  # pairs in a section of the page
_SIDE = 160  # of images, in pixels
_CAPTION = 200  # characters
_BARS = 20

Floats = npt.NDArray[np.float32]


class Dynamics:
    """What a run has recorded about each of N pairs.

    Args:
        samples: N.

    Attributes:
        draws: (N,) int32, how often each pair was drawn.
        learned: (N,) bool, whether it was learned when it was drawn last.
        forgotten: (N,) int32, how often it was no longer learned.
        learned_step: (N,) int32, the last step in which it was learned anew; 0: never.
        first_loss: (N,) float32, its loss when it was drawn first.
        last_loss: (N,) float32, its loss when it was drawn last.
    """

    def __init__(self, samples: int) -> None:
        self.draws = np.zeros(samples, np.int32)
        self.learned = np.zeros(samples, np.bool_)
        self.forgotten = np.zeros(samples, np.int32)
        self.learned_step = np.zeros(samples, np.int32)
        self.first_loss = np.full(samples, np.nan, np.float32)
        self.last_loss = np.full(samples, np.nan, np.float32)
        self._shortfalls = np.zeros(samples)

    def add_step(self, rows: npt.NDArray[Any]) -> None:
        """Add the rows of a step."""
        while len(rows):  # a pair may be drawn several times in a step
            _, first = np.unique(rows["sample"], return_index=True)
            self._add_draws(rows[first])
            rows = np.delete(rows, first)

    def _add_draws(self, rows: npt.NDArray[Any]) -> None:
        """Add rows of different pairs."""
        ids = rows["sample"]
        loss = (rows["image_loss"] + rows["text_loss"]) / 2
        margins = np.stack([rows["image_margin"], rows["text_margin"]])  # (2, B)
        is_learned = np.all(margins > 0, axis=0)
        self.forgotten[ids[self.learned[ids] & ~is_learned]] += 1
        self.learned_step[ids[~self.learned[ids] & is_learned]] = rows["step"][0]
        self.learned[ids] = is_learned
        is_first = self.draws[ids] == 0
        self.first_loss[ids[is_first]] = loss[is_first]
        self.last_loss[ids] = loss
        self.draws[ids] += 1
        self._shortfalls[ids] += np.maximum(-margins, 0).mean(axis=0)

    @property
    def learnability(self) -> Floats:
        """(N,) see above, at most 1; NaN for a pair that was not drawn."""
        with np.errstate(invalid="ignore"):
            return (1 - self._shortfalls / self.draws).astype(np.float32)

    def sections(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return the numbers of the pairs of each section of the page, those to look at first at the front."""
        is_drawn = self.draws > 0
        groups = {
            "never learned": is_drawn & (self.learned_step == 0),
            "forgotten": is_drawn & (self.learned_step > 0) & ~self.learned,
            "learned last": is_drawn & self.learned,
        }
        sections = {}
        for name, group in groups.items():
            values = -self.learned_step if name == "learned last" else self.learnability
            ids = np.flatnonzero(group)
            sections[name] = ids[np.argsort(values[ids], kind="stable")]
        return sections


def list_sample_files(folder: Path) -> list[Path]:
    """Return the files in which a run has stored the losses of pairs, see ``SampleLosses``."""
    return [path for path in folder.glob("*.npy") if re.fullmatch(r"[0-9]{8,}(-[0-9]+)?", path.stem)]


def read_steps(folder: Path) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of each step, in order, from the files of all ranks."""
    files = sorted((int(path.stem.partition("-")[0]), path) for path in list_sample_files(folder))
    for _, group in groupby(files, key=lambda item: item[0]):
        try:
            rows = np.concatenate([np.load(path, allow_pickle=False) for _, path in group])
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"a file in {folder} cannot be read: {error}") from error
        rows = rows[np.argsort(rows["step"], kind="stable")]
        yield from np.split(rows, np.flatnonzero(np.diff(rows["step"])) + 1)


def run_dynamics(options: DynamicsOptions) -> int:
    """Run the command and return its exit status."""
    run = options.run
    html = options.html or run / "dynamics.html"
    check_page("--html", html)
    config = load_config(run / "config.toml")
    folder = run / "samples"
    if not list_sample_files(folder):
        raise ConfigError(f"{run} has not stored the losses of pairs: train with log.samples=true")
    if config.select.fraction < 1:
        raise ConfigError(
            f"{run} has losses only of the pairs that each step chose (select.fraction = "
            f"{config.select.fraction:g}): train with select.fraction=1"
        )
    shards = open_training_data(
        config.data,
        run / "data.manifest",
        same_field=config.loss.same_field,
        rank0=True,
        resumed=True,
        broadcast=lambda content: content,
    )
    last = max(int(path.stem.partition("-")[0]) for path in list_sample_files(folder))
    dynamics = Dynamics(len(shards))
    with CountProgress("reading steps", total=last, shown=not options.quiet) as progress:
        for rows in read_steps(folder):
            dynamics.add_step(rows)
            progress.show(int(rows["step"][0]))
    name = write_scores(run, shards, dynamics.learnability, quiet=options.quiet)
    sections = dynamics.sections()
    write_dynamics(html, run, shards, dynamics, sections, name)
    drawn = sum(map(len, sections.values()))
    print(f"{counted(len(shards), 'pair')}, {drawn:,} of them drawn in {last:,} steps")
    for section, ids in sections.items():
        print(f"  {section.removesuffix(' last'):<15}{len(ids):,} ({len(ids) / drawn:.1%})")
    print(f"  page           {html}")
    print(f"  scores         {scores_folder() / name}")
    print(_recommend(name, sections))
    return 0


def _recommend(name: str, sections: Mapping[str, Sized]) -> str:
    if 2 * len(sections["never learned"]) > sum(map(len, sections.values())):
        return "most pairs were never learned: train longer before their learnability says anything"
    settings = f"data.scores={name} data.filters='[\"score.learnability >= top 95%\"]'"
    return f"to train without the 5% of the lowest learnability:\n  {settings}"


def write_scores(run: Path, shards: Shards, learnability: Floats, *, quiet: bool) -> str:
    """Store the learnability of each sample as ``python -m data score`` stores scores, and return their name.

    A sample whose captions are separate pairs has the mean of those that were drawn.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    digest = hashlib.sha256(f"{shards.fingerprint()} ".encode() + learnability.tobytes()).hexdigest()[:32]
    slug = re.sub(r"[^\w-]+", "-", run.resolve().name)[:40].strip("-") or "run"
    name = f"{slug}-{digest[:8]}"
    folder = scores_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    first = 0
    with CountProgress("writing scores", total=len(shards), shown=not quiet) as progress:
        for i, count in enumerate(shards.counts.tolist()):
            shard = shards.open_shard(i)
            pairs = learnability[first : first + count]
            is_drawn = ~np.isnan(pairs)
            rows = shard.chosen.rows[is_drawn]
            size = len(shard.index)
            with np.errstate(invalid="ignore"):
                means = np.bincount(rows, pairs[is_drawn], size) / np.bincount(rows, minlength=size)
            means = means.astype(np.float32)  # thresholds are compared with what is stored
            samples.append(means[~np.isnan(means)])
            columns = {
                "key": [shard.index.key(row) for row in range(size)],
                "learnability": pa.array(means, pa.float32(), from_pandas=True),  # NaN becomes null
            }
            path = folder / f"{shard.index.digest}-{shard.index.content}.parquet"
            with replacing(path) as temporary:
                pq.write_table(pa.table(columns), temporary, compression="zstd")
            first += count
            progress.show(first)
    values = np.sort(np.concatenate(samples))[::-1]
    ranks = [max(1, -(-permille * len(values) // PERMILLE)) - 1 for permille in range(PERMILLE)]
    manifest = {
        "run": str(run), "columns": ["learnability"], "shards": len(shards.counts),
        "counts": {"scored": len(values)}, "top": values[ranks].tolist(), "digest": digest,
    }  # fmt: skip
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1))
    return name


def write_dynamics(
    out: Path,
    run: Path,
    shards: Shards,
    dynamics: Dynamics,
    sections: Mapping[str, npt.NDArray[np.int64]],
    name: str,
) -> None:
    """Write the page."""
    learnability = dynamics.learnability

    def describe_pair(i: int) -> dict[str, str]:
        shard, key = shards.locate(i)
        image = ""
        try:
            sample = shards.read(i)
            captions = [*chain.from_iterable(shards.selection.captions.captions_by_field(sample.fields))]
            text = captions[sample.caption_number] if captions else "no caption"
            image = base64.b64encode(encode_webp(decode_image(sample.image), _SIDE)).decode()
        except DataError as error:
            text = str(error)
        losses = f"loss {dynamics.first_loss[i]:.2f} → {dynamics.last_loss[i]:.2f}"
        facts = [f"{shard.rpartition('/')[2]}: {key}", f"learnability {learnability[i]:.3f}", losses]
        if dynamics.forgotten[i]:
            facts.append(f"forgotten {counted(int(dynamics.forgotten[i]), 'time')}")
        if dynamics.learned[i]:
            facts.append(f"learned at step {dynamics.learned_step[i]:,}")
        return {"text": printable(text, _CAPTION), "image": image, "facts": printable(" · ".join(facts), 200)}

    drawn = learnability[dynamics.draws > 0]
    counts, edges = np.histogram(drawn, _BARS)
    bins = zip([f"{edge:.3g}" for edge in edges[:-1]], counts.tolist(), strict=True)
    environment = templates(Path(__file__).parent.with_name("inspect") / "templates")
    often = f"{dynamics.draws.sum() / len(drawn):.1f} times on average"
    page = environment.get_template("dynamics.html").render(
        title=str(run),
        lead=f"{len(drawn):,} of {counted(len(shards), 'pair')} drawn, {often}",
        notes=[_recommend(name, sections)],
        chart={"title": "learnability of pairs", "bins": list(bins), "counts": counts.tolist()},
        sections=[(title, ids[:_SHOWN].tolist(), len(ids)) for title, ids in sections.items()],
        describe_pair=describe_pair,
    )
    write_page(out, page)
