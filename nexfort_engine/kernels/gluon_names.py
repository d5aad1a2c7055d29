# SPDX-License-Identifier: Apache-2.0
"""Names of Gluon that Triton 3.6 to 3.8 and Triton 3.9 spell differently, for kernels to use.

What Inductor writes for a kernel imports such a function under the name that it has here.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_values = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# whether a block of shared memory is read in another shape by `reinterpret`, or by `_reinterpret`
REINTERPRET = gl.constexpr(hasattr(shared_memory_descriptor, "reinterpret"))
