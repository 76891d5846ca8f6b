"""The settings of what is trained on and how it is read: the section ``data`` of a configuration."""

from dataclasses import dataclass

from clipkit.image_traits import color_of
from clipkit.setting import MOST, Within, above, between, check, one_of, require, require_use, setting

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on, and how it is read."""

    train: str | tuple[str, ...] = setting(
        "glyphs",
        "Built-in corpus (glyphs or icons), folder, tar, brace pattern or URL of pairs; or a list of "
        "several.",
    )
    weights: tuple[float, ...] = setting(
        (), "Of each source, its share of every batch; empty: all sources are one."
    )
    captions: tuple[str, ...] = setting(
        ("txt",), 'Where captions are: "txt", the caption file, or the names of fields of the json.'
    )
    caption_choice: str = setting(
        "first",
        "Which of them is taken: the first that a sample has, one at random, one by data.caption_weights, or all, "
        "each as a sample of its own.",
        one_of("first", "random", "weighted", "all"),
    )
    caption_weights: tuple[float, ...] = setting(
        (), "How often each of data.captions is taken, with data.caption_choice=weighted."
    )
    caption_templates: tuple[str, ...] = setting(
        (), 'What a caption is written into, one of these at random, such as "a photo of {}".'
    )
    caption_prefix: str = setting("", "What is written before each caption.")
    filters: tuple[str, ...] = setting(
        (), 'Conditions on fields of the json that all must hold, such as "width >= 256".'
    )
    last: str = setting(
        "drop",
        "An epoch's last samples that fill no batch: drop them, or wrap them into the next epoch.",
        one_of("drop", "wrap"),
    )
    resample: bool = setting(
        False, "Draw with replacement, as some recipes do, instead of each sample once an epoch."
    )
    cache_gb: float = setting(
        100.0,
        "How many gigabytes of remote shards each machine keeps on its disk; 0 reads samples over the network.",
        between(0, MOST),
    )
    workers: int = setting(
        2, "Loader processes of each rank; 0 reads in the training process.", between(0, 512)
    )
    window: int = setting(64, "How many shards are mixed at a time.", between(1, MOST))
    crop_scale: float = setting(
        0.9,
        "Smallest share of a picture's area that a random crop keeps; 1 always cuts the centre.",
        above(0, at_most=1),
    )
    flip: float = setting(
        0.0, "Probability of the mirror image; not for captions that tell left from right.", between(0, 1)
    )
    color_jitter: float = setting(
        0.0,
        "Largest relative change of brightness, contrast and saturation; of hue a quarter of it.",
        between(0, 2),
    )
    grayscale: float = setting(0.0, "Probability that a picture loses its colours.", between(0, 1))
    background: str = setting(
        "",
        "Color that transparent images are laid on, such as white or #ffffff; none drops their alpha channel. "
        "Empty: as the data were packed, else as model.weights say, else none.",
    )
    upright: bool | str = setting(
        "auto",
        "Apply the EXIF orientation of images. auto: as the data were packed, else as model.weights say, else "
        "false.",
        Within(words="auto, true or false", holds=lambda value: value in (True, False, "auto")),
    )
    scaled_decode: bool = setting(
        False, "Decode large JPEGs at a part of their size: faster, and changes values by 0.7 of 255."
    )
    nvjpeg: bool = setting(
        False, "Decode plain JPEGs on the GPU, through torchcodec; values differ by rounding."
    )
    truncated: str = setting(
        "error",
        "A shard that is cut short: an error before training, or use the samples of its intact part.",
        one_of("error", "use"),
    )
    max_bad: float = setting(
        0.05,
        "Share of all samples drawn, again in each epoch, that may be bad before the run saves and stops; 0: none "
        "may be. Of fewer than 1,000 it is a share of 1,000: 0.05 bears 50 bad ones at the start.",
        between(0, 1),
    )

    def __post_init__(self) -> None:
        require(bool(self.train) and all(self.sources), "data.train", self.train, "name at least one source")
        self._check_captions()
        check(self, "data.")
        if self.background:
            color_of(self.background, setting="data.background")
        require(not (self.nvjpeg and self.scaled_decode), "data.nvjpeg", True, "not with data.scaled_decode")

    def _check_captions(self) -> None:
        sources, places = len(self.sources), len(self.captions)
        for name, weights, of, count in (
            ("data.weights", self.weights, "data.train", sources),
            ("data.caption_weights", self.caption_weights, "data.captions", places),
        ):
            require(len(weights) in (0, count), name, weights, f"one for each of {of}: {count}")
            require(all(weight > 0 for weight in weights), name, weights, "each above 0")
        require(bool(self.captions) and all(self.captions), "data.captions", self.captions, "name some")
        if self.caption_choice == "weighted":
            require(bool(self.caption_weights), "data.caption_weights", (), "one for each of data.captions")
        elif self.caption_weights:
            require_use("data.caption_weights", self.caption_weights, "data.caption_choice=weighted")
        for template in self.caption_templates:
            require("{}" in template, "data.caption_templates", template, "{} stands for the caption")

    @property
    def sources(self) -> tuple[str, ...]:
        """``train`` as a tuple, whichever way it was given."""
        return (self.train,) if isinstance(self.train, str) else self.train
