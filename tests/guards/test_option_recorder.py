# SPDX-License-Identifier: Apache-2.0
"""Read-sets: a recorded mapping behaves as the dict it stands for, and its guards tell apart what its reader can.

The two properties at the top are asked of random programs of dict operations; what they found is kept below by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nexfort_engine.guards.option_guards import checker, to_json  # noqa: E402
from nexfort_engine.guards.option_recorder import (  # noqa: E402
    BOOKKEEPING,
    Path,
    ReadSet,
    Recording,
    Refused,
    ValueUsed,
    admit,
    look,
    where,
)

Program = Callable[[Any], Any]


def captured(program: Program, *mappings: dict[Any, Any]) -> tuple[Any, ReadSet]:
    """Run a program as a capture does: again from the start, with one value more admitted, whenever one is used."""
    admitted: dict[Path, Any] = {}
    for _ in range(64):
        log = ReadSet(admitted)
        try:
            return program(*(Recording(m, (i,), log) for i, m in enumerate(mappings))), log
        except ValueUsed as used:
            assert used.path not in admitted, "an admitted value is handed out as it is"
            admitted[used.path] = admit(list(mappings), used.path)
    raise AssertionError("it does not come to an end")


def guard_of(program: Program, *mappings: dict[Any, Any]) -> Callable[..., bool]:
    """The guard a capture of the program would leave, through the text it is stored as."""
    rows = to_json(captured(program, *mappings)[1])
    check = checker(json.loads(json.dumps(rows)))
    return lambda *others: check(list(others))


# ---- programs of dict operations ----------------------------------------------------------------------------

KEYS = ["patches", "scale", "flag", "name", "sizes"]
scalars = st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.sampled_from([0.0, 1.0, 2.5, "", "a", "b"]))
leaves = st.one_of(scalars, st.lists(scalars, max_size=2), st.lists(scalars, max_size=2).map(tuple))
nested = st.dictionaries(st.sampled_from(KEYS), leaves, max_size=3)
contents = st.dictionaries(st.sampled_from(KEYS), st.one_of(leaves, nested), max_size=4)
keys = st.sampled_from(KEYS)
uses = st.sampled_from(["", "repr", "bool", "eq"])

single = st.one_of(
    st.tuples(st.sampled_from(["in", "get", "getitem", "pop", "pop_default"]), keys, uses),
    st.tuples(st.sampled_from(["set", "setdefault"]), keys, leaves),
    st.tuples(st.sampled_from(["update", "or", "ior", "eq", "ne"]), st.dictionaries(keys, leaves, max_size=2)),
    st.tuples(st.sampled_from(["len", "bool", "iter", "items", "values", "keys", "reversed", "del_first", "clear"])),
    st.tuples(st.sampled_from(["copy", "dict", "splat", "call", "deepcopy"])),
)
programs = st.lists(st.one_of(single, st.tuples(st.just("nested"), keys, single)), min_size=1, max_size=5)


def use(value: Any, how: str) -> Any:
    """What a program sees of a value."""
    if value is None or isinstance(value, dict):
        return type(value).__name__ if value is None else sorted(value)
    if how == "repr":
        return repr(value)
    if how == "bool":
        return bool(value)
    return value == "a" if how == "eq" else "something"


def step(current: Any, operation: tuple[Any, ...]) -> tuple[Any, Any]:
    """(what the program goes on with, what it saw) after one operation on a mapping."""
    name, *rest = operation
    copies: dict[str, Callable[[Any], Any]] = {
        "copy": lambda m: m.copy(),
        "dict": dict,
        "splat": lambda m: {**m},
        "call": lambda m: (lambda **given: given)(**m),
        "deepcopy": copy.deepcopy,
    }
    if name in copies:
        return copies[name](current), None
    if name == "or":
        return current | rest[0], None
    try:
        return current, _seen(current, name, rest)
    except KeyError as error:
        return current, f"KeyError {error}"


def _seen(current: Any, name: str, rest: list[Any]) -> Any:
    if name in ("in", "get", "getitem", "pop", "pop_default"):
        key, how = rest
        read = {
            "in": lambda: key in current,
            "get": lambda: use(current.get(key, "default"), how),
            "getitem": lambda: use(current[key], how),
            "pop": lambda: use(current.pop(key), how),
            "pop_default": lambda: use(current.pop(key, "default"), how),
        }
        return read[name]()
    if name == "set":
        current[rest[0]] = rest[1]
        return None
    if name == "setdefault":
        return use(current.setdefault(*rest), "repr")
    if name in ("update", "ior"):
        current.update(rest[0]) if name == "update" else current.__ior__(rest[0])
        return None
    if name == "nested":
        inner = current.get(rest[0])
        return step(inner, rest[1])[1] if isinstance(inner, dict) else "not a mapping"
    looks: dict[str, Callable[[], Any]] = {
        "eq": lambda: current == rest[0],
        "ne": lambda: current != rest[0],
        "len": lambda: len(current),
        "bool": lambda: bool(current),
        "iter": lambda: sorted(current),
        "items": lambda: sorted((k, use(v, "repr")) for k, v in current.items()),
        "values": lambda: sorted(str(use(v, "repr")) for v in current.values()),
        "keys": lambda: sorted(current.keys()),
        "reversed": lambda: sorted(k for k in reversed(current)),
        "del_first": lambda: current.__delitem__(min(current, default="none")),
        "clear": lambda: current.clear(),
    }
    return looks[name]()


def program_of(operations: list[tuple[Any, ...]]) -> Program:
    """A program that runs the operations and returns all it saw, and at the end what the mapping holds."""

    def program(mapping: Any) -> list[Any]:
        seen = []
        for operation in operations:
            mapping, what = step(mapping, operation)
            seen.append(what)
        return seen

    return program


def plainly(program: Program, content: dict[Any, Any]) -> Any:
    return program(copy.deepcopy(content))


@settings(max_examples=400, deadline=None)
@given(contents, programs)
def test_a_recorded_mapping_behaves_as_the_dict(content: dict[str, Any], operations: list[tuple[Any, ...]]) -> None:
    program, before = program_of(operations), copy.deepcopy(content)
    seen, log = captured(program, content)
    assert seen == plainly(program, content)
    assert repr(seen) == repr(plainly(program, content))
    assert content == before, "writes are kept apart"
    assert checker(json.loads(json.dumps(to_json(log))))([content]), "the guards hold for the call they come from"


@settings(max_examples=600, deadline=None)
@given(contents, contents, programs)
@example({"flag": True}, {"flag": 1}, [("get", "flag", "repr")])
@example({"scale": 1}, {"scale": 1.0}, [("get", "scale", "repr")])
@example({"patches": {}}, {"patches": None}, [("get", "patches", "")])
@example({"patches": {"scale": 1}}, {"patches": {}}, [("nested", "patches", ("bool",))])
@example({}, {"patches": None}, [("ne", {})])
@example({"patches": None}, {"scale": None}, [("set", "patches", None), ("len",)])
@example({"name": {"flag": None}}, {"name": True}, [("nested", "name", ("bool",))])
@example({"sizes": (1, 2)}, {"sizes": [1, 2]}, [("get", "sizes", "repr")])
def test_guards_tell_apart_what_the_program_can(
    content: dict[str, Any], other: dict[str, Any], operations: list[tuple[Any, ...]]
) -> None:
    program = program_of(operations)
    if guard_of(program, content)(other):
        assert repr(plainly(program, other)) == repr(plainly(program, content))


@given(contents, contents)
def test_what_was_not_read_is_no_dependency(content: dict[str, Any], other: dict[str, Any]) -> None:
    assume(("name" in content) == ("name" in other))
    assert guard_of(lambda m: "name" in m, content)(other)


# ---- what blocks do -------------------------------------------------------------------------------------------


def attention_block(options: Any) -> str:
    """As flux and qwen read their options: a copy of all, patches by name, an override if there is one."""
    patches = options.get("patches", {})
    extra = options.copy()
    extra["img_slice"] = [1, 2]
    if "attn1_patch" in patches:
        return "patched"
    return "override" if "optimized_attention_override" in extra else "plain"


def test_a_patch_or_an_override_breaks_the_guard_and_noise_does_not() -> None:
    plain = {"sigmas": torch.ones(1), "uuids": [object()], "patches": {}}
    check = guard_of(attention_block, plain)
    assert check({**plain, "sigmas": torch.zeros(1), "uuids": [], "cond_or_uncond": [0, 1], "other": 3})
    assert not check({**plain, "patches": {"attn1_patch": [print]}})
    assert check({**plain, "patches": {"post_input": [print]}}), "no key that this block asks for"
    assert not check({**plain, "optimized_attention_override": print})
    assert not check({"sigmas": None}), "patches is missing where an empty one was found"


def unet_block(options: Any) -> Any:
    """As ComfyUI's BasicTransformerBlock: all keys walked, a place made into a key of the replacements."""
    block = options.get("block", None)
    index = options.get("block_index", 0)
    extra, replace = {}, {}
    for key in options:
        if key == "patches_replace":
            replace = options[key]
        else:
            extra[key] = options[key]
    where_it_is = (block[0], block[1], index) if block is not None else None
    attn1 = replace.get("attn1", {})
    if where_it_is not in attn1:
        where_it_is = block
    return "replaced" if where_it_is in attn1 else "plain"


def test_one_guard_serves_every_place_until_something_is_replaced() -> None:
    options = {"block": ("input", 1), "block_index": 0, "sigmas": torch.ones(1), "patches_replace": {}}
    assert captured(unet_block, options)[0] == "plain"
    check = guard_of(unet_block, options)
    assert check({**options, "block": ("middle", 0), "block_index": 1, "sigmas": torch.zeros(1)})
    assert check({**options, "transformer_index": 3, "original_shape": [1, 2]}), "bookkeeping comes and goes"
    assert not check({**options, "patches_replace": {"attn1": {("input", 1): print}}})
    assert not check({**options, "other_pack": 1}), "a key of others may matter to the patches it is handed to"
    replaced = {**options, "patches_replace": {"attn1": {("input", 1): 0.5}}}
    assert captured(unet_block, replaced)[0] == "replaced"
    check = guard_of(unet_block, replaced)
    assert check(replaced) and not check({**replaced, "block": ("input", 2)})


def test_one_guard_serves_every_place_that_others_left_alone() -> None:
    options = {"block": ("output", 2), "block_index": 3, "patches_replace": {"attn1": {("input", 1): print}}}
    check = guard_of(unet_block, options)
    for block, index in (("output", 2), 0), (("middle", 0), 7), (("input", 2), 1):
        assert check({**options, "block": block, "block_index": index})
    assert not check({**options, "block": ("input", 1)})
    assert not check({**options, "patches_replace": {"attn1": {("output", 2): print}}})
    assert not check({**options, "patches_replace": {"attn1": {("output", 2, 3): print}}})
    assert check({**options, "patches_replace": {"attn1": {("output", 2, 4): print}}})
    assert not check({**options, "patches_replace": {}}) and not check({"patches_replace": options["patches_replace"]})
    for odd in (None, "output", ("output",), (["output"], 2)):
        assert not check({**options, "block": odd}), "no key is made of that"


def test_one_refusal_serves_every_place_where_others_put_code() -> None:
    options = {"block": ("input", 1), "block_index": 0, "patches_replace": {"attn1": {("input", 1): print}}}
    log = ReadSet({})
    with pytest.raises(Refused, match=r"\['attn1'\] at the key of its own place \(print\(\)\)"):
        unet_block(Recording(options, (0,), log))
    check = checker(json.loads(json.dumps(to_json(log))))
    elsewhere = {**options, "block": ("middle", 0), "block_index": 0}
    assert check([options]) and not check([elsewhere])
    assert check([{**elsewhere, "patches_replace": {"attn1": {("middle", 0): len}}}])


def test_a_bookkeeping_key_asked_for_by_name_is_guarded_also_after_a_walk() -> None:
    def walks_then_asks(options: Any) -> bool:
        for _ in options:
            pass
        return "sigmas" in options or options.get("block") is not None

    check = guard_of(walks_then_asks, {"sigmas": 1, "other": 2})
    assert check({"sigmas": 3, "other": 2, "uuids": []})
    assert not check({"other": 2})
    assert not guard_of(walks_then_asks, {"other": 2})({"sigmas": 1, "other": 2})


def test_every_bookkeeping_key_may_come_and_go_where_keys_are_walked() -> None:
    def program(options: Any) -> int:
        return sum(1 for _ in options)

    check = guard_of(program, {"scale": 1})
    assert check({"scale": 2, **dict.fromkeys(BOOKKEEPING)})
    assert not check({"scale": 1, "name": 2})


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_compared_by_identity_is_seen(flag: bool) -> None:
    def program(options: Any) -> str:
        return "on" if options.get("flag") is True else "off" if options["flag"] is False else "neither"

    seen, log = captured(program, {"flag": flag})
    assert seen == ("on" if flag else "off")
    check = checker(to_json(log))
    assert check([{"flag": flag}]) and not check([{"flag": not flag}]) and not check([{"flag": int(flag)}])


def test_a_tensor_that_is_used_is_admitted_and_one_that_is_not_stays_out() -> None:
    sigma, other = torch.tensor([2.0]), torch.tensor([1.0])

    def program(options: Any) -> Any:
        kept = options["sample_sigmas"]
        return options["sigmas"] * 3, kept is None

    seen, log = captured(program, {"sigmas": sigma, "sample_sigmas": other})
    assert seen[0].item() == 6.0 and list(log.admitted) == [(0, "sigmas")]
    assert guard_of(program, {"sigmas": sigma, "sample_sigmas": other})({"sigmas": other, "sample_sigmas": sigma})


@pytest.mark.parametrize(
    "program",
    [
        lambda o: o["patch"](1),
        lambda o: o["patch"].weight,
        lambda o: torch.add(o["patch"], 1),
        lambda o: torch.cat([torch.ones(1), o["patch"]]),
        lambda o: isinstance(o["patch"], str),
        lambda o: o["patch"] == 1,
        lambda o: f"{o['patch']}",
        lambda o: next(iter(o.values()))(),
    ],
)
def test_code_and_objects_that_are_used_are_refused_by_name(program: Program) -> None:
    def somebody_s_patch(*_: Any) -> None:
        """Never called by a capture."""
        raise AssertionError

    with pytest.raises(Refused, match=r"options\['patch'\] \(.*somebody_s_patch"):
        captured(program, {"patch": somebody_s_patch})


def test_several_mappings_of_one_call_are_kept_apart() -> None:
    def program(one: Any, other: Any) -> Any:
        return one.get("scale"), "scale" in other

    check = guard_of(lambda a, b: bool(program(a, b)[0]) or program(a, b)[1], {"scale": 2}, {})
    assert check({"scale": 2}, {"name": 1})
    assert not check({}, {"scale": 2})
    assert not check({"scale": 3}, {})


def test_writes_are_kept_apart_and_read_back() -> None:
    def program(options: Any) -> Any:
        options["made"] = torch.ones(2)
        options["scale"] = 5
        copied = options.copy()
        copied["later"] = 1
        del copied["name"]
        return options["made"].sum().item(), options["scale"], "later" in options, "name" in options, "name" in copied

    content = {"scale": 1, "name": "a"}
    seen, log = captured(program, content)
    assert seen == (2.0, 5, False, True, False)
    assert content == {"scale": 1, "name": "a"}
    assert checker(to_json(log))([{"scale": 9, "name": "b"}]), "what was overwritten was not read"


def test_an_arbitrary_item_is_refused() -> None:
    with pytest.raises(Refused, match="arbitrary"):
        captured(lambda o: o.popitem(), {"scale": 1})


def test_paths_are_told_as_a_user_would_write_them() -> None:
    assert where((0, "patches_replace", "attn1", ("input", 1))) == "options['patches_replace']['attn1'][('input', 1)]"


def test_looking_stops_at_what_is_no_mapping() -> None:
    mappings: list[Any] = [{"patches": [1], "scale": {"x": None}}]
    assert look(mappings, (0, "scale", "x")) is None
    missing = look(mappings, (0, "nothing"))
    assert look(mappings, (0, "patches", "x")) is missing and look(mappings, (0, "scale", "y")) is missing


def test_a_guard_of_a_kind_unknown_here_is_an_error() -> None:
    with pytest.raises(ValueError, match="'colour'"):
        checker([["colour", [0, "x"], "blue"]])
