"""The files of a model, made once and kept: its checkpoint, the packed models, GGUF files, and the logits to expect.

A file has its final name only when it is complete. There is one folder for each model and number of layers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.children import Child, ChildError
from benchmarks.layers.checkpoints import write_checkpoint
from benchmarks.models.configurations import Model
from benchmarks.models.contenders import WHOLE, Contender
from benchmarks.models.gguf_files import experts
from benchmarks.models.llama_cpp import Missing
from benchmarks.models.systems import MOST_TOGETHER
from pymoe.bench.environment import memory_gib

MOST_LOADED = 0.75
"""Largest share of the memory that weights in bfloat16 may take."""
PATIENCE_S = 3600.0
"""Seconds that writing a file may take."""
DEEPSEEK_LITE = (26, 27)
"""Numbers of layers by which llama.cpp recognises DeepSeek-V2-Lite."""


@dataclass
class Files:
    """The files of a model."""

    folder: Path
    model: Model
    layers: int
    fewer: int
    """Number of layers of the smaller model that is also measured; 0 if none is."""
    threads: int
    libraries: Path | None
    """The folder of llama.cpp, or None."""

    @property
    def whole(self) -> Path:
        """Return the checkpoint's folder."""
        return self.folder / WHOLE

    def packed(self, one: Contender) -> Path:
        """Return the folder that a contender behind transformers loads."""
        return self.folder / one.weights

    def gguf(self, form: str, layers: int) -> Path:
        """Return a file of llama.cpp."""
        return self.folder / f"{form}-{layers}.gguf"

    def ggufs(self, one: Contender) -> dict[int, Path]:
        """Return the files that a contender of llama.cpp loads, by layers."""
        return {layers: self.gguf(one.form, layers) for layers in (self.layers, self.fewer) if layers}

    def logits(self, name: str) -> Path:
        """Return the file with the logits that are expected for these weights."""
        return self.folder / f"{name}.npy"

    def size(self, one: Contender) -> int:
        """Return the bytes of the contender's files."""
        if one.form:
            return sum(file.stat().st_size for file in self.ggufs(one).values())
        return sum(file.stat().st_size for file in self.packed(one).glob("*.safetensors"))

    @property
    def fits(self) -> bool:
        """Return whether the checkpoint, in bfloat16, can be loaded here."""
        size = sum(file.stat().st_size for file in self.whole.glob("*.safetensors"))
        return size < MOST_LOADED * memory_gib() * 2**30

    def make_whole(self) -> None:
        """Write the checkpoint and, if it can be loaded, the logits of transformers' eager experts."""
        if not self.whole.is_dir():
            part = self.folder / f"{WHOLE}.part"
            shutil.rmtree(part, ignore_errors=True)
            write_checkpoint(part, self.model.build(self.layers))
            part.rename(self.whole)
        if self.fits:
            self._expect(WHOLE, "")

    def make(self, one: Contender) -> None:
        """Write what a contender needs.

        Raises:
            Missing: llama.cpp does not run this model, or the weights are too large.
            RuntimeError: a file could not be written.
        """
        if one.form:
            self._make_ggufs(one)
        elif one.weights != WHOLE:
            if not (self.packed(one) / "config.json").is_file():
                command = [sys.executable, "-m", "pymoe.quantize", self.whole, self.packed(one), *one.packing]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError((done.stderr.strip().splitlines() or ["pymoe.quantize failed"])[-1])
            if self.fits:
                self._expect(one.weights, str(self.packed(one)))
        elif not self.fits:
            raise Missing("the weights in bfloat16 are too large for the memory")

    def _make_ggufs(self, one: Contender) -> None:
        if self.model.config == "DeepseekV2Config" and not {self.layers, self.fewer or self.layers} <= {*DEEPSEEK_LITE}:
            raise Missing("it knows DeepSeek-V2-Lite by its number of layers, and expects larger ones of others")
        for layers in self.ggufs(one):
            for form in dict.fromkeys(("BF16", one.form)):
                if not self.gguf(form, layers).is_file():
                    source, target = str(self.gguf("BF16", layers)), str(self.gguf(form, layers))
                    self._ask(do="write", form=form, layers=layers, source=source, file=target)

    def _expect(self, name: str, packed: str) -> None:
        if not self.logits(name).is_file():
            shared = self._ask(do="expect", packed=packed, file=str(self.logits(name)))
            if not packed:
                (self.folder / "touched.json").write_text(json.dumps(shared))

    def touched(self) -> dict[str, float]:
        """Return, for each number of tokens, the share of a layer's experts that these tokens read together. It is
        counted or, if the model could not be run in bfloat16, computed for random choices.
        """
        if not self.fits:
            config = json.loads((self.whole / "config.json").read_text())
            share = config["num_experts_per_tok"] / experts(config)
            return {str(tokens): 1 - (1 - share) ** tokens for tokens in range(1, MOST_TOGETHER + 1)}
        found: dict[str, float] = json.loads((self.folder / "touched.json").read_text())
        return found

    def _ask(self, **request: Any) -> Any:
        if request["do"] == "write":
            request["libraries"] = str(self.libraries)
        child = worker(self.threads)
        try:
            return child.ask({"folder": str(self.whole), **request})
        except ChildError as error:
            raise RuntimeError(str(error)) from None
        finally:
            child.kill()


def worker(threads: int) -> Child:
    """Start a process for a set of weights."""
    command = [sys.executable, "-m", "benchmarks.models.worker", str(threads)]
    return Child(command, {"OMP_NUM_THREADS": str(threads)}, limit=PATIENCE_S)
