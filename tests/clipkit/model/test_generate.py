"""Tests of caption generation: CoCa equals open_clip, beam search finds the best caption, tokens decode."""

import itertools
import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import Tensor

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.export import export
from clipkit.model import generate
from clipkit.model.architectures import Architecture, Decoder, TextTower, VisionTower
from clipkit.model.clip import CLIP
from clipkit.model.generate import Prefixes, caption_likelihoods, generate_captions
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT, ClipTokenizer, tokenize
from clipkit.objectives.caption import Caption

COCA = {
    "embed_dim": 32,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 32, "patch_size": 16, "width": 64, "head_width": 32, "layers": 2,
        "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True,
    },
    "text_cfg": {
        "context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2, "embed_cls": True,
        "output_tokens": True,
    },
    "multimodal_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}  # fmt: skip


class Letters:
    """A tokenizer of at least 5 words: padding, the start, "a", "b", …, and the end."""

    def __init__(self, words: int = 5) -> None:
        self.end = words - 1
        self.words = "?<" + string.ascii_letters[: words - 3] + ">"

    def __call__(self, texts: list[str]) -> Tensor:
        rows = [[1, *map(self.words.index, text), self.end] for text in texts]
        return torch.tensor([[*row, *[0] * (8 - len(row))] for row in rows])

    def replace_length(self, context_length: int) -> "Letters":
        return self

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[id_] for id_ in ids)


def letters(feed: str, seed: int) -> CLIP:
    shape = Architecture(
        embed_dim=8,
        vision=VisionTower(image_size=16, patch_size=8, width=16, layers=1, heads=2),
        text=TextTower(width=16, layers=1, heads=2, context_length=8, vocab_size=5),
        decoder=Decoder(width=16, layers=1, heads=2, context_length=4, vocab_size=5, feed=feed),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIP(shape).initialize()
        assert model.text_decoder is not None
        model.text_decoder.text_projection.data *= 4
    model.tokenizer = Letters()  # type: ignore[assignment]
    return model.eval()


def images(count: int, size: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=random)


def next_logits(model: CLIP, seen: Tensor, rows: Tensor) -> Tensor:
    """Logits of the token after each row, computed from all its tokens."""
    decoder = model.text_decoder
    assert decoder is not None
    text = model.decoder_input(rows, lengths=[rows.shape[1]] * len(rows))
    x = decoder.embed(rows) if text is None else text.x
    return decoder.compute_hidden(seen, x, text=text)[:, -1] @ decoder.text_projection


class Recomputed(Prefixes):
    """Prefixes without a cache of keys and values."""

    def __init__(self, model: CLIP, seen: Tensor) -> None:
        super().__init__(model, seen)
        self.images = seen

    def extend(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        before = self.tokens if rows is None else self.tokens[rows]
        self.tokens = torch.cat([before, tokens], dim=1)
        seen = self.images.repeat_interleave(len(tokens) // len(self.images), dim=0)
        return next_logits(self._model, seen, self.tokens)


def next_words(model: CLIP, image: Tensor) -> dict[tuple[int, ...], list[float]]:
    """Log-probabilities of each next word, for every prefix of at most three words."""
    found: dict[tuple[int, ...], list[float]] = {}
    for length in range(4):
        beginnings = list(itertools.product(range(5), repeat=length))
        rows = torch.tensor([[1, *ids] for ids in beginnings])
        _, seen = model.image_tokens(image.expand(len(rows), -1, -1, -1))
        chances = next_logits(model, seen, rows).log_softmax(dim=-1)
        found |= dict(zip(beginnings, chances.tolist(), strict=True))
    return found


@pytest.mark.parametrize("feed", ["tokens", "text", "shared"])
@torch.no_grad()
def test_exhaustive_beam_search_finds_the_best_caption(feed: str) -> None:
    words = (0, 1, 2, 3)
    every = [(*some, 4) for length in range(4) for some in itertools.product(words, repeat=length)]
    every += list(itertools.product(words, repeat=4))  # truncated before an end
    for seed in range(4):
        model, shown = letters(feed, seed), images(3)
        found = generate_captions(model, shown, beams=300)
        greedy = generate_captions(model, shown)
        for image, caption, plain in zip(shown, found, greedy, strict=True):
            chances = next_words(model, image)
            means = {
                ids: sum(chances[ids[:place]][id_] for place, id_ in enumerate(ids)) / len(ids)
                for ids in every
            }
            best = max(every, key=means.__getitem__)
            assert caption == model.tokenizer.decode([one for one in best if one != 4])
            ids: tuple[int, ...] = ()
            while len(ids) < 4 and 4 not in ids:
                ids += (max(range(5), key=chances[ids].__getitem__),)
            assert plain == model.tokenizer.decode([id_ for id_ in ids if id_ != 4])


@torch.no_grad()
def test_nucleus_samples_have_correct_probabilities_in_any_batch() -> None:
    model, image = letters("tokens", 1), images(1)
    shown = image.expand(4000, -1, -1, -1)
    found = generate_captions(model, shown, top_p=0.8, length=1)
    chances = next_logits(model, model.image_tokens(image)[1], torch.tensor([[1]]))[0].softmax(-1)
    order = chances.argsort(descending=True).tolist()
    kept = [one for place, one in enumerate(order) if sum(chances[order[:place]].tolist()) < 0.8]
    for one in range(5):
        wanted = chances[one].item() / sum(chances[kept].tolist()) if one in kept else 0.0
        text = "" if one == 4 else model.tokenizer.decode([one])
        assert found.count(text) / 4000 == pytest.approx(wanted, abs=0.04)
    pieces = [
        generate_captions(model, shown[i : i + 500], top_p=0.8, length=1, rows=range(i, i + 500))
        for i in (0, 500)
    ]
    assert [*pieces[0], *pieces[1]] == found[:1000]
    assert generate_captions(model, shown[:100], top_p=0.8, length=1, seed=1) != found[:100]


@pytest.fixture(scope="module")
def random_models() -> dict[str, CLIP]:
    """Models in float64 for each feed, with two layers, and image tokens wider than the decoder."""
    found = {}
    for feed in ("tokens", "text", "shared"):
        shape = Architecture(
            embed_dim=8,
            vision=VisionTower(image_size=16, patch_size=8, width=24, layers=1, heads=2),
            text=TextTower(
                width=16, layers=2, heads=2, context_length=10, vocab_size=40, causal=feed != "shared"
            ),
            decoder=Decoder(width=16, layers=2, heads=2, context_length=9, vocab_size=40, feed=feed),
        )
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = CLIP(shape).initialize().double()
            for name, value in model.named_parameters():
                value.data += 0.1 * torch.randn(value.shape, dtype=torch.float64) * ("bias" in name)
                value.data *= 3 if "in_proj" in name else 1
        assert model.text_decoder is not None
        model.text_decoder.text_projection.data *= 4
        model.tokenizer = Letters(40)  # type: ignore[assignment]
        found[feed] = model.eval()
    return found


@given(
    feed=st.sampled_from(["tokens", "text", "shared"]),
    prefix=st.text(alphabet="ab", max_size=4),
    beams=st.integers(1, 6),
    top_p=st.sampled_from([0.0, 0.7, 1.0]),
    length=st.sampled_from([0, 6, 8]),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=30, deadline=None)
def test_captions_equal_those_without_cache(
    random_models: dict[str, CLIP], feed: str, prefix: str, beams: int, top_p: float, length: int, seed: int
) -> None:
    model, random = random_models[feed], torch.Generator().manual_seed(seed)
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=random)
    options: dict[str, Any] = {"prefix": prefix, "length": length, "seed": seed, "beams": beams}
    options |= {"top_p": top_p} if beams == 1 else {}
    found = generate_captions(model, pixels, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "Prefixes", Recomputed)
        assert generate_captions(model, pixels, **options) == found


@given(
    feed=st.sampled_from(["tokens", "text", "shared"]), seed=st.integers(0, 2**40), start=st.integers(1, 4)
)
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_cached_logits_equal_recomputed_ones_for_reordered_rows(
    random_models: dict[str, CLIP], feed: str, seed: int, start: int
) -> None:
    model, random = random_models[feed], torch.Generator().manual_seed(seed)
    _, seen = model.image_tokens(torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=random))
    kept, recomputed = Prefixes(model, seen), Recomputed(model, seen)
    tokens, rows, width = torch.randint(1, 40, (2, start), generator=random), None, 1
    for count in (3, 2, 5):
        logits = kept.extend(tokens, rows)
        assert logits.std() > 0.1
        torch.testing.assert_close(logits, recomputed.extend(tokens, rows), rtol=0, atol=1e-10)
        chosen = torch.randint(0, width, (2, count), generator=random)
        rows, width = (chosen + torch.tensor([[0], [width]])).flatten(), count
        tokens = torch.randint(1, 40, (2 * count, 1), generator=random)


@given(
    feed=st.sampled_from(["tokens", "text", "shared"]), seed=st.integers(0, 2**40), count=st.integers(1, 9)
)
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_caption_likelihoods_equal_those_of_single_captions(
    random_models: dict[str, CLIP], feed: str, seed: int, count: int
) -> None:
    model, random = random_models[feed], torch.Generator().manual_seed(seed)
    _, seen = model.image_tokens(torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=random))
    captions = torch.randint(1, 4, (count, 10), generator=random)  # few words, so that prefixes are shared
    captions[:, 0] = 1
    ends = torch.randint(1, 10, (count, 1), generator=random)
    captions.scatter_(1, ends, 39).masked_fill_(torch.arange(10) > ends, 0)
    found = caption_likelihoods(model, seen, captions)
    for image, own in zip(seen, found, strict=True):
        sums, _ = model.caption_nll(image.expand(count, -1, -1), captions)
        torch.testing.assert_close(own, -sums, rtol=0, atol=1e-10)


def test_captions_start_with_the_prefix_and_invalid_options_are_rejected() -> None:
    model, shown = letters("tokens", 2), images(2)
    assert all(caption.startswith("ab") for caption in generate_captions(model, shown, prefix="ab"))
    assert generate_captions(model, shown[:0]) == []
    with pytest.raises(DataError, match="the prefix has 4 tokens, but captions have at most 4 with the end"):
        generate_captions(model, shown, prefix="abab")
    for wrong in ({"beams": 0}, {"top_p": 1.5}, {"top_p": 0.5, "beams": 2}, {"length": -1}):
        with pytest.raises(ConfigError, match=r"is invalid|cannot be combined"):
            generate_captions(model, shown, **wrong)
    model.set_decoder(None)
    with pytest.raises(ConfigError, match=r"was trained without caption\.weight"):
        generate_captions(model, shown)


@pytest.fixture(scope="module")
def coca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with open_clip's CoCa, with random weights."""
    open_clip = pytest.importorskip("open_clip")
    folder = tmp_path_factory.mktemp("coca")
    model = open_clip.CoCa(**{key: value for key, value in COCA.items() if key != "custom_text"})
    random = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():  # open_clip leaves some uninitialized
        drawn = torch.randn(value.shape, generator=random)
        value.data = drawn * value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1 * drawn + ("ln_" in name)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    preprocess = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    content = {"model_cfg": COCA, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    return folder


@torch.no_grad()
def test_coca_is_loaded_and_exported_with_its_decoder(coca: Path, tmp_path: Path) -> None:
    import open_clip

    export(clipkit.load(coca), tmp_path / "out", to=["open_clip"])
    ours, again = clipkit.load(coca).double(), clipkit.load(tmp_path / "out").double()
    texts = ["a cat", "a photo of two dogs on a long road", "one"]
    tokens, shown = tokenize(texts, 12), images(3, 32)
    pixels = shown.double() / 255 * 2 - 1
    for folder in (coca, tmp_path / "out"):
        theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        theirs.double().eval()
        wanted = theirs(pixels, tokens)
        for model in (ours, again):
            lengths = (tokens.argmax(dim=-1) + 1).tolist()
            image, text, _, *read = model(shown, tokens, return_tokens=True)
            nll_sum = Caption().total(model, shown, read, captions=tokens, lengths=lengths)
            torch.testing.assert_close(image, wanted["image_features"], rtol=0, atol=1e-9)
            torch.testing.assert_close(text, wanted["text_features"], rtol=0, atol=1e-9)
            nll = -wanted["logits"].log_softmax(-1).gather(2, wanted["labels"][..., None])[..., 0]
            total = sum(row[: length - 1].sum() for row, length in zip(nll, lengths, strict=True))
            torch.testing.assert_close(nll_sum, total, rtol=1e-9, atol=1e-9)
            prefixes = Prefixes(model, model.image_tokens(shown)[1])
            for place in range(4):
                logits = prefixes.extend(tokens[:, place : place + 1])
                torch.testing.assert_close(logits, wanted["logits"][:, place], rtol=0, atol=1e-9)
    rows = torch.full((3, 1), START_OF_TEXT)
    for _ in range(11):  # open_clip's own loop needs a version of transformers with beam search classes
        rows = torch.cat([rows, theirs(pixels, rows, output_labels=False)["logits"][:, -1:].argmax(-1)], 1)
    captions = []
    for row in rows.tolist():
        ids = row[1 : row.index(END_OF_TEXT)] if END_OF_TEXT in row else row[1:]
        captions.append(" ".join(open_clip.decode(torch.tensor(ids)).split()) if ids else "")
    assert generate_captions(ours, shown, length=11) == captions


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_decode_equals_open_clip(text: str) -> None:
    import open_clip

    tokenizer = ClipTokenizer()
    row = tokenizer([text])[0]
    ids = row[1 : int(row.argmax())].tolist()
    assert tokenizer.decode(row.tolist()) == open_clip.tokenizer._tokenizer.decode(ids).rstrip(" ")
