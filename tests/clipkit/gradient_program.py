"""Program run by test_distributed.py under torchrun: writes gradients of a fixed global batch.

One launch computes them in many ways, one after the other.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipkit import distributed
from clipkit.batch import Batch
from clipkit.config import DistillConfig, LossConfig
from clipkit.model.architectures import (
    Adapters,
    Architecture,
    ClassTable,
    Decoder,
    PixelTower,
    TextTower,
    VisionTower,
    WordTable,
)
from clipkit.model.clip import CLIP
from clipkit.model.lora import add_adapters
from clipkit.model.towers import draw_patches, select_distinct
from clipkit.objectives import Objective, ObjectiveState, Targets, Term, TermBatch
from clipkit.objectives.caption import Caption
from clipkit.objectives.caption_words import CaptionWords
from clipkit.objectives.classes import Classes
from clipkit.objectives.clip import Clip
from clipkit.objectives.distill import Teaching
from clipkit.objectives.global_clip import GlobalClip
from clipkit.objectives.image_gpt import ImageGpt
from clipkit.objectives.masked import Masked
from clipkit.objectives.none import NoComparison
from clipkit.objectives.siglip import SigLip
from clipkit.objectives.tiles import CaptionGathering
from clipkit.objectives.views import Views
from clipkit.objectives.words import Words
from clipkit.training.build import lock
from clipkit.training.ema import AveragedWeights
from clipkit.training.parallel import clip_gradients, complete_gradients, replicated, shard, without_values
from clipkit.training.step import LocalTerms, Sides, backward, batch_loss, encode_pairs

BATCH, END, PATCHES, KEPT, CLASSES = 23, 99, 16, 7, 9  # BATCH is divisible by no number of ranks or parts
ACCUMULATIONS = (1, 5)


@dataclass(frozen=True, kw_only=True)
class Way:
    """What to compute, and how."""

    loss: str = "clip"
    caption: str = ""  # how the decoder predicts captions
    masked: str = ""  # the target of masked patches
    pixels: str = ""  # how the pixel tower predicts pixels
    words: bool = False  # whether words of captions are predicted from features
    views: bool = False
    several: bool = False  # whether images have two captions
    negatives: bool = False  # whether some images have a hard negative caption
    weighted: bool = False
    fields: bool = False  # whether sides are combined from several fields
    dropout: bool = False
    projections: bool = (
        False  # whether the last images have a projection of their own; the first rank has none
    )
    locked: bool = False
    adapters: bool = False
    parts: int = 1
    lengths: bool = False
    sharded: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def what(self) -> str:
        """The settings that change the result."""
        caption = f" caption {self.caption}" if self.caption else ""
        masked = f" masked {self.masked}" * bool(self.masked) + " views" * self.views
        masked += f" pixels {self.pixels}" * bool(self.pixels) + " words" * self.words
        masked += " negatives" * self.negatives + " several" * self.several + " weighted" * self.weighted
        masked += " fields" * self.fields
        masked += " dropout" * self.dropout + " adapters" * self.adapters
        masked += " projections" * self.projections
        return f"{self.loss}{caption}{masked}{' locked' * self.locked}"

    @property
    def name(self) -> str:
        """All settings."""
        how = f"{self.parts}{' lengths' * self.lengths}{' sharded' * self.sharded} {str(self.dtype)[6:]}"
        return f"{self.what}/{how}"


WHAT = (
    Way(),
    Way(loss="siglip"),
    Way(loss="positives"),
    Way(loss="classes"),
    Way(loss="taught classes"),
    Way(loss="distilled classes", dropout=True),
    Way(loss="words"),
    Way(words=True),
    Way(loss="siglip", words=True, masked="color", dropout=True),
    Way(loss="global", words=True),
    Way(loss="global", locked=True),
    Way(loss="smoothed prefixes"),
    Way(loss="siglip prefixes"),
    Way(loss="none", caption="tokens", dropout=True),
    Way(loss="clip", caption="parallel"),
    Way(loss="siglip", caption="text"),
    Way(loss="clip", caption="shared", dropout=True),
    Way(loss="none", masked="color"),
    Way(loss="clip", masked="small", dropout=True),
    Way(loss="siglip", masked="pixels", caption="tokens"),
    Way(loss="clip", negatives=True, caption="tokens"),
    Way(loss="smoothed prefixes", negatives=True),
    Way(loss="siglip", negatives=True),
    Way(loss="positives", several=True),
    Way(loss="positives", several=True, weighted=True),
    Way(loss="smoothed prefixes", negatives=True, weighted=True),
    Way(fields=True, weighted=True, caption="tokens", dropout=True),
    Way(loss="siglip prefixes", fields=True, negatives=True),
    Way(loss="positives", fields=True, several=True),
    Way(loss="siglip", negatives=True, weighted=True, caption="tokens"),
    Way(loss="none", pixels="next"),
    Way(loss="siglip", pixels="masked", caption="tokens"),
    Way(loss="none", views=True),
    Way(loss="siglip", views=True, masked="color"),
    Way(loss="self-taught", masked="features", dropout=True),
    Way(dropout=True),
    Way(dropout=True, projections=True),
    Way(loss="siglip", caption="tokens", projections=True),
    Way(locked=True),
    Way(adapters=True, dropout=True),
    Way(loss="siglip", adapters=True, caption="tokens"),
)


def ways(world: int) -> list[Way]:
    """All ways that a launch with ``world`` ranks computes.

    Two ranks compute each sum once, every other one sharded, to save time.
    """
    if world == 2:
        return [
            replace(one, sharded=number % 2 == 1 and not one.pixels, parts=2)
            for number, one in enumerate(WHAT)
        ]
    wanted = [replace(one, parts=number) for one in WHAT for number in ACCUMULATIONS]
    wanted += [replace(one, lengths=True, parts=2) for one in WHAT]
    wanted += [replace(one, dtype=torch.float32, parts=5) for one in WHAT]
    if world > 1:
        own = [one for one in WHAT if not one.pixels]
        wanted += [replace(one, sharded=True, parts=number) for one in own for number in ACCUMULATIONS]
    return wanted


def main() -> None:
    torch.set_num_threads(1)
    distributed.start()
    found = {}
    for way in ways(distributed.world_size()):
        found.update({f"{way.name}/{name}": value for name, value in compute(way).items()})
    if distributed.rank() == 0:
        save_file(found, sys.argv[1])
    distributed.stop()


def compute(way: Way) -> dict[str, Tensor]:
    """The loss of the fixed global batch, the norm of its gradient, and the gradients by parameter name."""
    torch.manual_seed(0)
    shape = Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=32, patch_size=8, width=32, layers=2, heads=2),
        text=TextTower(width=32, layers=2, heads=2, context_length=30, vocab_size=END + 1),
        logit_bias=way.loss.startswith(("siglip", "self-taught")),
    )
    if way.loss.endswith("classes"):
        shape = replace(shape, text=ClassTable(names=tuple(map(str, range(CLASSES)))))
    if distilled := way.loss == "distilled classes":
        vision = shape.vision.plain
        assert vision is not None
        shape = replace(shape, vision=replace(vision, pool="distilled"))
    if way.loss == "words":
        shape = replace(shape, text=WordTable(context_length=30, vocab_size=END + 1))
    if way.caption:
        feed = way.caption if way.caption in ("text", "shared") else "tokens"
        parallel = way.caption == "parallel"
        decoder = Decoder(
            width=32, layers=2, heads=4, context_length=20, vocab_size=END + 1, feed=feed, parallel=parallel
        )
        shape = replace(shape, decoder=decoder)
        if feed == "shared" and shape.text.plain is not None:
            shape = replace(shape, text=replace(shape.text.plain, causal=False))
    if way.masked:
        shape = replace(shape, masked=way.masked)
    if way.words:
        shape = replace(shape, words=60)
    if way.projections:
        shape = replace(shape, projections=("replayed", "unused"))
    if way.pixels:
        tower = PixelTower(image_size=8, width=16, layers=2, heads=2, colors=8, causal=way.pixels == "next")
        shape = replace(shape, vision=tower)
    model = CLIP(shape).initialize().to(way.dtype)
    if model.logit_bias is not None:
        model.logit_bias.requires_grad_()
    if way.locked:
        lock(model, image="all", text=2)
    if way.adapters:
        add_adapters(model, Adapters(rank=3, alpha=6, image=True, text=True, source="", hash=""), seed=7)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(".up"):
                random = torch.Generator().manual_seed(number)
                torch.nn.init.normal_(parameter, std=0.1, generator=random)
        model.to(way.dtype)
    if way.sharded:
        whole, model = model, without_values(model).to(way.dtype)
        shard(model, whole.state_dict(), "full", device=torch.device("cpu"))
    trained: nn.Module = replicated(model)
    given, identities, captions, rows = inputs(way)
    targets = Targets(
        identities=identities,
        tokens=captions,
        same="negatives",
        smoothing=0.2,
        negatives=rows % 4 > 0,
    )
    plain = replace(targets, smoothing=0.0, negatives=targets.negatives if way.negatives else None)
    random = torch.Generator().manual_seed(3)
    state = ObjectiveState(
        {
            "global_clip.estimates": torch.randn(BATCH, 2, generator=random),
            "words.frequencies": torch.randint(1, 50, (END + 2,), generator=random),
            "words.numbers": torch.arange(END + 1).where(torch.arange(END + 1) < 40, -1),
        }
    )
    estimated = replace(plain, state=state, numbers=(rows * 5) % BATCH, progress=1.0)
    labels = replace(plain, tokens=identities[:, 1:])
    if way.weighted:
        plain = replace(plain, weights=(rows % 5).float())
    positives = replace(plain, same="positives")
    if way.several:
        pair_weights = None if plain.weights is None else plain.weights.repeat(2)
        positives = replace(positives, identities=torch.cat([identities, identities]), weights=pair_weights)
    loss_name = way.loss.removesuffix(" prefixes")
    objectives: dict[str, tuple[Objective, Targets]] = {
        "clip": (Clip(), plain),
        "siglip": (SigLip(), plain),
        "self-taught": (SigLip(), plain),
        "positives": (Clip(), positives),
        "classes": (Classes(), labels),
        "taught classes": (Classes(), labels),
        "distilled classes": (Classes(), labels),
        "words": (Words(), plain),
        "global": (GlobalClip(), estimated),
        "smoothed": (Clip(), replace(plain, smoothing=0.2)),
        "none": (NoComparison(), plain),
    }
    sizes = {
        "smoothed prefixes": LossConfig(dims=(5, 16), dim_weights=(1.0, 2.0, 3.0)),
        "siglip prefixes": LossConfig(dims=(8,)),
    }
    teaching, distill = None, DistillConfig()
    if way.loss in ("taught classes", "distilled classes"):
        random = torch.Generator().manual_seed(8)
        teacher = torch.randn(BATCH, 6, dtype=torch.float64, generator=random)
        heads = torch.randn(CLASSES, 6, dtype=torch.float64, generator=random)
        teaching = Teaching(images=teacher[rows], texts=heads, scale=torch.tensor(2.0))
        distill = DistillConfig(teacher="any", temperature=3.0)

    @cache
    def teach() -> Teaching:
        averaged = AveragedWeights(model, 0.9)
        averaged.restore(CLIP(shape).initialize().to(way.dtype).state_dict(), origin="others")
        pairs = {name: value for name, value in given.items() if name != "patches"}
        tokens = way.masked == "features"
        return encode_pairs(trained, pairs, averaged=averaged, bf16=False, tokens=tokens)

    if way.loss == "self-taught":
        teaching, distill = teach(), DistillConfig(teacher="average", weight=0.3)
    objective, its_targets = objectives[loss_name]
    gathering = None
    if objective.gathers_captions:
        gathering = CaptionGathering(has_negatives=its_targets.negatives is not None)
    sides = None
    if way.fields:
        sides = Sides(images=(0.7, 0.3), texts=(0.6, 0.4))
        if way.negatives or way.several:
            sides = Sides(images=(0.7, 0.2, 0.1))
    loss = partial(
        batch_loss,
        objective=objective,
        targets=its_targets,
        settings=sizes.get(way.loss, LossConfig()),
        several_captions=way.several,
        teaching=teaching,
        distill=distill,
        halves=distilled,
        gathering=gathering,
        sides=sides,
    )
    batch = Batch(
        images=given["images"],
        tokens=captions,
        lengths=tuple((captions.argmax(dim=1) + 1).tolist()),
        ids=rows,
        identities=identities,
        first_row=int(rows[0]),
        words=select_distinct(captions, captions < END),
    )
    wanted: dict[str, tuple[Term, int]] = {}
    if way.caption:
        parallel_rows = 0.5 * (way.caption == "parallel")
        wanted["caption"] = Caption(weight=0.7, parallel=parallel_rows, length=20), 3
    if way.masked:
        wanted["masked"] = Masked(weight=0.3, target=way.masked), 4
    if way.words:
        wanted["words"] = CaptionWords(weight=0.8), 7
    if way.pixels:
        wanted["image_gpt"] = ImageGpt(weight=0.6), 6
    if way.views:
        wanted["views"] = Views(weight=0.4, count=3), 5
    terms = None
    if wanted:
        made = {
            name: term.inputs(TermBatch(batch=batch, seed=seed, shape=shape, teach=teach, state=state))
            for name, (term, seed) in wanted.items()
        }
        counts = torch.tensor([count for _, count in made.values()], dtype=torch.float64)
        weights = [term.weight for term, _ in wanted.values()]
        terms = LocalTerms(
            terms={name: term for name, (term, _) in wanted.items()},
            inputs={name: arguments for name, (arguments, _) in made.items()},
            weights=torch.tensor(weights, dtype=torch.float64),
            counts=distributed.sum_over_ranks(counts),
        )

    def start_gathering(texts: Tensor) -> None:
        assert gathering is not None
        gathering.start(texts if sides is None else sides.combine_texts(texts.detach(), rows=len(rows)))

    on_texts = None if gathering is None else start_gathering
    done = backward(
        trained, given, loss=loss, parts=way.parts, autocast=False, terms=terms, on_texts=on_texts
    )
    complete_gradients(model)
    norm = clip_gradients(model, 1.0)
    same = distributed.gather_objects([float(done.loss), float(norm)])
    assert all(one == same[0] for one in same), same  # every rank holds the loss and norm of the global batch
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    return {**gradients, "loss": done.loss.reshape(1), "norm": norm.reshape(1)}


def inputs(way: Way) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """Return this rank's part of the batch: captions of very different lengths, some of them equal."""
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8, generator=random)
    tokens = torch.randint(1, END, (BATCH, 30), generator=random)
    ends = (torch.arange(BATCH) * 7) % 28 + 1
    tokens.scatter_(1, ends[:, None], END)
    identities = torch.stack([torch.arange(BATCH), torch.arange(BATCH) % CLASSES], dim=1)
    rank, world = distributed.rank(), distributed.world_size()
    rows = torch.arange(rank * BATCH // world, (rank + 1) * BATCH // world)
    longest = int(ends[rows].max()) + 1  # each rank trims to its longest caption
    captions = tokens[rows, :longest]
    side = 8 if way.pixels else 32
    given: dict[str, Any] = {"images": images[rows, :, :side, :side], "tokens": captions}
    if way.dropout:
        given["patches"] = draw_patches(seed=5, rows=rows, patches=PATCHES, keep=KEPT)
    if way.projections:
        given["projections"] = (rows > BATCH // 2).long()
    if way.loss.endswith("classes"):
        given["tokens"] = torch.arange(CLASSES)[:, None]
    elif way.loss == "words":
        given["tokens"] = torch.arange(END + 1)[:, None]
    elif way.negatives or way.several or way.fields:
        wrong = torch.where(rows % 4 > 0, (rows - 1) % BATCH, rows)  # one in four has no negative
        both = torch.cat([rows, wrong]) if way.negatives or way.several else rows
        if way.fields:
            both = torch.cat([both, (rows + 5) % BATCH, (rows + 11) % BATCH])
        given["tokens"] = tokens[both, : int(ends[both].max()) + 1]
        if way.lengths:
            given["lengths"] = tuple((ends[both] + 1).tolist())
    elif way.lengths:
        given["lengths"] = tuple((ends[rows] + 1).tolist())
    return given, identities[rows], captions, rows


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
