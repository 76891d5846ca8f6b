"""Tests of the ``clipkit`` command line: help, errors, printed output and written files."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.config import Config, DataConfig, OptimConfig
from clipkit.errors import ConfigError, DataError, run_command
from clipkit.files import terminal
from clipkit.inference.classify import Classification, classify_images, labels_of, templates_of
from clipkit.inference.inputs import Item, Stream
from clipkit.inference.stream import FeatureStream
from clipkit.model.clip import CLIP
from clipkit.options import COMMANDS
from clipkit.samples.table import Table
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from tests.data.published_tars import write_published

NEEDED = {
    "encode": ["x", "--model", "m", "--out", "o"],
    "classify": ["x", "--model", "m", "--labels", "a,b"],
    "caption": ["x", "--model", "m"],
    "complete": ["a.png", "--model", "b", "--out", "c.png"],
    "explain": ["x.jpg", "a cat", "--model", "m", "--out", "o.png"],
    "search": ["e", "x"],
    "index": ["e"],
    "serve": ["e"],
    "export": ["m", "o"],
    "interpolate": ["a", "b", "--out", "o"],
}
LABELS = ["cat", "dog", "a very long label that does not fit into thirty columns", "鳥の写真"]


@pytest.fixture(scope="module")
def model() -> CLIP:
    return clipkit.create("ViT-test", seed=0).eval()


@pytest.fixture(scope="module")
def checkpoint(model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("model") / "run"
    optimizer = adamw(model, OptimConfig())
    save_checkpoint(run, model, optimizer, LoopState(step=0, data=""), Config(), keep=1)
    return run


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three images and a broken one in ``photos`` of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("photos")
    folder.mkdir()
    noise = np.random.default_rng(0)
    for name in ("a", "b", "a name of more columns than there are for names of images"):
        Image.fromarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    (folder / "x.png").write_bytes(b"no image")
    return folder


def classify(checkpoint: Path, *arguments: str) -> int:
    return dispatch(
        ["classify", "photos", "--labels", ",".join(LABELS), "--model", str(checkpoint), *arguments]
    )


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_fits_80_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        dispatch(arguments)
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert max(map(len, lines)) < 80


def test_help_imports_no_command(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom clipkit.__main__ import dispatch\n"
        "try:\n    dispatch(['--help'])\nexcept SystemExit:\n    pass\n"
        "names = 'clipkit.inference.encode', 'clipkit.inference.classify', 'rich', 'PIL', 'pyarrow'\n"
        "print([name for name in names "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_ctrl_c_during_import_prints_one_line(name: str, command: Any) -> None:
    code = (
        "import signal\nfrom clipkit import __main__, cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupted(module):\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException as error:\n        raise ImportError from error\n"
        f"cli.import_module = interrupted\n__main__.dispatch({[name, *NEEDED[name]]})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"stopped; {command.stopped}\n"


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "clipkit"], [str(Path(sys.executable).with_name("clipkit"))]])
def test_encode_as_a_program(program: list[str], checkpoint: Path, photos: Path) -> None:
    if not program[0].startswith("-") and not Path(program[0]).exists():
        pytest.skip("clipkit is not installed as a command")
    command = [sys.executable, *program, "encode", "photos", "--out", "out"]
    done = subprocess.run(
        [*command, "--model", str(checkpoint)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [re.sub(r"[\d.]+(?= s|/s)", "_", line) for line in done.stdout.splitlines()] == [
        "4 images in _ s (_/s); wrote 1 of 1 file",
        "1 failed, listed in out/failures.jsonl; the first: photos/x.png: not an image in a known format",
        "3 embeddings of dimension 64 in 1 file in out/img_emb",
    ]


def test_encode_reports_existing_embeddings(
    checkpoint: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    arguments = ["encode", "photos", "--out", "out", "--model", str(checkpoint), "--rows-per-file", "2"]
    assert dispatch(arguments) == 0
    assert "wrote 2 of 2 files\n" in capsys.readouterr().out
    assert dispatch(arguments) == 0
    said = capsys.readouterr()
    there = "3 embeddings already complete, 1 failed before (out/failures.jsonl)"
    assert (said.out, said.err) == (f"nothing to do: {there}\n", "")
    Image.new("RGB", (9, 9)).save("photos/x.png")
    assert dispatch(arguments) == 0
    said = capsys.readouterr()
    again = "1 file replaced because of changed sources; 1 already complete"
    assert [re.sub(r"[\d.]+(?= s|/s)", "_", line) for line in said.out.splitlines()] == [
        f"2 images in _ s (_/s); 1 of them unchanged and not encoded again; wrote 1 of 2 files; {again}",
        "4 embeddings of dimension 64 in 2 files in out/img_emb",
    ]
    assert not Path("out/failures.jsonl").exists()


def test_encode_reads_the_member_that_the_model_was_trained_on(
    model: CLIP, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(data=DataConfig(image="img_content", captions=("caption",)))
    optimizer = adamw(model, OptimConfig())
    save_checkpoint(Path("run"), model, optimizer, LoopState(step=0, data=""), config, keep=1)
    write_published("rs5m", Path("shards/0.tar"), 3)
    command = ["encode", "shards", "--model", "run"]
    for out, options, name in (("images", [], "img_content"), ("texts", ["--text"], "caption")):
        assert dispatch([*command, "--out", out, *options]) == 0
        said = capsys.readouterr()
        assert f"\nread from {name}, as in the model's training\n" in said.out and "failed" not in said.out
    assert dispatch([*command, "--out", "other", "--image", "img_name"]) == 1


def test_encode_counts_empty_lines(
    checkpoint: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    Path("lines.txt").write_text("a cat\n\na dog\n")
    assert dispatch(["encode", "lines.txt", "--text", "--out", "out", "--model", str(checkpoint)]) == 0
    assert "1 empty line encoded like any other text\n" in capsys.readouterr().out


def test_encode_exits_1_if_all_images_fail(
    checkpoint: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    assert dispatch(["encode", "photos/x.png", "--out", "out", "--model", str(checkpoint)]) == 1
    assert "0 embeddings of dimension 64" in capsys.readouterr().out


def test_progress_prints_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_PLAIN_EVERY_SECONDS", 0.0)
    for total in (2000, None):
        with terminal.CountProgress("encoding", total=total, shown=True) as bar:
            bar.show(1500, 2)
    with terminal.CountProgress("encoding", total=2000, shown=False) as bar:
        bar.show(1500, 2)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"encoding 1,500 of 2,000, [\d,.]+/s, 2 failed, left 0m00s", first)
    assert re.fullmatch(r"encoding 1,500, [\d,.]+/s, 2 failed", second)


def test_classify_prints_a_table_at_most_80_columns_wide(
    checkpoint: Path, photos: Path, model: CLIP, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.cells import cell_len

    assert classify(checkpoint, "--top", "4") == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert lines[0].split() == ["image", "label", "probability"]
    assert len(lines) == 1 + 3 * 4
    assert lines[1].startswith("… there are for names of images.png  ")
    want = clipkit.classify("photos/a.png", LABELS, model)[0]
    first = int(want.argmax())
    (line,) = (line for line in lines if line.startswith("photos/a.png"))
    assert LABELS[first][:20] in line
    assert line.endswith(f"{want[first]:.1%}")
    assert said.err.splitlines() == [
        "failed: photos/x.png: not an image in a known format",
        "1 of 4 images failed",
    ]


def test_csv_escapes_formulas_and_reads_back(checkpoint: Path, photos: Path) -> None:
    Path("photos/a.png").rename("=1+1.png")
    Path("photos/b.png").rename("photos/b\r=2.png")
    labels = ["=cmd|' /C calc'!A0", "@SUM(1)", "-2+3", "+4", "\uff1d5", "'=quoted", "plain"]
    command = [
        "classify",
        "photos/b\r=2.png",
        "=1+1.png",
        "--labels",
        "labels.txt",
        "--model",
        str(checkpoint),
    ]
    Path("labels.txt").write_text("\n".join(labels), encoding="utf-8")
    for out in ("out.csv", "out.json"):
        assert dispatch([*command, "--top", "7", "--out", out]) == 0
    with open("out.csv", newline="", encoding="utf-8") as file:  # noqa: PTH123
        rows = list(csv.reader(file))[1:]
    exact = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert [one["image"] for one in exact] == ["photos/b\r=2.png", "=1+1.png"]
    assert [row[0] for row in rows] == ["photos/b\r=2.png", "'=1+1.png"]
    for row, one in zip(rows, exact, strict=True):
        assert not any(cell.startswith(("=", "+", "-", "@", "\uff1d")) for cell in row)
        wanted = [found["label"] for found in one["labels"]]
        assert sorted(wanted) == sorted(labels)
        assert row[2::2] == [label if label == "plain" else f"'{label}" for label in wanted]
    Path("earlier.csv").write_bytes(Path("out.csv").read_bytes().replace(b"image,", b"picture,", 1))
    for name in ("out.csv", "earlier.csv"):
        table = Table(Path(name), image_column=None, caption_column="label_1")
        assert [(row.path, row.caption) for row in table] == [
            (one["image"], one["labels"][0]["label"]) for one in exact
        ]


def test_classify_writes_csv_and_json(checkpoint: Path, photos: Path, model: CLIP) -> None:
    for name in ("out.csv", "out.json", "out.jsonl"):
        assert classify(checkpoint, "--top", "2", "--out", name) == 0
    images = sorted(str(path) for path in photos.glob("*.png") if path.name != "x.png")
    want = clipkit.classify(images, LABELS, model)
    with open("out.csv", newline="") as file:  # noqa: PTH123
        header, *rows = csv.reader(file)
    assert header == ["image", "source", "label_1", "probability_1", "label_2", "probability_2"]
    as_json = json.loads(Path("out.json").read_text())
    assert as_json == [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    for row, one, image, probabilities in zip(rows, as_json, images, want, strict=True):
        best = probabilities.topk(2)
        labels = [LABELS[place] for place in best.indices.tolist()]
        assert row[:2] == [image, "photos"]
        assert row[2::2] == labels
        assert [float(value) for value in row[3::2]] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert (one["image"], one["source"]) == (image, "photos")
        assert [label["label"] for label in one["labels"]] == labels
        assert [label["probability"] for label in one["labels"]] == [float(value) for value in row[3::2]]
    assert not list(Path().glob(".*partial"))


def test_classify_streams_with_bounded_read_ahead(photos: Path, model: CLIP) -> None:
    """Results of an endless stream arrive while at most a few batches are read ahead."""
    taken = 0

    class Endless(Stream):
        def __iter__(self) -> Iterator[Item]:
            nonlocal taken
            while True:
                taken += 1
                yield Item(source="", key=str(taken), image=photos / "a.png")

    features = FeatureStream(model, batch_size=4, workers=2)
    weights = clipkit.zero_shot_classifier(model, ["cat", "dog"])
    endless = classify_images(Endless(["photos"]), features, ["cat", "dog"], weights, top=1)
    for number in range(1, 100):
        found = next(endless)
        assert isinstance(found, Classification)
        assert found.image == str(number)
        assert taken < number + 4 * 5
    endless.close()  # type: ignore[attr-defined]


def test_classify_reads_labels_and_templates_from_files(
    checkpoint: Path, photos: Path, model: CLIP, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("names.txt").write_text("cat, or kitten\n\ndog\n", encoding="utf-8-sig")
    Path("prompts.txt").write_text("a {c}\nthe {}\n")
    arguments = ["classify", "photos/a.png", "--labels", "names.txt", "--model", str(checkpoint)]
    assert dispatch([*arguments, "--templates", "prompts.txt", "my {c}", "--out", "out.json"]) == 0
    (one,) = json.loads(Path("out.json").read_text())
    want = clipkit.classify(
        "photos/a.png", ["cat, or kitten", "dog"], model, templates=["a {c}", "the {c}", "my {c}"]
    )
    assert one["labels"][0]["probability"] == pytest.approx(float(want.max()), abs=1e-5)
    assert len(one["labels"]) == 2  # --top is 5, but there are only two labels
    said = capsys.readouterr()
    assert (said.out, said.err) == ("wrote 1 image to out.json\n", "")


def test_classify_exits_1_and_writes_an_empty_array_if_all_images_fail(
    checkpoint: Path, photos: Path
) -> None:
    arguments = ["--labels", "cat,dog", "--model", str(checkpoint), "--out", "out.json"]
    assert dispatch(["classify", "photos/x.png", *arguments]) == 1
    assert json.loads(Path("out.json").read_text()) == []


def test_interrupted_classify_keeps_the_previous_file(
    checkpoint: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clipkit.inference import classify as classification

    classify_images = classification.classify_images

    def stopped(*arguments: object, **more: object) -> Iterator[object]:
        yield next(classify_images(*arguments, **more))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    Path("out.csv").write_text("former")
    monkeypatch.setattr(classification, "classify_images", stopped)
    with pytest.raises(KeyboardInterrupt, match="no file was written"):
        classify(checkpoint, "--out", "out.csv")
    assert Path("out.csv").read_text() == "former"
    assert not list(Path().glob(".*partial"))


def test_control_characters_in_file_names_are_escaped(
    checkpoint: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "a.png").rename(photos / "\x1b[31mred\n.png")
    (photos / "x.png").rename(photos / "\x1b[2Jx.png")
    assert classify(checkpoint) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\\x1b[31mred\\n.png" in said.out


def test_invalid_labels_and_templates_are_rejected(tmp_path: Path) -> None:
    assert labels_of(" cat , dog,") == ["cat", "dog"]
    assert templates_of(()) == ["a photo of a {c}."]
    many = ",".join(f"label {number}" for number in range(5000))
    assert len(labels_of(many)) == 5000
    for given, message in [
        ("labels.txt", "is neither a file"),
        ("cat,", "has 1 label: classification needs at least two"),
        ("cat,dog,cat", "label 'cat' occurs twice"),
        ("~nobodyhere", "is neither a file"),
        ("cat,d\udcf6g", r"label 'd\\udcf6g' is not UTF-8"),
    ]:
        with pytest.raises(DataError, match=message):
            labels_of(given)
    assert labels_of("~cat,dog") == ["~cat", "dog"]
    assert templates_of(["~a {c}"]) == ["~a {c}"]
    with pytest.raises(
        DataError, match=r"'prompts.txt' is neither a file of templates nor a template with \{c\}"
    ):
        templates_of(["prompts.txt"])
    with pytest.raises(DataError, match="is not UTF-8"):
        templates_of(["\udcf6 {c}"])
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="is empty"):
        templates_of([str(tmp_path / "empty")])


def mistakes(checkpoint: Path) -> list[tuple[Sequence[str], str]]:
    model = ["--model", str(checkpoint)]
    labels = ["--labels", "cat,dog"]
    return [
        (
            ["encode", "nowhere", "--out", "out", *model],
            "no data at 'nowhere': there is no such file or folder",
        ),
        (["encode", "photos", "--out", "out", "--model", "nowhere"], "nowhere"),
        (["encode", "photos", "--out", "out", "--device", "tpu9", *model], "Unknown device 'tpu9'"),
        (
            ["encode", "photos", "--out", "out", "--device", "meta", *model],
            "device = 'meta' stores no values",
        ),
        (
            ["encode", "~nobodyhere/x", "--out", "out", *model],
            "no data at '~nobodyhere/x': there is no such file",
        ),
        (["encode", "/dev/zero", "--out", "out", *model], "/dev/zero is not a regular file"),
        (
            ["encode", "photos", "--out", "out", "--batch-size", "0", *model],
            "'0' is not a whole number from 1 to 65,536",
        ),
        (["encode", "photos", "--out", "photos/a.png/x", *model], "cannot write photos/a.png/x"),
        (["classify", "photos", *labels, "--model", "nowhere"], "nowhere"),
        (["classify", "photos", "--labels", "cat", *model], "is neither a file"),
        (["classify", "photos", *labels, "--templates", "x", *model], "nor a template with {c}"),
        (
            ["classify", "photos", "--labels", "cat,a dog, A  Dog", *model],
            "'a dog' and 'A Dog' have the same tokens",
        ),
        (
            ["classify", "photos", *labels, "--top", "0", *model],
            "argument --top: '0' is not a whole number from 1",
        ),
        (["classify", "photos", *labels, "--out", "x.xlsx", *model], "must end in .csv, .json or .jsonl"),
        (["classify", "photos", *labels, "--out", "photos/is.csv", *model], "photos/is.csv is a folder"),
        (["classify", "photos", *labels, "--out", "no/x.csv", *model], "cannot write no/x.csv"),
    ]


@pytest.mark.parametrize("number", range(16))
def test_invalid_commands_print_one_line_and_exit_1(
    number: int, checkpoint: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "is.csv").mkdir()
    arguments, message = mistakes(checkpoint)[number]
    with pytest.raises(SystemExit) as stop:
        run_command(partial(dispatch, arguments))
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (1, "")
    assert said.err.startswith("error: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert sorted(os.listdir()) == ["photos"]  # noqa: PTH208


def test_standard_input_requires_a_single_process(
    checkpoint: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(clipkit.ConfigError, match="only one process can read standard input"):
        dispatch(["encode", "-", "--text", "--out", "out", "--model", str(checkpoint)])
    assert torch.get_num_threads() == 1


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plain image, a transparent one and two rotated ones in ``special`` of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("special")
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    Image.fromarray(pixels[..., :3]).save(folder / "a.png")
    Image.fromarray(pixels).save(folder / "b.png")
    Image.fromarray(pixels[..., :3]).save(folder / "c.jpg", exif=exif)
    Image.fromarray(pixels[..., :3]).save(folder / "d.webp", exif=exif)
    return folder


TOLD = [
    (
        "1 of 4 images is transparent and without a background: the colors hidden under the transparent parts are "
        "used, as open_clip does; set --background white"
    ),
    "2 of 4 images are rotated by an EXIF tag that is not applied, as in open_clip; set --upright",
]


@pytest.mark.parametrize("command", ["encode", "classify"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], TOLD),
        (["--background", "#fff"], TOLD[1:]),
        (["--upright"], TOLD[:1]),
        (["--background", "none", "--no-upright"], []),
    ],
)
def test_transparent_and_rotated_images_are_reported_once(
    checkpoint: Path,
    special: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    told: list[str],
) -> None:
    more = {"encode": ["--out", "out", "--quiet"], "classify": ["--labels", "a,b", "--out", "out.csv"]}
    assert dispatch([command, "special", "--model", str(checkpoint), *more[command], *options]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "images" in line] == told


def test_deep_images_fail_with_the_cause_until_a_range_is_given(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for number in range(3):
        gray = random.integers(0, 256, (20, 30), dtype=np.uint8)
        for folder, pixels in (("plain", gray), ("deep", gray.astype(np.uint16) * 200 + 8000)):
            Path(folder).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(f"{folder}/{number}.png")
    gray = random.integers(0, 256, (20, 30), dtype=np.uint8)
    for folder in ("plain", "deep"):
        Image.fromarray(gray).save(f"{folder}/3.png")
    model = ["--model", str(checkpoint)]
    for folder, options in (("plain", []), ("deep", []), ("deep", ["--pixel-range", "8000,59000"])):
        out = folder + "_ranged" * bool(options)
        assert dispatch(["encode", folder, *model, "--quiet", "--out", out, *options]) == 0
    failures = Path("deep/failures.jsonl").read_text().splitlines()
    assert len(failures) == 3
    assert all("16-bit grayscale image with values from" in line for line in failures)
    plain, ranged = (np.load(f"{out}/img_emb/img_emb_0.npy") for out in ("plain", "deep_ranged"))
    assert np.array_equal(plain, ranged)
    capsys.readouterr()
    with pytest.raises(
        ConfigError, match=r"the pixel range \(--pixel-range\) was 8000,59000 and is now auto"
    ):
        dispatch(["encode", "deep", *model, "--quiet", "--out", "deep_ranged"])
    # search reads the range from the embeddings, and shows thumbnails
    assert dispatch(["search", "deep_ranged", "--image", "deep/1.png", "-k", "1", "--html", "page.html"]) == 0
    assert "deep/1.png" in Path("page.html").read_text()


def test_embeddings_depend_on_background_and_orientation(
    checkpoint: Path, special: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    begin = ["encode", "special", "--model", str(checkpoint), "--quiet"]
    assert dispatch([*begin, "--out", "as_is"]) == 0
    assert dispatch([*begin, "--out", "chosen", "--background", "white", "--upright"]) == 0
    capsys.readouterr()
    plain, chosen = (np.load(f"{out}/img_emb/img_emb_0.npy") for out in ("as_is", "chosen"))
    assert [bool((a == b).all()) for a, b in zip(plain, chosen, strict=True)] == [True, False, False, False]
    model = clipkit.load(checkpoint, background="white", upright=True)
    wanted = clipkit.encode_image(sorted(special.iterdir()), model).numpy()
    assert np.abs(chosen - wanted).max() < 1e-3
    for out, options, cause in (
        ("as_is", ["--background", "white"], r"background \(--background\) was none and is now #ffffff"),
        ("as_is", ["--upright"], r"\(--upright\) was False and is now True"),
        (
            "as_is",
            ["--upright", "--background", "red"],
            r"is now #ff0000; .*\(--upright\) was False and is now True",
        ),
        ("chosen", ["--upright"], r"background \(--background\) was #ffffff and is now none"),
    ):
        with pytest.raises(ConfigError, match=cause):
            dispatch([*begin, "--out", out, *options])
    manifest = json.loads(Path("as_is/manifest.json").read_text())
    for name in ("background", "upright"):  # as in manifests of earlier versions
        del manifest[name]
    Path("as_is/manifest.json").write_text(json.dumps(manifest))
    assert dispatch([*begin, "--out", "as_is"]) == 0
    assert "nothing to do" in capsys.readouterr().out
