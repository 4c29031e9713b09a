"""Which stage every node of a graph belongs to: markers end stages, and those with nothing between them are one."""

from __future__ import annotations

import operator

import torch
from torch import fx

from pymoe.pipe.traced.split_points import is_marker

__all__ = ["CONSTANT", "is_arithmetic", "is_number", "is_work", "stage_numbers", "works"]

CONSTANT = "_constant_"  # how the names of tensors begin that are no parameters or buffers of the model


def stage_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """For every call in the graph but the markers the number of its stage, from 0 up; no stage is empty."""
    dependent = _dependent(graph)
    numbers: dict[fx.Node, int] = {}
    stage, has_work, is_over = 0, False, False
    waiting: list[fx.Node] = []  # views behind a boundary: they belong to the stage that begins there, if one does
    for node in graph.nodes:
        if is_marker(node):
            is_over = has_work
        elif node.op in ("call_function", "call_module"):
            if node in dependent and is_work(node):
                if is_over:
                    stage += 1
                    numbers.update(dict.fromkeys(waiting, stage))
                has_work, is_over = True, False
                waiting.clear()
            elif is_over:
                waiting.append(node)
            numbers[node] = stage
            if node.target is operator.getitem:  # goes with what it is a part of
                numbers[node] = numbers.get(node.all_input_nodes[0], stage)
    for node in reversed(graph.nodes):
        if node in numbers and node not in dependent:  # a constant: made where it is taken first
            numbers[node] = min([numbers[user] for user in node.users if user in numbers], default=numbers[node])
    return numbers


def works(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something of inputs, parameters or buffers, in their order."""
    dependent = _dependent(graph)
    return [node for node in graph.nodes if node in dependent and is_work(node)]


def is_work(node: fx.Node) -> bool:
    """Not a number, and not just a look at a tensor that is there."""
    if node.op not in ("call_function", "call_module") or is_number(node) or node.target is operator.getitem:
        return False
    target = node.target
    return not (isinstance(target, torch._ops.OpOverload) and (target.is_view or _only_asserts(target)))


def _only_asserts(target: torch._ops.OpOverload) -> bool:
    arguments = target._schema.arguments
    return not target._schema.returns and not any(x.alias_info and x.alias_info.is_write for x in arguments)


def is_number(node: fx.Node) -> bool:
    """Is its value a number, a size say?"""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_arithmetic(node: fx.Node) -> bool:
    """Is its value a size, or what Python computes of sizes?"""
    if node.op != "call_function" or not is_number(node):
        return False
    return node.target is torch.ops.aten.sym_size.int or not isinstance(node.target, torch._ops.OpOverload)


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """What depends on inputs, parameters or buffers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and not str(node.target).startswith(CONSTANT))
        if is_source or found.intersection(node.all_input_nodes):
            found.add(node)
    return found
