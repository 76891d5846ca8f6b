"""Choose the colors of Image GPT from the images of shards: ``python -m data palette``.

They are the centers of k-means over pixels, as in Image GPT (Chen et al. 2020).
"""

from contextlib import suppress

import numpy as np
import torch
from numpy import typing as npt
from safetensors.torch import save
from sklearn.cluster import MiniBatchKMeans

from clipkit.errors import ConfigError, DataError
from clipkit.files import CountProgress, write_atomic
from clipkit.samples import decode_image
from clipkit.samples.remote import shard_cache
from data.options import PaletteOptions
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_all_shards

_PIXELS = 1 << 20  # over all images


def choose_palette(pixels: npt.NDArray[np.uint8], colors: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return (C, 3) colors in [-1, 1], sorted, of pixels (N, 3)."""
    different = len(np.unique(pixels, axis=0))
    if different < colors:
        raise ConfigError(f"--colors {colors}: the images have only {different:,} different colors")
    means = MiniBatchKMeans(colors, random_state=seed, batch_size=8192, n_init=3)
    means.fit(pixels.astype(np.float32) / 127.5 - 1)
    centers = np.clip(means.cluster_centers_, -1, 1)
    palette: npt.NDArray[np.float32] = centers[np.lexsort(centers.T)].astype(np.float32)
    return palette


def run_palette(options: PaletteOptions) -> int:
    """Run ``python -m data palette``."""
    out = options.out
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out} must be a file name ending in .safetensors")
    if out.exists():
        raise DataError(f"{out} already exists: name a new file, or remove it first")
    selection = Selection(need=("image",), image=options.image)
    files = find_all_shards(options.sources, split=options.split)
    cache = shard_cache(options.sources, options.cache_gb)
    shards = Shards(make_manifest([files], selection, cache=cache, stats=False), selection, cache=cache)
    count = min(len(shards), options.images)
    # evenly spaced samples
    numbers = [i for i in range(len(shards)) if i * count % len(shards) < count]
    random = np.random.default_rng(0)
    samples = []
    with CountProgress("reading images", total=count, shown=not options.quiet) as progress:
        for done, index in enumerate(numbers, 1):
            with suppress(DataError):
                pixels = decode_image(shards.read(index).image).reshape(-1, 3)
                samples.append(pixels[random.integers(0, len(pixels), max(1, _PIXELS // count))])
            progress.show(done, done - len(samples))
    if not samples:
        raise DataError("no image can be decoded")
    palette = choose_palette(np.concatenate(samples), options.colors)
    write_atomic(out, save({"palette": torch.from_numpy(palette)}))
    print(f"wrote {out}: {options.colors} colors of {len(samples):,} images")
    return 0
