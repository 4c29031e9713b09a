"""prefetch_experts: makes layers prefetch the weights of chosen experts, for models that are larger than memory.

The layers' native calls do it (csrc/ops/prefetch.h); this file finds the weights that are mapped from files.
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

    Looking for missing pages takes time, 2 microseconds per MB, even if there are none: use this for models that do not
    fit. If the process neither owns the files nor may write them, Linux does not tell it which pages are missing; all
    pages of chosen experts are then asked for, which takes ten times as long if they are in memory. Copies and pickles
    of layers keep the option, but their weights are not mapped from files, so they ask for nothing. Experts with hooks
    or a function as their activation, and calls that record gradients do not prefetch.
    ``torch.compile`` compiles a graph anew when the option is switched.

    Args:
        model: any module; quantised experts that are mapped from files are found in it.
        enabled: False turns prefetching off for all quantised experts.

    Returns:
        The number of bytes of all weights that will be prefetched when chosen; 0 if not ``enabled``.

    Raises:
        TypeError: ``model`` is not a module, or ``enabled`` is not a bool.
        ValueError: no quantised experts of ``model`` are mapped from files, or some are spread over ranks.
        OSError: the system has no ``/proc/self/maps``, which says what is mapped.

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
    """The range of addresses at which a part of a file is mapped."""

    begin: int
    end: int
    path: str


def mappings() -> list[Mapping]:
    """Return the addresses at which files are mapped in this process, in order (proc(5))."""
    # Skip mappings without a file, whose inode is 0, and shared memory, which is not on a disk.
    line = re.compile(r"(\w+)-(\w+) \S+ \S+ \S+ [1-9]\d* +(/(?!dev/|memfd:|SYSV).*)")
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        found = filter(None, map(line.fullmatch, maps.read().splitlines()))
        return [Mapping(int(one[1], 16), int(one[2], 16), one[3]) for one in found]


def _prefetch_of(packed: Tensor, files: list[Mapping]) -> Prefetch:
    """Return the prefetching that a weight allows: 0 none, 1 of missing pages only, 2 of all pages."""
    if not (packed.is_cpu and packed.nbytes):
        return 0
    address = packed.data_ptr()
    place = bisect(files, address, key=lambda file: file.begin) - 1
    if place < 0 or address >= files[place].end:
        return 0
    path = files[place].path
    try:
        tells = os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid()  # the rule of mincore(2)
    except OSError:  # the file has been removed
        tells = False
    return 1 if tells else 2
