"""Tests of batches on the device: in order, one ahead on a GPU, and errors are raised at their own step."""

import io
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipkit.batch import BadSample
from clipkit.model.tokenizer import ClipTokenizer
from data.loader import BatchError, DeviceBatches, InputSeconds, Loader, LoaderBatch
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record

CPU = torch.device("cpu")
BATCH, STEPS = 4, 8


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shards(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder: Path = tmp_path_factory.mktemp("pairs") / "set"
    with DatasetWriter(folder, samples_per_shard=7) as writer:
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            file = io.BytesIO()
            # colors at full resolution: decoders differ in how they enlarge others
            Image.fromarray(pixels).save(file, "jpeg", subsampling=0)
            caption = "word " * (number % 5) + str(number)
            writer.write(
                "train", Record(key=f"{number:02d}", image=file.getvalue(), extension="jpg", caption=caption)
            )
        writer.finish({})
    return Shards.of(find_shards(str(folder)))


def make_loader(shards: Shards, **more: Any) -> Loader:
    order = Order(shards.counts, seed=1, batch_size=BATCH)
    return Loader(shards=shards, order=order, image_size=32, tokenize=ClipTokenizer(), **more)


def same(one: LoaderBatch, other: LoaderBatch) -> bool:
    tensors = zip((*one.tensors(), one.ids), (*other.tensors(), other.ids), strict=True)
    return all(torch.equal(a.cpu(), b) for a, b in tensors) and one.lengths == other.lengths


BAD = (BadSample(shard="0.tar", key="a", cause="empty"),)


class Scripted(Loader):
    """Returns given batches, raises given errors, and records the calls."""

    given: list[LoaderBatch | Exception]
    asked: list[int]

    def batches(self, start: int, stop: int) -> Iterator[LoaderBatch]:
        for number, one in enumerate(self.given):
            self.asked.append(number)
            if isinstance(one, Exception):
                raise one
            yield one


def scripted(shards: Shards, given: list[LoaderBatch | Exception]) -> Scripted:
    order = Order(shards.counts, seed=1, batch_size=BATCH)
    loader = Scripted(shards=shards, order=order, image_size=32, tokenize=ClipTokenizer())
    object.__setattr__(loader, "given", given)
    object.__setattr__(loader, "asked", [])
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_cpu_batches_equal_those_of_the_loader(workers: int, shards: Shards) -> None:
    loader = make_loader(shards, num_workers=workers)
    before = set(threading.enumerate())
    batches = DeviceBatches(loader, 2, STEPS, CPU)
    found = list(batches)
    if not workers:  # threads of torch's loader may take a moment to exit
        assert set(threading.enumerate()) <= before
    assert len(found) == STEPS - 2
    assert all(map(same, found, loader.batches(2, STEPS)))
    assert next(batches, None) is None
    assert multiprocessing.active_children() == []


def test_cpu_batches_are_not_copied_or_prefetched(shards: Shards) -> None:
    given = list(make_loader(shards).batches(0, 3))
    loader = scripted(shards, [*given, BatchError("broken", BAD)])
    batches = DeviceBatches(loader, 0, 4, CPU)
    for number, one in enumerate(given):
        assert next(batches) is one
        batches.prefetch()
        assert loader.asked == list(range(number + 1))
    check_placeholders(batches, loader)


def check_placeholders(batches: DeviceBatches, loader: Scripted) -> None:
    """Check what follows the batches of steps 0 to 2: bad samples are stated once."""
    first, second = next(batches), next(batches)
    batches.prefetch()
    assert first.fault == second.fault == "broken" and loader.asked == [0, 1, 2, 3]
    assert first.bad == BAD and second.bad == ()
    ids = loader.order.batch(3, rank=0, world_size=1).ids
    assert first.ids.tolist() == second.ids.tolist() == ids.tolist()


def test_jpegs_are_decoded_later(shards: Shards) -> None:
    pytest.importorskip("torchcodec")
    loader = make_loader(shards)
    batches = DeviceBatches(replace(loader, decode_later=True), 0, STEPS, CPU)
    assert all(map(same, batches, loader.batches(0, STEPS)))
    spent = batches.seconds()
    assert spent.waiting > 0 and spent.transfer > 0


def test_waiting_time_is_measured_and_reset(shards: Shards) -> None:
    batches = DeviceBatches(Slow(**vars_of(make_loader(shards))), 0, 3, CPU)
    next(batches)
    next(batches)
    spent = batches.seconds()
    assert 0.1 <= spent.waiting < 5 and spent.transfer < 0.05
    assert batches.seconds() == InputSeconds()


class Slow(Loader):
    """Takes 50 ms per batch."""

    def batch(self, step: int) -> LoaderBatch:
        time.sleep(0.05)
        return super().batch(step)


def vars_of(loader: Loader) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if name != "_tokenizers"}


def test_close_stops_the_workers(shards: Shards) -> None:
    batches = DeviceBatches(make_loader(shards, num_workers=2), 0, 1000, CPU)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


class StandIn:
    """Replaces CUDA streams and events, and records the calls."""

    log: list[str]

    def __init__(self, *arguments: object, **more: object) -> None:
        pass

    def record(self, stream: object) -> None:
        self.log.append("record")

    def wait_event(self, event: object) -> None:
        self.log.append("wait")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 500.0  # milliseconds


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the code path for GPUs without a GPU."""
    StandIn.log = []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, StandIn)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", StandIn)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: StandIn.log.append("keep"))
    monkeypatch.setattr(Loader, "on_device", lambda loader, batch, step, device: batch)
    monkeypatch.setattr(LoaderBatch, "to", lambda batch, device: batch)
    return StandIn.log


def test_streams_prefetch_one_batch_and_errors_keep_their_step(shards: Shards, log: list[str]) -> None:
    given = list(make_loader(shards).batches(0, 3))
    loader = scripted(shards, [*given, BatchError("broken", BAD)])
    batches = DeviceBatches(loader, 0, 5, torch.device("cuda"))
    assert loader.asked == []
    for number, one in enumerate(given):
        assert next(batches) is one
        assert loader.asked == list(range(number + 1))
        batches.prefetch()  # once the computation is launched
        batches.prefetch()  # does nothing
        assert loader.asked == list(range(number + 2))
        assert log.count("wait") == 1 and log.count("keep") == len(one.tensors())
        assert log.count("record") == (4, 2, 0)[number]  # for the next transfer; at first for two
        log.clear()
    assert batches.seconds().transfer == 3 * 0.5
    check_placeholders(batches, loader)
    assert log == []


def test_streams_stop_after_the_last_batch(shards: Shards, log: list[str]) -> None:
    loader = make_loader(shards)
    batches = DeviceBatches(loader, 0, STEPS, torch.device("cuda"))
    assert all(map(same, batches, loader.batches(0, STEPS)))
    assert next(batches, None) is None
    batches.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_gpu_prefetches_one_batch(pin: bool, workers: int, shards: Shards) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    loader = make_loader(shards, num_workers=workers, pin_memory=pin)
    device = torch.device("cuda", torch.cuda.current_device())
    batches = DeviceBatches(loader, 0, STEPS, device)
    expected = list(make_loader(shards).batches(0, STEPS))
    busy = torch.randn(2048, 2048, device=device)
    kept = []
    for batch, other in zip(batches, expected, strict=True):
        batches.prefetch()
        for _ in range(20):  # computation lags behind, so that memory freed too early would be overwritten
            busy = busy @ busy / 2048
        kept.append((batch.images.float().sum() + 0 * busy.sum().nan_to_num(), other.images.float().sum()))
        assert all(tensor.device == device for tensor in batch.tensors()) and batch.ids.device.type == "cpu"
        del batch
    assert all(abs(one.item() - two.item()) <= 1e-4 * two.item() for one, two in kept)
    torch.cuda.synchronize()
    assert batches.seconds().transfer > 0
    assert all(
        same(DeviceBatch, two)
        for DeviceBatch, two in zip(DeviceBatches(loader, 0, STEPS, device), expected, strict=True)
    )


@pytest.mark.gpu
def test_gpu_error_takes_effect_at_its_step(shards: Shards) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    given = list(make_loader(shards).batches(0, 3))
    loader = scripted(shards, [*given, BatchError("broken", BAD)])
    batches = DeviceBatches(loader, 0, 4, torch.device("cuda"))
    for number in range(3):
        assert same(next(batches), given[number])
        batches.prefetch()
        assert loader.asked == list(range(number + 2))
    check_placeholders(batches, loader)


@pytest.mark.gpu
def test_gpu_decodes_jpegs_during_computation(shards: Shards) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("torchcodec")
    loader = make_loader(shards)
    device = torch.device("cuda")
    later = DeviceBatches(replace(loader, decode_later=True), 0, STEPS, device)
    for batch, other in zip(later, loader.batches(0, STEPS), strict=True):
        apart = (batch.images.int() - other.images.to(device).int()).abs().float()
        assert batch.undecoded is None and apart.mean() < 1
