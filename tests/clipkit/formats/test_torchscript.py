"""Tests of reading TorchScript archives: tensors equal those of torch.jit.load, without running code."""

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn

from clipkit.errors import CheckpointError
from clipkit.formats.weights import StoredWeights, read_weights

jit = torch.jit
DTYPES = [
    torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore PyTorch's warnings that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Parts(nn.Module):
    """A module with every kind of attribute."""

    def __init__(self, *, sharing: bool = True) -> None:
        super().__init__()
        numbers = torch.arange(24.0)
        self.linear = nn.Linear(3, 4, bias=False).half()
        self.norm = nn.BatchNorm1d(4)
        self.strided: Tensor
        self.shared: Tensor
        self.unsaved: Tensor
        self.integer: Tensor
        self.register_buffer("strided", numbers.view(4, 6)[1:, ::2].t())
        self.register_buffer("shared", numbers[5:9])
        self.register_buffer("unsaved", torch.ones(2, 2).triu(1), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("integer", torch.tensor(224))
        self.register_parameter("no_bias", None)
        self.tied = nn.Parameter(torch.ones(3))
        self.tied_too = self.tied if sharing else None
        self.plain = torch.ones(5)  # neither parameter nor buffer
        self.several = [torch.ones(1), torch.zeros(2)]
        self.by_name = {"x": torch.ones(1)}
        self.ints, self.floats, self.texts = [1, 2], [0.5], ["a"]
        self.device = torch.device("cpu")
        self.pair = (1, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x.half()).float()).sum() + self.plain.sum() + self.several[0].sum()
        return (
            y + self.strided.sum() + self.shared.sum() + self.unsaved.sum() + self.tied.sum() + self.integer
        )


class Tree(nn.Module):
    """Nested modules, one of them shared, with top-level attributes as in OpenAI's models."""

    def __init__(self, *, sharing: bool = True) -> None:
        super().__init__()
        self.input_resolution, self.scale, self.kind, self.ready = 224, 0.5, "tree", True
        self.a = Parts(sharing=sharing)
        self.b = self.a if sharing else Parts(sharing=False)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU())])
        self.named = nn.ModuleDict({"one": nn.LayerNorm(2)})
        self.list = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) + self.b(x)
        for layer in self.layers:
            y = y + layer(x[:, :2]).sum()
        for part in self.named.values():
            y = y + part(x[:, :2]).sum()
        return y


class Calls(nn.Module):
    """A traced module in a scripted one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = jit.trace(nn.Linear(3, 2), torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y


def every_dtype() -> nn.Module:
    module = nn.Linear(2, 2)
    for i, dtype in enumerate(DTYPES):
        module.register_buffer(f"of_{i}", torch.arange(6).to(dtype))
    module.register_buffer("empty", torch.zeros(0, 3))
    module.register_buffer("repeated", torch.ones(1).expand(5))
    return module


IMAGES = torch.ones(4, 3)
SCRIPTS: dict[str, Callable[[], jit.ScriptModule]] = {
    "scripted": lambda: jit.script(Tree().eval()),
    "scripted, in training": lambda: jit.script(Tree()),
    "traced": lambda: jit.trace(Tree(sharing=False).eval(), IMAGES),  # PyTorch cannot trace shared modules
    "traced in scripted": lambda: jit.script(Calls()),
    "two classes of one name": lambda: jit.script(
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 1, bias=False))
    ),
    "in half precision": lambda: jit.script(nn.TransformerEncoderLayer(8, 2, 16).half()),
    "in bfloat16": lambda: jit.script(nn.Linear(3, 2).bfloat16()),
    "each dtype": lambda: jit.script(every_dtype()),
    "recurrent": lambda: jit.script(nn.LSTM(3, 4, num_layers=2)),
}


def agrees(path: Path) -> StoredWeights:
    """Assert that dtypes, shapes, strides and values equal those that PyTorch reads."""
    found, expected = read_weights(path), jit.load(path).state_dict()
    assert expected.keys() <= found.tensors.keys()
    for name, tensor in expected.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(other, tensor) and not other.requires_grad
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_tensors_equal_torch_jit_load(name: str, tmp_path: Path) -> None:
    jit.save(SCRIPTS[name](), tmp_path / "model.pt", _extra_files={"note.txt": "x" * 1000})
    agrees(tmp_path / "model.pt")


def test_top_level_attributes_are_notes(tmp_path: Path) -> None:
    jit.save(jit.script(Tree()), tmp_path / "model.pt")
    notes = read_weights(tmp_path / "model.pt").notes
    assert notes == {"input_resolution": 224, "scale": 0.5, "kind": "tree"}


@pytest.mark.parametrize("how", ["script", "trace"])
def test_open_clip_archives_load(how: str, tmp_path: Path) -> None:
    import open_clip

    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    model = open_clip.CLIP(16, vision, text).eval()
    given = torch.ones(1, 3, 32, 32), torch.ones(1, 8, dtype=torch.int64)
    archive = jit.script(model) if how == "script" else jit.trace(model, given, check_trace=False)
    jit.save(archive, tmp_path / "model.pt")
    found = agrees(tmp_path / "model.pt")
    # TorchScript also stores non-persistent buffers
    assert set(found.tensors) - set(model.state_dict()) == {"attn_mask"}
    assert how == "trace" or found.notes["context_length"] == 8


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    jit.save(jit.script(Tree()), tmp_path / "model.pt")
    tensors = read_weights(tmp_path / "model.pt").tensors
    tensors["a.tied"][0] = 7
    assert tensors["a.tied_too"][0] == 7 and tensors["b.tied"][0] == 7


def test_archives_load_without_torch_or_pickle_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.save(jit.script(Tree()), tmp_path / "model.pt")
    for module, name in ((torch.jit, "load"), (torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, None)
    assert len(read_weights(tmp_path / "model.pt").tensors) > 20


# --- modified archives --------------------------------------------------------------------------------------

M = b"\x80\x02c__torch__\nM\n)\x81"  # an object of the class below


def text(letters: str) -> bytes:
    return b"X" + len(letters).to_bytes(4, "little") + letters.encode()


def tensor(key: str = "0", count: int = 2) -> bytes:
    storage = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text("cpu")
        + bytes([75, count])
        + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )


def archive(path: Path, data: bytes, code: bytes = b"", constants: bytes = b"\x80\x02).") -> Path:
    """Write a minimal TorchScript archive, with a storage of two numbers."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", data)
        file.writestr("m/data/0", torch.ones(2).numpy().tobytes())
        file.writestr("m/constants.pkl", constants)
        file.writestr("m/code/__torch__.py", code, zipfile.ZIP_DEFLATED)
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable()
    return message


def test_minimal_archive_loads(tmp_path: Path) -> None:
    found = read_weights(archive(tmp_path / "m.pt", M + b"}" + text("w") + tensor() + b"sb."))
    assert torch.equal(found.tensors["w"], torch.ones(2))


class Attack:
    """Creates a file when its pickle is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", ["data", "constants", "state", "code"])
def test_pickles_in_archives_are_not_run(place: str, protocol: int, tmp_path: Path) -> None:
    attack = pickle.dumps(Attack(tmp_path / "ran"), protocol)
    whole = M + b"}" + text("w") + tensor() + b"sb."
    path = tmp_path / "m.pt"
    if place == "data":
        archive(path, attack)
    elif place == "constants":
        archive(path, whole, constants=attack)
    elif place == "code":
        archive(path, whole, f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode())
    else:
        archive(path, M + b"}(" + text("w") + tensor() + text("x") + attack[:-1] + b"ub.")
    if place in ("constants", "code"):  # not read
        assert set(read_weights(path).tensors) == {"w"}
    else:
        assert "open'" in refused(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x02}.", "without a module"),
        (M + b".", "contains no tensors"),
        (M + b"}" + text("w") + b"K\x01sb.", "contains no tensors"),
        (M + b"}" + text("w") + tensor("1") + b"sb.", "damaged"),
        (M + b"}" + text("w") + tensor("../data/0") + b"sb.", "damaged"),
        (M + b"}" + text("n" * 2000) + tensor() + b"sb.", "too long"),
        (M + b"q\x00}(" + text("w") + b"N" + text("self") + b"h\x00ub.", "damaged"),
    ],
)
def test_inconsistent_archives_are_rejected(data: bytes, reason: str, tmp_path: Path) -> None:
    assert reason in refused(archive(tmp_path / "m.pt", data))


def test_script_classes_outside_torchscript_archives_are_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        file.writestr("m/data.pkl", M + b"}" + text("w") + tensor() + b"sb.")
        file.writestr("m/data/0", torch.ones(2).numpy().tobytes())
    assert "names '__torch__.M'" in refused(tmp_path / "m.pt")


def test_frozen_modules_and_functions_are_rejected(tmp_path: Path) -> None:
    jit.save(jit.freeze(jit.script(nn.Linear(2, 2).eval())), tmp_path / "frozen.pt")
    assert "contains no tensors" in refused(tmp_path / "frozen.pt")
    jit.save(jit.trace(torch.sin, torch.ones(1)), str(tmp_path / "function.pt"))
    assert "contains no tensors" in refused(tmp_path / "function.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit.save(jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))), path)
    return path


@given(
    inside=st.booleans(),
    changes=st.lists(
        st.tuples(st.integers(0, 20_000), st.binary(max_size=4), st.integers(0, 9)), min_size=1, max_size=4
    ),
    which=st.integers(0, 20),
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_archives_load_or_raise_one_line_error(
    inside: bool, changes: list[tuple[int, bytes, int]], which: int, whole: Path, tmp_path: Path
) -> None:
    def damage(content: bytes) -> bytes:
        for at, new, removed in changes:
            at %= len(content) + 1
            content = content[:at] + new + content[at + removed :]
        return content

    path = tmp_path / "x.pt"
    if inside:  # damage an entry of an intact archive
        with zipfile.ZipFile(whole) as before, zipfile.ZipFile(path, "w") as after:
            names = [name for name in before.namelist() if name.endswith((".pkl", ".py"))]
            for name in before.namelist():
                chosen = name == names[which % len(names)]
                after.writestr(name, damage(before.read(name)) if chosen else before.read(name))
    else:
        path.write_bytes(damage(whole.read_bytes()))
    try:
        for found in read_weights(path).tensors.values():
            found.clone()
    except CheckpointError as error:
        assert "\n" not in str(error)
