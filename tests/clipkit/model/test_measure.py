"""Tests of measured costs, against torch's FLOP counter on the meta device and the tensors that autograd keeps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clipkit.model import (
    ARCHITECTURES,
    Architecture,
    BagOfWords,
    ClassTable,
    OpenClipVision,
    TextTower,
    VisionTower,
    measure,
)
from clipkit.model.clip import CLIP, create
from clipkit.model.measure import (
    Flops,
    Unmeasurable,
    copy_without_values,
    image_flops,
    image_gflops,
    measuring,
    text_flops,
)
from clipkit.model.names import create_architecture
from clipkit.training.costs import Workload, measure_step

LIBRARY_TOWER = OpenClipVision(
    image_size=16, config={"layers": 1, "width": 64, "head_width": 32, "patch_size": 8}
)


def meta(shape: Architecture) -> CLIP:
    with torch.device("meta"):
        return CLIP(shape)


def counted(encode: Callable[[], Tensor], rows: int) -> Flops:
    """Count FLOPs with torch, using the math attention backend."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            features = encode()
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(features.sum())
    return Flops(forward=forward.get_total_flops() // rows, backward=backward.get_total_flops() // rows)


def of_towers(shape: Architecture, length: int) -> tuple[Flops, Flops]:
    with torch.device("meta"):
        model, size = CLIP(shape), shape.vision.image_size
        images, tokens = torch.empty(2, 3, size, size), torch.ones(2, length, dtype=torch.int64)
        return counted(lambda: model.encode_image(images), 2), counted(lambda: model.encode_text(tokens), 2)


@pytest.mark.parametrize(("name", "length"), [("ViT-B-32", 16), ("ViT-L-14", 77)])
def test_flops_equal_torch_for_published_models(name: str, length: int) -> None:
    shape = ARCHITECTURES[name]
    assert (image_flops(meta(shape)), text_flops(meta(shape), length)) == of_towers(shape, length)


@given(
    image=st.tuples(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([16, 24])),
    text=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    grid=st.integers(1, 4),
    ratio=st.sampled_from([1.0, 2.5, 4.0]),
    pool=st.sampled_from(["class", "mean", "map", "distilled"]),
)
@settings(max_examples=12, deadline=None)
def test_flops_equal_torch_for_any_shape(
    image: tuple[int, int, int], text: tuple[int, int], grid: int, ratio: float, pool: str
) -> None:
    layers, heads, width = image
    shape = Architecture(
        embed_dim=10,
        vision=VisionTower(
            image_size=4 * grid,
            patch_size=4,
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=ratio,
            pool=pool,
        ),
        text=ClassTable(names=("a",))
        if pool == "distilled"
        else TextTower(width=12, layers=text[0], heads=3, context_length=9, vocab_size=20),
    )
    length = text[1] if pool != "distilled" else 1  # a table of classes has one token
    assert (image_flops(meta(shape)), text_flops(meta(shape), length)) == of_towers(shape, length)


def test_kept_patches_cost_as_much_as_a_smaller_image() -> None:
    shape = ARCHITECTURES["ViT-B-32"]
    smaller = shape.replace_size(image_size=160)  # 25 patches
    assert image_flops(meta(shape), patches=25) == image_flops(meta(smaller))


def test_locked_parameters_have_no_backward_flops() -> None:
    model = create(ARCHITECTURES["ViT-Ti-4-16"], seed=0)
    whole = image_flops(model)
    model.visual.requires_grad_(False)
    assert image_flops(model) == Flops(forward=whole.forward, backward=0)
    for name, parameter in model.visual.named_parameters():
        if name.startswith(("transformer.resblocks.1", "transformer.resblocks.2", "ln_post", "proj")):
            parameter.requires_grad_()
    assert image_flops(model) == counted(lambda: model.encode_image(torch.randn(2, 3, 16, 16)), 2)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 3), groups=st.integers(1, 3), stride=st.integers(1, 2),
    is_transposed=st.booleans(),
)  # fmt: skip
def test_flops_of_operations_equal_those_of_torch(
    sizes: tuple[int, int, int], groups: int, stride: int, is_transposed: bool
) -> None:
    rows, inner, columns = sizes

    def compute(groups: int) -> Tensor:
        a, b = torch.ones(rows, inner), torch.ones(inner, columns)
        products = [a @ b, torch.addmm(torch.ones(columns), a, b)]
        products += [
            torch.bmm(a[None], b[None]),
            torch.baddbmm(torch.ones(1, rows, columns), a[None], b[None]),
        ]
        inputs, outputs = groups * inner, groups * columns
        values = torch.ones(rows, inputs, 9, 8, requires_grad=True)
        if is_transposed:
            weight = torch.ones(inputs, columns, 3, 2, requires_grad=True)
            convolved = nn.functional.conv_transpose2d(values, weight, stride=stride, groups=groups)
        else:
            weight = torch.ones(outputs, inner, 3, 2, requires_grad=True)
            convolved = nn.functional.conv2d(values, weight, stride=stride, padding=1, groups=groups)
        return convolved.sum() + sum(product.sum() for product in products)

    def count(groups: int, backward: bool) -> tuple[int, int]:
        with measuring() as meter:
            total = compute(groups)
            if backward:
                total.backward()
        with FlopCounterMode(display=False) as counter:
            total = compute(groups)
            if backward:
                total.backward()
        return meter.flops, counter.get_total_flops()

    forward, expected = count(groups, backward=False)
    assert forward == expected
    both, expected = count(1, backward=True)
    assert both == expected
    # torch counts the gradients of grouped weights as if there were one group
    gradients = both - count(1, backward=False)[0]
    assert count(groups, backward=True)[0] - forward == groups * gradients


def test_bag_of_words_costs_its_projection() -> None:
    model = meta(replace(ARCHITECTURES["ViT-Ti-4-16"], text=BagOfWords(width=32)))
    for length in (5, 50):
        flops = text_flops(model, length)
        averaging = 2 * length * 32  # a product of a weight of each word with the embeddings
        assert flops.forward == 2 * 32 * 128 + averaging


def test_measuring_changes_neither_the_model_nor_the_generator() -> None:
    model = create(replace(ARCHITECTURES["ViT-Ti-4-16"], vision=LIBRARY_TOWER), seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert image_flops(model).backward > image_flops(model).forward > 0
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tower_that_reads_values_cannot_be_measured() -> None:
    class Looking(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((1, 2)) * float(images.sum())

    model = create(replace(create_architecture("ViT-Ti-4-16"), vision=LIBRARY_TOWER), seed=0)
    model.visual = Looking()
    assert image_gflops(model) is None
    with pytest.raises(Unmeasurable):
        image_flops(model)


def saved_bytes(model: CLIP, compute: Callable[[], Tensor]) -> int:
    """Bytes of tensors that autograd saves, without weights; shared memory counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    memory: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = compute()
    del features
    return sum(tensor.untyped_storage().nbytes() for tensor in memory.values())


@pytest.mark.parametrize("bf16", [False, True])
def test_bytes_equal_saved_tensors(bf16: bool) -> None:
    model = create("ViT-Ti-8-48", seed=0).train()
    tokens = torch.zeros(48, 20, dtype=torch.int64)
    tokens[:, -1] = 1

    def compute(model: CLIP, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model.encode_text(tokens, lengths=(20,) * 48)

    expected = saved_bytes(model, lambda: compute(model, tokens))
    with measuring() as meter:
        shadow = copy_without_values(model)
        words = torch.empty(48, 20, dtype=torch.int64)
        meter.begin(shadow.parameters())
        features = compute(shadow, words)
        most_bytes = meter.most_bytes()
        del features
    assert most_bytes.activations + most_bytes.weight_copies == pytest.approx(expected, rel=0.2)
    assert (most_bytes.weight_copies > 0) == bf16


def test_results_of_operations_equal_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and dtypes of a step are those of torch's meta kernels, for each operation with a rule."""
    compared: set[str] = set()

    def compare(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*arguments: Any, **options: Any) -> Any:
            result, expected = rule(*arguments, **options), func(*arguments, **options)
            several = isinstance(result, tuple)
            for ours, theirs in zip(
                result if several else [result], expected if several else [expected], strict=True
            ):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), func
            compared.add(str(func))
            return result

        return compute

    rules = {func: compare(func, rule) for func, rule in measure._RESULTS.items()}
    monkeypatch.setattr(measure, "_RESULTS", rules)
    model = create(ARCHITECTURES["ViT-Ti-4-16"], name="ViT-Ti-4-16", seed=0)
    for bf16 in (False, True):
        measure_step(Workload(model=model, bf16=bf16), 3, length=9)
    image_flops(model)
    text_flops(model, 20)
    assert len(compared) > 25


def test_measuring_leaves_no_tensors_without_values_behind() -> None:
    model = create(ARCHITECTURES["ViT-Ti-4-16"], name="ViT-Ti-4-16", seed=0)
    with measuring():
        copy_without_values(model).encode_image(torch.empty(2, 3, 8, 8, dtype=torch.uint8))
    assert model.encode_image(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).isfinite().all()
