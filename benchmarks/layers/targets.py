"""What pymoe is held to on these blocks, and which of it a run missed."""

from __future__ import annotations

from typing import Any

from benchmarks.layers.contenders import PYMOE

Record = dict[str, Any]
SPEED_UP = 1.0
"""Over the best of transformers' implementations, everywhere."""
OF_READ = 0.75
"""Decoding: the time of reading every touched weight once, over pymoe's."""
OF_MM = ((64.0, 0.9), (8.0, 0.65))
"""Prefill and training, from that many rows an expert on: the time of the same operations in dense ``torch.mm``."""
QUANTISED = {"pymoe int8": 2.5, "pymoe int4": 3.5}
"""Decoding: times as fast as pymoe in float32."""


def row_of(case: Record, *names: str) -> Record | None:
    """Return the row of the first of ``names`` that was measured."""
    rows = {row["name"]: row for row in case["rows"]}
    return next((rows[name] for name in names if name in rows), None)


def ours(case: Record) -> Record | None:
    """Return the row that is held to the targets: behind transformers' router, or the whole layer where that is not."""
    return row_of(case, *PYMOE)


def limit_of(case: Record) -> str:
    """Return the limit that a case is compared with."""
    return "read" if case["mode"] == "decode" else "mm"


def over_fp32(case: Record, cases: list[Record], name: str) -> float | None:
    """Return how many times as fast as pymoe in float32 ``name`` is; None where either was not measured."""
    mine = row_of(case, name)
    same = ("clock", "block", "mode", "tokens")
    other = (one for one in cases if one["dtype"] == "float32" and all(one[key] == case[key] for key in same))
    wide = next((row for one in other if (row := ours(one))), None)
    return wide["seconds"]["median"] / mine["seconds"]["median"] if mine and wide else None


def missed(case: Record, cases: list[Record]) -> list[str]:
    """Return what a case should have reached and did not, in words."""
    found = [f"{row['name']} is WRONG" for row in case["rows"] if row["verdict"] != "close"]
    row = ours(case)
    if row is None:
        return [*found, "pymoe was not measured"]
    if row["speed_up"] and row["speed_up"]["median"] < SPEED_UP:
        found.append(f"{SPEED_UP:.1f}x transformers")
    share = row["of"].get(limit_of(case))
    if (wanted := wanted_share(case)) and share and share["median"] < wanted:
        found.append(f"{100 * wanted:.0f} % of {limit_of(case)}")
    if case["mode"] == "decode":
        for name, wanted in QUANTISED.items():
            reached = over_fp32(case, cases, name)
            if reached is not None and reached < wanted:
                found.append(f"{name.removeprefix('pymoe ')} {wanted}x fp32")
    return found


def wanted_share(case: Record) -> float | None:
    """Return the share of the limit that a case should reach; None where none is asked for."""
    if case["mode"] == "decode":
        return OF_READ
    return next((share for rows, share in OF_MM if case["rows_per_expert"] >= rows), None)
