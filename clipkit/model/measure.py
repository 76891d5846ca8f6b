"""Measure what a model costs, without computing it: FLOPs, and the bytes of its tensors.

The model is copied with tensors that have a shape and a dtype but no values, and computes as on a CPU, with fused
attention and autocast. So any tower and any term of the loss can be measured as it is. torch's ``FakeTensorMode``
does the same, but importing it takes as long as importing torch.

The convention for FLOPs is that of model FLOPs utilization (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B): only matrix products count, a multiply-add is two operations, and what is computed again in the
backward pass does not count. Attention counts the full square of a caption's length although the mask hides
half of it.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipkit.distributed import alone
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import fused_attention, grid_weights

_ROWS = 2  # with one, batch norms have no variance
_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_Module = TypeVar("_Module", bound=nn.Module)


class Unmeasurable(Exception):
    """The computation depends on the values of tensors, which are not computed."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one sample."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """Sum of the two passes."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """The most memory that tensors took at a time.

    Attributes:
        activations: tensors besides gradients of parameters and copies of weights.
        weight_copies: copies of weights in half precision.
        block_copies: those of ``parameters_in_blocks``, see ``Meter.begin``.
    """

    activations: int
    weight_copies: int
    block_copies: int
    together: int


class _Shadow(Tensor):
    """A tensor on the CPU without values: a tensor on the meta device that says otherwise."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> "_Shadow":
        shadow: _Shadow = Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        shadow.meta = meta
        return shadow

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *operation: Any) -> Any:
        raise RuntimeError("tensors without values are computed with only while a Meter is active")


def _to_meta(value: Any) -> Any:
    if isinstance(value, _Shadow):
        return value.meta
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=_META)
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, list | tuple):
        return [_to_meta(element) for element in value]
    return value


def _count_product(*inputs: Tensor, result: Tensor, **options: Any) -> int:
    return 2 * result.numel() * inputs[-1].shape[-2]


def _count_convolution(
    values: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, is_transposed: bool,
    *rest: Any, result: Tensor,
) -> int:  # fmt: skip
    positions = values if is_transposed else result
    return 2 * positions.numel() * math.prod(weight.shape[1:])


def _count_convolution_backward(gradient: Tensor, *inputs: Any, result: Any) -> int:
    *arguments, needed = inputs
    gradients = int(needed[0]) + int(needed[1])  # of the values and of the weight
    return gradients * _count_convolution(*arguments, result=gradient)


def _count_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, result: Any = None, **options: Any) -> int:
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _count_attention_backward(gradient: Tensor, *inputs: Any, result: Any = None, **options: Any) -> int:
    return 2 * _count_attention(*inputs[:3])


# As in torch.utils.flop_counter, which imports triton: 0.5 s at every start of a training.
_FLOPS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm), _count_product),
    _aten.convolution: _count_convolution,
    _aten.convolution_backward: _count_convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
}


def _same(values: Tensor, *rest: Any, **options: Any) -> Tensor:
    return values.new_empty(values.shape)


def _empty_like(values: Tensor, **options: Any) -> Tensor:
    return values.new_empty(values.shape, dtype=options.get("dtype") or values.dtype)


def _same_as_input(gradient: Tensor, values: Tensor, **options: Any) -> Tensor:
    return values.new_empty(values.shape)


def _combine(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    shape = np.broadcast_shapes(a.shape, b.shape) if isinstance(b, Tensor) else a.shape
    return torch.empty(shape, dtype=torch.result_type(a, b), device=_META)


def _fill_size(gradient: Tensor, size: list[int], *rest: Any) -> Tensor:
    return gradient.new_empty(size)


def _count_up(end: int, **options: Any) -> Tensor:
    return torch.empty(end, dtype=options.get("dtype") or torch.int64, device=_META)


def _take(values: Tensor, indices: list[Tensor | None]) -> Tensor:
    shapes = [index.shape for index in indices if index is not None]
    return values.new_empty(*np.broadcast_shapes(*shapes), *values.shape[len(shapes) :])


def _embed(weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty(*indices.shape, weight.shape[1])


def _compare(a: Tensor, b: Any) -> Tensor:
    return a.new_empty(a.shape, dtype=torch.bool)


def _select_by_mask(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    shape = np.broadcast_shapes(mask.shape, a.shape, b.shape)
    return torch.empty(shape, dtype=torch.result_type(a, b), device=_META)


def _change_in_place(a: Tensor, *rest: Any, **options: Any) -> Tensor:
    return a


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _product_with_bias(bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return _product(a, b)


def _layer_norm(values: Tensor, shape: list[int], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    statistics = [*values.shape[: values.ndim - len(shape)], *[1] * len(shape)]
    sums = [torch.empty(statistics, dtype=torch.float32, device=_META) for _ in range(2)]
    return _same(values), sums[0], sums[1]


def _layer_norm_backward(
    gradient: Tensor, values: Tensor, shape: list[int], mean: Tensor, deviation: Tensor,
    weight: Tensor | None, bias: Tensor | None, needed: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    gradients = []
    for like, is_needed in zip((values, weight, bias), needed, strict=True):
        gradients.append(_same(like) if is_needed and like is not None else None)
    return tuple(gradients)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    mixed = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return mixed, torch.empty(batch, length, heads, dtype=torch.float32, device=_META).transpose(1, 2)


def _attention_backward(gradient: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    gradients = []
    for values in inputs[:3]:
        batch, heads, length, width = values.shape
        gradients.append(values.new_empty(batch, length, heads, width).transpose(1, 2))
    return tuple(gradients)


def _sum(values: Tensor, dims: list[int], keep: bool = False, **options: Any) -> Tensor:
    summed = {dim % values.ndim for dim in dims}
    shape = []
    for dim, size in enumerate(values.shape):
        if dim not in summed:
            shape.append(size)
        elif keep:
            shape.append(1)
    return torch.empty(shape, dtype=options.get("dtype") or values.dtype, device=_META)


def _norm(values: Tensor, order: float, dims: list[int], keep: bool = False, **options: Any) -> Tensor:
    return _sum(values, dims, keep, **options)


def _concatenate(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.empty(shape, dtype=dtype, device=_META)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return tensors[0].new_empty(shape)


# Results of the operations of clipkit's own towers. torch's meta kernels for them import its compiler, which takes
# as long as importing torch.
_RESULTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _combine),
    **dict.fromkeys(
        (
            _aten.add_.Tensor,
            _aten.sub_.Tensor,
            _aten.mul_.Tensor,
            _aten.div_.Tensor,
            _aten.masked_fill_.Scalar,
        ),
        _change_in_place,
    ),
    **dict.fromkeys((_aten.gt.Scalar, _aten.ge.Scalar, _aten.eq.Scalar), _compare),
    **dict.fromkeys(
        (_aten.empty_like.default, _aten.ones_like.default, _aten.zeros_like.default), _empty_like
    ),
    _aten.arange.default: _count_up,
    _aten.index.Tensor: _take,
    _aten.embedding.default: _embed,
    _aten.where.self: _select_by_mask,
    _aten.mm.default: _product,
    _aten.addmm.default: _product_with_bias,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys(
        (
            _aten.gelu.default,
            _aten.clamp_min.default,
            _aten.neg.default,
            _aten.cumsum.default,
            _aten.exp.default,
            _aten.index_put.default,
        ),
        _same,
    ),
    **dict.fromkeys((_aten.slice_backward.default, _aten.select_backward.default), _fill_size),
    _aten.gelu_backward.default: _same_as_input,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.sum.dim_IntList: _sum,
    _aten.linalg_vector_norm.default: _norm,
    _aten.cat.default: _concatenate,
    _aten.stack.default: _stack,
}


def _to_float32(norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under autocast, norms return float32 on GPUs, and the dtype of their input on CPUs: do as on GPUs."""
    if torch.is_autocast_enabled("cpu"):
        return (inputs[0].float(), *inputs[1:])
    return inputs


class Meter(TorchDispatchMode):
    """Computes without values: new tensors have none, FLOPs are counted, and memory is recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        # memory is known by the address of its storage while it is alive, and by a number that is not used again
        self._numbers: dict[int, int] = {}
        self._count = self._first = 0
        self._parameters: set[int] = set()
        self._in_blocks: set[int] = set()
        # copies of parameters: whether of those in blocks
        self._copies: dict[int, bool] = {}
        self._changes: list[tuple[int, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, to keep it from compiling this class
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _CPU
        # encoders of transformers ask whether all tokens are visible, and all are
        if func is _aten.all.default:
            return torch.tensor(True)
        if func is _aten._local_scalar_dense.default and not isinstance(args[0], _Shadow):
            return func(*args)
        meta_args = _to_meta(args)
        meta_kwargs = {name: _to_meta(value) for name, value in (kwargs or {}).items()}
        if func is _aten.lift_fresh.default:
            return self._shadow_of(meta_args[0])
        result = _RESULTS.get(func, func)(*meta_args, **meta_kwargs)
        formula = _FLOPS.get(func.overloadpacket)
        if formula is not None and not _is_recomputing():
            self.flops += formula(*meta_args, **meta_kwargs, result=result)
        if func is _aten._to_copy.default and _address(meta_args[0]) in self._parameters:
            self._copies[self._count] = _address(meta_args[0]) in self._in_blocks
        written = {
            id(tensor.meta): tensor
            for tensor in (*args, *(kwargs or {}).values())
            if isinstance(tensor, _Shadow)
        }
        if isinstance(result, list | tuple):
            return type(result)(self._shadow_of(element, written) for element in result)
        return self._shadow_of(result, written)

    def _shadow_of(self, value: Any, written: Mapping[int, Tensor] | None = None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if written and id(value) in written:
            return written[id(value)]
        storage = value.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address not in self._numbers:
            self._numbers[address] = self._count
            self._changes.append((self._count, size))
            weakref.finalize(storage, self._release, address, self._count, size).atexit = False
            self._count += 1
        return _Shadow(value)

    def _release(self, address: int, storage: int, size: int) -> None:
        del self._numbers[address]
        if storage >= self._first:
            self._changes.append((storage, -size))

    def begin(self, parameters: Iterable[Tensor], parameters_in_blocks: Iterable[Tensor] = ()) -> None:
        """Count FLOPs and bytes from now on; tensors that exist already, such as these parameters, do not count."""
        self.flops = 0
        self._parameters = {_address(parameter) for parameter in parameters}
        self._in_blocks = {_address(parameter) for parameter in parameters_in_blocks}
        self._first = self._count
        self._changes.clear()

    def most_bytes(self, gradients: Iterable[Tensor] = ()) -> Bytes:
        """Return the most memory since ``begin``, given the gradients of parameters, which are still alive."""
        gradient_storages = {self._numbers[_address(gradient)] for gradient in gradients}
        activations = copies = block_copies = together = 0
        most_activations = most_copies = most_block_copies = most_together = 0
        for storage, size in self._changes:
            together += size
            if storage in self._copies:
                copies += size
                block_copies += size * self._copies[storage]
            elif storage not in gradient_storages:
                activations += size
            most_activations = max(most_activations, activations)
            most_copies = max(most_copies, copies)
            most_block_copies = max(most_block_copies, block_copies)
            most_together = max(most_together, together)
        return Bytes(
            activations=most_activations,
            weight_copies=most_copies,
            block_copies=most_block_copies,
            together=most_together,
        )


def _is_recomputing() -> bool:
    """Return whether a backward pass is computing a forward pass: its own operations need no graph."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0


class _AllRecomputed(Exception):
    """What was saved for the backward pass has been computed again."""


def recompute_function(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a function whose activations are recomputed in the backward pass.

    torch's ``checkpoint`` does the same, but imports torch's compiler.
    """
    bf16 = torch.is_autocast_enabled("cpu")
    saved = 0
    recomputed: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> int:
        nonlocal saved
        saved += 1
        return saved - 1

    def keep(tensor: Tensor) -> Tensor:
        # an output that is saved would be part of a reference cycle
        tensor = tensor.detach()
        recomputed[len(recomputed)] = tensor
        if len(recomputed) == saved:
            raise _AllRecomputed
        return tensor

    def recompute(i: int) -> Tensor:
        if not recomputed:
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            precision = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
            with suppress(_AllRecomputed), torch.enable_grad(), precision, hooks:
                function(*arguments)
        value = recomputed[i]
        recomputed[i] = None  # type: ignore[assignment]
        return value

    with torch.autograd.graph.saved_tensors_hooks(count, recompute):
        return function(*arguments)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def measuring() -> Iterator[Meter]:
    """Compute without values, as the only process; the state of the random generator does not change.

    Raises:
        Unmeasurable: something reads values.
    """
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            fused_attention(),
            alone(),
            Meter() as meter,
        ):
            yield meter
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unmeasurable(str(error)) from error
    finally:
        grid_weights.cache_clear()  # those of this context have no values


def copy_without_values(model: _Module) -> _Module:
    """Copy a model; call it in the context of ``measuring``."""
    copies: dict[int, object] = {}
    for parameter in model.parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=_CPU)
        copies[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=_CPU)
    for name in ("architecture", "preprocess", "tokenizer"):
        value = getattr(model, name, None)
        copies[id(value)] = value
    shadow = copy.deepcopy(model, copies)
    for module in shadow.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.register_forward_pre_hook(_to_float32)
    return shadow


def image_flops(model: CLIP, *, patches: int | None = None, image_size: int = 0) -> Flops:
    """Measure the FLOPs of encoding one image.

    Args:
        model: the model; parameters that require no gradient are not trained.
        patches: number of patches that are kept, or of an image of variable size; None for all, or the most.
        image_size: side of the image in pixels; 0: the model's.

    Raises:
        Unmeasurable: the tower reads values.
    """
    vision = model.architecture.vision

    def encode(shadow: CLIP) -> Tensor:
        images = torch.empty(_ROWS, *model.preprocess.input_shape, dtype=torch.uint8)
        if vision.image_tokens:
            return shadow.encode_image(images, grids=[(1, patches or vision.image_tokens)] * _ROWS)
        if image_size:
            images = torch.empty(_ROWS, vision.channels, image_size, image_size, dtype=torch.uint8)
        kept = None if patches is None else torch.empty(_ROWS, patches, dtype=torch.int64)
        return shadow.encode_image(images, patches=kept)

    return _flops_of(encode, model)


def text_flops(model: CLIP, length: int) -> Flops:
    """Measure the FLOPs of encoding one text of ``length`` tokens, with start and end; otherwise as for images."""

    def encode(shadow: CLIP) -> Tensor:
        tokens = torch.empty(_ROWS, length, dtype=torch.int64)
        return shadow.encode_text(tokens, lengths=(length,) * _ROWS)

    return _flops_of(encode, model)


def _flops_of(encode: Callable[[CLIP], Tensor], model: CLIP) -> Flops:
    with measuring() as meter:
        features = encode(copy_without_values(model))
        forward = meter.flops
        if features.requires_grad:
            torch.autograd.backward(features.sum())
        return Flops(forward=forward // _ROWS, backward=(meter.flops - forward) // _ROWS)


def image_gflops(model: CLIP) -> float | None:
    """Measure the GFLOPs of encoding one image, to four digits; None if the tower reads values."""
    try:
        return float(f"{image_flops(model).forward / 1e9:.4g}")
    except Unmeasurable:
        return None


@cache
def architecture_gflops(shape: Architecture) -> float | None:
    """Measure ``image_gflops`` of an architecture."""
    with torch.device("meta"):
        return image_gflops(CLIP(shape).requires_grad_(False))
