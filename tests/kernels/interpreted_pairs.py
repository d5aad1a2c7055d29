# SPDX-License-Identifier: Apache-2.0
"""Two kernels for the same beside each other, on rows of random numbers; to be run with TRITON_INTERPRET=1.

Names a block of gpu_blocks.TURNED and its dtype; the kernels are the modules `kernel_True` and `kernel_False`.
"""

import inspect
import sys

import kernel_False
import kernel_True
import torch

kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
TOKENS, BATCH = 5, 2
length = 1280 if kind == "turned_rows" else 64
rows = BATCH * TOKENS * (1280 if kind == "turned_rows" else 256) // length
torch.manual_seed(0)
results = []
inputs = [torch.randn(rows * length + 4 * 32 * BATCH * TOKENS, dtype=dtype) for _ in range(4)]
for module in (kernel_True, kernel_False):
    parameters = list(inspect.signature(module.kernel.fn).parameters)
    given, outputs = [], []
    for name in parameters:
        if name.startswith("in_ptr"):
            given.append(inputs[int(name.removeprefix("in_ptr"))])
        elif name.startswith(("out_ptr", "in_out_ptr")):
            outputs.append(torch.zeros(2 * rows * length, dtype=dtype))
            given.append(outputs[-1])
        elif name.startswith("ks"):
            given.append(TOKENS)
    if "r0_numel" in parameters:
        each = 1 if kind == "turned_rows" else 4  # long rows are lowered for programs of one
        module.kernel[(-(-rows // each),)](*given, rows, length, XBLOCK=each)
    else:
        module.kernel[(-(-rows * length // 256),)](*given, rows * length, XBLOCK=256)
    results.append(outputs)
for mine, other in zip(*results, strict=True):
    assert mine.count_nonzero() > 0.99 * rows * length, "not everything was written"
    assert torch.equal(mine, other), (mine - other).abs().max()
