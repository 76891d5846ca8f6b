"""Tests of OpenVINO exports."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.export import export, onnx
from clipkit.formats.checkpoint import save_model
from clipkit.formats.graph import open_openvino_core
from clipkit.inference.stream import FeatureStream
from clipkit.model.clip import CLIP
from tests.clipkit.exported_models import ASCII, apart, exported, model_of

FILES = {"visual.xml", "visual.bin", "textual.xml", "textual.bin", "openvino_config.json", "tokenizer.json"}


def run_code(code: str, folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Run Python code in a process of its own in a folder; return what it prints."""
    environment = {**environment, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module", autouse=True)
def _reused_onnx_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Export a model to ONNX once: torch's exporter takes longer than all that OpenVINO does."""
    written: dict[tuple[object, ...], tuple[Path, list[str]]] = {}
    write = onnx.write_model

    def write_or_copy(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
        key = (
            repr(model.architecture),
            model.preprocess,
            *(value.numpy().tobytes() for value in tensors.values()),
        )
        if key not in written:
            graphs = tmp_path_factory.mktemp("onnx")
            written[key] = graphs, write(model, tensors, graphs)
        shutil.copytree(written[key][0], folder, dirs_exist_ok=True)
        return written[key][1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(onnx, "write_model", write_or_copy)
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 14 images and a file that is none."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(14):
        low_resolution = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(low_resolution).resize((40, 48), Image.Resampling.BICUBIC).save(
            folder / f"{seed}.png"
        )
    (folder / "damaged.jpg").write_bytes(b"\xff\xd8\xff damaged")
    return folder


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIP, Path]:
    out = tmp_path_factory.mktemp("export") / "float32"
    return exported("own", out, "openvino"), out


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> tuple[CLIP, Path]:
    model, folder = model_of("quick_gelu"), tmp_path_factory.mktemp("export")
    save_model(model, folder / "model")
    to = ["--to", "openvino", "--quantize", "int8", "--calibrate", str(photos)]
    assert dispatch(["export", str(folder / "model"), str(folder / "int8"), *to]) == 0
    return model, folder / "int8"


def test_embeddings_of_all_sizes_agree(float32: tuple[CLIP, Path], paths: list[Path]) -> None:
    model, out = float32
    exported_model = clipkit.load(out)
    assert exported_model.origin == f"OpenVINO export {out} (float32)"
    assert exported_model.preprocess == model.preprocess
    assert exported_model.logit_scale.item() == pytest.approx(model.logit_scale.item())
    for batch in (1, 5, 3):
        images = clipkit.encode_image(paths[:batch], exported_model)
        assert apart(images, clipkit.encode_image(paths[:batch], model)) <= 1e-5
        texts = clipkit.encode_text(ASCII[:batch], exported_model)
        assert apart(texts, clipkit.encode_text(ASCII[:batch], model)) <= 1e-5


def test_autocast_computes_in_bfloat16(float32: tuple[CLIP, Path], paths: list[Path]) -> None:
    model, out = float32
    exported_model = clipkit.load(out)
    expected = clipkit.encode_image(paths, model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = clipkit.encode_image(paths, exported_model)
    cosines = (rounded * expected).sum(dim=1)
    assert rounded.dtype == torch.float32 and cosines.min() > 0.999
    supports_bfloat16 = "BF16" in open_openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert (apart(rounded, expected) > 1e-5) == supports_bfloat16
    assert apart(clipkit.encode_image(paths, exported_model), expected) <= 1e-5


def test_example_of_the_model_card_runs(float32: tuple[CLIP, Path], paths: list[Path]) -> None:
    model, out = float32
    with Image.open(paths[0]) as image:
        image.save(out.parent / "cat.jpg")
    (code,) = re.findall(r"### OpenVINO\n\n```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    # in a process of its own, as freed cores of OpenVINO can end this one: see ``open_openvino_core``
    offline = "from clipkit.formats.graph import import_openvino\nimport_openvino()\n"
    output = run_code(offline + code, out.parent)
    printed = [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", output)]
    texts = ["a photo of a cat", "a photo of a dog"]
    similarities = clipkit.encode_image(paths[0], model) @ clipkit.encode_text(texts, model).T
    expected = (model.logit_scale.exp() * similarities).softmax(dim=-1).detach().flatten()
    np.testing.assert_allclose(printed, expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("kind", ["resnet", "timm", "distilled"])
def test_other_towers(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    size = model.preprocess.image_size
    images = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8)
    (record,) = export(model, tmp_path / "float32", to=["openvino"])
    assert set(record.files) >= FILES and record.difference is not None and record.difference <= 1e-5
    (record,) = export(model, tmp_path / "int8", to=["openvino-int8"], images=images)
    assert record.difference is not None and 1e-5 < record.difference < 0.1
    exported_model = clipkit.load(tmp_path / "float32")
    with torch.no_grad():
        assert exported_model.encode_image(images[:0]).shape == (0, model.dim)
        assert apart(exported_model.encode_image(images), model.encode_image(images)) <= 1e-5


def test_int8_export(int8: tuple[CLIP, Path], paths: list[Path]) -> None:
    model, out = int8
    files = {path.name for path in out.iterdir()}
    assert files >= FILES and not any(name.startswith((".", "tmp")) for name in files)
    assert json.loads((out / "openvino_config.json").read_text())["weights"] == "int8"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: openvino\n") and "cosine similarity of embeddings" in card
    exported_model = clipkit.load(out)
    assert exported_model.origin == f"OpenVINO export {out} (int8)"
    for expected, quantized in (
        (clipkit.encode_image(paths, model), clipkit.encode_image(paths, exported_model)),
        (clipkit.encode_text(ASCII, model), clipkit.encode_text(ASCII, exported_model)),
    ):
        assert 0.95 < float((expected * quantized).sum(dim=1).min()) < 0.999999


def test_int8_export_states_its_sizes_and_images(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_model(model_of("quick_gelu"), tmp_path / "model")
    to = ["--to", "openvino-int8", "--calibrate", str(photos)]
    assert dispatch(["export", str(tmp_path / "model"), str(tmp_path / "out"), *to]) == 0
    _, measured, checked, compared, wrote = capfd.readouterr().out.splitlines()
    assert measured == f"measuring ranges of activations on 14 images of {photos}; 1 could not be read"
    assert re.search(r"the cosine similarity of embeddings to clipkit's is at least 0\.9\d+$", checked)
    sizes = re.findall(r"(\w+)\.xml ([\d.]+) → ([\d.]+) MB, ([\d.]+) → ([\d.]+) ms for 8", compared)
    assert [name for name, *_ in sizes] == ["visual", "textual"]
    for name, before, after, *_ in sizes:
        size = sum(path.stat().st_size for path in (tmp_path / "out").glob(f"{name}.*")) / 1e6
        assert float(after) < float(before) and float(after) == pytest.approx(size, abs=0.05)
    assert wrote.startswith("wrote")


def test_ranges_depend_on_the_images(tmp_path: Path) -> None:
    """Ranges of black images do not fit others: such an export is not written or is less similar."""
    model = model_of("quick_gelu")
    size = model.preprocess.image_size
    noise = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8)
    (suitable,) = export(model, tmp_path / "noise", to=["openvino-int8"], images=noise)
    assert suitable.difference is not None
    try:
        (black,) = export(model, tmp_path / "black", to=["openvino-int8"], images=torch.zeros_like(noise))
    except CheckpointError as error:
        assert "nothing was written" in str(error)
    else:
        assert black.difference is not None and black.difference > 2 * suitable.difference


def test_images_for_ranges_are_required(tmp_path: Path, photos: Path) -> None:
    save_model(model_of("quick_gelu"), tmp_path / "model")
    command = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"export to openvino-int8 measures ranges .* with --calibrate"):
        dispatch([*command, "--to", "openvino", "--quantize", "int8"])
    for to in ([], ["--to", "openvino"], ["--to", "onnx", "--quantize", "int8"]):
        with pytest.raises(ConfigError, match="--calibrate has no effect without"):
            dispatch([*command, *to, "--calibrate", str(photos)])
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(photos.iterdir())[-6:]:
        (few / path.name).hardlink_to(path)
    with pytest.raises(DataError, match=r"few has 5 images .* expected at least 10 \(.*damaged\.jpg"):
        dispatch([*command, "--to", "openvino-int8", "--calibrate", str(few)])
    with pytest.raises(ConfigError, match="onnx and openvino cannot share a folder"):
        export(model_of("own"), tmp_path / "out", to=["onnx", "openvino"])
    assert not (tmp_path / "out").exists()


def test_damaged_files(float32: tuple[CLIP, Path], tmp_path: Path) -> None:
    _, out = float32
    for name in FILES:
        (tmp_path / name).write_bytes((out / name).read_bytes())
    config = (out / "openvino_config.json").read_bytes()
    with pytest.raises(ConfigError, match="an ONNX or OpenVINO export cannot be explained"):
        clipkit.explain(np.zeros((16, 16, 3), np.uint8), "a cat", clipkit.load(tmp_path))
    for name, content, message in (
        ("visual.bin", b"", r"cannot read .*visual\.xml"),
        ("visual.xml", b"<net", r"cannot read .*visual\.xml"),
        ("textual.xml", None, r"textual\.xml: No such file"),
        ("visual.xml", b"nothing", r"cannot read .*visual\.xml: not a graph of OpenVINO"),
        ("visual.xml", (out / "textual.xml").read_bytes(), r"visual\.xml"),
        ("openvino_config.json", b"{}", r"openvino_config\.json is invalid"),
        (
            "openvino_config.json",
            config.replace(b'size": 16', b'size": 32'),
            "any x 3 x 16 x 16 instead of any x",
        ),
        (
            "openvino_config.json",
            config.replace(b'dim": 128', b'dim": 64'),
            "the output has the shape any x 128",
        ),
        (
            "openvino_config.json",
            config.replace(b'scale": ', b'scale": -'),
            r"openvino_config\.json is invalid",
        ),
    ):
        former = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            clipkit.load(tmp_path)
        assert "\n" not in str(caught.value)
        (tmp_path / name).write_bytes(former)
    clipkit.load(tmp_path)


def test_no_note_that_bfloat16_is_faster(int8: tuple[CLIP, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = int8
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert FeatureStream(model).is_faster_in_bf16
    assert not FeatureStream(clipkit.load(out)).is_faster_in_bf16


def test_weights_that_change_in_place_have_no_effect(
    float32: tuple[CLIP, Path], paths: list[Path], tmp_path: Path
) -> None:
    model, out = float32
    for name in FILES:
        (tmp_path / name).write_bytes((out / name).read_bytes())
    exported_model = clipkit.load(tmp_path)
    with (tmp_path / "visual.bin").open("r+b") as file:
        file.write(bytes(100_000))
        file.truncate(200_000)
    assert apart(clipkit.encode_image(paths, exported_model), clipkit.encode_image(paths, model)) <= 1e-5


def test_nothing_is_reported_to_the_authors_of_openvino(float32: tuple[CLIP, Path], tmp_path: Path) -> None:
    """OpenVINO and NNCF send reports when they are imported, and keep an identifier in the user's folder."""
    code = f"""
import sys, clipkit
from clipkit.formats.graph import import_openvino
clipkit.load({str(float32[1])!r})
import_openvino()
import nncf
assert not [name for name in sys.modules if name.startswith("openvino_telemetry.")]
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "JENKINS_URL")}
    run_code(code, tmp_path, environment | {"HOME": str(tmp_path)})
    assert not (tmp_path / "intel").exists()


def test_unsuitable_images_are_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipkit.export.write.LOWEST_COSINE", 0.9999999)
    model = model_of("quick_gelu")
    size = model.preprocess.image_size
    images = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"nothing was written: .* at least 0\.\d+; the limit is 1$"):
        export(model, tmp_path / "out", to=["openvino-int8"], images=images)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "nothing was written: NNCF was ended by signal 11 in 3 attempts"),
        (
            "echo 'ValueError: no' >&2; exit 1",
            "nothing was written: NNCF cannot quantize the model: ValueError: no",
        ),
        ('mkdir "{folder}/crashed" 2> /dev/null && kill -SEGV $$; exec "{python}" "$@"', ""),
    ],
)
def test_quantization_that_crashes(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    text = script.replace("{folder}", str(tmp_path)).replace("{python}", sys.executable)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    model = model_of("quick_gelu")
    size = model.preprocess.image_size
    images = torch.randint(0, 256, (12, 3, size, size), dtype=torch.uint8)
    if message:
        with pytest.raises(CheckpointError, match=f"^{message}$"):
            export(model, tmp_path / "out", to=["openvino-int8"], images=images)
        assert [*tmp_path.iterdir()] == [program]
    else:
        (record,) = export(model, tmp_path / "out", to=["openvino-int8"], images=images)
        assert record.difference is not None and (tmp_path / "crashed").is_dir()


def test_signals_are_handled_after_models_are_freed(float32: tuple[CLIP, Path], tmp_path: Path) -> None:
    """OpenVINO replaces the stack on which handlers of signals run, and frees it with its cores."""
    code = f"""
import faulthandler, gc, os, signal
faulthandler.enable()
import numpy as np
import clipkit

def use_model():
    model = clipkit.load({str(float32[1])!r})
    clipkit.encode_image(np.zeros((1, 16, 16, 3), np.uint8), model)
    clipkit.encode_text(["a"], model)

use_model()
gc.collect()
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGUSR1)
os._exit(0)
"""
    assert run_code(code, tmp_path) == "handled\n"
