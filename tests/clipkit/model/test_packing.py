"""Tests of packed texts: features and gradients equal the padded tower's with every attention kernel."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

import clipkit.model.clip
from clipkit.model import towers
from clipkit.model.clip import CLIP, create
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.model.towers import Packed, Padded, attention_by_length, attention_varlen, pack, supports_varlen

LENGTHS = [5, 2, 77, 5, 9, 33, 2, 9, 9, 12, 3, 76]
CPU = torch.device("cpu")


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let torch use ``count`` cores: on several, attention over few tokens is computed by batched products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def texts(lengths: list[int], width: int = 77) -> Tensor:
    """(B, width) tokens with noise of smaller ids after the end of each text."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, START_OF_TEXT, (len(lengths), width), generator=generator)
    for row, length in zip(tokens, lengths, strict=True):
        row[0], row[length - 1] = START_OF_TEXT, END_OF_TEXT
    return tokens


def by_segment(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """Attend within one text after the other, by the packed starts, as the CUDA kernel does."""
    starts = packed.starts.tolist()
    outputs = []
    for number, (first, after) in enumerate(pairwise(starts)):
        query = q[number : number + 1] if ends_only else q[first:after]
        a, b, c = (one.transpose(0, 1)[None] for one in (query, k[first:after], v[first:after]))
        mixed = F.scaled_dot_product_attention(a, b, c, is_causal=packed.causal and not ends_only)
        outputs.append(mixed[0].transpose(0, 1))
    return torch.cat(outputs)


def padded(model: CLIP, tokens: Tensor) -> Tensor:
    """Text features of the padded tower, as computed if lengths are unknown."""
    x = model.token_embedding(tokens) + model.positional_embedding[: tokens.shape[1]]
    read = model.ln_final(model.transformer(x, Padded.from_texts(tokens, causal=True)))
    return F.normalize(read @ model.text_projection, dim=-1)


def gradients(model: CLIP, features: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed linear function of the features."""
    model.zero_grad()
    direction = torch.randn(features.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.autograd.backward((features * direction.to(features)).sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("how", ["by length", "by segment"])
def test_packed_features_and_gradients_equal_padded_ones(
    tiny: CLIP, how: str, dtype: torch.dtype, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "by segment":
        monkeypatch.setattr(clipkit.model.clip, "supports_varlen", lambda *_, **__: True)
        monkeypatch.setattr(clipkit.model.clip, "attention_varlen", by_segment)
    model, tokens = tiny.to(dtype), texts(LENGTHS)
    want, own = padded(model, tokens), model.encode_text(tokens, lengths=LENGTHS)
    assert own.dtype == want.dtype
    assert (own - want).abs().max() <= close
    own_gradients, wanted = gradients(model, own), gradients(model, want)
    assert own_gradients.keys() == wanted.keys()
    for name, gradient in own_gradients.items():
        assert (gradient - wanted[name]).abs().max() <= close * max(1.0, float(wanted[name].abs().max())), (
            name
        )


def test_features_are_equal_with_and_without_lengths(tiny: CLIP) -> None:
    tokens = texts(LENGTHS)
    assert torch.equal(tiny.encode_text(tokens, lengths=LENGTHS), tiny.encode_text(tokens))
    image = torch.zeros(len(LENGTHS), 3, 32, 32, dtype=torch.uint8)
    assert torch.equal(tiny(image, tokens, lengths=LENGTHS)[1], tiny(image, tokens)[1])
    assert tiny.encode_text(tokens[:0], lengths=[]).shape == (0, 48)


@given(lengths=st.lists(st.integers(1, 12), max_size=20))
def test_pack_places_each_token_once(lengths: list[int]) -> None:
    packed = pack(lengths, longest=12, attention=attention_by_length, device=CPU)
    pairs = sorted(zip(packed.rows.tolist(), packed.positions.tolist(), strict=True))
    assert pairs == [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    assert [length for texts, length in packed.counts for _ in range(texts)] == sorted(lengths)
    assert packed.starts.tolist() == [sum(sorted(lengths)[:n]) for n in range(len(lengths) + 1)]
    assert packed.starts.dtype == torch.int32
    ends = packed.select_readout(torch.stack([packed.rows, packed.positions], dim=1))
    assert packed.restore_order(ends).tolist() == [[row, length - 1] for row, length in enumerate(lengths)]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    heads=st.integers(1, 3),
    ends_only=st.booleans(),
    causal=st.booleans(),
    cores=st.integers(1, 2),
)
def test_attention_by_length_equals_attention_by_segment(
    lengths: list[int], heads: int, ends_only: bool, causal: bool, cores: int
) -> None:
    packed = pack(lengths, longest=9, causal=causal, attention=attention_by_length, device=CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), heads, 4, generator=generator)
    query = packed.select_readout(q) if ends_only else q
    with on_cores(cores):
        ours = attention_by_length(query, k, v, packed, ends_only=ends_only)
    exact = by_segment(query.double(), k.double(), v.double(), packed, ends_only=ends_only)
    assert (ours - exact).abs().max() <= 2e-6


@pytest.mark.parametrize("by_products", ["two cores", "oneDNN"])
def test_features_and_gradients_by_products(
    tiny: CLIP, by_products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 2, 7, 5, 9, 6, 3]
    tokens = texts(lengths)
    images = torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()

    def compute() -> tuple[Tensor, dict[str, Tensor]]:
        features = torch.cat([tiny.encode_image(images), tiny.encode_text(tokens, lengths=lengths)])
        return features.detach(), gradients(tiny, features)

    one, gradients_of_one = compute()
    monkeypatch.setattr(towers, "uses_onednn_for_float32", lambda: by_products == "oneDNN")
    with on_cores(2 if by_products == "two cores" else 1):
        products, gradients_of_products = compute()
    assert not torch.equal(products, one)
    torch.testing.assert_close(products, one, rtol=0, atol=1e-6)
    for name, gradient in gradients_of_one.items():
        torch.testing.assert_close(gradients_of_products[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("trained", "most"), [(True, 320), (False, 224)])
def test_longer_rows_attend_by_torch(
    dtype: torch.dtype, trained: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(towers, "uses_onednn_for_float32", lambda: True)
    by_torch: list[int] = []
    attention = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        by_torch.append(k.shape[-2])
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    for tokens in (most, most + 1):
        q, k, v = torch.randn(3, 1, 1, tokens, 8, dtype=dtype).requires_grad_(trained)
        out = towers.attend(q, k, v)
        torch.testing.assert_close(out, attention(q, k, v), atol=1e-5, rtol=0)
    assert by_torch == ([most, most + 1] if dtype == torch.float64 else [most + 1])


@pytest.mark.parametrize("causal", [True, False])
def test_features_and_gradients_in_bfloat16(tiny: CLIP, causal: bool) -> None:
    text = tiny.architecture.text.replace_attention(causal=causal)
    model = create(replace(tiny.architecture, text=text), seed=0)
    tokens = texts(LENGTHS)
    exact = model.encode_text(tokens, lengths=LENGTHS)
    wanted = gradients(model, exact)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.encode_text(tokens, lengths=LENGTHS)
    assert (features - exact).abs().max() < 0.01
    for name, gradient in gradients(model, features).items():
        difference = torch.linalg.vector_norm(gradient - wanted[name])
        assert difference < 0.03 * torch.linalg.vector_norm(wanted[name]), name


@given(lengths=st.lists(st.integers(1, 16), max_size=20))
def test_a_filler_changes_no_text(lengths: list[int]) -> None:
    packed = pack(lengths, longest=16, attention=attention_by_length, device=CPU, multiple=16)
    assert len(packed.rows) == len(packed.positions) == -(-sum(lengths) // 16) * 16
    behind = torch.arange(16) >= torch.tensor(lengths)[:, None]
    tokens = packed.unpack(packed.positions[:, None] + 1, 16).squeeze(2)
    assert torch.equal(tokens, torch.arange(1, 17).masked_fill(behind, 0))
    ends = packed.select_readout(torch.stack([packed.rows, packed.positions], dim=1))
    assert packed.restore_order(ends).tolist() == [[row, length - 1] for row, length in enumerate(lengths)]


def test_linear_layers_process_only_real_tokens(tiny: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    linear = F.linear

    def counting(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.shape)
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", counting)
    tiny.encode_text(texts(LENGTHS))
    tokens = {math.prod(shape[:-1]) for shape in seen}
    assert tokens == {sum(LENGTHS), len(LENGTHS)}  # all tokens, and the pooled ones


def test_varlen_kernel_is_not_used_on_cpu(tiny: CLIP) -> None:
    assert not supports_varlen(torch.zeros(64, 64, dtype=torch.bfloat16), head_width=64)
    half = tiny.bfloat16()
    with torch.no_grad():
        assert half.encode_text(texts([3, 9]), lengths=[3, 9]).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
def test_packed_features_equal_padded_ones_on_gpu(tiny: CLIP, how: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda")
    exact, tokens = tiny.to(device), texts(LENGTHS).to(device)
    want = padded(exact, tokens)
    wanted = gradients(exact, want)
    model = exact if how == "autocast" else exact.to(getattr(torch, how))
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        assert supports_varlen(model.text_projection, head_width=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")  # no synchronization with the device
        try:
            own = model.encode_text(tokens, lengths=LENGTHS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert own.dtype == torch.float32
    assert (own - want).abs().max() < 0.03
    for name, gradient in gradients(model, own).items():
        assert (gradient - wanted[name]).norm() <= 0.05 * wanted[name].norm(), name
    packed = pack(LENGTHS, longest=77, attention=attention_varlen, device=device)
    q, k, v = torch.randn(3, sum(LENGTHS), 4, 16, device=device, dtype=torch.bfloat16)
    for ends_only in (False, True):
        query = packed.select_readout(q) if ends_only else q
        ours = attention_varlen(query, k, v, packed, ends_only=ends_only).float()
        plain = by_segment(query.float(), k.float(), v.float(), packed, ends_only=ends_only)
        assert (ours - plain).abs().max() < 0.03
