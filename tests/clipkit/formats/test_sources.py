"""Tests of ``clipkit.load`` on open_clip's training folders, hub folders and registry."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.open_clip import find_architectures, find_common_preprocess
from clipkit.model import names
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.names import OPEN_CLIP, open_clip_config
from clipkit.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess
from tests.clipkit.stored_models import (
    CONFIGS,
    TEXTS,
    VIT,
    assert_same_embeddings,
    register,
    their_model,
    write_hub_folder,
    write_word_tokenizer,
)

# most tests use small architectures
pytestmark = pytest.mark.filterwarnings("ignore:.*no published weights of")
PREPROCESS = {
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.3, 0.4),
    "interpolation": "bilinear",
    "resize_mode": "squash",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model_configs")
    register(monkeypatch, folder, "ViT-tiny", CONFIGS["ViT"])
    register(monkeypatch, folder, "ViT-tiny-quickgelu", CONFIGS["ViT with QuickGELU"])
    register(monkeypatch, folder, "RN-tiny", CONFIGS["ResNet"])


def train(logs: Path, theirs: Any, *settings: str, epochs: tuple[int, ...] = (1,), prefix: str = "") -> Path:
    """Write a run as open_clip's trainer does: settings in params.txt, and a checkpoint after each epoch."""
    from open_clip_train.params import parse_args  # type: ignore[import-untyped]

    args = parse_args(["--name", "run", "--logs", str(logs), *settings])
    run = logs / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "params.txt").write_text(
        "".join(f"{name}: {value}\n" for name, value in sorted(vars(args).items()))
    )
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    sum(parameter.sum() for parameter in theirs.parameters()).backward()
    optimizer.step()
    for epoch in epochs:
        with torch.no_grad():
            theirs.logit_scale.fill_(epoch / 10)
        stored = {
            "epoch": epoch,
            "name": "run",
            "state_dict": {prefix + name: value for name, value in theirs.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0},
        }
        torch.save(stored, run / "checkpoints" / f"epoch_{epoch}.pt")
    return run


def same(ours: clipkit.CLIP, theirs: Any, **preprocess: Any) -> None:
    """Assert equal embeddings, using open_clip's preprocessing and tokenizer."""
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    settings = PreprocessCfg(size=ours.preprocess.image_size, **preprocess)
    tokenizer = open_clip.SimpleTokenizer(context_length=16)
    assert_same_embeddings(ours, theirs, image_transform_v2(settings, is_train=False), tokenizer)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_training_checkpoints_load_by_file_and_by_folder(prefix: str, tmp_path: Path) -> None:
    theirs = their_model("ViT")
    run = train(tmp_path, theirs, "--model", "ViT-tiny", epochs=(2, 9, 10), prefix=prefix)
    newest = clipkit.load(run)
    assert newest.origin == f"open_clip checkpoint {run}/checkpoints/epoch_10.pt (epoch 10)"
    assert newest.name == "open_clip:ViT-tiny" and not newest.architecture.quick_gelu
    assert newest.logit_scale.item() == 1.0 and not newest.training
    same(newest, theirs)
    assert clipkit.load(run / "checkpoints").origin == newest.origin
    second = clipkit.load(run / "checkpoints" / "epoch_2.pt", name="open_clip:ViT-tiny")
    assert second.logit_scale.item() == pytest.approx(0.2)


def test_checkpoints_with_frozen_batch_norms_load(tmp_path: Path) -> None:
    theirs = their_model("ResNet")
    theirs.lock_image_tower(freeze_bn_stats=True)
    assert not any("num_batches_tracked" in name for name in theirs.state_dict())
    same(clipkit.load(train(tmp_path, theirs, "--model", "RN-tiny")), theirs)


def test_epoch_latest_is_used_if_it_is_newest(tmp_path: Path) -> None:
    run = train(tmp_path, their_model("ViT"), "--model", "ViT-tiny", epochs=(1, 3))
    folder = run / "checkpoints"
    shutil.copy(folder / "epoch_1.pt", folder / "epoch_latest.pt")
    assert clipkit.load(run).origin.endswith("epoch_3.pt (epoch 3)")
    (folder / "epoch_3.pt").rename(folder / "epoch_latest.pt")
    assert clipkit.load(run).origin.endswith("epoch_latest.pt (epoch 3)")
    (folder / "epoch_1.pt").unlink()
    assert clipkit.load(run).origin.endswith("epoch_latest.pt (epoch 3)")
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        clipkit.load(run)


def test_settings_in_params_txt_are_applied(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vision_cfg": {**CONFIGS["ViT"]["vision_cfg"], "image_size": 48},
        "text_cfg": {**CONFIGS["ViT"]["text_cfg"], "context_length": 9},
    }
    theirs = their_model("ViT", **sizes, quick_gelu=True, init_logit_bias=-10)
    settings = (
        "--model ViT-tiny --force-quick-gelu --force-image-size 48 48 --force-context-length 9 --siglip "
        "--image-mean 0.5 0.4 0.3 --image-std 0.2 0.3 0.4 --image-interpolation bilinear "
        "--image-resize-mode squash"
    )
    ours = clipkit.load(train(tmp_path, theirs, *settings.split()))
    assert ours.architecture.quick_gelu and ours.preprocess.image_size == 48
    assert ours.architecture.text.context_length == 9 and ours.logit_bias is not None
    assert {key: getattr(ours.preprocess, key) for key in PREPROCESS} == PREPROCESS
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(size=48, **PREPROCESS), is_train=False)
    assert_same_embeddings(ours, theirs, transform, open_clip.SimpleTokenizer(context_length=9))


def test_weights_without_params_txt_need_a_name(tmp_path: Path) -> None:
    theirs = their_model("ViT with QuickGELU")
    run = train(tmp_path, theirs, "--model", "ViT-tiny")
    (run / "params.txt").unlink()
    how = r"by --name NAME on the command line, clipkit.load\(…, name=NAME\) or, in training, model.name=NAME"
    names = "such as 'open_clip:ViT-tiny'; add -quickgelu to the name if the model has QuickGELU$"
    with pytest.raises(
        CheckpointError, match=f"and whether it uses QuickGELU: specify the architecture {how}, {names}"
    ):
        clipkit.load(run)
    same(clipkit.load(run, name="open_clip:ViT-tiny-quickgelu"), theirs)
    unknown = tmp_path / "unknown.pt"  # no architecture has these shapes
    torch.save({"visual.proj": torch.zeros(3, 3)}, unknown)
    with pytest.raises(CheckpointError, match=f"^{unknown}: .* {how}; add -quickgelu to the name if"):
        clipkit.load(unknown)
    file = tmp_path / "weights.pt"
    torch.save(theirs.state_dict(), file)
    ours = clipkit.load(file, name="open_clip:ViT-tiny-quickgelu")
    assert ours.origin == f"open_clip checkpoint {file}"
    same(ours, theirs)


def test_names_with_quickgelu_suffix_load(tmp_path: Path) -> None:
    """Listed or unlisted, of clipkit and of open_clip."""
    file = tmp_path / "epoch_1.pt"
    for plain in ("ViT-Ti-4-16", "open_clip:ViT-S-32-alt"):
        theirs = clipkit.create(plain, seed=0)
        torch.save({"epoch": 1, "state_dict": theirs.state_dict()}, file)
        ours = clipkit.load(file, name=f"{plain}-quickgelu")
        assert ours.name == f"{plain}-quickgelu" and ours.architecture.quick_gelu
        assert not clipkit.load(file, name=plain).architecture.quick_gelu
    for name, hint in (
        ("ViT-B-32-quickgelu-quickgelu", "name = .* is unknown: did you mean 'ViT-B-32-quickgelu'"),
        ("ViT-S-3-quickgelu", "name = .* is unknown: "),
        ("open_clip:RN5-quickgelu", "name = .* is not an architecture of open_clip: "),
        ("RN50x4-quickgelu", "write 'open_clip:RN50x4-quickgelu'"),
    ):
        with pytest.raises(ConfigError, match=f"^{hint}" if hint[0] == "n" else hint):
            clipkit.load(file, name=name)


PUBLISHED = {
    "MobileCLIP-S1": {"mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear"},
    "ViT-B-16-SigLIP2": {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash"},
    "PE-Core-B-16": {"mean": (0.5,) * 3, "interpolation": "bilinear", "resize_mode": "squash"},
    "ViT-L-14-CLIPA": {"mean": (0.485, 0.456, 0.406), "interpolation": "bilinear", "resize_mode": "squash"},
    "ViT-H-14-378": {"mean": OPENAI_MEAN, "resize_mode": "squash"},
    "ViT-B-32": {"mean": OPENAI_MEAN, "std": OPENAI_STD, "interpolation": "bicubic", "resize_mode": "shortest"},
    "ViT-B-16-SigLIP2-quickgelu": {"mean": (0.5,) * 3, "resize_mode": "squash"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_by_name_are_preprocessed_as_the_published_ones(name: str) -> None:
    settings, note = find_common_preprocess(OPEN_CLIP + name)
    assert not note
    preprocess = Preprocess.from_dict({"image_size": 224, **settings})
    assert {key: getattr(preprocess, key) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_differing_or_unknown_preprocessing_is_named() -> None:
    """Every architecture of open_clip's registry either agrees with all its tags or says what is assumed."""
    import open_clip

    notes = {}
    for name in open_clip.list_models():
        settings, note = find_common_preprocess(OPEN_CLIP + name)
        tags = open_clip.list_pretrained_tags_by_model(name)
        if tags and not note:
            for tag in tags:
                entry = open_clip.get_pretrained_cfg(name, tag)
                assert settings.items() <= entry.items()
        elif tags:
            notes[name] = note
        else:
            assert settings == {} and ("no published weights" in note or name.endswith("-quickgelu"))
    assert sorted(notes) == ["ViT-H-14", "ViT-H-14-quickgelu", "ViT-L-14"]
    assert "as 11 of 12 published weights of ViT-L-14" in notes["ViT-L-14"]
    assert notes["ViT-L-14"].endswith("give the name open_clip:ViT-L-14/laion2b_s32b_b82k")


def test_file_loads_with_the_preprocessing_of_its_architecture(
    tmp_path: Path, published: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from open_clip.pretrained import _PRETRAINED

    file = tmp_path / "weights.pt"
    name = "open_clip:ViT-tiny"
    with pytest.warns(UserWarning, match=rf"{file}.*assuming CLIP's.* give the name {name}/laion_x$"):
        assert clipkit.load(file, name=name).preprocess.mean == OPENAI_MEAN
    ours = clipkit.load(file, name=f"{name}/laion_x")  # no warning
    assert ours.preprocess.mean == (0.5, 0.5, 0.5) and ours.architecture.quick_gelu and ours.name == name
    assert clipkit.load(file, name=f"{name}/plain").preprocess.mean == OPENAI_MEAN
    with pytest.raises(ConfigError, match="known tags of open_clip:ViT-tiny: laion_x, plain"):
        clipkit.load(file, name=f"{name}/laion_y")
    entry = _PRETRAINED["ViT-tiny"]["laion_x"]
    monkeypatch.setitem(_PRETRAINED, "ViT-tiny", {"laion_x": entry, "laion_y": entry})
    assert clipkit.load(file, name=name).preprocess.mean == (0.5, 0.5, 0.5)  # the tags agree
    monkeypatch.delitem(_PRETRAINED, "ViT-tiny")
    with pytest.warns(UserWarning, match="no published weights of ViT-tiny"):
        assert clipkit.load(file, name=name).preprocess.mean == OPENAI_MEAN


def test_params_txt_may_name_a_folder_or_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    theirs = write_hub_folder(hub, "ViT with QuickGELU", preprocess={**PREPROCESS, "size": 32})
    (hub / "open_clip_model.safetensors").unlink()

    def fetch(source: str) -> Path:
        if source != "hf-hub:somebody/model":
            raise ConfigError(f"{source} is not stored on this machine")
        return hub

    monkeypatch.setattr("clipkit.formats.open_clip.fetch_repository", fetch)
    for index, model in enumerate(("hf-hub:somebody/model", f"local-dir:{hub}")):
        run = train(tmp_path / str(index), theirs, "--model", model)
        ours = clipkit.load(run)
        assert ours.architecture.quick_gelu
        assert {key: getattr(ours.preprocess, key) for key in PREPROCESS} == PREPROCESS
        same(ours, theirs, **PREPROCESS)
    run = train(tmp_path / "other", theirs, "--model", "hf-hub:somebody/other")
    with pytest.raises(
        CheckpointError, match=r"params.txt names .*'hf-hub:somebody/other', .*not stored.*--name"
    ):
        clipkit.load(run)


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ("state_dict", "model."),  # Lightning
        ("state_dict", "clip_model."),
        ("model_state_dict", "module.model."),
        ("model", "clip."),
        ("", "model._orig_mod.clip."),
    ],
)
def test_weights_of_wrapped_models_load(place: str, prefix: str, tmp_path: Path) -> None:
    theirs = their_model("ViT")
    tensors = {prefix + name: value for name, value in theirs.state_dict().items()}
    lightning = {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.5.0",
        "hyper_parameters": {"lr": 1.0},
    }
    torch.save({**lightning, place: tensors} if place else tensors, tmp_path / "last.ckpt")
    same(clipkit.load(tmp_path / "last.ckpt", name="open_clip:ViT-tiny"), theirs)


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ("--model ViT-tiny", "open_clip:ViT-tiny-quickgelu", "for GELU, .*-quickgelu is for QuickGELU"),
        ("--model ViT-tiny --force-quick-gelu", "open_clip:ViT-tiny", "for QuickGELU, .*ViT-tiny is for GELU"),
        ("--model ViT-tiny", "open_clip:RN-tiny", "have another architecture than open_clip:RN-tiny"),
        ("--model ViT-tiny", "ViT-B-32", "have another architecture than ViT-B-32"),
        ("--model ViT-tiny --pretrained openai", "", "and with GELU since: specify the architecture"),
        ("--model local-dir:/some/where", "", "'local-dir:/some/where', /some/where/open_clip.*: No such file"),
        ("--model ViT-tiny --force-image-size 32 48", "", r"image_size = \[32, 48\]"),
    ],
)  # fmt: skip
def test_contradictions_with_params_txt_are_rejected(
    settings: str, name: str, message: str, tmp_path: Path
) -> None:
    run = train(tmp_path, their_model("ViT"), *settings.split())
    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(run, name=name)
    assert "\n" not in str(caught.value)


def test_name_resolves_an_ambiguous_activation(tmp_path: Path) -> None:
    theirs = their_model("ViT with QuickGELU")
    run = train(tmp_path, theirs, "--model", "ViT-tiny", "--pretrained", "openai")
    same(clipkit.load(run, name="open_clip:ViT-tiny-quickgelu"), theirs)


def test_wrong_architecture_error_lists_tensors_and_matching_names(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(their_model("ViT").state_dict(), file)
    with pytest.raises(CheckpointError) as caught:
        clipkit.load(file, name="open_clip:RN-tiny")
    message = str(caught.value)
    assert "missing (visual." in message and "unexpected (visual.class_embedding" in message
    assert message.endswith("their shapes match 'open_clip:ViT-tiny' or 'open_clip:ViT-tiny-quickgelu'")
    with pytest.raises(
        CheckpointError, match=r"with another shape .*positional_embedding \(16, 32\) instead of \(77, 384\)"
    ):
        clipkit.load(file, name="ViT-S-32")


@pytest.mark.parametrize(
    "name", ["ViT-B-32", "ViT-L-14-336", "ViT-H-14", "ViT-g-14", "RN50x4", "ViT-B-16-plus-240"]
)
def test_fitting_names_are_found_by_shape(name: str) -> None:
    import open_clip

    with torch.device("meta"):
        tensors = open_clip.CLIP(**open_clip_config(name)).state_dict()
    own = name if name in ARCHITECTURES else OPEN_CLIP + name
    other = own + "-quickgelu"
    names = find_architectures(tensors)
    assert own in names and (other in names) == (other in ARCHITECTURES or name.startswith("RN"))
    longer = {**tensors, "positional_embedding": tensors["positional_embedding"][:50]}
    assert own in find_architectures(longer)  # the closest, even with another text length


@pytest.mark.parametrize("kind", ["ViT", "ViT with QuickGELU", "ResNet", "ConvNeXt", "SigLIP", "CoCa"])
def test_hub_folder_embeddings_equal_open_clip(kind: str, tmp_path: Path) -> None:
    import open_clip

    write_hub_folder(tmp_path, kind, preprocess=PREPROCESS)
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    ours = clipkit.load(tmp_path)
    assert ours.origin == f"open_clip folder {tmp_path}"
    assert {key: getattr(ours.preprocess, key) for key in PREPROCESS} == PREPROCESS
    assert_same_embeddings(ours, theirs.eval(), transform, tokenizer)
    (tmp_path / "open_clip_model.safetensors").unlink()  # leaves the .bin file
    again = clipkit.load(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())


def test_load_reads_the_given_file_of_a_hub_folder(tmp_path: Path) -> None:
    theirs = write_hub_folder(tmp_path, "ViT")
    file = tmp_path / "open_clip_pytorch_model.bin"
    with torch.no_grad():
        theirs.logit_scale.fill_(1.5)
    torch.save(theirs.state_dict(), file)
    assert clipkit.load(file).logit_scale.item() == 1.5
    assert clipkit.load(tmp_path).logit_scale.item() != 1.5
    with pytest.raises(CheckpointError, match="for GELU, open_clip:ViT-tiny-quickgelu is for QuickGELU"):
        clipkit.load(tmp_path, name="open_clip:ViT-tiny-quickgelu")
    assert clipkit.load(tmp_path, name="open_clip:ViT-tiny").architecture.is_native


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Tensor]:
    """Two entries in open_clip's registry, downloaded from a local file."""
    import open_clip
    from open_clip.pretrained import _PRETRAINED, _pcfg, _slpcfg

    entries = {
        "laion_x": _slpcfg(hf_hub="somebody/a/", quick_gelu=True),
        "plain": _pcfg(hf_hub="somebody/b/"),
    }
    for name in ("ViT-tiny", "ViT-tiny-quickgelu"):
        monkeypatch.setitem(_PRETRAINED, name, entries)
    tensors: dict[str, Tensor] = their_model("ViT").state_dict()
    torch.save(tensors, tmp_path / "weights.pt")

    def download(entry: Mapping[str, Any]) -> str:
        assert entry in entries.values()
        return str(tmp_path / "weights.pt")

    monkeypatch.setattr(open_clip, "download_pretrained", download)
    return tensors


def test_published_weights_load(published: dict[str, Tensor]) -> None:
    ours = clipkit.load("open_clip:ViT-tiny/laion-X")  # tags are normalized as in open_clip
    assert ours.origin == "open_clip's published weights ViT-tiny/laion-X"
    assert ours.architecture.quick_gelu  # set by the tag, although the named architecture uses GELU
    assert ours.preprocess.mean == (0.5, 0.5, 0.5) and ours.preprocess.resize_mode == "squash"
    theirs = their_model("ViT with QuickGELU")
    theirs.load_state_dict(published)
    same(ours, theirs, mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode="squash")
    assert not clipkit.load("open_clip:ViT-tiny/plain").architecture.quick_gelu
    # an architecture with QuickGELU keeps it where the registry does not say, as for roberta-ViT-B-32
    assert clipkit.load("open_clip:ViT-tiny-quickgelu/plain").architecture.quick_gelu
    with pytest.raises(CheckpointError, match="for QuickGELU, open_clip:ViT-tiny is for GELU"):
        clipkit.load("open_clip:ViT-tiny/laion_x", name="open_clip:ViT-tiny")


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("open_clip:ViT-tiny/laion_y", CheckpointError, "ViT-tiny/TAG; known tags: laion_x, plain"),
        ("open_clip:ViT-tiny", CheckpointError, "known tags: laion_x, plain"),
        ("open_clip:RN-tiny", CheckpointError, "known tags: none"),
        ("open_clip:ViT-B-23/openai", ConfigError, "did you mean"),
    ],
)
def test_unknown_published_weights_list_known_tags(
    published: Any, source: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        clipkit.load(source)


@pytest.mark.parametrize(
    "source",
    ["open_clip:ViT-B-32/openai", "open_clip:RN50/yfcc15m", "hf-hub:nobody/nothing", "hf-hub:a b", "hf-hub:"],
)
def test_offline_download_raises_one_line_error(source: str) -> None:
    with pytest.raises(
        ConfigError, match="is not stored on this machine, and downloading it failed"
    ) as caught:
        clipkit.load(source)
    assert source in str(caught.value) and "\n" not in str(caught.value)
    advice = (
        "or use other weights, such as a run folder (with train.py: model.weights=FOLDER model.name=NAME; "
    )
    assert f"{advice}model.weights= starts with random ones)" in str(caught.value)


def test_missing_network_fails_at_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when not configured offline: open_clip's downloader would retry for a minute."""
    import open_clip

    def refuse(entry: Any) -> None:
        raise AssertionError("the downloader was called")

    monkeypatch.setattr(open_clip, "download_pretrained", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    for source in ("open_clip:ViT-B-32/openai", "hf-hub:nobody/nothing"):
        with pytest.raises(ConfigError, match="check the network"):
            clipkit.load(source)


def test_cached_repository_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the hub's cache are links into its folder of blobs."""
    repository = tmp_path / "models--somebody--something"
    write_hub_folder(repository / "made", "ViT")
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs").mkdir()
    for number, file in enumerate((repository / "made").iterdir()):
        blob = file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ours = clipkit.load("hf-hub:somebody/something")
    assert ours.origin == f"hf-hub:somebody/something: open_clip folder {snapshot}"
    same(ours, their_model("ViT"))


def test_missing_tokenizer_is_reported_when_texts_are_encoded(tmp_path: Path) -> None:
    write_hub_folder(tmp_path, "SigLIP")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    ours = clipkit.load(tmp_path)
    with pytest.raises(ConfigError, match="somebody/somewhere"):
        clipkit.encode_text(list(TEXTS), ours)


def write_bert_folder(folder: Path, **text: Any) -> tuple[Any, Any]:
    """Write an open_clip folder with a small BERT as the text tower; return BERT and the projection's weights."""
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    bert = BertModel(BertConfig(vocab_size=13, max_position_embeddings=24, pad_token_id=0, **sizes)).eval()
    folder.mkdir(exist_ok=True)
    write_word_tokenizer(folder)
    bert.config.save_pretrained(folder / "bert")
    hidden = {"mlp": 40, "linear": 48}[text.get("proj") or text.get("hf_proj_type", "mlp")]
    proj = {"proj.weight": torch.randn(48, 32)}
    if hidden == 40:
        proj = {"proj.0.weight": torch.randn(40, 32), "proj.2.weight": torch.randn(48, 40)}
    names = {
        "hf_model_name": str(folder / "bert"),
        "hf_tokenizer_name": "somebody/bert",
        "context_length": 16,
    }
    config = {"embed_dim": 48, "vision_cfg": VIT, "text_cfg": {**names, **text}, "custom_text": True}
    tensors = {**their_model("ViT", embed_dim=48, custom_text=True).state_dict()}
    tensors = {name: value for name, value in tensors.items() if not name.startswith("text.")}
    pooler = text.get("pooler_type", text.get("hf_pooler_type"))
    for name, value in bert.state_dict().items():
        if not name.startswith("pooler.") or pooler == "cls_pooler":
            tensors[f"text.transformer.{name}"] = value
    tensors |= {f"text.{name}": value for name, value in proj.items()}
    save_file(
        {name: value.clone() for name, value in tensors.items()}, folder / "open_clip_model.safetensors"
    )
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return bert, proj


@pytest.mark.parametrize(
    "text",
    [
        {"pooler_type": "cls_last_hidden_state_pooler", "proj": "mlp"},  # as in earlier BiomedCLIP folders
        {"hf_pooler_type": "cls_last_hidden_state_pooler", "hf_proj_type": "mlp"},
        {"pooler_type": "cls_last_hidden_state_pooler", "hf_pooler_type": "cls_last_hidden_state_pooler"},
        {"pooler_type": "cls_pooler", "proj": "linear"},
        {"pooler_type": None},  # open_clip's default for BERT
        {"pooler_type": "mean_pooler"},
        {},
    ],
)
def test_names_of_older_text_configurations(text: dict[str, Any], tmp_path: Path) -> None:
    pooler = text.get("hf_pooler_type", text.get("pooler_type", "mean_pooler")) or "cls_pooler"
    if "pooler_type" in text and text["pooler_type"] is None:
        bert, proj = write_bert_folder(tmp_path, hf_pooler_type="cls_pooler")
        config = json.loads((tmp_path / "open_clip_config.json").read_text())
        config["model_cfg"]["text_cfg"]["hf_pooler_type"] = None
        (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    else:
        bert, proj = write_bert_folder(tmp_path, **text)
    ours = clipkit.load(tmp_path)
    texts = ["a red hat", "two grey cats", "a photo of a dog of two grey cats"]
    expected = []
    for one in texts:  # without padding
        ids = ours.tokenizer([one])
        with torch.no_grad():
            output = bert(input_ids=ids)
        pooled = {
            "cls_pooler": output.pooler_output,
            "cls_last_hidden_state_pooler": output.last_hidden_state[:, 0],
            "mean_pooler": output.last_hidden_state.mean(dim=1),
        }[pooler]
        if "proj.0.weight" in proj:
            pooled = torch.nn.functional.gelu(pooled @ proj["proj.0.weight"].T) @ proj["proj.2.weight"].T
        else:
            pooled = pooled @ proj["proj.weight"].T
        expected.append(torch.nn.functional.normalize(pooled))
    assert (clipkit.encode_text(texts, ours) - torch.cat(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("tower", "fields", "message"),
    [
        ("text_cfg", {"pooling": "cls"}, "text_cfg has the unknown field 'pooling' = 'cls': "),
        ("text_cfg", {"hf_poler_type": "x"}, "did you mean 'hf_pooler_type'"),
        (
            "text_cfg",
            {"pooler_type": "cls_pooler", "hf_pooler_type": "mean_pooler"},
            "two values of hf_pooler_type",
        ),
        ("text_cfg", {"pooler_type": "max_pooler"}, "hf_pooler_type = 'max_pooler' is unknown"),
        ("text_cfg", {"tokenizer_kwargs": {"clean": "lower"}}, "tokenizer_kwargs = .* with hf_model_name"),
        ("text_cfg", {"timm_pool": "avg"}, "unknown field 'timm_pool'"),
        (
            "vision_cfg",
            {"global_average_pool": True},
            "vision_cfg has the unknown field 'global_average_pool'",
        ),
        ("vision_cfg", {"n_queries": 4, "attn_pooler_queries": 5}, "two values of attn_pooler_queries"),
        ("vision_cfg", {"pooler_type": "x"}, "vision_cfg has the unknown field 'pooler_type'"),
    ],
)
def test_unknown_fields_of_a_tower_are_refused(
    tower: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_bert_folder(tmp_path)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["model_cfg"][tower].update(fields)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_removed_fields_with_their_defaults_are_ignored(tmp_path: Path) -> None:
    write_hub_folder(tmp_path, "ViT")
    before = clipkit.load(tmp_path).architecture
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["model_cfg"]["vision_cfg"].update(global_average_pool=False, input_patchnorm=False, n_queries=256)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    assert clipkit.load(tmp_path).architecture == before


def test_all_fields_of_open_clip_are_known() -> None:
    from open_clip import CLIPTextCfg, CLIPVisionCfg

    text = {field.name for field in fields(CLIPTextCfg)}
    vision = {field.name for field in fields(CLIPVisionCfg)}
    assert text == {*names._TEXT_SIZES, *names._PLAIN_TEXT, *names._IDLE_TEXT}
    assert vision == {*names._VISION_SIZES, *names._PLAIN_VISION, *names._IDLE_VISION}
