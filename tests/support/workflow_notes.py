# SPDX-License-Identifier: Apache-2.0
"""The note on the canvas of an example workflow: what to expect, and which file goes where."""

from __future__ import annotations

from workflow_families.family import (
    COMPILED,
    CONTROLNET,
    FLAVOURS,
    LORA,
    LOW_PRECISION,
    PLAIN,
    VAE,
    Family,
)
from workflow_families.parts import PICTURE
from workflow_graph import Graph

NOTE = """\
## {title}

**What to expect**
{expect}
**Files this workflow wants**
{files}

Any other model of the same family works as well: choose it in the loader."""
TEMPLATE = """\
## {title}

**What to expect**
- The first step compiles the model: seconds to a minute, with a bar on the green node.
- After that every size, batch and prompt runs at full speed, and after a restart as well.
- The green node says how much faster it is, once one picture was made with the node bypassed (Ctrl+B).
- A LoRA goes in front of the green node, another strength or LoRA compiles nothing again.

**Files this workflow wants**
{files}

Any other model of the same family works as well: choose it in the loader."""
NOT_COMPILED = """\
- This is the family's usual workflow without Nexfort, to compare with: queue the same seed here and there.
- To compile it, put Nexfort Compile Model last before the sampler, or open `{key}_compile_model`.
"""
EXPECT = """\
- The first step compiles the model: seconds to a minute, with progress on the sampler and in the log.
- After that every size, batch and prompt length runs at full speed. Change them: nothing compiles again.
- After a restart the compiled artefacts are loaded from disk, so the first image starts warm.
"""
SAME = """\
- The picture is the one you get without the node. To compare, bypass it (Ctrl+B) and queue the same seed.
"""
MORE = {
    COMPILED: SAME,
    VAE: f"""{SAME}\
- The VAE is compiled when it first decodes, and serves every size after that.
""",
    LORA: f"""{SAME}\
- A LoRA is weights, and weights are not compiled in: choose another one or move its strength, and nothing compiles \
again. Put the LoRA before Nexfort Compile Model.
""",
    CONTROLNET: f"""{SAME}\
- The ControlNet's own network is compiled too. Put Nexfort Compile ControlNet right behind its loader; another \
picture or strength compiles nothing again.
""",
    LOW_PRECISION: """\
- Mode `O3` computes large matmuls in 8 bits (fp8), on NVIDIA cards that have them: from the RTX 40 series and H100 \
on. Elsewhere it is `O2`, and the report says so.
- The picture changes a little. To compare, choose `O2` in the node and queue the same seed.
""",
}


def describe(graph: Graph, family: Family, flavour: str) -> None:
    """Write the note of a workflow that has all its nodes."""
    files = "\n".join(filter(None, (_files(graph), family.remark)))
    expect = NOT_COMPILED.format(key=family.key) if flavour == PLAIN else EXPECT + MORE[flavour]
    graph.note = NOTE.format(title=title(family, flavour), expect=expect, files=files)


def describe_template(graph: Graph, name: str) -> None:
    """Write the note of a template that has all its nodes."""
    graph.note = TEMPLATE.format(title=name, files=_files(graph))


def _files(graph: Graph) -> str:
    lines = [
        f"- `models/{folder}/{name}`" + (f" ([get it]({address}))" if address else "")
        for name, folder, address in dict.fromkeys(models for node in graph.nodes for models in node["models"])
    ]
    if any(node["kind"] == "LoadImage" for node in graph.nodes):
        lines.append(f"- `input/{PICTURE}`, which comes with ComfyUI; or any picture of yours")
    return "\n".join(lines)


def title(family: Family, flavour: str) -> str:
    """The workflow's name for people."""
    return f"{family.title}: {FLAVOURS[flavour]}"
