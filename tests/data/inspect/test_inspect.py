"""Tests of ``inspect`` on tars with every kind of error: counts, notes and error messages."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.config import load_config
from clipkit.errors import DataError, run_command
from clipkit.samples.traits import Decoding
from data.__main__ import main
from data.augment import Augmentation
from data.inspect.report import notes, print_table, render_page
from data.inspect.samples import token_counts
from data.shards.samples import Shards, find_shards
from tests.clipkit.deep_images import color_png
from tests.clipkit.format_images import bands_of
from tests.clipkit.samples.remote import servers
from tests.data.inspected_tars import Members, image_file, look, pairs, row, told, write_tar

nginx = servers.nginx


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def good(own_cache: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three shards of twelve good samples."""
    folder = tmp_path_factory.mktemp("good")
    for number in range(3):
        write_tar(folder / f"{number:05d}.tar", pairs(100 * number, 12))
    return folder


def test_good_shards(good: Path) -> None:
    found = look([str(good)])
    shards, names, sampled = found.shards, found.names, found.sampled
    assert (shards.count, shards.looked_into, shards.samples, shards.samples_known) == (3, 3, 36, True)
    assert shards.bytes == sum(path.stat().st_size for path in good.iterdir())
    assert (shards.missing, shards.broken) == ((), ())
    assert [(member.name, member.count, member.used_as) for member in names.members] == [
        ("jpg", 36, "image"),
        ("txt", 36, "caption"),
    ]
    assert (sampled.tried, sampled.bad) == (36, 0)
    assert found.captions.read == 36 and found.captions.repeated == 0
    assert sum(found.captions.tokens.counts) == 36
    assert found.pictures.formats == {"JPEG": 36}
    assert found.pictures.depths == {"8-bit, 3 channels": 36}
    assert (found.pictures.same, found.pictures.same_groups) == (0, ())
    assert len(found.sheet) == 24 and all(entry.picture[8:12] == b"WEBP" for entry in found.sheet)
    assert not any(note.grave for note in notes(found))


def test_repeated_inspection_gives_the_same_result(good: Path) -> None:
    first, second = (look([str(good)], samples=10).to_dict() for _ in range(2))
    for one in (first, second):
        del one["seconds"]
    assert first == second
    assert first["sampled"]["tried"] == 10 and len(first["sheet"]) == 10
    shards = {entry["place"]["shard"] for entry in first["sheet"]}
    assert len(shards) == 3  # the sample is spread over all shards


@pytest.mark.parametrize("samples", [1, 7, 25, 35, 36, 100])
def test_samples_are_drawn_without_repetition(good: Path, samples: int) -> None:
    found = look([str(good)], samples=samples)
    assert found.sampled.tried == found.pictures.read == min(samples, 36)
    assert found.pictures.same == 0
    assert (found.captions.read, found.captions.repeated) == (
        36,
        0,
    )  # captions are also read where images are not
    assert len(found.sheet) == min(samples, 24)


def test_missing_and_broken_shards_are_reported_and_the_rest_is_inspected(tmp_path: Path) -> None:
    for number in (0, 1, 4, 7):
        write_tar(tmp_path / f"{number:05d}.tar", pairs(100 * number, 5))
    cut = (tmp_path / "00001.tar").read_bytes()
    (tmp_path / "00001.tar").write_bytes(cut[: len(cut) // 2])
    (tmp_path / "00002.tar").write_bytes(b"")
    (tmp_path / "00005.tar").write_bytes(b"<html>not found</html>" * 100)
    write_tar(tmp_path / "00008.tar", [("a.txt", b"alone"), ("b.txt", b"too")])
    found = look([str(tmp_path)])
    assert found.shards.missing == ("00003", "00006") and found.shards.missing_count == 2
    assert found.shards.samples == 15
    broken = {Path(one.shard).name: one.cause for one in found.shards.broken}
    assert set(broken) == {"00001.tar", "00002.tar", "00005.tar"}
    assert "truncated" in broken["00001.tar"] and "empty" in broken["00002.tar"]
    assert found.names.without_picture == 2
    assert "3 of 7 scanned shards are unreadable" in told(found)
    assert "2 truncated shards: data.truncated=use trains on the intact part" in told(found)
    with pytest.raises(DataError, match="3 of 10 files are missing"):
        look([f"{tmp_path}/{{00000..00009}}.tar"])


def test_error_of_only_truncated_shards_names_the_setting(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs(0, 5))
    os.truncate(tmp_path / "0.tar", (tmp_path / "0.tar").stat().st_size // 2)
    with pytest.raises(
        DataError, match=r"0\.tar is truncated: .*; data\.truncated=use trains on the intact part"
    ):
        look([str(tmp_path)])


def test_bad_samples_by_cause(tmp_path: Path) -> None:
    images = {3: b"no image", 5: image_file(5)[:300], 9: b"no image", 11: b""}
    captions = {2: b" \n", 7: b"x" * 200_001}
    write_tar(tmp_path / "0.tar", pairs(0, 20, images=images, captions=captions))
    found = look([str(tmp_path)])
    assert (found.sampled.tried, found.sampled.bad) == (20, 6)
    causes = {one.cause: (one.count, [place.key for place in one.first]) for one in found.sampled.causes}
    assert causes["empty caption"] == (1, ["000002"])
    assert causes["not an image in a known format"] == (3, ["000003", "000009", "000011"])
    assert any("200001 characters" in cause for cause in causes)
    assert "30.0% of the samples are bad; training stops above 5%" in told(found)
    assert found.captions.empty == 2  # no text, and one too long to read
    assert found.pictures.read == 14


@pytest.mark.parametrize("samples", [4, 100])
def test_captions_that_are_not_utf8(samples: int, tmp_path: Path) -> None:
    latin = "caf\u00e9".encode("latin-1")
    write_tar(tmp_path / "0.tar", pairs(0, 20, captions=dict.fromkeys((3, 5, 9, 11, 12), latin)))
    found = look([str(tmp_path)], samples=samples)
    captions = found.captions
    assert (captions.not_utf8, captions.read, captions.empty) == (5, 15, 0)
    places = sorted(place.key for place in captions.not_utf8_at)
    assert len(places) == 3 and set(places) <= {"000003", "000005", "000009", "000011", "000012"}
    (note,) = (note for note in notes(found) if "UTF-8" in note.text)
    assert note.grave and note.text.startswith("5 of 20 (25.0%) captions are not UTF-8, such as 0.tar: 0000")
    if samples == 100:
        (cause,) = found.sampled.causes
        assert (cause.cause, cause.count) == ("caption is not UTF-8", 5)
    render_page(found).encode()
    clean = look([str(tmp_path)], captions=["caption", "txt"]).captions
    assert clean.not_utf8 == 5
    write_tar(
        tmp_path / "0.tar",
        [*pairs(0, 3), ("a.jpg", image_file(1)), ("a.json", b'{"caption": "' + latin + b'"}')],
    )
    assert look([str(tmp_path)]).captions.not_utf8_at[0].key == "a"


def test_captions(tmp_path: Path) -> None:
    long = "a very long description of a thing " * 20
    captions = dict.fromkeys(range(6), b"the same") | {7: long.encode(), 8: long.encode()}
    write_tar(tmp_path / "0.tar", pairs(0, 12, captions=captions))
    found = look([str(tmp_path)])
    assert found.captions.repeated == 6
    assert found.captions.frequent[0] == ("the same", 6) and found.captions.frequent[1][1] == 2
    assert found.captions.cut == 2 and found.captions.longest == token_counts([long])[0] == 142
    assert sum(entry.tokens == 142 for entry in found.sheet) == 2


def test_captions_in_json(tmp_path: Path) -> None:
    members = []
    for number in range(4):
        texts = {"caption": f"in json {number}", "alt": ["one", "two"]}
        members += [(f"{number}.jpg", image_file(number)), (f"{number}.json", json.dumps(texts).encode())]
    write_tar(tmp_path / "0.tar", members)
    assert {entry.caption for entry in look([str(tmp_path)]).sheet} == {f"in json {n}" for n in range(4)}
    assert {entry.caption for entry in look([str(tmp_path)], captions=["alt"]).sheet} == {"one"}


def test_properties_of_images(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    grey = io.BytesIO()
    Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40).save(grey, "png")
    cmyk, clear, moving = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.new("CMYK", (40, 40), (9, 99, 0, 0)).save(cmyk, "jpeg")
    Image.new("RGBA", (40, 40), (9, 99, 0, 0)).save(clear, "png")
    frames = [Image.new("RGB", (40, 40), (number, 99, 0)) for number in range(3)]
    frames[0].save(moving, "gif", save_all=True, append_images=frames[1:])
    contents = [
        image_file(0, exif=turned), grey.getvalue(), cmyk.getvalue(), clear.getvalue(),
        image_file(4, (300, 20)), image_file(5, (20, 240)), image_file(6, form="webp"), image_file(6, form="webp"),
        moving.getvalue(),
    ]  # fmt: skip
    write_tar(tmp_path / "0.tar", pairs(0, 9, images=dict(enumerate(contents))))
    found = look([str(tmp_path)])
    images = found.pictures
    assert images.read == 9 and images.formats == {"JPEG": 4, "PNG": 2, "WEBP": 2, "GIF": 1}
    assert images.depths == {
        "8-bit, 3 channels": 5,
        "8-bit, 4 channels": 2,
        "16-bit, 1 channel": 1,
        "8-bit, 1 channel": 1,
    }
    places = {name: [place.key for place in found] for name, found in images.traits_at.items() if found}
    assert places == {
        "transparent": ["000003"],
        "rotated": ["000000"],
        "cmyk": ["000002"],
        "frames": ["000008"],
    }
    assert (images.traits.images, images.traits.cmyk, images.traits.frames) == (9, 1, 1)
    assert row(found, "images", "CMYK") == "1 of 9 (11.1%), in 0.tar: 000002"
    assert "1 of 9 images has several frames" in told(found) and "1 of 9 images has CMYK colors" in told(
        found
    )
    assert images.small == 2
    assert images.same == 2
    assert [[place.key for place in group] for group in images.same_groups] == [["000006", "000007"]]


def test_values_of_deep_images_and_the_setting_to_write(tmp_path: Path) -> None:
    deep = {}
    for number in (1, 3):
        file = io.BytesIO()
        values = np.random.default_rng(number).integers(0, 3000, (40, 40))
        values[0, 0] = 3911
        Image.fromarray(values.astype(np.uint16)).save(file, "png")
        deep[number] = file.getvalue()
    write_tar(tmp_path / "0.tar", pairs(0, 8, images=deep))
    found = look([str(tmp_path)])
    assert found.sampled.bad == 0 and len(found.sheet) == 8
    line = row(found, "images", "deep grayscale")
    assert re.fullmatch(
        r"2 16-bit; set\npixels.range=0,4095 \| values from \d to 3911; percentiles 1, 50 and 99: "
        r"\d\d, 1[45]\d\d, 29\d\d(\.\d+)?",
        line,
    ), line
    note = (
        "2 of 8 images have more than 8 bits per channel, at which training stops: set\npixels.range=0,4095"
    )
    assert note in told(found)
    assert "16 bits per color" not in told(found)
    found = look([str(tmp_path)], decoding=Decoding(pixel_range=(0.0, 2000.0)))
    assert "at which training stops" not in told(found)
    assert "2 of 8 images have values outside the pixel range 0,2000, which become black or white" in told(
        found
    )
    assert "2 16-bit; settings\npixels.range=0,2000" in row(found, "images", "deep grayscale")


def test_values_of_multispectral_images_and_the_settings_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).integers(0, 200, (40, 40, 12)).astype(np.uint16) + 1
    values[..., 11] *= 20
    write_tar(tmp_path / "0.tar", pairs(0, 4, images={1: bands_of(values), 2: bands_of(values)}))
    found = look([str(tmp_path)])
    assert found.sampled.bad == 0 and len(found.sheet) == 4  # the first three channels are shown
    ranges = ";".join(["0,255"] * 11 + ["0,4095"])
    line = row(found, "images", "12 channels")
    start, settings = line.partition(" | ")[0].split("\n")
    assert start == "2 16-bit; set" and " | channel 1: values from 1 to 200;" in line
    print_table(found)
    assert [shown.strip() for shown in capsys.readouterr().out.splitlines()].count(settings) == 2
    arguments = shlex.split(settings)
    assert arguments[:2] == ["pixels.channels=12", f"pixels.range={ranges}"]
    pixels = load_config(Path("configs/quickstart.toml"), arguments).pixels
    levels = values.reshape(-1, 12) / ([255] * 11 + [4095])
    assert np.allclose(pixels.mean, levels.mean(axis=0), atol=0.003)
    assert np.allclose(pixels.std, levels.std(axis=0), atol=0.003)
    assert "channel 12: values from 20 to 4000; percentiles 1, 50 and 99: " in line
    found = look([str(tmp_path)], decoding=Decoding(channels=12, pixel_range=((0.0, 4095.0),) * 12))
    assert found.sampled.bad == 2 and "3 channels, and the model has 12" in found.sampled.causes[0].cause


def test_channels_of_8_bit_arrays_and_the_setting_to_write(tmp_path: Path) -> None:
    members: list[tuple[str, bytes]] = []
    for number in range(6):
        file = io.BytesIO()
        np.save(file, np.random.default_rng(number).integers(0, 256, (30, 34, 5)).astype(np.uint8))
        members += [(f"{number:06d}.npy", file.getvalue()), (f"{number:06d}.txt", b"five bands")]
    write_tar(tmp_path / "0.tar", members)
    found = look([str(tmp_path)], image="npy")
    assert found.pictures.depths == {"8-bit, 5 channels": 6} and found.sampled.bad == 0
    lines = row(found, "images", "5 channels")
    assert (
        lines.startswith("6 8-bit; set\npixels.channels=5 pixels.mean='[")
        and " | channel 1: values from " in lines
    )
    note = "6 of 6 images have 5 channels, at which training stops: set\npixels.channels=5 pixels.mean="
    assert note in told(found)
    chosen = look([str(tmp_path)], image="npy", decoding=Decoding(channels=5))
    assert chosen.sampled.bad == 0 and len(chosen.sheet) == 6 and "training stops" not in told(chosen)


def test_16_bits_per_color_and_deep_gray_with_alpha_are_told(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (40, 40, 3))
    deep = {1: color_png(values), 3: color_png(values[..., :2])}
    write_tar(tmp_path / "0.tar", pairs(0, 8, images=deep))
    found = look([str(tmp_path)])
    assert "1 of 7 images has 16 bits per color, of which the upper 8 are used" in told(found)
    assert [one.cause for one in found.sampled.causes if "without alpha" in one.cause] != []


def test_repeated_files_in_a_sample(tmp_path: Path) -> None:
    """The first caption, the first of two image formats, and the first json are used."""
    members = []
    for number in range(8):
        key = f"{number:06d}"
        members += [(f"{key}.jpg", image_file(number)), (f"{key}.txt", b"first"), (f"{key}.json", b"{}")]
        members += [(f"{key}.txt", b"second")] * (number in (2, 3, 5, 6))
        members += [(f"{key}.png", image_file(9, form="png")), (f"{key}.json", b"[]")] * (number == 5)
    write_tar(tmp_path / "0.tar", members)
    found = look([str(tmp_path)])
    assert {member.name: (member.count, member.repeated) for member in found.names.members} == {
        "txt": (12, 4),
        "json": (9, 1),
        "jpg": (8, 0),
        "png": (1, 0),
    }
    assert row(found, "samples", "txt") == "12: caption; 4 repetitions in a sample, ignored"
    assert {entry.caption for entry in found.sheet} == {"first"}  # as in training
    data = Shards.of(find_shards(str(tmp_path)))
    assert {data.read(number).fields["txt"] for number in range(8)} == {"first"}
    assert data.read(5).image[:2] == b"\xff\xd8"


def test_members_by_name_and_the_settings_that_use_them(tmp_path: Path) -> None:
    members: list[tuple[str, bytes]] = []
    for number in range(6):
        key = f"{number:06d}"
        members += [(f"{key}.jpg", image_file(number)), (f"{key}.txt", b"plain"), (f"{key}.cls", b"3")]
        members += [(f"{key}.sci.txt", b"Corvus corax"), (f"{key}.img_content", image_file(9 + number))]
        members += [(f"{key}.npz", b"PK\x03\x04\xff\xfe")] * (number < 2)
    write_tar(tmp_path / "0.tar", members)
    found = look([str(tmp_path)])
    assert row(found, "samples", "sci.txt") == "6: not used; data.captions=sci.txt uses them"
    assert row(found, "samples", "img_content") == "6: not used; data.image=img_content uses them"
    assert row(found, "samples", "npz") == "2: not used"
    chosen = look([str(tmp_path)], image="img_content", captions=["sci.txt"])
    assert row(chosen, "samples", "img_content") == "6: image"
    assert row(chosen, "samples", "jpg") == "6: not used; data.image=jpg uses them"
    assert row(chosen, "samples", "sci.txt") == "6: caption"
    assert row(chosen, "samples", "txt") == "6: not used; data.captions=txt uses them"
    assert {entry.caption for entry in chosen.sheet} == {"Corvus corax"}
    assert chosen.pictures.same == 0 and chosen.sampled.bad == 0


def test_keys_and_members(tmp_path: Path) -> None:
    members = [
        ("a/one.JPG", image_file(1)), ("a/one.txt", b"one"), ("a/one.jpg", image_file(1)),
        ("a/two.jpg", image_file(2)), ("a/three.txt", b"three"), ("a/two.txt", b"two"),
        ("a/x.1.jpg", image_file(3)), ("a/x.1.txt", b"x"), (".hidden.jpg", b""), ("README", b""),
        ("a/four.jpeg", image_file(4)), ("a/four.txt", b"four"),
    ]  # fmt: skip
    write_tar(tmp_path / "0.tar", members)
    found = look([str(tmp_path)])
    names = found.names
    assert {member.name: (member.count, member.repeated, member.setting) for member in names.members} == {
        "txt": (4, 0, ""),
        "jpg": (3, 1, ""),
        "1.jpg": (1, 0, "data.image=1.jpg"),
        "1.txt": (1, 0, "data.captions=1.txt"),
        "jpeg": (1, 0, ""),
    }
    assert (names.without_picture, names.without_caption) == (3, 1)
    assert found.shards.samples == 2


@pytest.mark.parametrize(
    ("members", "seen"),
    [
        ([("a.jpg", b""), ("a.caption", b"")], "jpg (1), caption (1)"),
        ([("a.JPG.txt", b""), ("a.JPG", b"")], "jpg.txt (1), jpg (1)"),
        ([("0.jpg", b""), ("1.txt", b"")], "jpg (1), txt (1)"),
        ([("README", b""), (".x.jpg", b"")], "members: none"),
        ([], "members: none"),
    ],
)
def test_error_without_pairs_lists_the_members(members: Members, seen: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(DataError) as error:
        look([str(tmp_path)])
    assert "no sample with image and caption" in str(error.value) and seen in str(error.value)


def test_ten_thousand_unsuitable_shards_fail_quickly(tmp_path: Path) -> None:
    write_tar(tmp_path / "00000.tar", [("a.jpg", b"x"), ("a.caption", b"y")])
    for number in range(1, 10_000):
        os.link(tmp_path / "00000.tar", tmp_path / f"{number:05d}.tar")
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"the first 8 shards have no sample .*caption \(8\)"):
        look([str(tmp_path)])
    assert time.monotonic() - begin < 10


def test_many_shards_are_sampled(tmp_path: Path) -> None:
    write_tar(tmp_path / "00000.tar", pairs(0, 3))
    for number in range(1, 300):
        os.link(tmp_path / "00000.tar", tmp_path / f"{number:05d}.tar")
    cut = (tmp_path / "00000.tar").read_bytes()[:-3000]
    (tmp_path / "00150.tar").unlink()
    (tmp_path / "00150.tar").write_bytes(cut)
    found = look([str(tmp_path)], shards=4, samples=6)
    assert (found.shards.count, found.shards.looked_into) == (300, 4)
    assert [Path(one.shard).name for one in found.shards.broken] == ["00150.tar"]
    assert not found.shards.samples_known and abs(found.shards.samples - 3 * 299) <= 3
    assert found.sampled.tried == 6
    assert "4 of 300, spread evenly" in row(found, "shards", "scanned")
    assert "about" in row(found, "shards", "samples")


def test_only_broken_images_raise_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs(0, 70, images=dict.fromkeys(range(70), b"no")))
    with pytest.raises(
        DataError, match=r"none of the first 64 samples can be used: not an image in a known format \(64\)"
    ):
        look([str(tmp_path)])


def test_unreadable_shards_and_invalid_settings_raise_error(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(b"junk" * 1000)
    with pytest.raises(DataError, match=r"is not a tar file.*and 1 more"):
        look([str(tmp_path)])
    with pytest.raises(DataError, match="no tar, table or Parquet file of split"):
        (tmp_path / "empty").mkdir()
        look([str(tmp_path / "empty")])


HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e&\"'\x00]]>[bold]\ud800"


class _Strict(HTMLParser):
    """Records the elements of a page and their link targets."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.pointers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.pointers += [value or "" for name, value in attrs if name in ("src", "href")]


def test_hostile_text_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, no_utf8 = HOSTILE.encode("utf-8", "ignore"), HOSTILE.encode("utf-8", "surrogatepass")
    assert text != no_utf8
    members = [(name.replace("0", "<b>\x1b[31m", 1), content) for name, content in pairs(0, 6)]
    members = [(name, text if name.endswith(".txt") else content) for name, content in members]
    fields = b'{"' + no_utf8.replace(b'"', b"") + b'": "' + no_utf8.replace(b'"', b"") + b'"}'
    members += [("bad.jpg", image_file(7)), ("bad.txt", no_utf8), ("bad.json", fields)]
    write_tar(tmp_path / "<i>&.tar", members)
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    options = ["--image-size", "16", "--html", str(page), "--json", str(figures), "--quiet"]
    assert main(["inspect", str(tmp_path), *options]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    *lines, last = output.out.splitlines()
    assert max(map(len, lines)) <= 80 and last == f"wrote {page}"
    assert all(character.isprintable() or character == "\n" for character in output.out)
    strict = _Strict()
    strict.feed(page.read_text(encoding="utf-8"))
    assert not strict.tags & {"script", "b", "iframe", "object"}
    assert all(pointer.startswith(("#", "data:image/webp;base64,")) for pointer in strict.pointers)
    assert "\x1b" not in page.read_text() and "\u202e" not in page.read_text()
    told = json.loads(figures.read_text())
    assert told["captions"]["frequent"][0][1] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["<i>&.tar", "figures.json", "page.html"]


def test_command_output_and_exit_status(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(good), "--image-size", "16"]) == 0
    output = capsys.readouterr()
    assert max(map(len, output.out.splitlines())) <= 80 and "\x1b" not in output.out
    assert not any(line.endswith(" ") for line in output.out.splitlines())
    assert "3 shards, 36 samples" in output.out
    with pytest.raises(SystemExit) as stop:
        run_command(partial(main, ["inspect", str(good), "--html", str(tmp_path / "photo.png")]))
    assert stop.value.code == 1 and "ending in .html" in capsys.readouterr().err


def test_ctrl_c_prints_one_line(good: Path) -> None:
    program = (
        "import os, signal, sys, threading; from functools import partial; from clipkit.errors import run_command; "
        "from data.__main__ import main; threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start(); "
        "run_command(partial(main, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "inspect", str(good), "--image-size", "4000", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped; nothing was written\n")


def test_several_sources(good: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "more.tar", pairs(900, 2))
    found = look([str(good), str(tmp_path / "more.tar")])
    assert (found.shards.count, found.shards.samples) == (4, 38)
    assert render_page(found).count("<img ") == 24


def test_repeated_files_in_a_remote_shard(nginx: servers.Nginx, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [*pairs(0, 5), ("000004.txt", b"another"), ("000004.png", image_file(7))])
    nginx.put("twice/0.tar", (tmp_path / "0.tar").read_bytes())
    found = look([nginx.url("twice/0.tar")])
    assert row(found, "samples", "txt") == "6: caption; 1 repetition in a sample, ignored"


def test_remote_shards_are_read_in_parts_and_their_secrets_are_not_shown(
    nginx: servers.Nginx, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number in (0, 1, 3):
        write_tar(tmp_path / "one.tar", pairs(100 * number, 4))
        nginx.put(f"set/{number:05d}.tar", (tmp_path / "one.tar").read_bytes())
    found = look([nginx.url(f"set/{number:05d}.tar?token=s3cret") for number in (0, 1, 3)])
    assert (found.shards.samples, found.shards.missing, found.sampled.bad) == (12, ("00002",), 0)
    assert found.sampled.tried == 12 and len(found.sheet) == 12
    assert found.shards.beginnings == 0  # because they are small
    page = render_page(found)
    assert "s3cret" not in page and "s3cret" not in json.dumps(found.to_dict())
    assert look([nginx.url("set")]).shards.missing == ("00002",)


def test_only_the_first_samples_of_large_remote_shards_are_read(
    nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("data.inspect.samples._BEGINNING", 20_000)
    for number in range(3):
        write_tar(tmp_path / "one.tar", pairs(100 * number, 60))
        nginx.put(f"large/{number:05d}.tar", (tmp_path / "one.tar").read_bytes())
    found = look([nginx.url("large")])
    assert (found.shards.beginnings, found.sampled.bad) == (3, 0)
    assert 15 <= found.sampled.tried < 60 and found.names.without_caption == 0
    assert not found.shards.samples_known and 150 < found.shards.samples < 210
    assert "only the first samples of 3" in row(found, "shards", "scanned")


def test_transparent_and_rotated_images_are_reported_with_the_setting(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    clear, opaque = io.BytesIO(), io.BytesIO()
    Image.new("RGBA", (40, 40), (9, 99, 0, 254)).save(clear, "png")
    Image.new("RGBA", (40, 40), (9, 99, 0, 255)).save(opaque, "png")
    turned = image_file(0, exif=exif)
    contents = {1: clear.getvalue(), 2: opaque.getvalue(), **dict.fromkeys(range(4, 9), turned)}
    write_tar(tmp_path / "0.tar", pairs(0, 10, images=contents))
    found = look([str(tmp_path)])
    assert row(found, "images", "transparent") == "1 of 10 (10.0%), in 0.tar: 000001"
    assert row(found, "images", "rotated by EXIF").startswith("5 of 10 (50.0%), in 0.tar: 000004; ")
    assert "1 of 10 images is transparent" in told(found) and "5 of 10 images are rotated" in told(found)
    chosen = look([str(tmp_path)], decoding=Decoding(background=(255, 255, 255), upright=True))
    assert row(chosen, "images", "transparent") == row(found, "images", "transparent")
    assert "transparent" not in told(chosen) and "rotated" not in told(chosen)
    write_tar(tmp_path / "plain/0.tar", pairs(0, 10))
    none = look([str(tmp_path / "plain")])
    assert row(none, "images", "transparent") == row(none, "images", "rotated by EXIF") == ""
    json.dumps(chosen.to_dict())


def test_contact_sheet_shows_the_augmentation(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs(0, 4))
    for augmentation, grey in ((Augmentation(), False), (Augmentation(grayscale=1.0), True)):
        found = look([str(tmp_path)], augmentation=augmentation)
        for entry in found.sheet:
            pixels = np.asarray(Image.open(io.BytesIO(entry.picture)).convert("RGB")).astype(int)
            assert (np.ptp(pixels, axis=2).max() <= 4) == grey  # WebP rounds
