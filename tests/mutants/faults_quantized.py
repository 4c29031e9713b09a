"""Faults in quantised weights and their products that the test suite must notice."""

from planting import PythonFault as Fault

PRODUCTS = "csrc/kernels/quantized_linear_cpu_body.h"
WEIGHTS = "csrc/kernels/quantized_weight_cpu_body.h"
QUANTIZE = "pymoe/nn/quantized_experts.py"
EQUAL = ("tests/ops/test_native_equals_reference.py", "-k", "quantize and outputs and not benchmark")
LAYERS = "tests/nn/test_quantized_experts.py"

FAULTS = [
    Fault(
        "the code of zero counts for something",
        PRODUCTS,
        "to_float(sums[r][v].value() - rounded[r].zero)",
        "to_float(sums[r][v].value())",
        EQUAL,
    ),
    Fault(
        "a row takes the sums of the first row of its part",
        PRODUCTS,
        "rounded[r].sums[group] * minimum",
        "rounded[0].sums[group] * minimum",
        EQUAL,
    ),
    Fault(
        "an activation passes the largest code",
        PRODUCTS,
        "if (bit_cast<float>(bits) > 32639.0f * bit_cast<float>(exponent << 23)) ++exponent;",
        "",
        EQUAL,
    ),
    Fault(
        "the search keeps the worse grid",
        WEIGHTS,
        "usable & (new_error < error)",
        "usable & (new_error > error)",
        EQUAL,
    ),
    Fault(
        "layers in training mode are quantised",
        QUANTIZE,
        "if experts.training and",
        "if False and",
        (LAYERS, "-k", "refuse"),
    ),
    Fault(
        "an expert that somebody shares is replaced in one place",
        QUANTIZE,
        "                setattr(parent, name, new)\n",
        "                setattr(parent, name, new)\n                return\n",
        (LAYERS, "-k", "shared"),
    ),
]
