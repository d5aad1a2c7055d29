# SPDX-License-Identifier: Apache-2.0
"""What the compile nodes share: their widgets, how those become one `CompileConfig`, and the way to the engine.

It knows no model, VAE or control net, and imports the engine only when a value has to be read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from . import running
from .status import remember

if TYPE_CHECKING:
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.reporting.report import Report

log = logging.getLogger("nexfort")

CATEGORY = "model/compile"
ENGINE = "nexfort_engine.hosts.comfy.model"  # what attaches the engine to a model imports all of it
MODES = ["O2", "max-autotune", "max-optimize:max-autotune", "jit:disable-runtime-fusion"]
LOW_PRECISION = "O3"
MEMORY_FORMATS = ["channels_last", "contiguous_format"]

_MODE_TOOLTIP = """\
How much time to spend on compiling.
• O2 (recommended): fused kernels, seconds to a minute the first time.
• max-autotune: also measures which matrix kernels are fastest on this card; minutes the first time.
• max-optimize:max-autotune: the widest search; the longest first time.
• jit:disable-runtime-fusion: the shortest first time, less speed after it.
{low_precision}The picture stays the same in all {others}, and each mode is paid for once: the result is kept on disk.
Change it when a workflow has settled and you will run it often (max-autotune), or to try something (jit)."""

_LOW_PRECISION_TOOLTIP = """\
• O3: O2, and large matmuls in 8 bits (fp8) on cards that have them, from the RTX 40 series and H100 on. \
Faster where the network is large (Flux); the picture changes a little.
"""

DYNAMIC_TOOLTIP = """\
Compiled once for every resolution, batch size, frame count and prompt length.
Off: each new size is compiled for itself, which can be a little faster and costs a compile for each.
Switch it off only for a workflow that always runs at one size."""

OPTIONS_TOOLTIP = """\
For experts: a mode of the whole grammar ("O3:benchmark") or JSON such as
{"mode": "max-autotune", "options": {"overrides.conv_benchmark": true}}
What is given here replaces the widget of the same name; empty means the widgets alone decide.
The text is checked before the workflow runs, and an unknown word is answered with the nearest known one."""

ENABLED_TOOLTIP = """\
Off: the input is handed on exactly as it came in, as if the node were bypassed.
Switch it off to compare with the uncompiled result; nothing compiled is lost."""

VERIFY_TOOLTIP = """\
On: after the first step the same step is run uncompiled beside it, block by block, once for each model that is loaded.
The report shows difference and speed-up; a block further from the exact result than it should be runs uncompiled.
It costs about eight steps. Switch it on when you want to see for yourself."""

WAIT_TOOLTIP = """\
Off: what is missing is compiled in the background, and pictures are made uncompiled until it is there.
On: the first step waits until all of it is compiled, with progress shown on the sampler.
Switch it on where the first picture is to be the compiled one already. max-autotune always waits."""


def shared_inputs(*, memory_format: str, memory_format_tooltip: str, low_precision: bool = True) -> list[io.Input]:
    """The widgets after what is to be compiled, in order. Those an API workflow may leave out are optional.

    low_precision: offer the mode that computes large matmuls in fp8; not where there are none.
    """
    modes, tooltip = MODES, _MODE_TOOLTIP.format(low_precision="", others="of them")
    if low_precision:
        modes = [*MODES, LOW_PRECISION]
        tooltip = _MODE_TOOLTIP.format(low_precision=_LOW_PRECISION_TOOLTIP, others="the others")
    return [
        io.Combo.Input("mode", options=modes, default=modes[0], tooltip=tooltip),
        io.Boolean.Input("dynamic", default=True, tooltip=DYNAMIC_TOOLTIP),
        io.Combo.Input("memory_format", options=MEMORY_FORMATS, default=memory_format, tooltip=memory_format_tooltip),
        io.String.Input("options", default="", multiline=True, optional=True, advanced=True, tooltip=OPTIONS_TOOLTIP),
        io.Boolean.Input("enabled", default=True, optional=True, advanced=True, tooltip=ENABLED_TOOLTIP),
        io.Boolean.Input("verify", default=False, optional=True, advanced=True, tooltip=VERIFY_TOOLTIP),
        io.Boolean.Input("wait", default=False, optional=True, advanced=True, tooltip=WAIT_TOOLTIP),
    ]


def compiled(
    given: Any,
    attach: Callable[[Any, CompileConfig], tuple[Any, Report | None]],
    widgets: tuple[str, bool, str, str | None, bool],
    enabled: bool,
    verify: bool,
    node: type[io.ComfyNode],
) -> io.NodeOutput:
    """A node's output: what came in with the engine attached, or itself where the node is switched off.

    attach: gives what comes out and its report. widgets: mode, dynamic, memory_format, options, wait. verify: compare
    the first step with eager. node: the class that runs, whose badge is told. Raises ValueError as `read_config`.
    """
    config = read_config(*widgets) if enabled else None
    result, report = (given, None) if config is None or config.disable else attach(given, config)
    if verify and report is not None:
        from nexfort_engine.hosts.comfy.model import verify_next

        verify_next(report, once=True)
    if node.hidden is not None:
        remember(node.hidden.unique_id, node.define_schema().node_id, report)
    return io.NodeOutput(result)


def read_config(mode: str, dynamic: bool, memory_format: str, options: str | None, wait: bool = False) -> CompileConfig:
    """The config of a node's widgets, with `options` on top. wait: the first step waits for what it lacks.

    Raises ValueError with one sentence for options text that cannot be read.
    """
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.system.process_settings import waits

    text = (options or "").strip()
    CompileConfig.parse(text)  # on its own first, so that an error is about what the user wrote
    widgets: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "memory_format": memory_format}
    config = CompileConfig.parse({**widgets, **_given(text)})
    return config if wait or waits() else config.without_waiting()


def check_options(options: str | None) -> bool | str:
    """For `validate_inputs`: True, or what is wrong in one sentence. Linked text is checked when it runs."""
    try:
        config = read_config(MODES[0], True, MEMORY_FORMATS[0], options)
    except ValueError as error:
        return str(error)
    if running.server() is not None and not config.disable:
        _import_ahead()  # a prompt is checked before any of its nodes runs
    return True


def import_at_start() -> None:
    """Import the compiler as soon as ComfyUI's server starts, because its first prompt comes seconds later.

    Beside a first prompt the import takes the interpreter from what loads the models. Does nothing where there is no
    server; where its web application runs already, the check of a prompt imports.
    """

    async def begin(_: object) -> None:
        try:
            _import_ahead()
        except Exception as error:  # it would end ComfyUI, and the node will say what is wrong
            log.warning("Nexfort: the compiler is not imported at the start: %s", error, exc_info=True)

    try:
        running.server().app.on_startup.append(begin)  # type: ignore[union-attr]
    except (AttributeError, RuntimeError) as error:
        log.debug("Nexfort: the compiler is not imported at the start: %s", error)


def _import_ahead() -> None:
    """Import the compiler on threads that nobody waits for."""
    from nexfort_engine.lowering.preload import import_ahead, import_tracing_ahead
    from nexfort_engine.system.process_settings import disabled

    if not disabled():
        import_ahead()
        import_tracing_ahead([ENGINE], running.nothing_ran)


def _given(text: str) -> dict[str, Any]:
    """What checked options text sets. A key with null counts as not given, so its widget holds."""
    if not text or text == "null":
        return {}
    loaded = json.loads(text) if text[0] in '{"' else text
    given = {"mode": loaded} if isinstance(loaded, str) else loaded
    return {key: value for key, value in given.items() if value is not None}
