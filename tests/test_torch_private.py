"""Tests that the private names of torch that pymoe uses exist, and occur only in pymoe/_torch_private.py.

After an update of torch, the first test reports the missing names, with the last versions that had them.
"""

import ast
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE = (ROOT / "pymoe" / "_torch_private.py").read_text()
SEEN_IN = "2.11.0, 2.13.0 and 2.15.0"

# Other places: the reference and _common, which import only torch, and the file of private names of transformers.
EXCEPTIONS = (
    "pymoe/_torch_private.py",
    "pymoe/integrations/transformers/interface.py",
    "pymoe/reference/",
    "pymoe/_common/",
)


def owner_of(name):
    """Return an object with the attributes of ``name``: the class or module itself, or an instance of it."""
    if name == "torch.autograd.graph.Node":
        return torch.ones((), requires_grad=True).exp().grad_fn
    if name == "torch.nn.Module":
        return torch.nn.Module()
    if name == "torch.nn.Module.state_dict":
        return torch.nn.Module().state_dict()
    if name == "torch._ops.OpOverload":
        return torch.ops.aten.relu.default
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), attribute)


def literal(name):
    """Return a global of _torch_private.py, which cannot be imported if a name is missing."""
    for statement in ast.parse(SOURCE).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if ast.unparse(target) == name:
                return ast.literal_eval(statement.value)
    raise AssertionError(name)


ATTRIBUTES = [(owner, name) for owner, names in literal("ATTRIBUTES").items() for name in names]
LAZY = list(literal("_LAZY"))
# Further known names: those of named tuples, of sys and os, and attributes that torch.compile looks for on other
# functions.
KNOWN = {name for _, name in ATTRIBUTES} | {
    "_replace",
    "_getframe",
    "_exit",
    "_torchdynamo_disable",
    "_dynamo_marked_constant",
}


def missing_names(source):
    """Return the torch names in the text ``source`` that this torch lacks."""
    missing, found = [], {}
    for statement in ast.parse(source).body:
        text = ast.unparse(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            what = text
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Attribute):
            what = ast.unparse(statement.value)
        else:
            continue
        try:
            exec(text, found)
        except (AttributeError, ImportError):
            missing.append(what)
    return missing


def test_this_torch_has_every_private_name():
    missing = missing_names(SOURCE)
    assert not missing, f"torch {torch.__version__} lacks what torch {SEEN_IN} had: {', '.join(missing)}"


def test_a_missing_name_is_told():
    planted = "\n_x: Any = torch._C._no_such_name\nfrom torch._no_such_module import y\n"
    assert missing_names(SOURCE + planted) == ["torch._C._no_such_name", "from torch._no_such_module import y"]


@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES)
def test_this_torch_has_every_private_attribute(owner, name):
    assert hasattr(owner_of(owner), name), f"torch {torch.__version__}: {owner} lacks {name}, which {SEEN_IN} had"


@pytest.mark.parametrize("name", LAZY)
def test_what_is_imported_late_is_there(name):
    from pymoe import _torch_private

    assert getattr(_torch_private, name) is not None


def test_another_name_is_missing_as_from_any_module():
    from pymoe import _torch_private

    with pytest.raises(AttributeError, match=r"module 'pymoe\._torch_private' has no attribute 'other'"):
        _ = _torch_private.other


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def dotted(node):
    """Return ``a.b.c`` as a list of names, or an empty list for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def own_names(trees):
    """Return the attributes that pymoe gives to its own objects."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                found.update(ast.literal_eval(node.value))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def private_names(tree, own):
    """Return the private torch names in a file, and private attributes that nothing in pymoe defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if any(map(is_private, [*node.module.split("."), alias.name])):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield alias.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names = dotted(node)
            if names[:2] == ["torch", "ops"]:
                continue  # an operator, which graphs hold under this name
            if names[:1] == ["torch"]:
                yield ".".join(names)
            elif names[:1] not in (["self"], ["cls"]) and node.attr not in own:
                yield f"the attribute {node.attr}"


def test_no_other_file_uses_private_names_of_torch():
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "pymoe").rglob("*.py"))}
    native = ast.parse((ROOT / "pymoe" / "_runtime.pyi").read_text())
    own = own_names([native, *trees.values()]) | KNOWN
    found = [
        f"{file}: {name}"
        for path, tree in trees.items()
        if not (file := path.relative_to(ROOT).as_posix()).startswith(EXCEPTIONS)
        for name in private_names(tree, own)
    ]
    assert not found, "pymoe/_torch_private.py is the place for:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._set_grad_enabled(True)",
        "torch._foreach_add_(a, b)",
        "from torch._subclasses import FakeTensor",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch.autograd.Variable._execution_engine.run_backward",
        "tensor._make_wrapper_subclass(x)",
    ],
)
def test_a_planted_private_name_is_found(line):
    assert list(private_names(ast.parse(line), set()))


def test_public_names_and_listed_attributes_are_not_found():
    assert not list(private_names(ast.parse("torch.ones(1)._version; self._x; point._replace(a=1)"), KNOWN))


def test_every_name_is_used():
    """A name that is no longer used must be removed from the list."""
    text = "\n".join(path.read_text() for path in (ROOT / "pymoe").rglob("*.py") if path.name != "_torch_private.py")
    tree = ast.parse(SOURCE)
    offered = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)} - {"_C", "ATTRIBUTES"}
    offered |= {name for _, name in ATTRIBUTES}
    unused = {name for name in offered if name not in text}
    assert not unused
