"""Trainings on stored features of locked backbones (``lock.store``)."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clipkit
from clipkit.errors import DataError
from clipkit.samples import Decoding
from data.augment import Augmentation
from data.backbone import FeatureStore
from data.shards.samples import Sample, Shards, find_shards
from eval import Encoder, Subject, evaluate, open_datasets, read_results
from tests.small_trainings import (
    Trainings,
    checkpoint,
    digests,
    error_of,
    metrics,
    pairs,
    process_of,
    trainings,
    wait_until,
    write_pairs,
)

__all__ = ["pairs", "trainings"]  # fixtures

BACKBONES = ("lock.image=backbone", "lock.text=backbone")
STORED = (*BACKBONES, "lock.store=true")
TWO_EPOCHS = "steps=24"


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def stores(trainings: Trainings) -> set[Path]:
    return set((trainings.pairs.parent / "cache" / "backbone").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "locked",
    [
        BACKBONES,
        ("lock.image=all",),
        ("lock.text=backbone", "loss.name=siglip"),
        (
            *BACKBONES,
            "data.caption_choice=random",
            'data.captions=["txt"]',
            'data.caption_templates=["a {}", "b {}"]',
        ),
    ],
)
def test_stored_features_train_the_same_model(
    trainings: Trainings, tmp_path: Path, locked: tuple[str, ...]
) -> None:
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    trainings.run(plain, TWO_EPOCHS, *locked)
    views = ("lock.views=2",) if any("image" in setting for setting in locked) else ()
    said = trainings.run(stored, TWO_EPOCHS, *locked, "lock.store=true", *views)
    assert "lock.store: features of" in said
    # a tower that is trained amplifies the rounding of another batch size in each step
    tolerance = 1e-5 if locked[:2] == BACKBONES else 1e-3
    assert losses(stored) == pytest.approx(losses(plain), abs=tolerance)
    assert losses(stored)[0] == pytest.approx(losses(plain)[0], abs=1e-6)
    if locked[:2] == BACKBONES:
        weights = load_file(checkpoint(plain, 24) / "model.safetensors")
        for name, value in load_file(checkpoint(stored, 24) / "model.safetensors").items():
            assert value.allclose(weights[name], atol=2e-5), name


@pytest.mark.slow
def test_features_are_stored_once_and_depend_on_weights_and_crops(
    trainings: Trainings, tmp_path: Path
) -> None:
    before = stores(trainings)
    trainings.run(tmp_path / "a", "steps=2", *STORED, "seed=5")
    (store,) = stores(trainings) - before
    written = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    trainings.run(tmp_path / "b", "steps=2", *STORED, "seed=5", "optim.lr=1e-2")
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == written
    for other in ("data.crop_scale=0.5", "lock.views=3", "model.context_length=10", "data.caption_prefix=x"):
        known = stores(trainings)
        trainings.run(tmp_path / other, "steps=1", *STORED, "seed=5", other)
        assert len(stores(trainings) - known) == 1, other
    known = stores(trainings)
    whole = (*STORED, "steps=1", "data.crop_scale=1", f"model.weights={tmp_path / 'a'}")
    for seed in (5, 6):  # without random crops the features do not depend on it
        trainings.run(tmp_path / f"whole{seed}", *whole, f"seed={seed}")
    assert len(stores(trainings) - known) == 1


@pytest.mark.slow
def test_killed_while_encoding_and_while_training(trainings: Trainings, tmp_path: Path) -> None:
    data = f"data.train={write_pairs(tmp_path / 'many', 1100)}"
    settings = (data, "steps=20", "batch_size=64", "checkpoint.every_steps=5", *STORED)
    whole = tmp_path / "whole"
    trainings.run(whole, *settings)
    (store,) = (path for path in stores(trainings) if len(list(path.iterdir())) == 5)
    complete = {path.name: path.read_bytes() for path in store.iterdir()}
    for path in store.iterdir():
        path.unlink()
    run = tmp_path / "run"
    running = trainings.start(run, *settings)
    wait_until(lambda: len(list(store.glob("[!.]*"))) >= 2, running)
    os.kill(process_of(run), signal.SIGKILL)
    running.result()
    trainings.kill_after(10, run, *settings)
    trainings.run(run, *settings)
    assert {path.name: path.read_bytes() for path in store.glob("[!.]*")} == complete
    assert digests(run, 20) == digests(whole, 20)


@pytest.mark.slow
def test_two_ranks_store_and_train_as_one(trainings: Trainings, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    settings = ("steps=12", "seed=7", *STORED)
    trainings.run_ranks(2, two, *settings)
    trainings.run(one, *settings)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.slow
def test_bad_images_are_replaced_alike(trainings: Trainings, tmp_path: Path) -> None:
    from data.shards.writer import DatasetWriter, Record

    good = write_pairs(tmp_path / "good", 20)
    with DatasetWriter(tmp_path / "bad", samples_per_shard=20) as writer:
        writer.write(
            "train", Record(key="bad", image=b"\xff\xd8\xff no image", extension="jpg", caption="none")
        )
        writer.finish({"name": "bad"})
    data = f'data.train=["{good}", "{tmp_path / "bad"}"]'
    runs = [tmp_path / "plain", tmp_path / "stored"]
    for run, settings in zip(runs, (BACKBONES, STORED), strict=True):
        trainings.run(run, data, "steps=10", "data.crop_scale=1", "data.max_bad=1", *settings)
    plain, stored = ([line["bad_samples"] for line in metrics(run)] for run in runs)
    assert plain == stored and plain[-1] > 0
    listed = [(run / "bad_samples.jsonl").read_text() for run in runs]
    assert listed[0] == listed[1]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lock.store=true",), "lock.store = True has no effect unless lock.image or lock.text is"),
        (
            ("lock.store=true", "lock.image=2"),
            "lock.store = True has no effect unless lock.image or lock.text is",
        ),
        ((*BACKBONES, "lock.views=2"), "lock.views = 2 has no effect unless lock.store is set"),
        (
            ("lock.text=all", "lock.store=true", "lock.views=2"),
            "lock.views = 2 has no effect unless lock.image is",
        ),
        (
            (*STORED, "caption.weight=1"),
            "caption.weight = 1.0 is invalid: cannot be combined with lock.store",
        ),
        ((*STORED, "data.text_dropout=0.5"), "data.text_dropout = 0.5 is invalid: cannot be combined"),
        ((*STORED, "model.patch_dropout=0.5"), "model.patch_dropout = 0.5 is invalid: cannot be combined"),
        ((*STORED, "sharding=full"), "sharding = 'full' is invalid: cannot be combined with lock.store"),
        (("lock.image=backbone", "model.image=pixels:Ti"), "lock.image=backbone and lock.store need a tower"),
        (("lock.image=backbone", "lock.image_until=3"), "has no effect with lock.image=backbone"),
    ],
)
def test_settings_that_do_not_fit(
    trainings: Trainings, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    assert message in error_of(trainings.run(tmp_path / "run", "steps=1", *settings, status=1))


@pytest.mark.slow
def test_stored_model_loads_and_encodes_images(trainings: Trainings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainings.run(run, "steps=2", *STORED, f'eval.data=["{trainings.pairs}/train"]')
    model = clipkit.load(str(run))
    assert model.encode_text(model.tokenizer(["noise 1"])).shape == (1, model.dim)
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_scores_of_locked_backbones_equal_those_of_an_evaluation(
    trainings: Trainings, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    data = f"{trainings.pairs}/train"
    trainings.run(run, "steps=6", "optim.lr=1e-2", *BACKBONES, f'eval.data=["{data}"]', "eval.every_steps=2")
    scores = {
        (line["metric"], line["setting"]): line["value"]
        for line in read_results(run / "results.jsonl")
        if line["step"] == 6  # after the features of three evaluations
    }
    (dataset,) = open_datasets([data])
    subject = Subject(Encoder(clipkit.load(str(run))), dataset)
    again = {(score.metric, score.setting): score.value for score in evaluate(subject)}
    assert again.keys() == scores.keys() and len(scores) > 5
    assert again == pytest.approx(scores, abs=1e-9)
    assert len(set(losses(run))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("model.name=ViT-test",), ("model.name=ViT-test-quickgelu",)),
        (("pixels.mean=[0.5,0.5,0.5]",), ("pixels.mean=[0.4,0.5,0.5]",)),
        (("pixels.range=0,255",), ("pixels.range=0,4095",)),
        (("shape.positions=sincos_2d",), ("shape.positions=none",)),
    ],
    ids=["activation", "mean", "range", "positions"],
)
def test_stores_of_other_settings_are_not_used(
    trainings: Trainings, tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    before = stores(trainings)
    for i, settings in enumerate((first, second)):
        trainings.run(tmp_path / f"{i}", "steps=1", "seed=9", *STORED, *settings)
    assert len(stores(trainings) - before) == 2


def test_samples_that_could_not_be_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    shards = Shards.of(find_shards(str(write_pairs(tmp_path / "pairs", 20))))
    store = FeatureStore(
        shards=shards, image_size=16, augmentation=Augmentation(), decoding=Decoding(), seed=0, backbones="",
        images=True, texts=True,
    )  # fmt: skip
    read = shards.read

    def read_all_but_one(number: int) -> Sample:
        if number == 5:
            raise DataError("the server is busy")
        return read(number)

    def write() -> None:
        store.write(
            lambda images: images.flatten(1).float(),
            lambda texts: (torch.ones(len(texts), 3), [False] * len(texts)),
        )

    monkeypatch.setattr(shards, "read", read_all_but_one)
    write()
    features = store.open()
    features.check_sample(4)
    with pytest.raises(DataError, match="the server is busy"):
        features.check_sample(5)
    monkeypatch.setattr(shards, "read", read)
    write()
    features = store.open()
    features.check_sample(5)
    assert features.read_images([features.find_view(5, 0)]).shape == (1, 768)
    assert features.read_texts(["noise 5"])[0].shape == (1, 3)
