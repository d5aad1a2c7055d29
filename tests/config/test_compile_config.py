# SPDX-License-Identifier: Apache-2.0
"""The mode grammar and the options: what is accepted, and what is refused and how."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from config_strategies import mappings, token_lists
from hypothesis import given
from hypothesis import strategies as st

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.options import EXAMPLE, KEYS, MEMORY_FORMATS, OPTIONS, TOKENS

# Every combination that users of the grammar had in their workflows (MO = max-optimize and so on).
_SEEN_IN_THE_WILD = """O2 O3 MA MA:CA MA:CG MA:LP MA:BM:LP MA:BM:LP:CG LP jit:DF jit:DF:LP jit:BM:LP:FZ:CG
CG:BM:LP:FZ:jit CG:MA:LP:CA CG:BM:MA:LP:CA BM:CG:MA:LP:CA MO:MA:LP MO:MA:LP:CA MO:MA:LP:CG:CA MO:MA:LP:FZ:BM
MO:MA:LP:CA:FZ:BM MO:MA:LP:CG:CA:FZ:BM MO:MA:CG MO:MA:FZ MO:MA:FZ:CA MO:MA:FZ:BM:CG MO:MA:FZ:BM:CG:CA
MO:MA:FZ:BM:LP MO:MA:FZ:BM:LP:CG MO:MA:FZ:BM:LP:CG:CA MO:MA:BM:LP:FZ:CG MO:MA:CG:BM:LP:FZ MO:MA:MA
quant:MO:MA:LP quant:MO:MA:LP:FZ:BM quant:MO:MA:LP:CG:FZ:BM quant:MO:MA:FZ:BM:LP:CG"""
_SHORT = {
    "MO": "max-optimize",
    "MA": "max-autotune",
    "LP": "low-precision",
    "CG": "cudagraphs",
    "FZ": "freezing",
    "BM": "benchmark",
    "CA": "cache-all",
    "DF": "disable-runtime-fusion",
}


def _written_out(short: str) -> str:
    return ":".join(_SHORT.get(token, token) for token in short.split(":"))


# --- what is accepted


def test_there_are_twelve_tokens():
    assert len(TOKENS) == 12


@pytest.mark.parametrize("nothing", [None, "", "  ", {}, "{}", "null", {"mode": ""}, {"mode": None}, {"mode": ":"}])
def test_nothing_means_o2_and_dynamic(nothing):
    assert CompileConfig.parse(nothing) == CompileConfig(tokens=("O2",), dynamic=True)


@pytest.mark.parametrize("short", _SEEN_IN_THE_WILD.split())
def test_every_mode_ever_published_is_accepted(short):
    mode = _written_out(short)
    config = CompileConfig.parse({"mode": mode})
    assert set(config.tokens) == set(mode.split(":"))


@given(tokens=token_lists, data=st.data())
def test_order_and_duplicates_do_not_matter(tokens, data):
    shuffled = data.draw(st.permutations(tokens + data.draw(st.lists(st.sampled_from(tokens)))))
    one, other = CompileConfig.parse(":".join(tokens)), CompileConfig.parse(":".join(shuffled))
    assert one == other
    assert hash(one) == hash(other)
    assert one.lowering_key() == other.lowering_key()
    assert one.tokens == tuple(sorted(set(tokens)))
    assert one.mode == ":".join(sorted(set(tokens)))


@given(given_=mappings)
def test_mapping_json_text_and_as_dict_give_the_same_config(given_):
    config = CompileConfig.parse(given_)
    assert CompileConfig.parse(json.dumps(given_)) == config
    assert CompileConfig.parse(config) is config
    assert CompileConfig.parse(config.as_dict()) == config
    assert CompileConfig.parse(json.dumps(config.as_dict())) == config


@given(given_=mappings)
def test_the_callers_mapping_is_only_read(given_):
    before = copy.deepcopy(given_)
    first = CompileConfig.parse(given_)
    assert given_ == before
    assert CompileConfig.parse(MappingProxyType(given_)) == first


@pytest.mark.parametrize(
    "text", ["max-autotune:cudagraphs", '"cudagraphs:max-autotune"', " max-autotune : cudagraphs "]
)
def test_a_bare_mode_is_accepted_as_text(text):
    assert CompileConfig.parse(text).tokens == ("cudagraphs", "max-autotune")


def test_the_dynamic_keyword_holds_unless_the_options_say_it():
    assert CompileConfig.parse(None, dynamic=False).dynamic is False
    assert CompileConfig.parse({"dynamic": True}, dynamic=False).dynamic is True
    assert CompileConfig.parse({"dynamic": False}, dynamic=True).dynamic is False
    assert CompileConfig.parse({"dynamic": None}, dynamic=False).dynamic is False


def test_memory_format_takes_torchs_own_objects_and_their_names():
    torch = pytest.importorskip("torch")
    for value in (torch.channels_last, "torch.channels_last", "channels_last"):
        assert CompileConfig.parse({"memory_format": value}).memory_format == "channels_last"


def test_direct_construction_is_normalised_and_checked_too():
    config = CompileConfig(
        tokens=("max-optimize", "cudagraphs", "max-optimize"), options=(("overrides.conv_benchmark", True),)
    )
    assert config.tokens == ("cudagraphs", "max-optimize")
    with pytest.raises(ValueError, match="did you mean 'cudagraphs'"):
        CompileConfig(tokens=("cudagraph",))
    with pytest.raises(ValueError, match="expected a tuple"):
        CompileConfig(tokens="O2")


# --- what is refused, and how


def test_a_prefix_alone_is_no_memory_format():
    assert CompileConfig.parse({"memory_format": "torch.channels_last"}).memory_format == "channels_last"
    for word in ("torch.", "torch.nhwc"):
        with pytest.raises(ValueError, match=f"unknown memory_format '{word}'"):
            CompileConfig.parse({"memory_format": word})


@given(word=st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=30))
def test_any_unknown_word_is_refused_with_a_valid_neighbour_and_the_whole_list(word):
    for valid, make in (
        (TOKENS, lambda: CompileConfig.parse({"mode": word})),
        (KEYS, lambda: CompileConfig.parse({word: True})),
        (OPTIONS, lambda: CompileConfig.parse({"options": {word: True}})),
        (MEMORY_FORMATS, lambda: CompileConfig.parse({"memory_format": word})),
    ):
        if word in TOKENS or word in KEYS or word in OPTIONS or word in MEMORY_FORMATS:
            continue
        with pytest.raises(ValueError) as caught:
            make()
        message = str(caught.value)
        assert repr(word) in message
        assert message.split("did you mean ")[1].split("'")[1] in valid
        assert all(name in message for name in valid)


@given(token=st.sampled_from(sorted(TOKENS)), data=st.data())
def test_one_slip_of_the_keyboard_is_put_right(token, data):
    at = data.draw(st.integers(0, len(token) - 1))
    slip = data.draw(
        st.sampled_from([token[:at] + token[at + 1 :], token[:at] + "z" + token[at:], token.upper() + "s"])
    )
    if slip in TOKENS or not slip.strip() or (token in ("O2", "O3") and "2" not in slip and "3" not in slip):
        return
    with pytest.raises(ValueError, match=f"did you mean '{token}'"):
        CompileConfig.parse({"mode": slip})


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ("o2", "O2"),
        ("MAX_AUTOTUNE", "max-autotune"),
        ("reduce-overhead", "cudagraphs"),
        ("max-autotune-no-cudagraphs", "max-autotune"),
        ("default", "O2"),
        ({"memoryformat": "x"}, "memory_format"),
        ({"memory_format": "NHWC"}, "channels_last"),
        ({"options": {"conv_benchmark": True}}, "overrides.conv_benchmark"),
        ({"fullGraph": True}, "fullgraph"),
    ],
)
def test_the_named_neighbour_is_the_sensible_one(options, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        CompileConfig.parse(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{"mode": "O2",}', ["not valid JSON", "line 1 column", "expected for example", EXAMPLE]),
        ('{"mode": "O2"', ["not valid JSON", "line 1 column 14", EXAMPLE]),
        ("{'mode': 'O2'}", ["not valid JSON", "double quotes", EXAMPLE]),
        ("{\n  mode: 1}", ["line 2 column 3"]),
        ('{"mode": "O2", "mode": "O3"}', ["'mode' twice"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("[1]", ["JSON list", EXAMPLE]),
        (7, ["options is a int", EXAMPLE]),
        ({"mode": ["O2"]}, ["mode is a list", "max-optimize:max-autotune"]),
        ({"dynamic": "true"}, ["dynamic is 'true'", "expected true or false"]),
        ({"fullgraph": 1}, ["fullgraph is 1", "expected true or false"]),
        (
            {"options": {"overrides.conv_benchmark": 1}},
            ["overrides.conv_benchmark", "expected true or false"],
        ),
        ({"options": ["x"]}, ['"options" is a list', "cuda.fuse_timestep_embedding"]),
        ({"overrides.conv_benchmark": True}, ['inside "options"']),
        ({"options": {"memory_format": "channels_last"}}, ["one level up"]),
        ({3: True}, ["unknown key 3"]),
    ],
)
def test_bad_input_says_what_was_found_and_what_was_expected(options, words):
    with pytest.raises(ValueError) as caught:
        CompileConfig.parse(options)
    for word in words:
        assert word in str(caught.value)


def test_a_bad_keyword_is_refused_too():
    with pytest.raises(ValueError, match="dynamic is 'yes'"):
        CompileConfig.parse(None, dynamic="yes")


def test_importing_config_imports_neither_inductor_nor_triton():
    code = (
        "import sys; before = set(sys.modules); import nexfort_engine.config.compile_config; "
        "new = set(sys.modules) - before; "
        "assert not [m for m in new if m.startswith(('torch._inductor', 'triton'))], new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
