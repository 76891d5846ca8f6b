"""Reference losses, computed from all logits at once as in the papers, to compare with clipkit's.

Everything here is for one process. Like the programs that run under torchrun, this module imports only torch.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = (
    "clip", "clip positives", "clip ignored", "clip smoothed", "clip positives smoothed",
    "siglip", "siglip positives", "siglip ignored", "distillation", "clip weighted", "clip positives weighted",
    "clip ignored weighted", "clip smoothed weighted", "clip positives smoothed weighted", "siglip weighted",
    "siglip positives weighted", "siglip ignored weighted", "global",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Given:
    """A global batch; all but the identities, the weights and the teacher require gradients."""

    images: Tensor  # (N, O) unit norm
    texts: Tensor  # (N, O)
    scale: Tensor
    bias: Tensor
    identities: Tensor  # (N, K)
    weights: Tensor  # (N,) some are 0
    teacher_images: Tensor  # (N, P)
    teacher_texts: Tensor  # (N, P)
    teacher_scale: Tensor

    def slice(self, rows: slice) -> "Given":
        """Return some of the rows, as new leaves."""
        by_row = ("images", "texts", "identities", "weights", "teacher_images", "teacher_texts")
        parts = {name: getattr(self, name).detach()[rows] for name in by_row}
        scale, bias = self.scale.detach().clone(), self.bias.detach().clone()
        part = replace(self, **parts, scale=scale, bias=bias)
        for leaf in part.leaves():
            leaf.requires_grad_()
        return part

    def leaves(self) -> list[Tensor]:
        return [self.images, self.texts, self.scale, self.bias]


def given(
    rows: int, *, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 14.3, numbers: int = 2
) -> Given:
    """Random features, correlated within pairs and between student and teacher.

    Float32 features are the float64 ones, rounded.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(rows, width, generator=random, dtype=torch.float64)

    common = draw(24)
    features = [F.normalize(draw(24) + 0.7 * common, dim=-1) for _ in range(2)]
    teacher = [F.normalize(draw(9) + common[:, :9], dim=-1) for _ in range(2)]
    identities = torch.randint(0, max(1, rows * 2 // 3), (rows, numbers), generator=random)
    weights = (torch.rand(rows, generator=random, dtype=torch.float64) * 90 - 10).clamp(min=0)
    scalars = [torch.tensor(value, dtype=torch.float64) for value in (scale, -0.7 * scale, 0.7 * scale)]
    images, texts, t, bias, teacher_images, teacher_texts, teacher_t = (
        one.to(dtype) for one in (*features, *scalars[:2], *teacher, scalars[2])
    )
    whole = Given(
        images=images, texts=texts, scale=t, bias=bias, identities=identities, weights=weights,
        teacher_images=teacher_images, teacher_texts=teacher_texts, teacher_scale=teacher_t,
    )  # fmt: skip
    return whole.slice(slice(None))


# of the loss "global"
GAMMA, PAIRS = 0.3, 1000


def former_estimates(rows: int) -> Tensor:
    """(N, 2) logarithms of the estimates before a step; some samples have none."""
    random = torch.Generator().manual_seed(rows)
    estimates = torch.randn(rows, 2, generator=random) - 1
    estimates[::3] = -torch.inf
    return estimates


def new_estimates(logits: Tensor, former: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return (N, 2): the means g of exponentials, with gradients, and the new estimates u."""
    others = ~torch.eye(len(logits), dtype=torch.bool)
    ratios = [(both - both.diag()[:, None]).exp() * others for both in (logits, logits.T)]
    means = torch.stack([ratio.sum(1) for ratio in ratios], dim=1) / (len(logits) - 1)
    before = former.to(logits.dtype).exp()
    mixed = (1 - gamma) * before + gamma * means.detach()
    return means, torch.where(before == 0, means.detach(), mixed)


def plain_global(logits: Tensor, former: Tensor, *, gamma: float, pairs: int) -> Tensor:
    """Return the loss over all samples; its derivative by the means is that of SogCLR."""
    means, estimates = new_estimates(logits, former, gamma)
    partition = 1 + (pairs - 1) * estimates
    slopes = ((pairs - 1) * means / partition).mean()
    return partition.log().mean() + slopes - slopes.detach()


def same_thing(identities: Tensor) -> Tensor:
    """(N, N): whether two samples share at least one identity."""
    return (identities[:, None] == identities[None]).any(2)


def plain(loss: str, batch: Given) -> Tensor:
    """Compute one of ``LOSSES`` on all logits at once."""
    name, same, smoothing, weighted = _parts(loss)
    weights = batch.weights if weighted else torch.ones_like(batch.weights)
    weights = weights.to(batch.images.dtype) / weights.sum().clamp(min=1e-9)
    together = same_thing(batch.identities)
    logits = batch.scale * batch.images @ batch.texts.T
    own = torch.eye(len(logits), dtype=torch.bool)
    if name == "global":
        return plain_global(logits, former_estimates(len(logits)), gamma=GAMMA, pairs=PAIRS)
    if name == "distillation":
        known = batch.teacher_scale * batch.teacher_images @ batch.teacher_texts.T
        return sum(
            F.kl_div(student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")
            for student, teacher in ((logits, known), (logits.T, known.T))
        ) / torch.tensor(2.0)
    if name == "siglip":
        signs = torch.where(together if same == "positives" else own, 1.0, -1.0)
        terms = F.softplus(-signs * (logits + batch.bias), threshold=1000)
        if same == "ignored":
            terms = terms * (own | ~together)
        return (weights * (terms.sum(0) + terms.sum(1))).sum() / 2
    if same == "positives":
        targets = together.to(logits.dtype)
        targets /= targets.sum(1, keepdim=True)  # the relation is symmetric, hence so are the row sums
        return _mean_cross_entropy(logits, targets, smoothing, weights)
    if same == "ignored":
        logits = logits.masked_fill(together & ~own, -torch.inf)
    pairs = torch.arange(len(logits))
    return _mean_cross_entropy(logits, pairs, smoothing, weights)


def _mean_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor) -> Tensor:
    by_image, by_text = (
        F.cross_entropy(one, targets, label_smoothing=smoothing, reduction="none")
        for one in (logits, logits.T)
    )
    return (weights * (by_image + by_text)).sum() / 2


def _parts(loss: str) -> tuple[str, str, float, bool]:
    """Split the name of a loss into base name, ``same``, smoothing and whether pairs are weighted."""
    unweighted = loss.removesuffix(" weighted")
    smoothing = 0.3 if unweighted.endswith(" smoothed") else 0.0
    name, _, same = unweighted.removesuffix(" smoothed").partition(" ")
    return name, same, smoothing, unweighted != loss


def ours(loss: str, batch: Given) -> Tensor:
    """Compute the same loss with clipkit, for this rank's rows."""
    from clipkit.distributed import gather_row_counts
    from clipkit.objectives.clip import clip_loss
    from clipkit.objectives.distill import distillation_loss
    from clipkit.objectives.global_clip import global_clip_loss
    from clipkit.objectives.siglip import siglip_loss

    name, same, smoothing, weighted = _parts(loss)
    weights = batch.weights if weighted else None
    student = (batch.images, batch.texts, batch.scale)
    if name == "global":
        former = former_estimates(sum(gather_row_counts(len(batch.images))))
        return global_clip_loss(*student, former, gamma=GAMMA, pairs=PAIRS).loss
    if name == "distillation":
        return distillation_loss(*student, batch.teacher_images, batch.teacher_texts, batch.teacher_scale)
    if name == "siglip":
        if same == "positives":
            return siglip_loss(
                *student, batch.bias, identities=batch.identities, same="positives", weights=weights
            )
        identities = batch.identities if same else None
        return siglip_loss(*student, batch.bias, identities=identities, same="ignored", weights=weights)
    if same == "positives":
        return clip_loss(
            *student, identities=batch.identities, same="positives", smoothing=smoothing, weights=weights
        )
    identities = batch.identities if same else None
    return clip_loss(*student, identities=identities, same="ignored", smoothing=smoothing, weights=weights)


def gradients(value: Tensor, batch: Given) -> list[Tensor]:
    """Gradients of images, texts, scale and bias; zeros for an unused bias."""
    found = torch.autograd.grad(value, batch.leaves(), allow_unused=True)
    return [
        torch.zeros_like(leaf) if one is None else one
        for one, leaf in zip(found, batch.leaves(), strict=True)
    ]


def error(found: Tensor, want: Tensor, *, floor: float = 1e-30) -> float:
    """Norm of the difference, relative to the norm of ``want`` (at least ``floor``)."""
    found, want = found.detach().double(), want.detach()
    difference = torch.linalg.vector_norm(found - want)
    return float(difference / torch.linalg.vector_norm(want).clamp_min(floor))


def compare(found: Tensor, batch: Given, want: Tensor, exact: Given, *, rounded: Tensor) -> None:
    """Assert that value and gradients of a loss equal those of the plain formula in float64.

    For a loss close to zero, value and gradients may differ by the rounding error of the logits, and gradients by
    the error of the plain formula on the same float32 features.
    """
    assert found.dtype == batch.images.dtype
    assert found.shape == ()
    bound = 1e-5 if found.dtype == torch.float32 else 1e-10
    of_logits = 2 * max(1, exact.scale.item()) * torch.finfo(found.dtype).eps
    assert error(found, want, floor=of_logits / bound) <= bound
    slopes, exact_slopes, rounded_slopes = (
        gradients(value, of) for value, of in ((found, batch), (want, exact), (rounded, batch))
    )
    for slope, two, three in zip(slopes, exact_slopes, rounded_slopes, strict=True):
        floor = max(1e-2, of_logits / bound)
        assert error(slope, two, floor=floor) <= max(bound, 4 * error(three, two, floor=floor))
