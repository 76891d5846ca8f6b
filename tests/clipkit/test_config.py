"""Tests of the configuration: TOML round trip, overrides, and error messages."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from clipkit.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LockConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    list_changes,
    load_config,
    to_toml,
)
from clipkit.errors import ConfigError
from clipkit.model.architectures import ARCHITECTURES

# all characters except surrogates, which cannot be encoded
text = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        '"',
        "'",
        "\\",
        "\n",
        '"""',
        "#",
        "a = 1",
        "\\u0041",
        "\x00",
        "\x7f",
        "\u2028",
        "é",
        "😀",
        "s3://b/{0..9}.tar",
    ]
)
some_text = text.filter(bool)
path = some_text.filter(lambda value: "\0" not in value)
whole = st.integers(0, 2**40)
share = st.floats(0, 1)
size = st.floats(0, 1e30)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    lr, min_lr = sorted([draw(size.filter(bool)), draw(size)], reverse=True)
    accumulate = draw(st.integers(1, 8))
    return Config(
        out=draw(path),
        seed=draw(st.integers(0, 2**63 - 1)),
        steps=draw(st.integers(1, 2**40)),
        batch_size=accumulate * draw(st.integers(2, 2**20)),
        accumulate=accumulate,
        precision=draw(st.sampled_from(["auto", "fp32", "bf16"])),
        model=ModelConfig(name=draw(st.sampled_from(sorted(ARCHITECTURES)))),
        data=DataConfig(
            train=draw(some_text | st.lists(some_text, min_size=1).map(tuple)),
            workers=draw(st.integers(0, 512)),
            window=draw(st.integers(1, 2**40)),
            crop_scale=draw(share.filter(bool)),
            crop_aspect=draw(st.floats(1, 100)),
            flip=draw(share),
            vertical_flip=draw(share),
            rotate90=draw(share),
            color_jitter=draw(share),
            grayscale=draw(share),
            blur=draw(share),
            max_bad=draw(share),
        ),
        optim=OptimConfig(
            lr=lr,
            min_lr=min_lr,
            warmup=draw(whole),
            weight_decay=draw(size),
            beta1=draw(st.floats(0, 1, exclude_max=True)),
            beta2=draw(st.floats(0, 1, exclude_max=True)),
            eps=draw(size.filter(bool)),
            clip_norm=draw(size),
        ),
        checkpoint=CheckpointConfig(every_steps=draw(whole), every_minutes=draw(size), keep=draw(whole)),
        eval=EvalConfig(
            data=draw(st.lists(text).map(tuple)), every_steps=draw(whole), batch_size=draw(whole.filter(bool))
        ),
        log=LogConfig(
            every_steps=draw(whole.filter(bool)), tensorboard=draw(st.booleans()), wandb=draw(text)
        ),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@settings(deadline=None)
@given(config=configs())
def test_written_configuration_reads_back_equal(folder: Path, config: Config) -> None:
    path = folder / "written.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config
    assert list_changes(config, load_config(path)) == []


def load(folder: Path, content: str, *overrides: str) -> Config:
    path = folder / "run.toml"
    path.write_text(content, encoding="utf-8")
    return load_config(path, overrides)


def test_precedence_is_overrides_then_file_then_defaults(folder: Path) -> None:
    config = load(
        folder, "steps = 7\nseed = 3\n[optim]\nlr = 1\n", "seed=4", "optim.lr=1e-3", "data.window=9"
    )
    assert (config.steps, config.seed, config.optim.lr, config.data.window) == (7, 4, 1e-3, 9)
    assert config.optim.beta2 == OptimConfig().beta2
    assert config.out == str(Path("runs") / "run")
    assert load(folder, "", "out=elsewhere").out == "elsewhere"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.train=glyphs", "glyphs"),
        ('data.train="glyphs"', "glyphs"),
        ("data.train=['a', 'b']", ("a", "b")),
        ("data.train=s3://bucket/{00000..41455}.tar", "s3://bucket/{00000..41455}.tar"),
        ("data.train=a=b", "a=b"),
        ("data.train=C:\\new\\table", "C:\\new\\table"),
        ("data.train=two\nlines = 1", "two\nlines = 1"),
        ("data.train='a'\nb = 1", "'a'\nb = 1"),
        ("data.train=2026-05-27", "2026-05-27"),
        ("data.train=" + "[" * 10_000, "[" * 10_000),
        ("data.crop_scale=1", 1.0),
        ("data.max_bad=.5", 0.5),
        ("data.max_bad=1.", 1.0),
        ("optim.lr=.5e-3", 5e-4),
        ("out=.5", ".5"),
        ("data.captions=alt", ("alt",)),
        ('data.captions=["a,b"]', ("a,b",)),
        ("data.filters=tag = a,b", ("tag = a,b",)),
        ("data.caption_templates=a {}, b", ("a {}, b",)),
        ("steps=1e4", 10_000),
        ("steps=20.0", 20),
        ("log.wandb=", ""),
        ("eval.data=digits", ("digits",)),
        ("eval.data=[]", ()),
        ("log.tensorboard=false", False),
        ("pixels.range=0,4095", "0,4095"),
        ("pixels.range=[0, 4095]", (0.0, 4095.0)),
        ("pixels.range=[[0, 1], [2, 3], [4, 5.5]]", ((0.0, 1.0), (2.0, 3.0), (4.0, 5.5))),
        ("pixels.mean=[0.1, 0.2, 0.3]", (0.1, 0.2, 0.3)),
    ],
)
def test_overrides_are_parsed_by_field_type(folder: Path, override: str, value: Any) -> None:
    config: Any = load(folder, "", override)
    for name in override.partition("=")[0].split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("data.negatives=wrong", "data.negatives = 'wrong'"),
        ("model.text=classes:x", "model.text = 'classes:x'"),
        ("distill.text_features=a distill.features=b", "distill.text_features = 'a'"),
        ("caption.weight=1", "data.text_dropout = 0.5"),
    ],
)
def test_text_dropout_refuses_what_needs_whole_texts(folder: Path, override: str, refused: str) -> None:
    load(folder, "", "data.text_dropout=0.5")
    with pytest.raises(ConfigError, match=f"^{refused} is invalid: cannot be combined with "):
        load(folder, "", "data.text_dropout=0.5", *override.split())
    with pytest.raises(
        ConfigError, match=r"data.text_dropout = 1.0 is invalid: expected at least 0 and below 1"
    ):
        load(folder, "", "data.text_dropout=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr is unknown: did you mean 'optim.lr'?"),
        ("lr=1", "lr is unknown: did you mean 'optim.lr'?"),
        ("train=x", "did you mean 'data.train'?"),
        ("checkpoints.every_step=1", "checkpoints.every_step is unknown: did you mean 'checkpoint.every_steps'?"),
        ("optm.lr=1", "optm.lr is unknown: did you mean 'optim.lr'?"),
        ("qqq=1", "qqq is unknown: `train.py --settings` lists"),
        ("steps.x=1", "steps = {'x': 1} is invalid: expected a whole number"),
        ("model=ViT-B-16", "model = 'ViT-B-16' is invalid: model is a section; set model.<name>"),
        ("optim.lr.x=1", "optim.lr"),
        ("steps", "is not of the form key=value"),
        ("=5", "is not of the form key=value"),
        ("model.name=ViT-B-23", "model.name = 'ViT-B-23' is unknown: did you mean 'ViT-B-32'?"),
        ("model.name=resnet", "known: ViT-B-16, ViT-B-16-quickgelu, ViT-B-32"),
        ("lock.image=some", "lock.image = 'some' is invalid: expected empty"),
        ("lock.text=1.5", "lock.text = 1.5 is invalid: expected"),
        ("lock.text=-1", "lock.text = -1 is invalid: expected empty"),
        ("precision=fp16", "precision = 'fp16' is invalid: expected auto, fp32 or bf16"),
        ("steps=true", "steps = True is invalid: expected a whole number"),
        ("steps=2.5", "steps = 2.5 is invalid: expected a whole number"),
        ("steps='5'", "steps = '5' is invalid: expected a whole number"),
        ("steps=5 steps", "steps = '5 steps' is invalid: expected a whole number"),
        ("steps=inf", "steps = inf is invalid: expected a finite number"),
        ("optim.lr=inf", "optim.lr = inf is invalid: expected a finite number"),
        ("optim.lr=nan", "optim.lr = nan is invalid: expected a finite number"),
        ("optim.lr=-nan", "optim.lr = nan is invalid: expected a finite number"),
        ("optim.lr=true", "optim.lr = True is invalid: expected a number"),
        ("optim.lr=1" + "0" * 400, "is invalid: expected a finite number"),
        ("optim.lr=1" + "0" * 5000, "is invalid: expected a number"),
        ("seed=1" + "0" * 400, "seed"),
        ("log.tensorboard=1", "log.tensorboard = 1 is invalid: expected true or false"),
        ("log.tensorboard=yes", "log.tensorboard = 'yes' is invalid: expected true or false"),
        ("out=5", "out = 5 is invalid: expected a string"),
        ("out=a\udcff", "is invalid: expected valid Unicode"),
        ("eval.data=['a\udcff']", "is invalid: expected valid Unicode"),
        ("data.train=[1]", "data.train = [1] is invalid: expected a string or a list of strings"),
        ("data.train=", "data.train = '' is invalid: expected at least one source"),
        ("data.train=[]", "data.train = [] is invalid: expected at least one source"),
        ("data.train=['']", 'data.train = [""] is invalid: expected at least one source'),
        ("optim.min_lr=1", "optim.min_lr = 1.0 is invalid: expected 0 to optim.lr"),
        ("optim.beta1=1", "optim.beta1 = 1.0 is invalid: expected at least 0 and below 1"),
        ("accumulate=257", "accumulate = 257 is invalid: expected at most batch_size = 256"),
        ("batch_size=1", "batch_size = 1 is invalid: expected at least 2"),
        ("seed=-1", "seed = -1 is invalid: expected 0 to 2^63"),
        ("data.crop_scale=0", "data.crop_scale = 0.0 is invalid: expected above 0, at most 1"),
        ("optim.skip_above=0.5", "optim.skip_above = 0.5 is invalid: expected 0, or above 1"),
        ("lock.text=-1", 'lock.text = -1 is invalid: expected empty, "all", "backbone", or the'),
        ("lock.text=some", "lock.text = 'some' is invalid: expected empty"),
        ("data.caption_choice=weighted", "data.caption_weights = [] is invalid: expected one for each of data.cap"),
        ("distill.features=a", "distill.text_features = '' is invalid: required by distill.features"),
        # settings without effect
        ("data.caption_weights=[1]", "has no effect unless data.caption_choice=weighted"),
        ("distill.text_features=a", "distill.text_features = 'a' has no effect unless dis"),
        ("distill.weight=0.3", "distill.weight = 0.3 has no effect unless distill.teacher or d"),
        ("distill.scale=5", "distill.scale = 5.0 has no effect unless distill.features is set"),
        ("reshard=false", "reshard = False has no effect unless sharding=full or shar"),
        ("small.image_size=8", "small.image_size = 8 has no effect unless small.steps"),
        ("small.context_length=8", "small.context_length = 8 has no effect unless small.steps"),
        ("small.steps=8", "small.steps = 8 has no effect unless small.image_size or small.conte"),
        ("optim.cooldown=8", "optim.cooldown = 8 has no effect unless optim.schedule=constant"),
        ("seed=0x" + "f" * 5000, "seed = a number with thousands of digits is invalid: expected a finite number"),
        ("data.train=[0x" + "f" * 5000 + "]", "data.train = a number with thousands of digits is invalid: "),
        ("out=0x" + "f" * 5000, "out = a number with thousands of digits is invalid: expected a finite number"),
        ("seed=1" + "0" * 5000, "00… is invalid: expected a whole number"),
        ("steps=1e20", "steps = 1e+20 is invalid: expected less than 2^63"),
        ("eval.batch_size=1e18", "eval.batch_size = 1000000000000000000 is invalid: expected 1 to 2^40"),
        ("data.window=1e18", "data.window = 1000000000000000000 is invalid: expected 1 to 2^40"),
        ("out=a\0b", "is invalid: a path cannot contain NUL"),
        (
            "data.weights=0.7, .3",
            "data.weights = '0.7, .3' is invalid: expected a list of numbers",
        ),
        ("data.caption_weights=1,a", "data.caption_weights = '1,a' is invalid: expected a list of numbers"),
        ("data.weights=[.7,.3]", "is not a list: write strings in quotes"),
        ("data.weights=[.7,.3]", "and numbers as 0.5"),
        ("data.max_bad=.", "data.max_bad = '.' is invalid: expected a number"),
        ("data.max_bad=.5x", "data.max_bad = '.5x' is invalid: expected a number"),
        ("pixels.range=[[0, 1], 2]", "[[0, 1], 2] is invalid: expected a string or a list of numbers"),
        ("pixels.range=[[0, 1], [2, 1], [0, 1]]", "is invalid: expected auto, dtype, or the values of"),
        ("pixels.range=[[0, 1], [1, 2]]", "is invalid: expected one for each of pixels.channels: 3"),
        ("pixels.mean=[0.1, 0.2]", "expected one for each of pixels.channels: 3"),
        ("pixels.std=[0.1, 0.2, 0]", "pixels.std = [0.1, 0.2, 0.0] is invalid: expected above 0"),
        ("pixels.extend=mean", "pixels.extend = 'mean' has no effect unless pixels.channels is set"),
        ("pixels.channels=0", "pixels.channels = 0 is invalid: expected 1 to 1024"),
    ],
)  # fmt: skip
def test_config_error_names_key_and_value(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, "", override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.color_jitter=0.1", "data.grayscale=0.1", "data.nvjpeg=true", "masked.weight=1",
        "pixels.background=white",
    ],
)  # fmt: skip
def test_settings_of_rgb_images_are_refused_for_other_channels(folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"pixels\.channels"):
        load(folder, "", "pixels.channels=12", override)


def test_former_names_of_settings_are_accepted(folder: Path) -> None:
    (folder / "old.toml").write_text(
        '[data]\nbackground = "white"\nupright = true\n[pixels]\nfraction = 0.15\n'
    )
    config = load_config(
        folder / "old.toml", ["data.pixel_range=0,4095", "pixels.weight=1", "model.image=pixels:S"]
    )
    assert (config.pixels.background, config.pixels.upright, config.pixels.range) == ("white", True, "0,4095")
    assert config.objectives["image_gpt"].weight == 1


def test_min_lr_of_a_constant_schedule_without_cooldown_is_rejected(folder: Path) -> None:
    constant = ("optim.min_lr=1e-6", "optim.schedule=constant")
    with pytest.raises(ConfigError, match=r"optim.min_lr = 1e-06 has no effect unless optim.cool"):
        load(folder, "", *constant)
    load(folder, "", *constant, "optim.cooldown=5")


@pytest.mark.parametrize(
    "content",
    [
        b"steps = ", b"steps = 1\nsteps = 2", b"\xff\xfe", b"seed = 1" + b"0" * 5000, b"out = " + b"[" * 10_000,
        b"[steps]\n", b"steps = 1970-01-01", b"[[optim]]\nlr = 1", b"data = 5", b"optim = [1]", b"out = '\x00'",
    ],
)  # fmt: skip
def test_broken_file_raises_config_error(folder: Path, content: bytes) -> None:
    path = folder / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_config(path)


def test_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "marked.toml").write_bytes(b"\xef\xbb\xbfseed = 7\n")
    assert load_config(folder / "marked.toml").seed == 7


def test_missing_file_raises_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(folder / "missing.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(folder)


def test_section_in_place_of_a_value_is_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr\.x is unknown: lr is not a section"):
        load(folder, "[optim]\nlr = 1e-3\n", "optim.lr.x=1")


def test_changes_lists_only_settings_that_must_not_change() -> None:
    before = Config()
    free = replace(
        before,
        out="elsewhere",
        steps=before.steps + 1,
        accumulate=2,
        data=replace(before.data, train="moved", workers=7, max_bad=0.5, cache_gb=1.0),
        checkpoint=CheckpointConfig(every_steps=1, every_minutes=1, keep=1),
        eval=EvalConfig(data=("digits",), every_steps=5, batch_size=8),
        log=LogConfig(every_steps=1, tensorboard=False, wandb="project"),
    )
    assert list_changes(before, free) == []
    other = replace(
        free,
        seed=1,
        data=replace(free.data, window=3),
        optim=replace(free.optim, lr=1e-3),
        model=ModelConfig(name="ViT-B-16"),
    )
    assert list_changes(before, other) == [
        "seed: 0 → 1",
        'model.name: "ViT-B-32" → "ViT-B-16"',
        "data.window: 64 → 3",
        "optim.lr: 0.0005 → 0.001",
    ]


def test_values_are_checked_in_the_constructor() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr = nan"):
        OptimConfig(lr=float("nan"))
    with pytest.raises(TypeError):
        Config("out")  # type: ignore[call-arg]
    for kind in (Config, DataConfig, OptimConfig, ModelConfig, CheckpointConfig, EvalConfig, LogConfig):
        with pytest.raises(AttributeError):
            setattr(kind(), fields(kind)[0].name, None)


def test_lamb_rejects_unfreezing() -> None:
    with pytest.raises(
        ConfigError, match=r"lock.unfreeze_every = 2 is invalid: expected 0 with optim.name=lamb"
    ):
        Config(optim=OptimConfig(name="lamb"), lock=LockConfig(unfreeze_every=2))
    with pytest.raises(ConfigError, match=r"lock.text_until = 3 is invalid: expected 0 with optim.name=lamb"):
        Config(optim=OptimConfig(name="lamb"), lock=LockConfig(text_until=3))
    with pytest.raises(ConfigError, match=r"lock.image_until = 3 .* has no effect with lock.image=all"):
        LockConfig(image="all", image_until=3)


def test_list_without_quotes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"is not a list: write strings in quotes"):
        load_config(path, ["data.train=[glyphs, digits]"])
    assert load_config(path, ['data.train=["glyphs", "digits"]']).data.train == ("glyphs", "digits")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps=5", "seed=1", "steps=7"], "steps is given twice: '5' and '7'; remove one"),
        (["log.wandb=", "log.wandb=a"], "log.wandb is given twice: '' and 'a'; remove one"),
        (["qqq=1", " qqq =1"], "qqq is given twice: '1' and '1'; remove one"),
        (
            ["data.filters=width >= 1", "data.filters=height >= 1"],
            (
                "data.filters is given twice: 'width >= 1' and 'height >= 1'; "
                'pass one list, data.filters=\'["a","b"]\''
            ),
        ),
        (
            ["model.weights=https://user:secret@host/a", "model.weights=b"],
            "model.weights is given twice: 'https://host/a' and 'b'; remove one",
        ),
        (
            ["data.train=a.tar", "data.train=b.tar"],
            (
                "data.train is given twice: quote brace patterns to prevent shell expansion, "
                'and write several sources as data.train=\'["a","b"]\''
            ),
        ),
    ],
)
def test_duplicate_override_is_rejected(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, "steps = 3\n", *overrides)
    assert str(caught.value) == message
