"""CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020): image and text encoders with a shared space.

Letters in shape comments: B batch, C channels of an image, L tokens of a row, T tokens of a packed batch, K
patches, D text width, O embedding dimension, S image side in pixels. The text transformer's parameters are at the
top level of the module, as in OpenAI's and open_clip's state dicts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.model.architectures import Adapters, Architecture, Decoder
from clipkit.model.decoder import CaptionDecoder, CaptionWordHead, TextInput
from clipkit.model.masked import MaskedPatchHead
from clipkit.model.naflex import Grids
from clipkit.model.names import create_architecture
from clipkit.model.preprocess import Preprocess
from clipkit.model.processor import has_bfloat16_products
from clipkit.model.tokenizer import Tokenizer, create_tokenizer
from clipkit.model.towers import (
    Cached,
    Packed,
    Padded,
    Rows,
    SourceProjections,
    Transformer,
    VisionTransformer,
    at_least_float32,
    attention_by_length,
    attention_varlen,
    choose_multiple,
    normalize_halves,
    pack,
    reset_layers,
    supports_varlen,
)

Head = TypeVar("Head", CaptionDecoder, CaptionWordHead, MaskedPatchHead)
_NO_DROPOUT = "patch dropout needs clipkit's ViT as the image tower"


class CLIP(nn.Module):
    """An image encoder and a text encoder with learned projections and temperature.

    Attributes:
        visual: the image tower, normalized float images (B, C, S, S) → (B, O).
        text: the text tower, tokens (B, L) → (B, O); None for the plain transformer, see above.
        origin: description of the source it was loaded from; "" for fresh weights.
        dim: O of the features that are returned: the first ones of the embedding, see ``clipkit.load``.
        masked_head: the head that predicts masked patches, or None.
        words_head: the head that predicts the words of captions, or None.
        image_projections: (D, O) of each of ``Architecture.projections``.
        logit_scale: the parameter t; similarities are multiplied by exp(t).
        logit_bias: SigLIP's bias, added to the scaled similarities, or None. Requires a gradient only if trained.
    """

    def __init__(
        self,
        shape: Architecture,
        *,
        name: str = "",
        preprocess: Preprocess | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__()
        self.architecture = shape
        self.name = name
        self.origin = ""
        self.dim = shape.embed_dim
        self.preprocess = preprocess or _default_preprocess(shape)
        if self.preprocess.channels != shape.vision.channels:
            raise ConfigError(
                f"mean and std are of {self.preprocess.channels} channels, and the image tower of "
                f"{shape.vision.channels}"
            )
        self.tokenizer = tokenizer or create_tokenizer(shape)
        self.visual = shape.vision.build(shape.embed_dim, quick_gelu=shape.quick_gelu)
        self.text: nn.Module | None = None
        self.adapters: Adapters | None = None
        text = shape.text.plain
        if text is not None:
            self.transformer = Transformer(
                text.width, text.layers, text.heads, mlp_ratio=text.mlp_ratio, quick_gelu=shape.quick_gelu
            )
            # with values, because nn.Embedding would initialize its own, which imports a compiler
            values = torch.empty(text.vocab_size, text.width)
            self.token_embedding = nn.Embedding(text.vocab_size, text.width, _weight=values)
            self.positional_embedding = nn.Parameter(torch.empty(text.context_length, text.width))
            self.ln_final = nn.LayerNorm(text.width)
            self.text_projection = nn.Parameter(torch.empty(text.width, shape.embed_dim))
        else:
            self.text = shape.text.build(shape.embed_dim, quick_gelu=shape.quick_gelu)
        self.text_decoder = None if shape.decoder is None else _build_decoder(shape, shape.decoder)
        self.masked_head = None if shape.masked is None else _build_masked_head(shape, shape.masked)
        self.words_head = None if shape.words is None else CaptionWordHead(shape.embed_dim, shape.words)
        self.image_projections = nn.ParameterList()
        if shape.projections:
            self._add_projections(shape.projections)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(()), requires_grad=False) if shape.logit_bias else None
        for constant in ("_mean", "_std"):
            self.register_buffer(constant, torch.empty(shape.vision.channels, 1, 1), persistent=False)
        self.reset_constants()

    def reset_constants(self) -> None:
        """Set the buffers that are not stored: mean and standard deviation of images."""
        for name, values in (("_mean", self.preprocess.mean), ("_std", self.preprocess.std)):
            self.get_buffer(name).copy_(torch.tensor(values, device="cpu").view(-1, 1, 1))

    @property
    def transformers(self) -> dict[str, Transformer]:
        """Transformers of clipkit in the towers "image" and "text"."""
        by_tower: dict[str, Transformer] = {}
        image = getattr(self.visual, "transformer", None)
        if isinstance(image, Transformer):
            by_tower["image"] = image
        if self.text is None:
            by_tower["text"] = self.transformer
        return by_tower

    def forward(
        self,
        images: Tensor,
        tokens: Tensor,
        patches: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        return_tokens: bool = False,
        then: Callable[["CLIP", Tensor, Tensor, Sequence[Tensor]], Tensor] | None = None,
        on_texts: Callable[[Tensor], None] | None = None,
        projections: Tensor | None = None,
        grids: Grids | None = None,
    ) -> tuple[Tensor, ...]:
        """Encode pairs, texts first.

        Args:
            images: (B, C, S, S), uint8, or normalized float.
            tokens: (B, L) int64 with L at most the context length; each row ends at its largest id (end of text).
            patches: (B, K) int64, see ``encode_image``.
            lengths: B numbers, see ``encode_text``.
            return_tokens: whether to return the tokens that a decoder of captions reads.
            then: a function of the model, the images, their features and these tokens, which may use all parameters
                of the model: those of a sharded model are gathered only within ``forward``. Its result takes the
                tokens' place.
            on_texts: called with the text features before images are encoded, such as to send them meanwhile.
            projections: (B,) int64, see ``encode_image``.
            grids: see ``encode_image``.

        Returns:
            image features (B, O) and text features (B, O), unit norm, the scalar exp(t), and SigLIP's bias if any.
            With ``return_tokens`` the tokens of images (B, M, W) follow, and for a decoder that is fed by the text
            tower those of texts (B, L, D).
        """
        bias = () if self.logit_bias is None else (self.logit_bias,)
        decoder = self.architecture.decoder
        decoder_tokens = []
        if return_tokens and decoder is not None and decoder.feed == "text":
            text, text_tokens = self.text_tokens(tokens, lengths=lengths)
            decoder_tokens.append(text_tokens)
        else:
            text = self.encode_text(tokens, lengths=lengths)
        if on_texts is not None:
            on_texts(text)
        if return_tokens:
            image, image_tokens = self.image_tokens(images, patches=patches, projections=projections)
            decoder_tokens.insert(0, image_tokens)
        else:
            image = self.encode_image(images, patches=patches, projections=projections, grids=grids)
        if then is not None:
            decoder_tokens = [then(self, images, image, decoder_tokens)]
        return image, text, self.logit_scale.exp(), *bias, *decoder_tokens

    def decoder_input(
        self,
        tokens: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        first: int = 0,
        cached: Sequence[Cached] | None = None,
    ) -> TextInput | None:
        """Compute the input of a decoder of captions; None if the decoder embeds tokens itself.

        Args:
            first: position of the first token whose input is computed; not 0 only with ``cached``.
            cached: earlier tokens in each block of the text tower; ``lengths`` are not used then.
        """
        assert self.architecture.decoder is not None
        feed = self.architecture.decoder.feed
        if feed == "tokens":
            return None
        if self.text is not None or (feed == "text" and cached is None):  # a library's tower keeps no tokens
            return TextInput(self.text_tokens(tokens, lengths=lengths)[1][:, first:])
        x = self.token_embedding(tokens[:, first:]) + self.positional_embedding[first : tokens.shape[1]]
        if feed == "shared":
            return TextInput(x, (self.transformer.blocks, self.ln_final))
        for block, rows in zip(self.transformer.blocks, cached or (), strict=True):
            x = block(x, rows)
        return TextInput(self.ln_final(x))

    def image_tokens(
        self, images: Tensor, *, patches: Tensor | None = None, projections: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode images to unit-norm features (B, O) and the tokens that a decoder reads (B, M, W).

        These are the normalized tokens of the last block, the class token first, or those of the library's tower.
        Arguments as for ``encode_image``; only for architectures whose ``vision.token_shape`` is not None.
        """
        if isinstance(self.visual, VisionTransformer):
            colors = self.colors if images.dtype == torch.uint8 else None
            by_source = self._select_projections(projections)
            features, tokens = self.visual.encode_with_tokens(
                images, patches, colors=colors, by_source=by_source
            )
        elif patches is not None:
            raise ConfigError(_NO_DROPOUT)
        else:
            features, tokens = self.architecture.vision.encode_with_tokens(
                self.visual, self._normalize_colors(images)
            )
        return self._finish_features(features), tokens

    def text_tokens(self, tokens: Tensor, *, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Encode texts to unit-norm features (B, O) and the tokens that a decoder reads (B, L, D).

        These are the normalized tokens of the last block, or those of the library's tower. Tokens behind the end of
        text may be 0. Arguments as for ``encode_text``; only for architectures with a ``text.token_width``.
        """
        self._check_shape(tokens)
        if self.text is not None:
            features, hidden = self.architecture.text.encode_with_tokens(self.text, tokens)
            return self._finish_features(features), hidden
        rows = self._lay_out_texts(tokens, lengths)
        hidden = self.ln_final(self.transformer.compute_tokens(self._embed_texts(tokens, rows), rows))
        if isinstance(rows, Packed):
            hidden = rows.unpack(hidden, tokens.shape[1])
        readout = hidden[torch.arange(len(tokens), device=tokens.device), tokens.argmax(dim=-1)]
        return self._finish_features(readout @ self.text_projection), hidden

    def caption_nll(
        self, image_tokens: Tensor, captions: Tensor, *, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute −log p of captions given images, for models with a decoder.

        Args:
            image_tokens: (B, M, W), the tokens of the image of each caption, see ``image_tokens``.
            captions: (B, L) int64, see ``forward``; tokens beyond the decoder's context length are not predicted.

        Returns:
            (B,) at least float32, the sum over the tokens of each caption, and (B,) int64, their number.
        """
        assert self.text_decoder is not None
        text = self.decoder_input(captions, lengths=lengths)
        return self.text_decoder.nll_by_caption(image_tokens, captions, text=text, lengths=lengths)

    def encode_image(
        self,
        images: Tensor,
        *,
        normalize: bool = True,
        patches: Tensor | None = None,
        projections: Tensor | None = None,
        grids: Grids | None = None,
    ) -> Tensor:
        """Encode images to (B, O), in float32 for all dtypes of the tower (float64 for a float64 model).

        Args:
            images: (B, C, S, S) uint8, or normalized float; or their pooled features (B, W), see ``pool_images``.
                Images of variable size are strips, see ``clipkit.model.naflex``.
            patches: (B, K) int64, the patches of each image to compute, see ``draw_patches``; None for all.
            projections: (B,) int64, the projection of each image: 0 for the image tower's, i for the i-th of
                ``image_projections``; None: the image tower's for all.
            grids: grids of strips, if they are known on the host.
        """
        if images.ndim == 2:
            features = self.architecture.vision.project(self.visual, images)
        elif self.architecture.vision.budget is not None and patches is None:
            by_source = self._select_projections(projections)
            features = self.visual(images, colors=self.colors, by_source=by_source, grids=grids)
        elif self.architecture.vision.patches is not None:
            colors = self.colors if images.dtype == torch.uint8 else None
            by_source = self._select_projections(projections)
            features = self.visual(images, patches, colors=colors, by_source=by_source)
        elif patches is not None:
            raise ConfigError(_NO_DROPOUT)
        else:
            features = self.visual(self._normalize_colors(images))
        return self._finish_features(features, normalize=normalize)

    def encode_text(
        self, tokens: Tensor, *, normalize: bool = True, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Encode texts to (B, O), in float32 or float64 as for images.

        Nothing after end of text reaches the features, so texts are computed to their true length if it is known:
        if ``lengths`` is given, or on a CPU. Reading it from another device would synchronize,
        so there texts are computed to the given width (the tokenizer trims). Other towers compute all tokens.

        Args:
            tokens: (B, L) int64; or pooled features of texts (B, W), see ``pool_texts``.
            lengths: number of tokens of each text including end of text (its largest token).
        """
        if tokens.is_floating_point():
            return self._finish_features(self._project_texts(tokens), normalize=normalize)
        self._check_shape(tokens)
        if self.text is not None:
            features = self.text(tokens)
            if self.architecture.distilled:
                features = normalize_halves(features)
            return self._finish_features(features, normalize=normalize)
        readout, rows = self._read_texts(tokens, lengths)
        features = self._project_texts(readout)
        if isinstance(rows, Packed):
            features = rows.restore_order(features)
        return self._finish_features(features, normalize=normalize)

    def pool_images(self, images: Tensor) -> Tensor:
        """Compute pooled features (B, W), which the image tower's projection turns into features.

        ``encode_image`` takes them instead of images. Only for architectures whose ``vision.projection_prefix`` is
        not empty.

        Args:
            images: (B, C, S, S) uint8, or normalized float.
        """
        if isinstance(self.visual, VisionTransformer):
            return self.visual.pool(images, colors=self.colors if images.dtype == torch.uint8 else None)
        return self.architecture.vision.pool_inputs(self.visual, self._normalize_colors(images))

    def pool_texts(self, tokens: Tensor, *, lengths: Sequence[int] | None = None) -> Tensor:
        """Compute pooled features (B, W) of texts, as ``pool_images``; arguments as for ``encode_text``."""
        if self.text is not None:
            return self.architecture.text.pool_inputs(self.text, tokens)
        readout, rows = self._read_texts(tokens, lengths)
        return rows.restore_order(readout) if isinstance(rows, Packed) else readout

    def _read_texts(self, tokens: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Rows]:
        """Compute the normalized end of each text (B, D), in the order of its layout."""
        rows = self._lay_out_texts(tokens, lengths)
        return self.ln_final(self.transformer(self._embed_texts(tokens, rows), rows)), rows

    def _project_texts(self, pooled: Tensor) -> Tensor:
        if self.text is not None:
            return self.architecture.text.project(self.text, pooled)
        features: Tensor = pooled @ self.text_projection
        return features

    @property
    def colors(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of images, (C, 1, 1) each."""
        return self.get_buffer("_mean"), self.get_buffer("_std")

    def _select_projections(self, numbers: Tensor | None) -> SourceProjections | None:
        return None if numbers is None else SourceProjections(tuple(self.image_projections), numbers)

    def _normalize_colors(self, images: Tensor) -> Tensor:
        """Normalize colors; the result has the layout in which convolutions are fastest.

        On CPUs without AVX-512, torch's gradients of grouped convolutions in this layout corrupt the memory (seen
        with torch 2.14).
        """
        layout = torch.channels_last
        if images.device.type == "cpu" and torch.is_grad_enabled() and not has_bfloat16_products():
            layout = torch.contiguous_format
        if images.dtype != torch.uint8:
            return images.to(memory_format=layout)
        mean, std = self.colors
        return images.to(mean.dtype, memory_format=layout).div_(255).sub_(mean).div_(std)

    def _finish_features(self, features: Tensor, *, normalize: bool = True) -> Tensor:
        """Convert features to at least float32, keep the first ``dim`` elements, and scale them to unit norm."""
        features = at_least_float32(features)
        if self.dim != self.architecture.embed_dim:
            features = features[:, : self.dim]
        return F.normalize(features, dim=-1) if normalize else features

    def _check_shape(self, tokens: Tensor) -> None:
        length = self.architecture.text.context_length
        if tokens.ndim != 2 or tokens.shape[1] > length:
            raise ConfigError(
                f"tokens must be (B, L) with L at most {length}, the model's context length, not "
                f"{tuple(tokens.shape)}: tokenize with model.tokenizer"
            )

    def _embed_texts(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Embed tokens (B, L) to (B, L, D), or packed to (T, D)."""
        if isinstance(rows, Packed):
            x: Tensor = self.token_embedding(tokens[rows.rows, rows.positions])
            return x + F.embedding(rows.positions, self.positional_embedding)
        x = self.token_embedding(tokens)
        return x + self.positional_embedding[: tokens.shape[1]]

    def _lay_out_texts(self, tokens: Tensor, lengths: Sequence[int] | None) -> Rows:
        """Pack the texts of a batch if their lengths are known, otherwise keep the padding."""
        text = self.architecture.text
        if lengths is None and tokens.device.type == "cpu":
            lengths = (tokens.argmax(dim=-1) + 1).tolist()
        if lengths is None:
            return Padded.from_texts(tokens, causal=text.is_causal)
        assert len(lengths) == len(tokens), (len(lengths), len(tokens))
        first = self.transformer.blocks[0]
        head_width = self.text_projection.shape[0] // first.attn.heads
        attention = attention_by_length
        if supports_varlen(self.text_projection, head_width=head_width):
            attention = attention_varlen
        elif first.kernels is not None and first.training:
            # by length, each batch would compile its own lengths
            return Padded.from_texts(tokens, causal=text.is_causal)
        return pack(
            lengths,
            longest=text.context_length,
            causal=text.is_causal,
            attention=attention,
            device=tokens.device,
            multiple=choose_multiple(self.text_projection, longest=tokens.shape[1]),
        )

    @torch.no_grad()
    def initialize(self) -> "CLIP":
        """Draw fresh weights as OpenAI's implementation.

        Layers without other values here and in ``initialize`` of the towers have torch's. The temperature starts at
        ln(1 / 0.07), or with a bias at ln 10, and the bias at -10 (SigLIP, Zhai et al. 2023). Towers of other
        libraries keep the weights drawn by those libraries.

        Architectures for small data (``Architecture.small_data``) draw the blocks of the image tower as those
        of the text tower, and position embeddings with std 0.8, as large as the contribution of a patch: with the
        published ones, a tenth of that, a short training sees a bag of patches.
        """
        vision = self.architecture.vision
        text = self.architecture.text
        native: list[nn.Module] = []
        if vision.native:
            native.append(self.visual)
        if self.text is None:
            native += [self.transformer, self.ln_final]
        elif text.native:
            native.append(self.text)
        for tower in native:
            reset_layers(tower)
        if vision.native:
            vision.initialize(self.visual, small_data=self.architecture.small_data)
        if self.text is None:
            nn.init.normal_(self.token_embedding.weight, std=0.02)
            nn.init.normal_(self.positional_embedding, std=0.01)
            nn.init.normal_(self.text_projection, std=self.text_projection.shape[0] ** -0.5)
            self.transformer.initialize()
        elif text.native:
            text.initialize(self.text, small_data=self.architecture.small_data)
        self.logit_scale.fill_(math.log(1 / 0.07))
        if self.logit_bias is not None:
            self.reset_bias()
        if self.text_decoder is not None:
            self.text_decoder.initialize()
        if self.masked_head is not None:
            self.masked_head.initialize()
        if self.words_head is not None:
            self.words_head.initialize()
        self._copy_projection()
        return self

    @torch.no_grad()
    def extend_channels(self, channels: int, *, extend: str) -> None:
        """Give a model of RGB images on the CPU further channels, with the average mean and standard deviation.

        Args:
            channels: C, above 3; the first three remain red, green and blue.
            extend: initial weights of further channels: "zeros", with which embeddings are those of the first three
                channels, or the "mean" of the weights of red, green and blue.
        """
        vision = self.architecture.vision.replace_channels(channels)
        if channels < 3:
            raise ConfigError(f"pixels.channels = {channels}: weights of RGB images have three channels")
        visual = vision.build(self.architecture.embed_dim, quick_gelu=self.architecture.quick_gelu)
        weights = self.visual.state_dict()
        for name, value in visual.state_dict().items():
            former = weights[name]
            if former.shape == value.shape:
                continue
            if former.shape[1] != 3:
                raise ConfigError(
                    f"pixels.channels = {channels}: {vision.description} has no weights of three channels"
                )
            added = former.mean(dim=1, keepdim=True)
            if extend != "mean":
                added = torch.zeros_like(added)
            weights[name] = torch.cat([former, added.expand(-1, channels - 3, *former.shape[2:])], dim=1)
        visual.load_state_dict(weights)
        self.visual = visual.train(self.training)
        self.architecture = replace(self.architecture, vision=vision)
        self.preprocess = self.preprocess.replace_channels(channels)
        for name in ("_mean", "_std"):
            self.register_buffer(name, torch.empty(channels, 1, 1), persistent=False)
        self.reset_constants()

    @torch.no_grad()
    def set_decoder(self, decoder: Decoder | None, *, seed: int = 0) -> bool:
        """Replace the decoder of captions by one with fresh weights, or by none.

        Returns:
            False if it kept its weights, because it has no position embeddings and only its length is another.
        """
        former = self.text_decoder
        self.architecture = replace(self.architecture, decoder=decoder)
        if (
            former is not None
            and decoder is not None
            and decoder.feed == "text"
            and replace(former.shape, context_length=decoder.context_length) == decoder
        ):
            former.shape = decoder
            return False
        self.text_decoder = None
        if decoder is not None:
            self.text_decoder = self._create_head(lambda: _build_decoder(self.architecture, decoder), seed)
        return True

    @torch.no_grad()
    def set_masked(self, target: str | None, *, seed: int = 0) -> None:
        """Replace the head that predicts masked patches by one with fresh weights, or by none."""
        self.architecture = replace(self.architecture, masked=target)
        self.masked_head = None
        if target is not None:
            self.masked_head = self._create_head(lambda: _build_masked_head(self.architecture, target), seed)

    @torch.no_grad()
    def set_words(self, words: int | None, *, seed: int = 0) -> None:
        """Replace the head that predicts the words of captions by one with fresh weights, or by none."""
        self.architecture = replace(self.architecture, words=words)
        self.words_head = None
        if words is not None:
            width = self.architecture.embed_dim
            self.words_head = self._create_head(lambda: CaptionWordHead(width, words), seed)

    @torch.no_grad()
    def set_projections(self, sources: Sequence[str]) -> None:
        """Replace the projections of images by source; each starts as a copy of the image tower's."""
        self.architecture = replace(self.architecture, projections=tuple(sources))
        self._add_projections(sources)
        self._copy_projection()

    def _add_projections(self, sources: Sequence[str]) -> None:
        self.image_projections = nn.ParameterList(
            nn.Parameter(torch.empty_like(self.visual.get_parameter("proj"))) for _ in sources
        )

    def _copy_projection(self) -> None:
        for projection in self.image_projections:
            projection.copy_(self.visual.get_parameter("proj"))

    def _create_head(self, build_head: Callable[[], Head], seed: int) -> Head:
        with torch.device("meta"):
            head = build_head()
        allocate(head, self.logit_scale.device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            head.initialize()
        return head

    @torch.no_grad()
    def reset_bias(self) -> None:
        """Set temperature and bias to the initial values of the sigmoid loss, adding a bias if there is none."""
        if self.logit_bias is None:
            self.logit_bias = nn.Parameter(torch.empty_like(self.logit_scale), requires_grad=False)
            self.architecture = replace(self.architecture, logit_bias=True)
        self.logit_scale.fill_(math.log(10))
        self.logit_bias.fill_(-10)


def _build_decoder(shape: Architecture, decoder: Decoder) -> CaptionDecoder:
    image_tokens = shape.vision.token_shape(shape.embed_dim)
    if image_tokens is None:
        raise ConfigError("a decoder of captions needs a ViT of clipkit or open_clip as the image tower")
    if decoder.feed != "tokens" and decoder.width != shape.text.token_width:
        raise ConfigError(
            f"a decoder of width {decoder.width} cannot read a text tower's tokens of {shape.text.token_width}"
        )
    if decoder.feed == "text" and not shape.text.is_causal:
        raise ConfigError(
            "caption.feed = 'text' requires a causal text tower: the tokens of this one depend on later ones"
        )
    if decoder.feed == "shared" and (not shape.text.part_of_clip or shape.text.block_count % decoder.layers):
        raise ConfigError(
            f"a text tower of {shape.text.block_count} layers cannot attend to images in {decoder.layers} of them: "
            "they must be evenly spaced"
        )
    return CaptionDecoder(decoder, image_width=image_tokens[1], quick_gelu=shape.quick_gelu)


def _build_masked_head(shape: Architecture, target: str) -> MaskedPatchHead:
    outputs = shape.vision.masked_outputs(target)
    tokens = shape.vision.token_shape(shape.embed_dim)
    if not outputs or tokens is None:
        raise ConfigError("prediction of masked patches needs clipkit's ViT as the image tower")
    return MaskedPatchHead(target, width=tokens[1], outputs=outputs)


def create(shape: str | Architecture, *, name: str = "", seed: int | None = None) -> CLIP:
    """Create a model with random weights.

    Args:
        shape: a name, such as "ViT-B-32" (a key of ``clipkit.model.ARCHITECTURES``) or "open_clip:RN50"; or an
            architecture, see ``clipkit.create_architecture``.
        name: name of an architecture given as an object.
        seed: seed of the weights; None uses torch's global generator.

    Raises:
        ConfigError: the name is unknown, or a required library is missing.
    """
    if isinstance(shape, str):
        name = shape
        shape = create_architecture(name)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it reseeds the GPUs too
        return build(shape, name=name).initialize()


def _default_preprocess(shape: Architecture) -> Preprocess:
    vision = shape.vision
    rgb = vision.fit_preprocess(Preprocess(image_size=vision.image_size))
    if vision.color_range is not None:
        mean, std = vision.color_range
        rgb = replace(rgb, mean=(mean,) * 3, std=(std,) * 3)
    return rgb.replace_channels(vision.channels)


def build(
    shape: Architecture,
    *,
    name: str = "",
    preprocess: Preprocess | None = None,
    tokenizer: Tokenizer | None = None,
) -> CLIP:
    """Build a model on the CPU; clipkit's towers have no values until ``initialize`` or ``load_state_dict``."""
    if not shape.is_native:
        return CLIP(shape, name=name, preprocess=preprocess, tokenizer=tokenizer)
    with torch.device("meta"):  # skips the initialization of layers
        model = CLIP(shape, name=name, preprocess=preprocess, tokenizer=tokenizer)
    try:
        allocate(model, torch.device("cpu"))
    except RuntimeError as error:  # torch has no class of its own for it
        if "allocate" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"not enough memory for a model of {count:,} parameters: choose smaller towers"
        ) from error
    model.reset_constants()
    return model


def allocate(module: nn.Module, device: torch.device) -> None:
    """Move a module from the meta device without values, as ``to_empty``, which imports sympy (0.3 seconds)."""
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
