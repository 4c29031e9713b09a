"""Records the operators and the Python functions that a call runs, in order."""

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.walks import entered


class Operators(TorchDispatchMode):
    """Appends to :attr:`names` the name of every operator inside the context, such as ``aten.mm.default``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def functions_of(call):
    """Return module and name of every Python function that the second of two calls runs."""
    call()  # fills caches
    return [(module, code.co_name) for module, code in entered(call)]
