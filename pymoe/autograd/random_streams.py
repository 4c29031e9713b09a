"""A separate random stream for every call, so that its numbers do not depend on the calls that run at the same time.

torch's default generators are shared by the whole process: if calls draw at the same time, each gets numbers that
depend on the others. Therefore a thread that runs a call (for example one of ``map_with_parallel_backward``, called a
map below) has another default generator meanwhile, seeded with one number of the surrounding stream and the call's
index:

- Every operator that draws and was not given a generator gets the call's generator. This happens below the operators'
  Python functions, so it works for ``nn.Dropout``, ``torch.rand``, an LSTM, scripted code, and everything that torch's
  C++ draws in between. It uses a dispatch key that only these threads include, and for which only the drawing operators
  have kernels: all other operators run as usual, at no cost.
- ``torch.get_rng_state``, ``set_rng_state``, ``manual_seed``, ``seed``, ``initial_seed`` and ``torch.random.fork_rng``
  refer to the call's stream, so that ``torch.utils.checkpoint`` draws in backward the numbers that the call drew in
  forward.

The surrounding stream advances by one number per map, if any of its calls draws. So results are reproducible under
``torch.manual_seed``, and maps nest. Not covered: Python's and numpy's generators, and third-party operators that draw
from ``torch.default_generator`` in C++.

Effects on the process:

- While calls run, the module ``torch.random`` has another class and another global ``default_generator`` (with CUDA,
  ``torch.cuda`` also has another tuple ``default_generators``): the functions of ``torch.random`` read that global, so
  replacing it is the only way to give them a generator. On threads that run no call, it refers to the process's
  generator. :func:`restore` undoes all this when the last call has ended.
- The first map registers kernels for the operators below on the dispatch key ``TESTING_ONLY_GenericMode``, and they
  stay. A thread that does not include the key, which is every thread outside of a call, never reaches them. They are
  not removed between maps because the dispatcher's tables are read without a lock: a change while another thread
  calls an operator is a race, and numbers would come from the wrong stream. Other ways to give a thread its own
  generator do not work: torch's C++ uses the process's default generator, which is one object; a dispatch mode
  would cost microseconds for every operator of every call; and calls that take turns at the default generator would no
  longer run at the same time.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

import torch

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    dispatch_has_backend_fallback,
    parse_dispatch_key,
    temporarily_clear_interpreter_stack,
)
from pymoe._torch_private import dispatch_tls_set_dispatch_key_excluded as exclude
from pymoe._torch_private import dispatch_tls_set_dispatch_key_included as include

Result = TypeVar("Result")

# Operators that draw numbers themselves; all other random operators call these. An operator that the installed torch
# lacks is left out. The operators of the last three lines take no generator: while one of them runs, under a lock, the
# device's default generator has the state of the call's generator.
OPERATORS = """
    _fused_dropout _sample_dirichlet _standard_gamma bernoulli.out bernoulli_.Tensor bernoulli_.float binomial cauchy_
    exponential_ geometric_ log_normal_ multinomial multinomial.out normal.Tensor_Tensor normal.Tensor_Tensor_out
    normal.Tensor_float normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out normal_ poisson random_
    random_.from random_.to randperm.generator_out rrelu_with_noise rrelu_with_noise.out rrelu_with_noise_ uniform_
    _cudnn_attention_forward _cudnn_init_dropout_state _efficient_attention_forward _fill_mem_eff_dropout_mask_
    _flash_attention_forward _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _triton_scaled_dot_attention native_dropout
"""

# A dispatch key for torch's own tests, which has no kernels. (With other unused keys, the dispatcher fails to find
# the kernels registered here.)
KEY = "TESTING_ONLY_GenericMode"
_key = parse_dispatch_key(KEY)

_SPREAD = 0x9E3779B97F4A7C15  # odd, so that all positions get different seeds, even in the lower 32 bits
_SEEDS = 1 << 63


class _ThreadStream(threading.local):
    stream: RandomStream | None = None


this_thread = _ThreadStream()
"""``this_thread.stream`` is the random stream of the current thread; code that sets it calls :func:`begin_drawing`."""
_defaults_in_use = threading.Lock()  # held while a default generator temporarily has the state of a call
_changing = threading.Lock()  # held while kernels are registered, or torch.random is changed
_libraries: list[torch.library.Library] = []
_calling: set[int] = set()  # ids of the threads that run a call
_is_changed = False  # true while torch.random uses a separate generator on threads that run a call


class RandomSource:
    """The random streams of the calls of one map, by the index of the call."""

    def __init__(self, eager: bool = False) -> None:
        """Prepare the streams of a map, which are seeded with one number of the surrounding stream.

        Args:
            eager: draw this number now, and not only when a call first needs random numbers.
        """
        self._surrounding = this_thread.stream
        self._lock = threading.Lock()
        self._base = draw(self._surrounding) if eager else None

    def stream(self, position: int) -> RandomStream:
        return RandomStream(self, position)

    def seed(self, position: int) -> int:
        with self._lock:
            if self._base is None:
                self._base = draw(self._surrounding)
            return (self._base + position * _SPREAD) % _SEEDS


class RandomStream:
    """The random numbers of one call, first in its forward pass and then in its backward pass."""

    __slots__ = ("_generators", "_position", "_source")

    def __init__(self, source: RandomSource, position: int) -> None:
        self._source = source
        self._position = position
        self._generators: dict[tuple[str, int | None], torch.Generator] | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        if self._generators is None:
            self._generators = {}
        key = (device.type, device.index)
        generator = self._generators.get(key)
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(self._source.seed(self._position))
            self._generators[key] = generator
        return generator

    @contextmanager
    def as_default(self, device: torch.device) -> Iterator[None]:
        """Return a context manager in which the default generator of ``device`` has this stream's state.

        At the end, the stream takes over the generator's state, and the generator gets its earlier state back.
        """
        mine = self.generator(device)
        default = default_generator(device)
        with _defaults_in_use:
            before = default.get_state()
            default.set_state(mine.get_state())
            try:
                yield
            finally:
                mine.set_state(default.get_state())
                default.set_state(before)


def with_stream(stream: RandomStream, function: Callable[..., Result], *args: Any) -> Result:
    """Return ``function(*args)``, run with random numbers from ``stream``."""
    thread = this_thread
    before, thread.stream = thread.stream, stream
    try:
        if before is None:
            begin_drawing()
        return function(*args)
    finally:
        thread.stream = before
        if before is None:
            end_drawing()


def begin_drawing() -> None:
    """Make this thread draw from ``this_thread.stream`` until :func:`end_drawing`.

    The caller must have just changed ``this_thread.stream`` from None to a stream.
    """
    _calling.add(get_ident())  # must precede the read of _is_changed: see restore()
    if not _is_changed:
        _change()
    include(_key, True)


def end_drawing() -> None:
    """Make this thread draw from the process's generators again."""
    include(_key, False)
    _calling.discard(get_ident())


def draw(stream: RandomStream | None) -> int:
    """Return a random int from 0 to 2**63 - 1, from ``stream``; for None, from the process's default CPU generator."""
    generator = torch.default_generator if stream is None else stream.generator(torch.device("cpu"))
    # Disable all modes, so that no mode sees the operator that draws.
    with temporarily_clear_interpreter_stack(), disable_current_modes(), DisableTorchFunction():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def default_generator(device: torch.device) -> torch.Generator:
    """Return the process's own default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generators = torch.get_device_module(device).default_generators
    return tuple.__getitem__(generators, index)


def install() -> None:
    """Register the kernels of the drawing operators, unless this process has done so before."""
    if not _libraries:
        with _changing:
            if not _libraries:
                _install()
    _numbers_come_from_streams()
    if _is_changed and torch.cuda.is_initialized() and not isinstance(torch.cuda.default_generators, _CudaDefaults):
        with _changing:
            _change_cuda()  # CUDA was initialized after the change of torch.random


def _install() -> None:
    fallback = torch.library.Library("_", "IMPL", KEY)
    if not dispatch_has_backend_fallback(KEY):
        fallback.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", KEY)
    for name in OPERATORS.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            library.impl(name, _drawing_from_streams(operator))
    _libraries.extend((fallback, library))


@canaries.canary
def _numbers_come_from_streams() -> canaries.Exercises:
    """Test the private names of torch that make a call draw from its own generator."""
    source, expected = RandomSource.__new__(RandomSource), torch.Generator("cpu")
    source._lock, source._base = threading.Lock(), 1
    expected.manual_seed(source.seed(1))

    def twice() -> list[torch.Tensor]:
        return [torch.rand(2, device="cpu", dtype=torch.float64) for _ in range(2)]

    drawn = with_stream(source.stream(1), twice)
    numbers = [torch.rand(2, generator=expected, device="cpu", dtype=torch.float64) for _ in range(2)]
    restore()
    is_heard = all(map(torch.equal, drawn, numbers))
    for name in ("parse_dispatch_key", "dispatch_tls_set_dispatch_key_included", "dispatch_has_backend_fallback"):
        yield name, is_heard
    # Without this exclusion, the kernel would call itself for ever.
    yield "dispatch_tls_set_dispatch_key_excluded", is_heard


def _change() -> None:
    """Replace ``torch.random.default_generator`` and, if CUDA is initialised, ``torch.cuda.default_generators``.

    On a thread that runs a call, they then refer to the call's generators; on other threads, to those of the process.
    """
    global _is_changed
    with _changing:
        if _is_changed:
            return
        torch.random.__class__ = _RandomModule
        vars(torch.random)["default_generator"] = _Default()
        _is_changed = True
        _change_cuda()


def _change_cuda() -> None:
    generators = torch.cuda.default_generators
    if _is_changed and torch.cuda.is_initialized() and not isinstance(generators, _CudaDefaults):
        torch.cuda.default_generators = _CudaDefaults(generators)  # type: ignore[assignment]


def restore() -> None:
    """Undo the changes of ``torch.random`` after a call, unless another call still runs.

    A call that begins at the same time never loses its generator: its thread is in ``_calling`` before it reads
    ``_is_changed``, and this function sets ``_is_changed`` to False before it reads ``_calling``. So either this
    function finds the call in ``_calling``, or the call waits for the lock and changes ``torch.random`` again.
    """
    global _is_changed
    if _calling or not _is_changed:
        return
    with _changing:
        if not _is_changed:
            return
        _is_changed = False
        if _calling:
            _is_changed = True
            return
        # Leave a generator that other code has set meanwhile.
        if isinstance(vars(torch.random)["default_generator"], _Default):
            vars(torch.random)["default_generator"] = torch.default_generator
        torch.random.__class__ = types.ModuleType
        if isinstance(torch.cuda.default_generators, _CudaDefaults):
            torch.cuda.default_generators = torch.cuda.default_generators.originals  # type: ignore[assignment]


def _first_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    device = kwargs.get("device")
    return None if device is None else torch.device(device)


def _drawing_from_streams(operator: Any) -> Callable[..., Any]:
    """Return a kernel that runs ``operator`` with this thread's random stream, unless it is given a generator."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("generator") if "generator" in names else len(names)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        exclude(_key, True)
        try:
            given = args[position] if len(args) > position else kwargs.get("generator")
            stream, device = this_thread.stream, _first_device(args, kwargs)
            # The key is also set on torch's own threads for backward passes on other devices. They run no call.
            if given is not None or stream is None or device is None or device.type == "meta":
                return operator(*args, **kwargs)
            if position < len(names):
                kwargs["generator"] = stream.generator(device)
                return operator(*args[:position], **kwargs)
            with stream.as_default(device):
                return operator(*args, **kwargs)
        finally:
            exclude(_key, False)

    return kernel


def _of_this_thread() -> torch.Generator:
    stream = this_thread.stream
    return torch.default_generator if stream is None else stream.generator(torch.device("cpu"))


class _Default:
    """Replaces the global ``default_generator`` in the module ``torch.random``, and forwards attributes to the
    generator of the call that the current thread runs, or to the process's generator if it runs none.

    (With a real generator, all threads would get the same one.) Code outside of ``torch.random`` never gets this
    object, because :class:`_RandomModule` returns a generator in its place.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(_of_this_thread(), name)


class _RandomModule(types.ModuleType):
    """The class of the module ``torch.random`` while calls run, for code that reads ``torch.random.default_generator``.

    (The module's own functions read the global variable of this name instead.)
    """

    @property
    def default_generator(self) -> torch.Generator:
        """Return the call's generator on a thread that runs a call, and the process's generator on other threads."""
        set_by_others = vars(self)["default_generator"]
        return _of_this_thread() if isinstance(set_by_others, _Default) else set_by_others

    @default_generator.setter
    def default_generator(self, generator: torch.Generator) -> None:
        vars(self)["default_generator"] = _Default() if generator is torch.default_generator else generator


class _CudaDefaults(tuple):
    """Replaces the tuple ``torch.cuda.default_generators``.

    On a thread that runs a call, indexing with a number returns the call's generator for that device.
    """

    originals: tuple[torch.Generator, ...]

    def __new__(cls, originals: tuple[torch.Generator, ...]) -> _CudaDefaults:
        new = super().__new__(cls, originals)
        new.originals = originals
        return new

    def __getitem__(self, index: Any) -> Any:
        stream = this_thread.stream
        if stream is None or isinstance(index, slice):
            return tuple.__getitem__(self, index)
        return stream.generator(tuple.__getitem__(self, index).device)


def _forget() -> None:
    """Replace the locks in the child of a fork, and forget the calls of threads that do not exist there."""
    global _changing, _defaults_in_use
    _changing, _defaults_in_use = threading.Lock(), threading.Lock()
    _calling.intersection_update({get_ident()})


os.register_at_fork(after_in_child=_forget)
