"""Tests of ONNX exports, and of the examples in the model card of all libraries."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import export, onnx as export_onnx
from clipkit.export.checks import normalize_pixels
from clipkit.export.model_card import KnownScore, Source, render_card
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import preprocess_images
from clipkit.model.tokenizer import END_OF_TEXT
from clipkit.model.zero_shot import attach_class_head
from tests.clipkit.exported_models import ASCII, apart, exported, model_of


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIP, Path]:
    """A model exported for all libraries that can share a folder; one ONNX graph has external weights."""
    out = tmp_path_factory.mktemp("export") / "everything"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_onnx, "_INSIDE", 10_000_000)
        return exported("own", out, "open_clip", "transformers", "sentence-transformers", "onnx"), out


# --- ONNX ---------------------------------------------------------------------------------------------------


def test_onnx_export(everything: tuple[CLIP, Path], paths: list[Path]) -> None:
    import onnx
    import onnxruntime

    model, out = everything
    config = json.loads((out / "onnx_config.json").read_text())
    visual, textual = (onnxruntime.InferenceSession(out / config[kind]["file"]) for kind in ("image", "text"))
    pixels = normalize_pixels(preprocess_images(paths * 2, model.preprocess), model)
    images = clipkit.encode_image(paths * 2, model)
    for batch in (1, 3, 8):
        found = visual.run(["image_embeds"], {"pixel_values": pixels[:batch].numpy()})[0]
        assert apart(found, images[:batch]) <= 1e-5
    texts = (ASCII * 2)[:8]
    expected = clipkit.encode_text(texts, model)
    for batch in (1, 3, 8):
        for length in (60, 77):
            ids = clipkit.tokenize(texts[:batch], length)
            found = textual.run(["text_embeds"], {"input_ids": ids.numpy()})[0]
            assert apart(found, expected[:batch]) <= 1e-5
            ends = ids.masked_fill(ids == 0, END_OF_TEXT)  # as transformers pads
            found = textual.run(["text_embeds"], {"input_ids": ends.numpy()})[0]
            assert apart(found, expected[:batch]) <= 1e-5
    for session, shape in ((visual, ["batch", 3, 16, 16]), (textual, ["batch", "tokens"])):
        assert session.get_inputs()[0].shape == shape
        assert session.get_outputs()[0].shape == ["batch", 128]
    for file in ("visual.onnx", "textual.onnx"):
        graph = onnx.load(out / file)
        onnx.checker.check_model(graph, full_check=True)
        assert [(one.domain, one.version) for one in graph.opset_import] == [("", config["opset"])]
        assert b".py" not in (out / file).read_bytes()  # contains no source paths
    assert config["preprocess"] == json.loads(json.dumps(model.preprocess.to_dict()))
    assert config["logit_scale"] == pytest.approx(model.logit_scale.exp().item())


def test_large_weights_are_stored_outside_the_graph(everything: tuple[CLIP, Path]) -> None:
    _, out = everything
    assert (out / "textual.onnx").stat().st_size < 200_000
    assert (out / "textual.onnx.data").stat().st_size > 20_000_000
    assert (out / "visual.onnx").stat().st_size > 5_000_000 and not (out / "visual.onnx.data").exists()


def test_onnx_folder_loads(everything: tuple[CLIP, Path], paths: list[Path], tmp_path: Path) -> None:
    model, out = everything
    names = ("onnx_config.json", "visual.onnx", "textual.onnx", "textual.onnx.data", "tokenizer.json")
    for name in names:
        (tmp_path / name).hardlink_to(out / name)
    made = clipkit.load(tmp_path)
    assert made.origin == f"ONNX export {tmp_path} (float32)" and made.preprocess == model.preprocess
    for batch in (1, 5):
        images = clipkit.encode_image(paths[:batch], made)
        assert apart(images, clipkit.encode_image(paths[:batch], model)) <= 1e-5
        assert (
            apart(clipkit.encode_text(ASCII[:batch], made), clipkit.encode_text(ASCII[:batch], model)) <= 1e-5
        )
    assert made.logit_scale.item() == pytest.approx(model.logit_scale.item())
    assert (
        apart(clipkit.encode_image(paths, clipkit.load(tmp_path, dim=16)).norm(dim=1), torch.ones(5)) < 1e-5
    )
    with pytest.raises(ConfigError, match="a fixed architecture, image size and context length"):
        clipkit.load(tmp_path, image_size=32)
    with pytest.raises(ConfigError, match="its image tower has no weights: use this model with clipkit"):
        export(made, tmp_path / "again", to=["onnx"])
    image = [str(paths[0]), "a", "--out", str(tmp_path / "heat.png")]
    with pytest.raises(ConfigError, match="an ONNX or OpenVINO export cannot be explained: use the model"):
        dispatch(["explain", *image, "--model", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"ONNX export .* cannot be interpolated: use the model"):
        dispatch(["interpolate", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "between")])
    (tmp_path / "textual.onnx.data").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*textual\.onnx"):
        clipkit.load(tmp_path)
    (tmp_path / "textual.onnx").unlink()
    with pytest.raises(CheckpointError, match=r"textual\.onnx: No such file"):
        clipkit.load(tmp_path)
    for text in ("{}", '{"image": 3}', "nothing"):
        (tmp_path / "onnx_config.json").unlink()
        (tmp_path / "onnx_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"onnx_config\.json is"):
            clipkit.load(tmp_path)


def test_int8_export(paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    model, source, out = model_of("quick_gelu"), tmp_path / "model", tmp_path / "int8"
    save_model(model, source)
    assert dispatch(["export", str(source), str(out), "--to", "onnx", "--quantize", "int8"]) == 0
    _, checked, compared, _ = capsys.readouterr().out.splitlines()
    cosine = float(
        re.findall(r"cosine similarity of embeddings to clipkit's is at least (0\.\d+)", checked)[0]
    )
    assert cosine > 0.995
    found = re.findall(r"(\w+)\.onnx ([\d.]+) → ([\d.]+) MB, ([\d.]+) → ([\d.]+) ms for 8", compared)
    assert [name for name, *_ in found] == ["visual", "textual"]
    for name, before, after, *_ in found:
        assert float(after) < 0.7 * float(before)  # the graph is half of so small a model
        assert float(after) == pytest.approx((out / f"{name}.onnx").stat().st_size / 1e6, abs=0.05)
        graph = onnx.load(out / f"{name}.onnx")
        quantized = [one for one in graph.graph.initializer if one.data_type == onnx.TensorProto.INT8]
        assert len(quantized) >= 8  # four matrices of two blocks
    assert not (out / ".float32").exists()
    assert "cosine similarity of embeddings" in (out / "README.md").read_text()
    score = KnownScore(dataset="d", task="t", metric="acc1", value=0.5, n=9, low=0.4, high=0.6)
    for target in ("onnx", "onnx-int8"):
        card = render_card(model, {target: {}}, Source(scores=(score,)), name="a")
        assert ("were measured before quantization" in card) == (target == "onnx-int8")
    made = clipkit.load(out)
    assert made.origin == f"ONNX export {out} (int8)"
    for ours, theirs in (
        (clipkit.encode_image(paths, model), clipkit.encode_image(paths, made)),
        (clipkit.encode_text(ASCII, model), clipkit.encode_text(ASCII, made)),
    ):
        assert 0.98 < float((ours * theirs).sum(dim=1).min()) < 0.999999


def test_int8_without_onnx_is_rejected(tmp_path: Path) -> None:
    for more in ([], ["--to", "open_clip"]):
        with pytest.raises(ConfigError, match="--quantize int8 needs --to onnx or --to openvino"):
            dispatch(["export", "no", str(tmp_path / "out"), *more, "--quantize", "int8"])
    with pytest.raises(ConfigError, match="export them to separate folders"):
        export(model_of("own"), tmp_path / "out", to=["onnx", "onnx-int8"])
    assert not any(tmp_path.iterdir())


# --- examples of the model card -----------------------------------------------------------------------------


def test_card_examples_run(
    everything: tuple[CLIP, Path],
    paths: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = everything
    cat = out.parent / "cat.jpg"
    with Image.open(paths[0]) as image:
        image.save(cat)
    monkeypatch.chdir(out.parent)
    examples = re.findall(r"### ([^\n]+)\n\n```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    assert [title for title, _ in examples] == [
        "open_clip", "transformers", "sentence-transformers", "onnxruntime", "clipkit",
    ]  # fmt: skip
    texts = ["a photo of a cat", "a photo of a dog"]
    similar = clipkit.encode_image(cat, model) @ clipkit.encode_text(texts, model).T
    expected = (model.logit_scale.exp() * similar).softmax(dim=-1).detach().flatten()
    for title, code in examples:
        exec(compile(code, title, "exec"), {})
        printed = [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", capsys.readouterr().out)]
        if title != "sentence-transformers" and title != "clipkit":
            np.testing.assert_allclose(printed, expected.numpy(), atol=2e-3, err_msg=title)


def test_class_head_export(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("own")
    head = attach_class_head(model, ["dog", "cat"], torch.eye(2, model.architecture.embed_dim))
    for to, files in (("onnx", {"textual.onnx", "visual.onnx", "onnx_config.json"}), ("timm", None)):
        (one,) = export(head, tmp_path / to, to=[to])
        assert one.library and one.difference is not None and one.difference <= 1e-5
        assert files is None or set(one.files) == files  # has no tokenizer
    assert json.loads((tmp_path / "onnx" / "onnx_config.json").read_text())["classes"] == ["dog", "cat"]
    card = (tmp_path / "onnx" / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card and "| classification head, 2 classes, " in card
    with Image.open(paths[0]) as image:
        image.save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    exec(compile(code, "onnx", "exec"), {})
    printed = [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", capsys.readouterr().out)]
    expected = clipkit.classify(["cat.jpg"], ["dog", "cat"], head)
    np.testing.assert_allclose(printed, expected.numpy()[0], atol=2e-3)
