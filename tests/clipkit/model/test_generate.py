"""Generated captions: CoCa equals open_clip, a wide beam search finds the best caption, tokens decode to texts."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import Tensor

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.export import export
from clipkit.model.architectures import Architecture, Decoder, TextTower, VisionTower
from clipkit.model.clip import CLIP
from clipkit.model.generate import generate_captions
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT, ClipTokenizer, tokenize
from clipkit.objectives import TERMS

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
    """A tokenizer of V = 5 words: padding, the start, "a", "b" and the end."""

    def __call__(self, texts: list[str]) -> Tensor:
        rows = [[1, *("ab".index(one) + 2 for one in text), 4] for text in texts]
        return torch.tensor([[*row, *[0] * (8 - len(row))] for row in rows])

    def decode(self, ids: list[int]) -> str:
        return "".join("?<ab>"[one] for one in ids)


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


def next_words(model: CLIP, image: Tensor) -> dict[tuple[int, ...], list[float]]:
    """log p of each word after the start and each beginning of at most three words."""
    decoder = model.text_decoder
    found: dict[tuple[int, ...], list[float]] = {}
    assert decoder is not None
    for length in range(4):
        beginnings = list(itertools.product(range(5), repeat=length))
        rows = torch.tensor([[1, *ids] for ids in beginnings])
        _, seen = model.image_tokens(image.expand(len(rows), -1, -1, -1))
        text = model.decoder_input(rows, lengths=[length + 1] * len(rows))
        chances = decoder.next_logits(seen, rows, text).log_softmax(dim=-1)
        found |= dict(zip(beginnings, chances.tolist(), strict=True))
    return found


@pytest.mark.parametrize("feed", ["tokens", "text", "shared"])
@torch.no_grad()
def test_a_beam_search_of_all_hypotheses_finds_the_best_caption(feed: str) -> None:
    words = (0, 1, 2, 3)
    every = [(*some, 4) for length in range(4) for some in itertools.product(words, repeat=length)]
    every += list(itertools.product(words, repeat=4))  # cut before an end
    for seed in range(4):
        model, shown = letters(feed, seed), images(3)
        found = generate_captions(model, shown, beams=300)
        greedy = generate_captions(model, shown)
        for image, caption, plain in zip(shown, found, greedy, strict=True):
            chances = next_words(model, image)
            means = {
                ids: sum(chances[ids[:place]][one] for place, one in enumerate(ids)) / len(ids)
                for ids in every
            }
            best = max(every, key=means.__getitem__)
            assert caption == model.tokenizer.decode([one for one in best if one != 4])
            ids: tuple[int, ...] = ()
            while len(ids) < 4 and 4 not in ids:
                ids += (max(range(5), key=chances[ids].__getitem__),)
            assert plain == model.tokenizer.decode([one for one in ids if one != 4])


@torch.no_grad()
def test_samples_have_the_probabilities_of_the_nucleus_and_do_not_depend_on_the_batch() -> None:
    model, image = letters("tokens", 1), images(1)
    shown = image.expand(4000, -1, -1, -1)
    found = generate_captions(model, shown, top_p=0.8, length=1)
    assert model.text_decoder is not None
    chances = model.text_decoder.next_logits(model.image_tokens(image)[1], torch.tensor([[1]]))[0].softmax(-1)
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


def test_a_prefix_begins_the_caption() -> None:
    model, shown = letters("tokens", 2), images(2)
    assert all(one.startswith("ab") for one in generate_captions(model, shown, prefix="ab"))
    assert generate_captions(model, shown[:0]) == []
    with pytest.raises(DataError, match="the prefix has 4 tokens, but captions have at most 4 with the end"):
        generate_captions(model, shown, prefix="abab")
    for wrong in ({"beams": 0}, {"top_p": 1.5}, {"top_p": 0.5, "beams": 2}, {"length": -1}):
        with pytest.raises(ConfigError, match="is invalid"):
            generate_captions(model, shown, **wrong)
    model.set_decoder(None)
    with pytest.raises(ConfigError, match=r"was trained without caption\.weight"):
        generate_captions(model, shown)


@pytest.fixture(scope="module")
def coca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """open_clip's CoCa with random weights, as a folder."""
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
            image, text, _, sums = model(
                shown, tokens, terms={"caption": (TERMS["caption"], {"captions": tokens, "lengths": lengths})}
            )
            torch.testing.assert_close(image, wanted["image_features"], rtol=0, atol=1e-9)
            torch.testing.assert_close(text, wanted["text_features"], rtol=0, atol=1e-9)
            nll = -wanted["logits"].log_softmax(-1).gather(2, wanted["labels"][..., None])[..., 0]
            total = sum(row[: length - 1].sum() for row, length in zip(nll, lengths, strict=True))
            torch.testing.assert_close(sums[0], total, rtol=1e-9, atol=1e-9)
            decoder, seen = model.text_decoder, model.image_tokens(shown)[1]
            assert decoder is not None
            for length in (1, 4):
                read = model.decoder_input(tokens[:, :length], lengths=[length] * 3)
                logits = decoder.next_logits(seen, tokens[:, :length], read)
                torch.testing.assert_close(logits, wanted["logits"][:, length - 1], rtol=0, atol=1e-9)
    rows = torch.full((3, 1), START_OF_TEXT)
    for _ in range(11):  # open_clip's own loop needs a version of transformers with beam search classes
        rows = torch.cat([rows, theirs(pixels, rows, output_labels=False)["logits"][:, -1:].argmax(-1)], 1)
    captions = []
    for row in rows.tolist():
        ids = row[1 : row.index(END_OF_TEXT)] if END_OF_TEXT in row else row[1:]
        captions.append(" ".join(open_clip.decode(torch.tensor(ids)).split()) if ids else "")
    assert generate_captions(ours, shown, length=11) == captions


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_tokens_decode_to_the_text_as_in_open_clip(text: str) -> None:
    import open_clip

    tokenizer = ClipTokenizer()
    row = tokenizer([text])[0]
    ids = row[1 : int(row.argmax())].tolist()
    assert tokenizer.decode(row.tolist()) == open_clip.tokenizer._tokenizer.decode(ids).rstrip(" ")
