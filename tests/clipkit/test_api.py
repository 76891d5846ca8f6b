"""Tests of the Python API: types of images and texts, batches, class probabilities, errors."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import eval_pixels


@pytest.fixture
def pixels() -> Any:
    return np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), dtype=np.uint8)


def test_all_image_types_give_equal_features(tiny: CLIP, pixels: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.fromarray(pixels[0]).save(path)
    file = BytesIO()
    Image.fromarray(pixels[0]).save(file, "PNG")
    tensor = torch.from_numpy(pixels[0]).permute(2, 0, 1)
    content = file.getvalue()
    forms: list[Any] = [path, str(path), content, Image.fromarray(pixels[0]), pixels[0], tensor]
    forms += [bytearray(content), memoryview(content)]
    want = tiny.encode_image(eval_pixels(pixels[0], tiny.preprocess)[None]).detach()
    for form in forms:
        one = clipkit.encode_image(form, tiny)
        assert one.shape == (1, 48)
        assert one.dtype == torch.float32
        assert (one - want).abs().max() <= 1e-6
    many = clipkit.encode_image(forms, tiny, batch_size=4)
    assert many.shape == (8, 48)
    assert (many - want).abs().max() <= 1e-6
    torch.testing.assert_close(many.norm(dim=-1), torch.ones(8))


def test_image_batches_are_lists_tuples_or_4d_arrays(tiny: CLIP, pixels: Any) -> None:
    want = clipkit.encode_image(list(pixels), tiny)
    channels_first = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    forms: list[Any] = [tuple(pixels), pixels, torch.from_numpy(pixels), channels_first, list(channels_first)]
    for many in forms:
        assert (clipkit.encode_image(many, tiny) - want).abs().max() <= 1e-6
    assert (clipkit.encode_image(pixels, tiny, batch_size=2) - want).abs().max() <= 1e-6
    grey = clipkit.encode_image(pixels[0, ..., 0], tiny)
    three = clipkit.encode_image(np.repeat(pixels[0, ..., :1], 3, axis=2), tiny)
    assert torch.equal(grey, three)


def test_encode_text_accepts_a_string_or_a_list(tiny: CLIP) -> None:
    one, many = clipkit.encode_text("a cat", tiny), clipkit.encode_text(["a cat", "a dog", "a cat"], tiny)
    assert (one.shape, many.shape) == ((1, 48), (3, 48))
    assert one.dtype == many.dtype == torch.float32
    assert (many[0] - one[0]).abs().max() <= 1e-6
    assert torch.equal(many[0], many[2])
    assert (many[0] - many[1]).abs().max() > 1e-4
    torch.testing.assert_close(many.norm(dim=-1), torch.ones(3))
    with torch.no_grad():
        direct = tiny.encode_text(clipkit.tokenize(["a cat", "a dog", "a cat"]))
    assert (direct - many).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "none", [[], (), np.zeros((0, 8, 8, 3), np.uint8), torch.zeros(0, 3, 8, 8, dtype=torch.uint8)]
)
def test_empty_input_gives_empty_features(tiny: CLIP, none: Any) -> None:
    for features in (clipkit.encode_image(none, tiny), clipkit.encode_text([], tiny)):
        assert features.shape == (0, 48)
        assert features.dtype == torch.float32
    assert clipkit.classify(none, ["cat", "dog"], tiny).shape == (0, 2)


def test_class_probabilities_add_up_to_one(tiny: CLIP, pixels: Any) -> None:
    names = ["cat", "dog", "house"]
    rows = clipkit.classify(pixels, names, tiny, templates=["a {c}", "{}"])
    assert rows.shape == (5, 3)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(5))
    weights = clipkit.zero_shot_classifier(tiny, names, ["a {c}", "{}"])
    logits = clipkit.encode_image(pixels, tiny) @ weights / 0.07
    torch.testing.assert_close(rows, logits.softmax(dim=-1), atol=1e-5, rtol=1e-5)
    assert clipkit.classify(pixels[0], names, tiny).shape == (1, 3)
    assert clipkit.classify(pixels[0], ["only"], tiny).tolist() == [[1.0]]


def test_features_can_train_a_linear_probe(tiny: CLIP, pixels: Any) -> None:
    probe = torch.nn.Linear(48, 2)
    for features in (
        clipkit.encode_image(pixels, tiny),
        clipkit.encode_text(["a", "b"], tiny),
        clipkit.zero_shot_classifier(tiny, ["a", "b"]).T,
    ):
        assert not features.requires_grad
        torch.autograd.backward(probe(features).sum())
    assert probe.weight.grad is not None
    assert all(parameter.grad is None for parameter in tiny.parameters())
    assert tiny.training  # the training mode is restored


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_are_float32_for_any_model_dtype(tiny: CLIP, pixels: Any, dtype: torch.dtype) -> None:
    want = clipkit.encode_image(pixels, tiny), clipkit.encode_text(["a", "b c"], tiny)
    model = tiny.to(dtype)
    ours = clipkit.encode_image(pixels, model), clipkit.encode_text(["a", "b c"], model)
    for a, b in zip(ours, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() < 0.03
    assert clipkit.classify(pixels, ["a", "b"], tiny).dtype == torch.float32


def test_error_names_the_unreadable_image(tiny: CLIP, pixels: Any) -> None:
    mistakes: list[tuple[Any, str]] = [
        ("missing.png", "image missing.png: No such file or directory"),
        ([pixels[0], "missing.png"], "image missing.png"),
        (b"nothing", "not an image"),
        (pixels.astype(np.float32), "32-bit float image of 3 channels"),
        (iter([pixels[0]]), "an image must be a path, bytes, PIL image, array or tensor"),
        (None, "not NoneType"),
        (np.array(["a.png", "b.png"]), "convert it to a list by tolist"),
        (np.array([None]), "convert it to a list by tolist"),
        (torch.zeros(2, 8, 8, dtype=torch.bfloat16), "this one is torch.bfloat16 (2, 8, 8)"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8).to_sparse(), "torch.sparse_coo, on cpu"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8, device="meta"), "torch.strided, on meta"),
    ]
    for images, message in mistakes:
        with pytest.raises(clipkit.DataError) as caught:
            clipkit.encode_image(images, tiny)
        assert message in str(caught.value)


def test_swapped_arguments_raise_type_error(tiny: CLIP, pixels: Any) -> None:
    message = "^model must be a CLIP, as returned by clipkit.load, not (str|list)$"
    for given in ("a.png", ["a"]):
        calls: list[Callable[[Any], Any]] = [
            lambda other: clipkit.encode_image(tiny, other),  # type: ignore[arg-type]
            lambda other: clipkit.encode_text(tiny, other),  # type: ignore[arg-type]
            lambda other: clipkit.classify(pixels, ["a"], other),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=message):
                call(given)


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"context_length": 1}, clipkit.ConfigError, "context_length = 1 is invalid: expected at least 2"),
        ({"device": "foo"}, clipkit.ConfigError, "Unknown device 'foo'"),
        ({"device": "meta"}, clipkit.ConfigError, "device = 'meta' stores no values"),
        ({"device": "cuda:99"}, clipkit.ConfigError, "device = 'cuda:99': this machine has"),
        ({"device": None}, clipkit.ConfigError, "Unknown device None"),
        ({"name": 3}, TypeError, "name must be a string, not int"),
        ({"source": 3}, TypeError, "source must be a string or a path, not int"),
    ],
)
def test_invalid_load_arguments_fail_before_weights_are_read(
    argument: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        clipkit.load(**{"source": "nothing is here", **argument})


def test_invalid_class_names_raise_errors(tiny: CLIP, pixels: Any) -> None:
    with pytest.raises(clipkit.DataError, match="class_names must be a list, not the one string 'cat'"):
        clipkit.classify(pixels, "cat", tiny)
    with pytest.raises(clipkit.DataError, match="at least one class name"):
        clipkit.classify(pixels, [], tiny)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None, "8"])
def test_invalid_batch_size_is_rejected(tiny: CLIP, pixels: Any, batch_size: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: clipkit.encode_image(pixels, tiny, batch_size=batch_size),
        lambda: clipkit.encode_text(["a"], tiny, batch_size=batch_size),
        lambda: clipkit.zero_shot_classifier(tiny, ["a"], batch_size=batch_size),
    ]
    for encode in calls:
        with pytest.raises(clipkit.ConfigError, match=f"batch_size = {batch_size!r} is not"):
            encode()
    assert len(clipkit.encode_text(["a", "b"], tiny, batch_size=np.int64(1))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a list of strings, not NoneType"),
        (b"a cat", "texts must be a list of strings, not bytes"),
        (5, "texts must be a list of strings, not int"),
        (np.array("a cat"), "texts must be a list of strings: iteration over a 0-d array"),
        (["a", None], "texts must be strings, but number 1 is of type NoneType"),
        ([b"a"], "texts must be strings, but number 0 is of type bytes"),
        (np.array([1]), "texts must be strings, but number 0 is of type int64"),
    ],
)
def test_invalid_texts_raise_errors(tiny: CLIP, texts: Any, message: str) -> None:
    with pytest.raises(clipkit.DataError) as caught:
        clipkit.encode_text(texts, tiny)
    assert message in str(caught.value)
    with pytest.raises(clipkit.DataError) as caught:
        clipkit.zero_shot_classifier(tiny, texts)
    assert message.replace("texts", "class_names") in str(caught.value)


def test_numpy_strings_are_accepted(tiny: CLIP) -> None:
    names = ["cat", "dog"]
    forms: list[Any] = [np.array(names), list(np.array(names)), tuple(names)]
    for given in forms:
        assert torch.equal(clipkit.encode_text(given, tiny), clipkit.encode_text(names, tiny))
        assert torch.equal(
            clipkit.zero_shot_classifier(tiny, given), clipkit.zero_shot_classifier(tiny, names)
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("~nobody-of-that-name/x", "no model at ~nobody-of-that-name/x: Could not determine home"),
        ("a" * 5000, "a…: File name too long"),
        ("a\0b", "a path cannot contain NUL"),
        ("", "no model is named: the path is empty"),
    ],
)
def test_invalid_path_raises_a_short_error(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(clipkit.CheckpointError) as caught:
        clipkit.load(source)
    assert message in str(caught.value) and len(str(caught.value)) < 400


@pytest.fixture
def special(tmp_path: Path) -> list[Path]:
    """A transparent image and a rotated one, each followed by an image of its appearance."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    clear, photo = Image.fromarray(pixels), Image.fromarray(pixels[..., :3])
    clear.save(tmp_path / "clear.png")
    Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB").save(
        tmp_path / "laid.png"
    )
    photo.save(tmp_path / "turned.png", exif=exif)
    photo.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    return [tmp_path / f"{name}.png" for name in ("clear", "laid", "turned", "upright")]


def test_transparent_and_rotated_images_give_warnings(tiny: CLIP, special: list[Path]) -> None:
    with pytest.warns(UserWarning) as told:
        features = clipkit.encode_image(special, tiny)
    assert [str(one.message) for one in told] == [
        (
            "1 of 4 images is transparent and without a background: the colors hidden under the transparent parts "
            "are used, as open_clip does; set background='white' in clipkit.load"
        ),
        (
            "1 of 4 images is rotated by an EXIF tag that is not applied, as in open_clip; set upright=True in "
            "clipkit.load"
        ),
    ]
    assert not torch.equal(features[0], features[1]) and not torch.equal(features[2], features[3])
    with pytest.warns(UserWarning, match="1 of 1 image is transparent"):
        clipkit.classify(special[0], ["a", "b"], tiny)


def test_load_sets_the_pixel_range(tiny: CLIP, tmp_path: Path) -> None:
    save_model(tiny, tmp_path / "plain")
    gray = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    gray[0, :2] = 0, 255
    deep = gray.astype(np.uint16) * 200 + 8000
    Image.fromarray(deep).save(tmp_path / "deep.png")
    with pytest.raises(
        DataError, match=r"deep\.png: 16-bit grayscale image with values from 8000 to 59000, and"
    ):
        clipkit.encode_image(tmp_path / "deep.png", tiny)
    loaded = clipkit.load(tmp_path / "plain", pixel_range=(8000, 59000))
    expected = clipkit.encode_image(gray, tiny)
    for image in (tmp_path / "deep.png", deep, torch.from_numpy(deep), Image.fromarray(deep)):
        assert torch.equal(clipkit.encode_image(image, loaded), expected)
    assert torch.equal(clipkit.encode_image(gray, loaded), expected)
    assert model_hash(loaded) != model_hash(tiny)
    save_model(loaded, tmp_path / "chosen")
    again = clipkit.load(tmp_path / "chosen")
    assert again.preprocess == loaded.preprocess and model_hash(again) == model_hash(loaded)
    assert model_hash(clipkit.load(tmp_path / "chosen", pixel_range="auto")) == model_hash(tiny)
    narrow = clipkit.load(tmp_path / "plain", pixel_range="8000,9000")
    with pytest.warns(
        UserWarning, match="1 of 1 image has values outside the pixel range 8000,9000, which become"
    ):
        clipkit.encode_image(deep, narrow)
    with pytest.raises(ConfigError, match=r"pixel_range = \(1, 0\) is invalid: expected auto, dtype, or"):
        clipkit.load(tmp_path / "missing", pixel_range=(1, 0))


def test_load_sets_background_and_orientation(tiny: CLIP, special: list[Path], tmp_path: Path) -> None:
    save_model(tiny, tmp_path / "plain")
    loaded = clipkit.load(tmp_path / "plain", background="white", upright=True)
    features = clipkit.encode_image(special, loaded)  # a warning would fail the test
    assert torch.equal(features[0], features[1]) and torch.equal(features[2], features[3])
    assert model_hash(loaded) != model_hash(clipkit.load(tmp_path / "plain")) == model_hash(tiny)
    save_model(loaded, tmp_path / "chosen")
    assert clipkit.load(tmp_path / "chosen").preprocess == loaded.preprocess
    assert model_hash(clipkit.load(tmp_path / "chosen")) == model_hash(loaded)
    other = clipkit.load(tmp_path / "chosen", background="none", upright=False)
    assert model_hash(other) == model_hash(tiny)
    with pytest.raises(ConfigError, match="'wite' is not a color"):
        clipkit.load(tmp_path / "plain", background="wite")
    assert loaded.preprocess.background == (255, 255, 255)
    again = clipkit.load(tmp_path / "plain", background=loaded.preprocess.background, upright=True)
    assert again.preprocess == loaded.preprocess
    with pytest.raises(ConfigError, match="background = 255 is not a color"):
        clipkit.load(tmp_path / "plain", background=255)  # type: ignore[arg-type]


def test_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(CheckpointError, match="no model is named: the path is empty"):
        clipkit.load("")
