"""Tests of compiled blocks: equal results, unchanged names, no recompilation for each batch."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clipkit.model.clip
from clipkit.errors import ConfigError
from clipkit.model import Architecture, OpenClipText, TimmVision
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.model.towers import Packed
from clipkit.training.parallel import compile_blocks, recompute_blocks
from tests.clipkit.compile_program import count_graphs
from tests.forked import Forked

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

# a warning of torch's own access to .grad, which becomes an error under pytest's filters
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def pairs(length: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, START_OF_TEXT, (count, length), generator=generator)
    tokens[:, 0], tokens[:, -1] = START_OF_TEXT, END_OF_TEXT
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, tokens


def gradients(model: CLIP, *features: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward([feature.square()[:, :7].sum() for feature in features])
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(own: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert own.keys() == wanted.keys()
    for name, gradient in own.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-5 * max(1.0, float(wanted[name].abs().max())), name


def compared(plain: CLIP, compiled: CLIP, length: int, count: int) -> None:
    images, tokens = pairs(length, count)
    want_image, want_text, _ = plain(images, tokens)
    image, text, _ = compiled(images, tokens)
    assert (image - want_image).abs().max() <= 1e-5
    assert (text - want_text).abs().max() <= 1e-5
    assert_same(gradients(compiled, image, text), gradients(plain, want_image, want_text))


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_ten_text_lengths_compile_two_graphs_per_tower(tiny: CLIP) -> None:
    """With the eager backend, to save compilation time."""
    plain, before = copy.deepcopy(tiny), graphs()
    compile_blocks(tiny, backend="eager")
    assert list(tiny.state_dict()) == list(plain.state_dict())
    for length in range(4, 14):
        compared(plain, tiny, length, count=2 + length % 3)
    assert graphs() - before == 4
    recompute_blocks(tiny)
    compared(plain, tiny, 9, count=3)
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.zero_()
    compared(plain, other, 9, count=3)  # a copy uses its own weights
    assert graphs() - before == 4
    other.eval()
    with torch.no_grad():
        for size in (1, 2, 3):
            other.encode_image(pairs(5, 2)[0][:size])
    assert graphs() - before == 4  # evaluation compiles nothing


def by_mask(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """Attention over packed texts with a dense mask, in place of the CUDA kernel."""
    places = torch.arange(len(k))
    text = torch.bucketize(places, packed.starts[1:], right=True)  # text index of each token
    queries = packed.starts[1:] - 1 if ends_only else places
    sees = (text[queries, None] == text) & (queries[:, None] >= places)
    a, b, c = (one.transpose(0, 1)[None] for one in (q, k, v))
    return F.scaled_dot_product_attention(a, b, c, attn_mask=sees)[0].transpose(0, 1)


def test_packed_texts_are_compiled_once(tiny: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, before = copy.deepcopy(tiny), graphs()
    compile_blocks(tiny, backend="eager")
    monkeypatch.setattr(clipkit.model.clip, "supports_varlen", lambda *_, **__: True)
    monkeypatch.setattr(clipkit.model.clip, "attention_varlen", by_mask)
    for length in range(4, 10):
        compared(plain, tiny, length, count=2 + length % 3)
    assert graphs() - before == 4


CASES = (
    "model.patch_dropout=0.5",
    "model.patch_dropout=0.5 accumulate=2 recompute=1",
    "caption.weight=1 masked.weight=1",
    "views.weight=1 optim.average=0.9",
)


@pytest.mark.parametrize("settings", CASES)
def test_no_later_step_compiles(settings: str) -> None:
    graphs = count_graphs(4, *settings.split())
    assert graphs[0] > 0 and graphs == graphs[:1] * 4


def test_unfreezing_compiles_three_times() -> None:
    """Blocks below, at and above the lowest one that is trained have graphs of their own."""
    graphs = count_graphs(6, "lock.unfreeze_every=1")
    assert graphs[2] < graphs[3] == graphs[-1] <= 12


@pytest.mark.slow
def test_no_later_step_of_two_ranks_compiles(forked: Forked) -> None:
    cases = ("sharding=none", "sharding=full recompute=1 accumulate=2")
    for ended in forked.ranks("tests/clipkit/compile_program.py", "3", *cases, world=2):
        lines = ended.stdout.splitlines()
        assert len(lines) == len(cases)
        for line in lines:
            graphs = line.split()
            assert graphs[0] != "0" and graphs == graphs[:1] * 3


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler, which torch.compile needs")
def test_compiled_code_equals_eager(tiny: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text tower only, because its shapes vary and compilation takes long for each tower."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = copy.deepcopy(tiny)
    compile_blocks(tiny)
    for length in (4, 9, 13):
        tokens = pairs(length, count=3)[1]
        text, want = tiny.encode_text(tokens), plain.encode_text(tokens)
        assert (text - want).abs().max() <= 1e-5
        assert_same(gradients(tiny, text), gradients(plain, want))


def test_model_without_own_blocks_is_rejected() -> None:
    text = OpenClipText(context_length=8, config={"vocab_size": 64, "width": 32, "heads": 2, "layers": 1})
    vision = TimmVision(image_size=32, name="resnet10t")
    model = CLIP(Architecture(embed_dim=16, vision=vision, text=text))
    with pytest.raises(ConfigError, match="this model has none"):
        compile_blocks(model)
