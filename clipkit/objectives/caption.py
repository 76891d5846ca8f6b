"""The term that predicts captions from images, see clipkit/model/decoder.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from clipkit.cli import Within, one_of, setting
from clipkit.config import Config, ModelConfig, at_least, require
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture, Decoder
from clipkit.model.clip import CLIP
from clipkit.model.decoder import TextInput
from clipkit.model.towers import draw_rows
from clipkit.objectives.base import Term, TermBatch, after_setting, weight_setting


@dataclass(frozen=True, kw_only=True)
class Caption(Term):
    """Predict captions from images, in addition to ``loss.name``; see clipkit/model/decoder.py.

    The term is the mean over all predicted tokens of −log p(token | previous tokens, image).
    """

    section = "caption."
    stream = 1
    reads_tokens = True

    weight: float = weight_setting("0: no decoder")
    layers: int = setting(
        0, "Layers of the decoder; 0: half of the text tower's.", at_least(0), needs="weight"
    )
    feed: str = setting(
        "tokens",
        "The decoder's input: tokens, with an embedding of its own (Cap), or text, the text tower's tokens (CoCa); "
        "shared: the text tower is the decoder, in a second pass with cross-attention (MaMMUT).",
        one_of("tokens", "text", "shared"),
        needs="weight",
    )
    parallel: float = setting(
        0.0,
        "Fraction of the captions whose tokens are all predicted at once, from the image alone; CapPa: 0.75.",
        Within(words="0 to 1", holds=lambda value: 0 <= value <= 1),
        needs="weight",
    )
    queries: int = setting(
        0,
        "Number of tokens to which learned queries pool an image's by attention for the decoder; 256 in CoCa. "
        "0: it reads all tokens of an image.",
        at_least(0),
        needs="weight",
    )
    length: int = setting(
        64,
        "Maximum number of tokens of a caption to predict, including end of text.",
        at_least(1),
        needs="weight",
    )
    after: int = after_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = f"expected 0 with caption.feed={self.feed}"
        require(not self.parallel or self.feed == "tokens", "caption.parallel", self.parallel, alone)

    @property
    def encodes_again(self) -> bool:
        return self.feed == "shared"

    def check(self, config: Config) -> None:
        super().check(config)
        incomplete = "cannot be combined with caption.weight, which would learn to leave out words"
        require(not config.data.text_dropout, "data.text_dropout", config.data.text_dropout, incomplete)
        if self.feed != "tokens":
            data = config.data
            alone = f"cannot be combined with caption.feed={self.feed}"
            for name in ("negatives", "image_fields", "text_fields"):
                require(not getattr(data, name), f"data.{name}", getattr(data, name), alone)
            require(data.caption_count == 1, "data.caption_count", data.caption_count, alone)

    def heads(self, shape: Architecture, model: ModelConfig) -> dict[str, Any]:
        """Return a decoder as wide as the text tower, or as the image tower beside other text towers."""
        length = max(1, min(self.length, shape.text.context_length - 1))
        decoder = shape.decoder
        if decoder is not None:
            further = self.parallel or self.queries
            if self.feed != decoder.feed or self.layers not in (0, decoder.layers) or further:
                raise ConfigError(
                    f"{model.label} has a decoder of {decoder.layers} layers: set caption.feed = "
                    f"{decoder.feed!r}, and none of caption.layers, caption.parallel and caption.queries"
                )
            return {"decoder": replace(decoder, context_length=length)}
        like = shape.text.plain or shape.vision.plain
        vocabulary = shape.text.caption_vocabulary
        if shape.vision.plain is None or like is None or not vocabulary:
            raise ConfigError(
                f"caption.weight = {self.weight} requires clipkit's own image tower and text tower, not "
                f"{model.label}"
            )
        if self.feed != "tokens" and not shape.text.part_of_clip:
            raise ConfigError(
                f"caption.feed = {self.feed!r} requires a text transformer, not that of {model.label}"
            )
        layers = self.layers or max(1, like.layers // 2)
        if self.feed == "shared" and like.layers % layers:
            expected = f"expected a divisor of the text tower's {like.layers} layers with caption.feed=shared"
            raise ConfigError(f"caption.layers = {layers} is invalid: {expected}")
        decoder = Decoder(
            width=like.width,
            layers=layers,
            heads=like.heads,
            context_length=length,
            vocab_size=vocabulary,
            mlp_ratio=like.mlp_ratio,
            feed=self.feed,
            parallel=self.parallel > 0,
            queries=self.queries,
        )
        heads: dict[str, Any] = {"decoder": decoder}
        if self.feed == "shared" and not model.weights:
            heads["text"] = shape.text.replace_attention(causal=False)
        return heads

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return the arguments of ``CaptionDecoder.nll`` and the number of predicted tokens."""
        batch = draw.batch
        inputs: dict[str, Any] = {"captions": batch.tokens, "lengths": batch.lengths}
        if self.parallel:
            inputs["parallel"] = draw_rows(seed=draw.seed, rows=batch.rows, fraction=self.parallel)
        return inputs, sum(min(length - 1, self.length) for length in batch.lengths)

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        assert model.text_decoder is not None
        image_tokens, *text_tokens = tokens
        text = TextInput(text_tokens[0]) if text_tokens else model.decoder_input(inputs["captions"])
        return model.text_decoder.nll(image_tokens, text=text, **inputs)
