"""A checkpoint gives back every bit, no damage is read as weights, and no file of one is ever run."""

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clipkit
from clipkit.checkpoint import (
    LoopState,
    latest_checkpoint,
    load_model,
    load_training,
    passed_over,
    resolve_checkpoint,
    save_checkpoint,
)
from clipkit.config import Config
from clipkit.config_file import load_config
from clipkit.errors import CheckpointError
from clipkit.loss import clip_loss
from clipkit.model import CLIP, create
from clipkit.optim import adamw
from clipkit.preprocess import Preprocess

CONFIG = Config(out="runs/test")
NO_COUNTS: tuple[Any, ...] = ("4", -3, None, True, [], math.nan, math.inf, 10**400)
FILES = {"model.safetensors", "model.json", "optimizer.safetensors", "state.json", "config.toml", "COMPLETE"}


@pytest.fixture
def small(tiny: CLIP) -> CLIP:
    """The tiny model with a vocabulary of 100: files of half a megabyte."""
    shape = replace(tiny.architecture, text=replace(tiny.architecture.own_towers()[1], vocab_size=100))
    preprocess = Preprocess(image_size=32, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return CLIP(shape, preprocess=preprocess).initialize()


def step(model: CLIP, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One update, which the number determines."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(1, 99, (4, 9), generator=generator)
    tokens[:, 8] = 99
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(clip_loss(*model(images, tokens)))
    optimizer.step()


def state(number: int) -> LoopState:
    return LoopState(step=number, data="fingerprint", seconds=12.5, bad_samples=3)


def bits(model: CLIP, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(model.state_dict())
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            tensors.update({f"{name}/{key}": value for key, value in optimizer.state[parameter].items()})
    return tensors


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


Save = Callable[..., Path]


@pytest.fixture
def save(small: CLIP, tmp_path: Path) -> Save:
    optimizer = adamw(small, CONFIG.optim)

    def write(*numbers: int, keep: int = 0) -> Path:
        for number in numbers:
            step(small, optimizer, number)
            save_checkpoint(tmp_path, small, optimizer, state(number), CONFIG, keep=keep)
        return tmp_path / "checkpoints"

    return write


def test_what_is_loaded_goes_on_bit_for_bit(small: CLIP, tmp_path: Path) -> None:
    optimizer = adamw(small, CONFIG.optim)
    for number in range(3):
        step(small, optimizer, number)
    folder = save_checkpoint(tmp_path, small, optimizer, state(3), CONFIG, keep=3)
    assert folder == tmp_path / "checkpoints" / "step_00000003"
    assert {path.name for path in folder.iterdir()} == FILES
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_00000003\n"

    torch.manual_seed(99)
    other = CLIP(small.architecture, preprocess=small.preprocess).initialize()
    its_optimizer = adamw(other, CONFIG.optim)
    assert load_training(folder, other, its_optimizer) == state(3)
    assert same_bits(bits(small, optimizer), bits(other, its_optimizer))
    for number in range(3, 6):
        step(small, optimizer, number)
        step(other, its_optimizer, number)
    assert same_bits(bits(small, optimizer), bits(other, its_optimizer))
    assert load_config(folder / "config.toml") == CONFIG


def test_a_model_needs_only_its_weights_and_card(small: CLIP, save: Save, tmp_path: Path) -> None:
    folder = save(1) / "step_00000001"
    alone = tmp_path / "elsewhere" / "any name"
    alone.mkdir(parents=True)
    for name in ("model.safetensors", "model.json"):
        shutil.copy(folder / name, alone)
    model = clipkit.load(alone)
    assert same_bits(bits(model), bits(small))
    assert not model.training
    assert model.preprocess == small.preprocess
    assert (model.architecture, model.name) == (small.architecture, "")
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(model.encode_image(images), small.encode_image(images))


def test_others_may_read_what_others_may_read(save: Save) -> None:
    root = save(1)
    modes = {path.stat().st_mode & 0o777 for path in (root / "step_00000001").iterdir()}
    assert modes == {(root / "LATEST").stat().st_mode & 0o777}


def test_a_named_model_keeps_its_name(tmp_path: Path) -> None:
    model = create("ViT-Ti-4-16", seed=0)
    optimizer = adamw(model, CONFIG.optim)
    save_checkpoint(tmp_path, model, optimizer, state(0), CONFIG, keep=1)
    assert clipkit.load(tmp_path).name == "ViT-Ti-4-16"
    with pytest.raises(CheckpointError, match="the optimizer's state is for other parameters"):
        load_training(tmp_path / "checkpoints" / "step_00000000", model, optimizer)


def test_a_run_its_checkpoints_and_one_of_them_can_be_loaded(
    save: Save, small: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save(1, 2)
    for source in (root.parent, root, root / "step_00000002", str(root), f"{root}/"):
        assert same_bits(bits(clipkit.load(source)), bits(small))
    assert not same_bits(bits(clipkit.load(root / "step_00000001")), bits(small))
    monkeypatch.setenv("HOME", str(root.parents[1]))
    assert same_bits(bits(clipkit.load(f"~/{root.parent.name}")), bits(small))
    monkeypatch.chdir(root.parent)
    assert same_bits(bits(clipkit.load(".")), bits(small))
    assert same_bits(bits(clipkit.load(root / "step_00000002" / "model.safetensors")), bits(small))
    for source in ("nothing", root / "LATEST", root.parent.parent):
        with pytest.raises(CheckpointError):
            clipkit.load(source)


def test_the_newest_ones_stay(save: Save) -> None:
    root = save(1, 2, 3, 4, keep=2)
    assert {path.name for path in root.iterdir()} == {"LATEST", "step_00000003", "step_00000004"}
    save(5, keep=0)
    save(6, keep=0)
    assert len(list(root.glob("step_*"))) == 4
    save(7, keep=1)
    assert {path.name for path in root.iterdir()} == {"LATEST", "step_00000007"}


def test_the_one_just_written_stays_after_going_back(save: Save) -> None:
    root = save(10, 20, 30)
    (root / "LATEST").write_text("step_00000010\n")
    for keep in (2, 1):
        save(15, keep=keep)
        assert latest_checkpoint(root.parent) == root / "step_00000015"
        assert len(list(root.glob("step_*"))) == keep


def test_a_step_can_be_saved_again(save: Save, small: CLIP) -> None:
    root = save(1, 1)
    assert same_bits(bits(clipkit.load(root)), bits(small))


def test_what_a_killed_process_left_is_removed(save: Save) -> None:
    root = save(1)
    left = root / ".step_00000002.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(root.parent) == root / "step_00000001"
    save(3)
    assert not left.exists()


@pytest.mark.parametrize(
    "pointer",
    [
        None, b"", b"\n", b"step_00000009\n", b"step_00000001.partial", b"../elsewhere", b"/", b"..", b".",
        b"\xff\xfe\x00", b"\x00" * 40, b"a" * 5000, b"step_00000002/model.json",
    ],
)  # fmt: skip
def test_without_a_good_pointer_the_newest_whole_one_counts(save: Save, pointer: bytes | None) -> None:
    root = save(1, 2)
    if pointer is None:
        (root / "LATEST").unlink()
    else:
        (root / "LATEST").write_bytes(pointer)
    assert latest_checkpoint(root.parent) == root / "step_00000002"


def test_a_pointer_out_of_the_run_is_not_followed(save: Save, tmp_path: Path) -> None:
    root = save(1)
    for elsewhere in (tmp_path / "elsewhere", root / "within" / "deeper"):
        shutil.copytree(root / "step_00000001", elsewhere)
        for pointer in (str(elsewhere), os.path.relpath(elsewhere, root)):
            (root / "LATEST").write_text(pointer)
            assert latest_checkpoint(tmp_path) == root / "step_00000001"


def test_a_good_pointer_counts_though_there_is_a_newer_one(save: Save) -> None:
    root = save(1, 2)
    (root / "LATEST").write_text("step_00000001\n")
    assert latest_checkpoint(root.parent) == root / "step_00000001"
    assert latest_checkpoint(root.parent / "nothing") is None


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "longer"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(save: Save, name: str, how: str) -> None:
    root = save(1, 2)
    damage(root / "step_00000002" / name, how)
    want = (
        2 if (name, how) == ("COMPLETE", "longer") else 1
    )  # a line break more is no harm to a list of sizes
    assert latest_checkpoint(root.parent) == root / f"step_0000000{want}"
    assert passed_over(root / f"step_0000000{want}") == ["step_00000002"] * (want == 1)
    if want == 1:
        shutil.rmtree(root / "step_00000001")
        for find in (latest_checkpoint, resolve_checkpoint):
            with pytest.raises(
                CheckpointError, match="is whole, step_00000002 and all others: bring them back"
            ):
                find(root.parent)


def test_a_run_that_has_lost_all_its_checkpoints_is_not_a_new_one(save: Save, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    root = save(1, 2)
    (root / "step_00000002").rename(tmp_path / "elsewhere")
    assert latest_checkpoint(tmp_path) == root / "step_00000001"
    assert passed_over(root / "step_00000001") == ["step_00000002"]  # LATEST still names it
    shutil.rmtree(root)
    for empty in (False, True):  # as where a disk is not mounted
        if empty:
            root.mkdir()
        with pytest.raises(CheckpointError, match=r"its checkpoints are not in .* any more: bring them back"):
            latest_checkpoint(tmp_path)
    save(3)
    assert latest_checkpoint(tmp_path) == root / "step_00000003"


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(save: Save, tmp_path: Path) -> None:
    root = save(1)
    (root / "LATEST").unlink()
    (root / "LATEST").symlink_to("LATEST")  # which nobody can read, not even root
    with pytest.raises(CheckpointError, match="LATEST cannot be read: Too many levels"):
        latest_checkpoint(tmp_path)
    (tmp_path / "other").mkdir()
    for wrong in (lambda path: path.symlink_to(path.name), Path.touch):
        checkpoints = tmp_path / "other" / "checkpoints"
        wrong(checkpoints)
        with pytest.raises(CheckpointError, match=r"checkpoints.* cannot be read"):
            latest_checkpoint(checkpoints.parent)
        checkpoints.unlink()


def test_steps_are_in_the_order_of_numbers(tmp_path: Path, small: CLIP, save: Save) -> None:
    root = save(99_999_999, 100_000_000)
    (root / "LATEST").unlink()
    assert latest_checkpoint(tmp_path) == root / "step_100000000"


@pytest.mark.parametrize("content", ["{}", "[]", '{"model.safetensors": 1}', '{"model.json": null}'])
def test_a_list_of_sizes_that_leaves_files_out_makes_nothing_whole(save: Save, content: str) -> None:
    root = save(1, 2)
    (root / "step_00000002" / "COMPLETE").write_text(content)
    assert latest_checkpoint(root.parent) == root / "step_00000001"


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "empty": b"", "longer": content + b"\n"}[how]
        )


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "noise", "a folder"])
def test_a_damaged_file_is_one_clear_error(save: Save, small: CLIP, name: str, how: str) -> None:
    folder = save(1) / "step_00000001"
    path = folder / name
    if how in ("missing", "truncated", "empty"):
        damage(path, how)
    elif how == "noise":
        path.write_bytes(os.urandom(path.stat().st_size))
    else:
        path.unlink()
        path.mkdir()
    if name.startswith("model"):
        with pytest.raises(CheckpointError) as caught:
            load_model(folder)
        assert str(folder) in str(caught.value)
    if name != "model.json":
        with pytest.raises(CheckpointError) as caught:
            load_training(folder, small, adamw(small, CONFIG.optim))
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[]", b"5", b"null", b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 10_000]
)
@pytest.mark.parametrize("name", ["model.json", "state.json"])
def test_json_that_is_no_object_is_one_clear_error(
    save: Save, small: CLIP, name: str, content: bytes
) -> None:
    folder = save(1) / "step_00000001"
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        load_model(folder) if name == "model.json" else load_training(
            folder, small, adamw(small, CONFIG.optim)
        )


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card.update(format=2), "another format"),
        (lambda card: card.update(tokenizer="other"), "tokenizer 'other' is unknown"),
        (lambda card: card.pop("tokenizer"), "tokenizer 'none' is unknown"),
        (lambda card: card.pop("architecture"), "the stored architecture"),
        (lambda card: card.update(architecture=None), "the stored architecture"),
        (lambda card: card.update(preprocess=None), "the stored preprocessing"),
        (lambda card: card["preprocess"].update(image_size=64), "image sizes of architecture and preprocess"),
        (lambda card: card["architecture"]["text"].update(layers=3), "12 missing (transformer.resblocks.2.* ×12"),
        (lambda card: card["architecture"]["text"].update(layers=1), "12 unexpected (transformer.resblocks.1.* "),
        (lambda card: card["architecture"].update(embed_dim=49), "2 of another shape (text_projection"),
        (lambda card: card["architecture"]["text"].update(vocab_size=10**6), "of another shape (token_embedding"),
        (lambda card: card["architecture"]["vision"].update(width=10**6), "of another shape"),
        (lambda card: card["architecture"]["vision"].update(layers=10**6), "the stored architecture"),
    ],
)  # fmt: skip
def test_a_card_that_does_not_fit_is_refused(
    save: Save, change: Callable[[Any], object], message: str
) -> None:
    """Before memory is taken: a width of a million would have terabytes."""
    folder = save(1) / "step_00000001"
    rewrite(folder / "model.json", change)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(format=2),
        lambda s: s.pop("step"),
        lambda s: s.update(more=1),
        lambda s: s.pop("format"),
        *(
            lambda s, name=name, value=value: s.update({name: value})
            for name in ("step", "bad_samples", "seconds")
            for value in NO_COUNTS
        ),
        lambda s: s.update(step=4.5),
        lambda s: s.update(step=1e3),
        lambda s: s.update(step=1.0),
        lambda s: s.update(step=2),
        lambda s: s.update(data=5),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    save: Save, small: CLIP, change: Callable[[Any], object]
) -> None:
    folder = save(1) / "step_00000001"
    rewrite(folder / "state.json", change)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_training(folder, small, adamw(small, CONFIG.optim))


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("optimizer", "visual.proj/exp_avg", lambda value: value[:1]),
        ("optimizer", "visual.proj/exp_avg", lambda value: value.int()),
        ("optimizer", "visual.proj/exp_avg_sq", lambda value: value.double()),
        ("optimizer", "visual.proj/exp_avg_sq", None),
        ("optimizer", "visual.proj/step", None),
        ("optimizer", "visual.proj/step", lambda value: value.expand(2)),
        ("optimizer", "visual.proj/step", lambda value: value.long()),
        ("model", "visual.proj", lambda value: value.int()),
        ("model", "visual.proj", lambda value: value.half()),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    save: Save, small: CLIP, name: str, key: str, change: Callable[[Tensor], Tensor] | None
) -> None:
    """One that would be broadcast or converted too: the run would go on as another."""
    from safetensors.torch import load_file, save_file

    path = save(1) / "step_00000001" / f"{name}.safetensors"
    tensors = load_file(path)
    value = tensors.pop(key)
    if change is not None:
        tensors[key] = change(value).contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=key.replace("/", ".*")):
        load_training(path.parent, small, adamw(small, CONFIG.optim))
    if name == "model" and not tensors[key].is_floating_point():
        with pytest.raises(CheckpointError, match=r"visual\.proj is torch\.int32, not torch\.float32"):
            load_model(path.parent)


class Opener:
    """What a malicious pickle does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_pickle_in_place_of_weights_is_refused_and_not_run(
    save: Save, small: CLIP, tmp_path: Path, name: str, kind: str
) -> None:
    folder, trace = save(1) / "step_00000001", tmp_path / "it ran"
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps({"logit_scale": Opener(trace)}))
    else:
        torch.save({"logit_scale": Opener(trace)}, folder / name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_training(folder, small, adamw(small, CONFIG.optim))
    if name.startswith("model"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            clipkit.load(folder)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Opener(trace)))
    assert trace.exists()  # it would have


def test_the_temperature_and_all_else_are_stored_under_open_clips_names(save: Save, small: CLIP) -> None:
    from safetensors.torch import load_file

    stored = load_file(save(1) / "step_00000001" / "model.safetensors")
    assert stored.keys() == {name for name, _ in small.named_parameters()}
    assert torch.equal(stored["logit_scale"], small.logit_scale)


LIMITED = """
import resource, sys
from pathlib import Path
import clipkit
from clipkit.checkpoint import *
from clipkit.config import Config, OptimConfig
from clipkit.errors import CheckpointError
from clipkit.optim import adamw
run = Path(sys.argv[1])
model = clipkit.load(run)
optimizer = adamw(model, OptimConfig())
state = load_training(latest_checkpoint(run), model, optimizer)
for size in (0, 100_000, 600_000):  # bytes of a file, beyond which writing fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        save_checkpoint(run, model, optimizer, LoopState(step=2, data=state.data), Config(), keep=1)
    except CheckpointError as error:
        print(error)
"""


def test_where_a_file_cannot_be_written_the_former_checkpoint_stays(save: Save, small: CLIP) -> None:
    root = save(1)
    assert (root / "step_00000001" / "optimizer.safetensors").stat().st_size > 600_000
    want = copy.deepcopy(bits(small))
    command = [sys.executable, "-c", LIMITED, str(root.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("the checkpoint of step 2 was not written: ") == 3
    assert {path.name for path in root.iterdir()} == {"LATEST", "step_00000001"}
    assert latest_checkpoint(root.parent) == root / "step_00000001"
    assert same_bits(bits(clipkit.load(root)), want)


def test_a_folder_that_cannot_be_made_is_one_clear_error(small: CLIP, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    optimizer = adamw(small, CONFIG.optim)
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
        save_checkpoint(tmp_path, small, optimizer, state(1), CONFIG, keep=1)
