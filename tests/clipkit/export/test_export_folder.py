"""Tests of the export folder: atomic writes, foreign files are kept, models are never mixed."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clipkit
from clipkit.__main__ import dispatch
from clipkit.config import Config, OptimConfig, to_toml
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import EXPORTS, export, write as exporting
from clipkit.export.model_card import KnownScore, Source, find_source
from clipkit.export.write import run_export
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.architectures import Architecture, BagOfWords, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.options import EXPORT_TARGETS, ExportOptions
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw

SHAPE = Architecture(
    embed_dim=16,
    vision=VisionTower(image_size=16, patch_size=8, width=32, layers=1, heads=1),
    text=TextTower(width=16, layers=1, heads=1, context_length=16),
)
LINE = {
    "step": 7, "dataset": "digits", "task": "zero-shot", "metric": "acc1", "value": 0.5, "n": 1797, "low": 0.48,
    "high": 0.525, "chance": 0.1,
}  # fmt: skip


def test_options_name_the_targets() -> None:
    assert tuple(EXPORTS) == EXPORT_TARGETS
    default = " and ".join(name for name, target in EXPORTS.items() if target.default)
    to = next(field for field in fields(ExportOptions) if field.name == "to")
    assert default in str(to.metadata)


@pytest.fixture
def model() -> CLIP:
    return create(SHAPE, seed=0)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- content of the folder ----------------------------------------------------------------------------------


def test_second_target_is_added_to_the_folder(model: CLIP, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    export(model, out, to=["open_clip"])
    first = files(out)
    (out / "LICENSE").write_text("mine")
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("kept")
    weights = (out / "open_clip_model.safetensors").stat()
    export(model, out, to=["timm"])
    assert files(out) == first | {"config.json", "model.safetensors", "LICENSE", "notes/a.txt"}
    assert (out / "open_clip_model.safetensors").stat().st_ino == weights.st_ino  # not written again
    manifest = json.loads((out / "clipkit_export.json").read_text())
    assert list(manifest["targets"]) == ["open_clip", "timm"]
    card = (out / "README.md").read_text()
    assert "### open_clip" in card and "### timm" in card
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"] and list(out.parent.iterdir()) == [out]
    mask = os.umask(0o022)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.safetensors")} == {0o666 & ~mask}


def test_changed_model_card_is_kept(model: CLIP, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(model, out, to=["open_clip"])
    mine = (out / "README.md").read_text() + "\nlicense: mit"
    (out / "README.md").write_text(mine)
    for _ in range(2):
        export(model, out, to=["open_clip"])
        assert (out / "README.md").read_text() == mine
        assert (out / "README.new.md").read_text().startswith("---\nlibrary_name: open_clip")


def test_two_models_are_not_mixed(model: CLIP, tmp_path: Path) -> None:
    out, other = tmp_path / "out", create(SHAPE, seed=1)
    export(model, out, to=["open_clip"])
    before = {path: path.read_bytes() for path in out.iterdir()}
    for targets in (["timm"], ["open_clip"], ["open_clip", "timm"], []):
        with pytest.raises(
            ConfigError, match="contains another model for open_clip: use another folder, or remove this one"
        ):
            export(other, out, to=targets)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]
    export(model, out, to=["open_clip"])  # the same model may be exported again


HELD = """
import os, sys, time
from pathlib import Path
from clipkit.__main__ import dispatch
from clipkit.export import write
from clipkit.formats import checkpoint

def held(*arguments, **more):
    print("writing", flush=True)
    sys.stdin.read()
    return original(*arguments, **more)

module, name = (write, "_write_targets") if sys.argv[1] == "export" else (checkpoint, "save_file")
original = getattr(module, name)
setattr(module, name, held)
sys.exit(dispatch(sys.argv[1:]))
"""


@pytest.mark.parametrize(("command", "kill"), [("export", True), ("interpolate", False)])
def test_second_command_is_refused_while_the_first_writes(
    command: str, kill: bool, model: CLIP, tmp_path: Path
) -> None:
    save_model(model, tmp_path / "a")
    save_model(create(SHAPE, seed=1), tmp_path / "b")
    out = tmp_path / "out"
    if command == "export":
        arguments = ["export", str(tmp_path / "a"), str(out), "--to", "open_clip"]
    else:
        arguments = ["interpolate", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", HELD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdin is not None and first.stdout is not None
        while first.stdout.readline() != "writing\n":
            assert first.poll() is None
        with pytest.raises(ConfigError) as refused:
            dispatch(arguments)
        what = "clipkit export" if command == "export" else "process"
        assert re.fullmatch(
            rf"another {what} \(process {first.pid} on \S+\) is writing to {out}: wait for it, or use another "
            "output",
            str(refused.value),
        )
        if kill:
            first.kill()
        first.stdin.close()
        assert first.wait(60) == (-9 if kill else 0)
    if kill:  # the system releases the lock, and the next command removes what the first left
        assert dispatch(arguments) == 0
    assert clipkit.load(out).logit_scale is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_targets_with_equal_file_names_are_rejected(model: CLIP, tmp_path: Path) -> None:
    export(model, tmp_path / "out", to=["timm"])
    with pytest.raises(ConfigError, match="cannot share a folder"):
        export(model, tmp_path / "out", to=["transformers"])
    assert "architecture" in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"format": 1}', '{"targets": {"timm": {"files": 3}}}'])
def test_foreign_folder_is_not_overwritten(manifest: str | None, model: CLIP, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (out / "clipkit_export.json").write_text(manifest)
    before = files(out)
    with pytest.raises(ConfigError, match="not empty and not an earlier export"):
        export(model, out, to=["open_clip"])
    assert files(out) == before and list(tmp_path.iterdir()) == [out]


def test_empty_folder_and_leftovers_of_a_killed_export_are_accepted(model: CLIP, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / ".out.partial" / "out").mkdir(parents=True)
    export(model, out, to=["open_clip"])
    (out / "LICENSE").write_text("mine")
    out.rename(tmp_path / ".out.former")  # killed between the two renames
    export(model, out, to=["timm"])
    assert {"LICENSE", "open_clip_model.safetensors", "model.safetensors"} <= files(out)
    assert list(tmp_path.iterdir()) == [out]


def test_file_in_place_of_the_folder_raises_one_line_error(model: CLIP, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match="not empty and not an earlier export"):
        export(model, tmp_path / "out", to=["open_clip"])
    with pytest.raises(CheckpointError, match="cannot write"):
        export(model, tmp_path / "out" / "inner", to=["open_clip"])
    assert (tmp_path / "out").read_text() == "x"


# --- checks of the export -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "approximate", "told"),
    [
        (1.1e-5, False, ", embeddings differ from clipkit's by at most 1.1e-05; the limit is 1e-05"),
        (
            0.11,
            True,
            ", the cosine similarity of embeddings to clipkit's is at least 0.8900; the limit is 0.9",
        ),
        (math.inf, False, "'s embeddings contain NaN or infinity"),
    ],
)
def test_export_with_other_embeddings_is_rejected(
    largest: float, approximate: bool, told: str, model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(EXPORTS["open_clip"], check=lambda *_: largest, approximate=approximate)
    monkeypatch.setitem(EXPORTS, "open_clip", wrong)
    with pytest.raises(CheckpointError, match=rf"open_clip_torch \S+{told}$"):
        export(model, tmp_path / "out", to=["open_clip"])
    assert list(tmp_path.iterdir()) == []


def test_nonfinite_model_is_rejected(model: CLIP, tmp_path: Path) -> None:
    with torch.no_grad():
        model.text_projection[0, 0] = math.inf
    with pytest.raises(CheckpointError, match="the model's text embeddings contain NaN or infinity"):
        export(model, tmp_path / "out", to=["open_clip"])
    assert list(tmp_path.iterdir()) == []


def test_model_card_contains_no_local_folders(model: CLIP, tmp_path: Path) -> None:
    """Model cards are published."""
    values = (
        ("/home/me/a b/c.tar", "…/c.tar"), ("~/runs/x", "…/x"),
        ("transformers:/home/me/bert", "transformers:…/bert"),
        ("file:///home/me/x.tar", "…/x.tar"), ("pipe:cat /data/a/b.tar", "pipe:cat … b.tar"), ("/data", "…/data"),
        ("s3://bucket/a/{0..9}.tar", ""), ("a photo/drawing", ""), ("a / b", ""), ("../up/x", ""), ("runs/x", ""),
    )  # fmt: skip
    lines = [f'a{number} = "{value}"' for number, (value, _) in enumerate(values)]
    export(model, tmp_path / "out", to=["timm"], source=Source(config="\n".join(lines)))
    card = (tmp_path / "out" / "README.md").read_text()
    for number, (value, expected) in enumerate(values):
        assert f'a{number} = "{expected or value}"\n' in card


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000, "a\0b"])
def test_invalid_folder_raises_one_line_error(name: str, model: CLIP) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        export(model, Path(name), to=["timm"])
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_card_examples_convert_images_to_rgb(model: CLIP, tmp_path: Path) -> None:
    export(model, tmp_path / "out", to=["transformers", "sentence-transformers", "onnx"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count('Image.open("cat.jpg").convert("RGB")') == 2  # clipkit and open_clip do it themselves
    assert card.count("Checked on 8 synthetic images of the model's input size and 8 plain texts: with") == 3


def test_wrong_weights_are_detected(model: CLIP, tmp_path: Path) -> None:
    """Write one wrong value in the image tower."""
    target = EXPORTS["open_clip"]

    def spoiled(model: CLIP, tensors: Any, folder: Path) -> list[str]:
        proj = tensors["visual.proj"].clone()
        proj[0, 0] += 0.01
        return target.write(model, {**tensors, "visual.proj": proj}, folder)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="differ"):
        patch.setitem(EXPORTS, "open_clip", replace(target, write=spoiled))
        export(model, tmp_path / "out", to=["open_clip"])


def test_missing_library_is_reported_as_not_checked(
    model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EXPORTS, "timm", replace(EXPORTS["timm"], package="no_such_package"))
    monkeypatch.setattr(exporting, "load", lambda *_, **__: model)
    assert run_export(ExportOptions(model="x", out=tmp_path / "out", to=("timm",))) == 0
    assert "timm: 2 files; not checked because timm is not installed: pip install -e '.[export]'" in (
        capsys.readouterr().out
    )
    assert "Checked" not in (tmp_path / "out" / "README.md").read_text()


# --- from a run ---------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(model: CLIP, tmp_path: Path) -> Path:
    """A run with scores of two steps; some lines are invalid."""
    run_folder = tmp_path / "my-run"
    optimizer = adamw(model, OptimConfig())
    lines = [
        {**LINE, "step": 5, "value": 0.1},
        {**LINE, "value": 0.2},
        LINE,  # scored again after a resume
        {**LINE, "dataset": "a|b\n# c", "metric": "acc5", "value": 1},
        {**LINE, "dataset": "broken", "value": None},
        {**LINE, "dataset": "broken", "n": True},
    ]
    config = Config(out=str(run_folder))
    folder = save_checkpoint(run_folder, model, optimizer, LoopState(step=7, data="x"), config, keep=1)
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "dataset": "cut sh'
    (run_folder / "results.jsonl").write_text(text)
    return folder


def test_source_has_run_step_configuration_and_scores(checkpoint: Path, tmp_path: Path) -> None:
    source = find_source(clipkit.load(tmp_path / "my-run"))
    assert source == find_source(clipkit.load(checkpoint))
    assert (source.run, source.step) == ("my-run", 7)
    assert source.config == to_toml(Config(out=str(tmp_path / "my-run"))).strip()
    assert [(score.dataset, score.metric, score.value) for score in source.scores] == [
        ("digits", "acc1", 0.5),
        ("a|b\n# c", "acc5", 1),
    ]
    checkpoint.rename(tmp_path / "alone")
    alone = find_source(clipkit.load(tmp_path / "alone"))
    assert (alone.run, alone.step, alone.scores) == ("alone", 7, ())
    assert find_source(create(SHAPE)) == Source()


@pytest.mark.parametrize("damaged", ["state.json", "config.toml", "results.jsonl"])
def test_damaged_files_only_omit_their_content_from_the_source(
    damaged: str, checkpoint: Path, model: CLIP
) -> None:
    run_folder = checkpoint.parent.parent
    loaded = clipkit.load(run_folder)
    path = checkpoint / damaged if (checkpoint / damaged).exists() else run_folder / damaged
    path.write_bytes(b"\xff\x00 [[[" * 100_000)
    source = find_source(loaded)
    assert source.run == "my-run" and not (source.scores and source.config)


def test_export_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my-export"
    assert dispatch(["export", str(tmp_path / "my-run"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"clipkit checkpoint {checkpoint}\n" in printed
    assert "open_clip: 2 files; checked with open_clip_torch " in printed
    assert "transformers: 8 files; checked with transformers " in printed
    assert f"wrote {out}; before publishing it, check README.md and fill in the license\n" in printed
    card = (out / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: open_clip\npipeline_tag: zero-shot-image-classification\ntags:\n- clip\n"
    )
    assert "# license: " in card.split("---")[1]
    assert "the clipkit run `my-run` at step 7." in card
    assert "| digits | zero-shot | acc1 | 50.0% | 48.0–52.5% | 10.00% | 1,797 |" in card
    assert "| a b # c | zero-shot | acc5 | 100.0% |" in card and "broken" not in card
    assert f"```toml\n{to_toml(Config(out='…/my-run')).strip()}\n```" in card
    assert str(tmp_path) not in card
    for target in EXPORTS:  # each target is a valid choice: only the missing model is an error
        with pytest.raises(CheckpointError):
            dispatch(["export", str(tmp_path / "nothing"), str(out), "--to", target])
    with pytest.raises(ConfigError, match="invalid choice: 'tensorflow'"):
        dispatch(["export", "M", str(out), "--to", "tensorflow"])


def test_export_command_reports_omitted_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = create(replace(SHAPE, logit_bias=True), seed=0)
    save_checkpoint(
        tmp_path / "run", odd, adamw(odd, OptimConfig()), LoopState(step=1, data="x"), Config(), keep=1
    )
    assert run_export(ExportOptions(model=str(tmp_path / "run"), out=tmp_path / "out", to=())) == 0
    assert "transformers: not written: transformers' CLIPModel has no logit_bias" in capsys.readouterr().out
    assert clipkit.load(tmp_path / "out").logit_bias is not None


def test_given_scores_are_in_the_card(model: CLIP, tmp_path: Path) -> None:
    score = KnownScore(dataset="birds", task="retrieval", metric="R@1", value=0.25, n=10, low=0.1, high=0.4)
    rank = replace(score, metric="image_to_text_mean_rank", value=3.0, low=1.8, high=4.2)
    knn = replace(score, task="knn", metric="acc1", setting="k=20 plain")
    export(model, tmp_path / "out", to=["timm"], source=Source(scores=(score, rank, knn)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| birds | retrieval | R@1 | 25.0% | 10.0–40.0% |  | 10 |" in card
    assert "| birds | retrieval | image_to_text_mean_rank | 3.0 | 1.8–4.2 |  | 10 |" in card
    assert "| birds | knn k=20 plain | acc1 | 25.0% |" in card
    assert "pipeline_tag" not in card and "## Training" not in card


def test_bag_of_words_is_exported_to_onnx_and_timm_only(tmp_path: Path) -> None:
    bag = create(replace(SHAPE, text=BagOfWords(width=16)), seed=0)
    with pytest.raises(
        ConfigError,
        match=r"width 16\): this model supports --to timm, onnx",
    ):
        export(bag, tmp_path / "out")


def test_incompatible_library_version_raises_one_line_error(
    model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> float:
        raise ImportError("cannot import name 'x'\nfrom 'y'")

    monkeypatch.setitem(EXPORTS, "timm", replace(EXPORTS["timm"], check=gone))
    with pytest.raises(
        CheckpointError, match=r"timm \S+ cannot load the export: ImportError: .* 'x' from 'y'$"
    ):
        export(model, tmp_path / "out", to=["timm"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="not empty"):
        export(model, Path("/"), to=["timm"])


def test_background_and_orientation_are_documented_for_callers(
    model: CLIP, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess = model.preprocess.replace_decoding(background="white", upright=True, pixel_range="0,4095")
    chosen = CLIP(model.architecture, preprocess=preprocess)
    chosen.load_state_dict(model.state_dict())
    save_model(chosen.eval(), tmp_path / "model")
    assert (
        run_export(ExportOptions(model=str(tmp_path / "model"), out=tmp_path / "out", to=("open_clip",))) == 0
    )
    line = (
        "Before resizing, transparent images get the background #ffffff and the EXIF orientation of images is "
        "applied and values from 0 to 4095 of deep images become 0 to 255. "
        "Other libraries do not do this: do it before calling them."
    )
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert line in (tmp_path / "out" / "README.md").read_text()
    # clipkit itself reads them back, with the same model hash
    loaded = clipkit.load(tmp_path / "out")
    assert loaded.preprocess == chosen.preprocess and model_hash(loaded) == model_hash(chosen)
