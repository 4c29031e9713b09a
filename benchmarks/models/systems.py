"""A model in the memory of this process, run by transformers or by llama.cpp, with the same calls for both.

Tokens are drawn at random, and are the same for every system: decoding adds one token to each of some sequences, which
share no prompt; prefill computes one sequence and the logits of its last token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.layers.checkpoints import AnonymousMemory
from benchmarks.models import llama_cpp

Record = dict[str, Any]
Ids = np.ndarray[Any, Any]
PROMPT = 32
"""Number of tokens of every sequence before decoding adds the first one."""
MOST_DECODED = 512
"""Maximum number of tokens of a sequence in llama.cpp."""
MOST_COMPILED = 96
"""Maximum number of tokens of a sequence in the cache of a compiled step, whose attention always computes all of
them."""
CHECKED = 64
"""Number of tokens of the text whose logits are compared."""
MOST_TOGETHER = 32
"""Most sequences that are decoded together."""
EMBEDDING = re.compile(r"embed_tokens|token_embd")
EXPERTS = re.compile(r"\.experts(\.|$)|_exps\.")


def ids_of(words: int, sequences: int, tokens: int, seed: int) -> Ids:
    """Return random token numbers (sequences, tokens)."""
    return np.random.default_rng([seed, sequences]).integers(words, size=(sequences, tokens))


class System(Protocol):
    """A loaded model."""

    words: int
    """Size of the vocabulary."""

    def logits(self, ids: Ids) -> Ids:
        """Return the logits (T, V) of a sequence (1, T)."""

    def prefill(self, tokens: int, layers: int) -> Callable[[], object]:
        """Return a call that computes a sequence from its beginning, with the first ``layers`` layers."""

    def decoding(self, sequences: int, layers: int) -> Callable[[], object]:
        """Return a call that adds a token to each sequence."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights of ``experts``, and of the ``rest``, which every token reads."""


def shares(named: Iterator[tuple[str, int]]) -> dict[str, int]:
    """Return the bytes of experts and of everything else. The embedding is left out, because a token reads only one row
    of it.
    """
    found = {"experts": 0, "rest": 0}
    for name, size in named:
        if not EMBEDDING.search(name):
            found["experts" if EXPERTS.search(name) else "rest"] += size
    return found


class Transformers:
    """A model of transformers, with the experts of transformers or of pymoe.

    Args:
        folder: the checkpoint, or the folder of a quantised model.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        import pymoe.integrations.transformers  # noqa: F401

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.attention: str = self.model.config._attn_implementation  # GPT-OSS has no "sdpa"
        self.model.eval().requires_grad_(False)
        self.words = int(self.model.config.vocab_size)

    @contextmanager
    def cut(self, layers: int) -> Iterator[Any]:
        """Return a context manager in which the model has only its first ``layers`` layers."""
        inner, config = self.model.model, self.model.config
        whole, number = inner.layers, config.num_hidden_layers
        inner.layers, config.num_hidden_layers = whole[:layers], layers
        try:
            yield self.model
        finally:
            inner.layers, config.num_hidden_layers = whole, number

    def logits(self, ids: Ids) -> Ids:
        found: Ids = self.model(torch.from_numpy(ids)).logits[0].float().numpy()
        return found

    def prefill(self, tokens: int, layers: int) -> Callable[[], object]:
        ids = torch.from_numpy(ids_of(self.words, 1, tokens, 2))

        def run() -> object:
            with self.cut(layers) as model:
                return model(ids, use_cache=True, logits_to_keep=1).logits

        return run

    def decoding(self, sequences: int, layers: int) -> Callable[[], object]:
        texts = torch.from_numpy(ids_of(self.words, sequences, PROMPT + MOST_DECODED, 3))
        with self.cut(layers) as model:
            past = model(texts[:, :PROMPT], use_cache=True, logits_to_keep=1).past_key_values
        number = iter(range(PROMPT, PROMPT + MOST_DECODED))

        def run() -> object:
            at = next(number)
            with self.cut(layers) as model:
                return model(texts[:, at : at + 1], past_key_values=past, use_cache=True).logits.argmax(-1)

        return run

    def attend(self, implementation: str) -> None:
        """Choose transformers' implementation of attention. On a CPU in bfloat16, torch's "sdpa" takes ten times as
        long as "eager" for one query and many keys, but less memory for prompts.
        """
        if self.model.config._attn_implementation != implementation:
            self.model.set_attn_implementation(implementation)

    def compiled_decoding(self, sequences: int, layers: int) -> Callable[[], object]:
        """Return a call like that of ``decoding``, but with one graph of torch.compile per token. The graph has run
        once.
        """
        texts = torch.from_numpy(ids_of(self.words, sequences, PROMPT + MOST_COMPILED, 3))
        step = self._compiled_step(texts[:, :PROMPT], layers)
        number = iter(range(PROMPT, PROMPT + MOST_COMPILED))

        def run() -> object:
            at = next(number)
            with self.cut(layers):
                return step(texts[:, at : at + 1]).argmax(-1)

        run()
        return run

    def stepwise_logits(self, ids: Ids) -> Ids:
        """Return the same as ``logits``, using the call of ``compiled_decoding`` for every token except the first."""
        tokens = torch.from_numpy(ids)
        step = self._compiled_step(tokens[:, :1], self.model.config.num_hidden_layers)
        rest = [step(tokens[:, at : at + 1]).float() for at in range(1, tokens.shape[1])]
        return torch.cat([torch.from_numpy(self.logits(ids[:, :1]))[None], *rest], 1)[0].numpy()

    def _compiled_step(self, prompt: Tensor, layers: int) -> Callable[[Tensor], Tensor]:
        """Return a function that takes the tokens (sequences, 1) after a prompt and returns their logits."""
        from transformers import StaticCache

        torch._dynamo.config.recompile_limit = 64  # one graph for each number of sequences and layers
        forward = torch.compile(self.model.forward, fullgraph=True, dynamic=False)
        with self.cut(layers) as model:
            past = StaticCache(config=model.config, max_cache_len=PROMPT + MOST_COMPILED)
            model(prompt, past_key_values=past, use_cache=True, logits_to_keep=1)
        return lambda tokens: forward(tokens.contiguous(), past_key_values=past, use_cache=True).logits

    def sizes(self) -> dict[str, int]:
        return shares((name, tensor.nbytes) for name, tensor in _tensors(self.model))

    def touched(self, ids: Ids, sequences: tuple[int, ...]) -> dict[str, float]:
        """Return, for each number of tokens, the share of a layer's experts that these tokens read together: the mean
        over layers and over groups of the text's tokens.
        """
        chosen: list[Tensor] = []
        experts = [one for name, one in self.model.named_modules() if name.endswith(".experts")]
        hooks = [one.register_forward_pre_hook(lambda _, given: chosen.append(given[1])) for one in experts]
        self.logits(ids)
        for hook in hooks:
            hook.remove()
        count = int(experts[0].num_experts)
        found = {}
        for number in sequences:
            groups = [part.unique().numel() for one in chosen for part in one.split(number) if len(part) == number]
            found[str(number)] = sum(groups) / len(groups) / count if groups else 1.0
        return found

    def take(self, other: Transformers) -> None:
        """Replace the weights by the values that the packed weights of ``other`` represent."""
        from pymoe.nn import QuantizedDenseLinear, QuantizedLinear
        from pymoe.ops import dequantize_weight

        for name, layer in other.model.named_modules():
            if not isinstance(layer, QuantizedLinear):
                continue
            weight = dequantize_weight(layer.quantized_weight)
            if isinstance(layer, QuantizedDenseLinear):
                self.model.get_parameter(f"{name}.weight").data.copy_(weight[0])
                continue
            experts = self.model.get_submodule(name.rpartition(".")[0])
            self.model.get_parameter(name).data.copy_(weight.mT if experts.is_transposed else weight)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class LlamaCpp:
    """A llama.cpp model, which can also be run with only its first few layers.

    Args:
        library: the loaded library.
        files: the model files, by number of layers; the one with the most layers is the whole model. Each truncated
            model has a file of its own, because llama.cpp cannot run part of a file.
    """

    def __init__(self, library: llama_cpp.LlamaCpp, files: dict[int, Path]) -> None:
        self.library = library
        self.files = files
        self.layers = max(files)
        self._models = {self.layers: library.load(files[self.layers])}
        self._context = library.context(self._models[self.layers], 1, CHECKED)
        self.words = self._context.words

    def _room(self, layers: int, sequences: int, length: int) -> llama_cpp.Context:
        if layers not in self._models:
            self._models[layers] = self.library.load(self.files[layers])
        return self.library.context(self._models[layers], sequences, length)

    def logits(self, ids: Ids) -> Ids:
        self._context.clear()
        self._context.compute(ids, 0, range(ids.shape[1]))
        return np.stack([self._context.logits(index) for index in range(ids.shape[1])])

    def prefill(self, tokens: int, layers: int) -> Callable[[], object]:
        ids = ids_of(self.words, 1, tokens, 2)
        context = self._room(layers, 1, tokens)

        def run() -> object:
            context.clear()
            context.compute(ids, 0, (tokens - 1,))
            return context.logits(tokens - 1)

        return run

    def decoding(self, sequences: int, layers: int) -> Callable[[], object]:
        texts = ids_of(self.words, sequences, PROMPT + MOST_DECODED, 3)
        context = self._room(layers, sequences, PROMPT + MOST_DECODED)
        for start in range(PROMPT):  # all prompts together may exceed the maximum length of a batch
            context.compute(texts[:, start : start + 1], start, ())
        number = iter(range(PROMPT, PROMPT + MOST_DECODED))

        def run() -> object:
            at = next(number)
            context.compute(texts[:, at : at + 1], at, (0,))
            return [context.logits(index).argmax() for index in range(sequences)]

        return run

    def sizes(self) -> dict[str, int]:
        reader = llama_cpp.gguf().GGUFReader(self.files[self.layers])
        return shares((tensor.name, int(tensor.n_bytes)) for tensor in reader.tensors)


def loaded(make: Callable[[], System]) -> tuple[System, Record]:
    """Return a system, and the seconds and the bytes of anonymous memory that loading it took."""
    start = time.perf_counter()
    with AnonymousMemory() as memory:
        system = make()
        seconds = time.perf_counter() - start
        system.logits(ids_of(system.words, 1, 1, 0))  # maps what is mapped, and computes once
        stays = memory.stays
    return system, {"seconds": seconds, "peak": memory.peak, "stays": stays}
