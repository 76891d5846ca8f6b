"""Tests of ``clipkit.load`` on transformers' ``CLIPModel``, of its export, and of OpenAI's weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import clipkit
from clipkit.errors import CheckpointError
from clipkit.formats.transformers import (
    build_configs,
    from_transformers,
    preprocess_from_transformers,
    to_transformers,
)
from clipkit.model.architectures import ARCHITECTURES, Architecture, TextTower, VisionTower
from clipkit.model.preprocess import preprocess_images
from tests.clipkit.stored_models import TEXTS, random_images, their_model

# image and text tower: width, MLP width, layers, heads; MLP widths are not multiples of the widths
SIZES: dict[str, tuple[str, tuple[int, int, int, int], tuple[int, int, int, int], int, int]] = {
    "tiny": ("quick_gelu", (32, 128, 1, 2), (32, 128, 1, 2), 16, 77),
    "small": ("gelu", (48, 100, 2, 3), (40, 71, 3, 5), 24, 20),
    "larger": ("quick_gelu", (160, 683, 3, 5), (96, 300, 2, 6), 96, 12),
}


# most tests store no preprocessing
pytestmark = pytest.mark.filterwarnings("ignore:.*has no preprocessor_config.json")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def make(size: str) -> Any:
    from transformers import CLIPConfig, CLIPModel

    activation, image, text, dimension, length = SIZES[size]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = CLIPConfig(
        vision_config={
            **dict(zip(names, image, strict=True)),
            "image_size": 32,
            "patch_size": 8,
            "hidden_act": activation,
        },
        text_config={
            **dict(zip(names, text, strict=True)),
            "max_position_embeddings": length,
            "hidden_act": activation,
        },
        projection_dim=dimension,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    return model


def assert_same(ours: clipkit.CLIP, theirs: Any, length: int) -> None:
    pixels = preprocess_images(random_images(), ours.preprocess)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (ours.preprocess.mean, ours.preprocess.std))
    tokens = clipkit.tokenize(list(TEXTS), length)
    with torch.no_grad():
        found = theirs(input_ids=tokens, pixel_values=(pixels / 255 - mean) / std)
        assert (ours.encode_image(pixels) - found.image_embeds).abs().max() <= 1e-5
        assert (ours.encode_text(tokens) - found.text_embeds).abs().max() <= 1e-5
    assert ours.logit_scale.item() == theirs.logit_scale.item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
def test_transformers_folders_load(size: str, form: str, tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor

    theirs, length = make(size), SIZES[size][4]
    theirs.save_pretrained(tmp_path, max_shard_size="1MB" if form == "sharded" else "5GB")
    if form == "sharded":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    elif form == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    processor = CLIPImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_mean=[0.5, 0.4, 0.3],
        resample=2,
    )
    processor.save_pretrained(tmp_path)
    ours = clipkit.load(tmp_path)
    assert ours.origin == f"transformers folder {tmp_path} without a tokenizer (using CLIP's)"
    assert ours.architecture.quick_gelu == (SIZES[size][0] == "quick_gelu")
    assert ours.preprocess.mean == (0.5, 0.4, 0.3) and ours.preprocess.interpolation == "bilinear"
    assert_same(ours, theirs, length)
    if form == "safetensors":
        named = clipkit.load(tmp_path / "model.safetensors")
        assert named.origin == ours.origin


@pytest.mark.filterwarnings("default:.*has no preprocessor_config.json")
@pytest.mark.parametrize("files", [(), ("preprocessor_config.json",), ("processor_config.json",)])
def test_assumed_preprocessing_is_named(files: tuple[str, ...], tmp_path: Path) -> None:
    make("tiny").save_pretrained(tmp_path)
    for name in files:
        (tmp_path / name).write_text("{}")
    if files == ("preprocessor_config.json",):  # with CLIP's defaults
        clipkit.load(tmp_path)
        return
    message = f"^{tmp_path} has no preprocessor_config.json: assuming CLIP's mean, std, bicubic interpolation"
    with pytest.warns(UserWarning, match=message) as caught:
        clipkit.load(tmp_path)
    assert len(caught) == 1 and caught[0].filename == __file__


def write_sentence_folder(folder: Path, *further: str) -> Any:
    """Write a CLIPModel as sentence-transformers stores it, with further modules; return the model."""
    theirs = make("tiny")
    theirs.save_pretrained(folder / "0_CLIPModel")
    kinds = ["CLIPModel", *further]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return theirs


@pytest.mark.parametrize("further", [(), ("Normalize",)])
def test_sentence_transformers_folders_load(further: tuple[str, ...], tmp_path: Path) -> None:
    theirs = write_sentence_folder(tmp_path, *further)
    for folder in (tmp_path, tmp_path / "0_CLIPModel"):
        ours = clipkit.load(folder)
        assert_same(ours, theirs, 77)
        assert ours.origin.startswith(f"transformers folder {tmp_path / '0_CLIPModel'}")


def test_other_sentence_transformers_folders_are_refused(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(CheckpointError) as caught:
            clipkit.load(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    kind = f"{tmp_path} is a folder of sentence-transformers"
    write_sentence_folder(tmp_path, "Dense", "Normalize")
    assert message() == f"{kind} whose model is followed by Dense, Normalize, which clipkit does not apply"
    file, listing = tmp_path / "modules.json", [{"path": "0_CLIPModel", "type": "x"}]
    for content in ("{", "[]", "{}", '[{"type": "x"}]', "[5]", "5"):
        file.write_text(content)
        expected = "expected a list of modules, each with path and type"
        assert message() == f"{kind} with an invalid modules.json: {expected}"
    for path in ("..", "../other", "missing", str(tmp_path / "0_CLIPModel")):
        file.write_text(json.dumps([{**listing[0], "path": path}]))
        assert message() == f"{kind} that does not contain the model's folder {path!r}"
    (tmp_path / "empty").mkdir()
    for path in ("", "empty"):
        file.write_text(json.dumps([{**listing[0], "path": path}]))
        missing = (
            f"without a config.json in {tmp_path / path}, the folder of the model according to modules.json"
        )
        assert message() == f"{kind} {missing}"
    file.write_text(json.dumps(listing))
    (tmp_path / "0_CLIPModel" / "config.json").write_text('{"model_type": "distilbert"}')
    assert message() == f"{kind} with a 'distilbert' model, not a CLIPModel"


@pytest.mark.parametrize("complete", [True, False])
def test_adapters_of_peft_are_named(complete: bool, tmp_path: Path) -> None:
    if complete:  # with the weights that they belong to, which must not be used without them
        make("tiny").save_pretrained(tmp_path)
    config = {"peft_type": "LORA", "base_model_name_or_path": "openai/clip-vit-base-patch32", "r": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.vision_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(8, 32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"adapters of peft for 'openai/clip-vit-base-patch32', not a model"
    ):
        clipkit.load(tmp_path)
    with pytest.raises(CheckpointError):
        clipkit.load(tmp_path / "adapter_model.safetensors")


def test_preprocessing_equals_the_image_processor(tmp_path: Path) -> None:
    """Up to the rounding of another library's resize."""
    from transformers import CLIPImageProcessor

    squash = {"size": {"height": 32, "width": 32}, "do_center_crop": False}
    for settings in ({"size": {"shortest_edge": 32}, "crop_size": 32}, squash, {**squash, "resample": 2}):
        processor = CLIPImageProcessor(**settings)
        processor.save_pretrained(tmp_path)
        preprocess = preprocess_from_transformers(
            json.loads((tmp_path / "preprocessor_config.json").read_text()), 32
        )
        expected = processor(images=random_images(), return_tensors="pt").pixel_values
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
        found = (preprocess_images(random_images(), preprocess) / 255 - mean) / std
        assert (found - expected).abs().mean() < 0.01


@pytest.mark.parametrize(
    "config",
    [
        {"do_resize": False}, {"do_rescale": False}, {"do_normalize": False}, {"rescale_factor": 1 / 127.5},
        {"do_center_crop": False}, {"resample": 0}, {"resample": "bicubic"}, {"resample": [3]},
        {"size": {"shortest_edge": 256}, "crop_size": 224}, {"size": {"height": 224, "width": 200}},
        {"size": {"longest_edge": 224}}, {"size": [224, 224]}, {"crop_size": {"height": 224}, "size": 200},
        {"clipkit": True}, {"clipkit": {"background": "white"}}, {"clipkit": {"upright": 1}}, {"clipkit": {"x": 1}},
        {"clipkit": {"pixel_range": [1, 0]}},
        {"image_mean": [0.5, 0.5]}, {"image_std": [0, 1, 1]}, {"image_mean": "x"}, {"image_std": {}},
    ],
)  # fmt: skip
def test_unsupported_preprocessing_is_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        preprocess_from_transformers(config, 224)


def test_old_transformers_files_load(tmp_path: Path) -> None:
    """Integer sizes, settings in ``*_config_dict``, end of text 2, and position_ids among the weights."""
    theirs = make("small")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config") | {"eos_token_id": 2}
    config |= {"text_config_dict": text, "text_config": {}, "vision_config_dict": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": 32, "crop_size": 32, "image_std": [0.5, 0.5, 0.5]}'
    )
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    extra = {f"{tower}_model.embeddings.position_ids": torch.arange(5)[None] for tower in ("text", "vision")}
    save_file(
        {**to_transformers(clipkit.load(tmp_path).state_dict()), **extra}, tmp_path / "model.safetensors"
    )
    ours = clipkit.load(tmp_path)
    assert ours.preprocess.std == (0.5, 0.5, 0.5)
    assert_same(ours, theirs, 20)


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("ratios", [(4.0, 4.0), (3.5, 2.3), (4.3637, 100 / 48)])
def test_round_trip_through_transformers_is_exact(
    quick_gelu: bool, ratios: tuple[float, float], tmp_path: Path
) -> None:
    from transformers import CLIPConfig, CLIPModel

    shape = Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=32, patch_size=16, width=48, layers=2, heads=3, mlp_ratio=ratios[0]),
        text=TextTower(width=48, layers=2, heads=4, context_length=10, mlp_ratio=ratios[1]),
        quick_gelu=quick_gelu,
    )
    ours = clipkit.create(shape, seed=0).eval()
    configs = build_configs(shape, ours.preprocess)
    config = CLIPConfig(**configs["config.json"])
    theirs = CLIPModel(config).eval()
    missing, unexpected = theirs.load_state_dict(to_transformers(ours.state_dict()), strict=True)
    assert not missing and not unexpected
    assert_same(ours, theirs, 10)
    back, tensors = from_transformers(configs["config.json"], theirs.state_dict())
    assert all(torch.equal(value, tensors[name]) for name, value in ours.state_dict().items())
    # the ratio may differ, as long as it gives the same MLP width
    assert [int(tower.mlp_ratio * 48) for tower in back.get_plain_towers()] == [
        int(ratio * 48) for ratio in ratios
    ]
    assert preprocess_from_transformers(configs["preprocessor_config.json"], 32) == ours.preprocess


@pytest.mark.parametrize(
    ("where", "values", "message"),
    [
        ("vision_config", {"hidden_act": "gelu_new"}, "activations 'gelu_new' and 'quick_gelu'"),
        ("text_config", {"hidden_act": "gelu"}, "activations 'quick_gelu' and 'gelu'"),
        ("text_config", {"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-06"),
        ("vision_config", {"num_channels": 1}, r"conv1.weight \(\d+, 3, \d, \d\) instead of \(\d+, 1, \d, \d\)"),
        ("vision_config", {"image_size": [32, 32]}, "image_size"),
        ("text_config", {"eos_token_id": 7}, "texts are read at token 7"),
        ("text_config", {"vocab_size": 1000, "eos_token_id": 999}, "vocab_size = 1000 is less"),
        ("", {"model_type": "siglip"}, "describes a 'siglip' model, not a CLIPModel"),
        ("", {"auto_map": {"AutoModel": "evil.Model"}}, "requires custom code"),
        ("", {"projection_dim": 17}, r"with another shape \(text_projection \(32, 16\) instead of \(32, 17\)"),
        ("vision_config", {"num_hidden_layers": 2}, r"12 missing \(visual.transformer.resblocks.1"),
        ("vision_config", {"hidden_size": 10**9}, "width = 1000000000"),
        ("text_config", {"vocab_size": 10**6}, "token_embedding.weight"),
        ("", {"vision_config": [1]}, "config.json is invalid"),
    ],
)  # fmt: skip
def test_unsupported_transformers_models_are_rejected(
    where: str, values: dict[str, Any], message: str, tmp_path: Path, tiny_folder: Path
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (config[where] if where else config).update(values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make("tiny").save_pretrained(folder)
    return folder


# OpenAI's weights


def openai_tensors(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """open_clip's model, and its state dict as OpenAI's files store it: float16, with three extra numbers."""
    config: dict[str, Any] = {
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    }
    if kind == "ViT":
        config["vision_cfg"] = {"image_size": 32, "patch_size": 8, "width": 128, "layers": 2}
    else:
        config["vision_cfg"] = {"image_size": 64, "layers": [1, 2, 1, 1], "width": 16, "patch_size": None}
    theirs = their_model("ViT", quick_gelu=True, **config)
    with torch.no_grad():
        for value in theirs.state_dict().values():
            if value.is_floating_point():
                value.copy_(value.half().float())
    tensors = {
        name: value.half() if value.is_floating_point() else value
        for name, value in theirs.state_dict().items()
    }
    size = config["vision_cfg"]["image_size"]
    marks = {"input_resolution": size, "context_length": 16, "vocab_size": 49408}
    return theirs, {**tensors, **{name: torch.tensor(value) for name, value in marks.items()}}


def assert_openai(ours: clipkit.CLIP, theirs: Any) -> None:
    assert ours.architecture.quick_gelu and ours.logit_scale.dtype == torch.float32
    pixels = preprocess_images(random_images(), ours.preprocess)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (ours.preprocess.mean, ours.preprocess.std))
    tokens = clipkit.tokenize(list(TEXTS), 16)
    with torch.no_grad():
        images = theirs.encode_image((pixels / 255 - mean) / std, normalize=True)
        assert (ours.encode_image(pixels) - images).abs().max() <= 1e-5
        assert (ours.encode_text(tokens) - theirs.encode_text(tokens, normalize=True)).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["ViT", "ResNet"])
@pytest.mark.parametrize("form", ["state dict", "in a dict", "safetensors", "TorchScript"])
def test_openai_weights_load(kind: str, form: str, tmp_path: Path) -> None:
    theirs, tensors = openai_tensors(kind)
    file = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    if form == "state dict":
        torch.save(tensors, file)
    elif form == "in a dict":
        torch.save({"state_dict": {f"module.{name}": value for name, value in tensors.items()}}, file)
    elif form == "safetensors":
        save_file(tensors, file)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, but OpenAI published it
            torch.jit.save(torch.jit.script(nested(tensors)), file)
    ours = clipkit.load(file)
    assert ours.origin == f"OpenAI's weights {file}"
    assert_openai(ours, theirs)


def nested(tensors: dict[str, Tensor]) -> nn.Module:
    """A module with these parameters and buffers, whose forward returns its input."""

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    root = Part()
    for name, value in tensors.items():
        *path, last = name.split(".")
        place: nn.Module = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, Part())
            place = place.get_submodule(part)
        if value.is_floating_point():
            place.register_parameter(last, nn.Parameter(value, requires_grad=False))
        else:
            place.register_buffer(last, value)
    return root


def test_name_must_agree_with_the_activation_of_openai_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs, tensors = openai_tensors("ViT")
    file = tmp_path / "weights.pt"
    torch.save(tensors, file)
    shape = clipkit.load(file).architecture
    monkeypatch.setitem(
        ARCHITECTURES, "ViT-own", Architecture(embed_dim=32, vision=shape.vision, text=shape.text)
    )
    monkeypatch.setitem(ARCHITECTURES, "ViT-own-quickgelu", shape)
    with pytest.raises(CheckpointError, match="the weights are for QuickGELU, ViT-own is for GELU"):
        clipkit.load(file, name="ViT-own")
    ours = clipkit.load(file, name="ViT-own-quickgelu")
    assert ours.name == "ViT-own-quickgelu"
    assert_openai(ours, theirs)
    with pytest.raises(CheckpointError, match="have another architecture than ViT-B-32-quickgelu"):
        clipkit.load(file, name="ViT-B-32-quickgelu")


def test_openai_metadata_without_weights_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({name: torch.tensor(5) for name in ("input_resolution", "context_length", "vocab_size")}, file)
    with pytest.raises(CheckpointError, match="not the weights of a plain ViT or ResNet CLIP"):
        clipkit.load(file)
