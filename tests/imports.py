"""Finds the imports of Python modules by parsing their sources, for test_architecture.py and house.py."""

import ast
import re
from pathlib import Path


def module_of(file):
    """Return the name of the module in ``file``, a path relative to the root."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file, text):
    """Yield (module, whether it is imported at import time) for every import in ``file``, with absolute names."""
    package = Path(file).with_suffix("").parts
    tree = ast.parse(text)
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for test in ast.walk(tree):  # an import only for the type checker never runs
        if isinstance(test, ast.If) and ast.unparse(test.test).endswith("TYPE_CHECKING"):
            if package[-1] == "__init__":  # a package imports some of its names when they are first used
                test.body = []
            lazy.update(node for statement in test.body for node in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for module in modules_named_in(tree if isinstance(node.args[0], ast.Name) else node.args[0]):
                yield module, node not in lazy
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            if module == "pymoe":
                for alias in node.names:
                    yield f"pymoe.{alias.name}", node not in lazy
            else:
                yield module, node not in lazy


def modules_named_in(tree):
    """Yield the pymoe modules that string constants in ``tree`` name, as arguments of ``import_module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"pymoe(\.\w+)+", str(node.value)):
            yield node.value


def import_graph(sources):
    """Return the modules that each module of ``sources`` imports, at import time or later.

    ``sources`` maps module names to pairs of file and text.
    """
    graph = {}
    for name, (file, text) in sources.items():
        found = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        found |= {module for module, _ in imports(file, text)}
        found = {module for module in found if module in sources and module != name}
        # An import of the enclosing package does not count, since its __init__ has run before.
        graph[name] = {module for module in found if not name.startswith(f"{module}.")}
    return graph


def circles(graph):
    """Return the sorted sets of modules that import each other, directly or indirectly."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for module in graph[todo.pop()] - seen:
                seen.add(module)
                todo.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]})
