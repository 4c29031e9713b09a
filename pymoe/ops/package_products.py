"""Computes grouped products on CUDA with another package on request: DeepGEMM, or QuACK, which SonicMoE uses, too.

The package computes only the product of :func:`pymoe.ops.grouped_linear`, in the forward pass and for the gradient of
``x``. pymoe computes gradients of weights, routing, activations and all other steps. A product that the package does
not support raises an error: nothing falls back to another kernel silently.

Sources of the interfaces: DeepGEMM 1.0.0 (layout of groups) and transformers 5.23 (``integrations/deepgemm.py``:
DeepGEMM's products in bfloat16); quack-kernels 0.6.5 (``quack/gemm_interface.py``); kernels 0.17.2 (``get_kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pymoe._common import checks
from pymoe._common.contracts import ROW_LIMIT

Package = Literal["deep_gemm", "quack"]

DEVICE = "cuda"
"""The type of the devices on which the package computes products."""
GENERATIONS = (9, 10)
"""Major compute capabilities for which the packages have kernels: Hopper and Blackwell."""
ALIGNMENT = 16
"""Alignment in bytes that both packages require of operands and of their rows, since they copy them by TMA."""

chosen: Package | None = None
"""The package that computes the products, or None; set by :class:`use_products_of`."""


class use_products_of:
    """Compute the grouped products of bfloat16 on CUDA with another package.

    The package's kernels then multiply the rows of experts wherever :func:`pymoe.ops.grouped_linear` does: in ``MoE``,
    ``Experts`` and ``apply_experts`` with the native backend, with expert parallelism, and in models of transformers
    with ``experts_implementation="pymoe"``. The package also computes the gradients of ``x``; pymoe still computes
    those of weights. Tensors on the CPU and quantised weights are not affected. The promises of
    :func:`pymoe.ops.grouped_linear` about the bits of results do not apply. **No GPU has run this yet**: the tests
    call stand-ins that compute on the CPU what the packages document.

    While a package is chosen, products on CUDA that it does not support raise: dtypes other than bfloat16, biases, rows
    in a given order, numbers of features that are not multiples of 8, weights that are neither contiguous nor a
    transposed view of a contiguous tensor, or that are not aligned to 16 bytes, GPUs other than Hopper and Blackwell
    (compute capability 9 and 10), and for DeepGEMM a second GPU in one process, because its kernels are built for one
    GPU. On compute capability 9.0 and 10.0 layers do not pass biases to the products: the operators after the products
    add them, as after torch's product.

    Calling this sets the choice for the process; as a context manager it restores the previous choice at the end. A
    backward pass uses the choice at the time when it runs; in a graph of ``torch.compile``, that of its forward pass.

    Args:
        package: ``"deep_gemm"`` for DeepGEMM: the installed module ``deep_gemm``, or else, if the package ``kernels``
            is installed, ``kernels-community/deep-gemm``, which it downloads. ``"quack"`` for QuACK (``pip install
            quack-kernels``), whose grouped product SonicMoE uses; SonicMoE itself has only functions for whole layers.
            ``None`` for pymoe's own choice, as at the start.

    Raises:
        TypeError: ``package`` is neither a string nor None.
        ValueError: ``package`` is not one of these.
        ImportError: the package is not installed, or lacks a function that is needed.

    Example::

        pymoe.ops.use_products_of("quack")
        model(batch)
    """

    def __init__(self, package: Package | None) -> None:
        global chosen
        if str(package) == "sonicmoe":
            raise ValueError(
                "use_products_of: package must be 'deep_gemm' or 'quack', got 'sonicmoe', which has functions for "
                "whole layers but no grouped product; its products are those of 'quack'"
            )
        if package is not None:
            checks.choice("use_products_of", "package", package, tuple(_LOADERS))
            _loaded[package] = _LOADERS[package]()
        self._former = chosen
        chosen = package

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global chosen
        chosen = self._former


def product(
    package: Package, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, order: Tensor | None
) -> Tensor:
    """Return ``grouped_linear`` of these operands, computed by a package.

    Args:
        package: the package that computes the product, loaded by :class:`use_products_of`.
        x: (S, H) bfloat16.
        weight: (E, N, H) bfloat16.
        offsets: (E + 1,) int32. Values that are out of range or decrease are brought into range.
        bias: must be None.
        order: must be None.

    Returns:
        (S, N) bfloat16; zero past ``offsets[-1]``.

    Raises:
        TypeError: the dtype is not bfloat16.
        ValueError: the package does not support such operands.
        RuntimeError: the GPU is not one for which the package has kernels; or DeepGEMM's first product in this process
            was on another GPU.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(f"grouped_linear: x must have dtype bfloat16 for products of {package}, got {x.dtype}")
    for name, value in (("bias", bias), ("order", order)):
        if value is not None:
            raise ValueError(f"grouped_linear: {name} must be None for products of {package}, got a tensor")
    result: Tensor = _grouped_linear(x, weight, offsets, package)
    return result


# A custom operator, so that torch.compile does not trace into the packages. It has a namespace of its own, because
# missing_cuda.py registers a kernel that raises for each operator of the namespace pymoe without a CUDA kernel.
@torch.library.custom_op("pymoe_packages::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, package: str) -> Tensor:
    y = x.new_zeros((x.shape[0], weight.shape[1]))
    if y.numel() == 0 or x.shape[1] == 0:
        return y
    _check(package, x, weight)
    bounds = pad(offsets[1:].clamp(0, x.shape[0]).cummax(0).values, (1, 0))
    with torch.cuda.device_of(x):
        return _PRODUCTS[package](_loaded[package], x.contiguous(), weight, bounds, y)


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, package: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _check(package: str, x: Tensor, weight: Tensor) -> None:
    """Raise unless the package supports these operands on this device."""
    major, minor = torch.cuda.get_device_capability(x.device)
    if major not in GENERATIONS:
        raise RuntimeError(
            f"grouped_linear: products of {package} need a GPU of compute capability 9 or 10, got {major}.{minor}"
        )
    for size, name in ((weight.shape[2], "H"), (weight.shape[1], "N")):
        if size * x.element_size() % ALIGNMENT:
            raise ValueError(f"grouped_linear: {name} must be a multiple of 8 for products of {package}, got {size}")
    if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()) or weight.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"grouped_linear: weight must be contiguous, or a transposed view of a contiguous tensor, and aligned to "
            f"{ALIGNMENT} bytes for products of {package}, got strides {weight.stride()} at {weight.data_ptr():#x}"
        )


# --- DeepGEMM


class _DeepGemm(NamedTuple):
    """The parts of DeepGEMM that are used here."""

    nt: Callable[..., None]
    """``nt(a, b, d, layout, use_psum_layout=...)`` multiplies each row of a (M, K) by the transpose of b[e], from b
    (E, N, K), for the row's expert e, and writes the results into d."""
    nn: Callable[..., None]
    """As ``nt``, with b (E, K, N)."""
    alignment: int
    """The rows of every expert begin at a multiple of this."""


def _load_deep_gemm() -> _DeepGemm:
    module = _deep_gemm_module()
    names = ("m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nn_contiguous")
    nt, nn, alignment = (_found(module, name) for name in (*names, "get_mk_alignment_for_contiguous_layout"))
    return _DeepGemm(nt, nn, alignment())


def _deep_gemm_module() -> ModuleType:
    try:
        return import_module("deep_gemm")
    except ImportError as error:
        try:
            kernels: Any = import_module("kernels")
        except ImportError:
            raise ImportError(
                f"use_products_of: neither the module deep_gemm nor the package kernels can be imported ({error})"
            ) from error
    module: ModuleType = kernels.get_kernel("kernels-community/deep-gemm", version=2)
    return module


class ContiguousLayout(NamedTuple):
    """DeepGEMM's "contiguous layout": the rows of every expert start at a multiple of the alignment in a padded buffer.

    The offsets are on the device, and the host does not wait for them. So the buffer has the largest number of rows
    that the offsets could require.
    """

    place: Tensor
    """(S,) int64: the index in the buffer of every row. Rows of no expert come after those of all experts."""
    experts: Tensor
    """(rows of the buffer,) int32: the expert of every row, including padding; -1 after the rows of all experts. It is
    constant in every block of ``alignment`` rows."""
    ends: Tensor
    """(E,) int32: the index at which the padded rows of every expert end."""


def contiguous_layout(bounds: Tensor, rows: int, alignment: int) -> ContiguousLayout:
    """Return the layout of rows that are sorted by expert.

    Args:
        bounds: (E + 1,) int32: starts at 0, never decreases, and is at most ``rows``.
        rows: S, the number of rows.
        alignment: each expert's rows begin at a multiple of this.

    Raises:
        ValueError: the layout would have 2^31 rows or more.
    """
    experts = bounds.shape[0] - 1
    blocks = -(-(rows + min(rows, experts) * (alignment - 1)) // alignment)
    if blocks * alignment >= ROW_LIMIT:
        raise ValueError(
            f"grouped_linear: products of deep_gemm take fewer than {ROW_LIMIT} padded rows, got {rows} rows"
        )
    sizes = bounds.diff()
    ends = ((sizes + alignment - 1) // alignment * alignment).cumsum(0, dtype=torch.int32)
    number = torch.arange(rows, dtype=torch.int32, device=bounds.device)
    # (E + 1,): how far the rows of each expert move; the last element is for rows without an expert.
    padding = pad(ends, (1, 0)) - bounds
    place = number + padding[torch.searchsorted(bounds[1:], number, right=True)]
    begin = torch.arange(0, blocks * alignment, alignment, dtype=torch.int32, device=bounds.device)
    owner = torch.searchsorted(ends, begin, right=True)
    owner = torch.where(owner < experts, owner, -1).int()
    return ContiguousLayout(place.long(), owner.repeat_interleave(alignment), ends)


_device_of_deep_gemm: list[torch.device] = []
"""The device of DeepGEMM's first product in this process; empty before it."""


def _by_deep_gemm(deep_gemm: _DeepGemm, x: Tensor, weight: Tensor, bounds: Tensor, y: Tensor) -> Tensor:
    _device_of_deep_gemm[:] = _device_of_deep_gemm or [x.device]
    if x.device != _device_of_deep_gemm[0]:
        raise RuntimeError(
            f"grouped_linear: x must be on {_device_of_deep_gemm[0]}, where DeepGEMM's first product in this process "
            f"was, because its kernels belong to one GPU, got {x.device}"
        )
    layout = contiguous_layout(bounds, x.shape[0], deep_gemm.alignment)
    places = layout.experts.shape[0]
    padded = x.new_zeros((places, x.shape[1])).index_copy_(0, layout.place, x)
    out = y.new_zeros((places, y.shape[1]))
    blackwell = torch.cuda.get_device_capability(x.device)[0] == 10
    # transformers passes the same argument to DeepGEMM.
    groups = layout.ends if blackwell else layout.experts
    multiply, b = (deep_gemm.nt, weight) if weight.is_contiguous() else (deep_gemm.nn, weight.transpose(1, 2))
    multiply(padded, b, out, groups, use_psum_layout=blackwell)
    return out.index_select(0, layout.place)


# --- QuACK


def _load_quack() -> Callable[..., Tensor]:
    try:
        module = import_module("quack.gemm_interface")
    except ImportError as error:
        raise ImportError(f"use_products_of: QuACK cannot be imported: pip install quack-kernels ({error})") from error
    gemm: Callable[..., Tensor] = _found(module, "gemm")
    return gemm


def _by_quack(gemm: Callable[..., Tensor], x: Tensor, weight: Tensor, bounds: Tensor, y: Tensor) -> Tensor:
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    # No tuning: it would choose kernels by measured times, and results of different kernels differ in their last bits.
    gemm(x, weight.transpose(1, 2), out=y, cu_seqlens_m=bounds, tuned=False)
    return y


def _found(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise ImportError(
            f"use_products_of: the installed {module.__name__} has no {name}; another version may have it"
        )
    return found


_LOADERS: dict[str, Callable[[], Any]] = {"deep_gemm": _load_deep_gemm, "quack": _load_quack}
_PRODUCTS: dict[str, Callable[..., Tensor]] = {"deep_gemm": _by_deep_gemm, "quack": _by_quack}
_loaded: dict[str, Any] = {}
"""The functions of each package that has been chosen so far."""
