"""Quantises the experts of a checkpoint, and on request its dense layers, without loading it as a whole.

    python -m pymoe.quantize FOLDER OUT [--bits 8|4] [--format int|mxfp|fp|affine|stored] [--linear-bits 8|4]
                             [--max-shard-size SIZE]
    python -m pymoe.quantize FILE.gguf OUT [--linear-bits 8|4] [--max-shard-size SIZE]

FOLDER contains a model for the transformers library, laid out as on the Hugging Face hub. If the experts are already
quantised, and ``--format`` is the format that fits, their values are kept and only repacked for the kernels: mxfp for
MXFP4 (GPT-OSS), fp for FP8 (DeepSeek-V3), affine for integers of GPTQ, AWQ or compressed-tensors. Dense layers in FP8
or in such integers are kept as well, unless ``--linear-bits`` is given.

Experts and dense layers of a GGUF file are kept in the same way, if pymoe has a format for their types. If the file is
split, FILE is its first part. If the file's folder has a config.json, that is used, and the other files of the folder
are copied, too; otherwise the file's metadata are used.

OUT is the folder of the quantised model; ``from_pretrained(OUT)`` maps it into memory once
:mod:`pymoe.integrations.transformers` is imported. Until the model is saved, packed weights are in unnamed files next
to OUT: the command needs memory for about one layer's experts, and twice the size of OUT on the disk.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pymoe._common.command_line import CommandLine

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Endings of the files that contain a model's own weights, or an index of them."""
GGUF = ".gguf"
"""Ending of a GGUF file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 1 if no model was written. Wrong options exit with status 2."""
    description = "Round the experts of a checkpoint of transformers to 8 or 4 bits, weight by weight."
    parser = CommandLine(prog="python -m pymoe.quantize", description=description)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of the checkpoint, with config.json; or a GGUF file"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that does not exist yet, or is empty")
    parser.add_argument(
        "--bits", type=int, choices=(8, 4), help="of a weight (default: 8, 4 for mxfp and affine, none for stored)"
    )
    parser.add_argument(
        "--format",
        choices=("int", "mxfp", "fp", "affine", "stored"),
        help="of codes; mxfp has 4 bits, fp has 8; affine keeps integers of GPTQ or AWQ; stored is that of the files "
        "(default: int, or stored for GGUF)",
    )
    parser.add_argument("--linear-bits", type=int, choices=(8, 4), help="of dense layers (default: they stay)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: %(default)s)")
    options = parser.parse_args(arguments)
    format: Any = options.format or ("stored" if is_gguf(options.folder) else "int")
    bits = options.bits or {"mxfp": 4, "affine": 4, "stored": None}.get(format, 8)
    try:
        convert(
            *(options.folder, options.out, bits, options.max_shard_size),
            format=format,
            linear_bits=options.linear_bits,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"pymoe.quantize: {error}", file=sys.stderr)
        return 1
    files = [[options.folder] if options.folder.is_file() else options.folder.rglob("*"), options.out.rglob("*")]
    sizes = [sum(file.stat().st_size for file in those) for those in files]
    print(f"{options.out}: {sizes[1] / 1e9:.2f} GB, of {sizes[0] / 1e9:.2f} GB")
    return 0


def is_gguf(path: Path) -> bool:
    """Return whether a path ends in ``.gguf`` and is not that of a folder; the file need not exist."""
    return path.suffix == GGUF and not path.is_dir()


def convert(
    folder: Path,
    out: Path,
    bits: int | None,
    max_shard_size: str | int,
    format: Literal["int", "mxfp", "fp", "affine", "stored"] = "int",
    linear_bits: int | None = None,
) -> None:
    """Write the quantised model, and the other files of its folder (a tokenizer, for instance), into ``out``.

    Args:
        folder: the folder of a checkpoint, laid out as on the hub, or a GGUF file, for which ``format`` must be
            "stored". The checkpoint is not quantised, or is in MXFP4 with ``format`` "mxfp", in FP8 with "fp", of GPTQ,
            AWQ or compressed-tensors with "affine", or any of these with "stored".
        out: the folder to create; it must either not exist or be empty. Files appear in it only when all of them are
            complete.
        bits: 8 or 4; None for "stored".
        max_shard_size: largest size of a file of weights, as for ``save_pretrained``.
        format: "int", "mxfp", "fp", "affine" or "stored"; "mxfp" needs 4 bits, and "fp" 8.
        linear_bits: 8 or 4, for dense layers; None keeps the format that they have in the checkpoint.

    Raises:
        ImportError: transformers is missing.
        OSError: files cannot be read or written.
        RuntimeError: transformers cannot convert the checkpoint's tensors.
        ValueError: ``folder`` contains no model that can be quantised, ``out`` contains files, or ``bits``, ``format``
            and ``linear_bits`` do not fit each other or the checkpoint.
    """
    file = folder if is_gguf(folder) else None
    folder = folder.parent if file else folder
    described = (folder / "config.json").is_file()
    if file and not file.is_file():
        raise ValueError(f"expected a GGUF file, got {file}")
    if not (file or described):
        hint = ""
        if not folder.exists() and len(folder.parts) == 2 and folder.parts[0] not in ("/", ".."):
            hint = f"; if that is a name on the hub, get its files first: hf download {folder} --local-dir FOLDER"
        raise ValueError(f"expected a folder with config.json, got {folder}{hint}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"expected {out} not to exist, or to be empty, got files")
    import transformers

    from pymoe.integrations.transformers import PymoeConfig
    from pymoe.integrations.transformers.configuration import STORED
    from pymoe.integrations.transformers.gguf_files import DAMAGED, GgufFile

    quantization = PymoeConfig(bits, format, linear_bits=linear_bits)
    named: dict[str, Any] = {}
    if file:
        # This raises if the file is damaged; transformers' own reader, which follows, checks less.
        GgufFile(str(file))
        # The path is absolute, because transformers would look for a relative one in the current directory first.
        named["gguf_file"] = str(file.absolute())
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **({} if described else named))
    except DAMAGED as error:
        if described:
            raise
        raise ValueError(
            f"expected a GGUF file whose metadata transformers can read, or config.json next to it, got {file}: {error}"
        ) from error
    if file:
        named["config"] = config
    own = getattr(config, "quantization_config", None)
    if own and not file and (method := dict(own).get("quant_method")) not in STORED:
        known = ", ".join(STORED)
        raise ValueError(f"expected weights that are not quantised, or are quantised by {known}, got {method!r}")
    names = config.architectures or ["AutoModelForCausalLM" if file else "none"]
    model_class: Any = getattr(transformers, names[0], None)
    if model_class is None:
        raise ValueError(f"expected a model of transformers, got the architecture {names[0]!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
        quantization.folder = Path(place)
        model = model_class.from_pretrained(folder, dtype="auto", quantization_config=quantization, **named)
        made = Path(place) / "model"
        model.save_pretrained(made, max_shard_size=max_shard_size)
        for other in folder.iterdir() if described else ():
            if other.is_file() and not other.name.endswith(WEIGHTS) and not (made / other.name).exists():
                shutil.copyfile(other, made / other.name)
        os.rename(made, out)


if __name__ == "__main__":
    sys.exit(main())
