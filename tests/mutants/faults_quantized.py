"""Faults in quantised weights and their products that the test suite must notice."""

from planting import PythonFault as Fault

PRODUCTS = "csrc/kernels/quantized_linear_cpu_body.h"
WEIGHTS = "csrc/kernels/quantized_weight_cpu_body.h"
QUANTIZE = "pymoe/nn/quantized_experts.py"
EQUAL = ("tests/ops/test_native_equals_reference.py", "-k", "quantize and outputs and not benchmark")
DENSE = "tests/nn/test_quantized_dense.py"
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
        "a row takes the offset of the first row of its part",
        PRODUCTS,
        "-12.0f * rounded[r].sums[group]",
        "-12.0f * rounded[0].sums[group]",
        EQUAL,
    ),
    Fault(
        "a value of mxfp4 is another one",
        PRODUCTS,
        "16, 18, 20, 24, 12, 11",
        "16, 17, 20, 24, 12, 11",
        EQUAL,
    ),
    Fault(
        "a scale that is NaN is infinite",
        PRODUCTS,
        "(((exponent + 1) & 0xff) < 2) & (1 << 22)",
        "(exponent < 1) & (1 << 22)",
        EQUAL,
    ),
    Fault(
        "the least scale is zero",
        PRODUCTS,
        "(((exponent + 1) & 0xff) < 2) & (1 << 22)",
        "(exponent > 254) & (1 << 22)",
        EQUAL,
    ),
    Fault(
        "sums of twice the weights are taken for those of the weights",
        PRODUCTS,
        "? rounded.step * 0.5f :",
        "? rounded.step :",
        EQUAL,
    ),
    Fault(
        "a tie goes to the odd code",
        WEIGHTS,
        "(scaled >= 0.75f)",
        "(scaled > 0.75f)",
        EQUAL,
    ),
    Fault(
        "negative zero loses its sign",
        WEIGHTS,
        "(vint32)((vuint32)value >> 31)",
        "-(value < 0)",
        EQUAL,
    ),
    Fault(
        "codes of a checkpoint's byte change places",
        "pymoe/reference/quantized_weight.py",
        "torch.stack([pairs & 15, pairs >> 4], dim=4)",
        "torch.stack([pairs >> 4, pairs & 15], dim=4)",
        ("tests/ops/test_quantized_semantics.py", "-k", "stored or standard_says"),
    ),
    Fault(
        "a layer loads the state of another format",
        "pymoe/nn/quantized_experts.py",
        "torch.tensor([number_of(self.quantized_weight),",
        "torch.tensor([self.bits,",
        (LAYERS, "-k", "another_format"),
    ),
    Fault(
        "the native call of a layer gets the bits in place of the format",
        "pymoe/nn/direct.py",
        "numbers = FORMATS[w_in.format, w_in.bits], FORMATS[w_out.format, w_out.bits]",
        "numbers = w_in.bits, w_out.bits",
        ("tests/nn/test_quantized_direct.py", "-k", "bits_and_the_statistics or different_formats"),
    ),
    Fault(
        "the file of a layer does not say its format",
        "pymoe/nn/quantized_files.py",
        '"format": experts.format, ',
        "",
        ("tests/nn/test_quantized_files.py", "-k", "comes_back"),
    ),
    Fault(
        "a model's configuration does not say its format",
        "pymoe/integrations/transformers/quantizer.py",
        ', "format": self.format}',
        "}",
        ("tests/integrations/transformers/test_quantizer.py", "-k", "comes_back and mxfp4"),
    ),
    Fault(
        "the native call of a dense layer gets the bits in place of the format",
        "pymoe/nn/quantized_dense.py",
        "FORMATS[self.format, self.bits]",
        "self.bits",
        (DENSE, "-k", "one_native_call"),
    ),
    Fault(
        "the native call of a dense layer drops gradients",
        "pymoe/nn/quantized_dense.py",
        "and not is_recorded(x, bias)",
        "and True",
        (DENSE, "-k", "gradients or tangents"),
    ),
    Fault(
        "a head that shares its weight's memory is rounded",
        "pymoe/nn/quantized_dense.py",
        "place = (tensor.device, tensor.data_ptr()) if plain else id(tensor)",
        "place = id(tensor)",
        (DENSE, "-k", "shares_memory"),
    ),
    Fault(
        "a layer under a name that chooses tokens is rounded",
        "pymoe/nn/quantized_dense.py",
        "|compressor",
        "",
        (DENSE, "-k", "names_that_are_rounded"),
    ),
    Fault(
        "a tangent of forward mode is dropped",
        "pymoe/_common/contracts.py",
        "if not is_compiling() and forward_ad._current_level >= 0:",
        "if False:",
        (DENSE, "-k", "tangents"),
    ),
    Fault(
        "a bias is rounded twice under autocast",
        "pymoe/nn/quantized_experts.py",
        "(rows_SH,) = cast_operands(rows_SH)  # type: ignore[assignment]",
        "pass",
        (DENSE, "-k", "autocast_rounds"),
    ),
    Fault(
        "a model's configuration does not say the bits of its dense layers",
        "pymoe/integrations/transformers/quantizer.py",
        '{"linear_bits": self.linear_bits}',
        "{}",
        ("tests/integrations/transformers/test_quantized_dense.py", "-k", "comes_back and olmoe"),
    ),
    Fault(
        "weights without memory may have any format",
        "pymoe/ops/quantized_weight.py",
        "if format not in FORMATS.values():",
        "if format < 0:",
        ("tests/ops/test_quantized_semantics.py", "-k", "name_no_format"),
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
        "places[id(child)].append((parent, name))",
        "places[id(child)] = [(parent, name)]",
        (LAYERS, "-k", "shared"),
    ),
]
