"""Calls llama.cpp's C interface through ctypes, in the prebuilt libraries of an npm package.

It is the package that node-llama-cpp loads: libllama with one CPU backend for each instruction level. ggml takes the
best one that the processor supports. Only the first fields of the interface's structures are declared, and the rest is
padding: the library returns the structures filled with defaults, and takes them back.
"""

from __future__ import annotations

import ctypes as c
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
"""The npm package with llama.cpp 0.5.0."""
WRITER = "gguf==0.19.0"
"""The PyPI package that writes files for llama.cpp."""
HOME = Path("build") / "llama_cpp"
TYPES = {"Q4_0": (2, 2), "Q4_K_S": (14, 12), "Q8_0": (7, 8), "MXFP4": (38, 8)}
"""The formats by name: the quantiser's number for files (llama_ftype), and for the head (ggml_type)."""


class Missing(RuntimeError):
    """Raised when llama.cpp is not available here."""


def install(home: Path = HOME) -> Path:
    """Return the folder of the libraries, after installing both packages below ``home`` if they are missing.

    Raises:
        Missing: a package cannot be installed, or has no libraries for this machine.
    """
    libraries = home / "libraries"
    if not libraries.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            _run("npm", "pack", "--silent", "--pack-destination", folder, PACKAGE)
            for archive in Path(folder).glob("*.tgz"):
                shutil.unpack_archive(archive, folder, "gztar")
            found = next(Path(folder).glob("package/bins/*"), None)
            if found is None:
                raise Missing(f"{PACKAGE} has no libraries")
            # Without this option pip would also install numpy and others, which this environment has.
            _run(*(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home / "python", WRITER))
            shutil.move(found, libraries)
    return libraries.resolve()


def _run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise Missing(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [""])[-1][:200]
        raise Missing(f"{command[0]} ended with exit status {error.returncode}: {last}") from None


def gguf(home: Path = HOME) -> Any:
    """Return the module ``gguf`` that :func:`install` has put below ``home``."""
    folder = str((home / "python").resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    import gguf

    return gguf


class _Parameters(c.Structure):
    """The parameters of a model, a context or the quantiser, as 32-bit integers; longer than any of them."""

    _fields_ = [("values", c.c_int32 * 128)]


class _Batch(c.Structure):
    _fields_ = [
        ("count", c.c_int32),
        ("tokens", c.POINTER(c.c_int32)),
        ("embeddings", c.c_void_p),
        ("positions", c.POINTER(c.c_int32)),
        ("sequence_counts", c.POINTER(c.c_int32)),
        ("sequences", c.POINTER(c.POINTER(c.c_int32))),
        ("outputs", c.POINTER(c.c_int8)),
    ]


_SILENT = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda level, text, data: None)
"""Discards the library's messages, hundreds of lines for each model."""


class LlamaCpp:
    """The loaded library.

    Args:
        folder: the folder of the libraries.
        threads: threads of every call.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self.threads = threads
        try:
            self._ggml, self._llama = (
                c.CDLL(str(next(folder.glob(f"{name}.*so*"))), mode=c.RTLD_GLOBAL) for name in ("libggml", "libllama")
            )
        except (OSError, StopIteration) as error:
            raise Missing(f"its libraries cannot be loaded: {error}") from None
        self._call(self._ggml.ggml_backend_load_all_from_path, None, c.c_char_p)(str(folder).encode())
        self._llama.llama_backend_init()
        self._call(self._llama.llama_log_set, None, c.c_void_p, c.c_void_p)(_SILENT, None)

    @staticmethod
    def _call(function: Any, result: Any, *arguments: Any) -> Any:
        function.restype, function.argtypes = result, arguments
        return function

    def about(self) -> str:
        """Return the version, and the processor features that the backend uses."""
        version = self._call(self._llama.llama_version, c.c_char_p)().decode()
        features = self._call(self._llama.llama_print_system_info, c.c_char_p)().decode()
        used = [part.split(" = ")[0].strip(" |") for part in features.split(":", 1)[1].split("|") if "= 1" in part]
        return f"llama.cpp {version} ({', '.join(used)})"

    def quantize(self, source: Path, target: Path, form: str) -> None:
        """Write ``source``, a file in 16 bits, with weights in ``form``: one of :data:`TYPES`.

        The head gets the type of the other dense layers; the quantiser's default for the head would be 6 bits with
        Q4_0.
        """
        parameters = self._call(self._llama.llama_model_quantize_default_params, _Parameters)()
        parameters.values[0] = self.threads
        parameters.values[1], parameters.values[2] = TYPES[form]
        quantize = self._call(self._llama.llama_model_quantize, c.c_uint32, c.c_char_p, c.c_char_p, c.c_void_p)
        if status := quantize(str(source).encode(), str(target).encode(), c.byref(parameters)):
            raise RuntimeError(f"llama_model_quantize returned {status} for {form}")

    def load(self, file: Path) -> int:
        """Load a model with the library's defaults: files are mapped, and weights are repacked if that is faster."""
        parameters = self._call(self._llama.llama_model_default_params, _Parameters)()
        load = self._call(self._llama.llama_model_load_from_file, c.c_void_p, c.c_char_p, _Parameters)
        if not (model := load(str(file).encode(), parameters)):
            raise RuntimeError(f"llama.cpp cannot load {file.name}")
        return int(model)

    def context(self, model: int, sequences: int, length: int) -> Context:
        """Return a context for ``sequences`` sequences of ``length`` tokens."""
        parameters = self._call(self._llama.llama_context_default_params, _Parameters)()
        parameters.values[0] = sequences * length
        parameters.values[1] = max(2048, sequences)
        parameters.values[3] = sequences
        make = self._call(self._llama.llama_init_from_model, c.c_void_p, c.c_void_p, _Parameters)
        if not (handle := make(model, parameters)):
            raise RuntimeError(f"llama.cpp has no room for {sequences} sequences of {length} tokens")
        self._call(self._llama.llama_set_n_threads, None, c.c_void_p, c.c_int32, c.c_int32)(
            handle, self.threads, self.threads
        )
        vocabulary = self._call(self._llama.llama_model_get_vocab, c.c_void_p, c.c_void_p)(model)
        words = self._call(self._llama.llama_vocab_n_tokens, c.c_int32, c.c_void_p)(vocabulary)
        return Context(self, self._llama, handle, words)


class Context:
    """Sequences of tokens of a model, with their keys and values."""

    def __init__(self, library: LlamaCpp, llama: Any, handle: int, words: int) -> None:
        call = library._call
        self._handle, self.words = handle, words
        self._decode = call(llama.llama_decode, c.c_int32, c.c_void_p, _Batch)
        self._synchronize = call(llama.llama_synchronize, None, c.c_void_p)
        self._logits = call(llama.llama_get_logits_ith, c.POINTER(c.c_float), c.c_void_p, c.c_int32)
        memory = call(llama.llama_get_memory, c.c_void_p, c.c_void_p)(handle)
        clear = call(llama.llama_memory_clear, None, c.c_void_p, c.c_bool)
        self.clear = lambda: clear(memory, False)
        """Forget all tokens."""

    def compute(self, ids: np.ndarray[Any, Any], start: int, outputs: Sequence[int]) -> None:
        """Compute ``ids`` (sequences, tokens), whose first column has the position ``start``.

        Args:
            ids: token numbers.
            start: tokens that every sequence has already.
            outputs: columns whose logits are computed.
        """
        sequences, length = ids.shape
        count = ids.size
        numbers = [(c.c_int32 * 1)(sequence) for sequence in range(sequences) for _ in range(length)]
        batch = _Batch(
            count,
            (c.c_int32 * count)(*ids.flatten().tolist()),
            None,
            (c.c_int32 * count)(*(start + column for _ in range(sequences) for column in range(length))),
            (c.c_int32 * count)(*[1] * count),
            (c.POINTER(c.c_int32) * count)(*(c.cast(one, c.POINTER(c.c_int32)) for one in numbers)),
            (c.c_int8 * count)(*(int(column in outputs) for _ in range(sequences) for column in range(length))),
        )
        if status := self._decode(self._handle, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        self._synchronize(self._handle)

    def logits(self, index: int) -> np.ndarray[Any, Any]:
        """Return the logits (V) of the token with this index in the batch that was computed."""
        return np.ctypeslib.as_array(self._logits(self._handle, index), (self.words,)).copy()
