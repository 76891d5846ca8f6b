"""Tests of inputs that ``clipkit.load`` rejects: one-line errors, no code run, bounded memory."""

import json
import math
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import clipkit
from clipkit.errors import CheckpointError, ClipkitError, ConfigError
from clipkit.formats import checkpoint
from tests.clipkit.stored_models import CONFIGS, their_model, write_hub_folder, write_word_tokenizer


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_hub_folder(folder, "ViT")
    (folder / "open_clip_pytorch_model.bin").unlink()
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder written by transformers."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        vision_config={**small, "image_size": 32, "patch_size": 16},
        text_config={**small, "max_position_embeddings": 8},
        projection_dim=16,
    )
    folder = tmp_path_factory.mktemp("theirs")
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    return folder


def changed(source: Path, folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy the source, with links to its weights and one changed JSON file."""
    folder.mkdir(exist_ok=True)
    for path in source.glob("*.*"):
        if path.suffix == ".safetensors":
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).write_text(json.dumps(config))
    return folder


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("form", ["pickle", "torch.save", "in a state dict", "old torch.save"])
@pytest.mark.parametrize("where", ["file", "folder", "training folder"])
def test_malicious_pickle_is_rejected(form: str, where: str, hub: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    source = file = tmp_path / "weights.pt"
    if where == "folder":
        shutil.copytree(hub, source := tmp_path / "folder")
        (source / "open_clip_model.safetensors").unlink()
        file = source / "open_clip_pytorch_model.bin"
    elif where == "training folder":
        source = tmp_path / "run"
        file = source / "checkpoints" / "epoch_3.pt"
        file.parent.mkdir(parents=True)
        (source / "params.txt").write_text("model: ViT-S-32\n")
    if form == "pickle":
        file.write_bytes(pickle.dumps(Evil(ran)))
    elif form == "in a state dict":
        torch.save({"epoch": Evil(ran), "state_dict": their_model("ViT").state_dict()}, file)
    else:
        torch.save(Evil(ran), file, _use_new_zipfile_serialization=form == "torch.save")
    with pytest.raises(CheckpointError) as caught:
        clipkit.load(source, name="" if where == "folder" else "ViT-S-32")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Evil(ran)))
    assert ran.exists()  # an ordinary pickle load runs it


@pytest.mark.parametrize("kept", [0, 5, 100, 2000, -1])
def test_truncated_safetensors_are_rejected(kept: int, hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub, tmp_path / "folder")
    file = tmp_path / "folder" / "open_clip_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(CheckpointError) as caught:
        clipkit.load(tmp_path / "folder")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["hub", "theirs"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"), (b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"),
        (b"[1]", "not contain a JSON object"),
        (b"null", "not contain a JSON object"), (b"[" * 100_000, "is not JSON"), (b"9" * 5000, "is not JSON"),
        (b"{}" + b" " * (16 << 20), "too large"), (b"{}", "model"),
    ],
)  # fmt: skip
def test_damaged_json_is_rejected(
    kind: str,
    content: bytes,
    message: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_JSON", 16 << 20)
    file = {"hub": "open_clip_config.json", "theirs": "config.json"}[kind]
    folder = changed(request.getfixturevalue(kind), tmp_path / "folder", file, lambda config: None)
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vision_cfg.image_size", [32, 48], "is not square"),
        ("vision_cfg.width", 10**9, "width = 1000000000"),
        ("vision_cfg.layers", 10**9, "layers = 1000000000"),
        ("vision_cfg.layers", [10**9, 1, 1, 1], r"layers = \[1000000000, 1, 1, 1\] is more than 256"),
        ("vision_cfg.layers", 3, r"12 missing \(visual.transformer.resblocks.2"),
        ("text_cfg.vocab_size", 10**6, "token_embedding.weight"),
        ("embed_dim", 999_999, "visual.proj"),
        ("text_cfg.pool_type", "nonsense", "cannot build the configured tower"),
        ("text_cfg.hf_model_name", "nobody/nothing", "nobody/nothing"),
        ("vision_cfg.timm_model_name", "hf-hub:evil/x", "timm has no model 'hf-hub:evil/x'"),
        ("vision_cfg.timm_model_name", "local-dir:/tmp", "timm has no model"),
        ("vision_cfg.timm_model_name", "resnet50.hf-hub:evil/x", "cannot build the configured tower"),
        ("vision_cfg.something", 1, "something"),
        ("something", 1, "unknown fields: something"),
        ("vision_cfg", None, "TypeError"),
        ("text_cfg", "x", "ValueError"),
        ("text_cfg.tokenizer_kwargs", {"trust_remote_code": True}, "tokenizer_kwargs"),
        ("text_cfg.tokenizer_kwargs", {"clean": "lower"}, "needs hf_tokenizer_name"),
        ("text_cfg.hf_tokenizer_name", 5, "hf_tokenizer_name = 5"),
    ],
)  # fmt: skip
def test_invalid_hub_configurations_are_rejected(
    field: str, value: Any, message: str, hub: Path, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        *path, last = field.split(".")
        place = config["model_cfg"]
        for part in path:
            place = place[part]
        place[last] = value

    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(changed(hub, tmp_path / "folder", "open_clip_config.json", change))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "vision",
    [
        {"width": 500_000, "ls_init_value": 0.1}, {"layers": 250, "width": 4096, "ls_init_value": 0.1},
        {"image_size": 4096, "patch_size": 1, "width": 8192, "pos_embed_type": "sin_cos_2d"},
        {"image_size": 4096, "timm_model_name": "vit_giant_patch14_dinov2"}, {"mlp_ratio": 1e9, "no_ln_pre": True},
        {"layers": [60] * 4, "width": 4096}, {"layers": [1, 1, 1, 1], "width": 10**12},
        {"mlp_ratio": 1e308, "no_ln_pre": True},
    ],
)  # fmt: skip
def test_invalid_configuration_allocates_no_memory(vision: dict[str, Any], hub: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["model_cfg"]["vision_cfg"].update(vision)

    folder = changed(hub, tmp_path / "folder", "open_clip_config.json", change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        clipkit.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_pretrained_backbone_weights_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hub_folder(tmp_path, "timm's ViT")
    (tmp_path / "open_clip_pytorch_model.bin").unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was fetched")

    for place in (
        "timm.models._builder.load_pretrained",
        "huggingface_hub.hf_hub_download",
        "urllib.request.urlopen",
    ):
        monkeypatch.setattr(place, refuse)
    folder = changed(
        tmp_path,
        tmp_path / "folder",
        "open_clip_config.json",
        lambda config: config["model_cfg"]["vision_cfg"].update(timm_model_pretrained=True),
    )
    shape = clipkit.load(folder).architecture
    assert shape == clipkit.load(tmp_path).architecture


def test_tokenizer_with_custom_code_is_rejected(tmp_path: Path) -> None:
    write_hub_folder(tmp_path, "SigLIP")
    write_word_tokenizer(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Words: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["evil.Words", "evil.Words"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Words"}}')
    ours = clipkit.load(tmp_path)
    with pytest.raises(ConfigError) as caught:
        clipkit.encode_text(["a dog"], ours)
    assert "\n" not in str(caught.value) and not ran.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no checkpoint in .*expected a run folder"),
        ({"config.json": '{"model_type": "clip"}'}, "has no weights: expected model.safetensors"),
        ({"open_clip_config.json": json.dumps({"model_cfg": CONFIGS["ViT"]})}, "has no weights"),
        ({"open_clip_config.json": '{"model_cfg": {}, "preprocess_cfg": 5}'}, "preprocess_cfg is not an object"),
        ({"config.json": "{}", "model.safetensors": "x"}, "truncated or damaged"),
    ],
)  # fmt: skip
def test_incomplete_folders_are_rejected(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        clipkit.load(tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "x" * 5000, "a\0b", "~nobody-at-all/x", ""])
def test_missing_paths_raise_one_line_error(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        clipkit.load(source)
    assert "\n" not in str(caught.value)


def test_transformers_weights_without_config_are_rejected(theirs: Path, tmp_path: Path) -> None:
    shutil.copy(theirs / "model.safetensors", tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="use the folder with its config"):
        clipkit.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.complex64])
def test_quantized_weights_are_rejected(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = their_model("ViT").state_dict()
    torch.save({**tensors, "visual.proj": tensors["visual.proj"].to(dtype)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="quantized weights are not supported"):
        clipkit.load(tmp_path / "w.pt", name="open_clip:RN50")


# random JSON values in any field

numbers = (
    st.integers()
    | st.sampled_from([0, 1, 2, 16, 32, 64, -1, 10**6, 10**9, 2**31, 2**63, 10**30])
    | st.floats()
)
words = st.text(max_size=5) | st.sampled_from(
    ["tok", "avg", "none", "map", "linear", "test_vit", "gelu", "clips", "."]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def fields(kind: str) -> list[tuple[str, ...]]:
    """Return the path of every configuration field that the library knows."""
    if kind == "hub":
        from open_clip.coca_model import MultimodalCfg
        from open_clip.model import CLIPTextCfg, CLIPVisionCfg

        inner = [("vision_cfg", name) for name in vars(CLIPVisionCfg)["__dataclass_fields__"]]
        inner += [("text_cfg", name) for name in vars(CLIPTextCfg)["__dataclass_fields__"]]
        inner += [("multimodal_cfg", name) for name in vars(MultimodalCfg)["__dataclass_fields__"]]
        top = [*CONFIGS["ViT"], "quick_gelu", "custom_text", "init_logit_bias", "multimodal_cfg"]
        places = [("model_cfg", name) for name in top] + [("model_cfg", *path) for path in inner]
        prepared = [
            ("preprocess_cfg", name)
            for name in ("mean", "std", "interpolation", "resize_mode", "fill_color", "size")
        ]
        return [("model_cfg",), ("preprocess_cfg",), *places, *prepared]
    from transformers import CLIPTextConfig, CLIPVisionConfig

    towers = [("text_config", name) for name in CLIPTextConfig().to_dict()]
    towers += [("vision_config", name) for name in CLIPVisionConfig().to_dict()]
    top = [
        "model_type",
        "projection_dim",
        "text_config",
        "vision_config",
        "text_config_dict",
        "vision_config_dict",
        "auto_map",
    ]
    return [*((name,) for name in top), *towers]


def put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        config = config.setdefault(part, {})
    config[path[-1]] = value


def load_or_refuse(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        ours = clipkit.load(folder)
    except ClipkitError:
        pass
    else:
        assert math.isfinite(ours.logit_scale.item())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.parametrize("kind", ["hub", "theirs"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_configuration_value_loads_or_raises_clipkit_error(
    kind: str, data: st.DataObject, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    path, value = data.draw(st.sampled_from(fields(kind))), data.draw(values)
    file = {"hub": "open_clip_config.json", "theirs": "config.json"}[kind]
    load_or_refuse(changed(source, tmp_path / kind, file, lambda config: put(config, path, value)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_preprocessor_value_loads_or_raises_clipkit_error(
    data: st.DataObject, theirs: Path, tmp_path: Path
) -> None:
    from transformers import CLIPImageProcessor

    names = sorted(CLIPImageProcessor().to_dict())
    name, value = data.draw(st.sampled_from(names)), data.draw(values)
    load_or_refuse(
        changed(
            theirs, tmp_path / "x", "preprocessor_config.json", lambda config: put(config, (name,), value)
        )
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_weights_are_rejected(value: float, tmp_path: Path) -> None:
    model = their_model("ViT")
    with torch.no_grad():
        model.visual.proj[3, 5] = value
    write_hub_folder(tmp_path / "hub", "ViT")
    torch.save(model.state_dict(), tmp_path / "hub" / "open_clip_pytorch_model.bin")
    (tmp_path / "hub" / "open_clip_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hub: visual\.proj contains NaN or infinity"):
        clipkit.load(tmp_path / "hub")
