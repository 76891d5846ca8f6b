"""The configuration of a run: frozen dataclasses, checked when they are made; nothing here loads torch.

``clipkit.config_file`` reads and writes it. It never changes once it is read.
"""

from dataclasses import dataclass, field

from clipkit.errors import ConfigError
from clipkit.family import check_names

__all__ = [
    "CheckpointConfig", "Config", "DataConfig", "EvalConfig", "LogConfig", "ModelConfig", "OptimConfig",
    "require", "shown",
]  # fmt: skip


_MOST = 2**40  # more than any count here can mean, and yet a number that an index can be computed with
_SHOWN = 200  # characters of a value in a message
_PRECISIONS = ("auto", "fp32", "bf16")
_CAPTION_CHOICES = ("first", "random", "weighted", "all")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where its weights come from at the start."""

    name: str = "ViT-B-32"  # one of clipkit's, or open_clip:NAME
    image: str = ""  # another image tower: timm:NAME
    text: str = ""  # another text tower: cbow, or transformers:FOLDER or NAME
    image_size: int = 0  # side of the pictures in pixels; 0: the one that belongs to the name
    context_length: int = 0  # longest caption in tokens; 0: the one that belongs to the name
    weights: str = ""  # train on from these: whatever clipkit.load takes

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        require(self.image_size >= 0, "model.image_size", self.image_size, "at least 0")
        require(self.context_length >= 0, "model.context_length", self.context_length, "at least 0")

    @property
    def label(self) -> str:
        """What the model is called."""
        return " + ".join(filter(None, (self.name, self.image, self.text)))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on, and how it is read."""

    train: str | tuple[str, ...] = (
        "glyphs"  # built-in corpus, folder, tar, brace pattern, URL; one or several
    )
    weights: tuple[float, ...] = ()  # of each source, its share of every batch; empty: all sources are one
    captions: tuple[str, ...] = ("txt",)  # where captions are: the caption file, or fields of the json
    caption_choice: str = "first"  # first, random, weighted, or all: each a sample of its own
    caption_weights: tuple[float, ...] = ()  # of each of ``captions``, for weighted
    caption_templates: tuple[str, ...] = ()  # what a caption is written into, such as "a photo of {}"
    caption_prefix: str = ""  # what is written before each caption
    filters: tuple[str, ...] = ()  # conditions on fields of the json that all must hold: "width >= 256"
    last: str = "drop"  # an epoch's last samples that fill no batch: drop, or wrap into the next epoch
    resample: bool = False  # draw with replacement, as some recipes do, instead of each sample once an epoch
    cache_gb: float = 100.0  # how much of remote shards each machine keeps; 0 reads samples over the network
    workers: int = 2  # loader processes of each rank; 0 reads in the training process
    window: int = 64  # how many shards are mixed at a time
    crop_scale: float = 0.9  # smallest share of the area that a random crop keeps; 1 cuts the centre
    flip: float = 0.0  # probability of the mirror image
    color_jitter: float = (
        0.0  # largest relative change of brightness, contrast and saturation; a quarter of it of hue
    )
    grayscale: float = 0.0  # probability that a picture loses its colours
    scaled_decode: bool = False  # decode large JPEGs at a part of their size; changes values by 0.7 of 255
    nvjpeg: bool = False  # decode plain JPEGs on the GPU, through torchcodec; values differ by rounding
    # share of all samples drawn, again in each epoch, that may be bad before the run saves and stops; 0: none.
    # Of fewer than 1,000 it is a share of 1,000: 0.05 bears 50 bad ones at the start, as few are no measure
    max_bad: float = 0.05

    def __post_init__(self) -> None:
        require(bool(self.train) and all(self.sources), "data.train", self.train, "name at least one source")
        self._check_captions()
        require(self.last in ("drop", "wrap"), "data.last", self.last, "drop or wrap")
        require(0 <= self.cache_gb <= _MOST, "data.cache_gb", self.cache_gb, f"0 to {_MOST}")
        require(0 <= self.workers <= 512, "data.workers", self.workers, "0 to 512")
        require(1 <= self.window <= _MOST, "data.window", self.window, f"1 to {_MOST}")
        require(0 < self.crop_scale <= 1, "data.crop_scale", self.crop_scale, "above 0, at most 1")
        require(0 <= self.flip <= 1, "data.flip", self.flip, "0 to 1")
        require(0 <= self.color_jitter <= 2, "data.color_jitter", self.color_jitter, "0 to 2")
        require(0 <= self.grayscale <= 1, "data.grayscale", self.grayscale, "0 to 1")
        require(not (self.nvjpeg and self.scaled_decode), "data.nvjpeg", True, "not with data.scaled_decode")
        require(0 <= self.max_bad <= 1, "data.max_bad", self.max_bad, "0 to 1")

    def _check_captions(self) -> None:
        sources, places = len(self.sources), len(self.captions)
        for name, weights, of, count in (
            ("data.weights", self.weights, "data.train", sources),
            ("data.caption_weights", self.caption_weights, "data.captions", places),
        ):
            require(len(weights) in (0, count), name, weights, f"one for each of {of}: {count}")
            require(all(weight > 0 for weight in weights), name, weights, "each above 0")
        require(bool(self.captions) and all(self.captions), "data.captions", self.captions, "name some")
        choice = self.caption_choice
        require(choice in _CAPTION_CHOICES, "data.caption_choice", choice, ", ".join(_CAPTION_CHOICES))
        require(
            (choice == "weighted") == bool(self.caption_weights),
            "data.caption_weights",
            self.caption_weights,
            "there if and only if data.caption_choice is weighted",
        )
        for template in self.caption_templates:
            require("{}" in template, "data.caption_templates", template, "{} stands for the caption")

    @property
    def sources(self) -> tuple[str, ...]:
        """``train`` as a tuple, whichever way it was given."""
        return (self.train,) if isinstance(self.train, str) else self.train


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule: linear warm-up, half a cosine down to ``min_lr``."""

    lr: float = 5e-4
    min_lr: float = 0.0
    warmup: int = 2000  # steps
    weight_decay: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float = 1.0  # of the whole gradient; 0 does not clip

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "above 0")
        require(0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, "0 to optim.lr")
        require(self.warmup >= 0, "optim.warmup", self.warmup, "at least 0")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "at least 0")
        require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "0 up to 1")
        require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "0 up to 1")
        require(self.eps > 0, "optim.eps", self.eps, "above 0")
        require(self.clip_norm >= 0, "optim.clip_norm", self.clip_norm, "at least 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved; it is also saved at its end, and on Ctrl-C or SIGTERM."""

    every_steps: int = 1000  # 0: not by step
    every_minutes: float = 30.0  # 0: not by time
    keep: int = 3  # how many of the newest stay; 0 keeps all

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "at least 0")
        require(self.every_minutes >= 0, "checkpoint.every_minutes", self.every_minutes, "at least 0")
        require(self.keep >= 0, "checkpoint.keep", self.keep, "at least 0")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What the model is scored on while it trains and at the end."""

    data: tuple[str, ...] = ()  # built-in sets or dataset folders
    every_steps: int = 1000  # 0: only at the end
    batch_size: int = 256  # pictures encoded at a time on each rank

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "eval.every_steps", self.every_steps, "at least 0")
        require(1 <= self.batch_size <= _MOST, "eval.batch_size", self.batch_size, f"1 to {_MOST}")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where figures go besides the run folder's ``metrics.jsonl``."""

    every_steps: int = 10
    tensorboard: bool = True
    wandb: str = ""  # project name; WANDB_MODE=offline needs no account

    def __post_init__(self) -> None:
        require(self.every_steps >= 1, "log.every_steps", self.every_steps, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    out: str = ""  # run folder; empty: runs/<name of the config file>
    seed: int = 0
    steps: int = 10_000
    batch_size: int = 256  # pairs of a step over all ranks
    accumulate: int = (
        1  # parts that a rank's share of the batch is computed in; the loss stays that of the whole
    )
    precision: str = "auto"  # fp32, bf16, or auto: bf16 where a GPU has it
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require("\0" not in self.out, "out", self.out, "a path holds no NUL")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63")
        require(self.steps >= 1, "steps", self.steps, "at least 1")
        require(
            self.batch_size >= 2,
            "batch_size",
            self.batch_size,
            "at least 2: a pair needs another to be told from",
        )
        require(self.accumulate >= 1, "accumulate", self.accumulate, "at least 1")
        require(self.precision in _PRECISIONS, "precision", self.precision, " or ".join(_PRECISIONS))
        require(
            self.batch_size % self.accumulate == 0,
            "accumulate",
            self.accumulate,
            f"a divisor of batch_size = {self.batch_size}",
        )


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """ConfigError unless a setting's value is what is wanted."""
    if not holds:
        raise ConfigError(f"{name} = {shown(value)} does not fit: {wanted}")


def shown(value: object) -> str:
    """A value in a message; Python writes no number of over 4,300 digits, which TOML may hold as 0xff…"""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
