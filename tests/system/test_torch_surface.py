# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch and Triton that the engine uses is in a table, and the torch that runs has it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch_uses import Uses, defined

import nexfort_engine
from nexfort_engine.system import torch_private
from nexfort_engine.system.torch_private import ATTRIBUTES, KNOWN_IN, TRIED

ENGINE = Path(nexfort_engine.__file__).parent
TEXTS = {
    file.relative_to(ENGINE).as_posix(): file.read_text(encoding="utf-8")
    for file in sorted(ENGINE.rglob("*.py"))
    if file.name != "torch_private.py"
}
# private names that are neither torch's nor the engine's
OTHERS = {
    "_batch": "end of a name of a kind of modulation",
    "_c10d_functional": "the name of a namespace of operators, as text",
    "_c10d_functional_autograd": "the same",
    "_comfy_model_dtype": "of ComfyUI's layers",
    "_data": "of os.environ",
    "_distutils_hack": "a module of setuptools",
    "_dtensor": "a namespace of operators, as text",
    "_dynamic": "end of the name of a type of quantisation",
    "_get_": "begins names of torch._C that are put together; system/torch_modes.py does without those that are gone",
    "_get_cublas_": "the same",
    "_is_": "begins names that `isinstance` asks a tensor for, parameters and buffers",
    "_lowvram_function": "of ComfyUI's layers",
    "_pin_state": "of ComfyUI's layers",
    "_pins": "of ComfyUI's layers",
    "_per_tensor": "end of the name of a type of quantisation",
    "_prefetch": "of ComfyUI's layers",
    "_replace": "of named tuples",
    "_token": "end of a name of a kind of modulation",
    "_split_half": "end of the names of ComfyUI's rotary operators",
    "_v": "of ComfyUI's layers",
    "_v_": "begins the names of weights that ComfyUI keeps of its layers",
    "_v_bias": "of ComfyUI's layers",
    "_v_signature": "of ComfyUI's layers",
    "_v_weight": "of ComfyUI's layers",
    "_weightonly": "end of the name of a type of quantisation",
}
OWN = set.union(*map(defined, TEXTS.values())) - {name.rpartition(".")[2] for name in ATTRIBUTES}


def reached(name: str) -> str:
    """As much of a name as is a module, a class or the first thing in one: what an object has is no name of torch."""
    found, parts = "", name.split(".")
    for count in range(1, len(parts) + 1):
        found = ".".join(parts[:count])
        try:
            if not isinstance(torch_private.resolved(found), (ModuleType, type)):
                break
        except (ImportError, AttributeError):
            return name
    return found


def test_torch_surface() -> None:
    """A name that the engine uses and the table lacks, or has for nothing."""
    used = {reached(name): file for file, text in TEXTS.items() for name in Uses(text).names}
    # an import of a module, or of a class, whose parts have rows of their own
    above = {name for row in KNOWN_IN for name in itertools.accumulate(row.split("."), "{}.{}".format)}
    new = {name: file for name, file in used.items() if name not in above}
    assert not new, "put these into nexfort_engine/system/torch_private.py, with the versions that have them"
    gone = set(KNOWN_IN) - set(ATTRIBUTES) - set(used)
    assert not gone, "the engine uses these no more: take them out of nexfort_engine/system/torch_private.py"


def test_private_attributes_of_torchs_objects_are_in_the_table() -> None:
    used = {name: file for file, text in TEXTS.items() for name in Uses(text).attributes if name not in OWN}
    known = {name.rpartition(".")[2] for name in KNOWN_IN} | set(OTHERS)
    new = {name: file for name, file in used.items() if name not in known and not name.startswith("_nexfort")}
    assert not new, "put these into nexfort_engine/system/torch_private.py, or into OTHERS"
    gone = ({name.rpartition(".")[2] for name in ATTRIBUTES} | set(OTHERS)) - set(used)
    assert not gone, "the engine uses these no more"


def test_this_torch_has_what_is_used_of_it() -> None:
    version = torch.__version__.partition("+")[0]
    near = [one for one in TRIED if one.rpartition(".")[0] == version.rpartition(".")[0]]
    expected = [name for name, versions in KNOWN_IN.items() if near and near[0] not in versions]
    pytest.importorskip("triton", reason="some of the names are Triton's")
    assert torch_private.missing() == expected, f"torch {version} lacks these, or has them again"


@pytest.mark.parametrize(
    ("code", "names", "attributes"),
    [
        ("import torch\ntorch._C._new()", {"torch._C._new"}, set()),
        ("from torch._inductor import ir\nir.Thing.do()", {"torch._inductor.ir.Thing.do"}, set()),
        ("import torch._dynamo.config as c\nc.patch", {"torch._dynamo.config", "torch._dynamo.config.patch"}, set()),
        ("def f():\n    from torch.fx._pickler import P\n    return P", {"torch.fx._pickler.P"}, set()),
        ("import torch\naten = torch.ops.aten\naten._mm(1)", {"torch.ops.aten._mm"}, set()),
        ("import torch\ngetattr(torch._C, '_maybe', None)", {"torch._C._maybe"}, set()),
        ("import torch\nrows = [(torch.cuda, '_set', None)]", {"torch.cuda._set"}, set()),
        ("LATE = ('torch._inductor.bounds',)", {"torch._inductor.bounds"}, set()),
        ("def f(tensor):\n    return tensor._base", set(), {"_base"}),
        ("def f(tensor):\n    return hasattr(tensor, '_base')", set(), {"_base"}),
        ("import os\nos._exit(1)\n'a torch._C in a sentence'\nx.__dict__", set(), set()),
        ("import torch\ntorch.nn.Module", set(), set()),
    ],
)
def test_uses_are_found_in_each_form(code: str, names: set[str], attributes: set[str]) -> None:
    found = Uses(code)
    assert names <= found.names and found.attributes == attributes
    assert all(any(one.startswith(name) for one in names) for name in found.names), "what leads there"


def test_a_name_that_is_gone_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"torch._C._never": (), "torch._never.more": (), "torch.Tensor._never": (), "torch.nn.Module._modules": ()}
    monkeypatch.setattr(torch_private, "KNOWN_IN", rows)
    monkeypatch.setattr(torch_private, "ATTRIBUTES", ("torch.Tensor._never", "torch.nn.Module._modules"))
    assert torch_private.missing() == [*rows][:3]
