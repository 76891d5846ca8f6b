"""CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020): two towers into one space.

Letters in shape comments: B batch, L tokens, D text width, O embedding dimension, S image side in pixels.
The text tower's parameters lie at the top of the module, where OpenAI's and open_clip's state dicts have them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.architectures import Architecture, architecture
from clipkit.preprocess import Preprocess
from clipkit.towers import ResidualAttentionBlock, Transformer, VisionTransformer

__all__ = ["CLIP", "MAX_LOGIT_SCALE", "create"]

MAX_LOGIT_SCALE = 100.0  # the published cap of exp(t)
_LENGTH_GROUPS = 4
_SMALLEST_GROUP = 8


class CLIP(nn.Module):
    """A ViT image encoder and a causal text transformer with learned projections and temperature.

    Attributes:
        architecture: the shape.
        name: what the architecture is called, or "" where it has no name.
        preprocess: how pictures become its input.
        logit_scale: the parameter t; similarities are multiplied by exp(t).
    """

    def __init__(self, shape: Architecture, *, name: str = "", preprocess: Preprocess | None = None) -> None:
        super().__init__()
        vision, text = shape.vision, shape.text
        self.architecture, self.name = shape, name
        self.preprocess = preprocess or Preprocess(image_size=vision.image_size)
        self.visual = VisionTransformer(
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            width=vision.width,
            layers=vision.layers,
            heads=vision.heads,
            output_dim=shape.embed_dim,
            quick_gelu=shape.quick_gelu,
        )
        self.transformer = Transformer(text.width, text.layers, text.heads, quick_gelu=shape.quick_gelu)
        self.token_embedding = nn.Embedding(text.vocab_size, text.width)
        self.positional_embedding = nn.Parameter(torch.empty(text.context_length, text.width))
        self.ln_final = nn.LayerNorm(text.width)
        self.text_projection = nn.Parameter(torch.empty(text.width, shape.embed_dim))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.register_buffer("_mean", torch.empty(3, 1, 1), persistent=False)
        self.register_buffer("_std", torch.empty(3, 1, 1), persistent=False)
        self.reset_constants()

    def reset_constants(self) -> None:
        """Fill in what is not stored with the weights: the pictures' mean and standard deviation."""
        for name, values in (("_mean", self.preprocess.mean), ("_std", self.preprocess.std)):
            self.get_buffer(name).copy_(torch.tensor(values, device="cpu").view(3, 1, 1))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pairs.

        Args:
            images: (B, 3, S, S), uint8 in 0–255, or float and already normalized.
            tokens: (B, L) int64 with L at most the context length; each row ends at its largest id (end of text).

        Returns:
            image features (B, O) and text features (B, O), unit norm, and the scalar exp(t).
        """
        return self.encode_image(images), self.encode_text(tokens), self.logit_scale.exp()

    def encode_image(self, images: Tensor, *, normalize: bool = True) -> Tensor:
        """(B, 3, S, S) uint8, or normalized float → (B, O), unit norm unless told otherwise.

        Features are float32 whatever the tower runs in (float64 for a float64 model).
        """
        if images.dtype == torch.uint8:
            mean, std = self.get_buffer("_mean"), self.get_buffer("_std")
            images = (images.to(mean.dtype) / 255 - mean) / std
        features = _at_least_float32(self.visual(images))
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, tokens: Tensor, *, normalize: bool = True) -> Tensor:
        """(B, L) int64 → (B, O), unit norm unless told otherwise; float32 or float64 as for images.

        Under a causal mask nothing behind end-of-text reaches the features, so rows are computed to their
        true length: on a CPU in groups of similar length, elsewhere to the width given (asking the device
        for lengths would stop its queue; the tokenizer trims).
        """
        ends = tokens.argmax(dim=-1)  # (B,)
        if tokens.device.type != "cpu" or not len(tokens):
            features = self._text_group(tokens, ends)
        else:
            by_length = ends.argsort(stable=True)
            groups = by_length.chunk(min(_LENGTH_GROUPS, max(1, len(tokens) // _SMALLEST_GROUP)))
            parts = [self._text_group(tokens[g, : int(ends[g[-1]]) + 1], ends[g]) for g in groups]
            features = (
                torch.cat(parts)[by_length.argsort()] if len(parts) > 1 else parts[0][by_length.argsort()]
            )
        features = _at_least_float32(features)
        return F.normalize(features, dim=-1) if normalize else features

    def _text_group(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """(B, L) tokens and (B,) places of end-of-text → (B, O)."""
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]  # (B, L, D)
        out: Tensor = self.ln_final(self.transformer(x, ends)) @ self.text_projection
        return out

    @torch.no_grad()
    def initialize(self) -> "CLIP":
        """Draw fresh weights, as OpenAI's implementation does (D is a tower's width, N its layers).

        ============================================  =========================================
        class and image position embeddings, proj     normal, std D^-½
        patch convolution, image MLP                  uniform ± fan_in^-½; biases of the MLP too
        image attention: in                           Xavier uniform
        image attention: out                          uniform ± D^-½
        token embedding                               normal, std 0.02
        text position embedding                       normal, std 0.01
        text attention: in                            normal, std D^-½
        text attention: out, text MLP: out            normal, std D^-½ (2N)^-½
        text MLP: in                                  normal, std (2D)^-½
        text projection                               normal, std D^-½
        attention biases                              0
        text MLP biases                               uniform ± fan_in^-½
        norms                                         weight 1, bias 0
        t                                             ln(1 / 0.07)
        ============================================  =========================================

        Architectures for small data (``Architecture.small_data``) differ in the image tower: its blocks are
        drawn as the text tower's, and position embeddings with std 0.8, as large as what a patch contributes.
        With the published ones, a tenth of that, a short training sees a bag of patches: on 41,000 glyphs
        a 4-layer tower trained with labels reached 11% on held-out fonts instead of 27%.
        """
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
                module.reset_parameters()
        self._initialize_vision()
        self._initialize_text()
        self.logit_scale.fill_(math.log(1 / 0.07))
        return self

    def _initialize_vision(self) -> None:
        visual, small = self.visual, self.architecture.small_data
        std = self.architecture.vision.width**-0.5
        for parameter in (visual.class_embedding, visual.proj):
            nn.init.normal_(parameter, std=std)
        nn.init.normal_(visual.positional_embedding, std=0.8 if small else std)
        if small:
            _draw_blocks(visual.transformer)
            return
        for block in _blocks(visual.transformer):
            nn.init.xavier_uniform_(block.attn.in_proj_weight)
            nn.init.zeros_(block.attn.in_proj_bias)
            nn.init.zeros_(block.attn.out_proj.bias)

    def _initialize_text(self) -> None:
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=self.architecture.text.width**-0.5)
        _draw_blocks(self.transformer)


def _at_least_float32(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()


def _blocks(transformer: Transformer) -> list[ResidualAttentionBlock]:
    return [block for block in transformer.resblocks if isinstance(block, ResidualAttentionBlock)]


def _draw_blocks(transformer: Transformer) -> None:
    """Weights of blocks by their width, and smaller where they add to the residual stream the deeper it is."""
    blocks = _blocks(transformer)
    for block in blocks:
        width = block.attn.out_proj.in_features
        out_std = width**-0.5 * (2 * len(blocks)) ** -0.5
        nn.init.normal_(block.attn.in_proj_weight, std=width**-0.5)
        nn.init.zeros_(block.attn.in_proj_bias)
        nn.init.normal_(block.attn.out_proj.weight, std=out_std)
        nn.init.zeros_(block.attn.out_proj.bias)
        nn.init.normal_(block.mlp.c_fc.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(block.mlp.c_proj.weight, std=out_std)


def create(name: str, *, seed: int | None = None) -> CLIP:
    """A model of a named architecture with random weights.

    Args:
        name: a key of ``clipkit.architectures.ARCHITECTURES``, such as "ViT-B-32".
        seed: of the weights; None draws from torch's global generator.

    Raises:
        ConfigError: the name is unknown.
    """
    shape = architecture(name)
    with torch.device("meta"):  # layers would draw weights of their own, for nothing
        model = CLIP(shape, name=name)
    model = model.to_empty(device="cpu")
    model.reset_constants()
    if seed is None:
        return model.initialize()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it reseeds the GPUs too
        return model.initialize()
