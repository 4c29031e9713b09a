"""Print as JSON the requests of layers to the system: ``python asked_experts.py LIBRARY FILE`` with
recorded_advice.cpp.
"""

import copy
import ctypes
import json
import mmap
import sys

import torch

from pymoe.nn import apply_experts, load_quantized, prefetch_experts

EVERYTHING, NOTHING = (0, 1 << 62), (1 << 62, (1 << 62) + 1)


def main():
    seam = ctypes.CDLL(sys.argv[1])
    count = ctypes.c_int.in_dll(seam, "count")
    asked = (ctypes.c_size_t * 2 * (1 << 16)).in_dll(seam, "asked")
    missing = (ctypes.c_size_t * 2).in_dll(seam, "missing")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = load_quantized(sys.argv[2])
    experts = layer.experts
    x = torch.randn(2, layer.hidden_size)
    gate, _ = layer.router(x)
    outputs, found = [], {}

    def record(name, call, state):
        count.value, missing[:] = 0, state
        outputs.append(call())
        found[name] = [list(one) for one in asked[: count.value]]

    def by_function():
        return apply_experts(x, gate.experts, gate.weights, experts.w_in.weight, experts.w_out.weight)

    record("off", lambda: layer(x), EVERYTHING)
    prefetch_experts(layer)
    record("missing", lambda: layer(x), EVERYTHING)
    record("missing, by the function", by_function, EVERYTHING)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x)
    record("missing, compiled", lambda: compiled(x), EVERYTHING)
    record("in memory", lambda: layer(x), NOTHING)
    chosen = sorted(set(gate.experts.flatten().tolist()))
    page = experts.w_out.packed[chosen[-1]].data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE + 20 * mmap.PAGESIZE
    record("one page", lambda: layer(x), (page, page + mmap.PAGESIZE))
    copied = copy.deepcopy(layer)
    record("a copy", lambda: copied(x), (0, 0))
    for weight in (experts.w_in, experts.w_out):
        weight.prefetch = 2
    record("all", lambda: layer(x), NOTHING)
    prefetch_experts(layer, enabled=False)
    record("off again", lambda: layer(x), EVERYTHING)
    same = all(torch.equal(output, outputs[0]) for output in outputs)
    spans = [
        (weight.packed[expert].data_ptr(), weight.packed[expert].nbytes)
        for weight in (experts.w_in, experts.w_out)
        for expert in chosen
    ]
    print(json.dumps({"asked": found, "same": same, "spans": spans, "page": page, "chosen": chosen}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
