"""Tests of checkpoints: bit-exact round trip, choice of the newest complete one, write failures."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clipkit
from clipkit.config import load_config, to_toml
from clipkit.errors import CheckpointError
from clipkit.formats.checkpoint import latest_checkpoint, list_skipped_checkpoints, resolve_checkpoint
from clipkit.model.clip import CLIP, create
from clipkit.training.checkpoint import CheckpointWriter, load_training, planned_steps, save_checkpoint
from clipkit.training.optim import adamw
from tests.clipkit.saved_runs import CONFIG, FILES, Save, bits, damage, same_bits, save, small, state, step

__all__ = ["save", "small"]  # fixtures


def test_loaded_training_continues_bit_for_bit(small: CLIP, tmp_path: Path) -> None:
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


def test_load_needs_only_weights_and_model_json(small: CLIP, save: Save, tmp_path: Path) -> None:
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


def test_files_have_equal_permissions(save: Save) -> None:
    root = save(1)
    modes = {path.stat().st_mode & 0o777 for path in (root / "step_00000001").iterdir()}
    assert modes == {(root / "LATEST").stat().st_mode & 0o777}


def test_model_name_is_stored(tmp_path: Path) -> None:
    model = create("ViT-Ti-4-16", seed=0)
    optimizer = adamw(model, CONFIG.optim)
    before = save_checkpoint(tmp_path, model, optimizer, state(0), CONFIG, keep=0)
    assert clipkit.load(tmp_path).name == "ViT-Ti-4-16"
    assert load_training(before, model, optimizer) == state(0)  # no update has been made
    after = save_checkpoint(tmp_path, model, optimizer, state(1), CONFIG, keep=0)
    with pytest.raises(CheckpointError, match="the optimizer's state is for other parameters"):
        load_training(after, model, optimizer)


def test_load_accepts_run_checkpoints_folder_and_single_checkpoint(
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


def test_newest_checkpoints_are_kept(save: Save) -> None:
    root = save(1, 2, 3, 4, keep=2)
    assert {path.name for path in root.iterdir()} == {"LATEST", "step_00000003", "step_00000004"}
    save(5, keep=0)
    save(6, keep=0)
    assert len(list(root.glob("step_*"))) == 4
    save(7, keep=1)
    assert {path.name for path in root.iterdir()} == {"LATEST", "step_00000007"}


def test_checkpoint_just_written_is_kept_after_going_back(save: Save) -> None:
    root = save(10, 20, 30)
    (root / "LATEST").write_text("step_00000010\n")
    for keep in (2, 1):
        save(15, keep=keep)
        assert latest_checkpoint(root.parent) == root / "step_00000015"
        assert len(list(root.glob("step_*"))) == keep


def test_step_can_be_saved_again(save: Save, small: CLIP) -> None:
    root = save(1, 1)
    assert same_bits(bits(clipkit.load(root)), bits(small))


def test_partial_checkpoint_of_a_killed_process_is_removed(save: Save) -> None:
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
def test_invalid_pointer_falls_back_to_the_newest_complete_checkpoint(
    save: Save, pointer: bytes | None
) -> None:
    root = save(1, 2)
    if pointer is None:
        (root / "LATEST").unlink()
    else:
        (root / "LATEST").write_bytes(pointer)
    assert latest_checkpoint(root.parent) == root / "step_00000002"


def test_pointer_outside_the_run_is_not_followed(save: Save, tmp_path: Path) -> None:
    root = save(1)
    for elsewhere in (tmp_path / "elsewhere", root / "within" / "deeper"):
        shutil.copytree(root / "step_00000001", elsewhere)
        for pointer in (str(elsewhere), os.path.relpath(elsewhere, root)):
            (root / "LATEST").write_text(pointer)
            assert latest_checkpoint(tmp_path) == root / "step_00000001"


def test_valid_pointer_takes_precedence_over_a_newer_checkpoint(save: Save) -> None:
    root = save(1, 2)
    (root / "LATEST").write_text("step_00000001\n")
    assert latest_checkpoint(root.parent) == root / "step_00000001"
    assert latest_checkpoint(root.parent / "nothing") is None


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "longer"])
def test_incomplete_checkpoint_is_passed_over(save: Save, name: str, how: str) -> None:
    root = save(1, 2)
    damage(root / "step_00000002" / name, how)
    want = (
        2 if (name, how) == ("COMPLETE", "longer") else 1
    )  # a trailing newline does not damage the list of sizes
    assert latest_checkpoint(root.parent) == root / f"step_0000000{want}"
    assert list_skipped_checkpoints(root / f"step_0000000{want}") == ["step_00000002"] * (want == 1)
    if want == 1:
        shutil.rmtree(root / "step_00000001")
        for find in (latest_checkpoint, resolve_checkpoint):
            with pytest.raises(
                CheckpointError, match="from step_00000002 on, are incomplete or damaged: restore them"
            ):
                find(root.parent)


@pytest.mark.parametrize("name", sorted(FILES - {"COMPLETE"}))
def test_checkpoint_with_wrong_checksum_is_passed_over(save: Save, small: CLIP, name: str) -> None:
    root = save(1)
    want = copy.deepcopy(bits(small))
    save(2)
    second = root / "step_00000002"
    overwrite(second / name)
    assert latest_checkpoint(root.parent) == root / "step_00000001"
    assert list_skipped_checkpoints(root / "step_00000001") == ["step_00000002"]
    is_of_model = name.startswith("model")
    assert same_bits(bits(clipkit.load(root)), want if is_of_model else bits(small))
    if name == "model.safetensors":
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors is damaged, its checksum is wrong: use another"
        ):
            clipkit.load(second)
        (second / "COMPLETE").unlink()
        assert not same_bits(bits(clipkit.load(second)), bits(small))

    writer = CheckpointWriter(root.parent, to_toml(CONFIG), keep=2, newest=root / "step_00000001")
    writer.save_now(small, adamw(small, CONFIG.optim), state(3))
    writer.close()  # the damaged one does not count as one of the two kept
    assert {path.name for path in root.glob("step_*")} == {f"step_0000000{number}" for number in (1, 2, 3)}


def overwrite(path: Path) -> None:
    """Change two bytes, as a failing disk may do."""
    content = bytearray(path.read_bytes())
    middle = len(content) * 3 // 4
    content[middle : middle + 2] = bytes(byte ^ 0x40 for byte in content[middle : middle + 2])
    path.write_bytes(content)


def test_checkpoints_of_earlier_versions_list_only_sizes(save: Save, small: CLIP) -> None:
    root = save(1, 2)
    for folder in root.glob("step_*"):
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "COMPLETE"}
        (folder / "COMPLETE").write_text(json.dumps(sizes))
    assert latest_checkpoint(root.parent) == root / "step_00000002"
    assert same_bits(bits(clipkit.load(root)), bits(small))
    assert load_training(root / "step_00000002", small, adamw(small, CONFIG.optim)) == state(2)
    damage(root / "step_00000002" / "model.safetensors", "truncated")
    assert latest_checkpoint(root.parent) == root / "step_00000001"


def test_unreadable_planned_steps_fall_back_to_the_default(save: Save) -> None:
    folder = save(1) / "step_00000001"
    assert planned_steps(folder, otherwise=7) == CONFIG.steps != 7
    (folder / "config.toml").write_bytes(b"\xff = =")
    assert planned_steps(folder, otherwise=7) == 7


def test_run_without_its_checkpoints_is_not_a_new_run(save: Save, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    root = save(1, 2)
    (root / "step_00000002").rename(tmp_path / "elsewhere")
    assert latest_checkpoint(tmp_path) == root / "step_00000001"
    assert list_skipped_checkpoints(root / "step_00000001") == ["step_00000002"]  # LATEST still names it
    shutil.rmtree(root)
    for empty in (False, True):  # as when a disk is not mounted
        if empty:
            root.mkdir()
        with pytest.raises(CheckpointError, match=r"its checkpoints in .* are missing: restore them"):
            latest_checkpoint(tmp_path)
    save(3)
    assert latest_checkpoint(tmp_path) == root / "step_00000003"


def test_unreadable_checkpoints_raise_an_error(save: Save, tmp_path: Path) -> None:
    root = save(1)
    (root / "LATEST").unlink()
    (root / "LATEST").symlink_to("LATEST")  # unreadable for every user, including root
    with pytest.raises(CheckpointError, match=r"cannot read .*LATEST: Too many levels"):
        latest_checkpoint(tmp_path)
    (tmp_path / "other").mkdir()
    for wrong in (lambda path: path.symlink_to(path.name), Path.touch):
        checkpoints = tmp_path / "other" / "checkpoints"
        wrong(checkpoints)
        with pytest.raises(CheckpointError, match=r"cannot read .*checkpoints"):
            latest_checkpoint(checkpoints.parent)
        checkpoints.unlink()


def test_steps_are_ordered_numerically(tmp_path: Path, small: CLIP, save: Save) -> None:
    root = save(99_999_999, 100_000_000)
    (root / "LATEST").unlink()
    assert latest_checkpoint(tmp_path) == root / "step_100000000"


@pytest.mark.parametrize("content", ["{}", "[]", '{"model.safetensors": 1}', '{"model.json": null}'])
def test_incomplete_list_of_sizes_makes_a_checkpoint_incomplete(save: Save, content: str) -> None:
    root = save(1, 2)
    (root / "step_00000002" / "COMPLETE").write_text(content)
    assert latest_checkpoint(root.parent) == root / "step_00000001"


def test_tensors_are_stored_under_open_clip_names(save: Save, small: CLIP) -> None:
    from safetensors.torch import load_file

    stored = load_file(save(1) / "step_00000001" / "model.safetensors")
    assert stored.keys() == {name for name, _ in small.named_parameters()}
    assert torch.equal(stored["logit_scale"], small.logit_scale)


LIMITED = """
import resource, sys
from pathlib import Path
import clipkit
from clipkit.formats.checkpoint import latest_checkpoint
from clipkit.training.checkpoint import save_checkpoint
from clipkit.config import Config, OptimConfig
from clipkit.errors import CheckpointError
from clipkit.training.optim import adamw
from clipkit.training.checkpoint import load_training
from clipkit.training.checkpoint import LoopState
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


def test_failed_write_keeps_the_previous_checkpoint(save: Save, small: CLIP) -> None:
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


def test_unwritable_folder_raises_one_line_error(small: CLIP, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    optimizer = adamw(small, CONFIG.optim)
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
        save_checkpoint(tmp_path, small, optimizer, state(1), CONFIG, keep=1)
