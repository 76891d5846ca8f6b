"""The configuration of a run: frozen dataclasses, checked when they are made; nothing here loads torch.

``clipkit.config_file`` reads and writes it. It never changes once it is read.
"""

from dataclasses import dataclass, field

from clipkit.errors import ConfigError
from clipkit.family import check_names

__all__ = [
    "CheckpointConfig", "Config", "DataConfig", "DistillConfig", "EvalConfig", "LockConfig", "LogConfig",
    "LossConfig", "ModelConfig", "OptimConfig", "SmallConfig", "require", "shown",
]  # fmt: skip


_MOST = 2**40  # more than any count here can mean, and yet a number that an index can be computed with
_SHOWN = 200  # characters of a value in a message
_PRECISIONS = ("auto", "fp32", "bf16")
_LOSSES = ("clip", "siglip")
_SAME = ("negatives", "positives", "ignored")
_SHARDINGS = ("none", "full", "hybrid")
_OPTIMIZERS = ("adamw", "stable_adamw", "lamb", "muon")
_SCHEDULES = ("cosine", "linear", "constant")
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
    patch_dropout: float = (
        0.0  # share of each picture's patches left out in training, others at each step (FLIP)
    )

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        require(self.image_size >= 0, "model.image_size", self.image_size, "at least 0")
        require(self.context_length >= 0, "model.context_length", self.context_length, "at least 0")
        require(0 <= self.patch_dropout < 1, "model.patch_dropout", self.patch_dropout, "0 up to 1")

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
class LossConfig:
    """What is minimized over the global batch, see clipkit/loss.py."""

    name: str = "clip"  # clip: softmax over all pairs of the batch; siglip: each pair by itself, with a bias
    same: str = (
        "negatives"  # other pairs of the batch with the same caption or picture: positives, or ignored
    )

    def __post_init__(self) -> None:
        require(self.name in _LOSSES, "loss.name", self.name, " or ".join(_LOSSES))
        require(self.same in _SAME, "loss.same", self.same, ", ".join(_SAME))


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """A teacher whose similarities in the batch are learned too, see ``clipkit.loss.distillation_loss``."""

    teacher: str = ""  # a model that encodes along: whatever clipkit.load takes
    features: str = ""  # or of its pictures what `clipkit encode` has stored of the training data,
    text_features: str = ""  # and of its captions what `clipkit encode --text` has
    scale: float = 100.0  # exp(t) of the model whose features are stored
    weight: float = 0.5  # share of the distillation in the loss

    def __post_init__(self) -> None:
        require(0 < self.weight <= 1, "distill.weight", self.weight, "above 0, at most 1")
        require(0 < self.scale <= 1e4, "distill.scale", self.scale, "above 0, at most 10,000")
        both = bool(self.features) == bool(self.text_features)
        require(both, "distill.text_features", self.text_features, "there if and only if distill.features is")
        require(
            not (self.teacher and self.features),
            "distill.features",
            self.features,
            "not with distill.teacher",
        )

    @property
    def wanted(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.features)


@dataclass(frozen=True, kw_only=True)
class LockConfig:
    """What is not trained, see clipkit/locking.py. The temperature always is."""

    image: str | int = ""  # "all" of the image tower (LiT), or all but so many of its top layers
    text: str | int = ""  # the same of the text tower
    unfreeze_every: int = (
        0  # steps until one layer more of each tower is trained, from the top; 0: all at once
    )

    def __post_init__(self) -> None:
        for name, value in (("lock.image", self.image), ("lock.text", self.text)):
            fits = value >= 0 if isinstance(value, int) else value in ("", "all")
            require(fits, name, value, 'empty, "all", or how many of the top layers are trained')
        require(self.unfreeze_every >= 0, "lock.unfreeze_every", self.unfreeze_every, "at least 0")


@dataclass(frozen=True, kw_only=True)
class SmallConfig:
    """Train small, finish large (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017)."""

    steps: int = 0  # so many of the first steps see smaller pictures and shorter captions
    image_size: int = 0  # side in pixels, then; 0: the model's own
    context_length: int = 0  # tokens, then; 0: the model's own

    def __post_init__(self) -> None:
        for name in ("steps", "image_size", "context_length"):
            require(getattr(self, name) >= 0, f"small.{name}", getattr(self, name), "at least 0")
        if self.steps:
            sizes = self.image_size or self.context_length
            require(
                bool(sizes), "small.steps", self.steps, "0, or with small.image_size or small.context_length"
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule: a linear warm-up, then down to ``min_lr``; see clipkit/optim.py."""

    name: str = "adamw"  # adamw, stable_adamw, lamb or muon
    lr: float = 5e-4
    min_lr: float = 0.0
    warmup: int = 2000  # steps
    schedule: str = "cosine"  # cosine, linear or constant
    cooldown: int = 0  # steps at the end in which a constant rate falls
    weight_decay: float = 0.2
    layer_decay: float = 1.0  # factor of the rate from each layer to the one below it
    image_lr_scale: float = 1.0  # factor of the image tower's rate
    text_lr_scale: float = 1.0  # factor of the text tower's rate
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float = 1.0  # of the whole gradient; 0 does not clip
    skip_above: float = 0.0  # leave an update out whose gradient is so many times the usual; 0: none
    average: float = (
        0.0  # decay of averaged weights, which are then scored and loaded; 0: none. 0.999 or more
    )

    def __post_init__(self) -> None:
        require(self.name in _OPTIMIZERS, "optim.name", self.name, ", ".join(_OPTIMIZERS))
        require(self.schedule in _SCHEDULES, "optim.schedule", self.schedule, ", ".join(_SCHEDULES))
        require(self.cooldown >= 0, "optim.cooldown", self.cooldown, "at least 0")
        constant = self.schedule == "constant" or not self.cooldown
        require(constant, "optim.cooldown", self.cooldown, "0, or with optim.schedule=constant")
        require(0 < self.layer_decay <= 1, "optim.layer_decay", self.layer_decay, "above 0, at most 1")
        for name in ("image_lr_scale", "text_lr_scale"):
            require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "at least 0")
        skips = self.skip_above == 0 or self.skip_above > 1
        require(skips, "optim.skip_above", self.skip_above, "0, or above 1")
        require(0 <= self.average < 1, "optim.average", self.average, "0 up to 1")
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
    sharding: str = "none"  # of a model too large for one GPU: full, over all; hybrid, over those of a host
    reshard: bool = True  # let shards of others go after the forward pass; false: faster, for more memory
    recompute: int = 0  # every so-manieth block is computed again in the backward pass, not kept; 0: none
    compile: bool = False  # blocks through torch.compile: faster steps after a minute or more at the start
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    small: SmallConfig = field(default_factory=SmallConfig)
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
        require(
            self.accumulate <= self.batch_size,
            "accumulate",
            self.accumulate,
            f"at most batch_size = {self.batch_size}",
        )
        require(self.precision in _PRECISIONS, "precision", self.precision, " or ".join(_PRECISIONS))
        require(self.sharding in _SHARDINGS, "sharding", self.sharding, ", ".join(_SHARDINGS))
        require(self.recompute >= 0, "recompute", self.recompute, "at least 0")
        # LAMB counts steps by group: a layer that joins later would begin without the correction of its averages
        counts_late = self.optim.name == "lamb" and self.lock.unfreeze_every > 0
        require(not counts_late, "lock.unfreeze_every", self.lock.unfreeze_every, "0 with optim.name=lamb")


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
