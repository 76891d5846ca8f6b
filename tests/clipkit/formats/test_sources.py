"""Tests of ``clipkit.load`` on open_clip's training folders, hub folders and registry."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.open_clip import fitting_names
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.names import OPEN_CLIP, open_clip_config
from tests.clipkit.stored_models import (
    CONFIGS,
    TEXTS,
    assert_same_embeddings,
    register,
    their_model,
    write_hub_folder,
)

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
    with pytest.raises(CheckpointError, match="without a checkpoints/epoch_N"):
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
    how = r"by --name on the command line or clipkit.load\(…, name=…\)"
    names = "such as 'open_clip:ViT-tiny', with QuickGELU 'open_clip:ViT-tiny-quickgelu'"
    with pytest.raises(
        CheckpointError, match=f"and whether it uses QuickGELU: specify the architecture {how}, {names}"
    ):
        clipkit.load(run)
    same(clipkit.load(run, name="open_clip:ViT-tiny-quickgelu"), theirs)
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


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ("--model ViT-tiny", "open_clip:ViT-tiny-quickgelu", "for GELU, .*-quickgelu is for QuickGELU"),
        ("--model ViT-tiny --force-quick-gelu", "open_clip:ViT-tiny", "for QuickGELU, .*ViT-tiny is for GELU"),
        ("--model ViT-tiny", "open_clip:RN-tiny", "have another architecture than open_clip:RN-tiny"),
        ("--model ViT-tiny", "ViT-B-32", "have another architecture than ViT-B-32"),
        ("--model ViT-tiny --pretrained openai", "", "and with GELU since: specify the architecture"),
        ("--model local-dir:/some/where", "", "'local-dir:/some/where', which is unknown to open_clip"),
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
    names = fitting_names(tensors)
    assert own in names and (other in names) == (other in ARCHITECTURES or name.startswith("RN"))
    longer = {**tensors, "positional_embedding": tensors["positional_embedding"][:50]}
    assert own in fitting_names(longer)  # the closest, even with another text length


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
    assert clipkit.load(tmp_path, name="open_clip:ViT-tiny").architecture.is_own


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
    assert (
        "or use other weights, such as a run folder (with train.py: model.weights=FOLDER model.name=NAME)"
        in str(caught.value)
    )


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
