"""``capture``: makes one graph from a model and example arguments, with ``torch.export``."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from pymoe import _torch_private
from pymoe._torch_private import pytree
from pymoe.autograd.fork import start_engine
from pymoe.pipe.capture.arguments import Arguments, InputChecks, Like, Trial, conditions_asked, sizes_of, trials
from pymoe.pipe.capture.entry import MODEL, ModelEntry, ModelRun, Stopped
from pymoe.pipe.capture.errors import BoundaryInside, CaptureError, branches_on_values, capture_error, stack_level
from pymoe.pipe.capture.external_values import ExternalValues
from pymoe.pipe.capture.guards import Guards, ambient_answers
from pymoe.pipe.capture.opaque import (
    OPAQUE_CALL,
    Computed,
    Opaque,
    OpaqueCall,
    OpaqueModule,
    choose_opaque,
    must_be_opaque,
)
from pymoe.pipe.capture.snapshots import attributes_restored, patched
from pymoe.pipe.stages import TENSORS

_one_at_a_time = threading.RLock()  # one capture at a time, because torch.export replaces methods of torch's classes


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    opaque: Opaque = (),
) -> Captured:
    """Capture ``model``, in its present mode, as one graph with ``torch.export``.

    The graph computes what the model computes, with the same operators in the same order: outputs, gradients, changed
    buffers and random numbers are equal bit by bit. The model is not changed, even by a capture that fails.

    Python values are constants of the capture; ``Captured.guards`` checks that they have not changed. A submodule whose
    forward changes its attributes becomes opaque, with a warning; other changes of Python values by the model's code,
    and random numbers that are not torch's, are refused. Effects that leave no trace in Python values, such as prints,
    happen only during the capture.

    Args:
        model: a module that ``torch.export`` can trace.
        args: example arguments; sizes of at least 2 in every dimension that is to be free.
        kwargs: example keyword arguments.
        dynamic_shapes: which dimensions are free, as for ``torch.export.export``; by default every one that the model's
            code does not fix.
        opaque: types and qualified names of modules that are called as a whole instead of being traced. Opaque modules
            keep their state, hooks and mode; the shapes of their outputs must follow from the shapes of their inputs.
            (Autograd Functions, modules with hooks, recurrent layers, deferred batch norms, and layers of
            :mod:`pymoe.nn` that count or inject losses are opaque, too.)

    Raises:
        TypeError, ValueError: ``opaque`` or ``dynamic_shapes`` does not fit the model.
        CaptureError: the model cannot be captured; the message names the line of its code.
    """
    kwargs = kwargs or {}
    arguments = Arguments(model.forward, args, kwargs)
    ways = list(trials(model.forward, args, kwargs, dynamic_shapes))
    external = ExternalValues(model)  # opaque modules included: their changes of such values must be undone
    ambient = ambient_answers()
    opened: set[str] = set()  # opaque modules with boundaries inside
    closed: set[str] = set()  # modules whose forward changes their attributes
    while True:
        new_run = partial(ModelRun, model, arguments, choose_opaque(model, opaque, opened, closed), external, ambient)
        try:
            program, run = _first_to_succeed(new_run, ways)
        except BoundaryInside as error:
            if error.path in opened or must_be_opaque(model, opaque, error.path):
                raise capture_error(error) from error.__cause__
            opened.add(error.path)
            continue
        changes = run.users_changes()
        if not changes and not run.side_effects:
            builder, guards = _Builder(program, run), _guards(program, run)
            graph = _on_model(builder.build(), model, builder.constants)
            assert run.spec is not None
            return Captured(graph, arguments, builder.input_checks(), run.spec, model.training, guards)
        if run.side_effects or "" in changes or changes.keys() & (opened | closed):
            raise _refusal(new_run(finds_line=True), ways[-1], run.side_effects, changes)
        closed |= changes.keys()
        warnings.warn(
            f"the forward of {', '.join(map(repr, changes))} changes attributes "
            f"({', '.join(sorted(name for names in changes.values() for name in names))}), which a graph cannot: the "
            "module is opaque, called as a whole",
            stacklevel=stack_level(),
        )


def _first_to_succeed(new_run: Callable[[], ModelRun], ways: Sequence[Trial]) -> tuple[Any, ModelRun]:
    """Try ``ways`` in order; return the first program that ``torch.export`` makes, and the run of the model for it.

    Raises:
        BoundaryInside: a stage boundary is inside an opaque module.
        CaptureError: the model cannot be captured.
    """
    failure: BaseException | None = None
    for trial in ways:
        if failure is not None and branches_on_values(failure) and any(trial[0]):
            continue  # only a trial without free dimensions may still succeed
        run = new_run()
        try:
            return _export(run, trial), run
        except Stopped as stopped:
            failure = stopped.error
            if isinstance(failure, BoundaryInside):
                raise failure from failure.__cause__
            if isinstance(failure, CaptureError):
                break
        except Exception as error:
            failure = error
    assert failure is not None
    raise capture_error(failure) from failure


def _export(run: ModelRun, trial: Trial) -> Any:
    shapes, any_size = trial
    start_engine()  # must precede torch.export, which can make torch report a GPU that does not exist
    with (
        _one_at_a_time,
        attributes_restored(run.model),
        _cleared(run.external.caches.values()),
        _plain_surroundings(any_size),
    ):
        tensors = tuple(leaf.make() for leaf in run.arguments.examples if isinstance(leaf, Like))
        return torch.export.export(
            ModelEntry(run), tensors, dynamic_shapes=(shapes,) if tensors else None, strict=False
        )


def _guards(program: Any, run: ModelRun) -> Callable[[nn.Module], Guards]:
    """Return a function that makes, for a model, the guards that check the assumptions of the capture.

    Attributes that the model's own run changed are not guarded.

    Raises:
        CaptureError: changes of a value that the model's code has read could not be noticed.
    """
    reads = run.recorder.reads
    # The graph may be valid only for the dtypes of the example: if ``x`` is float32, ``x.float()`` is ``x`` itself and
    # leaves no conversion in the graph.
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    reads.dtypes |= any(
        node.target is _torch_private.assert_tensor_metadata for graph in graphs for node in graph.nodes
    )
    for path, name in list(reads.attributes):
        if f"{path}.{name}".lstrip(".") in run.changed:
            del reads.attributes[path, name]
    guards = partial(Guards, opaque=tuple(run.opaque), reads=reads, arguments=run.arguments)
    try:
        guards(run.model)
    except CaptureError as error:  # a value that cannot be watched
        raise capture_error(error) from None
    return guards


def _refusal(
    run: ModelRun, trial: Trial, side_effects: Sequence[str], changes: Mapping[str, Sequence[str]]
) -> CaptureError:
    """Return the error for ``side_effects`` or, if there are none, for ``changes``: a graph cannot reproduce either.

    The model runs again, with ``run``, so that the error can name the line of code that causes them.
    """
    with suppress(Exception, Stopped):
        _export(run, trial)
    if side_effects:
        why = f"it {side_effects[0]}: a graph would do that once, in the capture, and never again"
    else:
        names = ", ".join(name for of_module in changes.values() for name in of_module)
        why = (
            f"it changes attributes ({names}) of the model, or of a module with a stage boundary inside, and a "
            "graph changes tensors alone. Keep numbers in buffers; make what is the same in every call before the "
            "capture, in __init__ or by one call of the model"
        )
    return capture_error(CaptureError(why), run.place)


@contextmanager
def _cleared(caches: Collection[Any]) -> Iterator[None]:
    """After the block, empty ``caches`` to which the block has added entries: such entries may contain fake tensors."""
    misses = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()


@contextmanager
def _plain_surroundings(any_size: bool) -> Iterator[None]:
    """Run the block in a fixed state (gradients on, no autocast). The caller's state applies when the graph runs."""
    config: Any = _torch_private.fx_config  # the first access imports this module
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.compiler.set_stance("force_eager"),
        # Silence these loggers: the error contains what they log.
        patched((logging.getLogger("torch.fx.experimental.symbolic_shapes"), "disabled", True)),
        patched((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)),
        # Without this, torch assumes that free dimensions are at least 2, and adds no guard for that.
        config.patch(backed_size_oblivious=any_size),
    ):
        yield


# The captured graph.

CONSTANT = "_constant_"
"""Name prefix of tensors that are neither parameters nor buffers of the model."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as one graph, in one of its modes (training, evaluation).

    The nodes of ``graph``, in this order of kinds:

    - a ``placeholder`` for every leaf of ``(args, kwargs)``. Those for leaves other than tensors have no users, because
      these leaves are constants of the capture;
    - ``get_attr`` of parameters and buffers by their qualified names in the model (shared ones under one name), and of
      ``_constant_N`` for other tensors that the model's code uses;
    - ``call_function``: operators, markers of stage boundaries, arithmetic on sizes, blocks that set the grad mode or
      autocast (a ``Region``), and opaque calls (``OpaqueCall``); the last two return lists;
    - one ``output`` with the list of output leaves.

    The graph module looks parameters and buffers up in the model's own modules, so it uses those that
    ``load_state_dict(assign=True)`` or ``.to()`` put there later.

    The ``meta`` of a node has ``val``: a fake tensor, a number, or the constant for which a placeholder stands. That of
    an operator also has ``stack_trace`` and ``nn_module_stack``.
    """

    graph: fx.GraphModule
    arguments: Arguments
    input_checks: InputChecks
    """Checks the leaves of a call: free dimensions may have any size that meets the conditions tested by the model's
    code, and dtypes any precision.
    """
    out_spec: pytree.TreeSpec
    training: bool
    guards: Callable[[nn.Module], Guards]
    """Makes the guards, which check the capture's assumptions about Python, for the model or for another one with the
    same submodules.
    """


class Region:
    """The target of a node that represents a block with its own grad mode or autocast setting.

    Calling it applies the setting, runs the block's graph, and returns a list of the results.
    """

    def __init__(self, name: str, graph: fx.GraphModule, grad: bool | None, autocast: dict[str, Any] | None) -> None:
        self.__name__ = name
        self.graph = graph
        self.grad = grad
        """Whether gradients are recorded in the block; None: the same as outside."""
        self.autocast = autocast
        """Arguments of ``torch.autocast`` for the block; None: the same as outside."""

    def __call__(self, *values: Any) -> list[Any]:
        if self.autocast is not None:
            with torch.autocast(**self.autocast):
                return list(self.graph(*values))
        with torch.set_grad_enabled(torch.is_grad_enabled() if self.grad is None else self.grad):
            return list(self.graph(*values))

    def __repr__(self) -> str:
        return f"{self.__name__}({self.autocast or {'grad': self.grad}})"


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield all nodes of ``graph``, and those of the regions in it, at any depth."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, Region):
            yield from all_nodes(node.target.graph.graph)


def opaque_modules(graph: fx.Graph) -> list[OpaqueModule]:
    """Return the opaque modules that a graph calls, one entry per call."""
    return [node.target for node in all_nodes(graph) if isinstance(node.target, OpaqueModule)]


class _Builder:
    def __init__(self, program: Any, run: ModelRun) -> None:
        self._program = program
        self._source: fx.GraphModule = program.graph_module
        self._run = run
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[int, fx.Node] = {}  # placeholders of the exported graph, by leaf
        self._state: dict[str, fx.Node] = {}
        self.constants: dict[str, Tensor] = {}
        # The graph refers to a shared parameter or buffer by its first name.
        self._first_name: dict[int, str] = {}
        for name, value in (*run.model.named_parameters(), *run.model.named_buffers()):
            self._first_name.setdefault(id(value), name)

    def build(self) -> fx.Graph:
        _resolve(self._source, self._run.opaque_calls.calls)
        placeholders = self._source.graph.find_nodes(op="placeholder")
        inputs = list(zip(placeholders, self._program.graph_signature.input_specs, strict=True))
        tensors = iter([node for node, spec in inputs if spec.kind.name == "USER_INPUT"])
        for number, (name, leaf) in enumerate(
            zip(self._run.arguments.names, self._run.arguments.examples, strict=True)
        ):
            placeholder = self._graph.placeholder(re.sub(r"\W+", "_", name).strip("_") or "argument")
            placeholder.meta["val"] = leaf
            if isinstance(leaf, Like):
                exported = self._inputs[number] = next(tensors)
                placeholder.meta["val"] = exported.meta["val"]
                self._copies[exported] = placeholder
        for node, spec in inputs:
            if spec.kind.name != "USER_INPUT" and node.users:
                target = self._target(spec)
                if target not in self._state:
                    self._state[target] = self._graph.get_attr(target)
                    self._state[target].meta["val"] = node.meta.get("val")
                self._copies[node] = self._state[target]
        for node in self._source.graph.nodes:
            if node.op == "output":
                values: Any = fx.map_arg(node.args[0], self._copies.__getitem__)
                computed = iter(values)
                self._graph.output([next(computed) if leaf is Computed else leaf for leaf in self._run.leaves])
            elif node.op == "call_function":
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        return self._graph

    def input_checks(self) -> InputChecks:
        conditions, fixed = self._conditions()
        limits: dict[Any, tuple[int, int | None]] = {}
        for symbol, constraint in self._program.range_constraints.items():
            # torch gives the lower bound 2 where operators treat 0 and 1 specially. That is no condition of the model.
            low = int(constraint.lower) if constraint.lower > 2 else 0
            high = int(constraint.upper) if constraint.upper.is_number and constraint.upper < 2**40 else None
            if low or high is not None:
                limits[symbol] = low, high
        sizes = {number: sizes_of(node) for number, node in self._inputs.items()}
        return InputChecks(self._run.arguments, sizes, conditions, limits, fixed)

    def _conditions(self) -> tuple[dict[Any, str], dict[tuple[int, int], str]]:
        """Return two dicts, whose values are lines of code.

        The keys of the first are conditions on free sizes (sympy expressions), each with the line that tests it, or ""
        if that is not known. The keys of the second are fixed dimensions (number of the argument's leaf, dimension),
        each with the line that fixes it.
        """
        modes = [getattr(node.meta.get("val"), "fake_mode", None) for node in self._inputs.values()]
        environment = next((mode.shape_env for mode in modes if mode is not None and mode.shape_env), None)
        if environment is None:
            return {}, {}
        conditions: dict[Any, str] = {}
        fixed: dict[str, str] = {}
        for expression, place in conditions_asked(environment):
            now = environment.replace(expression)
            if getattr(now, "free_symbols", None):
                conditions.setdefault(now, place)
            elif place:
                for symbol in expression.free_symbols:
                    fixed.setdefault(str(symbol), place)
        return conditions, self._lines_by_dimension(environment, fixed)

    def _lines_by_dimension(self, environment: Any, by_symbol: dict[str, str]) -> dict[tuple[int, int], str]:
        found = {}
        for tensor, (number, node) in enumerate(self._inputs.items()):
            for dim in range(node.meta["val"].dim()):
                source = f"[{tensor}].size()[{dim}]"
                for symbol, sources in environment.var_to_sources.items():
                    names = [each.name() if callable(each.name) else each.name for each in sources]
                    if str(symbol) in by_symbol and any(name.endswith(source) for name in names):
                        found[number, dim] = by_symbol[str(symbol)]
        return found

    def _target(self, spec: Any) -> str:
        name = spec.target.removeprefix(f"{MODEL}.")
        if spec.kind.name == "PARAMETER":
            return self._first_name[id(self._run.model.get_parameter(name))]
        if spec.kind.name == "BUFFER":
            return self._first_name[id(self._run.model.get_buffer(name))]
        value = self._program.constants[spec.target]
        held = self._run.opaque_calls.held.get(value.data_ptr()) if isinstance(value, Tensor) else None
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            value = held
        if id(value) in self._first_name:
            return self._first_name[id(value)]
        for target, known in self.constants.items():
            if known is value:
                return target
        target = f"{CONSTANT}{len(self.constants)}"
        self.constants[target] = value
        return target


def _resolve(module: fx.GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Replace torch's operators for blocks with regions, and markers of opaque calls with entries of ``calls``, in an
    exported graph and in its blocks. In the metadata of nodes, give modules the names that they have in the model.
    """
    hop = torch.ops.higher_order
    for node in reversed(list(module.graph.nodes)):  # in reverse, because a block's node is erased after its users
        if node.target is OPAQUE_CALL:
            number, *values = node.args
            node.target, node.args = calls[number], tuple(values)
        elif node.target is hop.wrap_with_set_grad_enabled:
            grad, block, *values = node.args
            graph = _block(module, block, calls)
            node.target, node.args = Region("grad" if grad else "no_grad", graph, bool(grad), None), tuple(values)
        elif node.target is hop.wrap_with_autocast:
            device, dtype, enabled, cache, block, *values = node.args
            autocast = {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": cache}
            node.target, node.args = Region("autocast", _block(module, block, calls), None, autocast), tuple(values)
        elif node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
        node.meta = _users_meta(node)


def _block(owner: fx.GraphModule, node: fx.Node, calls: Sequence[OpaqueCall]) -> fx.GraphModule:
    """Return the graph of the block that a ``get_attr`` node fetches, after applying :func:`_resolve` to it."""
    module = getattr(owner, str(node.target))
    assert isinstance(module, fx.GraphModule)
    _resolve(module, calls)
    module.recompile()
    return module


def _users_meta(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node of an exported graph, with the modules in it named as in the model."""
    meta = {key: value for key, value in node.meta.items() if key not in ("from_node", "custom")}
    if "nn_module_stack" in meta:
        meta["nn_module_stack"] = {
            key: (path[len(MODEL) + 1 :], kind)
            for key, (path, kind) in meta["nn_module_stack"].items()
            if path == MODEL or path.startswith(f"{MODEL}.")
        }
    return meta


def _on_model(graph: fx.Graph, model: nn.Module, constants: dict[str, Tensor]) -> fx.GraphModule:
    """Return a module that runs ``graph``. Each ``get_attr`` node refers to a parameter or buffer of ``model``, or to
    one of ``constants``.

    The returned module has no parameters of its own: its submodules share the dictionaries of the model's modules, and
    so use parameters and buffers that the model gets later. Opaque modules in it are those of the model. Its
    ``state_dict`` has the model's keys for all modules that the graph uses.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph(), "Captured")
    _share(module, model)
    for call in opaque_modules(graph):
        owner, _, name = call.path.rpartition(".")
        around = _module_at(owner, module, model)
        if name:
            around._modules[name] = call.module
    for node in graph.find_nodes(op="get_attr"):
        if node.target in constants:  # not as buffers: the dictionary of buffers is the model's own
            module.__dict__[node.target] = constants[node.target]
        else:
            _module_at(str(node.target).rpartition(".")[0], module, model)
    module.graph = graph
    return module


def _module_at(path: str, root: nn.Module, model: nn.Module) -> nn.Module:
    """Return the module in ``root`` that stands for the model's module at ``path``; make it if there is none."""
    here, original = root, model
    for name in path.split(".") if path else []:
        if here is original:  # an opaque module: the graph contains the module itself
            return here
        original = original.get_submodule(name)
        step = here._modules.get(name)
        if step is None:
            step = here._modules[name] = nn.Module()
            _share(step, original)
        here = step
    return here


def _share(part: nn.Module, original: nn.Module) -> None:
    for key in (*TENSORS, "_non_persistent_buffers_set"):
        part.__dict__[key] = original.__dict__[key]
    part.training = original.training
