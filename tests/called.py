"""What a call runs, in order: the operators that reach the dispatcher, and the functions of Python."""

import sys

from torch.utils._python_dispatch import TorchDispatchMode


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
    found = []

    def note(frame, event, argument):
        if event == "call":
            found.append((frame.f_globals.get("__name__", ""), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
