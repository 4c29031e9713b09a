"""Runs pymoe with torch on aarch64 by QEMU, and compares its results with those of this machine's processor.

    python tests/aarch64/operators.py        # environment, modules and results in build/aarch64/: 1.3 GB

Operators, raw operators and layers are called with the inputs of ``tests/specs``: here, which writes arguments and
results into a file, and then in one process of the emulator, which reads it. Results that are promised to have the same
bits on every processor must have them; others, which depend on the order of sums in matrix products or on functions of
the C library, must agree within the operator's tolerance. The table counts both. The emulated process then trains the
layer of README, and runs the Quickstart's other blocks that do not need transformers.

tests/aarch64/python.sh makes the environment, once; it needs the network. Where it fails, or there is no compiler or no
emulator, nothing is tested, and the output says so.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check import ROOT, has_tools, run

FOLDER = ROOT / "build" / "aarch64"
EMULATED = FOLDER / "bin" / "python"
MODULES = FOLDER / "modules"
LARGEST = 40_000
"""The most elements that the arguments of a call may have."""
MOST = 40
"""The most samples of an operator in a dtype."""

ROUNDED = (
    "grouped_linear",
    "grouped_linear_weight_grad",
    "grouped_linear_bias_grad",
    "quantized_linear_input_grad",
    "apply_experts",
    "apply_chosen_experts",
    "apply_experts_recorded",
    "apply_chosen_experts_recorded",
)
"""Operators whose results come from matrix products in floating point."""
LOSSES = ("router_losses", "router_losses_backward", "router_z_loss")
"""Operators whose results, or some of them, come from the C library's logarithm."""
TOLERANCES = {"float32": (2e-5, 2e-4), "float64": (1e-12, 1e-11), "bfloat16": (1.6e-2, 1e-3), "float16": (2e-3, 1e-3)}
"""(rtol, atol) of raw operators and layers: those of grouped_linear, for two products one after another."""


@dataclass
class Case:
    """A call, and its results on the processor that drew it."""

    row: str
    dtype: str
    name: str
    kind: str
    arguments: tuple[Any, ...]
    exact: tuple[bool, ...]
    """For each result, whether it must have the same bits; the last one stands for all that follow."""
    tolerance: tuple[float, float]
    results: list[Any] | None = None


def on_specification(operator: str, sample: Any) -> list[Any]:
    import pymoe.ops
    from pymoe.bench.calls import gradients

    outputs, of_leaves = gradients(getattr(pymoe.ops, operator), sample)
    return [*outputs, *of_leaves]


def on_raw_operator(operator: str, args: tuple[Any, ...]) -> list[Any]:
    import torch

    from pymoe.bench.calls import outputs_of

    return [*outputs_of(getattr(torch.ops.pymoe, operator)(*args))]


def on_layer(options: dict[str, Any], state: dict[str, Any], x: Any, bits: int) -> list[Any]:
    """Return the output of a layer, the gradients of its input and parameters, and the experts' loads."""
    from pymoe.bench.calls import gradients_of
    from pymoe.nn import MoE, quantize_experts

    layer = MoE(**options).to(x.dtype)
    layer.load_state_dict(state)
    if bits:
        quantize_experts(layer.eval(), bits)
    x = x.detach().requires_grad_()
    y = layer(x)
    parameters = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return [layer.stats.load, y, *gradients_of([y], parameters)]


KINDS: dict[str, Callable[..., list[Any]]] = {
    "specification": on_specification,
    "raw": on_raw_operator,
    "layer": on_layer,
}


def promises(name: str, dtype: str, sample: Any) -> tuple[bool, ...]:
    """Return which results of a call have the same bits on every processor, as :attr:`Case.exact` has it."""
    if name == "router_losses":  # the second one is a logarithm's, and so are parts of gradients
        return (True, False)
    of_the_library = name == "expert_activation" and dtype == "float64" and sample.args[1] in ("gelu", "geglu")
    return (name not in (*ROUNDED, *LOSSES) and not of_the_library,)


def specified() -> Iterator[Case]:
    from specs import all_specs, samples_of, with_grad

    from pymoe.bench.calls import tensors_in

    for spec in all_specs():
        for dtype in spec.dtypes:
            name, tolerance = str(dtype).removeprefix("torch."), spec.tolerances.get(dtype, (0.0, 0.0))
            small = [
                sample
                for sample in samples_of(spec, dtype)
                if sum(value.numel() for value in tensors_in((sample.args, sample.kwargs))) <= LARGEST
            ]
            for sample in spread(small):
                chosen = (with_grad(sample) if spec.gradient_samples else None) or sample
                exact = promises(spec.name, name, sample)
                yield Case(spec.name, name, sample.name, "specification", (spec.name, chosen), exact, tolerance)


def spread(items: list[Any]) -> list[Any]:
    """Return at most MOST of ``items``, evenly spaced."""
    return [items[i * len(items) // MOST] for i in range(MOST)] if len(items) > MOST else items


def raw() -> Iterator[Case]:
    import torch
    from specs import all_raw_calls

    for one in all_raw_calls():
        floating = [value for value in one.args if isinstance(value, torch.Tensor) and value.is_floating_point()]
        dtype = str(floating[0].dtype).removeprefix("torch.") if floating else "int32"
        exact, tolerance = (one.operator not in (*ROUNDED, *LOSSES),), TOLERANCES.get(dtype, (0.0, 0.0))
        yield Case(f"raw {one.operator}", dtype, one.name, "raw", (one.operator, one.args), exact, tolerance)


def layers() -> Iterator[Case]:
    import torch

    from pymoe.bench.calls import generator
    from pymoe.bench.operators import uniform
    from pymoe.nn import MoE

    sizes = {"hidden_size": 40, "ffn_size": 36, "num_experts": 6, "top_k": 2}
    for name, options in (
        ("swiglu", {}),
        ("gelu", {"activation": "gelu", "score": "sigmoid"}),
        ("shared", {"num_shared_experts": 1, "capacity_factor": 1.0}),
        ("groups", {"num_groups": 3, "topk_groups": 2, "bias_update_rate": 0.01}),
    ):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch.manual_seed(3)
            layer = MoE(**sizes, **options).to(dtype)
            x = uniform(50, 40, dtype=dtype, generator=generator())
            for bits in (0, 8, 4) if dtype != torch.float64 else (0,):
                short = str(dtype).removeprefix("torch.")
                yield Case(
                    f"MoE, {bits} bits" if bits else "MoE", short, name, "layer",
                    ({**sizes, **options}, layer.state_dict(), x, bits), (True, False), TOLERANCES[short],
                )  # fmt: skip


def draw(path: str) -> None:
    """Write all calls with the results of this processor."""
    import torch

    cases = [*specified(), *raw(), *layers()]
    for case in cases:
        case.results = KINDS[case.kind](*case.arguments)
    torch.save([vars(case) for case in cases], path)
    print(f"{len(cases)} calls, {Path(path).stat().st_size / 1e6:.1f} MB", flush=True)


def verdicts(case: Case) -> list[tuple[str, str]]:
    """Return for each result ``equal``, ``rounding`` or ``differs``, and what differs."""
    from pymoe.bench.correctness import difference

    assert case.results is not None
    try:
        found = KINDS[case.kind](*case.arguments)
    except Exception as error:
        return [("differs", f"{type(error).__name__}: {error}")]
    if len(found) != len(case.results):
        return [("differs", f"{len(found)} results, expected {len(case.results)}")]
    seen = []
    for i, (got, wanted) in enumerate(zip(found, case.results, strict=True)):
        got, wanted, what = got.detach(), wanted.detach(), f"result {i}"
        if not (bits := difference(what, got, wanted, None)):
            seen.append(("equal", ""))
        elif case.exact[min(i, len(case.exact) - 1)]:
            seen.append(("differs", bits))
        else:
            off = difference(what, got, wanted, case.tolerance)
            seen.append(("differs", off) if off else ("rounding", ""))
    return seen


def compare(path: str) -> int:
    """Make the calls of a file on this processor, print the table and what differs, and return how much does."""
    import torch

    import pymoe

    facts = pymoe.build_info()
    print(f"{platform.machine()}, {facts['cpu_isa']}, CPython {facts['python']}, torch {facts['torch']}", flush=True)
    table: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    complaints = []
    for fields in torch.load(path, weights_only=False):
        case = Case(**fields)
        for verdict, why in verdicts(case):
            table[case.row, case.dtype][verdict] += 1
            if why:
                complaints.append(f"{case.row}, {case.dtype}, {case.name}: {why}")
    for (row, dtype), counts in table.items():
        print(f"{row:<36} {dtype:<10} {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}")
    for complaint in complaints[:50]:
        print(f"differs: {complaint}", flush=True)
    complaints += run_blocks()
    total = sum(counts.total() for counts in table.values())
    print(f"checks {f'failed: {len(complaints)} of' if complaints else 'passed:'} {total} results", flush=True)
    return 1 if complaints else 0


def run_blocks() -> Iterator[str]:
    """Run the blocks that need torch alone; print their output, and yield what differs from that of the page."""
    from docs_pages import agrees, printed_outputs

    for page in ("README.md", "docs/start/quickstart.md"):
        for block, output in printed_outputs((ROOT / page).read_text()):
            source = block.text
            if "import torch\n" not in source or "transformers" in source or ("MoE(" in source and page != "README.md"):
                continue
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(source, {"__name__": "block"})
            except Exception as error:
                printed.write(f"{type(error).__name__}: {error}")
            print(f"{page}: {printed.getvalue()}", end="", flush=True)
            if not agrees(output.text, printed.getvalue()):
                yield f"{page}: expected {output.text!r}, got {printed.getvalue()!r}"


def make_environment() -> str:
    """Make what is missing in FOLDER; return why that cannot be done, or ""."""
    if not has_tools():
        return "no compiler or no emulator for aarch64"
    made = FOLDER / ".packages"
    inputs = [ROOT / "tests" / "aarch64" / "python.sh", *ROOT.glob("requirements-*.txt")]
    if made.exists() and made.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return ""
    try:
        run("bash", "tests/aarch64/python.sh", FOLDER)
    except subprocess.CalledProcessError as error:
        return f"no Python with torch for aarch64: {error}"
    return ""


def build() -> None:
    """Cross-compile both modules, and put the package's Python files next to them."""
    objects, lib = ("--build-temp", FOLDER / "objects"), ("--build-lib", MODULES)
    tools = {"CXX": "aarch64-linux-gnu-g++", "PYMOE_CUDA": "0", "PATH": f"{EMULATED.parent}:{os.environ['PATH']}"}
    run(EMULATED, "setup.py", "--quiet", "build_ext", *objects, *lib, **tools)
    for path in (ROOT / "pymoe").iterdir():
        link = MODULES / "pymoe" / path.name
        if path.suffix != ".so" and path.name != "__pycache__" and not link.is_symlink():
            link.symlink_to(path)


def main() -> int:
    if reason := make_environment():
        print(f"{reason}: nothing was tested on it (checks passed: none)")
        return 0
    build()
    calls = FOLDER / "calls.pt"
    run(sys.executable, __file__, "draw", calls, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    # Threads that wait must sleep: in the emulator they would spin for long.
    run(EMULATED, __file__, "compare", calls, PYTHONPATH=f"{MODULES}:{ROOT / 'tests'}", OMP_WAIT_POLICY="passive")
    return 0


if __name__ == "__main__":
    try:
        if sys.argv[1:]:
            sys.exit({"draw": draw, "compare": compare}[sys.argv[1]](sys.argv[2]))
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}")
