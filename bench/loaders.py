"""Compare clipkit's loader with other loaders on the same JPEGs, in images per second.

    python -m bench.loaders [--photos FOLDER] [--rounds 5] [--sizes 256 512 1024] [--seconds 1.5]

The shards are those of ``bench.decode``. Each loader makes batches of 32 random crops of 224 pixels (90% of the
area or more, bicubic with antialiasing), endlessly, each in a process of its own. Missing libraries are skipped.
Each round measures all loaders in alternating order, after the first batches:

    one core                images per second of CPU time on one core, without workers or with one thread
    two workers, per core   images per second of CPU time of all processes, with two worker processes or threads
    two workers             images per second of wall time, with the same

    clipkit                 ``data.loader.Loader``: simplejpeg, torch; uint8
    clipkit, scaled         the same with ``data.scaled_decode``
    open_clip               ``get_wds_dataset`` and its transform: webdataset, Pillow, torchvision; float32
    webdataset, simplejpeg  webdataset, simplejpeg, torchvision v2; uint8
    webdataset, torchcodec  the same with torchcodec's ``decode_jpeg``
    streaming               mosaicml-streaming of shards converted to MDS, simplejpeg, torchvision v2; uint8
    spdl, FFmpeg            threads; FFmpeg decodes, crops and resizes; uint8
    spdl, simplejpeg        threads; simplejpeg, torch; uint8
    datago                  threads in Rust; reads extracted files, because it reads tars over HTTP only; the center
                            instead of a random crop; uint8
    dali                    NVIDIA DALI without a GPU: threads in C++, decodes only the crop; uint8

Bounds: ``decode`` is simplejpeg alone on JPEGs in memory, ``decode, resize`` also cuts and resizes with torch.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads

import argparse
import json
import multiprocessing
import platform
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count as count_from, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.decode import (
    BATCH,
    CROP_SCALE,
    RESULTS,
    clipkit_batches,
    open_clip_batches,
    photographs,
    write_shards,
)
from data.augment import Augmentation, draw_recipe, random_of

SIDE = 224
ENDLESS = BATCH * 10**6
SKIPPED = 8  # batches before the measurement
SHUFFLED = 256  # samples in buffers that shuffle
ASPECT = (3 / 4, 4 / 3)
AUGMENTATION = Augmentation(crop_scale=CROP_SCALE)
Batches = Iterator[Any]


def read_jpegs(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if member.name.endswith("jpg") and file is not None:
                    yield file.read()


def torch_crop() -> Callable[[Tensor], Tensor]:
    from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop

    crop: Any = RandomResizedCrop(
        SIDE, scale=(CROP_SCALE, 1), interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return crop  # type: ignore[no-any-return]


def decode_with_simplejpeg(data: bytes) -> Tensor:
    # channels last, for which torch resizes bytes fastest
    return torch.from_numpy(simplejpeg.decode_jpeg(data, colorspace="RGB")).permute(2, 0, 1)


def decode_with_torchcodec(data: bytes) -> Tensor:
    from torchcodec.decoders import decode_jpeg

    pixels: Tensor = decode_jpeg(data)
    return pixels


def cut_and_resize(data: bytes) -> Tensor:
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    height, width, _ = pixels.shape
    top, left, height, width = draw_recipe(height, width, AUGMENTATION, random_of(len(data))).box
    cut = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    return torch.nn.functional.interpolate(
        torch.from_numpy(cut)[None].permute(0, 3, 1, 2),
        size=[SIDE, SIDE],
        mode="bicubic",
        align_corners=False,
        antialias=True,
    )[0]


def bound_batches(folder: Path, workers: int, call: Callable[[bytes], object]) -> Batches:
    jpegs = list(read_jpegs(folder))
    for start in count_from(0, BATCH):
        yield [call(jpegs[i % len(jpegs)]) for i in range(start, start + BATCH)]


def clipkit_loader(folder: Path, workers: int, *, scaled: bool = False) -> Batches:
    return clipkit_batches(folder, ENDLESS, SIDE, scaled=scaled, workers=workers)


def open_clip_loader(folder: Path, workers: int) -> Batches:
    return open_clip_batches(folder, ENDLESS, SIDE, workers=workers)


def webdataset_loader(folder: Path, workers: int, decode: Callable[[bytes], Tensor]) -> Batches:
    import webdataset

    crop = torch_crop()
    dataset = webdataset.WebDataset(
        sorted(map(str, folder.glob("*.tar"))), shardshuffle=False, nodesplitter=None, empty_check=False
    )
    pixels = dataset.shuffle(SHUFFLED).map(lambda sample: crop(decode(sample["jpg"])))
    return iter(DataLoader(pixels.with_epoch(ENDLESS), batch_size=BATCH, num_workers=workers))


def streaming_loader(folder: Path, workers: int) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    crop = torch_crop()

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return crop(decode_with_simplejpeg(super().__getitem__(at)["jpg"]))

    local = folder / "mds"
    if not local.exists():
        with MDSWriter(out=str(local), columns={"jpg": "bytes"}) as writer:
            for data in read_jpegs(folder):
                writer.write({"jpg": data})
    images = Images(
        local=str(local), shuffle=True, batch_size=BATCH, epoch_size=ENDLESS // 1000, num_canonical_nodes=1
    )
    return iter(DataLoader(images, batch_size=BATCH, num_workers=workers))


def spdl_loader(folder: Path, workers: int, load: Callable[[bytes], Any]) -> Batches:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def source() -> Iterator[bytes]:
        while True:
            for path in sorted(folder.glob("*.tar")):
                with path.open("rb") as file:
                    for name, data in spdl.io.iter_tarfile(file):
                        if name.endswith("jpg"):
                            yield bytes(data)

    builder: Any = PipelineBuilder().add_source(source())
    builder = builder.pipe(load, concurrency=max(1, workers)).aggregate(BATCH)
    if load is cut_and_resize:
        builder = builder.pipe(torch.stack)
    else:
        builder = builder.pipe(lambda frames: spdl.io.to_torch(spdl.io.convert_frames(frames)))
    pipeline = builder.add_sink(2).build(num_threads=max(1, workers))
    with pipeline.auto_stop():
        yield from pipeline


def load_with_ffmpeg(data: bytes) -> Any:
    import spdl.io

    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    top, left, high, wide = draw_recipe(height, width, AUGMENTATION, random_of(len(data))).box
    change = f"crop={wide}:{high}:{left}:{top}:exact=1,scale={SIDE}:{SIDE}:flags=bicubic,format=rgb24"
    return spdl.io.decode_packets(spdl.io.demux_image(data), filter_desc=change)


def datago_loader(folder: Path, workers: int) -> Batches:
    from datago import DatagoClient

    files = folder / "files"
    if not files.exists():
        files.mkdir()
        for i, data in enumerate(read_jpegs(folder)):
            (files / f"{i:06d}.jpg").write_bytes(data)
    crop = {
        "crop_and_resize": True,
        "default_image_size": SIDE,
        "downsampling_ratio": SIDE,
        "min_aspect_ratio": 1.0,
        "max_aspect_ratio": 1.0,
        "pre_encode_images": False,
    }
    options = {
        "source_type": "file",
        "source_config": {"root_path": str(files), "random_sampling": False, "rank": 0, "world_size": 1},
        "image_config": crop,
        "limit": ENDLESS,
        "prefetch_buffer_size": 2 * BATCH,
        "samples_buffer_size": 2 * BATCH,
    }

    def samples() -> Iterator[npt.NDArray[np.uint8]]:
        while True:  # an epoch
            client = DatagoClient(json.dumps(options))
            client.start()
            while (sample := client.get_sample()) is not None:
                yield np.asarray(sample.image)
            client.stop()

    images = samples()
    while True:
        yield np.stack([*islice(images, BATCH)])


def dali_loader(folder: Path, workers: int) -> Batches:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=max(1, workers), device_id=None)  # type: ignore[untyped-decorator]
    def crops() -> Any:
        jpegs = fn.readers.webdataset(
            paths=sorted(map(str, folder.glob("*.tar"))),
            ext=["jpg"],
            random_shuffle=True,
            initial_fill=SHUFFLED,
        )
        images = fn.decoders.image_random_crop(
            jpegs, device="cpu", random_area=[CROP_SCALE, 1], random_aspect_ratio=ASPECT
        )
        return fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_CUBIC, antialias=True)

    pipeline = crops()
    pipeline.build()
    while True:
        yield pipeline.run()[0].as_array()


# by name: the library that must be installed, and the function that makes batches
LOADERS: dict[str, tuple[str, Callable[[Path, int], Batches]]] = {
    "decode": ("simplejpeg", partial(bound_batches, call=decode_with_simplejpeg)),
    "decode, resize": ("simplejpeg", partial(bound_batches, call=cut_and_resize)),
    "clipkit": ("clipkit", clipkit_loader),
    "clipkit, scaled": ("clipkit", partial(clipkit_loader, scaled=True)),
    "open_clip": ("open_clip", open_clip_loader),
    "webdataset, simplejpeg": ("webdataset", partial(webdataset_loader, decode=decode_with_simplejpeg)),
    "webdataset, torchcodec": ("torchcodec", partial(webdataset_loader, decode=decode_with_torchcodec)),
    "streaming": ("streaming", streaming_loader),
    "spdl, FFmpeg": ("spdl", partial(spdl_loader, load=load_with_ffmpeg)),
    "spdl, simplejpeg": ("spdl", partial(spdl_loader, load=cut_and_resize)),
    "datago": ("datago", datago_loader),
    "dali": ("nvidia", dali_loader),
}
COLUMNS = ("one core", "two workers, per core", "two workers")
BOUNDS = ("decode", "decode, resize")
OURS = ("clipkit", "clipkit, scaled")
PACKAGES = (
    "open_clip_torch",
    "webdataset",
    "torch",
    "torchvision",
    "torchcodec",
    "simplejpeg",
    "mosaicml-streaming",
    "spdl",
    "datago",
    "nvidia-dali-cuda130",
)


def read_cpu_time() -> float:
    """Read the CPU seconds of this process and its workers."""
    ticks = 0
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure_rate(
    name: str, folder: Path, workers: int, cores: Iterable[int], seconds: float
) -> tuple[float, float]:
    """Measure images per second of CPU time and of wall time."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores)
    os.environ["DATAGO_MAX_TASKS"] = str(max(1, workers))
    batches = LOADERS[name][1](folder, workers)
    for batch in islice(batches, SKIPPED):
        assert len(batch) == BATCH, len(batch)
    images = 0
    began = time.perf_counter()
    began_cpu = read_cpu_time()
    while time.perf_counter() - began < seconds:
        images += len(next(batches))
    rates = images / (read_cpu_time() - began_cpu), images / (time.perf_counter() - began)
    if hasattr(batches, "close"):
        batches.close()
    return rates


def measure_size(folder: Path, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")  # this process has imported what most of them need
    pools = {name: ProcessPoolExecutor(1, mp_context=context) for name in names}
    rates: dict[str, dict[str, list[float]]] = {column: {} for column in COLUMNS}
    for i in range(options.rounds):
        for name in names[:: -1 if i % 2 else 1]:
            for workers in (0,) if name in BOUNDS else (0, 2):
                used = cores[: max(1, workers)]
                call = pools[name].submit(measure_rate, name, folder, workers, used, options.seconds)
                per_core, per_second = call.result()
                if workers:
                    rates["two workers, per core"].setdefault(name, []).append(per_core)
                    rates["two workers"].setdefault(name, []).append(per_second)
                else:
                    rates["one core"].setdefault(name, []).append(per_core)
            latest = ", ".join(f"{values[name][-1]:.0f}/s" for values in rates.values() if name in values)
            print(f"  round {i + 1}, {name}: {latest}", flush=True)
    for pool in pools.values():
        pool.shutdown()
    result: dict[str, Any] = {}
    for column, by_name in rates.items():
        ratios = {
            name: [ours / peer for ours, peer in zip(by_name["clipkit"], values, strict=True)]
            for name, values in by_name.items()
        }
        result[column] = {
            "images_per_second": {name: statistics.median(values) for name, values in by_name.items()},
            "clipkit_relative_to": {
                name: [statistics.median(values), min(values), max(values)] for name, values in ratios.items()
            },
            "rounds": by_name,
        }
    return result


def find_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--names", nargs="+", choices=LOADERS, default=list(LOADERS))
    options = parser.parse_args()
    names = [name for name in options.names if find_spec(LOADERS[name][0]) is not None]
    photos = photographs(options.photos)
    sizes: dict[str, Any] = {}
    path = RESULTS / "loaders.json"
    if path.exists():  # sizes may be measured in separate runs
        sizes = json.loads(path.read_text())["sizes"]
    for size in options.sizes:
        print(f"{size} px")
        with tempfile.TemporaryDirectory() as folder:
            count, _ = write_shards(Path(folder), list(photos.values()), size)
            sizes[str(size)] = {"samples": count, **measure_size(Path(folder), names, options)}
    result = {
        "image_size": SIDE,
        "batch_size": BATCH,
        "crop_scale": CROP_SCALE,
        "machine": platform.processor() or platform.machine(),
        "versions": find_versions(),
        "sizes": sizes,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    for column in COLUMNS:
        print(column)
        for name in names:
            columns = [
                f"{sizes[str(size)][column]['images_per_second'].get(name, 0):7.0f}/s"
                for size in options.sizes
            ]
            print(f"  {name:24}{''.join(columns)}")


if __name__ == "__main__":
    main()
