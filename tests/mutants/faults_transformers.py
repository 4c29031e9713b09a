"""Faults in the integration of transformers that its tests must notice."""

from planting import PythonFault as Fault

PACKAGE = "pymoe/integrations/transformers"
TESTS = "tests/integrations/transformers"

FAULTS = [
    Fault(
        "experts of other ranks are taken for experts of this one",
        f"{PACKAGE}/experts.py",
        '"foreign_experts": flags.expert_parallel,',
        '"foreign_experts": False,',
        (f"{TESTS}/test_flags.py", "-k", "other_ranks"),
    ),
    Fault(
        "rows meet weights of another dtype",
        f"{PACKAGE}/experts.py",
        "return rows.to(weight.dtype)",
        "return rows",
        (f"{TESTS}/test_flags.py", "-k", "rows_in_float32"),
    ),
    Fault(
        "a gate of a class's own is taken for the default one",
        f"{PACKAGE}/interface.py",
        'return experts_class._apply_gate is getattr(moe, "_default_apply_gate", None)',
        "return moe is not None",
        (f"{TESTS}/test_flags.py", "-k", "ones_own"),
    ),
    Fault(
        "weights of a quantised model are not refused",
        f"{PACKAGE}/experts.py",
        "checks.floating(f\"experts_implementation='pymoe' ({type(experts).__name__})\", name, w_in)",
        "",
        (f"{TESTS}/test_flags.py", "-k", "no_floats"),
    ),
    Fault(
        "Llama 4 takes the scores of other experts",
        f"{PACKAGE}/outside.py",
        "scores_TE.gather(1, index_TK)",
        "scores_TE.topk(self.top_k, dim=1).values.flip(1)",
        (f"{TESTS}/test_enable.py", "-k", "several_choices"),
    ),
    Fault(
        "an expert of LongcatFlash that returns its input adds nothing",
        f"{PACKAGE}/outside.py",
        "torch.where(top_k_index < computed, 0, top_k_weights)",
        "torch.where(top_k_index <= computed, 0, top_k_weights)",
        (f"{TESTS}/test_enable.py", "-k", "longcat_flash"),
    ),
    Fault(
        "disable forgets what ran before",
        f"{PACKAGE}/switch.py",
        "interface.set_implementation(module, implementation)",
        'interface.set_implementation(module, "eager")',
        (f"{TESTS}/test_enable.py", "-k", "go_back"),
    ),
    Fault(
        "enable changes a model that it then refuses",
        f"{PACKAGE}/switch.py",
        "behind + outside:",
        "outside:",
        (f"{TESTS}/test_enable.py", "-k", "nothing_changes"),
    ),
    Fault(
        "blocks of DeepSeek-V3 lose their groups",
        f"{PACKAGE}/blocks.py",
        "    groups=True,\n",
        "",
        (f"{TESTS}/test_checkpoints.py", "-k", "comes_back and deepseek_v3"),
    ),
    Fault(
        "up stands above gate in shared experts",
        f"{PACKAGE}/checkpoints.py",
        '_Part("shared.w_in", (gate, up))',
        '_Part("shared.w_in", (up, gate))',
        (f"{TESTS}/test_checkpoints.py", "-k", "comes_back and deepseek_v3"),
    ),
    Fault(
        "codes of AWQ come in the order in which they were put into words",
        f"{PACKAGE}/affine_files.py",
        "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        (f"{TESTS}/test_affine_files.py", "-k", "every_code and awq"),
    ),
    Fault(
        "zero points of GPTQ's first version are read as they are",
        f"{PACKAGE}/affine_files.py",
        'less = 1 if layout == "gptq" else 0',
        "less = 0",
        (f"{TESTS}/test_affine_files.py", "-k", "every_code and gptq"),
    ),
    Fault(
        "a layer of GPTQ may have other bits than its configuration says",
        f"{PACKAGE}/affine_files.py",
        'if (rule.get("bits", bits), rule.get("group_size", group)) != (bits, group):',
        "if rule is None:",
        (f"{TESTS}/test_affine_files.py", "-k", "by_their_configuration and rule"),
    ),
    Fault(
        "float32 begin where no float32 does",
        f"{PACKAGE}/stored_format.py",
        "rows[..., inputs:].clone(memory_format=torch.contiguous_format)",
        "rows[..., inputs:].contiguous()",
        (f"{TESTS}/test_fp8_files.py", "-k", "single_row"),
    ),
    Fault(
        "dense layers in FP8 may be NaN",
        f"{PACKAGE}/fp8_files.py",
        "if not bool(wide.isfinite().all()):",
        "if not len(wide):",
        (f"{TESTS}/test_fp8_files.py", "-k", "do_not_fit and q_proj"),
    ),
    Fault(
        "inputs in another order are read as neighbours",
        f"{PACKAGE}/affine_files.py",
        "        self._check_order(parts, inputs)\n        stored",
        "        stored",
        (f"{TESTS}/test_affine_files.py", "-k", "do_not_fit and order"),
    ),
    Fault(
        "offsets of integer files are rounded",
        f"{PACKAGE}/affine_files.py",
        "if not torch.equal(offsets.double(), -products):",
        "if False:",
        (f"{TESTS}/test_affine_files.py", "-k", "do_not_fit and many"),
    ),
    Fault(
        "the bias of experts in integer files is lost",
        f"{PACKAGE}/affine_files.py",
        "if bias is not None and bool(bias.any()):",
        "if False:",
        (f"{TESTS}/test_affine_files.py", "-k", "do_not_fit and bias"),
    ),
    Fault(
        "a dense layer that files of rows lack is initialised at random",
        f"{PACKAGE}/quantizer.py",
        "            needed |= {name for name in weights if name.startswith(body)}",
        "            pass",
        (f"{TESTS}/test_affine_files.py", "-k", "do_not_fit and dense"),
    ),
]
