"""Tests of images and captions in members of any name, in the layouts of published datasets."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipkit.config import DataConfig
from clipkit.errors import ConfigError, DataError
from data.__main__ import main
from data.augment import random_of
from data.shards.samples import Shards
from data.training_data import open_training_data
from tests.data.inspected_tars import look
from tests.data.json_shards import shard_of
from tests.data.published_tars import BIOCLIP_TEXTS, SETTINGS, jpeg_of, sample_of, write_published

NEEDED = {
    "bioclip": "data.captions=",  # any text is a caption
    "rs5m": "data.image=img_content data.captions=caption",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def opened(source: Path | tuple[str, ...], run: Path, **data: object) -> Shards:
    """Open shards with the settings of a training."""
    run.mkdir(exist_ok=True)
    settings = DataConfig(train=source if isinstance(source, tuple) else str(source), **data)  # type: ignore[arg-type]
    return open_training_data(
        settings, run / "data.manifest", rank0=True, resumed=False, broadcast=lambda content: content
    )


@pytest.mark.parametrize("layout", SETTINGS)
def test_images_and_captions_are_read_by_name(layout: str, tmp_path: Path) -> None:
    image, captions = SETTINGS[layout]
    path = write_published(layout, tmp_path / "0.tar")
    shards = opened(path, tmp_path / "run", image=image.upper(), captions=captions)
    rule = shards.selection.captions
    assert len(shards) == 24 and shards.manifest.dropped == {}
    for number in (0, 23):
        sample, members = shards.read(number), sample_of(layout, number)
        assert sample.image == members[image or "jpg"]
        texts = [text for texts in rule.captions_by_field(sample.fields) for text in texts]
        expected = [members[name] for name in captions if name in members]
        if layout == "datacompdr":
            expected += [f"synthetic {i} of {number}" for i in range(5)]
        assert texts == expected


@pytest.mark.parametrize("layout", NEEDED)
def test_error_lists_members_and_the_settings_to_write(layout: str, tmp_path: Path) -> None:
    path = write_published(layout, tmp_path / "0.tar")
    with pytest.raises(DataError, match="no sample with image and caption; members: ") as training:
        opened(path, tmp_path / "run")
    with pytest.raises(DataError, match="no sample with image and caption; members: ") as inspection:
        look([str(path)])
    for error in (training, inspection):
        assert "(24)" in str(error.value) and f": set {NEEDED[layout]}" in str(error.value)
    written = str(training.value).split(": set ")[1].split(" (training)")[0].split()
    settings = dict(setting.removeprefix("data.").split("=") for setting in written)
    captions = (settings["captions"],)
    if settings["captions"].startswith("'"):
        captions = tuple(json.loads(settings["captions"].strip("'")))
    shards = opened(path, tmp_path / "run", image=settings.get("image", ""), captions=captions)
    assert len(shards) == 24


def test_all_text_files_are_suggested(tmp_path: Path) -> None:
    samples = [{"sci.txt": "felis catus", "com.txt": "cat", "name": "a much longer name"}] * 3
    shard_of(tmp_path / "0.tar", samples)
    with pytest.raises(DataError, match="no sample with") as caught:
        opened(tmp_path / "0.tar", tmp_path / "run")
    assert str(caught.value).endswith(
        """set data.captions='["com.txt","sci.txt"]' (training) or --captions com.txt,sci.txt (commands)"""
    )


def test_text_members_are_suggested_if_the_json_has_no_caption(tmp_path: Path) -> None:
    samples = [{"json": '{"width": 5}', "text": "a long caption", "name": "a.jpg"}] * 3
    shard_of(tmp_path / "0.tar", samples)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "0.tar", tmp_path / "run")
    assert str(caught.value) == (
        "none of 3 samples examined has a caption in txt (data.captions or --captions); "
        "members: jpg (3), json (3), name (3), text (3); json fields with text: none: "
        "set data.captions=text (training) or --captions text (commands)"
    )


def test_samples_without_the_named_members_are_counted(tmp_path: Path) -> None:
    photo = jpeg_of(0)
    samples: list[dict[str, Any]] = [
        {"img": photo, "a.txt": "a", "b.txt": "b"},
        {"img": photo, "b.txt": "b"},
        {"img": photo},
        {"a.txt": "a"},
    ]
    shard_of(tmp_path / "0.tar", samples)
    shards = opened(tmp_path / "0.tar", tmp_path / "run", image="img", captions=("a.txt", "b.txt"))
    assert [list(shards.read(i).fields.values()) for i in range(len(shards))] == [["a", "b"], ["b"]]
    assert shards.manifest.dropped == {"without image": 1, "without caption": 1}
    other = opened(tmp_path / "0.tar", tmp_path / "other", captions=("a.txt", "b.txt"))
    assert len(other) == 3 and other.manifest.selection != shards.manifest.selection


@pytest.mark.parametrize("seed", [0, 1])
def test_types_of_text_are_drawn_uniformly(seed: int, tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats")
    path = write_published("bioclip", tmp_path / "0.tar")
    shards = opened(path, tmp_path / "run", captions=BIOCLIP_TEXTS, caption_choice="random")
    fields = shards.read(3).fields
    drawn = Counter(
        shards.selection.captions.caption(fields, 0, random_of(seed, 2, epoch, 3)) for epoch in range(4000)
    )
    assert set(drawn) == {f"{name} of 3" for name in BIOCLIP_TEXTS}
    assert stats.chisquare(list(drawn.values())).pvalue > 1e-3


def test_types_of_text_are_drawn_by_weights_among_those_of_the_sample(tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats")
    samples = [{"jpg": jpeg_of(0), "sci.txt": "sci", "com.txt": "com", "taxon.txt": "taxon"}]
    samples += [{"jpg": jpeg_of(1), "sci.txt": "sci", "com.txt": "com"}] * 2
    shard_of(tmp_path / "0.tar", samples)
    shards = opened(
        tmp_path / "0.tar",
        tmp_path / "run",
        captions=("sci.txt", "com.txt", "taxon.txt"),
        caption_choice="weighted",
        caption_weights=(1.0, 3.0, 4.0),
    )
    rule = shards.selection.captions
    for sample_id, weights in ((0, {"sci": 1, "com": 3, "taxon": 4}), (1, {"sci": 1, "com": 3})):
        fields = shards.read(sample_id).fields
        seen = Counter(rule.caption(fields, 0, random_of(5, 2, epoch, sample_id)) for epoch in range(4000))
        expected = [4000 * weight / sum(weights.values()) for weight in weights.values()]
        assert seen.keys() == weights.keys()
        assert stats.chisquare([seen[name] for name in weights], expected).pvalue > 1e-3
    assert shards.notes == [
        "note: 2 of 3 samples examined have no caption in taxon.txt: another of data.captions is drawn for them"
    ]


@pytest.mark.parametrize("choice", ["random", "weighted"])
def test_type_of_text_that_no_sample_has_is_an_error(choice: str, tmp_path: Path) -> None:
    samples = [{"jpg": jpeg_of(0), "sci.txt": "sci", "json": json.dumps({"alt": "x"})}] * 3
    shard_of(tmp_path / "0.tar", samples)
    settings: dict[str, Any] = {"captions": ("sci.txt", "alt", "taxon.txt"), "caption_choice": choice}
    if choice == "weighted":
        settings["caption_weights"] = (1.0, 1.0, 1.0)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "0.tar", tmp_path / "run", **settings)
    assert str(caught.value) == (
        "data.captions names 'taxon.txt', in which none of 3 samples examined has a caption: remove it, or correct "
        "its name; members: jpg (3), json (3), sci.txt (3); json fields with text: alt"
    )
    assert len(opened(tmp_path / "0.tar", tmp_path / "run", captions=settings["captions"])) == 3


def test_types_of_text_are_looked_for_in_every_source(tmp_path: Path) -> None:
    for name in ("sci.txt", "com.txt"):
        (tmp_path / name).mkdir()
        for shard in range(9):
            shard_of(tmp_path / name / f"{shard}.tar", [{"jpg": jpeg_of(0), name: "text"}] * 2)
    shards = opened(
        (str(tmp_path / "sci.txt"), str(tmp_path / "com.txt")),
        tmp_path / "run",
        captions=("sci.txt", "com.txt"),
        caption_choice="random",
    )
    assert [note.split(" have")[0] for note in shards.notes] == ["note: 8 of 16 samples examined"] * 2


@pytest.mark.parametrize("layout", SETTINGS)
def test_inspect_shows_all_members(layout: str, tmp_path: Path) -> None:
    image, captions = SETTINGS[layout]
    path = write_published(layout, tmp_path / "0.tar")
    found = look([str(path)], image=image, captions=captions)
    names = found.names
    assert {member.name: member.count for member in names.members} == {
        name.lower(): 24 for name in sample_of(layout, 0)
    }
    used = {member.name for member in names.members if member.used_as in ("image", "caption")}
    assert used == {image or "jpg", *(name.lower() for name in captions if name in sample_of(layout, 0))}
    assert (names.without_picture, names.without_caption) == (0, 0)
    assert (found.captions.read, found.captions.unknown, found.shards.samples) == (24, (), 24)


def test_shards_are_indexed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_published("rs5m", tmp_path / "0.tar")
    with pytest.raises(DataError, match=f": set {NEEDED['rs5m']}"):
        main(["index", str(path), "--quiet"])
    assert main(["index", str(path), "--image", "img_content", "--captions", "caption", "--quiet"]) == 0
    assert "1 shard, 24 samples" in capsys.readouterr().out


def test_json_members_are_not_captions() -> None:
    with pytest.raises(ConfigError, match=r"data\.captions = 'syn\.json' is invalid: .* such as syn\.FIELD"):
        DataConfig(captions=("syn.json",))
