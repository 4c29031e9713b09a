"""The process of a set of weights: ``python -m benchmarks.models.worker THREADS``.

It answers requests, one JSON object with ``do`` a line (benchmarks/common/children.py): ``load`` first, then ``check``
and ``measure`` any number of times. ``expect`` and ``write`` make files and need no ``load``.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.children import serve
from benchmarks.models import llama_cpp
from benchmarks.models.gguf_files import write_gguf
from benchmarks.models.systems import CHECKED, MOST_TOGETHER, LlamaCpp, Record, System, Transformers, ids_of, loaded

PAUSE_S = 0.01
"""Seconds before a turn: threads of the previous process may still spin while they wait for work."""


class Worker:
    """Answers requests with one model in memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.system: System | None = None
        self.calls: dict[tuple[Any, ...], Callable[[], object]] = {}

    def answer(self, request: Record) -> Any:
        """Do what a request asks for."""
        with torch.no_grad():
            return getattr(self, request.pop("do"))(**request)

    def load(self, folder: str = "", libraries: str = "", files: dict[str, str] | None = None) -> Record:
        """Load a folder of transformers, or llama.cpp's files by their number of layers; return the time and memory
        that this took, and the bytes of weights.
        """
        if folder:
            import transformers  # noqa: F401  # memory and time count after the imports

            import pymoe.integrations.transformers  # noqa: F401

            make: Callable[[], System] = partial(Transformers, Path(folder))
        else:
            library = llama_cpp.LlamaCpp(Path(libraries), self.threads)
            paths = {int(layers): Path(file) for layers, file in (files or {}).items()}
            make = partial(LlamaCpp, library, paths)
        self.system, record = loaded(make)
        about = {"about": library.about()} if libraries else {}
        return {**record, "sizes": self.system.sizes(), **about}

    def check(self, implementation: str, expected: dict[str, str], compiled: bool = False) -> dict[str, list[float]]:
        """Return, for every file of expected logits, the relative error of this model's logits: the median and the
        maximum over the tokens of a text.
        """
        system = self._under(implementation, compiled)
        logits = system.stepwise_logits if compiled else system.logits
        found = logits(ids_of(system.words, 1, CHECKED, 1)).astype(np.float64)
        errors = {}
        for name, file in expected.items():
            wanted = np.load(file).astype(np.float64)
            each = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
            errors[name] = [float(np.median(each)), float(each.max())]  # NaN stays NaN in both
        return errors

    def measure(
        self, implementation: str, mode: str, tokens: int, layers: int, calls: int, compiled: bool = False
    ) -> Record:
        """Return the wall seconds and the processor seconds of ``calls`` calls; the first call of a kind is preceded by
        a warm-up.
        """
        system = self._under(implementation, compiled)
        key = (implementation, compiled, mode, tokens, layers)
        if key not in self.calls:
            make = system.compiled_decoding if compiled else system.decoding if mode == "decode" else system.prefill
            self.calls[key] = make(tokens, layers)
        call = self.calls[key]
        gc.collect()
        gc.disable()
        time.sleep(PAUSE_S)
        walls, processors = [], []
        for _ in range(calls):
            wall, processor = time.perf_counter(), time.process_time()
            call()
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
        gc.enable()
        return {"wall": walls, "processor": processors}

    def expect(self, folder: str, packed: str, file: str) -> Any:
        """Write the logits of transformers' eager experts with the weights of ``folder``, or with the values that the
        weights of ``packed`` represent; return the share of experts that tokens read together, by their number.
        """
        model = Transformers(Path(folder))
        model.model.set_experts_implementation("eager")
        if packed:
            model.take(Transformers(Path(packed)))
        ids = ids_of(model.words, 1, CHECKED, 1)
        with open(f"{file}.part", "wb") as target:
            np.save(target, model.logits(ids))
        os.replace(f"{file}.part", file)
        return model.touched(ids, tuple(range(1, MOST_TOGETHER + 1)))

    def write(self, folder: str, libraries: str, form: str, layers: int, source: str, file: str) -> None:
        """Write a GGUF file: the first layers of the checkpoint in BF16, or ``source`` in another form."""
        part = Path(f"{file}.part")
        if form == "BF16":
            write_gguf(Path(folder), part, layers, llama_cpp.gguf())
        else:
            llama_cpp.LlamaCpp(Path(libraries), self.threads).quantize(Path(source), part, form)
        part.replace(file)

    def _under(self, implementation: str, compiled: bool) -> Any:
        """Return the system, set to this implementation of experts and to the attention that fits it."""
        system: Any = self.system
        if isinstance(system, Transformers):
            system.attend("eager" if compiled else system.attention)
        if isinstance(system, Transformers) and system.model.config._experts_implementation != implementation:
            system.model.set_experts_implementation(implementation)
        return system


def main() -> None:
    """Serve with as many threads as the argument says."""
    threads = int(sys.argv[1])

    def start() -> Callable[[Any], Any]:
        torch.set_num_threads(threads)
        return Worker(threads).answer

    serve(start)


if __name__ == "__main__":
    main()
