"""Faults in the reading of GGUF files, and of folders with several formats, that the test suite must notice."""

from planting import PythonFault as Fault

BLOCKS = "pymoe/integrations/transformers/gguf_blocks.py"
FILES = "pymoe/integrations/transformers/gguf_files.py"
TESTS = "tests/integrations/transformers/test_gguf_files.py"
DENSE = "tests/integrations/transformers/test_gguf_dense.py"

FAULTS = [
    Fault(
        "integers of 6 bits at Q4_K lose the upper two bits of the last four",
        "pymoe/reference/quantized_weight.py",
        "last & 15 | first >> 6 << 4",
        "last & 15",
        (TESTS, "-k", "lose_nothing and Q4_K"),
    ),
    Fault(
        "the codes of MXFP4 in GGUF files are taken for those of GPT-OSS",
        BLOCKS,
        "codes = _nibbles(rows[..., 1:], GROUP // 2)",
        "codes = _nibbles(rows[..., 1:], 1)",
        (TESTS, "-k", "lose_nothing and MXFP4"),
    ),
    Fault(
        "the first of two scales of Q6_K stands for both",
        BLOCKS,
        "of_scales[:, :: GROUP // 2]",
        "of_scales[:, ::GROUP].repeat_interleave(2, dim=1)",
        (TESTS, "-k", "any_bytes and Q6_K"),
    ),
    Fault(
        "a scale at the end of a block is not looked at",
        BLOCKS,
        '(("Q6_K", "Q3_K"), slice(-2, None))',
        '(("Q6_K", "Q3_K"), slice(0, 2))',
        (TESTS, "-k", "is_not_finite and Q6_K"),
    ),
    Fault(
        "gate comes before up in GPT-OSS",
        FILES,
        "torch.stack(parts, dim=1).flatten(0, 1) if self.interleaved else torch.cat(parts)",
        "torch.cat(parts)",
        (TESTS, "-k", "every_architecture and MXFP4 and gpt-oss"),
    ),
    Fault(
        "scales that are not finite pass",
        BLOCKS,
        "if bool(bad.any()):",
        "if not len(bad):",
        (TESTS, "-k", "not_the_models and scale"),
    ),
    Fault(
        "tensors may be anywhere",
        FILES,
        "if one.data_offset != expected or not len(shape)",
        "if not len(shape)",
        (TESTS, "-k", "damaged_header"),
    ),
    Fault(
        "a part may be one of another file",
        FILES,
        "if part not in (None, said):",
        "if part == said == []:",
        (TESTS, "-k", "of_another_file"),
    ),
    Fault(
        "parts may lack tensors that no model needs",
        FILES,
        "if total != len(self.tensors):",
        "if total is None:",
        (TESTS, "-k", "of_another_file"),
    ),
    Fault(
        "heads of Qwen3.5 stay in the order of the file",
        "pymoe/integrations/transformers/interface.py",
        "(tensor,) = operation.convert({name: tensor}, [name], [target]).values()",
        "pass",
        ("tests/integrations/transformers/test_gguf_qwen35.py", "-k", "transformers_widens"),
    ),
    Fault(
        "rows of dense layers stay in the order of the file",
        BLOCKS,
        "if order.rows is None else blocks[order.rows[first : first + ROWS]]",
        "",
        (DENSE, "-k", "moved and llama and Q4_K"),
    ),
    Fault(
        "scales stay where they are while the codes of their columns are moved",
        BLOCKS,
        "return part[:, self.columns[::size] // size]",
        "return part[:, self.columns] if size == 1 else part",
        (DENSE, "-k", "moved and 32 and Q8_0"),
    ),
    Fault(
        "columns that share a scale may be parted",
        BLOCKS,
        "and keeps_groups(_columns(one)))",
        "and keeps_groups(1))",
        (DENSE, "-k", "moved and groups and Q4_K"),
    ),
    Fault(
        "numbers that leave their rows one by one pass for moved rows",
        FILES,
        "if (rows != rows[:, :1]).any() or (columns != columns[:1]).any():",
        "if rows is None:",
        (DENSE, "-k", "changed_otherwise"),
    ),
    Fault(
        "the number of heads is taken from the configuration, whatever the file says",
        FILES,
        'lambda config: getattr(config, "linear_num_key_heads", None)',
        "lambda config: 1",
        ("tests/integrations/transformers/test_gguf_qwen35.py", "-k", "contradicts"),
    ),
    Fault(
        "the entries of metadata do not matter",
        FILES,
        "if expected is not None and not _equal(value, expected):",
        "if value is None:",
        (TESTS, "-k", "not_the_models and embeddings"),
    ),
    Fault(
        "all weights of a folder of several formats have that of the first",
        "pymoe/integrations/transformers/mixed_files.py",
        "found[weight] = kinds[number]",
        "found[weight] = next(iter(found.values()), kinds[number])",
        (TESTS, "-k", "several_formats_is_saved and qwen3moe"),
    ),
]
