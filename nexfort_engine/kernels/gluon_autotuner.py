# SPDX-License-Identifier: Apache-2.0
"""What Inductor compiles a kernel with, for one in Gluon (seen to do so with torch 2.11, 2.14 and 2.15).

Its text stands before each such kernel, so an artefact needs nothing but torch and Triton to be loaded.
"""

import re

import triton
from torch._inductor import config as inductor
from torch._inductor.runtime.triton_heuristics import (
    CachingAutotuner,
    HeuristicType,
    StaticTritonCompileResult,
    TritonCompileResult,
    cached_autotune,
    config_from_dict,
)
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource


def _check_parameters(binary, static) -> None:
    """RuntimeError unless the launcher gives as many arguments as the compiled kernel reads from its call."""
    entry = re.search("[.]entry [^(]+[(](.*?)[)]", binary.asm["ptx"], re.DOTALL)
    given = len(static.arg_tys) + static.has_global_scratch + static.has_profile_scratch
    if entry is None or entry[1].count(".param") != given:
        read = entry and entry[0]
        raise RuntimeError(f"torch's own launcher gives {given} arguments, and the kernel reads others: {read}")


def gluon_autotune(configs, triton_meta, filename=None, inductor_meta=None, custom_kernel=False):
    """As torch._inductor.runtime.triton_heuristics.user_autotune, for at most one configuration.

    Inductor compiles what is not compiled yet, and takes every kernel for one in Triton's language: so this one is
    compiled before Inductor looks. The object is Inductor's own, which is kept with a graph and unpacked elsewhere.
    """
    config = config_from_dict(*configs) if configs else triton.Config({})
    made = cached_autotune(
        None,
        [config],
        triton_meta=triton_meta,
        heuristic_type=HeuristicType.USER_AUTOTUNE,
        filename=filename,
        inductor_meta=inductor_meta,
        custom_kernel=custom_kernel,
    )

    def compiled(kernel) -> CachingAutotuner:
        autotuner = made(kernel)
        meta = autotuner._create_compile_meta(config)
        signature, constants, known = meta["signature"], meta["constants"], meta["configs"][0]
        place = kernel.arg_names.index("scratch") if "scratch" in signature else None
        if place is not None:
            given = [name for name in kernel.arg_names if signature[name] != "constexpr"]
            if given[-1] != "scratch":  # Triton has a parameter of its own behind all others for it
                raise ValueError(f"{kernel.__name__} takes {given}; expected scratch as the last that is no constant")
            signature, constants = {**signature, "scratch": "constexpr"}, {**constants, "scratch": None}
            known = {at: what for at, what in known.items() if at != (place,)}
        source = GluonASTSource(kernel, signature, constants, known)
        options = autotuner._create_compile_options(config, meta)
        binary = triton.compile(source, target=GPUTarget(meta["device_type"], meta["cc"], 32), options=options)
        if place is not None:
            # Inductor refuses what needs such memory, which it would not give
            binary.metadata = binary.metadata._replace(global_scratch_size=0)
        # in a process that Inductor began before it was told so, its launcher is for its own kernels alone
        told = {"use_static_cuda_launcher": True, "static_launch_user_defined_triton_kernels": True}
        with inductor.patch(told if place is not None else {}):
            static = StaticTritonCompileResult.can_statically_launch(
                binary, autotuner.inductor_meta, autotuner.triton_meta, autotuner.heuristic_type
            )
        if place is not None:
            if static is None:
                raise RuntimeError(
                    f"{kernel.__name__} is not taken by torch's own launcher, and no other gives it scratch"
                )
            static.arg_tys += static.extract_type("*u8")
            static.full_constexprs = [at for at in static.full_constexprs if at != place]
            static.has_global_scratch = False
            _check_parameters(binary, static)
        result = TritonCompileResult if static is None else StaticTritonCompileResult
        launched = binary if static is None else static
        autotuner.compile_results = [result(launched, config, meta, autotuner.inductor_meta)]
        autotuner.configs = None
        return autotuner

    return compiled
