"""Modules that stash and pop outside any pipeline, in a plain nn.Sequential."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.pipe.skip import InPlace, Namespace, Skippable, current_tracker, pop, skippable, stash, tracking


@skippable(stash=["skip"])
class Down(nn.Module):
    """Says what it is."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * self.weight)
        return x + 1


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x * 10 if skip is None else x * 10 + skip


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 3


ONE = torch.ones(2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def a_tracker_of_its_own() -> Iterator[None]:
    with tracking(InPlace()):
        yield


def kept() -> int:
    """Return the number of skips that this thread keeps."""
    return len(current_tracker()._kept)  # type: ignore[attr-defined]


def stashing(*commands: Any, names: tuple[str, ...] = ("skip",), pops: tuple[str, ...] = ()) -> nn.Module:
    """Return a module that yields ``commands``."""

    @skippable(stash=names, pop=pops)
    class Yields(nn.Module):
        def forward(self, x: Tensor) -> Any:
            answers = []
            for command in commands:
                answers.append((yield command))
            return x

    return Yields()


def test_a_skip_reaches_its_pop_and_gradients_come_back():
    model = nn.Sequential(Down(), Inner(), Up())
    x = ONE.clone().requires_grad_()
    y = model(x)
    assert torch.equal(y, (ONE + 1 - 3) * 10 + 2)
    y.sum().backward()
    assert torch.equal(x.grad, ONE * 12)
    assert model[0].weight.grad == 2
    assert kept() == 0


def test_every_pop_of_a_name_gets_the_skip_and_the_last_lets_go_of_it():
    model = nn.Sequential(Down(), Up(), Up(), Up())
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda *_: seen.append(weakref.ref(current_tracker()._kept[None, "skip"][0])))
    with torch.no_grad():
        assert torch.equal(model(ONE), ((ONE + 1) * 10 + 2) * 100 + 22)
    assert kept() == 0
    gc.collect()
    assert seen[0]() is None


def test_a_skip_that_nobody_pops_is_not_kept():
    nn.Sequential(Down())(ONE)
    assert kept() == 0


def test_none_and_integers_and_structures_are_skips():
    for value in (None, torch.arange(3), {"a": [ONE, 3]}):
        sent = value

        @skippable(stash=["any"])
        class Sends(nn.Module):
            def forward(self, x: Tensor) -> Any:
                yield stash("any", sent)  # noqa: B023
                return x

        received: list[Any] = []

        @skippable(pop=["any"])
        class Receives(nn.Module):
            def forward(self, x: Tensor) -> Any:
                received.append((yield pop("any")))  # noqa: B023
                return x

        nn.Sequential(Sends(), Receives())(ONE)
        assert received[0] is value


def test_a_stash_replaces_the_one_before():
    down, up = Down(), Up()
    down(ONE)
    down(ONE * 5)
    assert torch.equal(up(ONE), ONE * 20)
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        up(ONE)


def test_threads_do_not_see_each_others_skips():
    down, up = Down(), Up()
    down(ONE)
    errors: list[str] = []

    def other() -> None:
        try:
            up(ONE)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert errors == ["'skip' has not been stashed"]
    assert torch.equal(up(ONE), ONE * 12)


def test_namespaces_keep_equal_names_apart():
    first, second = Namespace(), Namespace()
    model = nn.Sequential(
        Down(2).isolate(first), Down(7).isolate(second), Up().isolate(first), Up().isolate(second), Inner()
    )
    expected = ((ONE + 2) * 10 + 2) * 10 + (ONE + 1) * 7 - 3
    assert torch.equal(model(ONE), expected)
    assert kept() == 0
    for run in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(ONE), expected)
    assert first != second
    assert len({first, copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.copy(first)}) == 1
    assert first != "skip"
    assert repr(first).startswith("<Namespace ")


def test_isolate_some_names_alone():
    ns = Namespace()
    layer = stashing(names=("a", "b"), pops=("c",)).isolate(ns, only=["a", "c"])
    assert layer.stashable() == [(ns, "a"), (None, "b")]
    assert layer.poppable() == [(ns, "c")]
    other = copy.copy(layer).isolate(Namespace(), only=["b"])
    assert layer.stashable() == [(ns, "a"), (None, "b")] != other.stashable()
    assert other.stashable()[0] == (ns, "a")
    with pytest.raises(ValueError, match=r"isolate: 'd' has not been declared"):
        layer.isolate(ns, only=["a", "d"])
    with pytest.raises(TypeError, match="only must be a list of names, got the string 'a'"):
        layer.isolate(ns, only="a")
    with pytest.raises(TypeError, match="ns must be a Namespace, got str"):
        layer.isolate("ns")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (stashing(stash("other", ONE)), "'other' has not been declared as stashable"),
        (stashing(stash("skip", ONE), pop("other")), "'other' has not been declared as poppable"),
        (stashing(names=("b", "a")), "'a', 'b' must be stashed but have not"),
        (stashing(names=(), pops=("b", "a")), "'a', 'b' must be popped but have not"),
        (stashing(stash("skip", ONE), stash("skip", ONE)), "'skip' has been stashed twice"),
        (stashing(pop("x"), names=(), pops=("x",)), "'x' has not been stashed"),
    ],
)
def test_what_breaks_the_rules_is_named(module: nn.Module, message: str):
    with pytest.raises(RuntimeError) as caught:
        module(ONE)
    assert str(caught.value) == message
    assert kept() == 0


def test_a_name_is_popped_once_in_a_pass():
    module = stashing(pop("x"), pop("x"), names=(), pops=("x",))
    nn.Sequential(stashing(stash("x", ONE), names=("x",)))(ONE)
    with pytest.raises(RuntimeError, match="'x' has been popped twice"):
        module(ONE)


def test_what_is_yielded_must_be_a_command():
    with pytest.raises(TypeError, match="'skip' is not a command from @skippable"):
        stashing("skip")(ONE)


def test_an_error_is_raised_where_the_command_was_yielded():
    with pytest.raises(RuntimeError) as caught:
        stashing(stash("other", ONE))(ONE)
    assert "(yield command)" in "".join(traceback.format_exception(caught.value))


def test_a_module_may_handle_the_error_and_go_on():
    @skippable(pop=["maybe"])
    class Falls(nn.Module):
        def forward(self, x: Tensor) -> Any:
            try:
                return x + (yield pop("maybe"))
            except RuntimeError:
                return x

    assert torch.equal(Falls()(ONE), ONE)


def test_nothing_of_a_failed_pass_is_stashed():
    @skippable(stash=["skip"])
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            raise ZeroDivisionError

    up = Up()
    with pytest.raises(ZeroDivisionError):
        Fails()(ONE)
    with pytest.raises(RuntimeError, match="has not been stashed"):
        up(ONE)


def test_a_forward_without_commands_needs_no_generator():
    plain = skippable()(Inner)()
    assert torch.equal(plain(ONE), ONE - 3)


def test_the_decorated_class_is_the_class():
    down = Down()
    assert Down.__name__ == Down.__qualname__ == "Down"
    assert Down.__doc__ == "Says what it is."
    assert Down.__module__ == __name__
    assert isinstance(down, Skippable)
    assert isinstance(skippable()(Inner)(), Inner)
    assert not isinstance(Inner(), Skippable)
    assert list(down.state_dict()) == ["weight"]
    assert set(vars(down)) - set(vars(nn.Module())) == {"_namespaces"}


def test_super_by_name_in_the_decorated_class():
    @skippable(stash=["skip"])
    class Old(nn.Module):
        def __init__(self, size: int) -> None:
            super(Old, self).__init__()  # noqa: UP008
            self.linear = nn.Linear(size, size)

        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            return self.linear(x)

    assert Old(3)(torch.ones(3)).shape == (3,)


def test_a_subclass_that_overrides_forward_is_decorated_again():
    @skippable(stash=["skip", "more"])
    class Twice(Down):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            x = yield from super().forward(x)
            yield stash("more", x)
            return x * 2

    more = stashing(pop("more"), names=(), pops=("more",))
    assert torch.equal(nn.Sequential(Twice(), Up(), more)(ONE), ONE * 42)

    class Forgotten(Down):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)

    with pytest.raises(TypeError, match="Forgotten overrides the forward of a skippable module: decorate it"):
        Forgotten()

    class Kept(Down):  # type: ignore[valid-type, misc]
        pass

    assert torch.equal(Kept()(ONE), ONE + 1)


def test_what_skippable_takes():
    with pytest.raises(TypeError, match="stash must be a list of names, got the string 'skip'"):
        skippable(stash="skip")
    with pytest.raises(TypeError, match="pop must be a list of names, got 3 in it"):
        skippable(pop=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'a' declared both as stashable and as poppable"):
        skippable(stash=["a"], pop=["a"])
    with pytest.raises(TypeError, match="expected a class of modules"):
        skippable()(Inner())  # type: ignore[type-var]


def test_another_tracker_takes_the_skips_of_its_block():
    class Notes:
        def __init__(self) -> None:
            self.saved: dict[Any, Any] = {}

        def save(self, key: Any, value: Any) -> None:
            self.saved[key] = value

        def load(self, key: Any) -> Any:
            return self.saved[key]

    notes, down, up = Notes(), Down(), Up()
    with tracking(notes):
        down(ONE)
        assert torch.equal(up(ONE), ONE * 12)
    assert torch.equal(notes.saved[None, "skip"], ONE * 2)
    with pytest.raises(RuntimeError, match="has not been stashed"):
        up(ONE)


# --- names of other packages ---


def test_what_is_stashed_may_be_called_tensor() -> None:
    assert stash("skip", tensor=ONE).tensor is ONE
    assert stash("skip", value=None).tensor is None
    for wrong in (lambda: stash("skip"), lambda: stash("skip", ONE, tensor=ONE), lambda: stash("skip", other=ONE)):
        with pytest.raises(TypeError, match="expected a name and one value"):
            wrong()


def test_a_skippable_module_answers_to_the_names_of_other_packages() -> None:
    down, up = Down(), Up()
    assert repr(down) == "@skippable(Down())"
    assert not issubclass(Down.module_cls, Skippable)
    assert issubclass(Down, Down.module_cls)
    assert (down.namespaces, down.namespaced("skip")) == ({}, (None, "skip"))
    ns = Namespace()
    down.isolate(ns)
    assert (down.namespaces, down.namespaced("skip")) == ({"skip": ns}, (ns, "skip"))
    seen: dict[str, Any] = {}
    assert torch.equal(down.dispatch(ONE, seen.__setitem__, None), ONE + 1)
    assert torch.equal(up.dispatch(ONE, None, seen.pop), ONE * 10 + ONE * 2)
    assert kept() == 0
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        down.nothing  # noqa: B018


def test_the_decorated_class_has_its_own_by_these_names() -> None:
    """A class's own attributes come first: a layer of experts may have a method ``dispatch``."""

    @skippable(stash=["skip"])
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.namespaces = 3

        def dispatch(self) -> str:
            return "my own"

        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            return x

    assert (Own().namespaces, Own().dispatch()) == (3, "my own")
