"""Tests of captioning: the decoder equals open_clip's CoCa, the term's loss equals plain cross-entropy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.api import load
from clipkit.config import Config, LossConfig, ModelConfig, SmallConfig, load_config
from clipkit.errors import ConfigError
from clipkit.export.write import export
from clipkit.formats.checkpoint import model_hash, save_model, serialize_architecture
from clipkit.model import decoder as decoders
from clipkit.model.architectures import Architecture, Decoder, TextTower, VisionTower
from clipkit.model.clip import CLIP, allocate
from clipkit.model.decoder import caption_nll
from clipkit.model.generate import caption_likelihoods
from clipkit.model.towers import Padded, draw_rows
from clipkit.objectives import select_terms
from clipkit.objectives.caption import Caption
from clipkit.training.build import first_model, lock, places, shape_of
from clipkit.training.costs import Workload, measure_step
from tests.clipkit.term_sums import sum_term

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
END, LENGTH = 99, 12


def made(feed: str = "tokens", *, parallel: bool = False, width: int = 48, words: int = END + 1) -> CLIP:
    """A small model in float64; its image tokens are wider than the decoder unless ``width`` is 32."""
    shape = Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=32, patch_size=8, width=width, layers=2, heads=2),
        text=TextTower(
            width=32, layers=2, heads=2, context_length=30, vocab_size=words, causal=feed != "shared"
        ),
        decoder=Decoder(
            width=32,
            layers=2,
            heads=4,
            context_length=LENGTH,
            vocab_size=words,
            feed=feed,
            parallel=parallel,
        ),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIP(shape).initialize().double()


def batch(rows: int = 7, *, width: int = 20) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=random)
    tokens = torch.randint(1, END, (rows, width), generator=random)
    return images, tokens.scatter_(1, torch.arange(1, rows + 1)[:, None] * 2, END)


def logits_of(model: CLIP, seen: Tensor, tokens: Tensor, parallel: Tensor | None = None) -> Tensor:
    assert model.text_decoder is not None
    hidden = model.text_decoder.compute_hidden(seen, model.text_decoder.embed(tokens, parallel), parallel)
    return hidden @ model.text_decoder.text_projection


def test_pooler_of_image_tokens_equals_open_clip() -> None:
    """CoCa normalizes its outputs as the image tower does its tokens."""
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    theirs = transformer.AttentionalPooler(32, 32, n_head=4, n_queries=5).double()
    ours = decoders.AttentionalPooler(5, 32, 4).double()
    for parameter in (*theirs.parameters(), *ours.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    image = torch.randn(3, 17, 32, dtype=torch.float64)
    expected = ours.ln_post(theirs(image))
    assert expected.shape == (3, 5, 32) and expected.std() > 0.1
    assert torch.allclose(ours(image), expected, atol=1e-10)


@pytest.mark.parametrize("width", [32, 48])
def test_decoder_reads_pooled_tokens(width: int, tmp_path: Path) -> None:
    plain = made(width=width).float()
    assert plain.architecture.decoder is not None
    shape = replace(plain.architecture.decoder, queries=5)
    model = made(width=width).float()
    assert model.set_decoder(shape) and model.text_decoder is not None
    images, tokens = batch()
    seen = model.image_tokens(images)[1]
    assert model.text_decoder.project_image(seen).shape == (len(images), 5, 32)
    names = {"image_pool.query", *(f"image_pool.ln_{name}.weight" for name in ("q", "k", "post"))}
    assert names <= dict(model.text_decoder.named_parameters()).keys()
    loss = model.text_decoder.nll(seen, tokens)
    loss.backward()
    for name, parameter in model.text_decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    model.eval()
    likelihoods = caption_likelihoods(model, seen.detach(), tokens).diagonal()
    assert torch.allclose(-likelihoods, model.text_decoder.nll_by_caption(seen, tokens)[0], rtol=1e-4)
    save_model(model, tmp_path / "model")
    again = load(str(tmp_path / "model"))
    assert again.architecture == model.architecture and model_hash(again) == model_hash(model)
    assert model_hash(model) != model_hash(plain)
    with pytest.raises(ConfigError, match="queries = -1 is not an integer from 0 to"):
        replace(shape, queries=-1)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_decoder_logits_and_names_equal_open_clip(quick_gelu: bool) -> None:
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    act = transformer.QuickGELU if quick_gelu else torch.nn.GELU
    theirs = transformer.MultimodalTransformer(32, 2, 4, 20, act_layer=act, output_dim=END + 1).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    shape = Decoder(width=32, layers=2, heads=4, context_length=20, vocab_size=END + 1, feed="text")
    ours = decoders.CaptionDecoder(shape, image_width=32, quick_gelu=quick_gelu).double()
    ours.load_state_dict(theirs.state_dict())
    seen, text = (torch.randn(3, length, 32, dtype=torch.float64) for length in (17, 9))
    expected = theirs(seen, text)
    assert expected.std() > 0.1
    assert (ours.compute_hidden(seen, text) @ ours.text_projection - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("feed", "parallel"), [("tokens", False), ("tokens", True), ("text", False), ("shared", False)]
)
def test_caption_term_is_cross_entropy_up_to_end_of_text(feed: str, parallel: bool) -> None:
    model, (images, tokens) = made(feed, parallel=parallel), batch()
    given: dict[str, Any] = {"captions": tokens}
    rows = torch.arange(len(tokens)) % 2 == 0 if parallel else None
    if rows is not None:
        given["parallel"] = rows
    features = model(images, tokens, return_tokens=True)[:3]
    sums = sum_term(model, Caption(), images, tokens, **given)
    for found, plain in zip(features, model(images, tokens), strict=True):
        assert torch.allclose(found, plain, rtol=0, atol=1e-12)
    assert model.text_decoder is not None
    _, seen = model.image_tokens(images)
    if (text := model.decoder_input(tokens)) is not None:
        hidden = model.text_decoder.compute_hidden(seen, text.x[:, :LENGTH], text=text)
        logits = hidden @ model.text_decoder.text_projection
    else:
        logits = logits_of(model, seen, tokens[:, :LENGTH], rows)
    after_end = torch.arange(LENGTH) >= tokens.argmax(dim=1, keepdim=True)
    wanted = tokens[:, 1 : LENGTH + 1].masked_fill(after_end, -100)
    expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    assert torch.allclose(sums, expected, rtol=1e-12)
    lengths = (tokens.argmax(dim=1) + 1).tolist()
    outputs = model(images, tokens, lengths=lengths, return_tokens=True)
    again = Caption().total(model, images, outputs[3:], lengths=lengths, **given)
    assert torch.allclose(again, sums, rtol=1e-12)


def test_shared_text_tower_is_causal_and_attends_to_images_for_captions_only() -> None:
    model, (images, tokens) = made("shared"), batch()
    decoder, shown, text = model.text_decoder, model.image_tokens(images)[1], model.decoder_input(tokens)
    assert decoder is not None and not decoder.blocks and text is not None
    full, lengths = Padded(), (tokens.argmax(dim=1) + 1).tolist()
    for row, length in enumerate(lengths):  # each text alone, without padding
        x = text.x[row : row + 1, :length]
        for block in model.transformer.blocks:
            x = block(x, full)
        expected = F.normalize((model.ln_final(x) @ model.text_projection)[0, -1], dim=0)
        for known in (None, lengths):
            assert torch.allclose(model.encode_text(tokens, lengths=known)[row], expected, rtol=0, atol=1e-12)
            features, _ = model.text_tokens(tokens, lengths=known)
            assert torch.allclose(features[row], expected, rtol=0, atol=1e-12)
    padded = model.ln_final(model.transformer(text.x, Padded.from_texts(tokens, causal=False)))
    features = F.normalize(padded @ model.text_projection, dim=1)
    assert torch.allclose(features, model.encode_text(tokens), rtol=0, atol=1e-12)

    assert decoder.image_projection is not None
    seen, x = decoder.image_projection(shown), text.x
    for block, cross in zip(model.transformer.blocks, decoder.cross_blocks, strict=True):
        x = block(x, Padded(ends=torch.empty(0)))
        x = x + cross.attn.attend_query(cross.ln_1_kv(seen), cross.ln_1(x), full)
    assert torch.allclose(
        decoder.compute_hidden(shown, text.x, text=text), model.ln_final(x), rtol=0, atol=1e-12
    )


def test_text_feed_requires_a_causal_text_tower() -> None:
    model = made("shared")
    assert model.text_decoder is not None
    with pytest.raises(ConfigError, match="requires a causal text tower"):
        model.set_decoder(replace(model.text_decoder.shape, feed="text"))


def test_tokens_depend_on_earlier_tokens_and_parallel_rows_on_none() -> None:
    model, (images, tokens) = made(parallel=True), batch()
    _, seen = model.image_tokens(images)
    changed = tokens[:, :LENGTH].clone()
    changed[:, 5] = (changed[:, 5] + 1) % END
    parallel = torch.arange(len(tokens)) < 3
    before, after = (logits_of(model, seen, one, parallel) for one in (tokens[:, :LENGTH], changed))
    assert torch.equal(before[:3], after[:3])
    assert torch.allclose(before[3:, :5], after[3:, :5], rtol=0, atol=1e-12)
    assert ((before - after)[3:, 5:].abs().amax(dim=(1, 2)) > 1e-4).all()
    assert (before[:3] - logits_of(model, seen.flip(0), changed, parallel)[:3]).abs().max() > 1e-4


def test_caption_loss_is_independent_of_batch_and_padding() -> None:
    model, (images, tokens) = made(parallel=True), batch()
    parallel = torch.arange(len(tokens)) % 2 == 0

    def term(rows: slice, width: int) -> Tensor:
        given: dict[str, Any] = {"captions": tokens[rows, :width], "parallel": parallel[rows]}
        return sum_term(model, Caption(), images[rows], tokens[rows, :width], **given)

    together = term(slice(0, 3), 20)
    assert torch.allclose(together, term(slice(0, 1), 3) + term(slice(1, 3), 7), rtol=1e-12)


@given(
    rows=st.integers(1, 9),
    words=st.integers(2, 40),
    tile=st.sampled_from([1, 50, 1 << 24]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_tiled_loss_and_gradients_equal_cross_entropy(rows: int, words: int, tile: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden, weight = (
        (3 * torch.randn(*size, generator=random, dtype=torch.float64)).requires_grad_()
        for size in ((rows, 6), (6, words))
    )
    targets = torch.randint(0, words, (rows,), generator=random)
    expected = F.cross_entropy(hidden @ weight, targets, reduction="sum")
    wanted = torch.autograd.grad(2.5 * expected, [hidden, weight])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "LOGITS", tile)
        found = caption_nll(hidden, weight, targets)
        got = torch.autograd.grad(2.5 * found, [hidden, weight])
        (of_weight,) = torch.autograd.grad(caption_nll(hidden.detach(), weight, targets), [weight])
    assert torch.allclose(found, expected, rtol=1e-12)
    for one, other in zip((*got, 2.5 * of_weight), (*wanted, wanted[1]), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_caption_loss_is_float32_under_autocast() -> None:
    hidden, weight = (torch.randn(*size).requires_grad_() for size in ((7, 6), (6, 30)))
    targets = torch.arange(7)
    exact = caption_nll(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = caption_nll(hidden, weight, targets)
    assert torch.equal(found, exact) and found.dtype == torch.float32
    gradients = (torch.autograd.grad(one, [hidden, weight]) for one in (found, exact))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_parallel_rows_are_a_function_of_seed_and_row() -> None:
    rows = torch.arange(4000)
    chosen = draw_rows(seed=5, rows=rows, fraction=0.75)
    assert 0.72 < chosen.double().mean() < 0.78
    assert torch.equal(draw_rows(seed=5, rows=rows[1000:1010], fraction=0.75), chosen[1000:1010])
    assert not torch.equal(draw_rows(seed=6, rows=rows, fraction=0.75), chosen)
    assert draw_rows(seed=5, rows=rows, fraction=1.0).all()
    assert not draw_rows(seed=5, rows=rows, fraction=0.0).any()


def test_decoder_is_stored_hashed_and_omitted_from_exports(tmp_path: Path) -> None:
    model = made(width=32, words=49408).float().eval()
    plain = CLIP(replace(model.architecture, decoder=None)).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("text_decoder.")})
    assert "decoder" not in repr(plain.architecture) and "decoder" not in serialize_architecture(
        plain.architecture
    )
    assert model_hash(model) != model_hash(plain)
    save_model(model, tmp_path / "model")
    again = load(str(tmp_path / "model"))
    assert again.architecture == model.architecture and model_hash(again) == model_hash(model)
    export(again, tmp_path / "exported", to=["open_clip"])
    assert model_hash(load(str(tmp_path / "exported"))) == model_hash(plain)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weights_keep_the_attention_mask_of_their_text_tower(weight: float, tmp_path: Path) -> None:
    fresh, shared = ModelConfig(name="ViT-Ti-4-16"), Caption(weight=1.0, feed="shared")
    shape = shape_of(fresh, LossConfig(), SmallConfig(), terms={"caption": shared})
    first = first_model(Config(model=fresh), shape)
    save_model(first, tmp_path / "m")
    again = ModelConfig(name="ViT-Ti-4-16", weights=str(tmp_path / "m"))
    shape = shape_of(again, LossConfig(), SmallConfig(), terms={"caption": shared} if weight else {})
    for checkpoint in (None, tmp_path / "m") if weight else (None,):
        found = first_model(Config(model=again, seed=1), shape, checkpoint=checkpoint)
        for one in (first, found):
            assert one.architecture.text.plain is not None and not one.architecture.text.plain.causal
        if checkpoint is not None:
            assert found.logit_scale.is_meta  # its weights are read when the run resumes
            allocate(found, torch.device("cpu"))
            found.load_state_dict(first.state_dict())
        tokens = first.tokenizer(["a photo of a cat"])
        assert torch.equal(found.encode_text(tokens), first.encode_text(tokens))
        assert (found.text_decoder is None) == (not weight)


def test_weights_without_a_decoder_get_a_fresh_one(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["caption.weight=1", "caption.parallel=0.5", "caption.length=9"])
    shape = shape_of(config.model, config.loss, config.small, terms=select_terms(config))
    assert shape.decoder == Decoder(
        width=128, layers=1, heads=4, context_length=9, mlp_ratio=4.0, feed="tokens", parallel=True
    )
    plain = first_model(replace(config, seed=3), replace(shape, decoder=None))
    fresh = first_model(replace(config, seed=3), shape)
    for name, value in plain.state_dict().items():  # towers start as they do without a decoder
        assert torch.equal(fresh.state_dict()[name], value), name
    save_model(plain, tmp_path / "model")
    lines: list[str] = []
    chosen = replace(config.model, weights=str(tmp_path / "model"))
    found = first_model(replace(config, model=chosen, seed=4), shape, add_note=lines.append)
    assert found.architecture == shape and len(lines) == 1 and "has no decoder of captions" in lines[0]
    assert all(value.isfinite().all() for value in found.state_dict().values())
    lock(found, image="all", text="all")
    assert places(found)["text_decoder.text_projection"].tower == "decoder"
    assert {name.partition(".")[0] for name, p in found.named_parameters() if p.requires_grad} == {
        "text_decoder",
        "logit_scale",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["caption.feed=text"], "caption.feed = 'text' has no effect unless caption.weight is set"),
        (["caption.weight=1", "caption.feed=text", "caption.parallel=0.5"], "caption.parallel = 0.5"),
        (
            ["loss.name=none"],
            "loss.name = 'none' is invalid: requires a term from the first step, such as caption.weight=1",
        ),
        (["caption.weight=-1"], "caption.weight = -1"),
        (["caption.weight=1", "model.text=cbow", "caption.feed=text"], "requires a text transformer"),
        (["caption.weight=1", "model.text=cbow", "caption.feed=shared"], "requires a text transformer"),
        (["caption.weight=1", "caption.feed=shared", "caption.layers=3"], "caption.layers = 3 is invalid"),
        (["caption.queries=4"], "caption.queries = 4 has no effect unless caption.weight is set"),
        (["caption.weight=1", "caption.queries=-1"], "caption.queries = -1 is invalid"),
        (
            [
                "caption.weight=1",
                "caption.feed=text",
                "caption.queries=4",
                "model.name=open_clip:coca_ViT-B-32",
            ],
            "none of caption.layers, caption.parallel and caption.queries",
        ),
        (["caption.weight=1", "model.name=open_clip:RN50"], "requires clipkit's own image tower"),
    ],
)
def test_invalid_combinations_raise_one_line_error(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config = load_config(QUICKSTART, given)
        shape_of(config.model, config.loss, config.small, terms=select_terms(config))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_caption_flops_equal_torch() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for feed in ("tokens", "text", "shared"):
        model = made(feed)
        images, tokens = (one[:1] for one in batch())
        tokens = torch.cat([torch.full((1, LENGTH), 3), torch.full((1, 1), END)], dim=1)
        found = []
        for with_term in (False, True):
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                outputs = model(images, tokens, return_tokens=with_term)
                if with_term:
                    Caption().total(model, images, outputs[3:], captions=tokens)
            found.append(counter.get_total_flops())
        terms = {"caption": Caption(weight=1, feed=feed, length=LENGTH)}
        more, less = (
            measure_step(Workload(model=model, terms=one), 2, length=LENGTH + 1).flops // 2
            for one in (terms, {})
        )
        # the backward pass costs twice as much; images need no gradient
        assert more - less == pytest.approx(3 * (found[1] - found[0]), rel=1e-3)
