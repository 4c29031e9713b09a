"""prefetch_experts: makes layers prefetch the weights of chosen experts, for models that are larger than memory.

The layers' native calls do the prefetching (csrc/ops/prefetch.h). This module enables it for the weights that are
mapped from files.
"""

from __future__ import annotations

import os
import re
from bisect import bisect
from typing import NamedTuple

from torch import Tensor, nn

from pymoe._common import checks
from pymoe._common.types import Prefetch
from pymoe.nn.options import check_model
from pymoe.nn.quantized_dense import QuantizedDenseLinear
from pymoe.nn.quantized_experts import QuantizedLinear


def prefetch_experts(model: nn.Module, enabled: bool = True) -> int:
    """Make layers ask the system for the weights of chosen experts before they multiply by them.

    This is for quantised models that are mapped from files larger than memory: by :func:`pymoe.nn.load_quantized`, or
    by ``from_pretrained`` of a packed folder. There, an access to weights that are not in memory waits for the disk,
    page by page, and makes the system read the pages around them, too. With this option a layer first finds out which
    pages of both weights of its chosen experts are missing, and asks for all of these (``madvise(2)`` with
    ``MADV_WILLNEED``); the disk reads them while the first experts are computed. Results have the same bits. Which
    pages stay in memory is up to the system, which drops those that were not used for longest.

    Looking for missing pages takes 1 to 2 microseconds per MB even if none is missing: use this only for models that do
    not fit into memory. If the process neither owns the files nor may write to them, Linux does not tell it which pages
    are missing; the layer then asks for all pages of the chosen experts, which takes over ten times as long if they are
    in memory. Copies and pickles of layers keep the option, but there it only costs time, since their weights are not
    mapped from files. Nothing is prefetched for experts with hooks or with a function as the activation, nor in calls
    that record gradients. ``torch.compile`` recompiles a graph when the option changes.

    Args:
        model: any module that contains quantised experts.
        enabled: False turns prefetching off for all quantised experts of the model.

    Returns:
        The number of bytes of all weights for which prefetching is on.

    Raises:
        TypeError: ``model`` is not a module, or ``enabled`` is not a bool.
        ValueError: no quantised experts of ``model`` are mapped from files, or some are spread over ranks; not if
            ``enabled`` is False.
        OSError: the system has no ``/proc/self/maps``, the list of the process's mappings; not if ``enabled`` is False.

    Example:
        >>> import tempfile
        >>> layer = pymoe.nn.MoE(64, 128, num_experts=4, top_k=2).eval()
        >>> done = pymoe.nn.quantize_experts(layer, bits=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pymoe.nn.save_quantized(layer, f"{folder}/layer.pt")
        ...     mapped = pymoe.nn.load_quantized(f"{folder}/layer.pt")
        ...     pymoe.nn.prefetch_experts(mapped) > 0
        True
    """
    check_model("prefetch_experts", model)
    checks.flag("prefetch_experts", "enabled", enabled)
    weights = [
        module
        for module in model.modules()
        if isinstance(module, QuantizedLinear) and not isinstance(module, QuantizedDenseLinear)
    ]
    if enabled and any(hasattr(layer.packed, "full_tensor") for layer in weights):  # a DTensor
        raise ValueError(
            "prefetch_experts: model must have whole experts, got some that pymoe.ep.shard has spread over ranks"
        )
    files = mappings() if enabled else []
    found = [_prefetch_of(layer.packed, files) for layer in weights]
    if enabled and not any(found):
        raise ValueError(
            f"prefetch_experts: model must have quantised experts that are mapped from files, got {len(weights)} "
            f"weights of quantised experts, all in memory"
        )
    for layer, prefetch in zip(weights, found, strict=True):
        layer.prefetch = prefetch
    return sum(layer.packed.nbytes for layer in weights if layer.prefetch)


class Mapping(NamedTuple):
    """A range of addresses to which a part of a file is mapped."""

    begin: int
    end: int
    path: str


def mappings() -> list[Mapping]:
    """Return the ranges of addresses to which files are mapped in this process, in ascending order (proc(5))."""
    # Skip mappings without a file, whose inode is 0, and shared memory, which is not on a disk.
    line = re.compile(r"(\w+)-(\w+) \S+ \S+ \S+ [1-9]\d* +(/(?!dev/|memfd:|SYSV).*)")
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        found = filter(None, map(line.fullmatch, maps.read().splitlines()))
        return [Mapping(int(one[1], 16), int(one[2], 16), one[3]) for one in found]


def _prefetch_of(packed: Tensor, files: list[Mapping]) -> Prefetch:
    """Return how a weight can be prefetched: 0 not at all, 1 only its missing pages, 2 all of its pages."""
    if not (packed.is_cpu and packed.nbytes):
        return 0
    address = packed.data_ptr()
    place = bisect(files, address, key=lambda file: file.begin) - 1
    if place < 0 or address >= files[place].end:
        return 0
    path = files[place].path
    try:
        tells = os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid()  # mincore(2) requires either
    except OSError:  # the file has been removed
        tells = False
    return 1 if tells else 2
