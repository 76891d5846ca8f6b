"""Settings for CPUs, and encoding many images or texts there: one batch per core, with reordered weights.

* If several cores share a matrix product, they wait for each other after each; so each core computes its own batch.
* torch computes a linear layer in float32 by MKL, from the weights as they are stored. With AVX-512, oneDNN, which
  is a part of torch, is 1.1 to 1.2 times as fast on weights in its own blocked layout. Reordering takes as long as
  encoding two images. With AVX2 alone it takes 1.2 times as long as MKL, so weights stay as they are.
* On CPUs of AMD, MKL uses AVX2 even if they have AVX-512. There oneDNN multiplies twice as fast, so it computes all
  products of commands in float32.
* glibc returns the memory of large activations to the system, which clears it before its next use: 8% of the time
  of a ViT-B/32.

Embeddings differ from those of plain layers by rounding only (bench/inference.py has figures), and do not depend
on the number of cores if all batches are computed in parallel.

Letters: M rows, K inputs and N outputs of a linear layer.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipkit.model.processor import has_bfloat16_products, use_onednn_for_float32
from clipkit.model.towers import dtype_of_products

Input = TypeVar("Input")
Output = TypeVar("Output")

_ROWS = 16  # with fewer, a product is bound by reading the weights
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # options of glibc's mallopt
_MOST_FREE = 2**30  # bytes


class PackedWeights:
    """Weights of a model's linear layers in oneDNN's layout, reordered when first used.

    They have no effect on other devices, where gradients are computed, on weights that the forward pass computes,
    such as those with adapters, on few rows, and in models with ``nn.MultiheadAttention``, which has its own fast
    path. They have none on CPUs with AVX2 and without AVX-512 either, see above.
    """

    def __init__(self, model: nn.Module) -> None:
        self._storages: set[int] = set()
        has_fast_path = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        is_faster = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX2"
        self._dtypes = {torch.float32, torch.bfloat16} if has_bfloat16_products() else {torch.float32}
        if is_faster and not has_fast_path:
            for parameter in model.parameters():
                if parameter.device.type == "cpu":
                    self._storages.add(parameter.untyped_storage().data_ptr())
        self._packed: dict[tuple[Any, ...], Tensor] = {}
        self._lock = threading.Lock()

    def activate(self) -> TorchFunctionMode:
        """Return a context in which linear layers of this thread use the weights."""
        return _LinearLayers(self)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute x (…, K), weight (N, K) and bias (N,) → (…, N); None if they do not apply."""
        dtype = dtype_of_products(weight)
        is_packable = weight.untyped_storage().data_ptr() in self._storages and weight.is_contiguous()
        is_supported = dtype in self._dtypes and x.dtype in (dtype, weight.dtype)
        fits = is_supported and x.numel() >= _ROWS * x.shape[-1]
        if not (is_packable and fits) or torch.is_grad_enabled():
            return None
        key = (weight.data_ptr(), weight.shape, dtype)
        if key not in self._packed:
            with self._lock:
                if key not in self._packed:
                    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), None)
                    self._packed[key] = packed
        bias = None if bias is None else bias.to(dtype)
        packed = self._packed[key]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, bias, "none", [], "")
        return out


class _LinearLayers(TorchFunctionMode):
    """Redirects the linear layers of a thread to packed weights."""

    def __init__(self, weights: PackedWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.linear and not kwargs:
            x, weight, bias = args if len(args) == 3 else (*args, None)
            out = self._weights.linear(x, weight, bias)
            if out is not None:
                return out
        return function(*args, **(kwargs or {}))


def run_parallel(
    model: nn.Module, work: Callable[[Input], Output], batches: Iterable[Input]
) -> Iterator[Output]:
    """Yield ``work(batch)`` of each batch in order; on a CPU, one batch per core at a time.

    If there are fewer batches than cores, or on other devices, the calling thread computes them. Autocast and
    gradient modes are those of the calling thread.
    """
    cores = torch.get_num_threads()
    least = max(2, cores)
    batches = iter(batches)
    on_cpu = next(model.parameters()).device.type == "cpu"
    first = list(islice(batches, least if on_cpu else 0))
    if len(first) < least:
        yield from map(work, chain(first, batches))
        return
    weights = PackedWeights(model)
    inference = torch.is_inference_mode_enabled()
    gradients = torch.is_grad_enabled() and not inference
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def work_in_thread(batch: Input) -> Output:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=autocast),
            weights.activate(),
        ):
            return work(batch)

    computing: deque[Future[Output]] = deque()
    with open_core_pool(cores) as pool:
        for batch in chain(first, batches):
            computing.append(pool.submit(work_in_thread, batch))
            if len(computing) > cores:
                yield computing.popleft().result()
        while computing:
            yield computing.popleft().result()


@contextmanager
def open_core_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Create a pool of threads in which torch uses one core each; by default, each would use all cores.

    Pending work is cancelled on exit.
    """
    threads = torch.get_num_threads()
    # applies to the calling thread and to all threads started later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def apply_cpu_settings() -> None:
    """Let torch compute faster on CPUs in this process; for commands, before they start threads."""
    _keep_memory()
    use_onednn_for_float32()


def _keep_memory() -> None:
    """Let this process keep freed memory for its next activations.

    All threads allocate from the heap, because glibc returns the memory of their own arenas to the system. Without
    glibc, it has no effect.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        mallopt(option, _MOST_FREE)
    mallopt(_ARENA_MAX, 1)
