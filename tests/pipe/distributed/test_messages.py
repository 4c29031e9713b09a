"""Messages between processes: their descriptions, and their contents."""

import collections
import pickle
import queue
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch.utils import _pytree

from pymoe.pipe.distributed.messages import (
    Background,
    describe_tensors,
    describe_values,
    empty,
    flat,
    read_tensors,
    read_values,
)
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, flatten_value, unflatten_value

Pair = collections.namedtuple("Pair", "left right")


def travel(description, tensors):
    """Return the values as received: copies in new memory."""
    layouts, rest = pickle.loads(description)
    arrived = []
    for layout, tensor in zip(layouts, tensors, strict=True):
        arrived.append(empty(layout, torch.device("cpu")))
        flat(arrived[-1]).copy_(flat(tensor))
    return rest, arrived


def through(value):
    described, tensors = travel(*describe_values([flatten_value(value, BoundaryTensor)]))
    (sent,) = read_values(described, tensors, None)
    return unflatten_value(
        [leaf.tensor if type(leaf) is BoundaryTensor else leaf for leaf in sent.leaves], sent.structure
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.arange(12)[2::3],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    ],
)
def test_a_tensor_arrives_as_it_lies_in_memory(tensor):
    found = through(tensor)
    assert torch.equal(found, tensor.resolve_conj())
    assert found.dtype == tensor.dtype
    if 0 not in tensor.stride() and tensor.storage_offset() == 0:
        assert found.stride() == tensor.stride()


SHARING = {
    "one tensor twice": lambda h: (h, h),
    "a view": lambda h: (h, h.view(-1)),
    "a transposed view": lambda h: (h.t(), h),
    "parts that overlap": lambda h: (h[:3], h[1:]),
    "halves of the columns": lambda h: (h[:, :3], h[:, 3:]),
    "a row in the middle": lambda h: (h[2], h[1:]),
    "another dtype": lambda h: (h, h.view(torch.int32)),
    "a complex one and its parts": lambda h: (torch.view_as_complex(h.view(4, 3, 2)), h.view(4, 3, 2)[..., 0]),
    "bytes": lambda h: (h[1:].view(torch.uint8)[:, 5:], h[2]),
    "expanded": lambda h: (h[:, :1].expand(4, 6), h),
    "three, two of which overlap": lambda h: (h[:2], h[1:2], h[3]),
}


@pytest.mark.parametrize("share", SHARING.values(), ids=SHARING.keys())
@pytest.mark.parametrize("edited", [0, 1])
def test_values_that_overlap_in_memory_overlap_where_they_arrive(share, edited):
    values = share(torch.arange(24.0).reshape(4, 6))
    found = through(values)
    assert list(map(torch.equal, found, values)) == [True] * len(values)
    for some in (values, found):
        some[edited].select(-1, 0).zero_()
    assert list(map(torch.equal, found, values)) == [True] * len(values)
    assert found[0]._version == found[1]._version > 0  # so that autograd notices, too


def test_what_cannot_share_memory_where_it_arrives_is_refused():
    h = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="copy one"):
        through((h, h.conj()))


def test_values_that_do_not_overlap_travel_without_what_is_between_them():
    rows = torch.zeros(1000, 4)
    _, tensors = describe_values([flatten_value((rows[0], rows[-1]), BoundaryTensor)])
    assert [tensor.numel() for tensor in tensors] == [4, 4]


def test_structures_and_other_things_arrive_and_nothing_warns():
    value = {"a": [1, (torch.ones(2), None)], "b": Pair("text", slice(3)), "c": collections.OrderedDict(d=2.5)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = through(value)
    assert torch.equal(found["a"][1][0], torch.ones(2))
    found["a"][1] = value["a"][1]
    assert found == value
    assert _pytree.tree_structure(found) == _pytree.tree_structure(value)


def test_gradients_go_to_the_tensors_that_need_one():
    accumulator, far = GradAccumulator(), GradAccumulator()
    needs = iter([True, False, True])
    sent = flatten_value(
        [torch.ones(1), torch.ones(2), torch.ones(3)], lambda t: BoundaryTensor(t, far if next(needs) else None)
    )
    described, tensors = travel(*describe_values([sent]))
    (found,) = read_values(described, tensors, accumulator)
    assert [leaf.accumulator for leaf in found.leaves] == [accumulator, None, accumulator]
    assert [leaf.number for leaf in found.leaves] == [0, 1, 2]


def test_missing_gradients_stay_missing():
    layouts, tensors = travel(*describe_tensors([None, torch.ones(2), None]))
    found = read_tensors(layouts, tensors)
    assert [tensor is None for tensor in found] == [True, False, True]
    assert torch.equal(found[1], torch.ones(2))


def test_equal_shapes_have_equal_descriptions():
    def describe(fill, rows):
        return describe_values([flatten_value({"x": torch.full((rows, 3), fill), "n": 1}, BoundaryTensor)])[0]

    assert describe(1.0, 2) == describe(7.0, 2) != describe(1.0, 3)


@pytest.mark.parametrize("value", [torch.ones(3).to_sparse(), lambda: None, torch.ones(2, device="meta")])
def test_what_cannot_be_sent_is_refused_with_a_reason(value):
    with pytest.raises(TypeError, match="sent between ranks"):
        through([value])


class Looks(queue.SimpleQueue):
    """Records with every result whether the sent tensor is still held."""

    def __init__(self, sent):
        super().__init__()
        self.sent, self.held = sent, []

    def put(self, result):
        self.held.append(self.sent() is not None)
        super().put(result)


def test_what_was_sent_goes_before_the_rank_learns_that_it_has_arrived():
    """Otherwise a finished step would leave an activation behind until the thread releases it."""
    sent = torch.ones(3)
    sender = Background("test")
    results = sender._results = Looks(weakref.ref(sent))
    function = partial(torch.clone, sent)
    del sent
    sender.put(function)
    del function
    assert torch.equal(sender.get(), torch.ones(3))
    assert results.held == [False]
