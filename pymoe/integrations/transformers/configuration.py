"""PymoeConfig: how from_pretrained quantises a transformers model, or which quantised files it reads unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pymoe._common.contracts import check_format
from pymoe._common.names import suggestion
from pymoe._common.types import FORMATS, WeightFormat
from pymoe.integrations.transformers import affine_files, fp8_files, gguf_files, interface, mxfp4_files
from pymoe.integrations.transformers.stored_format import AS_STORED, StoredFormat
from pymoe.nn.quantized_files import FORMAT, OLD_INT4, is_read

STORED: dict[str, Callable[[dict[str, Any]], StoredFormat]] = {
    "mxfp4": mxfp4_files.stored,
    "fp8": fp8_files.stored,
    **affine_files.STORED,
}
"""By quantisation method, a function that returns the format of files from the entries of their configuration. Weights
in these formats are kept unchanged."""

OTHER_NAMES = {"load_in_4bit": "bits=4 gives 4 bits", "load_in_8bit": "bits=8 gives 8 bits", "w_bit": "bits"}
"""Options of other quantisers, each with the option of :class:`PymoeConfig` to use, or a clause that says it."""

OTHER_FORMATS = {
    **dict.fromkeys((*STORED, "gguf"), f"format={AS_STORED!r} keeps the weights of such files as they are"),
    "mxfp4": "format='mxfp' with bits=4",
    "int8": "bits=8 gives integers of 8 bits",
    **dict.fromkeys(("int4", "nf4", "fp4"), "bits=4 gives 4 bits"),
}
"""Formats and methods of other quantisers, each with a clause that says what options of :class:`PymoeConfig` to use."""

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin
else:
    QuantizationConfigMixin, _, _ = interface.quantizer_bases()


class PymoeConfig(QuantizationConfigMixin):
    """Makes ``from_pretrained`` round the weights of a model's experts to 8 or 4 bits while it reads them.

    The model computes the same as one from ``from_pretrained(name, experts_implementation="pymoe")`` in the same dtype
    after :func:`pymoe.nn.quantize_experts`. Weights are packed one after another: from safetensors, loading takes at
    most the memory of the quantised model and of about one layer's experts in the dtype of the model. All other weights
    are mapped from the files if the files have the dtype of the model, and so are all weights of a saved model.

    ``save_pretrained`` writes the packed weights and this configuration, which ``from_pretrained`` finds in the folder.
    :mod:`pymoe.integrations.transformers` must be imported to read them; otherwise transformers raises because of the
    weights' shapes. If the folder has a configuration, transformers ignores the one that is passed, and warns.

    Checkpoints in MXFP4, such as the published GPT-OSS, are an exception: ``PymoeConfig(bits=4, format="mxfp")``
    replaces their own configuration. Their codes and scales are kept unchanged, never rounded to another format.
    Without a ``PymoeConfig`` transformers loads them as usual: on a CPU it widens them to the model's dtype. The same
    applies to checkpoints in FP8 with scales of blocks, such as DeepSeek-V3 and Qwen3-FP8, with
    ``PymoeConfig(bits=8, format="fp")``; and to integers of GPTQ, AWQ and compressed-tensors, with
    ``PymoeConfig(bits=4, format="affine")``, or with ``bits=8`` if their codes have 8 bits or the sizes of their groups
    are not multiples of 128 inputs. In FP8 and integers, dense layers are kept unchanged, too. All other weights take
    the model's dtype.

    Each tensor of a GGUF file has a type of its own. With ``from_pretrained(folder, gguf_file=file)`` the format is
    therefore ``"stored"``, without ``bits``. A weight of experts gets the format that represents its type without
    rounding. If there is no such format, the weight is rounded to integers of 8 bits, with a warning; if no weight of
    its experts module is quantised, it takes the dtype of the model. A dense layer gets the format that represents its
    type without rounding; if there is none, the layer takes the dtype of the model. All checkpoints above can also be
    read with ``"stored"``: their bits and format are then taken from the files. The ``config.json`` of a saved model
    has ``"stored"`` if its experts have several formats or some of them are not quantised.

    Args:
        bits: 8 or 4; must be 4 for ``"mxfp"`` and 8 for ``"fp"`` and ``"symmetric"``, may also be 2 for ``"affine"``,
            and must be None for ``"stored"``. For the other formats None means 8.
        format: ``"int"``, ``"mxfp"`` or ``"fp"``, as for :func:`pymoe.ops.quantize_weight`; ``"affine"`` or
            ``"symmetric"`` for integers of other programs, see :func:`pymoe.ops.pack_weight`; or ``"stored"``: the
            format of the files. Configurations of earlier versions lack this entry; they mean ``"int"``.
        linear_bits: 8 or 4 to round dense layers to integers: attention, shared experts, dense networks and the head,
            as :func:`pymoe.nn.quantize_linears` selects them. None keeps the format that they have in the files; that
            may be FP8, GGUF, GPTQ, AWQ, compressed-tensors or pymoe's own. A head that the configuration ties to the
            embedding is not rounded, even if the files contain a separate weight for the head;
            ``quantize_linears`` would round that weight.
        version: version of the files. Files of version 1 can be read unless they contain integers of 4 bits.
        quant_method: ``"pymoe"``, the name by which transformers finds this class.

    Raises:
        ImportError: transformers is older than 5.21.
        TypeError: ``bits`` or ``linear_bits`` is not an int, or ``format`` is not a str.
        ValueError: ``bits``, ``format`` and ``linear_bits`` are not as above; files of this version cannot be read,
            because they are from a later pymoe, or because they have version 1 and integers of 4 bits; or an option is
            unknown.

    ``from_pretrained`` raises :class:`ValueError` if tensors of experts or dense layers are missing or differ in size
    or bits from the configuration; if a weight is not finite or a file is truncated; if a checkpoint of another method
    is requested in a format other than its own, or has a layout that pymoe cannot keep; if the model has no experts
    that pymoe quantises, or runs another implementation of experts; and if a tensor of a GGUF file is not one of the
    model's.

    Example:
        >>> import tempfile
        >>> from pymoe.integrations.transformers import PymoeConfig
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)  # a checkpoint
        ...     model = OlmoeForCausalLM.from_pretrained(folder, quantization_config=PymoeConfig(bits=4))
        >>> model.config.quantization_config.bits
        4
    """

    def __init__(
        self,
        bits: int | None = None,
        format: WeightFormat | Literal["stored"] = "int",
        *,
        linear_bits: int | None = None,
        version: int = FORMAT,
        quant_method: str = interface.NAME,
        **other: Any,
    ) -> None:
        interface.check_quantizers_see_the_model("PymoeConfig")
        bits = 8 if bits is None and format != AS_STORED else bits
        if not is_read(version, (format, bits), ("int", linear_bits)):
            problem = OLD_INT4 if version == 1 else "; install a pymoe that has it"
            raise ValueError(f"PymoeConfig: expected files of version {FORMAT}, got version {version!r}{problem}")
        formats = (*dict.fromkeys(name for name, _ in FORMATS), AS_STORED)
        if isinstance(format, str) and format not in formats:
            *first, last = map(repr, formats)
            hint = suggestion(format, formats, OTHER_FORMATS)
            raise ValueError(f"PymoeConfig: format must be {', '.join(first)} or {last}, got {format!r}{hint}")
        if other or quant_method != interface.NAME:
            hint = suggestion(next(iter(other), ""), ("bits", "format", "linear_bits"), OTHER_NAMES)
            raise ValueError(
                f"PymoeConfig: expected bits, format, linear_bits and version, got {other or quant_method!r}{hint}"
            )
        if format != AS_STORED:
            check_format("PymoeConfig", bits, format)
        elif bits is not None:
            raise ValueError(f"PymoeConfig: bits must be left out for format {AS_STORED!r}, got {bits!r}")
        if linear_bits is not None:
            check_format("PymoeConfig", linear_bits, "int", "linear_")
        self.bits = bits
        self.format = format
        self.linear_bits = linear_bits
        # Ignore the argument, because files that are saved with this configuration have the current version.
        self.version = FORMAT
        self.quant_method = quant_method
        self.folder: Path | None = None
        """Folder for the unnamed files that keep packed weights until they are saved; None to keep them in memory."""
        self.stored: StoredFormat | None = None
        """The format of the files whose own configuration this one replaces; None if it replaces none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration for ``config.json``."""
        dense = {} if self.linear_bits is None else {"linear_bits": self.linear_bits}
        experts = {"format": self.format} if self.bits is None else {"bits": self.bits, "format": self.format}
        return {"quant_method": self.quant_method, **experts, **dense, "version": self.version}


def configuration_for(entries: dict[str, Any], passed: Any) -> PymoeConfig | None:
    """Return the configuration to use for a folder of quantised files, or None to leave the choice to transformers.

    Args:
        entries: the entries of the files' configuration.
        passed: the configuration that was passed to ``from_pretrained``, or None; it is not changed.

    Raises:
        ValueError: pymoe cannot keep the weights of the files unchanged: FP8 without scales of blocks of 128 x 128, for
            instance, or groups of other sizes.
    """
    if not isinstance(passed, PymoeConfig):
        return None
    if passed.stored == gguf_files.STORED:
        # Do not use the entries, which describe other files of the same model, not the GGUF file.
        return passed
    method = entries.get("quant_method")
    stored = STORED.get(method) if isinstance(method, str) else None
    return None if stored is None else _for_files(passed, stored(entries))


def configuration_for_gguf(passed: Any) -> PymoeConfig | None:
    """Return the configuration to use for a GGUF file, or None to leave the file to transformers."""
    return _for_files(passed, gguf_files.STORED) if isinstance(passed, PymoeConfig) else None


def _for_files(passed: PymoeConfig, stored: StoredFormat) -> PymoeConfig:
    """Return a copy of ``passed`` for files of another method, whose format is ``stored``.

    If ``passed`` requests the format of the files, the copy has the bits and format of ``stored``.
    """
    chosen = copy.copy(passed)
    chosen.stored = stored
    if chosen.format == AS_STORED:
        chosen.bits, chosen.format = stored.bits, stored.format
    return chosen
