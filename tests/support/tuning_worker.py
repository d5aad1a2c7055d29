# SPDX-License-Identifier: Apache-2.0
"""Imported in a worker with a pretended GPU: it lowers as with max-autotune, but that no kernel is run to compare it.

What would run is read as Python. A job names a module by this file's name to have it imported.
"""

from __future__ import annotations

from typing import Any

import pretended_worker  # noqa: F401
import torch._inductor
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

_lowered = torch._inductor.standalone_compile


def _tunes(*args: Any, **kwargs: Any) -> Any:
    return _lowered(*args, **{**kwargs, "options": {"config_patches": {"triton.autotune_at_compile_time": True}}})


def _is_read(wrapper: Any) -> None:
    wrapper.kernel_autotune_defs.splice("async_compile.wait(globals())\ndel async_compile\n")
    text = wrapper.kernel_autotune_defs.getvalue() + "\n" + wrapper.kernel_autotune_calls.getvalue()
    compile(text, "what is tuned", "exec")


torch._inductor.standalone_compile = _tunes  # type: ignore[assignment]
PythonWrapperCodegen.generate_and_run_autotune_block = _is_read  # type: ignore[method-assign]
