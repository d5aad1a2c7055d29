# SPDX-License-Identifier: Apache-2.0
"""The primary key: every ingredient changes it alone, and what must not matter leaves it as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nexfort_engine.cache import key

ROOT = Path(key.__file__).parents[2]
PARTS = {
    "environment": {
        "engine": "e" * 64,
        "torch": ["2.11.0", "abc", None, None],
        "device": ["cpu", "model", "f00"],
    },
    "config": "O2|dynamic",
    "class": "pkg.Block",
    "scalars": {"attn.heads": 8, "norm.eps": 1e-6, "causal": False, "name": None},
    "parameters": [("attn.weight", (64, 64), torch.bfloat16), ("bias", (64,), torch.float32)],
    "signature": ("tensor", 3, torch.float16, torch.channels_last),
}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def changed(**parts: object) -> str:
    return key.primary_key({**PARTS, **parts})


def test_the_key_is_short_hex_and_stays() -> None:
    assert key.primary_key(PARTS) == key.primary_key(dict(PARTS))
    assert len(key.primary_key(PARTS)) == 32
    int(key.primary_key(PARTS), 16)


@pytest.mark.parametrize(
    "parts",
    [
        {"environment": {**PARTS["environment"], "engine": "f" * 64}},
        {"environment": {**PARTS["environment"], "torch": ["2.11.1", "abc", None, None]}},
        {"environment": {**PARTS["environment"], "device": ["cpu", "model", "f01"]}},
        {"config": "O2"},
        {"class": "pkg.OtherBlock"},
        {"scalars": {**PARTS["scalars"], "attn.heads": 16}},
        {"scalars": {**PARTS["scalars"], "norm.eps": 1e-5}},
        {"scalars": {**PARTS["scalars"], "causal": True}},
        {"scalars": {**PARTS["scalars"], "causal": 0}},
        {"scalars": {**PARTS["scalars"], "name": "None"}},
        {"parameters": [("attn.weight", (64, 65), torch.bfloat16), ("bias", (64,), torch.float32)]},
        {"parameters": [("attn.weight", (64, 64), torch.float16), ("bias", (64,), torch.float32)]},
        {"parameters": PARTS["parameters"][::-1]},
        {"signature": ("tensor", 4, torch.float16, torch.channels_last)},
        {"signature": ("tensor", 3, torch.float16, torch.contiguous_format)},
        {"more": None},
    ],
)
def test_each_ingredient_alone_changes_the_key(parts: dict[str, object]) -> None:
    assert changed(**parts) != key.primary_key(PARTS)


def test_order_of_options_and_kind_of_sequence_do_not_matter() -> None:
    assert key.primary_key(dict(reversed(PARTS.items()))) == key.primary_key(PARTS)
    assert changed(signature=list(PARTS["signature"])) == key.primary_key(PARTS)
    assert key.primary_key({"s": {3, 1, 2}}) == key.primary_key({"s": {2, 3, 1}})


def test_another_process_gets_the_same_key() -> None:
    code = "from nexfort_engine.cache.key import primary_key as k;"
    code += "print(k({'a': {'z', 'y', 'x'}, 'b': [1.5, None]}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == key.primary_key({"b": [1.5, None], "a": {"x", "y", "z"}})


@given(plain, plain)
def test_two_values_share_a_text_only_if_they_are_the_same(left: object, right: object) -> None:
    assert (key.canonical_json(left) == key.canonical_json(right)) == (repr(left) == repr(right) or same(left, right))


def same(left: object, right: object) -> bool:
    """Equality that tells True from 1 and 1 from 1.0, and finds a NaN equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


@given(plain)
def test_the_text_is_plain_json(value: object) -> None:
    json.loads(key.canonical_json(value), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("value", "imitation"),
    [
        (b"\x01", {"$bytes": "01"}),
        (float("nan"), {"$float": "nan"}),
        (torch.float32, {"$torch": "torch.float32"}),
        ({1}, {"$set": [1]}),
        ({1: 2}, {"1": 2}),
        (torch.float32, "torch.float32"),
    ],
)
def test_a_plain_value_cannot_imitate_a_special_one(value: object, imitation: object) -> None:
    assert key.primary_key({"v": value}) != key.primary_key({"v": imitation})


@pytest.mark.parametrize("value", [object(), Path("model.safetensors"), len, torch.zeros(1), 1j])
def test_what_has_no_stable_text_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"parts\['scalars'\]\['it'\]"):
        changed(scalars={"it": value})


def test_environment_of_the_cpu_is_complete_and_not_shared() -> None:
    parts = key.environment_parts("cpu")
    assert set(parts) == {"engine", "torch", "triton", "python", "platform", "device"}
    assert parts["torch"][:2] == [torch.__version__, torch.version.git_version]
    parts["torch"] = "changed by a caller"
    assert key.environment_parts("cpu")["torch"] != "changed by a caller"
    key.primary_key(key.environment_parts("cpu"))


def test_triton_is_not_imported_for_its_version() -> None:
    code = "import sys; from nexfort_engine.cache import key; key.triton_versions()"
    code += "; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_cpu_facts_follow_model_and_flags_only(tmp_path: Path) -> None:
    def facts(text: str) -> tuple[str, str]:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        key.cpu_facts.cache_clear()
        return key.cpu_facts(str(path))

    base = facts("processor : 0\nmodel name : Fast CPU\ncpu MHz : 1\nflags : sse avx\n\nprocessor : 1\n")
    assert base[0] == "Fast CPU"
    assert facts("processor : 0\nmodel name : Fast CPU\ncpu MHz : 2\nflags : avx sse\n") == base
    assert facts("model name : Fast CPU\nflags : sse avx avx512f\n")[1] != base[1]
    assert facts("model name : Slow CPU\nflags : sse avx\n")[1] == base[1]
    key.cpu_facts.cache_clear()
    assert key.cpu_facts(str(tmp_path / "missing"))[0]


def test_the_source_hash_follows_content_and_names_of_what_shapes_artefacts(tmp_path: Path) -> None:
    def source_hash() -> str:
        key.engine_source_hash.cache_clear()
        return key.engine_source_hash(tmp_path)

    (tmp_path / "passes").mkdir()
    (tmp_path / "lower.py").write_text("a = 1\n")
    (tmp_path / "passes" / "fuse.py").write_text("b = 1\n")
    base = source_hash()
    (tmp_path / "clear_cache.py").write_text("c = 1\n")
    (tmp_path / "passes" / "notes.txt").write_text("text")
    assert source_hash() == base
    (tmp_path / "lower.py").write_bytes(b"a = 1\r\n")
    assert source_hash() == base
    (tmp_path / "passes" / "fuse.py").write_text("b = 2\n")
    other = source_hash()
    assert other != base
    (tmp_path / "passes" / "fuse.py").rename(tmp_path / "passes" / "fused.py")
    assert source_hash() not in (base, other)
    (tmp_path / "kernels").mkdir()
    renamed = source_hash()
    (tmp_path / "kernels" / "new_op.py").write_text("d = 1\n")
    assert source_hash() != renamed
    key.engine_source_hash.cache_clear()


def test_the_files_that_shape_artefacts_are_those_listed() -> None:
    """So that a file that moves, or a new one, never changes by itself what makes an artefact stale.

    Of a folder that is listed every file shapes artefacts, those that come as well.
    """
    package = Path(key.__file__).parent.parent
    listed = Path(__file__).with_name("shaping_files.txt").read_text(encoding="utf-8").split()
    folders = tuple(name for name in listed if name.endswith("/"))
    assert [name for name in key.NOT_SHAPING if name.startswith(folders)] == []
    found = {next(filter(name.startswith, folders), name) for name, _ in key.shaping_files(package)}
    assert sorted(found) == listed, "each file or its folder here, or with a reason in NOT_SHAPING"
    for name, reason in key.NOT_SHAPING.items():
        assert (package / name).exists() and (package / name).is_dir() == name.endswith("/"), name
        assert reason


def test_a_folder_that_shapes_nothing_is_that_very_folder(tmp_path: Path) -> None:
    for name in ("cache/store.py", "cache/old/store.py", "passes/cache/store.py", "cache.py", "passes/engine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [name for name, _ in key.shaping_files(tmp_path)]
    assert names == ["cache.py", "passes/cache/store.py", "passes/engine.py"]
