"""Tests of reading weights: bit-exact tensors from every kind of file."""

import json
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from clipkit.errors import CheckpointError
from clipkit.formats.weights import read_weights

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "zip, protocol 4": {"pickle_protocol": 4},
    "old": {"_use_new_zipfile_serialization": False},
    "old, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


def bits(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether names, order, dtypes, shapes, strides and values are equal."""
    return list(a) == list(b) and all(
        (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()) and bits(x) == bits(y)
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable() and str(path) in message
    return message


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def training(model: nn.Module) -> dict[str, Any]:
    """Contents of open_clip's epoch_N.pt: names prefixed by DDP and torch.compile, a NumPy learning rate."""
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(p)}
        for i, p in enumerate(model.parameters())
    }
    group = {"lr": 0.5 * (1 + np.cos(1.0)), "betas": (0.9, 0.98), "foreach": None, "params": [0, 1, 2, 3]}
    return {
        "epoch": 3,
        "name": "run",
        "state_dict": {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": {"state": state, "param_groups": [group]},
        "scaler": {"scale": 65536.0, "_growth_tracker": 0},
    }


# --- accepted files -----------------------------------------------------------------------------------------


def test_safetensors_are_detected_under_any_file_name(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2, 3).half(), "a": torch.arange(4).bfloat16(), "empty": torch.zeros(0, 2)}
    for name in ("x.safetensors", "x.bin", "x"):
        save_file(tensors, tmp_path / name, metadata={"format": "pt", "long": "x" * 5000})
        found = read_weights(tmp_path / name)
        assert found.notes == {"format": "pt"}
        assert same(dict(sorted(found.tensors.items())), dict(sorted(tensors.items())))


@pytest.mark.parametrize("form", FORMS)
def test_training_checkpoint_loads(
    form: str, training: dict[str, Any], model: nn.Module, tmp_path: Path
) -> None:
    torch.save(training, tmp_path / "epoch_3.pt", **FORMS[form])
    found = read_weights(tmp_path / "epoch_3.pt")
    assert found.notes == {"epoch": 3, "name": "run"}
    assert same(found.tensors, dict(model.state_dict()))


@pytest.mark.parametrize("form", FORMS)
def test_each_dtype_loads_as_with_torch(form: str, tmp_path: Path) -> None:
    stored = {str(dtype): torch.arange(24).to(dtype).view(4, 6)[1:, ::2].t() for dtype in DTYPES}
    torch.save(stored, tmp_path / "all.bin", **FORMS[form])
    found = read_weights(tmp_path / "all.bin").tensors
    assert same(found, stored)
    if form == "zip":  # torch cannot read newer dtypes in its old format
        assert same(found, torch.load(tmp_path / "all.bin", weights_only=True))


def test_parameters_views_and_other_values_load(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    marked = torch.ones(2)
    marked.some_attribute = 3  # type: ignore[attr-defined]
    stored = OrderedDict(
        parameter=nn.Parameter(torch.ones(3)), scalar=torch.tensor(2.5), empty=torch.zeros(0, 3), tied=tied,
        tied_too=tied[2:], repeated=torch.ones(1).expand(5), marked=marked, absent=None, ready=True,
    )  # fmt: skip
    for form in FORMS.values():
        torch.save(stored, tmp_path / "x.pt", **form)
        found = read_weights(tmp_path / "x.pt")
        assert same(found.tensors, {name: t for name, t in stored.items() if isinstance(t, Tensor)})
        assert found.notes == {} and not any(tensor.requires_grad for tensor in found.tensors.values())
        found.tensors["tied"][2] = 9  # memory stays shared, and the file is not modified
        assert found.tensors["tied_too"][0] == 9 and read_weights(tmp_path / "x.pt").tensors["tied"][2] == 2


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    form=st.sampled_from(sorted(FORMS)),
    data=st.data(),
)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_view_round_trips(
    dtype: torch.dtype, shape: list[int], steps: list[int], form: str, data: st.DataObject, tmp_path: Path
) -> None:
    numbers = torch.arange(int(np.prod(shape))).to(dtype).view(shape)
    view = numbers.permute(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(data.draw(st.integers(0, 1)), None, step) for step in steps[: len(shape)])]
    torch.save({"view": view, "whole": numbers}, tmp_path / "x.pt", **FORMS[form])
    assert same(read_weights(tmp_path / "x.pt").tensors, {"view": view, "whole": numbers})


@pytest.mark.parametrize(
    "place", ["state_dict", "model_state_dict", "model", "module", "ema", "state_dict_ema", "params"]
)
def test_nested_state_dict_is_found(place: str, model: nn.Module, tmp_path: Path) -> None:
    others = {
        "step": 7,
        "loss": 0.5,
        "args": Namespace(lr=1.0),
        "best": True,
        "optimizer": {"state": {0: {}}},
    }
    torch.save({**others, place: model.state_dict()}, tmp_path / "x.pth")
    found = read_weights(tmp_path / "x.pth")
    assert same(found.tensors, dict(model.state_dict())) and found.notes == {"step": 7, "loss": 0.5}


def test_trained_weights_take_precedence_over_the_average(tmp_path: Path) -> None:
    torch.save({"ema": {"w": torch.zeros(1)}, "model": {"w": torch.ones(1)}}, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").tensors["w"] == 1


@pytest.mark.parametrize(
    "prefix",
    [
        "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module.", "model.", "clip_model.", "clip.",
        "module.model.", "model.module.", "model._orig_mod.clip.", "module.clip_model.model.",
    ],
)  # fmt: skip
def test_common_prefixes_are_removed(prefix: str, tmp_path: Path) -> None:
    names = ["visual.proj", "module_norm.weight", "a.module.b"]
    torch.save({prefix + name: torch.ones(1) for name in names}, tmp_path / "x.pt")
    assert list(read_weights(tmp_path / "x.pt").tensors) == names


def test_prefixes_of_some_names_are_kept(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1), "head": torch.ones(1)}, tmp_path / "x.pt")
    assert list(read_weights(tmp_path / "x.pt").tensors) == ["module.a", "head"]
    torch.save({"model.a": torch.ones(1), "clip.a": torch.ones(1)}, tmp_path / "x.pt")
    assert list(read_weights(tmp_path / "x.pt").tensors) == ["model.a", "clip.a"]
    torch.save(
        {"visual._orig_mod.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.pt"
    )  # a compiled submodule
    assert list(read_weights(tmp_path / "x.pt").tensors) == ["visual.a", "b"]
    torch.save({"_orig_mod.a": torch.ones(1), "a": torch.ones(1)}, tmp_path / "x.pt")
    assert "with and without" in refused(tmp_path / "x.pt")


def test_too_long_names_are_rejected(tmp_path: Path) -> None:
    torch.save({"module." * 10_000: torch.ones(1)}, tmp_path / "x.pt")
    assert "too long" in refused(tmp_path / "x.pt")


def test_averaged_model_of_torch_loads(model: nn.Module, tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    torch.save(averaged.state_dict(), tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt")
    assert same(found.tensors, dict(model.state_dict())) and found.notes == {"n_averaged": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_optimizer_state_takes_no_memory(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(9)}, "optimizer": torch.zeros(100 << 18)}, tmp_path / "x.pt")
    code = """
import sys
from pathlib import Path
from clipkit.formats.weights import read_weights
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
weights = read_weights(Path(sys.argv[1]))
weights.tensors["w"].sum()
print(resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.pt"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 20 << 20  # the file has 100 MB


# --- several files ------------------------------------------------------------------------------------------


def shards(folder: Path, **changes: str) -> Path:
    """Write two tensors to two files, with an index of which is where."""
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(3), "unused": torch.zeros(1)}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    places = {"a": "one.safetensors", "b": "two.safetensors"} | changes
    index.write_text(json.dumps({"metadata": {"total_size": 20, "half": "\ud800"}, "weight_map": places}))
    return index


def test_safetensors_shards_load(tmp_path: Path) -> None:
    found = read_weights(shards(tmp_path))
    assert found.notes == {"total_size": 20}
    assert same(found.tensors, {"a": torch.ones(2), "b": torch.zeros(3)})


def test_torch_shards_load(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "1.bin"}}))
    assert set(read_weights(tmp_path / "pytorch_model.bin.index.json").tensors) == {"a"}


def test_shards_in_a_download_cache_load(tmp_path: Path) -> None:
    """Files of a snapshot are links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shards(blobs)
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(file.rename(blobs / str(hash(file.name))))
    assert set(read_weights(snapshot / "model.safetensors.index.json").tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "name",
    ["../one.safetensors", "/etc/passwd", "", ".", "..", "sub/x", "sub\\x", "a\0b", "\ud800", "\x1b[2J"],
)
def test_shards_outside_the_folder_are_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"b": torch.ones(1)}, tmp_path / "one.safetensors")
    assert "not a file in the same folder" in refused(shards(tmp_path / "in", b=name))


def test_shards_linked_to_another_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"b": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = shards(tmp_path / "in", b="link.safetensors")
    (tmp_path / "in" / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert "link to another folder" in refused(index)
    (tmp_path / "in" / "link.safetensors").unlink()
    (tmp_path / "in" / "link.safetensors").symlink_to("link.safetensors")  # to itself
    assert "missing" in refused(index)


def test_missing_and_incomplete_shards_are_rejected(tmp_path: Path) -> None:
    assert "'three.safetensors' is missing" in refused(shards(tmp_path, b="three.safetensors"))
    assert "lacks 'b'" in refused(shards(tmp_path, b="one.safetensors"))
    index = shards(tmp_path, b="again.json")
    (tmp_path / "again.json").write_text(json.dumps({"weight_map": {"b": "again.json"}}))  # nested index
    with pytest.raises(CheckpointError, match="not a weights file"):
        read_weights(index)
