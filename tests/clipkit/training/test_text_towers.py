"""Tests of the check before training that a library's tokenizer and text tower belong together."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clipkit
from clipkit.config import Config, LossConfig, ModelConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import export
from clipkit.formats.checkpoint import save_model
from clipkit.model.architectures import TextTower
from clipkit.model.clip import CLIP, create
from clipkit.model.library_towers import TransformersText, describe_encoder
from clipkit.model.names import from_open_clip
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.training.build import check_texts, first_model, shape_of
from tests.clipkit.stored_models import TEXT, VIT, write_word_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def write_encoder(folder: Path, kind: str = "Bert", tokenizer: Any = None, **config: Any) -> None:
    """Write a tokenizer of 13 words and the configuration of an encoder that fits it, with changes to both."""
    import transformers

    write_word_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text()) | (tokenizer or {})
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    sizes = {"vocab_size": 13, "pad_token_id": 0, "max_position_embeddings": 24, **SIZES}
    getattr(transformers, f"{kind}Config")(**{**sizes, **config}).save_pretrained(folder)


def make_model(folder: Path, context_length: int = 16) -> CLIP:
    config = ModelConfig(name="ViT-Ti-4-16", text=f"transformers:{folder}", context_length=context_length)
    return first_model(Config(model=config), shape_of(config, LossConfig(), SmallConfig()))


@pytest.mark.parametrize(
    ("kind", "tokenizer", "config"),
    [
        ("Bert", {}, {}),
        ("Bert", {"pad_token": "</s>"}, {"pad_token_id": 2}),  # the end of text
        ("Bert", {}, {"vocab_size": 99, "max_position_embeddings": 16}),
        ("Bert", {}, {"hidden_dropout_prob": 0.5}),
        ("Bert", {"padding_side": "left"}, {"max_position_embeddings": 16, "position_embedding_type": "x"}),
        ("Roberta", {}, {"max_position_embeddings": 17}),
        ("XLMRoberta", {"pad_token": "<unk>"}, {"pad_token_id": 3}),
    ],
)
def test_fitting_encoders_are_accepted(kind: str, tokenizer: Any, config: Any, tmp_path: Path) -> None:
    write_encoder(tmp_path, kind, tokenizer, **config)
    state = torch.get_rng_state()
    model = make_model(tmp_path)
    assert model.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "tokenizer", "config", "message"),
    [
        ("Bert", {"pad_token": None}, {}, "the tokenizer in {folder} has no padding token: add pad_token"),
        ("Bert", {}, {"vocab_size": 10}, "{called}: the tokenizer has 13 tokens and the text tower .* only 10: "),
        (
            "Bert", {"extra_special_tokens": ["<new>"]}, {},
            "{called}: the tokenizer has 14 tokens and the text tower .* only 13: ",
        ),
        ("Bert", {}, {"max_position_embeddings": 15}, "{called} cannot encode a text of 16 tokens"),
        ("Roberta", {}, {"max_position_embeddings": 16}, "{called} cannot encode a text of 16 tokens"),
        ("Bert", {}, {"pad_token_id": 9}, "{called}: the features of a text depend on the padding"),
        ("Bert", {}, {"pad_token_id": None}, "{called}: the features of a text depend on the padding"),
        ("Bert", {"pad_token": "</s>"}, {}, "{called}: the features of a text depend on the padding"),
        ("Bert", {"pad_token": "a", "bos_token": "a", "eos_token": "a"}, {"pad_token_id": 4}, ""),
    ],
)  # fmt: skip
def test_encoders_that_do_not_fit_are_refused(
    kind: str, tokenizer: Any, config: Any, message: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path, kind, tokenizer, **config)
    if not message:  # all tokens of the text are padding
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
        message = "{called}: the features of a text are NaN"
    pattern = message.format(folder=tmp_path, called=f"model.text = 'transformers:{tmp_path}'")
    with pytest.raises(ConfigError, match=f"^{pattern}") as caught:
        make_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers would build a tokenizer without words from config.json."""
    write_encoder(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).unlink()
    with pytest.raises(ConfigError, match=f"^{tmp_path} has no tokenizer: copy tokenizer.json") as caught:
        make_model(tmp_path)
    assert "\n" not in str(caught.value)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize(
    ("vocabulary", "counts"),
    [
        (None, "5 tokens, 0 of them words"),
        (SPECIAL, "5 tokens, 0 of them words"),
        ([*SPECIAL, "RED", "HAT"], "7 tokens, 2 of them words"),  # Bert's tokenizer makes texts lower case
        ([*SPECIAL, "red", "hat"], ""),
    ],
)
def test_tokenizer_that_encodes_all_words_alike_is_refused(
    vocabulary: list[str] | None, counts: str, tmp_path: Path
) -> None:
    write_encoder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if vocabulary is not None:
        (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    if not counts:
        assert make_model(tmp_path).tokenizer.vocab_size == 7
        return
    pattern = rf"^the tokenizer in {tmp_path} encodes all words alike \({counts}\): use"
    with pytest.raises(ConfigError, match=pattern) as caught:
        make_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_clips_tokenizer_needs_its_vocabulary() -> None:
    """An open_clip configuration may have a smaller one."""
    text = {**TEXT, "vocab_size": 300}
    model = create(from_open_clip({"embed_dim": 32, "vision_cfg": VIT, "text_cfg": text}), seed=0)
    assert isinstance(model.architecture.text, TextTower) and isinstance(model.tokenizer, ClipTokenizer)
    with pytest.raises(ConfigError, match=r"the tokenizer has 49,408 tokens and the text tower .* only 300"):
        check_texts(model, called="model.weights = 'x'")


def write_weights(folder: Path, kind: str, **config: Any) -> Any:
    """Write an encoder with random weights and its tokenizer; return the encoder."""
    import transformers

    write_encoder(folder, kind, initializer_range=0.5, **config)  # so that features depend on the text
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        encoder = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    encoder.save_pretrained(folder)
    return encoder.eval()


def begin(folder: Path, weights: str = "transformers", **options: str) -> CLIP:
    text_options = json.dumps(options) if options else ""
    model = ModelConfig(
        name="ViT-Ti-4-16",
        text=f"transformers:{folder}",
        text_weights=weights,
        text_options=text_options,
        context_length=16,
    )
    return first_model(Config(model=model), shape_of(model, LossConfig(), SmallConfig())).eval()


TEXTS = ["a", "a b c", "the a b c d e"]


def pooling_of(model: CLIP) -> str:
    text = model.architecture.text
    assert isinstance(text, TransformersText)
    return text.pooling


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "pooler"])
@pytest.mark.parametrize("projection", ["linear", "mlp"])
def test_features_of_pretrained_encoders_equal_transformers(
    pooling: str, projection: str, tmp_path: Path
) -> None:
    theirs = write_weights(tmp_path, "Bert")
    model = begin(tmp_path, pooling=pooling, projection=projection)
    tower: Any = model.text
    tokens = model.tokenizer(TEXTS)
    mask = (tokens != 0).long()
    with torch.no_grad():
        output = theirs(input_ids=tokens, attention_mask=mask)
        hidden = output.last_hidden_state  # (3, L, 32)
        pooled = {
            "mean": (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True),
            "cls": hidden[:, 0],
            "last": hidden[torch.arange(3), mask.sum(dim=1) - 1],
            "pooler": output.pooler_output,
        }[pooling]
        assert torch.allclose(tower(tokens), tower.proj(pooled), atol=1e-6)
        features = model.encode_text(tokens)
    assert features.std(dim=0).min() > 1e-3  # the texts differ


def test_pooling_of_sentence_transformers_is_the_default(tmp_path: Path) -> None:
    write_weights(tmp_path, "Bert")
    assert pooling_of(begin(tmp_path)) == "mean"
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    modes = {
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": False,
    }
    for mode, pooling in zip(modes, ("cls", "mean", "last"), strict=True):
        file.write_text(json.dumps({"word_embedding_dimension": 32, **modes, mode: True}))
        assert pooling_of(begin(tmp_path)) == pooling
    assert pooling_of(begin(tmp_path, pooling="pooler")) == "pooler"
    file.write_text(json.dumps({**modes, "pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="states the pooling pooling_mode_max_tokens, which clipkit lacks"):
        begin(tmp_path)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_weights_of_a_language_model_lose_only_its_head(kind: str, tmp_path: Path) -> None:
    """Published encoders are often stored with the head of their pretraining, under a prefix."""
    import transformers

    encoder = write_weights(tmp_path / "encoder", kind)
    masked = getattr(transformers, f"{kind}ForMaskedLM")(encoder.config)
    masked.base_model.load_state_dict(encoder.state_dict(), strict=False)
    masked.save_pretrained(tmp_path / "masked")
    for weights in (tmp_path / "masked", tmp_path / "masked" / "model.safetensors"):
        tower: Any = begin(tmp_path / "encoder", str(weights)).text
        for name, value in tower.transformer.state_dict().items():
            assert torch.equal(value, encoder.state_dict()[name]), name


def test_encoder_without_a_pooler_is_refused(tmp_path: Path) -> None:
    write_weights(
        tmp_path, "GPT2", n_embd=32, n_layer=1, n_head=2, n_positions=24, bos_token_id=1, eos_token_id=2
    )
    assert pooling_of(begin(tmp_path, pooling="last")) == "last"
    with pytest.raises(ConfigError, match="has no pooler: choose another pooling"):
        begin(tmp_path, pooling="pooler")


def test_encoder_of_a_model_with_a_decoder_is_used_alone(tmp_path: Path) -> None:
    """transformers states is_encoder_decoder = false for a T5 encoder, and builds the decoder nevertheless."""
    import transformers

    write_encoder(tmp_path, "T5", d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    config = transformers.T5Config.from_pretrained(tmp_path)
    encoder = transformers.T5EncoderModel(config)
    encoder.save_pretrained(tmp_path)
    tower: Any = begin(tmp_path).text
    stored = encoder.encoder.state_dict()
    assert not any("decoder" in name for name in tower.state_dict())
    for name, value in tower.transformer.state_dict().items():
        assert torch.equal(value, stored[name]), name


def test_other_weights_are_refused_with_one_line(tmp_path: Path) -> None:
    write_weights(tmp_path / "small", "Bert")
    write_weights(tmp_path / "wide", "Bert", hidden_size=64)
    write_weights(tmp_path / "deep", "Bert", num_hidden_layers=2)
    (tmp_path / "empty").mkdir()
    for encoder, weights, message in (
        ("small", "wide", "tensors missing or of another size, such as embeddings.LayerNorm.bias"),
        ("deep", "small", r"16 tensors missing or of another size, such as encoder\.layer\.1"),
        ("small", "empty", "has no weights: expected"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            begin(tmp_path / encoder, str(tmp_path / weights))
        assert "\n" not in str(caught.value) and "model.text_weights = " in str(caught.value)
    with pytest.raises(ConfigError, match="projection = 'deep' is unknown"):
        begin(tmp_path / "small", projection="deep")
    with pytest.raises(ConfigError, match="text option 'pool' is unknown: known are"):
        begin(tmp_path / "small", pool="cls")
    with pytest.raises(
        ConfigError, match=r"model\.text_weights = 'transformers' has no effect unless model\.text"
    ):
        ModelConfig(text_weights="transformers")
    with pytest.raises(ConfigError, match=r"text_options require model\.text"):
        shape_of(ModelConfig(text_options='{"pooling": "cls"}'), LossConfig(), SmallConfig())


@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
@pytest.mark.parametrize(
    ("pooling", "projection"), [("mean", "linear"), ("cls", "mlp"), ("pooler", "linear")]
)
def test_pretrained_encoders_are_exported_to_open_clip(pooling: str, projection: str, tmp_path: Path) -> None:
    write_weights(tmp_path / "encoder", "Bert")
    model = begin(tmp_path / "encoder", pooling=pooling, projection=projection)
    export(model, tmp_path / "export", to=["open_clip"])  # compares embeddings with open_clip's
    card = (tmp_path / "export" / "README.md").read_text()
    assert "after moving the export, set hf_model_name in open_clip_config.json" in " ".join(card.split())
    assert str(tmp_path) not in card
    again = clipkit.load(tmp_path / "export")
    assert pooling_of(again) == pooling
    assert torch.equal(clipkit.encode_text(TEXTS, again), clipkit.encode_text(TEXTS, model))


@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
def test_exports_contain_the_encoder_of_a_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    write_weights(Path("encoder"), "Bert")  # a relative path
    save_model(begin(Path("encoder"), pooling="cls"), tmp_path / "model")
    model = clipkit.load(tmp_path / "model")
    expected = clipkit.encode_text(TEXTS, model)
    export(model, Path("modèle"), to=["open_clip"])
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    config = json.loads((tmp_path / "modèle" / "open_clip_config.json").read_text())
    assert config["model_cfg"]["text_cfg"]["hf_model_name"] == str(tmp_path / "modèle" / "text_encoder")
    source = f"local-dir:{tmp_path / 'modèle'}"
    theirs = open_clip.create_model(source).eval()
    with torch.no_grad():
        features = theirs.encode_text(open_clip.get_tokenizer(source)(TEXTS), normalize=True)
    assert torch.allclose(features, expected, atol=1e-5)
    (tmp_path / "modèle").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    again = clipkit.load(tmp_path / "moved")
    assert torch.equal(clipkit.encode_text(TEXTS, again), expected)
    export(again, tmp_path / "second", to=["open_clip"])
    config["model_cfg"]["text_cfg"]["hf_model_name"] = str(tmp_path / "second" / "text_encoder")
    stored = json.loads((tmp_path / "second" / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "second"
    assert stored == config


def test_exports_name_an_encoder_of_the_hub(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    text = replace(describe_encoder(str(tmp_path)), model="somebody/bert")
    assert text.local_config is None and text.open_clip_config()["hf_model_name"] == "somebody/bert"
    assert replace(text, model=str(tmp_path / "gone")).local_config == text.config


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_image_tower_of_a_clip_beside_a_pretrained_encoder(quick_gelu: bool, tmp_path: Path) -> None:
    """The file of weights does not record the architecture, which is that of ``model.name``."""
    theirs = write_weights(tmp_path / "bert", "Bert")
    name = "ViT-Ti-4-16" + "-quickgelu" * quick_gelu
    clip = create(name, seed=3)
    torch.save({"state_dict": clip.state_dict()}, tmp_path / "clip.pt")
    config = ModelConfig(
        name=name,
        weights=str(tmp_path / "clip.pt"),
        new_head=True,
        text=f"transformers:{tmp_path / 'bert'}",
        text_weights="transformers",
        context_length=16,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the preprocessing is assumed
        model = first_model(Config(model=config), shape_of(config, LossConfig(), SmallConfig())).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.visual(images), clip.eval().visual(images))
    state = theirs.state_dict()
    assert model.text is not None
    ours = {name.removeprefix("transformer."): value for name, value in model.text.state_dict().items()}
    assert all(torch.equal(value, state[name]) for name, value in ours.items() if name in state)
    assert len(ours.keys() & state.keys()) > 10
