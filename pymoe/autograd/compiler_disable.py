"""What ``torch.compile`` shall not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["compiler_disable"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiler_disable(function: Function) -> Function:
    """A decorator: compiled code calls ``function`` as it is, and nothing that it calls is compiled on the way.

    ``torch.compiler.disable`` does the same and imports the compiler, when it decorates or at the first call: seconds
    that whoever compiles nothing would wait for. This asks for it where somebody else has imported it.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*args, **kwargs)
            disabled = disable(function, wrapping=False)
        return disabled(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]
