"""Tests of ``python -m data``: output, exit status, interrupts."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from clipkit.errors import DataError, run_command
from data.__main__ import main
from data.shards.writer import DatasetWriter, Record

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str | Path, columns: int = 80) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=120
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    path = tmp_path / "table.csv"
    path.write_text("path,caption\nred.png,red\ngone.png,gone\nred.png,\nred.png,red again\n")
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["make", "--help"], ["pack", "--help"]])
def test_help_fits_80_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 8
    assert max(map(len, lines)) <= 80


def test_pack_reports_packed_and_bad_rows(table: Path, tmp_path: Path) -> None:
    done = run("pack", table, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.pop(0).startswith(f"created {tmp_path / 'out'} in ")
    assert lines == [
        "  columns  path (image), caption (caption)",
        "  1 image has several captions: training uses the first, or draws one with",
        "    data.captions=captions data.caption_choice=random; evaluation uses all",
        "  bad rows, by cause:",
        "          1  missing file",
        "          1  empty caption",
        "2 rows, 1 image with 2 captions",
        "packed 1 image into train",
        f"warning: 2 bad of 4 rows: see {tmp_path / 'out/bad_rows.jsonl'}",
    ]


def test_pack_suggests_options_for_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (4, 2), "red").save("turned.jpg", exif=turned)
    Image.new("RGBA", (4, 2), (255, 0, 0, 9)).save("clear.png")
    pairs: list[tuple[str, object]] = [
        ("turned.jpg", ["red", "a red one"]),
        ("clear.png", "clear"),
        ("clear.png", "x"),
        ("gone", ""),
    ]
    lines = [json.dumps({"path": path, "caption": caption}) + "\n" for path, caption in pairs]
    Path("t.jsonl").write_text("".join(lines))

    def said(*options: str) -> str:
        assert (
            main(
                ["pack", "t.jsonl", f"out{len(list(tmp_path.iterdir()))}", "--quiet", "--no-group", *options]
            )
            == 0
        )
        output = capsys.readouterr().out
        assert max(map(len, output.splitlines())) <= 80
        return " ".join(output.split())

    output = said("--test", "1")
    assert "1 image has several captions: training uses the first, or draws one with" in output
    assert "1 image has an EXIF orientation: stored upright (unless --keep-orientation is given)" in output
    assert "2 images have transparent parts" in output and "--background white blends them" in output
    assert "packed 0 images into train and 3 into test" in output
    assert "1 bad of 4 rows: see" in output
    output = said("--test", "1e-9", "--keep-orientation", "--background", "white")
    assert "1 image has an EXIF orientation: stored unchanged, and CLIP ignores it" in output
    assert "2 images have transparent parts: blended onto white" in output
    assert "packed 3 images into train and 0 into test" in output


@pytest.mark.parametrize(
    "size", [pytest.param(100, marks=pytest.mark.long), 5_000, pytest.param(10_000, marks=pytest.mark.long)]
)
def test_pack_on_full_disk_prints_one_line_and_leaves_no_files(tmp_path: Path, size: int) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "noise.png")
    rows = "noise.png,x\n" * 20 + "gone.png,x\n" * 20
    (tmp_path / "table.csv").write_text("path,caption\n" + rows)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "data",
            "pack",
            "--quiet",
            "--no-group",
            tmp_path / "table.csv",
            tmp_path / "out",
        ],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
        # the limit on file sizes makes writes fail like a full disk
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write {tmp_path / 'out'}: File too large\n"
    assert sorted(tmp_path.iterdir()) == before


def test_options_reach_pack(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--image-column", "path", "--caption-column", "caption", "--samples-per-shard", "1"]
    options += ["--no-group"]
    assert main(["pack", str(table), str(tmp_path / "out"), *options, "--max-side", "4", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in (tmp_path / "out/train").glob("*.tar")) == ["0.tar", "1.tar"]


def test_make_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert main(["make", "digits", str(tmp_path / "out"), "--quiet"]) == 0
    output = capsys.readouterr()
    assert "test  1,797 samples" in output.out
    assert output.err == ""


def test_user_errors_print_one_line_and_exit_with_1(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "bad.csv").write_text("path,caption\ngone.png,gone\n")
    for arguments, message in [
        (["make", "glyfs", tmp_path / "x"], "did you mean 'glyphs'?"),
        (["pack", tmp_path / "none.csv", tmp_path / "x"], "none.csv is not a file"),
        (["pack", table, tmp_path / "full"], "already exists and is not empty"),
        (["pack", table, tmp_path / "x", "--caption-column", "captoin"], "did you mean 'caption'?"),
        (["pack", table, tmp_path / "red.png/x"], "red.png/x"),
        (["pack", table, tmp_path / "x", "--max-side", "0"], "--max-side: '0' is not a whole number from 1"),
        (["pack", table, tmp_path / "x", "--test", "10"], "--test: '10' is not a number from 0 to 1"),
        (["pack", table, tmp_path / "x", "--background", "wite"], "use a color such as white or #ffffff"),
        (["pack", tmp_path / "bad.csv", tmp_path / "x", "--quiet"], "no row of"),
    ]:
        given = list(map(str, arguments))
        with pytest.raises(SystemExit) as stop:
            run_command(partial(main, given))
        output = capsys.readouterr()
        assert (stop.value.code, output.out) == (1, "")
        assert output.err.startswith("error: ")
        assert message in output.err
        assert output.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def _heed_interrupts() -> None:
    """Restore SIGINT, which background jobs inherit as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupt_prints_one_line_and_leaves_no_files(tmp_path: Path, stop: signal.Signals) -> None:
    Image.new("RGB", (1000, 1000)).save(tmp_path / "a.png")
    with (tmp_path / "table.csv").open("w") as file:
        file.write("path,caption\n" + "a.png,x\n" * 20_000)
    command = [sys.executable, "-m", "data", "pack", f"{tmp_path}/table.csv", f"{tmp_path}/out"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out*/train/0.tar")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "stopped; nothing was written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "table.csv"]


def test_index_requires_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetWriter(tmp_path / "set") as writer:
        writer.write("train", Record(key="a", image=b"x", extension="png", caption="a"))
        writer.finish({})
    monkeypatch.setenv("CLIPKIT_CACHE", "/proc/nothing")
    with pytest.raises(DataError, match="/proc/nothing"):
        main(["index", str(tmp_path / "set"), "--quiet"])


def test_help_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from data.__main__ import COMMANDS, main\n"
        "for command in COMMANDS:\n"
        "    try: main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit(','.join({'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stderr.strip() == "", done.stderr
    assert "python -m data speed" in done.stdout
