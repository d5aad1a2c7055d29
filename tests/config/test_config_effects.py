# SPDX-License-Identifier: Apache-2.0
"""What modes and options do: which artefacts they share, what reaches Inductor, what has no effect and says so."""

from __future__ import annotations

import pytest
from config_strategies import configs
from hypothesis import given
from hypothesis import strategies as st

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.options import MEMORY_FORMATS


def test_composite_tokens_expand():
    o2, o3 = CompileConfig.parse("O2"), CompileConfig.parse("O3")
    assert o2.has("max-optimize") and not o2.has("max-autotune") and not o2.has("low-precision")
    assert o3.has("O2") and o3.has("max-optimize") and o3.has("low-precision")
    assert CompileConfig.parse("cudagraphs").has("O2")
    assert not CompileConfig.parse("max-autotune").has("max-optimize")
    assert not CompileConfig.parse("O2:jit").has("max-optimize"), "the fast profile leaves fusions out"
    assert CompileConfig.parse("jit:max-optimize").has("max-optimize")
    with pytest.raises(ValueError, match="did you mean 'max-autotune'"):
        o2.has("autotune")


@pytest.mark.parametrize(
    ("mode", "profile"),
    [
        ("O2", "standard"),
        ("max-optimize", "standard"),
        ("max-autotune", "search"),
        ("jit", "fast"),
        ("disable-runtime-fusion", "fast"),
        ("jit:O2", "fast"),
        ("jit:max-autotune", "search"),
        ("jit:max-optimize", "standard"),
        ("benchmark", "standard"),
    ],
)
def test_profiles(mode, profile):
    assert CompileConfig.parse(mode).profile == profile


@given(config=configs)
def test_what_has_no_effect_is_named_and_changes_no_artefact(config):
    named = {row["token"] for row in config.inactive()}
    assert named <= set(config.tokens) | set(dict(config.options))
    assert ("freezing" in named) is ("freezing" in config.tokens and config.option("quant.keep_weights") is False)
    assert not {"cudagraphs", "triton.cudagraphs", "low-precision", "O3", "quant"} & named
    assert all(row["reason"] for row in config.inactive())
    kept = [token for token in config.tokens if token not in named]
    data = config.as_dict() | {
        "mode": ":".join(kept),
        "options": {name: value for name, value in config.options if name not in named},
    }
    assert CompileConfig.parse(data).lowering_key() == config.lowering_key()


@given(config=configs)
def test_quant_changes_no_artefact(config):
    """What is packed is in the layers, and their structure is in the key."""
    other = CompileConfig.parse(config.as_dict() | {"mode": f"{config.mode}:quant"})
    assert other.lowering_key() == config.lowering_key() and other.has("quant")
    assert {row["token"] for row in other.inactive()} == {row["token"] for row in config.inactive()}


@given(one=configs, other=configs)
def test_configs_of_one_lowering_key_lower_alike(one, other):
    if one.lowering_key() == other.lowering_key():
        assert one.inductor_options("cpu") == other.inductor_options("cpu")
        assert one.inductor_options("cuda") == other.inductor_options("cuda")


@given(config=configs)
def test_lowering_key_leaves_out_what_changes_no_artefact(config):
    changed = config.as_dict() | {"disable": not config.disable, "fullgraph": not config.fullgraph}
    changed["mode"] = config.mode + ":benchmark:cache-all:cudagraphs"
    changed["options"] = dict(config.options) | {"triton.cudagraphs": not config.step_graphs}
    assert CompileConfig.parse(changed).lowering_key() == config.lowering_key()
    changed["dynamic"] = not config.dynamic
    assert CompileConfig.parse(changed).lowering_key() != config.lowering_key()


def test_lowering_key_is_stable_text():
    assert CompileConfig.parse("O2").lowering_key() == CompileConfig.parse("max-optimize:benchmark").lowering_key()
    assert CompileConfig.parse("O2").lowering_key() != CompileConfig.parse("max-autotune").lowering_key()
    assert CompileConfig.parse("O2").lowering_key() != CompileConfig.parse("jit").lowering_key()
    keys = {f: CompileConfig.parse({"memory_format": f}).lowering_key() for f in (None, *MEMORY_FORMATS)}
    assert keys[None] == keys["preserve_format"] == keys["channels_last"], "inside the regions the layout is free"
    assert keys["contiguous_format"] != keys[None]


@pytest.mark.parametrize(
    ("mode", "on"),
    [
        ("O2", True),
        ("O3", True),
        ("max-optimize", True),
        ("max-autotune", True),
        ("max-optimize:max-autotune", True),
        ("benchmark", True),
        ("cudagraphs", True),
        ("jit", False),
        ("disable-runtime-fusion", False),
        ("O2:jit", False),
        ("jit:max-autotune", True),
        ("jit:max-optimize", True),
        ("jit:cudagraphs", True),
        ("cudagraphs:disable-runtime-fusion", True),
    ],
)
def test_steps_are_graphs_but_in_the_fast_profile_unless_the_user_says(mode, on):
    assert CompileConfig.parse(mode).step_graphs is on
    for asked in (True, False):
        config = CompileConfig.parse({"mode": mode, "options": {"triton.cudagraphs": asked}})
        assert config.step_graphs is asked, "the option wins over the mode"


@given(config=configs)
def test_asking_for_cuda_graphs_gives_them_and_the_option_decides(config):
    told = config.option("triton.cudagraphs")
    asked = CompileConfig.parse(config.as_dict() | {"mode": config.mode + ":cudagraphs"})
    assert asked.step_graphs is (True if told is None else told)
    assert config.step_graphs is (told if told is not None else config.profile != "fast" or config.has("cudagraphs"))


@given(config=configs, device=st.sampled_from(["cpu", "cuda"]))
def test_inductor_never_freezes_nor_makes_cuda_graphs(config, device):
    options = config.inductor_options(device)
    assert options["freezing"] is False
    assert options["triton.cudagraphs"] is False


def test_only_a_search_searches_and_it_is_bounded():
    for mode in ("O2", "max-optimize", "jit", "O3"):
        assert CompileConfig.parse(mode).inductor_options("cuda")["max_autotune"] is False
    options = CompileConfig.parse("max-autotune").inductor_options("cuda")
    assert options["max_autotune"] is True
    assert options["max_autotune_gemm_backends"] == "ATEN,TRITON"
    assert options["max_autotune_gemm_search_space"] == "DEFAULT"
    assert options["coordinate_descent_tuning"] is False
    assert (
        CompileConfig.parse("max-autotune:max-optimize").inductor_options("cuda")["coordinate_descent_tuning"] is True
    )


@pytest.mark.parametrize("memory_format", [None, *MEMORY_FORMATS])
def test_inductor_chooses_the_layout_unless_contiguous_is_asked_for(memory_format):
    free = memory_format != "contiguous_format"
    for device, forced in (("cuda", free), ("cpu", False)):
        options = CompileConfig.parse({"memory_format": memory_format}).inductor_options(device)
        assert options["layout_optimization"] is free
        assert options["force_layout_optimization"] is forced


def test_linear_epilogue_is_active_exactly_where_it_has_an_effect():
    off = {"options": {"inductor.optimize_linear_epilogue": False}}
    searching = CompileConfig.parse(off | {"mode": "max-autotune"})
    assert searching.inductor_options("cuda")["epilogue_fusion"] is False
    assert searching.inactive() == []
    assert [row["token"] for row in CompileConfig.parse(off).inactive()] == ["inductor.optimize_linear_epilogue"]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"mode": "benchmark"}, {"conv_benchmark": True}),
        ({"mode": "benchmark", "options": {"overrides.conv_benchmark": False}}, {"conv_benchmark": False}),
        ({"options": {"overrides.conv_benchmark": True}}, {"conv_benchmark": True}),
        ({"options": {"overrides.matmul_allow_tf32": True}}, {"matmul_allow_tf32": True}),
        (
            {"mode": "O3:benchmark", "options": {"overrides.matmul_allow_fp16_accumulation": True}},
            {"conv_benchmark": True, "matmul_allow_fp16_accumulation": True},
        ),
    ],
)
def test_backend_flags(options, flags):
    assert CompileConfig.parse(options).backend_flags() == flags


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["O2", "max-autotune", "max-optimize:max-autotune", "jit"])
@pytest.mark.parametrize("memory_format", [None, *MEMORY_FORMATS])
def test_every_name_exists_in_inductor_with_a_value_of_its_type(device, mode, memory_format):
    inductor = pytest.importorskip("torch._inductor.config")
    asked = {
        "mode": mode,
        "memory_format": memory_format,
        "options": {"inductor.optimize_linear_epilogue": True},
    }
    for name, value in CompileConfig.parse(asked).inductor_options(device).items():
        assert type(getattr(inductor, name)) is type(value), name


def test_int8_is_asked_for_beside_low_precision_and_takes_the_place_of_fp8():
    def on(asked, device="cuda"):
        found = CompileConfig.parse(asked).lowering_options(device)
        return found["nexfort.low_precision"], found["nexfort.low_precision_int8"]

    whole = {"mode": "O3", "options": {"quant.int8": True}}
    assert on(whole) == (False, True) and on("O3") == on({**whole, "options": {"quant.int8": False}}) == (True, False)
    assert on(whole, "cpu") == on({**whole, "mode": "O2"}) == (False, False)
    assert CompileConfig.parse(whole).lowering_key() != CompileConfig.parse("O3").lowering_key()
    assert not CompileConfig.parse(whole).inactive()
    (row,) = CompileConfig.parse({**whole, "mode": "O2"}).inactive()
    assert row["token"] == "quant.int8" and "low-precision" in row["reason"]


def test_freezing_prepares_weights_and_every_mode_lays_out_those_of_convolutions():
    def on(asked, device="cuda", told=True):
        config = CompileConfig.parse(asked)
        found = (config if told else config.without_weight_versions()).lowering_options(device)
        return found["nexfort.prepare"], found["nexfort.prepare_copies"]

    assert on("O2") == (False, True) and on("freezing") == on("O3") == on("jit:freezing") == (True, True)
    assert on("freezing", "cpu") == (True, True)
    outermost = {"mode": "freezing", "memory_format": "contiguous_format"}
    assert on(outermost) == (True, False) and on(outermost | {"mode": "O2"}) == (False, False)
    for mode in ("O3:freezing", "O2"):
        assert on({"mode": mode, "options": {"quant.keep_weights": False}}) == (False, False)
    assert on("O2", told=False) == on("freezing", told=False) == (False, False)
    assert on("O3", told=False) == (True, False)


@given(config=configs)
def test_freezing_splits_artefacts_where_it_makes_others_and_nowhere_else(config):
    frozen = CompileConfig.parse(config.as_dict() | {"mode": f"{config.mode}:freezing"})
    rest = ":".join(token for token in config.tokens if token != "freezing")
    plain = CompileConfig.parse(config.as_dict() | {"mode": rest})
    for one, other in (
        (frozen, plain),
        (frozen.without_weight_versions(), plain.without_weight_versions()),
        (frozen, frozen.without_weight_versions()),
    ):
        alike = all(one.lowering_options(device) == other.lowering_options(device) for device in ("cpu", "cuda"))
        assert (one.lowering_key() == other.lowering_key()) is alike
    assert frozen.without_weight_versions().lowering_key() == plain.without_weight_versions().lowering_key()


def test_freezing_without_effect_is_named_with_the_reason():
    def told(config):
        return [(row["token"], row["reason"]) for row in config.inactive()]

    assert not told(CompileConfig.parse("freezing")) and not told(CompileConfig.parse("O3").without_weight_versions())
    ((token, reason),) = told(CompileConfig.parse("O3:freezing").without_weight_versions())
    assert token == "freezing" and "nobody says when" in reason
    ((token, reason),) = told(CompileConfig.parse({"mode": "freezing", "options": {"quant.keep_weights": False}}))
    assert token == "freezing" and "quant.keep_weights is off" in reason
    assert (
        CompileConfig.parse("freezing").without_weight_versions().as_dict() == CompileConfig.parse("freezing").as_dict()
    )


@pytest.mark.parametrize(
    "name",
    [
        *("group_norm", "upsample", "whole_rows", "gelu", "grouped_linear", "gated_linear", "linear_gelu"),
        *("few_keys_attention", "unpadded_attention", "broadcast", "cast_once", "segments", "videos", "joined_frames"),
        *("convolution", "upsampled_convolution"),
    ],
)
def test_a_rewrite_is_on_where_it_was_measured_to_win_and_can_be_switched(name):
    def on(asked, device):
        return CompileConfig.parse(asked).lowering_options(device)[f"nexfort.{name}"]

    assert on("O2", "cuda") is True and on("O2", "cpu") is False and on("jit", "cuda") is False
    off = {"options": {f"fuse.{name}": False}}
    assert on(off, "cuda") is False and on({"mode": "jit", "options": {f"fuse.{name}": True}}, "cuda") is True
    assert CompileConfig.parse(off).lowering_key() != CompileConfig.parse(None).lowering_key()


def test_what_is_made_of_a_prompt_is_a_part_by_itself_on_a_gpu():
    def on(asked, device="cuda"):
        return CompileConfig.parse(asked).lowering_options(device)["nexfort.prompt_once"]

    off, asked = ({"options": {"compile.prompt_once": value}} for value in (False, True))
    assert on("O2") is True and not on("O2", "cpu") and not on("jit") and not on(off) and on({"mode": "jit", **asked})
    assert CompileConfig.parse(off).lowering_key() != CompileConfig.parse(None).lowering_key()
    told = CompileConfig.parse({"options": {"quant.keep_weights": False}})
    assert told.without_weight_versions().lowering_key() == told.lowering_key()
    plain = CompileConfig.parse(None)
    assert plain.without_weight_versions().lowering_key() != plain.lowering_key()
    assert plain.without_weight_versions().lowering_key() == plain.lowering_key(images=False), (
        "where no image is one store serves both"
    )


def test_what_needs_step_graphs_or_a_host_has_no_effect_without():
    asked = {"compile.prompt_once": True, "cuda.fill_kernels": True}
    assert not CompileConfig.parse({"options": asked}).inactive()
    (row,) = CompileConfig.parse({"options": {**asked, "triton.cudagraphs": False}}).inactive()
    assert row["token"] == "cuda.fill_kernels" and "CUDA graphs" in row["reason"]
    (row,) = CompileConfig.parse({"options": asked}).without_weight_versions().inactive()
    assert row["token"] == "compile.prompt_once" and "MODEL" in row["reason"]
