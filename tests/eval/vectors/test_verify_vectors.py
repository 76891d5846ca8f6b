"""Tests of ``python -m eval verify --vectors`` with values of open_clip and transformers."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.files.open_clip import load_folder
from eval.__main__ import main
from eval.vectors.published import VECTORS, PublishedValues, read_published
from tests.clipkit.formats.test_sources_transformers import make
from tests.clipkit.stored_models import CONFIGS, random_images, write_hub_folder

TEXTS = ["a red hat", "Two grey CATS!", "a photo of a dog"]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_vectors(folder: Path, kind: str, values: Tensor, *, tolerance: float = 1e-4, **table: Any) -> Path:
    """Write random images, and a file with the values that a library computed for them."""
    lines = [
        f"texts = {json.dumps(TEXTS)}",
        'title = "A made model"',
        'source = "a test"',
        'date = "2026-11-27"',
    ]
    for i, pixels in enumerate(random_images()):
        path = folder / f"{i}.png"
        Image.fromarray(pixels).save(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f'[[images]]\nfile = "{path.name}"\nsha256 = "{digest}"')
    lines.append(f'[[expected]]\nkind = "{kind}"\nvalues = {values.tolist()}\ntolerance = {tolerance}')
    lines += [f"{name} = {value}" for name, value in table.items()]
    (folder / "vectors.toml").write_text("\n".join(lines))
    return folder / "vectors.toml"


def verify(folder: Path, vectors: Path, *more: str) -> int:
    arguments = ["verify", "--vectors", str(vectors), "--image-root", str(vectors.parent), "--device", "cpu"]
    return main([*arguments, "--model", str(folder), *more])


def edit_json(path: Path, change: Callable[[Config], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_config(change: Callable[[Config], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "open_clip_config.json", change)


def set_preprocess(**values: Any) -> Callable[[Path], None]:
    return edit_config(lambda config: config["preprocess_cfg"].update(values))


def set_tower(tower: str, **values: Any) -> Callable[[Path], None]:
    return edit_config(lambda config: config["model_cfg"][tower].update(values))


def pad_with_end_token(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(pad_token="</s>"))


def compute_logits(model: Any, transform: Any, token_ids: Tensor, **changes: Any) -> Tensor:
    pixels = [pixels[..., ::-1] if "bgr" in changes else pixels for pixels in random_images()]
    with torch.no_grad():
        inputs = torch.stack([transform(Image.fromarray(image)) for image in pixels])
        images = model.encode_image(inputs, normalize=True)
        texts = model.encode_text(token_ids, normalize=True)
        bias = changes.get("bias", 0.0 if model.logit_bias is None else model.logit_bias)
        logits: Tensor = changes.get("scale", model.logit_scale.exp()) * images @ texts.T + bias
    return logits


@pytest.mark.parametrize("kind", ["ViT", "ResNet", "SigLIP"])
def test_models_reach_the_values_of_open_clip(kind: str, tmp_path: Path) -> None:
    write_hub_folder(tmp_path, kind)
    model, transform, tokenizer = load_folder(tmp_path)
    assert (
        verify(
            tmp_path,
            write_vectors(tmp_path, "logits", compute_logits(model.eval(), transform, tokenizer(TEXTS))),
        )
        == 0
    )


CLIP = "mean = (0.48145466, 0.4578275, 0.40821073), std = (0.26862954, 0.26130258, 0.27577711)"
MODELS: dict[str, Config] = {
    **CONFIGS,
    "ViT with mean pooling": {
        **CONFIGS["ViT"], "vision_cfg": {**CONFIGS["ViT"]["vision_cfg"], "pool_type": "avg"},
    },
    "ViT that reads texts at the last token": {
        **CONFIGS["ViT"], "text_cfg": {**CONFIGS["ViT"]["text_cfg"], "pool_type": "last"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "explanation"),
    [
        (
            "ViT",
            set_preprocess(mean=[0.5] * 3, std=[0.5] * 3),
            f"{CLIP} in the preprocessing",
        ),
        ("ViT", set_preprocess(interpolation="bilinear"), "interpolation = bicubic in the preprocessing"),
        ("ViT", set_preprocess(resize_mode="squash"), "resize_mode = shortest in the preprocessing"),
        (
            "ViT",
            set_preprocess(resize_mode="longest", mean=[0.5] * 3, std=[0.5] * 3),
            f"{CLIP}, resize_mode = shortest in the preprocessing",
        ),
        (
            "ViT",
            edit_config(lambda config: config["model_cfg"].update(quick_gelu=True)),
            "quick_gelu = False",
        ),
        (
            "ViT with QuickGELU",
            edit_config(lambda config: config["model_cfg"].pop("quick_gelu")),
            "quick_gelu = True",
        ),
        ("ViT", set_tower("vision_cfg", pool_type="avg"), "pool_type = tok in the image tower"),
        ("ViT with mean pooling", set_tower("vision_cfg", pool_type="tok"), "pool = mean in the image tower"),
        ("ViT", set_tower("text_cfg", pool_type="first"), "pool_type = argmax in the text tower"),
        ("SigLIP", set_tower("text_cfg", pool_type="first"), "pool_type = last in the text tower"),
        ("SigLIP", pad_with_end_token, "padding after the first = 0 in the tokenizer"),
        (
            "SigLIP",
            edit_config(
                lambda config: config["model_cfg"]["text_cfg"].update(
                    tokenizer_kwargs={"clean": "whitespace"}
                )
            ),
            "letters = lower case without punctuation in the tokenizer",
        ),
    ],
)
def test_changed_settings_are_named(
    kind: str,
    change: Callable[[Path], None],
    explanation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(CONFIGS, kind, MODELS[kind])
    write_hub_folder(tmp_path, kind)
    model, transform, tokenizer = load_folder(tmp_path)
    vectors = write_vectors(tmp_path, "logits", compute_logits(model.eval(), transform, tokenizer(TEXTS)))
    change(tmp_path)
    assert verify(tmp_path, vectors) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAILS" in printed and f"the published values are reached with {explanation}" in printed


def drop_start(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[:, 1:], torch.zeros(len(tokens), 1, dtype=torch.int64)], dim=1)


def drop_end(tokens: Tensor) -> Tensor:
    return tokens.masked_fill(tokens == 2, 0)


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"bgr": True}, "channels = blue, green, red in the images"),
        ({"tokens": drop_start}, "start token = none in the tokenizer"),
        ({"tokens": drop_end}, "end token = none in the tokenizer"),
        (
            {"tokens": lambda tokens: tokens.masked_fill(tokens == 0, 1)},
            "padding = 1 in the tokenizer",
        ),
        (
            {"tokens": lambda tokens: tokens.masked_fill(tokens == 0, 2)},
            "padding = end token in the tokenizer",
        ),
        ({"tokens": lambda tokens: tokens[:, :16]}, "context length = 16 in the tokenizer"),
        ({"tokens": lambda tokens: tokens[:, :7]}, "context length = longest text in the tokenizer"),
        ({"scale": 100.0}, "logit_scale.exp() = 100.0 in the weights"),
        ({"bias": 0.0}, "logit_bias = 0.0 in the weights"),
    ],
)
def test_differences_of_published_code_are_named(
    changes: dict[str, Any],
    explanation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = CONFIGS["SigLIP"]
    sizes = {
        "vision_cfg": {**config["vision_cfg"], "image_size": 32},
        "text_cfg": {**config["text_cfg"], "context_length": 24},
    }
    monkeypatch.setitem(CONFIGS, "SigLIP", {**config, **sizes})
    write_hub_folder(tmp_path, "SigLIP")
    model, transform, tokenizer = load_folder(tmp_path)
    change_tokens = changes.get("tokens", lambda tokens: tokens)
    published = compute_logits(model.eval(), transform, change_tokens(tokenizer(TEXTS)), **changes)
    assert verify(tmp_path, write_vectors(tmp_path, "logits", published)) == 1
    assert f"reached with {explanation}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "explanation"),
    [
        ({}, ""),
        (
            {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            "mean = (0.485, 0.456, 0.406), std = (0.229",
        ),
        ({"resample": 2}, "interpolation = bicubic in the preprocessing"),
        ({"size": {"height": 32, "width": 32}}, "resize_mode = shortest in the preprocessing"),
    ],
)
def test_models_reach_the_values_of_transformers(
    change: Config, explanation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import CLIPImageProcessorPil

    model = make("tiny")
    model.save_pretrained(tmp_path)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    colors = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    processor = CLIPImageProcessorPil(**sizes, **colors)
    processor.save_pretrained(tmp_path)
    pixels = processor([Image.fromarray(image) for image in random_images()], return_tensors="pt")[
        "pixel_values"
    ]
    with torch.no_grad():
        logits = model(input_ids=clipkit.tokenize(TEXTS), pixel_values=pixels).logits_per_image
    vectors = write_vectors(tmp_path, "probabilities", logits.softmax(dim=-1), tolerance=1e-5)
    edit_json(tmp_path / "preprocessor_config.json", lambda config: config.update(change))
    assert verify(tmp_path, vectors) == (1 if change else 0)
    assert explanation in " ".join(capsys.readouterr().out.split())


def test_values_of_all_kinds_and_of_drawn_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hub_folder(tmp_path, "ViT")
    model, transform, tokenizer = load_folder(tmp_path)
    stripes = torch.arange(40) * 200 // 39
    gradient = Image.fromarray(stripes.to(torch.uint8)[None, :, None].expand(30, 40, 3).numpy().copy())
    with torch.no_grad():
        images = model.eval().encode_image(transform(gradient)[None], normalize=True)
        texts = model.encode_text(tokenizer(TEXTS), normalize=True)
    cosines = images @ texts.T
    tables = {
        "cosines": cosines,
        "sigmoids": (100.0 * cosines).sigmoid(),
        "probabilities": (100.0 * cosines).softmax(dim=-1),
        "image features": images[:, :3],
        "text features": texts[:, :4],
    }
    lines = [
        f"texts = {json.dumps(TEXTS)}",
        'title = "A made model"',
        'source = "a test"',
        'date = "2026-11-27"',
    ]
    lines.append('[[images]]\nfile = "gradient"\nsize = [40, 30]\nlast_color = [200, 200, 200]')
    for kind, values in tables.items():
        lines.append(
            f'[[expected]]\nkind = "{kind}"\nvalues = {values.tolist()}\ntolerance = 1e-5\nscale = 100.0'
        )
    (tmp_path / "vectors.toml").write_text("\n".join(lines))
    assert verify(tmp_path, tmp_path / "vectors.toml") == 0
    printed = capsys.readouterr().out
    assert printed.count("holds") == 9 + 3 + 12 and "expected by a test" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_values_that_are_not_published_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hub_folder(tmp_path, "ViT")
    values = torch.full((3, 3), math.nan)
    values[0, 0] = 50.0
    vectors = write_vectors(tmp_path, "logits", values)
    assert verify(tmp_path, vectors) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("FAILS") == 1 and "no other setting reaches the published values" in printed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"0.png"', '"absent.png"', r"absent.png is missing: give its folder as --image-root"),
        (
            '"0.png"',
            '"nowhere.png"\nurl = "https://a/b"',
            "nowhere.png is missing: download https://a/b, and give",
        ),
        ('"0.png"', '"."', "is missing: give its folder as --image-root"),
        ("sha256 = ", 'sha256 = "0"  # ', "0.png is not the published image: its SHA-256 is .*, not 0"),
        ('file = "0.png"\n', 'file = "vectors.toml"\n#', r"vectors.toml: "),
        ("sha256 = ", "size = [0, 5]  # ", r">= 1 - at `\$.images\[0\].size\[0\]"),
        ("sha256 = ", "size = [5, 5]\ncolor = [0, 0, 256]  # ", "<= 255"),
        (
            "sha256 = ",
            'size = [9, 9]\nshapes = [["ellipse", [9, 9, 5, 5], [0,0,0], [0,0,0], 1]]  #',
            r"box \[9, 9",
        ),
        ("sha256 = ", 'size = [9, 9]\nshapes = [["ellipse", [1, 1, 5, 5], [0,0,0], [0,0,0], -1]]  #', ">= 0"),
        (
            "sha256 = ",
            'size = [9, 9]\nshapes = [["elipse", [1, 1, 5, 5], [0,0,0], [0,0,0], 1]]  #',
            "'ellipse'",
        ),
        ("texts = [", "texts = []  # ", "length >= 1 - at `\\$.texts`"),
        ("values = ", "values = [[nan, nan, nan]]  # ", "all logits are nan: state at least one value"),
        ("values = ", "values = [[inf, 0, 0]]  # ", "logits must be from .* or nan if they are unknown"),
        ("values = ", "values = [[], [], []]  # ", "length >= 1"),
        ('"logits"\nvalues = ', '"probabilities"\nvalues = [[99.0, 0.5, 0.5]]  # ', "must be from 0 to 1"),
        ('"logits"', '"logit"', "kind = 'logit': expected one of cosines, logits"),
        ("tolerance = ", "tolerance = inf  # ", "<= 10"),
        ("tolerance = ", "scale = 0\ntolerance = ", "scale"),
        ("[[images]]", "[[expected]]", "expected"),
        ("texts = [", 'texts = ["one more", ', "logits need 3 rows of equal length, with a value per text"),
        ("tolerance = ", "tolerance = -", "tolerance"),
        ("kind =", "kinds =", "kind"),
        ("title =", "title", "vectors.toml"),
    ],
)
def test_invalid_files_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    vectors = write_vectors(tmp_path, "logits", torch.zeros(3, 3))
    vectors.write_text(vectors.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        verify(tmp_path, vectors)


def test_files_that_check_nothing_are_refused(tmp_path: Path) -> None:
    head = 'title = "A made model"\nsource = "a test"\ndate = "2026-11-27"\n'
    table = '[[expected]]\nkind = "probabilities"\nvalues = [[1.0]]\ntolerance = 0.1\n'
    vectors = tmp_path / "vectors.toml"
    image = '[[images]]\nfile = "x"\nsize = [2, 2]\n'
    for text, message in [
        (f'texts = ["a"]\n{head}{image}{table}', "probability of a single text is always 1"),
        (f'texts = ["a"]\nimages = []\n{head}{table}', r"need at least one of \[\[images\]\]"),
        (f'texts = ["a"]\nexpected = []\n{head}{image}', "length >= 1"),
        (f'texts = ["a"]\n{head}{image}{table.replace("0.1", "1.0")}', "must be below 1"),
    ]:
        vectors.write_text(text)
        with pytest.raises(DataError, match=message):
            read_published(str(vectors))


def test_scale_of_the_weights_is_not_blamed_for_values_with_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hub_folder(tmp_path, "ViT")
    model, transform, tokenizer = load_folder(tmp_path)
    values = compute_logits(model.eval(), transform, tokenizer(TEXTS), scale=100.0)
    assert verify(tmp_path, write_vectors(tmp_path, "logits", values, scale=50.0)) == 1
    assert "logit_scale" not in capsys.readouterr().out
    assert verify(tmp_path, write_vectors(tmp_path, "logits", values, scale=100.0)) == 0
    assert not list(tmp_path.glob("*.jsonl"))


def test_rounding_of_towers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hub_folder(tmp_path, "ViT")
    model, transform, tokenizer = load_folder(tmp_path)
    values = compute_logits(model.eval(), transform, tokenizer(TEXTS), scale=100.0)
    vectors = write_vectors(tmp_path, "logits", values, scale=100.0, tolerance=1e-4)
    assert verify(tmp_path, vectors, "--precision", "bf16") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "reached with --precision fp32, not with bf16" in printed and "weights" not in printed


def test_small_tolerances_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hub_folder(tmp_path, "ViT")
    assert verify(tmp_path, write_vectors(tmp_path, "cosines", torch.zeros(3, 3), tolerance=2e-6)) == 1
    assert "0.000002" in capsys.readouterr().out


def test_features_wider_than_the_embedding_are_refused(tmp_path: Path) -> None:
    write_hub_folder(tmp_path, "ViT")
    with pytest.raises(DataError, match=r"have 999 values, but the embedding of .* "):
        verify(tmp_path, write_vectors(tmp_path, "image features", torch.zeros(3, 999)))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a file, or a name; did you mean 'openai-vit-b-32'"):
        main(["verify", "--model", "m", "--vectors", "openai-vit-b32"])
    with pytest.raises(ConfigError, match="have no effect with --vectors"):
        main(["verify", "--model", "m", "--vectors", "openai-vit-b-32", "--as", "somebody"])
    with pytest.raises(ConfigError, match="timm:resnet18"):
        main(["verify", "--model", "timm:resnet18", "--vectors", "openai-vit-b-32"])


@pytest.mark.parametrize("file", sorted(VECTORS.glob("*.toml")), ids=lambda path: path.stem)
def test_files_of_published_values_are_complete(file: Path, tmp_path: Path) -> None:
    published: PublishedValues = read_published(file.stem)
    assert published.source.startswith("https://") and published.date
    assert published.models or published.note
    for image in published.images:
        assert len(image.sha256) == 64
        if image.size is not None:
            assert image.open(tmp_path).size == image.size  # checks the digest
        else:
            assert image.url.startswith("http")
