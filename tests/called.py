"""Functions and a class that record what a call runs, in order: operators in the dispatcher, and Python functions."""

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.walks import entered


class Operators(TorchDispatchMode):
    """Inside, :attr:`names` grows by the name of every operator: ``aten.mm.default``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def functions_of(call):
    """Return module and name of every function of Python that a call runs the second time."""
    call()  # what is looked up once is there
    return [(module, code.co_name) for module, code in entered(call)]
