"""The icons dataset, on a small generated tree of icon themes, and on installed themes if there are any."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from clipkit.errors import DataError
from data.corpora.icons import CONTEXTS, caption, families_of, is_symbolic, make, scan, settle_names, words


def drawing(seed: int, side: int) -> Image.Image:
    """An image of colored blocks on a transparent background, the same in every size."""
    colours = np.random.default_rng(seed).integers(0, 200, (4, 4, 4), dtype=np.uint8)
    colours[..., 3] = 255
    block = Image.fromarray(colours).resize((side * 3 // 4, side * 3 // 4), Image.Resampling.NEAREST)
    picture = Image.new("RGBA", (side, side))
    picture.paste(block, (side // 8, side // 8))
    return picture


def theme(root: Path, name: str, folders: dict[str, tuple[int, str]]) -> Path:
    lines = ["[Icon Theme]", f"Name={name}", "Directories=" + ",".join(folders)]
    for folder, (size, context) in folders.items():
        (root / name / folder).mkdir(parents=True)
        lines += [f"[{folder}]", f"Size={size}", f"Context={context}"]
    (root / name / "index.theme").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / name


FOLDERS = {
    "16/places": (16, "Places"),
    "48/places": (48, "Places"),
    "128/places": (128, "Places"),
    "256/actions": (256, "Actions"),
    "48/mimes": (48, "MimeTypes"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three themes: north and its variant north-dark, and south, which copies one image of north."""
    root = tmp_path / "icons"
    north, south = theme(root, "north", FOLDERS), theme(root, "south", FOLDERS)
    dark = theme(root, "north-dark", FOLDERS)
    for seed, place in enumerate(("north", "south")):
        for number, name in enumerate(("folder-open", "user-home", "user-trash")):
            for side in (16, 48, 128):
                drawing(100 * seed + number, side).save(root / place / f"{side}/places/{name}.png")
        drawing(100 * seed + 50, 256).save(root / place / "256/actions/go-next-rtl.png")
        drawing(100 * seed + 51, 48).save(root / place / "48/mimes/application-x-tar.png")
    for name in ("only-here", "another-one"):
        drawing(len(name), 48).save(north / f"48/places/{name}.png")
    (north / "48/places/gtk-open.png").symlink_to("folder-open.png")
    (north / "48/places/broken.png").symlink_to("nowhere.png")
    drawing(999, 48).save(dark / "48/places/start-here.png")
    drawing(77, 48).save(north / "48/places/computer.png")
    (south / "48/places/computer.png").write_bytes((north / "48/places/computer.png").read_bytes())
    Image.new("RGBA", (48, 48)).save(north / "48/places/blank.png")
    Image.new("RGBA", (48, 48), "#f8f8f8").save(north / "48/places/pale.png")
    (north / "48/places/text.png").write_text("not a picture")
    return root


def samples(folder: Path, split: str) -> dict[str, dict[str, bytes]]:
    """A split as webdataset reads it, by key."""
    found = {}
    for shard in sorted((folder / split).glob("*.tar")):
        with shard.open("rb") as stream:  # ours to close: webdataset leaves its own open
            for sample in group_by_keys(tar_file_expander([{"url": shard.name, "stream": stream}])):
                found[sample["__key__"]] = sample
    return found


def test_whole_themes_are_held_out(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", root=root, progress=False)
    card = json.loads((tmp_path / "out/card.json").read_text())
    train = [json.loads(sample["json"]) for sample in samples(tmp_path / "out", "train").values()]
    test = [json.loads(sample["json"]) for sample in samples(tmp_path / "out", "test").values()]
    assert card["held_out"] == "north"  # both share as many names; the first by name
    assert {meta["theme"] for meta in train} == {"south"}
    assert {meta["theme"] for meta in test} == {"north"}
    assert card["samples"] == {"train": len(train), "test": len(test)}
    # "computer" is the same file in both, so it is trained on and not tested
    assert {meta["name"] for meta in train} == {
        "folder-open", "user-home", "user-trash", "go-next-rtl", "application-x-tar", "computer",
    }  # fmt: skip
    classes = (tmp_path / "out/classnames.txt").read_text().splitlines()
    assert classes == ["folder open", "go next right to left", "tar file", "user home", "user trash"]
    templates = (tmp_path / "out/zeroshot_classification_templates.txt").read_text().splitlines()
    assert all("{c}" in template for template in templates)


def test_samples_are_small_images_with_captions_names_and_labels(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", root=root, progress=False)
    classes = (tmp_path / "out/classnames.txt").read_text().splitlines()
    test = samples(tmp_path / "out", "test")
    assert sorted(int(sample["cls"]) for sample in test.values()) == list(range(len(classes)))
    for sample in test.values():
        meta = json.loads(sample["json"])
        picture = Image.open(io.BytesIO(sample["png"]))
        assert (picture.format, picture.mode, picture.getpixel((0, 0))) == ("PNG", "RGB", (255, 255, 255))
        assert max(picture.size) == min(128, meta["size"])
        text = sample["txt"].decode()
        assert classes[int(sample["cls"])].split()[-1] in text
        if meta["name"] == "folder-open":
            assert meta["size"] == 128  # the 48-pixel one shows the same
            assert meta["context"] == "place"
    train = [json.loads(sample["json"]) for sample in samples(tmp_path / "out", "train").values()]
    assert sorted(meta["size"] for meta in train if meta["name"] == "user-home") == [128]


def test_names_of_links_are_kept(root: Path) -> None:
    icons = scan(root)
    icons = settle_names(icons, families_of({name for icon in icons for name in icon.themes}))
    (opened,) = (icon for icon in icons if icon.path.match("north/48/places/folder-open.png"))
    assert opened.names == ("folder-open", "gtk-open")
    assert (opened.name, opened.text, opened.context) == ("folder-open", "folder open", "place")
    assert not any(icon.side < 48 for icon in icons)


def test_a_name_known_to_more_themes_wins(tmp_path: Path) -> None:
    for number in range(4):
        place = theme(tmp_path, f"theme{number}", {"48": (48, "Places")}) / "48"
        drawing(number, 48).save(place / ("inode-directory.png" if number == 0 else "folder.png"))
    (tmp_path / "theme0/48/folder.png").symlink_to("inode-directory.png")
    icons = settle_names(scan(tmp_path), {f"theme{number}": f"theme{number}" for number in range(4)})
    assert {icon.text for icon in icons} == {"folder"}


def test_blank_pale_and_broken_images(root: Path, tmp_path: Path) -> None:
    for name in ("blank", "pale", "text"):  # in both themes, so that the names are shared
        (root / f"south/48/places/{name}.png").write_bytes(
            (root / f"north/48/places/{name}.png").read_bytes()
        )
    make(tmp_path / "out", root=root, progress=False)
    left_out = json.loads((tmp_path / "out/card.json").read_text())["left_out"]
    assert left_out["blank"] == left_out["unreadable"] == 1
    (pale,) = (
        sample
        for sample in samples(tmp_path / "out", "train").values()
        if json.loads(sample["json"])["name"] == "pale"
    )
    assert Image.open(io.BytesIO(pale["png"])).getpixel((0, 0)) == (0xF8, 0xF8, 0xF8)


def test_a_pale_drawing_is_laid_on_dark_grey(root: Path, tmp_path: Path) -> None:
    glyph = Image.new("RGBA", (48, 48))
    glyph.paste("#ffffff", (12, 12, 36, 36))
    glyph.save(root / "south/48/places/pale.png")
    make(tmp_path / "out", root=root, progress=False)
    grounds = {
        json.loads(sample["json"])["name"]: Image.open(io.BytesIO(sample["png"])).getpixel((0, 0))
        for sample in samples(tmp_path / "out", "train").values()
    }
    assert grounds["pale"] == (0x40, 0x40, 0x40)
    assert grounds["user-home"] == (255, 255, 255)


def test_a_test_image_similar_to_a_training_image_is_dropped(root: Path, tmp_path: Path) -> None:
    moved = Image.new("RGBA", (64, 64))
    moved.paste(drawing(100, 48), (9, 13))  # south's folder-open, elsewhere on a larger sheet
    moved.save(root / "north/48/places/user-home.png")
    (root / "north/128/places/user-home.png").unlink()
    make(tmp_path / "out", root=root, progress=False)
    assert "user home" not in (tmp_path / "out/classnames.txt").read_text().splitlines()
    left_out = json.loads((tmp_path / "out/card.json").read_text())["left_out"]
    assert left_out["test: nearly the same as a training image"] == 1


def test_the_same_themes_give_the_same_bytes(root: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        make(tmp_path / out, root=root, progress=False)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) >= 6
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("themes", [0, 1])
def test_too_few_themes_say_what_to_install(tmp_path: Path, themes: int) -> None:
    root = tmp_path / "icons"
    for number in range(themes):
        for name in (f"theme{number}", f"theme{number}-dark"):  # a variant is no second theme
            place = theme(root, name, {"48": (48, "Places")}) / "48"
            drawing(number, 48).save(place / "folder.png")
    with pytest.raises(DataError, match=r"apt-get install oxygen-icon-theme") as error:
        make(tmp_path / "out", root=root, progress=False)
    assert ("only theme0" if themes else "has none") in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_themes_without_a_common_name(tmp_path: Path) -> None:
    for number in range(2):
        place = theme(tmp_path / "icons", f"theme{number}", {"48": (48, "Places")}) / "48"
        drawing(number, 48).save(place / f"folder-{'ab'[number]}.png")
    with pytest.raises(DataError, match="share too few names"):
        make(tmp_path / "out", root=tmp_path / "icons", progress=False)


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("network-wireless-signal-excellent", "status", "network wireless signal excellent"),
        ("application-x-tar", "file type", "tar file"),
        ("gnome-mime-application-x-tar", "", "tar file"),
        ("image-x-generic", "file type", "generic image file"),
        ("text-x-c++src", "file type", "c++ src text file"),
        ("image-svg+xml", "file type", "svg xml image file"),
        ("audio", "file type", "audio file"),
        ("x-office-document", "file type", "office document"),
        ("gtk-go-back-rtl", "action", "go back right to left"),
        ("stock_select-all", "action", "select all"),
        ("battery-low-symbolic.symbolic", "status", "battery low"),
        ("gpm-primary-040", "status", "gpm primary 40"),
        ("WorldOfGoo", "application", "world of goo"),
        ("chrome-jeogkiiogjbmhklcnbgkdcjoioegiknm-Default", "application", None),
        ("", "", None),
        ("7", "", None),
    ],
)
def test_words(name: str, context: str, expected: str | None) -> None:
    assert words(name, context) == expected
    assert is_symbolic(name) == ("symbolic" in name)


@given(st.text(max_size=40), st.sampled_from(sorted({*CONTEXTS.values(), ""})))
def test_words_are_lower_case_and_captions_hold_them(name: str, context: str) -> None:
    text = words(name, context)
    if text is not None:
        assert text == " ".join(text.split()).lower() != ""
        for key in ("a", "b", "c"):
            line = caption(text, context=context, symbolic=False, key=key)
            assert text.split()[0] in line
            assert text.split()[-1] in line
            assert line == caption(text, context=context, symbolic=False, key=key)


def test_captions_vary() -> None:
    lines = {caption("folder open", context="place", symbolic=False, key=str(key)) for key in range(300)}
    assert {"folder open", "an icon of folder, open", "folder open, place"} <= lines
    assert 12 <= len(lines) <= 24


def test_the_themes_installed_here(tmp_path: Path) -> None:
    installed = Path("/usr/share/icons")
    known = [name for name in ("gnome", "menta", "mate", "Adwaita", "Faba") if (installed / name).is_dir()]
    if len(known) < 2:
        pytest.skip("fewer than two of the icon themes that this test knows are installed")
    for name in known:
        (tmp_path / name).symlink_to(installed / name)
    icons = scan(tmp_path)
    assert {icon.theme for icon in icons} == set(known)
    icons = settle_names(icons, families_of(set(known)))
    assert len({icon.path for icon in icons}) == len(icons) > 50
    assert all(icon.text and 48 <= icon.side <= 512 and icon.path.is_file() for icon in icons)
