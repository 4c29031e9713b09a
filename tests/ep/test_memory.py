"""Memory for rows that come from other ranks."""

from pathlib import Path

import pytest
import torch

from pymoe.ep.exchange import empty_rows

CPU = torch.device("cpu")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """Return the system's flags for the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_rows_have_the_shape_and_dtype_that_was_asked_for(count, dtype):
    rows = empty_rows(count, 7, dtype, CPU)
    assert (rows.shape, rows.dtype, rows.device) == ((count, 7), dtype, CPU)
    assert rows.is_contiguous()
    assert not rows.requires_grad
    rows.fill_(1)


@pytest.mark.only_on("cpu")
@pytest.mark.skipif(not THP.exists(), reason="the system has no huge pages")
def test_large_rows_are_asked_for_in_huge_pages():
    rows = empty_rows(1 << 16, 256, torch.float32, CPU)  # 64 MiB: memory of its own, not a part of the heap
    usual = torch.empty_like(rows)
    assert "hg" in flags_at(rows.data_ptr() + rows.nbytes // 2)
    assert "hg" not in flags_at(usual.data_ptr() + usual.nbytes // 2)


def test_rows_on_another_device_are_left_alone():
    assert empty_rows(1 << 16, 256, torch.float32, torch.device("meta")).device.type == "meta"
