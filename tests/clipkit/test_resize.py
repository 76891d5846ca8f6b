"""Another image size or text length of a model that is being trained."""

import copy

import pytest
import torch
from torch import nn

from clipkit.architectures import Architecture, BagOfWords, TextTower, TimmVision, VisionTower
from clipkit.errors import ConfigError
from clipkit.model import CLIP
from clipkit.resample import fit_moment, fit_positions, resize
from clipkit.text_input import ClipTokenizer
from clipkit.tokenizer import tokenize

PIXELS = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_live_model_is_as_one_that_is_loaded_at_the_size(tiny: CLIP) -> None:
    before = dict(tiny.named_parameters())
    shape = tiny.architecture.resized(image_size=48, context_length=20)
    other = CLIP(shape)
    wanted = {name: one.shape for name, one in other.state_dict().items()}
    other.load_state_dict(fit_positions(tiny.state_dict(), wanted))
    replaced = resize(tiny, image_size=48, context_length=20)
    assert replaced.keys() == {"visual.positional_embedding", "positional_embedding"}
    for name, parameter in tiny.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert (parameter is before[name]) == (name not in replaced)
    assert all(replaced[name] is before[name] for name in replaced)
    assert tiny.architecture == shape
    assert tiny.preprocess.image_size == 48
    assert isinstance(tiny.tokenizer, ClipTokenizer)
    assert tiny.tokenizer.context_length == 20
    assert tiny.state_dict().keys() == other.state_dict().keys()
    image, text, _ = tiny(PIXELS, tiny.tokenizer(["a cat", "word " * 50]))
    want_image, want_text, _ = other(PIXELS, tokenize(["a cat", "word " * 50], 20))
    assert torch.equal(image, want_image)
    assert torch.equal(text, want_text)
    torch.autograd.backward(image.sum() + text.sum())
    grown = tiny.get_parameter("visual.positional_embedding")
    assert grown.grad is not None and grown.grad.shape == (37, 64)
    assert replaced["visual.positional_embedding"].grad is None


def test_sizes_that_stay_change_nothing(tiny: CLIP) -> None:
    before = dict(tiny.named_parameters())
    assert resize(tiny) == {}
    assert resize(tiny, image_size=32, context_length=77) == {}
    assert all(one is before[name] for name, one in tiny.named_parameters())


def test_a_locked_embedding_stays_locked(tiny: CLIP) -> None:
    tiny.get_parameter("visual.positional_embedding").requires_grad_(False)
    resize(tiny, image_size=16)
    assert not tiny.get_parameter("visual.positional_embedding").requires_grad


def test_a_bag_of_words_only_gets_another_tokenizer() -> None:
    tower = VisionTower(image_size=16, patch_size=8, width=32, layers=1, heads=2)
    model = CLIP(Architecture(embed_dim=16, vision=tower, text=BagOfWords(width=16))).initialize()
    assert resize(model, context_length=9) == {}
    assert model.tokenizer(["word " * 50]).shape == (1, 9)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"image_size": 33}, "no multiple of patch_size"), ({"context_length": -1}, "context_length = -1")],
)
def test_a_size_that_cannot_be_leaves_the_model_as_it_was(
    tiny: CLIP, sizes: dict[str, int], message: str
) -> None:
    shape, state = tiny.architecture, copy.deepcopy(tiny.state_dict())
    with pytest.raises(ConfigError, match=message):
        resize(tiny, **sizes)
    assert tiny.architecture == shape
    assert all(torch.equal(value, state[name]) for name, value in tiny.state_dict().items())


def test_a_librarys_tower_is_refused() -> None:
    text = TextTower(width=32, layers=1, heads=2, vocab_size=64)
    model = CLIP(Architecture(embed_dim=16, vision=TimmVision(image_size=32, name="resnet10t"), text=text))
    with pytest.raises(ConfigError, match="only clipkit's own towers"):
        resize(model, image_size=64)


def test_moments_are_resampled_alike_and_squares_stay_positive(tiny: CLIP) -> None:
    """A step of AdamW after the change, with the state of the one before it."""
    optimizer = torch.optim.AdamW(tiny.parameters(), lr=1e-3)
    torch.autograd.backward(tiny.encode_image(PIXELS[:, :, :32, :32])[:, :5].sum())
    optimizer.step()
    name = "visual.positional_embedding"
    old = resize(tiny, image_size=48)[name]
    new, state = tiny.get_parameter(name), optimizer.state[old]
    average = fit_moment(name, state["exp_avg"], new.shape)
    squares = fit_moment(name, state["exp_avg_sq"], new.shape, least=0)
    assert average.shape == squares.shape == new.shape
    assert squares.min() >= 0
    assert torch.equal(average[0], state["exp_avg"][0])
    spike = torch.zeros_like(old)
    spike[6] = 1
    assert fit_moment(name, spike, new.shape).min() < 0 <= fit_moment(name, spike, new.shape, least=0).min()
    assert torch.equal(fit_moment("logit_scale", torch.ones(()), torch.Size([])), torch.ones(()))
