"""Tests of the color palettes of Image GPT."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from clipkit.errors import ConfigError, DataError
from data.__main__ import main
from data.palette import choose_palette
from data.shards.writer import DatasetWriter, Record

COLORS = np.array([[0, 0, 0], [255, 0, 0], [10, 200, 30], [250, 250, 255]], dtype=np.uint8)


def test_centers_are_the_colors_of_flat_images() -> None:
    pixels = COLORS[np.random.default_rng(0).integers(0, 4, 5000)]
    found = choose_palette(pixels, 4)
    assert np.allclose(np.sort((found + 1) * 127.5, axis=0), np.sort(COLORS, axis=0), atol=0.5)
    with pytest.raises(ConfigError, match="--colors 5: the images have only 4 different colors"):
        choose_palette(pixels, 5)


def test_command_skips_broken_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DatasetWriter(tmp_path / "shards") as writer:
        for number in range(20):
            file = BytesIO()
            Image.new("RGB", (8, 8), tuple(COLORS[number % 4].tolist())).save(file, "PNG")
            data = b"broken" if number == 7 else file.getvalue()
            writer.write("train", Record(key=f"{number:03d}", image=data, extension="png", caption="a"))
        writer.finish({"name": "flat"})
    out = tmp_path / "palette.safetensors"
    command = ["palette", str(tmp_path / "shards"), "--out", str(out), "--colors", "4", "--quiet"]
    assert main(command) == 0
    assert "4 colors of 19 images" in capsys.readouterr().out
    assert load_file(out)["palette"].shape == (4, 3)
    with pytest.raises(DataError, match="already exists"):
        main(command)
    with pytest.raises(ConfigError, match=r"palette\.json must be a file name ending in \.safetensors"):
        main(["palette", str(tmp_path / "absent"), "--out", str(tmp_path / "palette.json")])
