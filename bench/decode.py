"""Measure reading and decoding on one core, relative to open_clip's training pipeline on the same tars.

    python -m bench.decode [--photos FOLDER] [--rounds 7] [--sizes 256 512 1024] [--image-size 224]

Shards have img2dataset's layout (jpg, txt, json). Their JPEGs are random square crops of photographs, resized
to each size and stored with qualities from 90 to 95. The photographs are scikit-learn's two, or the JPEGs of
a folder (the committed result used /usr/share/backgrounds/mate/nature from Debian's package
mate-backgrounds). Each round measures, in alternating order and in CPU seconds of one core:

    open_clip   its own ``get_wds_dataset`` with its own training transform (random crop of 90% or more, bicubic),
                without workers: webdataset, Pillow, torchvision; float32 batches
    clipkit     ``data.loader.Loader`` without workers, the same kind of crop; uint8 batches
    scaled      the same with ``scaled_decode``

Neither side tokenizes. Ratios are medians over rounds. Bounds: clipkit cannot be faster than libjpeg-turbo, so the
CPU time of decoding alone is also measured, and that of resizing alone (torch).

The effect of scaled decoding on pixels is measured on square photographs, resized to 1024 and 2048 pixels if
they are large enough (otherwise four are tiled): the mean absolute difference of levels in 0-255 and the PSNR
relative to full decoding, for random crops, which are rounded to the smaller image, and for the center crop,
which needs little rounding.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads

import argparse
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import open_clip
import PIL
import simplejpeg
import torch
import torchvision
import webdataset
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from clipkit.samples import decode_image
from clipkit.samples.remote import ShardFile
from data.augment import Augmentation, empty_batch, random_of, training_pixels
from data.loader import Loader
from data.order import Order
from data.shards.samples import Shards

RESULTS = Path(__file__).parent / "results"
BATCH, SHARDS = 32, 2
PIXELS_PER_SIZE = 64 << 20  # gives every size about the same duration
CROP_SCALE = 0.9  # open_clip's default
TOKENS = 77
NAMES = ("open_clip", "clipkit", "scaled")


def photographs(folder: Path | None) -> dict[str, Image.Image]:
    if folder is None:
        sample = load_sample_images()
        return {
            Path(name).name: Image.fromarray(image)
            for name, image in zip(sample.filenames, sample.images, strict=True)
        }
    photos = {path.name: Image.open(path).convert("RGB") for path in sorted(folder.glob("*.jpg"))}
    if not photos:
        raise SystemExit(f"{folder} has no .jpg files")
    return photos


def jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def square(photo: Image.Image, left: int, top: int, side: int, size: int) -> Image.Image:
    cut = photo.crop((left, top, left + side, top + side))
    return cut.resize((size, size), Image.Resampling.BICUBIC)


def write_shards(folder: Path, photos: Sequence[Image.Image], size: int) -> tuple[int, list[bytes]]:
    """Write shards of random crops; return the number of samples and the JPEGs of the first batch."""
    draw = np.random.default_rng(size)
    count = min(1024, max(BATCH, PIXELS_PER_SIZE // size**2 // (BATCH * SHARDS) * BATCH * SHARDS))
    first: list[bytes] = []
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard:05d}.tar"), encoder=False) as tar:
            for i in range(shard * count // SHARDS, (shard + 1) * count // SHARDS):
                photo = photos[i % len(photos)]
                side = int(draw.integers(min(photo.size) * 3 // 4, min(photo.size) + 1))
                left, top = (int(draw.integers(0, length - side + 1)) for length in photo.size)
                data = jpeg(square(photo, left, top, side, size), int(draw.integers(90, 96)))
                meta = {
                    "caption": f"photograph {i}",
                    "key": f"{i:09d}",
                    "width": size,
                    "height": size,
                }
                tar.write(
                    {
                        "__key__": f"{i:09d}",
                        "jpg": data,
                        "txt": f"photograph {i}".encode(),
                        "json": json.dumps(meta).encode(),
                    }
                )
                first += [data] if len(first) < BATCH else []
    return count, first


@cache
def open_clip_data() -> Any:
    """Import open_clip's training data module."""
    if find_spec("pandas") is None:  # imported by open_clip, but only used for tables
        sys.modules["pandas"] = ModuleType("pandas")
    data: Any = import_module("open_clip_train.data")
    expander = webdataset.tariterators.tar_file_expander
    # webdataset 1.0 also yields end-of-shard markers, which open_clip 3.3 mistakes for files
    data.tar_file_expander = lambda *args, **named: (
        one for one in expander(*args, **named) if "fname" in one
    )
    return data


def open_clip_batches(folder: Path, count: int, image_size: int, *, workers: int = 0) -> Iterator[Tensor]:
    options = Namespace(
        train_data=str(folder / f"{{00000..{SHARDS - 1:05d}}}.tar"),
        train_num_samples=count,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=BATCH,
        workers=workers,
        world_size=1,
    )
    zeros = torch.zeros(1, TOKENS, dtype=torch.long)
    transform = open_clip.image_transform(image_size, is_train=True)
    loader = (
        open_clip_data()
        .get_wds_dataset(options, transform, is_train=True, tokenizer=lambda _: zeros)
        .dataloader
    )
    return (images for images, _ in loader)


def clipkit_batches(
    folder: Path, count: int, image_size: int, *, scaled: bool, workers: int = 0
) -> Iterator[Tensor]:
    shards = Shards.of([ShardFile.at(path) for path in sorted(folder.glob("*.tar"))])
    loader = Loader(
        shards=shards,
        order=Order(shards.counts, seed=0, batch_size=BATCH),
        image_size=image_size,
        tokenize=lambda texts: torch.zeros(len(texts), TOKENS, dtype=torch.long),
        augmentation=Augmentation(crop_scale=CROP_SCALE, scaled_decode=scaled),
        num_workers=workers,
    )
    return (batch.images for batch in loader.batches(0, count // BATCH))


def timed(batches: Iterator[Tensor], count: int, image_size: int) -> float:
    """Measure CPU milliseconds per image."""
    began = time.process_time()
    seen = 0
    for images in batches:
        assert images.shape == (BATCH, 3, image_size, image_size)
        seen += len(images)
    took = time.process_time() - began
    assert seen == count
    return 1e3 * took / count


def alone(work: Callable[[int], object], count: int) -> float:
    """Measure CPU milliseconds per call, after one warm-up call."""
    work(0)
    began = time.process_time()
    for i in range(count):
        work(i)
    return 1e3 * (time.process_time() - began) / count


def bounds(jpegs: list[bytes], image_size: int) -> dict[str, float]:
    """Measure CPU milliseconds per image of the library calls alone."""
    arrays = [decode_image(data) for data in jpegs[:8]]
    tensors = [torch.from_numpy(array)[None].permute(0, 3, 1, 2) for array in arrays]

    def resize(i: int) -> None:
        torch.nn.functional.interpolate(
            tensors[i % 8], size=[image_size] * 2, mode="bicubic", align_corners=False, antialias=True
        )

    return {
        "simplejpeg": alone(lambda n: simplejpeg.decode_jpeg(jpegs[n], colorspace="RGB"), len(jpegs)),
        "simplejpeg_at_half": alone(lambda n: decode_image(jpegs[n], reduce=2), len(jpegs)),
        "torch_resize": alone(resize, len(jpegs)),
    }


def measure(folder: Path, photos: Sequence[Image.Image], size: int, options: Namespace) -> dict[str, Any]:
    count, jpegs = write_shards(folder, photos, size)
    side = options.image_size

    def batches(name: str) -> Iterator[Tensor]:
        if name == "open_clip":
            return open_clip_batches(folder, count, side)
        return clipkit_batches(folder, count, side, scaled=name == "scaled")

    for name in NAMES:
        next(batches(name))  # one-time initialization
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    parts = []
    for i in range(options.rounds):
        for name in sorted(NAMES, reverse=bool(i % 2)):
            times[name].append(timed(batches(name), count, side))
        parts.append(bounds(jpegs, side))
        took = ", ".join(f"{name} {taken[-1]:.2f} ms" for name, taken in times.items())
        print(f"{size} px, round {i + 1}: {took}", flush=True)
    ratios = {
        name: [reference / own for reference, own in zip(times["open_clip"], times[name], strict=True)]
        for name in NAMES[1:]
    }
    decoding = [part["simplejpeg"] for part in parts]
    return {
        "samples": count,
        "bytes_a_jpeg": statistics.fmean(map(len, jpegs)),
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_range": {name: [min(values), max(values)] for name, values in ratios.items()},
        "ratio_if_only_decoding_took_time": statistics.median(
            reference / part for reference, part in zip(times["open_clip"], decoding, strict=True)
        ),
        "pictures_per_second": {name: 1e3 / statistics.median(taken) for name, taken in times.items()},
        "cpu_ms_per_picture": times,
        "cpu_ms_of_libraries_alone": {
            name: statistics.median(part[name] for part in parts) for name in parts[0]
        },
    }


def whole_squares(photos: dict[str, Image.Image], size: int) -> dict[str, Image.Image]:
    """Return center squares of photographs that are large enough; otherwise mosaics of four at half the size."""
    whole = {}
    for name, photo in photos.items():
        side = min(photo.size)
        if side >= size:
            whole[name] = square(photo, (photo.width - side) // 2, (photo.height - side) // 2, side, size)
    if whole:
        return whole
    halves = list(whole_squares(photos, size // 2).items()) if size > 256 else []
    for first in range(0, len(halves) - 3, 4):
        mosaic = Image.new("RGB", (size, size))
        for place, (_, photo) in enumerate(halves[first : first + 4]):
            mosaic.paste(
                photo.resize((size // 2, size // 2)), (place % 2 * size // 2, place // 2 * size // 2)
            )
        whole[" + ".join(name for name, _ in halves[first : first + 4])] = mosaic
    return whole


def fidelity(photos: dict[str, Image.Image], size: int, image_size: int) -> dict[str, Any] | None:
    """Measure how scaled decoding changes pixels."""
    out = empty_batch(2, image_size)
    squares = whole_squares(photos, size)
    if not squares:
        return None
    result: dict[str, Any] = {"pictures": list(squares)}
    for crop, scale in (("random crops", CROP_SCALE), ("the centre", 1.0)):
        differences, psnr = [], []
        for number, photo in enumerate(squares.values()):
            data = jpeg(photo, 92)
            for draw in range(4):
                for row, scaled in enumerate((False, True)):
                    augmentation = Augmentation(crop_scale=scale, scaled_decode=scaled)
                    random = random_of(number, draw)
                    training_pixels(
                        data, image_size=image_size, augmentation=augmentation, random=random, out=out[row]
                    )
                change = (out[0].int() - out[1].int()).double()
                differences.append(float(change.abs().mean()))
                psnr.append(10 * float(torch.log10(255**2 / (change**2).mean())))
        result[crop] = {
            "mean_absolute_difference": statistics.fmean(differences),
            "largest_mean_absolute_difference": max(differences),
            "median_psnr": statistics.median(psnr),
            "least_psnr": min(psnr),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    photos = photographs(options.photos)
    fidelities = {size: fidelity(photos, size, options.image_size) for size in (1024, 2048)}
    sizes = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            sizes[size] = measure(Path(folder), list(photos.values()), size, options)
    result = {
        "photographs": {name: list(photo.size) for name, photo in photos.items()},
        "image_size": options.image_size,
        "batch_size": BATCH,
        "crop_scale": CROP_SCALE,
        "cores": 1,
        "machine": platform.processor() or platform.machine(),
        "versions": {
            one.__name__: one.__version__
            for one in (open_clip, webdataset, PIL, torchvision, torch, simplejpeg)
            if hasattr(one, "__version__")
        },
        "sizes": sizes,
        "fidelity_of_scaled_decoding": fidelities,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "decode.json").write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{'pixels':>6} {'kB':>5}"
        + "".join(f"{name + '/s':>13}" for name in NAMES)
        + "   ratio (range), scaled (range)"
    )
    for size, one in sizes.items():
        rates = "".join(f"{one['pictures_per_second'][name]:13.0f}" for name in NAMES)
        ratios = ", ".join(
            f"{one['ratio'][name]:.2f} ({low:.2f} to {high:.2f})"
            for name, (low, high) in one["ratio_range"].items()
        )
        print(
            f"{size:6} {one['bytes_a_jpeg'] / 1e3:5.0f}{rates}   {ratios}; "
            f"at most {one['ratio_if_only_decoding_took_time']:.2f}"
        )
    print(json.dumps(fidelities, indent=2))


if __name__ == "__main__":
    main()
