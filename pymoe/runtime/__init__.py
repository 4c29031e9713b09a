"""Requests to experts, in batches: what an expert takes, its pools, and the runtime that serves them."""

from pymoe.runtime.batch_tensor_proto import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack

__all__ = [
    "DUMMY_BATCH_SIZE",
    "BatchTensorProto",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
]
