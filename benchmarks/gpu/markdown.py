"""Writes REPORT.md: the results of gpu_report's stages, read from the files that they wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import PASSED, read_json, scrubbed

Record = Mapping[str, Any]


def markdown(folder: Path, machine: Record, outcomes: Sequence[Record], note: str) -> str:
    """Return the whole report; a stage that wrote no results has no section."""
    lines = [f"# pymoe on {machine['gpu'] or 'a machine without a GPU'}", "", *about(machine)]
    if note:
        lines += ["", note]
    if outcomes:
        lines += ["", "## Stages", "", *stage_table(outcomes)]
    for title, section in (
        ("Tests", tests(folder)),
        ("Device and emulator", equality(folder)),
        ("compute-sanitizer", sanitizer(folder)),
        ("Rates", rates(folder)),
        ("The lines with targets", bench(folder / "design_rows.json")),
        ("The router's product, and the kernels of a layer", parts(folder)),
        ("Layer", bench(folder / "layer.json")),
        ("Layer, with pymoe's own grouped product", bench(folder / "layer_own_product.json")),
        ("Operators", bench(folder / "operators.json")),
        ("Layer compared with its peers", peers(folder)),
        ("Layer compared with SonicMoE", peers(folder / "sonicmoe")),
        ("What failed, in its last words", last_words(outcomes)),
    ):
        text = list(section)
        if text and outcomes:
            lines += ["", f"## {title}", "", *text]
    return scrubbed("\n".join(lines)) + "\n"


def about(machine: Record) -> Iterator[str]:
    """Yield list items that describe the machine."""
    smi = machine.get("nvidia_smi") or {}
    after = machine.get("nvidia_smi_after") or {}
    if machine.get("device") == "cpu":
        yield "- **a rehearsal on the CPU**: the figures below are the CPU's"
    if machine["gpu"]:
        yield (
            f"- {machine['gpu']}, compute capability {machine['capability']}, {machine['multiprocessors']} "
            f"multiprocessors, {machine['memory_gib']} GiB, {machine['l2_mib']:.0f} MiB L2"
        )
    if smi:
        yield (
            f"- driver {smi.get('driver_version')}, clocks at most {smi.get('clocks.max.sm')} (SM) and "
            f"{smi.get('clocks.max.memory')} (memory), before {smi.get('clocks.sm')} and {smi.get('clocks.memory')}"
            f"{', after ' + after['clocks.sm'] + ' and ' + after['clocks.memory'] if after else ''}, "
            f"power limit {smi.get('power.limit')}, used by others before: {smi.get('utilization.gpu')}"
        )
    yield (
        f"- torch {machine['torch']} (CUDA {machine.get('torch_cuda')}), nvcc {machine['nvcc']}, "
        f"{machine['compiler']}, Python {machine['python']}, {machine['cores']} cores"
    )
    changed = ", with changes" if machine["uncommitted"] else ""
    yield f"- commit {machine['commit'] or 'unknown'}{changed}; {machine['date']}"
    if machine.get("seconds"):
        yield f"- {machine['seconds']:.0f} s in all"


def row(*cells: object) -> str:
    """Return one row of a table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def heading(text: str, numbers: str = "") -> list[str]:
    """Return a table's heading; columns named in ``numbers`` are right-aligned."""
    names = text.split(", ")
    return [row(*names), "|" + "|".join("--:" if name in numbers.split(", ") else "---" for name in names) + "|"]


def stage_table(outcomes: Sequence[Record]) -> Iterator[str]:
    yield from heading("stage, what, outcome, seconds", "seconds")
    for one in outcomes:
        reason = f": {one['reason']}" if one["reason"] else ""
        status = one["status"] if one["status"] == PASSED else f"**{one['status']}**{reason}"
        yield row(one["stage"], one["about"], status, f"{one['seconds']:.0f}")


def tests(folder: Path) -> Iterator[str]:
    found = [(name, read_json(folder / f"{name}.json")) for name in ("tests_operators", "tests_layers")]
    if not any(result for _, result in found):
        return
    yield from heading("run, passed, failed, skipped, ended", "passed, failed, skipped")
    for name, result in found:
        if result:
            counts = result["counts"]
            ended = "yes" if result["finished"] else "cut off"
            yield row(name, *(counts.get(key, 0) for key in ("passed", "failed", "skipped")), ended)
    for _, result in found:
        for failure in (result or {}).get("failures", [])[:20]:
            yield f"\n- `{failure['test']}`: {failure['error']}"


def equality(folder: Path) -> Iterator[str]:
    result = read_json(folder / "equality.json")
    if not result:
        return
    yield from heading("operator, calls, tensors, same in every bit, wrong", "calls, tensors, same in every bit, wrong")
    for name, one in result["operators"].items():
        yield row(name, one["calls"], one["tensors"], one["same_bits"], len(one["wrong"]))
    yield "\nWhat is promised exactly must agree in every bit; the rest lies within the specification's tolerance."
    for one in result["operators"].values():
        for wrong in one["wrong"][:5]:
            yield f"\n- {wrong}"


def sanitizer(folder: Path) -> Iterator[str]:
    result = read_json(folder / "sanitizer.json")
    if not result:
        return
    names = "calls, reports in pymoe's kernels, in others"
    yield from heading(f"tool, outcome, {names}", names)
    for one in result["tools"]:
        reason = f": {one['reason']}" if one["reason"] else ""
        numbers = [one.get(key, "-") for key in ("calls", "reports", "reports_of_others")]
        yield row(one["tool"], one["status"] + reason, *numbers)
    yield "\nEach tool reported its planted fault first, unless its outcome says otherwise."
    for one in result["tools"]:
        if one.get("first"):
            yield "\n```\n" + "\n".join(one["first"]) + "\n```"


def rates(folder: Path) -> Iterator[str]:
    for name in ("design_rows", "layer", "operators"):
        result = read_json(folder / f"{name}.json")
        if result:
            found = result["rates"]
            yield f"- `copy_`, read and written: {found['copy_bytes_per_second'] / 1e12:.3f} TB/s"
            for dtype, rate in found["mm_flops_per_second"].items():
                yield f"- `torch.mm`, dense, {dtype}: {rate / 1e12:.1f} TFLOP/s"
            return


MOST_KERNELS = 15


def parts(folder: Path) -> Iterator[str]:
    """Yield the results of benchmarks.gpu.parts."""
    found = read_json(folder / "parts.json") or {}
    if "router" in found:
        tokens, hidden, experts = found["router"]["shape"]
        yield f"x ({tokens}, {hidden}) times weight ({experts}, {hidden}), bfloat16:\n"
        yield from heading("way, us, quartiles, largest error", "us, quartiles, largest error")
        for name, one in found["router"]["ways"].items():
            error = f"{one['largest_error']:.2g}" if one["largest_error"] is not None else "-"
            yield row(name, f"{one['us']:.1f}", f"{one['low']:.1f} to {one['high']:.1f}", error)
    if "launches" in found:
        counts = found["launches"]
        for part in ("forward", "backward"):
            names = ", ".join(f"{name} {count}" for name, count in counts[part].items())
            yield f"\n{part}: {sum(counts[part].values())} {counts['counted']} ({names})"
    for shape, times in found.get("kernels", {}).items():
        whole = sum(times.values())
        yield f"\n{shape}, a step: {whole:.0f} us in kernels\n"
        yield from heading("kernel, us, of all", "us, of all")
        for name, spent in list(times.items())[:MOST_KERNELS]:
            yield row(name, f"{spent:.1f}", f"{100 * spent / whole:.0f} %")


NUMBERS = "called, in a graph, MB, of the copy bandwidth, of the floor, over the reference, over torch"
NUMBERS += ", over torch in graphs"


def bench(file: Path) -> Iterator[str]:
    """Yield the results of a run of pymoe.bench."""
    from pymoe.bench.report import correctness, target, time_with_spread, times

    result = read_json(file)
    if not result:
        return
    yield from heading(f"line, {NUMBERS}, correct, target", NUMBERS)
    for one in result["lines"]:
        of_copy = f"{100 * one['share_of_copy']:.0f} %" if one["share_of_copy"] else "-"
        floor = one["share_of_floor"]
        of_floor = f"{100 * floor['median']:.0f} % {one['floor']['kind']}" if floor else "-"
        yield row(
            f"{one['operator']} {one['case']} {one['dtype']}{' fwd+bwd' if 'backward' in one['direction'] else ''}",
            time_with_spread(one["native"]), time_with_spread(one["native_in_graph"]), f"{one['bytes'] / 1e6:.1f}",
            of_copy, of_floor, times(one["over_reference"]), times(one["over_baseline"]),
            times(one["over_baseline_in_graph"]), correctness(one), target(one),
        )  # fmt: skip
    left_out = result["settings"]["not_measured"]
    if left_out:
        yield f"\nNo time was left for {len(left_out)} lines: {'; '.join(left_out)}"
    for one in result["lines"]:
        if one["correctness"]["verdict"] in ("WRONG", "ERROR"):
            yield f"\n- {one['operator']} {one['case']}: {one['correctness']['detail'].splitlines()[0]}"
        for name, reason in one["not_in_graph"].items():
            yield f"\n- {one['operator']} {one['case']} {one['dtype']}: {name} not in a graph: {reason}"


def peers(folder: Path) -> Iterator[str]:
    """Yield the table that benchmarks.moe_layer wrote."""
    if (folder / "moe_layer.json").exists() and (folder / "moe_layer.md").exists():
        yield (folder / "moe_layer.md").read_text().strip()


def last_words(outcomes: Sequence[Record]) -> Iterator[str]:
    for one in outcomes:
        if one["status"] != PASSED and one["tail"]:
            yield f"{one['stage']}:\n\n```\n" + "\n".join(one["tail"][-25:]) + "\n```\n"
