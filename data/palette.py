"""Choose the colors of Image GPT from the images of shards: ``python -m data palette``.

They are the centers of k-means over pixels, as in Image GPT (Chen et al. 2020).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy import typing as npt
from safetensors.torch import save
from sklearn.cluster import MiniBatchKMeans

from clipkit.errors import ConfigError, DataError
from clipkit.files import CountProgress, write_atomic
from clipkit.samples import decode_image
from clipkit.samples.remote import shard_cache
from data.selection import SelectedShard, Selection
from data.shards.manifest import make_manifest
from data.sources import find_shards

_PIXELS = 1 << 20  # over all images


def palette_of(pixels: npt.NDArray[np.uint8], colors: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return (C, 3) colors in [-1, 1], sorted, of pixels (N, 3)."""
    different = len(np.unique(pixels, axis=0))
    if different < colors:
        raise ConfigError(f"--colors {colors}: the images have only {different:,} different colors")
    means = MiniBatchKMeans(colors, random_state=seed, batch_size=8192, n_init=3)
    means.fit(pixels.astype(np.float32) / 127.5 - 1)
    centers = np.clip(means.cluster_centers_, -1, 1)
    found: npt.NDArray[np.float32] = centers[np.lexsort(centers.T)].astype(np.float32)
    return found


def command(parsed: argparse.Namespace) -> int:
    """Run ``python -m data palette``."""
    out: Path = parsed.out
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out} must be a file name ending in .safetensors")
    if out.exists():
        raise DataError(f"{out} already exists: name a new file, or remove it first")
    selection = Selection(need=("image",))
    shards = [shard for source in parsed.sources for shard in find_shards(source, split=parsed.split)]
    cache = shard_cache(parsed.sources, parsed.cache_gb)
    manifest = make_manifest([shards], selection, cache=cache, stats=False)
    total = int(manifest.counts.sum())
    wanted = min(total, parsed.images)
    random = np.random.default_rng(0)

    def sampled() -> Iterator[npt.NDArray[np.uint8]]:
        first, read, bad = 0, 0, 0
        for file, count in zip(shards, manifest.counts.tolist(), strict=True):
            # every (total / wanted)-th sample
            numbers = [
                number - first for number in range(first, first + count) if number * wanted % total < wanted
            ]
            first += count
            if not numbers:
                continue
            shard = SelectedShard(file, selection, cache)
            for number in numbers:
                (data,) = shard.read(shard.row(number), (selection.image,))
                try:
                    pixels = decode_image(data or b"").reshape(-1, 3)
                except DataError:
                    bad += 1
                else:
                    yield pixels[random.integers(0, len(pixels), max(1, _PIXELS // wanted))]
                read += 1
                progress.show(read, bad)

    with CountProgress("reading images", total=wanted, shown=not parsed.quiet) as progress:
        found = [*sampled()]
    if not found:
        raise DataError("no image can be decoded")
    palette = palette_of(np.concatenate(found), parsed.colors)
    write_atomic(out, save({"palette": torch.from_numpy(palette)}))
    print(f"wrote {out}: {parsed.colors} colors of {len(found):,} images")
    return 0
