"""A decorator for functions that ``torch.compile`` must not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def compiler_disable(function: Function) -> Function:
    """Decorate ``function`` so that compiled code calls it without compiling it or anything that it calls.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes seconds, even in programs that do
    not compile. This decorator uses the compiler's ``disable`` only if the compiler has been imported already.
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
