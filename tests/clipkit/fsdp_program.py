"""Program run by test_fsdp.py as two ranks: gradients with gathers in half precision against gathers in float32."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipkit import distributed
from clipkit.batch import Batch
from clipkit.config import LossConfig, load_config
from clipkit.formats.checkpoint import save_model
from clipkit.model import create_architecture
from clipkit.model.architectures import Adapters, Architecture, Decoder, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.lora import add_adapters
from clipkit.objectives import Targets, TermBatch
from clipkit.objectives.caption import Caption
from clipkit.objectives.clip import Clip
from clipkit.objectives.distill import Teaching
from clipkit.training.build import first_model, lock, select_shape
from clipkit.training.parallel import (
    blocks,
    complete_gradients,
    linear_parameters,
    local_part,
    prepare,
    put,
    recompute_blocks,
    scalars,
    shard,
    without_values,
)
from clipkit.training.step import LocalTerms, backward, batch_loss

CPU = torch.device("cpu")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
END = 99
VISION = VisionTower(image_size=16, patch_size=8, width=32, layers=3, heads=2)
SHAPE = Architecture(
    embed_dim=24,
    vision=VISION,
    text=TextTower(width=32, layers=2, heads=2, context_length=12, vocab_size=END + 1),
)
DECODER = Decoder(width=32, layers=2, heads=4, context_length=8, vocab_size=END + 1, feed="text")
SHAPES: Mapping[str, Architecture] = {
    "plain": SHAPE,
    "recomputed": SHAPE,
    "in parts": SHAPE,
    "locked": SHAPE,
    "adapters": SHAPE,
    "map pooling": replace(SHAPE, vision=replace(VISION, pool="map")),
    "decoder": replace(SHAPE, decoder=DECODER),
    "recomputed decoder": replace(SHAPE, decoder=replace(DECODER, feed="tokens")),
}


class Gathers(TorchDispatchMode):
    """Counts the bytes of gathered weights; features are matrices, and numbers of rows integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            gathered = args[0][0] if isinstance(args[0], list) else args[0]
            if gathered.ndim == 1 and gathered.is_floating_point():
                self.bytes += gathered.nbytes
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    distributed.start()
    for name, shape in SHAPES.items():
        former, former_bytes = compute(name, shape, shard_in_float32)
        found, found_bytes = compute(
            name, shape, partial(shard, sharding="full", device=CPU, gather_bf16=True)
        )
        assert former.keys() == found.keys() and len(found) > 5
        for parameter, gradient in former.items():
            assert torch.equal(found[parameter], gradient), (name, parameter)
        print(name, former_bytes, found_bytes, sep=",")
    print("unused", 0, unused_gathers(), sep=",")
    check_first_weights("small.steps=2", "small.image_size=8", "loss.name=siglip")
    with TemporaryDirectory() as folder:
        path = Path(distributed.gather_objects(folder)[0], "model")
        if distributed.rank() == 0:
            save_model(create(create_architecture("ViT-Ti-4-16"), name="ViT-Ti-4-16", seed=3), path)
        distributed.barrier()
        check_first_weights(f"model.weights={path}")
        distributed.barrier()
    distributed.stop()
    sys.stdout.flush()


def shard_in_float32(model: CLIP, weights: Mapping[str, Tensor]) -> None:
    """Shard so that each block is gathered in float32, norms included, and autocast converts the weights."""
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(scalars(model)))
    for method in ("encode_image", "encode_text", "image_tokens", "text_tokens", "decoder_input"):
        register_fsdp_forward_method(model, method)
    model.to_empty(device=CPU)
    model.reset_constants()
    for name, tensor in model.state_dict().items():
        put(tensor, weights[name])


def whole_model(name: str, shape: Architecture) -> CLIP:
    model = create(shape, seed=0)
    if name == "locked":
        lock(model, image=2, text="all")
    if name == "adapters":
        add_adapters(model, Adapters(rank=3, alpha=6, image=True, text=True, source="", hash=""), seed=7)
        random = torch.Generator().manual_seed(1)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".up"):
                torch.nn.init.normal_(parameter, std=0.1, generator=random)
    return model.train()


def compute(name: str, shape: Architecture, apply: Any) -> tuple[dict[str, Tensor], int]:
    """Return this rank's gradients, the loss, and the bytes that are gathered in a step."""
    whole = whole_model(name, shape)
    model = without_values(whole)
    apply(model, whole.state_dict())
    recompute_blocks(model, every=name.startswith("recomputed"))
    inputs, rows = batch(model)
    targets = Targets(
        identities=rows[:, None].expand(-1, 2), tokens=inputs["tokens"], same="negatives", smoothing=0.0
    )
    loss = partial(batch_loss, objective=Clip(), targets=targets, settings=LossConfig())
    terms = None
    if shape.decoder is not None:
        given = Batch(
            images=inputs["images"],
            tokens=inputs["tokens"],
            lengths=inputs["lengths"],
            ids=rows,
            identities=targets.identities,
        )
        term = Caption(weight=0.7, length=8)
        arguments, count = term.inputs(TermBatch(batch=given, seed=3, shape=shape, teach=no_teacher))
        counts = distributed.sum_over_ranks(torch.tensor([count], dtype=torch.float64))
        weights = torch.tensor([0.7], dtype=torch.float64)
        terms = LocalTerms(
            terms={"caption": term}, inputs={"caption": arguments}, weights=weights, counts=counts
        )
    with Gathers() as gathers:
        done = backward(
            model, inputs, loss=loss, parts=2 if name == "in parts" else 1, autocast=True, terms=terms
        )
    complete_gradients(model)
    gradients = {"loss": done.loss}
    for parameter_name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            gradients[parameter_name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return gradients, gathers.bytes


def check_first_weights(*settings: str) -> None:
    """Assert that only rank 0 draws or reads weights, and that all ranks get the rows of an unsharded model."""
    config = load_config(QUICKSTART, ["sharding=full", "model.name=ViT-Ti-4-16", "steps=9", *settings])
    shape = select_shape(config)
    build = partial(first_model, config, shape)
    first = distributed.build_on_rank0(build if distributed.rank() == 0 else no_weights, without_values)
    assert first.logit_scale.is_meta == (distributed.rank() > 0)
    sharded = prepare(first, config, CPU, sharding="full", bf16=False, terms={})
    whole = build()
    assert (first.name, first.preprocess, first.training) == (whole.name, whole.preprocess, whole.training)
    assert torch.equal(first.tokenizer(["a cat"]), whole.tokenizer(["a cat"]))
    weights = whole.state_dict()
    assert weights.keys() == sharded.state_dict().keys()
    for name, tensor in sharded.state_dict().items():
        rows = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(rows, weights[name]), name


def no_weights() -> CLIP:
    raise AssertionError("only rank 0 builds the model")


def no_teacher() -> Teaching:
    raise AssertionError("the term reads no teacher")


def batch(model: CLIP) -> tuple[dict[str, Any], Tensor]:
    random = torch.Generator().manual_seed(distributed.rank())
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8, generator=random)
    lengths = (4, 9, 3, 12, 4, 7)
    tokens = torch.randint(1, END, (6, 12), generator=random)
    for row, length in enumerate(lengths):
        tokens[row, length - 1] = END
        tokens[row, length:] = 0
    rows = torch.arange(6) + 6 * distributed.rank()
    return {"images": images, "tokens": tokens, "lengths": lengths}, rows


def unused_gathers() -> int:
    """Return in how many blocks a weight that is gathered for the backward pass does not reach a gradient."""
    whole = whole_model("plain", SHAPE)
    model = without_values(whole)
    shard(model, whole.state_dict(), "full", device=CPU, gather_bf16=True)
    inputs, _ = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        images, texts, *_ = model(**inputs)
    unused = 0
    for block in blocks(model):
        assert isinstance(block, FSDPModule)
        group = block._get_fsdp_state()._fsdp_param_group
        assert group is not None
        before = group.pre_backward

        def poison(*args: Any, before: Any = before, group: Any = group, **options: Any) -> Any:
            result = before(*args, **options)
            group.wait_for_unshard()
            for parameter in group.fsdp_params:
                parameter._unsharded_param.data.fill_(float("nan"))
            return result

        group.pre_backward = poison  # type: ignore[method-assign]
    torch.autograd.backward([images.sum(), texts.sum()])
    for block in blocks(model):
        gradients = [parameter.grad for parameter in linear_parameters(block)]
        unused += all(
            bool(local_part(gradient).isfinite().all()) for gradient in gradients if gradient is not None
        )
    return unused


if __name__ == "__main__":
    main()
