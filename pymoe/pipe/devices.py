"""Places stages on devices, where they stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn


def place(
    parts: Sequence[nn.Module], devices: Sequence[torch.device | str | int] | None
) -> tuple[torch.device | None, ...]:
    """Move every part to its device, and return the devices. None: the parts stay where they are.

    Raises:
        ValueError: there are not as many devices as parts, one cannot be used, or parts on different devices share a
            parameter.
    """
    if devices is None:
        return (None,) * len(parts)
    found = [usable_device(device, f"Pipe: devices[{number}]") for number, device in enumerate(devices)]
    if len(found) != len(parts):
        raise ValueError(f"Pipe: devices: expected one device per stage ({len(parts)}), got {len(found)}")
    for names in shared_parameters(parts):
        if len({found[user] for user in names}) > 1:
            where = ", ".join(f"stage {user} on {found[user]}" for user in names)
            name = next(iter(names.values()))
            raise ValueError(f"Pipe: the parameter {name!r} is used by {where}: it can be on one device only")
    for part, device in zip(parts, found, strict=True):
        part.to(device)
    return tuple(found)


def usable_device(device: torch.device | str | int, what: str) -> torch.device:
    """Return the device. Raise ValueError, beginning with ``what``, if this process cannot use it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = f"{torch.__version__}, and sees {torch.cuda.device_count()} CUDA devices"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{what} must be a device of this machine, got {str(device)!r}: torch is {there} ({reason})"
        ) from error
    return found


def refuse_moves(tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise RuntimeError if ``change``, which is about to be applied to tensors, moves one to another device."""
    for device in {tensor.device for tensor in tensors}:
        there = change(torch.empty(0, device=device)).device
        if there != device:
            raise RuntimeError(
                f"Pipe: stages cannot be moved from {device} to {there}; "
                "move the model before the pipe is made, or give Pipe devices=[...], one per stage"
            )


def shared_parameters(parts: Sequence[nn.Module]) -> Iterator[dict[int, str]]:
    """Yield for every parameter that several parts share its name in each of them."""
    users: dict[int, dict[int, str]] = {}
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            users.setdefault(id(parameter), {})[number] = name
    for names in users.values():
        if len(names) > 1:
            yield names
