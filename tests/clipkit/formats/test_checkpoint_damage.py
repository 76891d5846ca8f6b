"""Tests of damaged checkpoints: each raises one clear error, and no content is executed."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError
from clipkit.formats.load import load_checkpoint
from clipkit.model.clip import CLIP
from clipkit.training.checkpoint import load_training
from clipkit.training.optim import adamw
from tests.clipkit.saved_runs import CONFIG, NO_COUNTS, Save, damage, save, small

__all__ = ["save", "small"]  # fixtures


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "noise", "a folder"])
def test_damaged_file_raises_one_clear_error(save: Save, small: CLIP, name: str, how: str) -> None:
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
            load_checkpoint(folder)
        assert str(folder) in str(caught.value)
    if name != "model.json":
        with pytest.raises(CheckpointError) as caught:
            load_training(folder, small, adamw(small, CONFIG.optim))
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[]", b"5", b"null", b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 10_000]
)
@pytest.mark.parametrize("name", ["model.json", "state.json"])
def test_json_other_than_an_object_raises_an_error(
    save: Save, small: CLIP, name: str, content: bytes
) -> None:
    folder = save(1) / "step_00000001"
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder) if name == "model.json" else load_training(
            folder, small, adamw(small, CONFIG.optim)
        )


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card.update(format=2), "cannot read the format"),
        (lambda card: card.update(tokenizer="other"), "tokenizer 'other' is unknown"),
        (lambda card: card.pop("tokenizer"), "tokenizer 'none' is unknown"),
        (lambda card: card.pop("architecture"), "the stored architecture"),
        (lambda card: card.update(architecture=None), "the stored architecture"),
        (lambda card: card.update(preprocess=None), "the stored preprocessing"),
        (lambda card: card["preprocess"].update(image_size=64), "image sizes of architecture and preprocess"),
        (lambda card: card["architecture"]["text"].update(layers=3), "12 missing (transformer.resblocks.2.* ×12"),
        (lambda card: card["architecture"]["text"].update(layers=1), "12 unexpected (transformer.resblocks.1.* "),
        (lambda card: card["architecture"].update(embed_dim=49), "2 with another shape (text_projection"),
        (lambda card: card["architecture"]["text"].update(vocab_size=10**6), "with another shape (token_embedding"),
        (lambda card: card["architecture"]["vision"].update(width=10**6), "with another shape"),
        (lambda card: card["architecture"]["vision"].update(layers=10**6), "the stored architecture"),
    ],
)  # fmt: skip
def test_invalid_model_json_is_rejected(save: Save, change: Callable[[Any], object], message: str) -> None:
    """Rejected before memory is allocated: a width of a million would need terabytes."""
    folder = save(1) / "step_00000001"
    rewrite(folder / "model.json", change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
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
def test_invalid_state_json_is_rejected(save: Save, small: CLIP, change: Callable[[Any], object]) -> None:
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
def test_invalid_tensor_is_rejected(
    save: Save, small: CLIP, name: str, key: str, change: Callable[[Tensor], Tensor] | None
) -> None:
    """Including tensors that could be broadcast or converted, which would change the resumed run."""
    from safetensors.torch import load_file, save_file

    path = save(1) / "step_00000001" / f"{name}.safetensors"
    tensors = load_file(path)
    value = tensors.pop(key)
    if change is not None:
        tensors[key] = change(value).contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=key.replace("/", ".*")):
        load_training(path.parent, small, adamw(small, CONFIG.optim))
    (path.parent / "COMPLETE").unlink()  # otherwise the checksum fails first
    if name == "model" and not tensors[key].is_floating_point():
        with pytest.raises(CheckpointError, match=r"visual\.proj is torch\.int32, not torch\.float32"):
            load_checkpoint(path.parent)


class Opener:
    """A malicious pickle, which runs code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_pickle_in_place_of_weights_is_rejected_and_not_run(
    save: Save, small: CLIP, tmp_path: Path, name: str, kind: str
) -> None:
    folder, trace = save(1) / "step_00000001", tmp_path / "it ran"
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps({"logit_scale": Opener(trace)}))
    else:
        torch.save({"logit_scale": Opener(trace)}, folder / name)
    with pytest.raises(CheckpointError, match=r"cannot (be )?read"):
        load_training(folder, small, adamw(small, CONFIG.optim))
    if name.startswith("model"):
        with pytest.raises(CheckpointError, match=r"cannot (be )?read"):
            clipkit.load(folder)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Opener(trace)))
    assert trace.exists()  # an ordinary pickle load runs it
