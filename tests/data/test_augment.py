"""Tests of augmentation: crops equal torchvision's, are reproducible, and follow the settings."""

import io
import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageOps
from torchvision.transforms.v2 import InterpolationMode, functional

from clipkit.errors import DataError
from clipkit.model.naflex import PatchBudget
from clipkit.model.preprocess import Preprocess, preprocess_images
from clipkit.samples.decode import Decoded, decode_image, decode_pixels
from clipkit.samples.traits import Decoding, Traits
from data.augment import (
    Augmentation,
    _crop,
    blur,
    change_colors,
    draw_recipe,
    empty_batch,
    random_of,
    training_pixels,
)
from tests.clipkit.made_images import DEEP, IMAGES, encoded, image_file, scene

sides = st.integers(1, 3000)
scales = st.floats(0.01, 1.0)
ASPECT = 4 / 3


def row(data: bytes, seed: int, *, image_size: int = 32, **options: Any) -> torch.Tensor:
    """Decode one image in the middle of a batch; the other rows must not change."""
    batch = empty_batch(3, image_size)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    batch.fill_(77)
    training_pixels(
        data,
        image_size=image_size,
        augmentation=Augmentation(**options),
        random=random_of(seed),
        out=batch[1],
    )
    assert (batch[0] == 77).all() and (batch[2] == 77).all()
    return batch[1]


def transform(image: npt.NDArray[np.uint8], seed: int, **options: Any) -> torch.Tensor:
    return row(encoded(Image.fromarray(image), "PPM"), seed, **options)


def random_image(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(deadline=None, max_examples=300)
@given(height=sides, width=sides, scale=scales, seed=st.integers(0, 2**32))
def test_crop_is_inside_the_image(height: int, width: int, scale: float, seed: int) -> None:
    top, left, crop_height, crop_width = _crop(height, width, scale, ASPECT, random_of(seed))
    assert 1 <= crop_height <= height - top and 1 <= crop_width <= width - left
    assert top >= 0 and left >= 0


@settings(deadline=None, max_examples=200)
@given(height=st.integers(100, 3000), width=st.integers(100, 3000), scale=scales, seed=st.integers(0, 2**32))
def test_crop_has_at_least_the_area_and_aspect_ratio_of_the_settings(
    height: int, width: int, scale: float, seed: int
) -> None:
    _, _, crop_height, crop_width = _crop(height, width, scale, ASPECT, random_of(seed))
    rounding = 1 / min(crop_height, crop_width)
    aspect = crop_width / crop_height
    if scale < 1:
        assert 3 / 4 * (1 - rounding) <= aspect <= 4 / 3 * (1 + rounding)
    else:
        assert crop_height == crop_width == min(height, width)
    if 3 / 4 <= width / height <= 4 / 3 and scale < 1:
        assert crop_height * crop_width >= scale * height * width * (1 - 2 * rounding)


@pytest.mark.parametrize(
    ("height", "width", "scale", "expected"),
    [
        (1, 1, 1.0, (0, 0, 1, 1)),
        (1, 1, 0.9, (0, 0, 1, 1)),
        (100, 1, 1.0, (49, 0, 1, 1)),
        (1, 100, 1.0, (0, 49, 1, 1)),
        (100, 1, 0.9, (49, 0, 1, 1)),
        (30, 50, 1.0, (0, 10, 30, 30)),
        (30, 900, 0.9, (0, 430, 30, 40)),  # no draw fits: the largest crop of 4:3, centered
        (900, 30, 0.9, (430, 0, 40, 30)),
    ],
)
def test_crop_without_randomness(height: int, width: int, scale: float, expected: tuple[int, ...]) -> None:
    assert _crop(height, width, scale, ASPECT, random_of(0)) == expected


@pytest.mark.parametrize("scale", [0.1, 0.9, 1.0])
@pytest.mark.parametrize(("height", "width"), [(40, 60), (1, 50), (50, 1), (1, 1), (224, 224), (300, 100)])
def test_crop_equals_torchvision(height: int, width: int, scale: float) -> None:
    image = random_image(height, width)
    for seed in range(5):
        got = transform(image, seed, crop_scale=scale)
        top, left, crop_height, crop_width = _crop(height, width, scale, ASPECT, random_of(seed))
        expected = functional.resized_crop(
            torch.from_numpy(image).permute(2, 0, 1),
            top, left, crop_height, crop_width, [32, 32],
            interpolation=InterpolationMode.BICUBIC, antialias=True,
        )  # fmt: skip
        assert got.shape == (3, 32, 32) and got.dtype == torch.uint8
        assert torch.equal(got, expected)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("patches", [None, PatchBudget(side=8, count=16)])
def test_whole_images_are_resized_as_in_evaluation(interpolation: str, patches: PatchBudget | None) -> None:
    image = Image.fromarray(random_image(90, 90))
    preprocess = Preprocess(image_size=32, interpolation=interpolation, patches=patches)
    out = empty_batch(1, 32, patches=patches)
    augmentation = Augmentation(crop_scale=1.0, interpolation=interpolation)
    training_pixels(
        encoded(image, "PNG"),
        image_size=32,
        augmentation=augmentation,
        random=random_of(0),
        out=out[0],
        patches=patches,
    )
    expected = preprocess_images([image], preprocess)
    assert (out.int() - expected.int()).abs().max() <= 2
    assert (out.int() - expected.int()).abs().float().mean() < 0.1


@settings(deadline=None)
@given(scale=scales, seed=st.integers(0, 2**32))
def test_crops_are_those_of_draws_with_uniform(scale: float, seed: int) -> None:
    random = random_of(seed)
    for _ in range(10):
        area = 500**2 * random.uniform(scale, 1.0)
        aspect = math.exp(random.uniform(math.log(1 / ASPECT), math.log(ASPECT)))
        width = round(math.sqrt(area * aspect))
        height = round(math.sqrt(area / aspect))
        if max(width, height) <= 500:
            expected = int(random.integers(501 - height)), int(random.integers(501 - width)), height, width
            assert scale == 1 or _crop(500, 500, scale, ASPECT, random_of(seed)) == expected
            break


def test_crop_of_the_target_size_is_not_resized() -> None:
    image = random_image(32, 32)
    got = transform(image, 0, crop_scale=1.0)
    assert torch.equal(got, torch.from_numpy(image).permute(2, 0, 1))


def test_distribution_of_crops() -> None:
    size, scale = 1000, 0.5
    crops = np.array([_crop(size, size, scale, ASPECT, random_of(seed)) for seed in range(4000)])
    area = crops[:, 2] * crops[:, 3] / size**2
    assert area.min() >= scale * 0.99
    assert abs(np.log(crops[:, 3] / crops[:, 2]).mean()) < 0.02  # wide as often as tall
    for begin, side in ((crops[:, 0], crops[:, 2]), (crops[:, 1], crops[:, 3])):
        place = begin[side < size] / (size - side[side < size])
        assert abs(place.mean() - 0.5) < 0.03
        assert abs(place.std() - 1 / math.sqrt(12)) < 0.02


def test_random_streams_are_independent_and_reproducible() -> None:
    streams = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (2**63 - 1, 0, 10**6, 10**9)]
    drawn = [tuple(random_of(*stream).integers(2**62, size=4).tolist()) for stream in streams]
    assert len(set(drawn)) == len(streams)
    assert drawn == [tuple(random_of(*stream).integers(2**62, size=4).tolist()) for stream in streams]


def test_disabled_options_draw_no_random_numbers() -> None:
    image = random_image(40, 50)
    for seed in range(20):
        plain = transform(image, seed)
        none = {
            "flip": 0.0,
            "vertical_flip": 0.0,
            "rotate90": 0.0,
            "color_jitter": 0.0,
            "grayscale": 0.0,
            "blur": 0.0,
            "affine": 0.0,
        }
        assert torch.equal(plain, transform(image, seed, **none))
        assert torch.equal(plain.flip(-1), transform(image, seed, flip=1.0))  # the same crop, mirrored
        assert torch.equal(plain.flip(-2), transform(image, seed, vertical_flip=1.0))
        turned = transform(image, seed, rotate90=1.0)
        assert any(torch.equal(plain.rot90(turns, (1, 2)), turned) for turns in (1, 2, 3))


def test_rates_of_flipped_and_grayscale_images() -> None:
    image = random_image(32, 32)
    flipped = grey = 0
    for seed in range(400):
        out = transform(image, seed, crop_scale=1.0, flip=0.3, grayscale=0.2)
        is_grey = bool((out[0] == out[1]).all() and (out[1] == out[2]).all())
        plain = torch.from_numpy(image).permute(2, 0, 1)
        expected = functional.rgb_to_grayscale(plain, num_output_channels=3) if is_grey else plain
        is_flipped = torch.equal(out, expected.flip(-1))
        assert is_flipped or torch.equal(out, expected)
        flipped, grey = flipped + is_flipped, grey + is_grey
    assert abs(flipped / 400 - 0.3) < 0.08 and abs(grey / 400 - 0.2) < 0.07


def test_all_orientations_are_equally_likely() -> None:
    image = random_image(32, 32)
    plain = torch.from_numpy(image).permute(2, 0, 1)
    orientations = {}
    for turns in range(4):
        for flipped in (False, True):
            turned = plain.flip(-2) if flipped else plain
            orientations[turned.rot90(turns, (1, 2)).numpy().tobytes()] = (turns, flipped)
    counts = Counter(
        orientations[
            transform(image, seed, crop_scale=1.0, rotate90=0.75, vertical_flip=0.5).numpy().tobytes()
        ]
        for seed in range(1600)
    )
    chi_square = sum((counts[orientation] - 200) ** 2 / 200 for orientation in orientations.values())
    assert len(counts) == 8 and chi_square < 24.3  # 0.1% of samples, 7 degrees of freedom


def test_crops_have_sides_of_up_to_the_ratio_of_the_settings() -> None:
    ratios = []
    for seed in range(500):
        _, _, height, width = _crop(1000, 1000, 0.2, 2.0, random_of(seed))
        ratios.append(width / height)
    assert 0.495 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.02
    assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.06)
    data = encoded(Image.fromarray(random_image(90, 300)), "PNG")
    assert not torch.equal(row(data, 0, crop_scale=0.3), row(data, 0, crop_scale=0.3, crop_aspect=3.0))


@pytest.mark.parametrize("image_size", [1, 6, 32])
def test_blurred_images_equal_torchvision_with_some_standard_deviation(image_size: int) -> None:
    image = random_image(image_size, image_size)
    plain = torch.from_numpy(image).permute(2, 0, 1)
    blurred = 0
    for seed in range(100):
        out = transform(image, seed, image_size=image_size, crop_scale=1.0, blur=0.4)
        assert torch.equal(out, transform(image, seed, image_size=image_size, crop_scale=1.0, blur=0.4))
        if torch.equal(out, plain):
            continue
        blurred += 1
        recipe = draw_recipe(image_size, image_size, Augmentation(crop_scale=1.0, blur=0.4), random_of(seed))
        assert 0.1 <= recipe.blur <= 2
        radius = min(6, image_size - 1)
        full = functional.gaussian_blur(plain, [2 * radius + 1] * 2, [recipe.blur] * 2)
        assert (full.int() - out.int()).abs().max() <= 2  # beyond three standard deviations
    assert blurred == 0 if image_size == 1 else 20 < blurred < 55


def test_affine_images_equal_those_of_pillow() -> None:
    photo = scene(48, 48)
    drawn = []
    for seed in range(100):
        out = transform(photo, seed, image_size=48, crop_scale=1.0, affine=1.0)
        assert torch.equal(out, transform(photo, seed, image_size=48, crop_scale=1.0, affine=1.0))
        recipe = draw_recipe(48, 48, Augmentation(crop_scale=1.0, affine=1.0), random_of(seed))
        assert recipe.affine is not None
        drawn.append(recipe.affine)
        angle, right, down, size, *shears = recipe.affine
        expected = functional.affine(
            Image.fromarray(photo), angle, [round(48 * right), round(48 * down)], size, shears,
            InterpolationMode.BILINEAR, fill=127,
        )  # fmt: skip
        difference = (out.permute(1, 2, 0).int() - torch.from_numpy(np.array(expected)).int()).abs()
        assert difference.float().mean() < 4  # Pillow does not interpolate at the border
    low, high = np.min(drawn, axis=0), np.max(drawn, axis=0)
    assert low == pytest.approx([-10, -0.1, -0.1, 0.8, -15, -15], rel=0.1)
    assert high == pytest.approx([10, 0.1, 0.1, 1.2, 15, 15], rel=0.1)
    gray = transform(np.full((20, 20, 3), 127, np.uint8), 0, affine=2.0)
    assert (gray.int() - 127).abs().max() <= 1


def test_geometric_changes_and_blur_work_for_any_number_of_channels() -> None:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 256, (5, 32, 32), dtype=np.uint8))
    batch = empty_batch(2, 32, channels=5)
    options = Augmentation(
        crop_scale=0.5, crop_aspect=2.0, vertical_flip=0.5, rotate90=0.5, blur=1.0, affine=0.5
    )
    for target in batch:
        training_pixels(
            file.getvalue(),
            image_size=32,
            augmentation=options,
            random=random_of(3),
            out=target,
            decoding=Decoding(channels=5),
        )
    assert torch.equal(batch[0], batch[1]) and batch[0].float().std() > 5


@pytest.mark.parametrize(("width", "height"), [(60, 3), (3, 60), (1, 1)])
def test_narrow_images_of_variable_size_are_blurred(width: int, height: int) -> None:
    patches = PatchBudget(side=4, count=12)
    data = encoded(Image.fromarray(random_image(height, width)), "PNG")
    changed = []
    for seed in range(8):
        whole: dict[str, Any] = {"image_size": 16, "random": random_of(seed), "patches": patches}
        plain, blurred = (empty_batch(1, 16, patches=patches)[0] for _ in range(2))
        training_pixels(data, augmentation=Augmentation(crop_scale=1.0), out=plain, **whole)
        training_pixels(data, augmentation=Augmentation(crop_scale=1.0, blur=1.0), out=blurred, **whole)
        changed.append(not torch.equal(blurred, plain))
    assert any(changed) == (width * height > 1)


@settings(deadline=None, max_examples=60)
@given(strength=st.floats(0.01, 2.0), seed=st.integers(0, 2**32))
def test_color_jitter_is_reproducible(strength: float, seed: int) -> None:
    image = random_image(32, 32)
    out = transform(image, seed, color_jitter=strength)
    assert out.shape == (3, 32, 32) and out.dtype == torch.uint8
    assert torch.equal(out, transform(image, seed, color_jitter=strength))


@settings(deadline=None, max_examples=200)
@given(
    factors=st.tuples(*[st.floats(0, 3, width=32)] * 3),
    hue=st.floats(-0.5, 0.5, width=32),
    levels=st.integers(1, 255),
    seed=st.integers(0, 2**32),
)
def test_color_jitter_has_the_formulas_of_torchvision(
    factors: tuple[float, float, float], hue: float, levels: int, seed: int
) -> None:
    # with few levels, many pixels are gray or have two equal channels
    image = torch.from_numpy(random_image(9, 14, seed) % levels * (255 // max(1, levels - 1)))
    pixels = image.permute(2, 0, 1)
    brightness, contrast, saturation = factors
    expected = functional.adjust_brightness(pixels / 255, brightness)
    expected = functional.adjust_contrast(expected, contrast)
    expected = functional.adjust_saturation(expected, saturation)
    expected = functional.adjust_hue(expected, hue)
    found = change_colors(pixels, *factors, hue)
    assert found.shape == pixels.shape and found.dtype == torch.uint8
    assert (found - 255 * expected).abs().max() < 0.52  # rounding to integers is half of one


@settings(deadline=None, max_examples=100)
@given(
    height=st.integers(13, 30),
    width=st.integers(13, 30),
    deviation=st.floats(0.1, 2),
    seed=st.integers(0, 2**32),
)
def test_blur_equals_that_of_torchvision(height: int, width: int, deviation: float, seed: int) -> None:
    pixels = torch.from_numpy(random_image(height, width, seed)).permute(2, 0, 1)
    size = 2 * math.ceil(3 * deviation) + 1
    expected = functional.gaussian_blur(pixels.float(), [size, size], [deviation, deviation])
    found = blur(pixels, deviation)
    assert found.shape == pixels.shape and found.dtype == torch.uint8
    assert (found - expected).abs().max() < 0.51  # rounding to integers is half of one


def test_strength_limits_the_change_of_brightness() -> None:
    image = np.full((32, 32, 3), 100, np.uint8)  # uniform: contrast, saturation and hue have no effect
    levels = [int(transform(image, seed, color_jitter=0.4).float().mean()) for seed in range(300)]
    assert 58 <= min(levels) <= 70 and 130 <= max(levels) <= 141
    assert 30 < levels.count(100) < 90  # a fifth is unchanged


def test_all_formats_are_decoded_as_by_decode_image() -> None:
    options: dict[str, Any] = {
        "crop_scale": 0.2,
        "flip": 0.5,
        "color_jitter": 0.4,
        "grayscale": 0.3,
        "blur": 0.3,
        "affine": 1.0,
    }
    for seed, name in enumerate(sorted(IMAGES.keys() - DEEP)):
        data = image_file(name)
        assert torch.equal(row(data, seed, **options), transform(decode_image(data), seed, **options))


def test_broken_image_raises_data_error() -> None:
    for data in (b"", image_file("png")[:500], image_file("jpeg")[:3000]):
        for scaled in (False, True):
            with pytest.raises(DataError):
                row(data, 0, scaled_decode=scaled)


def test_scaled_decoding_gives_similar_pixels() -> None:
    photo = Image.fromarray(scene(517, 643))
    forms: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}]
    for options in forms:
        data = encoded(photo, "JPEG", quality=95, **options)
        for seed in range(4):
            for size, crop_scale in ((32, 1.0), (32, 0.6), (64, 0.9), (100, 0.9)):
                whole, scaled = (
                    row(data, seed, image_size=size, crop_scale=crop_scale, flip=0.5, scaled_decode=scaling)
                    for scaling in (False, True)
                )
                assert not torch.equal(whole, scaled)
                assert (whole.int() - scaled.int()).abs().float().mean() < 4


def test_scaled_decoding_keeps_twice_the_target_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def spy(data: bytes, rule: Decoding, *, reduce: int = 1) -> Decoded:
        asked.append(reduce)
        return decode_pixels(data, rule, reduce=reduce)

    monkeypatch.setattr("data.augment.decode_pixels", spy)
    sides = {127: 1, 128: 2, 255: 2, 256: 4, 511: 4, 512: 8, 1100: 8}
    for side in sides:
        row(encoded(Image.fromarray(scene(side, side + 9)), "JPEG"), 0, crop_scale=1.0, scaled_decode=True)
    assert asked == list(sides.values())


def test_formats_without_scaled_decoding_are_unchanged() -> None:
    for name in ("png", "webp", "cmyk jpeg", "ycck jpeg", "gif"):
        data = image_file(name)
        assert torch.equal(row(data, 3), row(data, 3, scaled_decode=True))


@settings(deadline=None, max_examples=100)
@given(height=st.integers(1, 700), width=st.integers(1, 700), scale=scales, seed=st.integers(0, 99))
def test_scaled_decoding_of_any_shape(height: int, width: int, scale: float, seed: int) -> None:
    shade = 10 + seed  # uniform, so the result is known
    data = encoded(Image.new("RGB", (width, height), (shade,) * 3), "JPEG")
    pixels = row(data, seed, image_size=16, crop_scale=scale, scaled_decode=True)
    assert (pixels.int() - shade).abs().max() <= 1


@pytest.mark.parametrize("scaled_decode", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_if_upright(orientation: int, scaled_decode: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(scene(300, 420)), "JPEG", quality=95, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = encoded(ImageOps.exif_transpose(image), "PPM")
    options: dict[str, Any] = {"crop_scale": 0.5, "flip": 0.5, "scaled_decode": scaled_decode}
    for seed in range(4):
        out = empty_batch(1, 32)[0]
        traits = training_pixels(
            data,
            image_size=32,
            augmentation=Augmentation(**options),
            random=random_of(seed),
            out=out,
            decoding=Decoding(upright=True),
        )
        apart = (out.int() - row(upright, seed, **options).int()).abs().float()
        assert apart.mean() < (4 if scaled_decode else 1)
        assert traits == Traits(rotated=orientation != 1)


def test_transparent_images_are_laid_on_the_background() -> None:
    clear = Image.new("RGBA", (40, 30), (200, 0, 0, 0))
    for data in (
        encoded(clear, "PNG"),
        encoded(clear.quantize(4), "PNG"),
        encoded(clear, "WEBP", exact=True),
    ):
        out = empty_batch(1, 8)[0]
        how: dict[str, Any] = {
            "image_size": 8,
            "augmentation": Augmentation(),
            "random": random_of(0),
            "out": out,
        }
        assert training_pixels(data, **how) == Traits(transparent=True)
        assert not (out == 255).all()
        assert training_pixels(data, **how, decoding=Decoding(background=(1, 2, 3))).transparent
        assert (out == torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)).all()
