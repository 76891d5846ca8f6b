"""Tests of files that are not weights: one-line errors, no code run, damage detected."""

import json
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

from clipkit.errors import CheckpointError
from clipkit.formats.weights import StoredWeights, read_weights

FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "zip, protocol 4": {"pickle_protocol": 4},
    "old": {"_use_new_zipfile_serialization": False},
    "old, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable() and str(path) in message
    return message


DAMAGED = "truncated or damaged"
OTHERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", DAMAGED),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
    "page": (b"\n<!DOCTYPE html><html>Sign in</html>", "web page"),
    "config": (b'{"model_type": "clip"}', "JSON, not weights"),
    "list": (b"[1, 2]", "does not contain a JSON object"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "not quite JSON": (b'{"weight_map": {"a": ', "is not JSON"),
    "large number": (b'{"a": ' + b"9" * 5000, "is not JSON"),
    "text": (b"weights", "not a weights file"),
    "zeros": (bytes(100), "not a weights file"),
    "short.safetensors": (b"\x10\x00", DAMAGED),
    "header.safetensors": (b"\x10\x00\x00\x00\x00\x00\x00\x00{", DAMAGED),
    "no tensors": (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "contains no tensors"),
    "zip": (b"PK\x05\x06" + bytes(18), "without PyTorch weights"),
    "cut zip": (b"PK\x03\x04" + bytes(18), DAMAGED),
    "cut pickle": (b"\x80\x02", DAMAGED),
}


@pytest.mark.parametrize("what", OTHERS)
def test_files_of_other_kinds_are_rejected(what: str, tmp_path: Path) -> None:
    content, reason = OTHERS[what]
    (tmp_path / what).write_bytes(content)
    assert reason in refused(tmp_path / what)


def test_paths_other_than_files_are_rejected(tmp_path: Path) -> None:
    assert "folder" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "missing.pt")
    assert "no such file" in refused(Path("/dev/zero"))


def test_archives_of_other_kinds_are_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    assert "without PyTorch weights" in refused(tmp_path / "x.npz")
    with tarfile.open(tmp_path / "x.pt", "w") as tar:
        tar.add(tmp_path / "x.npz", "storages")
    assert "not a weights file" in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"epoch": 3}, "only: 'epoch'"),
        ({}, "only: nothing"),
        ({"optimizer": {"state": {0: torch.ones(1)}}}, "only: 'optimizer'"),
        ([torch.ones(1)], "no state dict"),
        (torch.ones(1), "no state dict"),
        (
            {"model": {"w": torch.ones(2).to_sparse(), "v": torch.ones(1)}},
            "names 'torch._utils._rebuild_sparse",
        ),
        ({"w": torch.ones(1, dtype=torch.complex64).conj()}, "conjugated or negated lazily"),
        (nn.Linear(2, 3), "names 'torch.nn.modules.linear.Linear'"),
        ({"w": torch.ones(1), "args": Path.home}, "getattr'"),
        ({"w": torch.ones(1), "array": np.ones(3)}, "multiarray._reconstruct'"),
        ({"w": torch.ones(1), "array": np.array([{}])}, "multiarray._reconstruct'"),
    ],
)
def test_torch_files_without_weights_are_rejected(
    value: object, reason: str, form: str, tmp_path: Path
) -> None:
    torch.save(value, tmp_path / "x.pt", **FORMS[form])
    assert reason in refused(tmp_path / "x.pt")


class Attack:
    """Creates a file when its pickle is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, (str(self.file), "w")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_attack_works_with_pickle_loads(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Attack(tmp_path / "ran"))).close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("hidden", [False, True])
def test_bare_pickle_is_not_run(protocol: int, hidden: bool, tmp_path: Path) -> None:
    attack = Attack(tmp_path / "ran")
    value = {"state_dict": {"w": torch.ones(1), "x": attack}} if hidden else attack
    (tmp_path / "x.pt").write_bytes(pickle.dumps(value, protocol))
    message = refused(tmp_path / "x.pt")
    if protocol >= 2:
        assert "open'" in message or "torch." in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["beside", "in", "as a name", "instead"])
def test_pickle_in_a_checkpoint_is_not_run(form: str, place: str, tmp_path: Path) -> None:
    attack = Attack(tmp_path / "ran")
    value: Any = {
        "beside": {"state_dict": {"w": torch.ones(1)}, "optimizer": attack},
        "in": {"state_dict": {"w": torch.ones(1), "x": attack}},
        "as a name": {"w": torch.ones(1), (1, attack): 1},
        "instead": attack,
    }[place]
    torch.save(value, tmp_path / "x.pt", **FORMS[form])
    assert "open'" in refused(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_object_arrays_are_not_run(tmp_path: Path) -> None:
    array = np.array([Attack(tmp_path / "ran")])
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", array)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(array, 2))
    for name in ("x.npy", "x.npz", "x.pkl"):
        refused(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n",
                b"ccollections\nOrderedDict\n", b"cargparse\nNamespace\n",
                b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nSize\n", b"cbuiltins\neval\n",
                b"cos\nsystem\n", b"(cbuiltins\neval\no", b"K\x01", b"X\x01\x00\x00\x001",
                b"X\x0b\x00\x00\x00__setstate__", b")", b"}", b"]", b"(", b"t", b"\x85", b"\x86", b"R",
                b"b", b"\x81", b"\x92", b"s", b"u", b"a", b"e", b"Q", b"q\x00", b"h\x00", b"0", b"2", b"N",
                b"\x82\x01", b"\x93",
            ]
        ),
        max_size=30,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_pickles_import_nothing_and_call_only_stand_ins(pieces: list[bytes], tmp_path: Path) -> None:
    """Whatever a program does, only classes and functions of ``clipkit.formats.weights`` are called."""
    called: list[str] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        name = argument.__name__ if event == "c_call" else frame.f_code.co_name
        if name in ("eval", "exec", "system", "__import__", "import_module"):
            called.append(name)

    (tmp_path / "x").write_bytes(b"\x80\x02" + b"".join(pieces) + b".")
    sys.setprofile(record)
    try:
        read_or_refuse(tmp_path / "x")
    finally:
        sys.setprofile(None)
    assert not called


# --- damaged files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small file of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    tensors = {"a.weight": torch.arange(6.0).view(2, 3).t(), "a.bias": torch.arange(3.0).half()}
    for form, options in FORMS.items():
        torch.save(
            {"epoch": 1, "state_dict": tensors, "optimizer": {"state": {0: [1.5]}}}, folder / form, **options
        )
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "one.safetensors")
    index = {"metadata": {"size": 1}, "weight_map": dict.fromkeys(tensors, "one.safetensors")}
    (folder / "index.json").write_text(json.dumps(index))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


changes = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5000), st.binary(min_size=1, max_size=4)),
        st.tuples(st.just("flip"), st.integers(0, 5000), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(0, 5000), st.integers(1, 5000)),
        st.tuples(st.just("insert"), st.integers(0, 5000), st.binary(min_size=1, max_size=8)),
    ),
    min_size=1,
    max_size=4,
)


def damage(content: bytes, how: list[tuple[str, int, Any]]) -> bytes:
    data = bytearray(content)
    for kind, at, what in how:
        at %= max(1, len(data))
        if kind == "set":
            data[at : at + len(what)] = what
        elif kind == "flip" and data:
            data[at] ^= 1 << what
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "insert":
            data[at:at] = what
    return bytes(data)


def read_or_refuse(path: Path) -> StoredWeights | None:
    try:
        found = read_weights(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return None
    for tensor in found.tensors.values():
        tensor.clone()  # every value can be read
    return found


@given(kind=st.integers(0, 5), how=changes)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_load_or_raise_one_line_error(
    kind: int, how: list[tuple[str, int, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    name = sorted(whole)[kind]
    (tmp_path / "one.safetensors").write_bytes(whole["one.safetensors"])
    (tmp_path / name).write_bytes(damage(whole[name], how))
    read_or_refuse(tmp_path / name)


@given(how=changes, form=st.sampled_from(["zip", "zip, protocol 4"]))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_pickles_in_intact_archives_load_or_raise_one_line_error(
    how: list[tuple[str, int, Any]], form: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "whole").write_bytes(whole[form])
    with zipfile.ZipFile(tmp_path / "whole") as before, zipfile.ZipFile(tmp_path / "x", "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, damage(content, how) if name.endswith("data.pkl") else content)
    read_or_refuse(tmp_path / "x")


@pytest.mark.parametrize("name", ["zip", "old", "one.safetensors"])
def test_truncated_files_are_rejected(name: str, whole: dict[str, bytes], tmp_path: Path) -> None:
    for length in range(0, len(whole[name]), 7):
        (tmp_path / name).write_bytes(whole[name][:length])
        refused(tmp_path / name)
