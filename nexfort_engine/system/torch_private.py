# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch and Triton that the engine uses, and the versions that have it.

A name is private where a part of it begins with an underscore, as in `torch._inductor`. Such names may go with any
version. `tests/system/test_torch_surface.py` finds the names in the engine's code, compares them with these tables, and
says which of them the torch that runs does not have; `python -m nexfort_engine doctor` says so too. Files import what
they use by themselves, inside functions where that keeps the start light.

Nothing is imported here before `missing` is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

TRIED = ("2.11.0", "2.14.1", "2.15.0")  # on a CPU, each with the Triton that it wants

# by the module that has them
_NAMES: Mapping[str, str] = {
    "torch": "_int_mm _sym_sqrt _tensor",
    "torch._C": """
        DisableTorchFunction DispatchKey.CompositeImplicitAutograd DispatchKey.PreDispatch DispatchKeySet
        _AutoDispatchBelowAutograd _ForceDispatchKeyGuard _cuda_endAllocateToPool _cuda_memoryStats
        _cuda_releasePool
        _dispatch_has_kernel_for_dispatch_key _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set
        _ensureCUDADeviceGuardSet _functorch.maybe_current_level _get_deterministic_algorithms
        _get_deterministic_algorithms_warn_only _get_flash_sdp_enabled _get_fp32_precision_getter
        _get_math_sdp_enabled _get_sdp_priority_order _get_tracing_state _is_any_autocast_enabled
        _len_torch_dispatch_stack _len_torch_function_stack _select_conv_backend _set_fp32_precision_setter
        _set_sdp_priority_order _storage_Use_Count
    """,
    "torch._C._dynamo.eval_frame": "set_fullgraph_compiled_frame_count",
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch._dynamo": "config eval_frame",
    "torch._guards": "detect_fake_mode",
    "torch._export.non_strict_utils": "_tensor_min_max",
    "torch._export.passes": """
        _node_metadata_hook add_runtime_assertions_for_constraints_pass replace_autocast_with_hop_pass
        replace_set_grad_with_hop_pass
    """,
    "torch._functorch": "config",
    "torch._functorch._aot_autograd": "autograd_cache",
    "torch._higher_order_ops.triton_kernel_wrap": "identify_mutated_tensors kernel_side_table",
    "torch._inductor": "CompiledArtifact.load bounds compiler_bisector standalone_compile",
    "torch._inductor.async_compile": "AsyncCompile.process_pool AsyncCompile.submit AsyncCompile.use_process_pool",
    "torch._inductor.choices": "InductorChoices.should_use_persistent_reduction",
    "torch._inductor.codecache": "CppCodeCache CppPythonBindingsCodeCache cache_dir torch_key",
    "torch._inductor.codegen": "memory_planning",
    "torch._inductor.codegen.common": "init_backend_registration",
    "torch._inductor.codegen.cuda": "device_op_overrides",
    "torch._inductor.codegen.triton": "FixedTritonConfig TritonKernel.load TritonKernel.want_no_x_dim",
    "torch._inductor.codegen.wrapper": "PythonWrapperCodegen.define_kernel WrapperLine",
    "torch._inductor.compile_fx": "compile_fx fake_tensor_prop joint_graph_passes",
    "torch._inductor.config": "compile_threads patch triton",
    "torch._inductor.cpp_builder": "CppBuilder.build get_cpp_compiler",
    "torch._inductor.cpu_vec_isa": "VecISA.check_build pick_vec_isa subprocess valid_vec_isa_list",
    "torch._inductor.dependencies": "MemoryDep",
    "torch._inductor.exc": "InvalidCxxCompiler",
    "torch._inductor.fx_passes": "efficient_conv_bn_eval freezing_patterns mkldnn_fusion",
    "torch._inductor.fx_passes.fuse_attention": "_sfdp_init",
    "torch._inductor.fx_passes.misc_patterns": "_misc_patterns_init",
    "torch._inductor.fx_passes.pad_mm": "_pad_mm_init",
    "torch._inductor.ir": """
        ComputedBuffer ExternKernel.copy_input ExternKernel.realize_input ExternKernel.require_channels_last
        ExternKernel.require_contiguous IRNode StorageBox TensorBox UserDefinedTritonKernel
    """,
    "torch._inductor.lowering": "add empty_strided lowerings permute select view",
    "torch._inductor.runtime": "caching",
    "torch._inductor.runtime.benchmarking": "benchmarker",
    "torch._inductor.runtime.hints": "DeviceProperties.create ReductionHint.DEFAULT ReductionHint.INNER",
    "torch._inductor.runtime.triton_compat": "HAS_TRITON triton_key",
    "torch._inductor.runtime.triton_helpers": "set_driver_to_gpu",
    "torch._inductor.runtime.triton_heuristics": """
        CachingAutotuner._make_launchers HeuristicType.USER_AUTOTUNE
        StaticTritonCompileResult.can_statically_launch TritonCompileResult cached_autotune config_from_dict
    """,
    "torch._inductor.triton_bundler": "TritonBundler._entries",
    "torch._inductor.virtualized": "V",
    "torch._library.custom_ops": "OPDEFS",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._subclasses": "FakeTensor FakeTensorMode schema_check_mode",
    "torch._subclasses.fake_tensor": """
        FakeTensor FakeTensorMode.avoid_device_init FakeTensorMode.dispatch init_gpu_context
    """,
    "torch.autograd.forward_ad": "_current_level",
    "torch.cuda": "_is_in_bad_fork _sleep",
    "torch.export": "_unlift",
    "torch.compiler": "_is_compiling_flag _is_exporting_flag",
    "torch.export._trace": "_compiling_state_context _ignore_backend_decomps",
    "torch.fx._symbolic_trace": "_Patcher.patch_method",
    "torch.fx.experimental.symbolic_shapes": "ShapeEnv._maybe_evaluate_static",
    "torch.fx._graph_pickler": "GraphPickler.dumps GraphPickler.loads Options",
    "torch.fx.passes": "_tensorify_python_scalars._is_tensorify_enabled",
    "torch.nn.modules.conv": "_ConvNd",
    "torch.nn.modules.module": "_global_buffer_registration_hooks _global_forward_hooks _global_forward_pre_hooks",
    "torch.ops.aten": """
        _addmm_activation _assert_tensor_metadata _int_mm _scaled_dot_product_cudnn_attention _scaled_mm _to_copy
        _unsafe_index _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """,
    "torch.ops._c10d_functional": "wait_tensor",
    "torch.overrides": "_get_current_function_mode _get_current_function_mode_stack _pop_mode_temporarily",
    "torch.nn.utils.parametrize": "_cache_enabled",
    "torch.utils._device": "DeviceContext",
    "torch.utils._python_dispatch": """
        TorchDispatchMode _disable_current_modes _get_current_dispatch_mode _get_current_dispatch_mode_stack
        _pop_mode_temporarily is_traceable_wrapper_subclass
    """,
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map_only",
    "torch.utils._sympy.functions": "CeilDiv FloorDiv Max Min Mod ModularIndexing",
    "torch.utils._sympy.interp": "sympy_interp",
    "torch.utils._sympy.printers": "PythonPrinter",
    "torch.utils._sympy.reference": "PythonReferenceAnalysis",
    "torch.utils._sympy.value_ranges": "ValueRanges bound_sympy",
    "torch.utils._triton": "has_triton",
    "triton.experimental.gluon._runtime": "GluonASTSource",
    "triton.experimental.gluon.language._core": "shared_memory_descriptor.reinterpret",
}

# attributes of objects, and names that the engine has as text alone, by the class or module that has them
_ATTRIBUTES: Mapping[str, str] = {
    "torch._ops": "_mode_stack_state_for_pre_dispatch",
    "torch": "_subclasses _utils",
    "torch.Tensor": "_use_count",
    "torch.UntypedStorage": "_cdata",
    "torch.nn.Module": """
        _buffers _call_impl _compiled_call_impl _forward_hooks _forward_pre_hooks _modules _parameters
        _wrapped_call_impl
    """,
    "torch.ops.aten": "_index_put_impl_",
    "torch.distributed.distributed_c10d": "_get_default_store _resolve_process_group",
    "torch._C": """
        _get_cudnn_sdp_enabled _get_math_sdp_allow_fp16_bf16_reduction _get_mem_efficient_sdp_enabled
        _get_mkldnn_enabled _get_overrideable_sdp_enabled _set_mkldnn_enabled _set_sdp_use_cudnn _set_sdp_use_flash
        _set_sdp_use_math _set_sdp_use_mem_efficient _set_sdp_use_overrideable
    """,
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.fx.experimental.sym_node.SymNode": "_expr",
    "torch._inductor.codegen.triton.TritonKernel": "_load_mask",
    "torch._inductor.cpu_vec_isa.VecISA": "_arch_flags _avx_py_load",
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner": "_create_compile_meta _create_compile_options",
    "torch._library.custom_ops.CustomOpDef": "_init_fn",
    "torch._ops.OpOverload": "_schema",
    "torch._subclasses.fake_impls": "_compute_slice_index",
    "triton.experimental.gluon.language._core.shared_memory_descriptor": "_reinterpret",
}

# names that some of the versions do not have; the code that uses them does without there
_NOT_IN: Mapping[str, tuple[str, ...]] = {
    # it says that torch.compile raises where nothing was compiled of a whole graph
    "torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count": ("2.11.0",),
    "torch.fx.passes._tensorify_python_scalars._is_tensorify_enabled": ("2.11.0",),
    # torch finds out itself what a kernel writes to
    "torch._higher_order_ops.triton_kernel_wrap.identify_mutated_tensors": ("2.14.1", "2.15.0"),
    # named `reinterpret` there; `kernels/gluon_names.py` asks which one there is
    "triton.experimental.gluon.language._core.shared_memory_descriptor._reinterpret": ("2.15.0",),
    "triton.experimental.gluon.language._core.shared_memory_descriptor.reinterpret": ("2.11.0", "2.14.1"),
}


def _rows(table: Mapping[str, str]) -> Iterator[str]:
    return (f"{owner}.{name}" for owner, names in table.items() for name in names.split())


ATTRIBUTES: tuple[str, ...] = tuple(_rows(_ATTRIBUTES))
# each name, and each attribute of an object, with the versions that have it
KNOWN_IN: Mapping[str, tuple[str, ...]] = {
    name: tuple(version for version in TRIED if version not in _NOT_IN.get(name, ()))
    for name in (*_rows(_NAMES), *ATTRIBUTES)
}


def missing() -> list[str]:
    """The names that the torch and the Triton of this process do not have. Imports Inductor."""
    return [name for name in KNOWN_IN if not _is_there(name)]


def _is_there(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        if name in ATTRIBUTES:
            return _has_attribute(resolved(owner), last)
        resolved(name)
    except (ImportError, AttributeError):
        return False
    return True


def resolved(name: str) -> Any:
    """What has this name. Raises ImportError or AttributeError where there is nothing."""
    parts = name.split(".")
    found = import_module(parts[0])
    for count, part in enumerate(parts[1:], 1):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            import_module(".".join(parts[: count + 1]))  # a module that nobody imported yet
        found = getattr(found, part)
    return found


def _has_attribute(kind: Any, name: str) -> bool:
    """Whether a module, or an instance of a class, has an attribute: the class has, declares or sets it."""
    if hasattr(kind, name) or not isinstance(kind, type):
        return hasattr(kind, name)
    declared = any(name in vars(base).get("__annotations__", {}) for base in kind.__mro__)
    return declared or any(f"self.{name}" in _source(base) for base in kind.__mro__)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # it is written in C
        return ""
