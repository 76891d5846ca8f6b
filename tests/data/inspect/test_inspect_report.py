"""Tests of the report of ``inspect``: json fields, filters, `_stats.json`, steps, images on the page."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipkit.errors import ConfigError, DataError
from data.__main__ import main
from data.captions import Filter
from data.inspect.report import notes, render_page
from data.inspect.survey import FieldSurvey
from tests.data.inspected_tars import image_file, look, pairs, row, told, write_tar

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def with_json(path: Path, metas: list[Any], *, text: bool = True) -> Path:
    """Write a shard with one sample per json; None is a sample without json."""
    members = []
    for number, meta in enumerate(metas):
        members.append((f"{number:03d}.jpg", image_file(number)))
        members += [(f"{number:03d}.txt", f"thing {number}".encode())] if text else []
        members += [(f"{number:03d}.json", json.dumps(meta).encode())] if meta is not None else []
    write_tar(path, members)
    return path


METAS: list[dict[str, Any]] = [
    {"width": 100 + number, "lang": ["en", "en", "de"][number % 3], "ok": True, "a": {"b": number / 4}}
    for number in range(12)
]


def test_json_fields_are_reported(tmp_path: Path) -> None:
    first = METAS[0] | {"tags": ["z"], "url": "v", "mixed": "one"}
    last = METAS[11] | {"tags": ["x", "y"], "url": "u" * 99, "mixed": 1}
    metas = [first, *METAS[1:11], last, None, None]
    found = look([str(with_json(tmp_path / "0.tar", metas))])
    fields = {field.name: (field.kind, field.count, field.values) for field in found.fields.fields}
    assert fields == {
        "width": ("number", 12, "100 to 111"),
        "lang": ("text", 12, '"en" 67%, "de" 33%'),
        "ok": ("true or false", 12, '"true" 100%'),
        "a.b": ("number", 12, "0 to 2.75"),
        "tags": ("list", 2, ""),
        "url": ("text", 2, f'"v" 50%, "{"u" * 40}…" 50%'),
        "mixed": ("text or number", 2, '1, "one" 100%'),
    }
    assert (found.fields.read, found.fields.with_json) == (14, 12)
    assert row(found, "fields", "samples with json") == "12 of 14 (85.7%)"
    assert row(found, "fields", "width") == "number, in 85.7%: 100 to 111"


def test_lists_are_named_without_values(tmp_path: Path) -> None:
    found = look([str(with_json(tmp_path / "0.tar", [{"names": ["a", "b"]}] * 3))])
    assert row(found, "fields", "names") == "list"


def test_any_json_is_accepted() -> None:
    survey = FieldSurvey([])
    odd = [
        None,
        {},
        {"n": 10**400},
        {"n": float("nan")},
        {"n": float("inf")},
        {"n": -3},
        {"": [], "x" * 500: 1},
    ]
    for one in [*odd, {"deep": {"er": {"a": None}}}, *({str(number): number} for number in range(2000))]:
        survey.add(one)
    found = survey.summarize_fields()
    assert found.read == len(odd) + 2001 and found.with_json == found.read - 1
    assert len(found.fields) == 40 and found.fields[0].name == "n"
    assert found.fields[0].values == "-3" and survey.summarize_filters() is None


def test_range_of_many_numbers_is_exact() -> None:
    survey = FieldSurvey([])
    for number in np.random.default_rng(0).permutation(50_000).tolist():
        survey.add({"n": number})
    assert survey.summarize_fields().fields[0].values == "0 to 49,999"


def test_filters(tmp_path: Path) -> None:
    path = with_json(tmp_path / "0.tar", [*METAS, None])
    found = look([str(path)], filters=["width >= 106", "lang = en"])
    assert found.filtered is not None
    assert (found.filtered.read, found.filtered.passed, found.left) == (13, 4, 4)
    assert found.filtered.left_out == {"not width >= 106": 6, "not lang = en": 2, "without width": 1}
    passing = row(found, "shards", "after filters")
    assert passing.startswith("4 samples (30.8%)") and "| 6 left out" in passing
    assert row(found, "shards", "one epoch") == "1 step of 4 samples (--batch-size sets the batch)"
    assert found.sampled.tried == 13 and not any(note.grave for note in notes(found))


def test_filter_on_unknown_field_is_reported(tmp_path: Path) -> None:
    path = with_json(tmp_path / "0.tar", METAS)
    found = look([str(path)], filters=["widht >= 106", "WIDTH > 1", "lang = en"])
    said = told(found)
    assert (
        "no sample read has the json field 'widht': did you mean 'width'? available fields: a.b, lang, "
        in said
    )
    assert "no sample read has the json field 'WIDTH': did you mean 'width'?" in said
    assert "no sample read passes" not in said and "fill a batch" not in said
    assert "no sample read passes the filters" in told(look([str(path)], filters=["width > 999"]))
    with pytest.raises(ConfigError, match="has no known operator"):
        look([str(path)], filters=["width => 3"])


def test_filters_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_json(tmp_path / "0.tar", METAS)
    figures = tmp_path / "figures.json"
    options = ["--image-size", "16", "--batch-size", "3", "--json", str(figures), "--quiet"]
    assert main(["inspect", str(path), "--filters", "width >= 106", "--filters", "lang=en", *options]) == 0
    output = capsys.readouterr().out
    assert "4 samples (33.3%)" in output and max(map(len, output.splitlines())) <= 80
    assert json.loads(figures.read_text())["filtered"]["passed"] == 4
    with pytest.raises(ConfigError, match="--batch-size: '0' is not a whole number"):
        main(["inspect", str(path), *options, "--batch-size", "0"])


def test_missing_captions_raise_the_error_of_training(tmp_path: Path) -> None:
    path = with_json(tmp_path / "0.tar", METAS)
    with pytest.raises(DataError) as caught:
        look([str(path)], captions=["lnag"])
    assert str(caught.value) == (
        "none of 12 samples examined has a caption in lnag (data.captions or --captions); "
        "members: jpg (12), txt (12), json (12); json fields with text: lang"
    )
    without = with_json(tmp_path / "1.tar", METAS, text=False)
    with pytest.raises(
        DataError,
        match=r"has a caption in txt \(data.captions .*\); members: .*; json fields with text: lang$",
    ):
        look([str(without)])
    empty = dict.fromkeys(range(5), b" ")
    write_tar(tmp_path / "2.tar", pairs(0, 5, captions=empty))
    with pytest.raises(DataError, match=r"none of the first 5 samples can be used: empty caption \(5\)"):
        look([str(tmp_path / "2.tar")])


def test_steps_of_an_epoch_are_reported(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs(0, 11))
    assert row(look([str(tmp_path)]), "shards", "one epoch").startswith("2 steps of 4 samples")
    found = look([str(tmp_path)], batch_size=12)
    assert row(found, "shards", "one epoch").startswith("0 steps")
    assert "11 samples do not fill a batch of 12 (--batch-size): train with a smaller batch_size" in told(
        found
    )


def test_bad_samples_are_shown_and_duplicates_named(tmp_path: Path) -> None:
    large = image_file(8, (400, 300), quality=95)
    images = {
        0: b"<p>gone</p>",
        1: b"",
        2: large[: len(large) // 2],
        5: image_file(4),
    }
    captions = {3: b" "} | dict.fromkeys(range(12, 30), b"")
    write_tar(tmp_path / "0.tar", pairs(0, 30, images=images, captions=captions))
    found = look([str(tmp_path)])
    shown = {entry.place.key: entry for entry in found.bad_shown}
    assert sorted(shown) == ["000000", "000001", "000002", "000003", "000012", "000013", "000014"]
    assert [entry.cause for entry in found.bad_shown[:4]] == ["empty caption"] * 4  # the most frequent cause
    assert shown["000000"].picture == b""
    assert shown["000002"].picture == b"" and shown["000003"].picture[8:12] == b"WEBP"
    assert shown["000002"].caption == "an image of thing 2"
    assert row(found, "images", "identical files") == "2 images: | 0.tar: 000004 = 0.tar: 000005"
    assert render_page(found).count("<img ") == len(found.sheet) + 4


def test_only_a_few_duplicates_are_shown(tmp_path: Path) -> None:
    images = {number: image_file(number // 5) for number in range(40)}
    write_tar(tmp_path / "0.tar", pairs(0, 40, images=images))
    found = look([str(tmp_path)])
    assert found.pictures.same == 40 and [len(group) for group in found.pictures.same_groups] == [4] * 3


def test_slow_imports_are_avoided(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs(0, 6))
    program = (
        "import sys; from data.__main__ import main; main(sys.argv[1:]); "
        "print([name for name in ('torchvision', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(tmp_path), "--image-size", "16", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_several_filters_are_combined() -> None:
    survey = FieldSurvey([Filter.of("a > 1"), Filter.of("b > 1")])
    for meta in ({"a": 2, "b": 2}, {"a": 2}, {"b": 2}, None):
        survey.add(meta)
    filtered = survey.summarize_filters()
    assert filtered is not None and (filtered.passed, filtered.unknown) == (1, ())
    assert filtered.left_out == {"without a": 2, "without b": 1}


def test_test_images_in_the_training_split_are_reported(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("test", 9)):
        images = {number: image_file(number) for number in range(first, first + 12)}
        write_tar(tmp_path / "set" / split / "0.tar", pairs(first, 12, images=images))
    found = look([str(tmp_path / "set")])
    assert found.held_out is not None and (found.held_out.read, found.held_out.trained_on) == (12, 3)
    assert "3 of 12 images of the test split are identical to images of the train split" in told(found)
    for alone in (look([str(tmp_path / "set" / "train")]), look([str(tmp_path / "set")], split="test")):
        assert alone.held_out is None and "test split" not in told(alone)


def test_unknown_caption_field_is_reported(tmp_path: Path) -> None:
    members = [*pairs(0, 6), *((f"{number:06d}.json", b'{"alt_text": "a"}') for number in range(6))]
    write_tar(tmp_path / "0.tar", sorted(members))
    found = look([str(tmp_path)], captions=["txt", "alt"])
    assert "--captions: no sample read has the json field 'alt': available fields: alt_text" in told(found)
    assert "--captions" not in told(look([str(tmp_path)], captions=["txt", "alt_text"]))


@pytest.mark.parametrize(("repeated", "is_noted"), [(8, True), (6, False)])
def test_many_repeated_captions_are_noted(tmp_path: Path, repeated: int, is_noted: bool) -> None:
    captions = dict.fromkeys(range(repeated), b"the same")
    write_tar(tmp_path / "train/0.tar", pairs(0, 12, captions=captions))
    report = look([str(tmp_path)], batch_size=1)
    assert ("captions repeat another one" in told(report)) == is_noted
    assert row(report, "shards", "split") == "train, and files that state no split"
