"""The configuration of a run: frozen dataclasses, checked when they are made; nothing here loads torch.

Each setting is explained here and nowhere else (``data`` in clipkit/data_config.py): ``train.py --settings`` prints
it. ``clipkit.config_file`` reads and writes configurations. One never changes once it is read.
"""

from dataclasses import dataclass, field

from clipkit.data_config import DataConfig
from clipkit.family import check_names
from clipkit.setting import (
    MOST,
    Within,
    above,
    at_least,
    between,
    check,
    default_of,
    one_of,
    require,
    require_use,
    setting,
)

__all__ = [
    "CheckpointConfig", "Config", "DataConfig", "DistillConfig", "EvalConfig", "LockConfig", "LogConfig",
    "LossConfig", "ModelConfig", "OptimConfig", "SmallConfig",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where its weights come from at the start."""

    name: str = setting("ViT-B-32", "One of clipkit's, such as ViT-B-32 or ViT-L-14, or open_clip:NAME.")
    image: str = setting("", "Another image tower: timm:NAME.")
    text: str = setting(
        "",
        "Another text tower: cbow, or transformers:FOLDER or NAME; or classes:FILE, a classifier's head with a "
        "row for each line of a file of class names, for loss.name=classes.",
    )
    image_size: int = setting(
        0, "Side of the pictures in pixels; 0: the one that belongs to the name.", at_least(0)
    )
    context_length: int = setting(
        0, "Longest caption in tokens; 0: the one that belongs to the name.", at_least(0)
    )
    weights: str = setting(
        "", "Train on from these: whatever clipkit.load takes, such as another run's folder."
    )
    patch_dropout: float = setting(
        0.0,
        "Share of each picture's patches that is left out in training, others at each step (FLIP).",
        between(0, 1, below=True),
    )

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        check(self, "model.")

    @property
    def label(self) -> str:
        """What the model is called."""
        # of a head of classes not the folder in which the names lie
        text = "classes" if self.text.startswith("classes:") else self.text
        return " + ".join(filter(None, (self.name, self.image, text)))


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimized over the global batch, see clipkit/loss.py."""

    name: str = setting(
        "clip",
        "clip: softmax over all pairs of the batch. siglip: each picture with each text by itself, with a bias; "
        "its loss begins near 10, far above chance, as the bias begins at -10. classes: softmax over all classes "
        "of model.text=classes:FILE, whose names are the captions.",
        one_of("clip", "siglip", "classes"),
    )
    same: str = setting(
        "negatives",
        "What other pairs of the batch with the same caption or picture are. With positives the loss cannot fall "
        "to 0, and of a model that is sure of itself it may lie above chance.",
        one_of("negatives", "positives", "ignored"),
    )

    def __post_init__(self) -> None:
        check(self, "loss.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """A teacher whose similarities in the batch are learned too."""

    teacher: str = setting("", "A model that encodes along: whatever clipkit.load takes.")
    features: str = setting(
        "", "Instead, the folder of what `clipkit encode` has stored of the training pictures by a teacher."
    )
    text_features: str = setting(
        "", "With distill.features, what `clipkit encode --text` has stored of the captions."
    )
    scale: float = setting(
        100.0,
        "The teacher's exp(t), which its similarities are multiplied by, where its features are stored.",
        above(0, at_most=10_000),
    )
    weight: float = setting(
        0.5, "Share of the distillation in the loss; the rest is loss.name's.", above(0, at_most=1)
    )

    def __post_init__(self) -> None:
        check(self, "distill.")
        if self.features and not self.text_features:
            require(False, "distill.text_features", "", "distill.features needs it too")
        if self.text_features:
            require_use("distill.text_features", self.text_features, "distill.features", bool(self.features))
        both = bool(self.teacher and self.features)
        require(not both, "distill.features", self.features, "not with distill.teacher")
        if self.weight != default_of(DistillConfig, "weight"):
            where = "distill.teacher or distill.features"
            require_use("distill.weight", self.weight, where, self.wanted)
        if self.scale != default_of(DistillConfig, "scale"):
            require_use("distill.scale", self.scale, "distill.features", bool(self.features))

    @property
    def wanted(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.features)


_LOCKS = Within(
    words='empty, "all", or how many of the top layers are trained',
    holds=lambda value: value >= 0 if isinstance(value, int) else value in ("", "all"),
)


@dataclass(frozen=True, kw_only=True)
class LockConfig:
    """What is not trained, see clipkit/locking.py. The temperature always is."""

    image: str | int = setting(
        "",
        '"all" locks the image tower (LiT), a number all but so many of its top layers. The first of them is the '
        "projection with the last norm, then come the blocks from the last one down, then the embeddings.",
        _LOCKS,
    )
    text: str | int = setting("", "The same of the text tower.", _LOCKS)
    unfreeze_every: int = setting(
        0,
        "Steps until one layer more of each tower is trained, from the top; 0: all from the start.",
        at_least(0),
    )

    def __post_init__(self) -> None:
        check(self, "lock.")


@dataclass(frozen=True, kw_only=True)
class SmallConfig:
    """Train small, finish large (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017)."""

    steps: int = setting(
        0, "So many of the first steps see smaller pictures or shorter captions.", at_least(0)
    )
    image_size: int = setting(0, "Side of the pictures in pixels, then; 0: the model's own.", at_least(0))
    context_length: int = setting(0, "Longest caption in tokens, then; 0: the model's own.", at_least(0))

    def __post_init__(self) -> None:
        check(self, "small.")
        if self.steps:
            sizes = "small.image_size or small.context_length"
            require_use("small.steps", self.steps, sizes, bool(self.image_size or self.context_length))
        for name, size in (("image_size", self.image_size), ("context_length", self.context_length)):
            if size:
                require_use(f"small.{name}", size, "small.steps", bool(self.steps))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule: a linear warm-up, then down to optim.min_lr."""

    name: str = setting("adamw", "The optimizer.", one_of("adamw", "stable_adamw", "lamb", "muon"))
    lr: float = setting(5e-4, "The highest learning rate, which the warm-up ends at.", above(0))
    min_lr: float = setting(
        0.0, "The learning rate that the schedule ends at; at most optim.lr.", at_least(0)
    )
    warmup: int = setting(2000, "Steps in which the rate rises to optim.lr.", at_least(0))
    schedule: str = setting(
        "cosine", "How the rate falls after the warm-up.", one_of("cosine", "linear", "constant")
    )
    cooldown: int = setting(
        0, "Steps at the end in which a rate of optim.schedule=constant falls.", at_least(0)
    )
    weight_decay: float = setting(
        0.2,
        "Decoupled weight decay; of matrices alone, not of biases, gains and the temperature.",
        at_least(0),
    )
    layer_decay: float = setting(
        1.0, "Factor of the rate from each layer to the one below it.", above(0, at_most=1)
    )
    image_lr_scale: float = setting(1.0, "Factor of the image tower's rate.", at_least(0))
    text_lr_scale: float = setting(1.0, "Factor of the text tower's rate.", at_least(0))
    beta1: float = setting(
        0.9, "Decay of the optimizer's mean of the gradients (momentum).", between(0, 1, below=True)
    )
    beta2: float = setting(0.98, "Decay of the optimizer's mean of their squares.", between(0, 1, below=True))
    eps: float = setting(1e-6, "Added to the root of that mean, so that nothing is divided by 0.", above(0))
    clip_norm: float = setting(
        1.0, "Largest norm of the whole gradient, which is scaled down to it; 0 does not clip.", at_least(0)
    )
    skip_above: float = setting(
        0.0,
        "Leave an update out whose gradient is so many times the usual one; 0: none.",
        Within(words="0, or above 1", holds=lambda value: value == 0 or value > 1),
    )
    average: float = setting(
        0.0,
        "Decay of averaged weights, which are then scored and loaded; 0: none. Of the last 1 / (1 - decay) steps "
        "or so: 0.9999 for a long run, 0.99 for one of hundreds of steps.",
        between(0, 1, below=True),
    )

    def __post_init__(self) -> None:
        check(self, "optim.")
        require(self.min_lr <= self.lr, "optim.min_lr", self.min_lr, "0 to optim.lr")
        if self.min_lr and self.schedule == "constant":
            require_use(
                "optim.min_lr", self.min_lr, "optim.cooldown or a schedule that falls", self.cooldown > 0
            )
        if self.cooldown:
            constant = self.schedule == "constant"
            require_use("optim.cooldown", self.cooldown, "optim.schedule=constant", constant)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved; it is also saved at its end, and on Ctrl-C or SIGTERM."""

    every_steps: int = setting(1000, "Steps between two checkpoints; 0: not by step.", at_least(0))
    every_minutes: float = setting(
        30.0, "Minutes after which a checkpoint is due, whatever the step; 0: not by time.", at_least(0)
    )
    keep: int = setting(3, "How many of the newest checkpoints stay; 0 keeps all.", at_least(0))

    def __post_init__(self) -> None:
        check(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What the model is scored on while it trains and at the end."""

    data: tuple[str, ...] = setting((), "Built-in sets (digits, glyphs, icons) or dataset folders.")
    every_steps: int = setting(1000, "Steps between two scores; 0: only at the end.", at_least(0))
    batch_size: int = setting(256, "Pictures encoded at a time on each rank.", between(1, MOST))

    def __post_init__(self) -> None:
        check(self, "eval.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where figures go besides the run folder's metrics.jsonl."""

    every_steps: int = setting(
        10,
        "Steps between two lines of metrics.jsonl and two readings of the progress bar; away from a terminal a "
        "line is printed every ten seconds at most, and for the last step.",
        at_least(1),
    )
    tensorboard: bool = setting(
        True, "Write the figures to the run folder's tensorboard/ too, where tensorboard is installed."
    )
    wandb: str = setting(
        "",
        "Project of Weights & Biases that figures and scores go to as well; empty: none. It needs `wandb login` "
        "once, or WANDB_MODE=offline, which needs no account.",
    )

    def __post_init__(self) -> None:
        check(self, "log.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    out: str = setting("", "Run folder; empty: runs/ and the name of the config file.")
    seed: int = setting(
        0,
        "Of the weights at the start, the order of the data and everything that is drawn.",
        Within(words="0 to 2^63", holds=lambda value: 0 <= value < 2**63),
    )
    steps: int = setting(10_000, "Updates of the whole run; may be raised later.", at_least(1))
    batch_size: int = setting(
        256,
        "Pairs of a step over all ranks.",
        Within(
            words="at least 2, as each pair is compared with the others of its batch",
            holds=lambda value: value >= 2,
        ),
    )
    accumulate: int = setting(
        1,
        "Parts that a rank's share of the batch is computed in, for less memory; the loss stays that of the whole.",
        at_least(1),
    )
    precision: str = setting(
        "auto",
        "What the towers compute in; auto: bf16 on a GPU that has it, else fp32. Losses are float32 always.",
        one_of("auto", "fp32", "bf16"),
    )
    sharding: str = setting(
        "none",
        "Spreads weights, gradients and optimizer state of a model too large for one GPU: full, over all; hybrid, "
        "over those of each host.",
        one_of("none", "full", "hybrid"),
    )
    reshard: bool = setting(
        True,
        "With sharding, let go of others' weights after the forward pass; false: faster, for more memory.",
    )
    recompute: int = setting(
        0,
        "Every so many blocks, one is computed again in the backward pass, not kept, for less memory: 1 all of "
        "them, 2 every other one; 0: none.",
        at_least(0),
    )
    compile: bool = setting(
        False, "Blocks through torch.compile: faster steps after a minute or more at the start."
    )
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
        check(self)
        most = f"at most batch_size = {self.batch_size}"
        require(self.accumulate <= self.batch_size, "accumulate", self.accumulate, most)
        if not self.reshard:
            require_use("reshard", False, "sharding=full or sharding=hybrid", self.sharding != "none")
        self._check_classes()
        # LAMB counts steps by group: a layer that joins later would begin without the correction of its averages
        counts_late = self.optim.name == "lamb" and self.lock.unfreeze_every > 0
        require(not counts_late, "lock.unfreeze_every", self.lock.unfreeze_every, "0 with optim.name=lamb")

    def _check_classes(self) -> None:
        """A head of classes and the loss over it go together, and with no other."""
        classes = self.loss.name == "classes"
        if self.model.text.startswith("classes:") != classes:
            require(not classes, "loss.name", "classes", "not without model.text=classes:FILE")
            require(False, "model.text", self.model.text, "with loss.name=classes alone")
        if classes:
            same, teacher = self.loss.same, self.distill.teacher or self.distill.features
            require(same == "negatives", "loss.same", same, "negatives with loss.name=classes")
            require(not teacher, "distill", teacher, "no teacher with loss.name=classes")
