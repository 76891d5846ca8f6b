"""Image GPT (Chen et al. 2020): a transformer over the pixels of an image, whose colors are those of a palette.

It predicts the next pixel, or masked pixels as BERT does. As released: norms divide by the root mean square, there
are no biases, the activation is QuickGELU, and the table that predicts colors is separate and starts at zero.
"Generative Pretraining from Pixels", https://cdn.openai.com/papers/Generative_Pretraining_from_Pixels_V2.pdf.

Letters: B images, S side in pixels, P = S² pixels, C colors, D width, O embedding dimension, K chosen pixels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.model.towers import at_least_float32

_EPSILON = 1e-5  # of the norms


def even_palette(colors: int) -> Tensor:
    """Return (C, 3) float32 colors in [-1, 1]: equal levels of each channel, or grays if C is not a cube."""
    levels = round(colors ** (1 / 3))
    if levels**3 != colors:
        return torch.linspace(-1, 1, colors)[:, None].repeat(1, 3)
    return torch.cartesian_prod(*[torch.linspace(-1, 1, levels)] * 3).view(-1, 3)


class PixelTransformer(nn.Module):
    """A transformer over pixels, whose mean output is projected to the features of an image.

    Attributes:
        palette: buffer (C, 3) float32, RGB in [-1, 1].
    """

    palette: Tensor

    def __init__(
        self, *, side: int, width: int, layers: int, heads: int, colors: int, causal: bool, output_dim: int
    ) -> None:
        super().__init__()
        self.causal = causal
        self.register_buffer("palette", even_palette(colors))
        # with values, because nn.Embedding would draw its own; the last row is the start, or [mask]
        self.color_embedding = nn.Embedding(colors + 1, width, _weight=torch.empty(colors + 1, width))
        self.positional_embedding = nn.Parameter(torch.empty(side**2, width))
        self.blocks = nn.ModuleList(PixelBlock(width, heads, causal=causal) for _ in range(layers))
        self.ln_post = nn.RMSNorm(width, eps=_EPSILON)
        self.proj: nn.Parameter | None = nn.Parameter(torch.empty(width, output_dim))
        self.proj_colors = nn.Linear(width, colors, bias=False)
        for name, parameter in self.named_parameters():
            if name == "proj":
                nn.init.normal_(parameter, std=width**-0.5)
            elif name == "proj_colors.weight":
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                adds_to_residual = name.endswith((".out.weight", ".c_proj.weight"))
                scale = (2 * layers) ** -0.5 if adds_to_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def quantize_colors(self, images: Tensor) -> Tensor:
        """Find the nearest color of the palette: float (B, 3, S, S) in [-1, 1], or uint8 → (B, P) int64."""
        if images.dtype == torch.uint8:
            images = images.float() / 127.5 - 1
        pixels = images.flatten(2).transpose(1, 2).float()  # (B, P, 3)
        with torch.autocast(images.device.type, enabled=False), torch.no_grad():
            palette = self.palette.float()
            # |x − c|² without |x|², which is the same for all colors
            distances = palette.square().sum(dim=1) - 2 * pixels @ palette.T  # (B, P, C)
            return distances.argmin(dim=-1)

    def compute_tokens(self, colors: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Compute normalized tokens (B, P, D) of colors (B, P).

        If causal, token p depends on the pixels before p. Otherwise it depends on all pixels except the ``chosen``
        ones, (B, K) int64, which are masked.
        """
        special = len(self.palette)
        if self.causal:
            inputs = torch.cat([torch.full_like(colors[:, :1], special), colors[:, :-1]], dim=1)
        else:
            inputs = colors if chosen is None else colors.scatter(1, chosen, special)
        x = self.color_embedding(inputs) + self.positional_embedding[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        normalized: Tensor = self.ln_post(x)
        return normalized

    def encode_with_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features and tokens: images (B, 3, S, S) in [-1, 1] → (B, O), (B, P, D)."""
        tokens = self.compute_tokens(self.quantize_colors(images))
        features = tokens.mean(dim=1)
        return features if self.proj is None else features @ self.proj, tokens

    def forward(self, images: Tensor) -> Tensor:
        """Compute features: images (B, 3, S, S) in [-1, 1] → (B, O)."""
        return self.encode_with_tokens(images)[0]

    def nll(self, images: Tensor, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Sum −log p of all pixels given the previous ones, or of the ``chosen`` ones given the others: a scalar.

        Args:
            images: (B, 3, S, S), see ``quantize_colors``.
            tokens: (B, P, D), those of the images; not used with ``chosen``.
            chosen: (B, K) int64; None if the tower is causal.
        """
        colors = self.quantize_colors(images)
        if chosen is not None:
            tokens = self.compute_tokens(colors, chosen)
            tokens = tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1]))
            colors = colors.gather(1, chosen)
        logits = self.proj_colors(tokens).flatten(0, 1)  # (N, C)
        with torch.autocast(images.device.type, enabled=False):
            return F.cross_entropy(at_least_float32(logits), colors.flatten(), reduction="sum")

    @torch.no_grad()
    def complete_pixels(
        self,
        colors: Tensor,
        *,
        temperature: float = 1.0,
        generator: torch.Generator,
        show: Callable[[int], object] = lambda done: None,
    ) -> Tensor:
        """Sample the missing last pixels: (B, p) → (B, P) int64; only if causal. ``show`` gets how many."""
        first = colors.shape[1]
        for position in range(first, len(self.positional_embedding)):
            tokens = self.compute_tokens(F.pad(colors, (0, 1)))[:, position]  # does not depend on the padding
            odds = (self.proj_colors(tokens).float() / temperature).softmax(dim=-1)
            colors = torch.cat([colors, odds.multinomial(1, generator=generator)], dim=1)
            show(position + 1 - first)
        return colors


class PixelBlock(nn.Module):
    """Attention and an MLP, with norms before them and no biases."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.ln_1 = nn.RMSNorm(width, eps=_EPSILON)
        self.attn = PixelAttention(width, heads, causal=causal)
        self.ln_2 = nn.RMSNorm(width, eps=_EPSILON)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        hidden: Tensor = self.c_fc(self.ln_2(x))
        wider: Tensor = hidden * torch.sigmoid(1.702 * hidden)
        out: Tensor = x + self.c_proj(wider)
        return out


class PixelAttention(nn.Module):
    """Self-attention, (B, P, D) → (B, P, D)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, P, D / H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
