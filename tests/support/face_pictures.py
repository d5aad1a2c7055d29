# SPDX-License-Identifier: Apache-2.0
"""Pictures of the compile node in a page: in each theme, kind of nodes and width, as sheets and as a moving picture.

No test lives here. `NEXFORT_TEST_SHOTS` names the folder that keeps them; web/docs/images has those of the docs.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
from PIL import Image

WIDE, SMALL = {"width": 1440, "height": 900}, browser.SMALL
THEMES = ("dark", "light")
MARGIN = 8  # pixels around a badge
LOOK_EVERY = 0.25  # seconds
SHORTEST, LONGEST, LAST = 350, 1200, 3500  # milliseconds that a frame is shown
MOST_BYTES = 300_000
# Brings the compile node to a place that is seen in every window, and gives its rectangle in the window.
PLACE = """() => {
  const { canvas, graph } = window.app
  const node = graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  canvas.ds.scale = 1
  canvas.ds.offset = [420 - node.pos[0], 220 - node.pos[1]]
  canvas.setDirty(true, true)
  const { left, top } = canvas.canvas.getBoundingClientRect()
  return { x: left + 420 - 6, y: top + 220 - 36, width: node.size[0] + 12, height: node.size[1] + 48 }
}"""
# What the node says, and whether it is bypassed.
SAID = """() => {
  const node = window.app.graph.nodes.find((one) => one.comfyClass === 'NexfortCompileModel')
  return `${node.mode} ${document.querySelector('.nexfort-badge').textContent}`
}"""


def clip(page: Any) -> dict[str, float]:
    """Put the node where it is seen; its rectangle."""
    found = page.evaluate(PLACE)
    browser.settle(page)
    return dict(found)


def shot(page: Any, around: dict[str, float]) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(clip=around))).convert("RGB")


def looks() -> Iterator[tuple[str, bool, str, Any]]:
    """A name for each way in which a page may look, Vue nodes or not, the theme and the size of the window."""
    for vue in (False, True):
        for theme in THEMES:
            for size in (WIDE, SMALL):
                yield f"{'vue' if vue else 'canvas'}_{theme}_{size['width']}", vue, theme, size


def keep(page: Any, selector: str, size: dict[str, int], name: str) -> None:
    """Keep a picture of what of a panel is in the window, where a folder is named for it."""
    box = page.locator(selector).bounding_box()
    bottom = min(box["y"] + box["height"], size["height"])
    if shots := os.environ.get("NEXFORT_TEST_SHOTS"):
        shot(page, {**box, "height": bottom - box["y"]}).save(Path(shots) / f"{name}.png", optimize=True)


def panel(page: Any, selector: str, name: str) -> None:
    """A picture of a panel in each theme and at each width, where nothing is cut off and axe finds nothing serious."""
    for size in (WIDE, SMALL):
        page.set_viewport_size(size)
        browser.settle(page)
        assert browser.cut_off(page, selector) == [], f"{name}: {size}"
        for theme in THEMES:
            browser.set_value(page, "Comfy.ColorPalette", theme)
            browser.settle(page)
            keep(page, selector, size, f"{name}_{theme}_{size['width']}")
            assert browser.serious(page, selector) == [], f"{name}: {theme}, {size}"
    page.set_viewport_size(WIDE)


class Sheets:
    """A sheet for each look, with the badge in each state that was reached, one below the other."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Image.Image]] = {name: [] for name, *_ in looks()}
        self.said: dict[str, str] = {}

    def add(self, page: Any, state: str, *, still: Callable[[str], bool] | None = None) -> None:
        """Take the badge that is shown in every look, where axe finds nothing serious.

        still: whether the state is still the one that is meant, of one that soon ends; axe would take too long there.
        """
        self.said[state] = page.locator(browser.BADGE).first.inner_text()
        for name, vue, theme, size in looks():
            browser.set_value(page, "Comfy.VueNodes.Enabled", vue)
            browser.set_value(page, "Comfy.ColorPalette", theme)
            page.set_viewport_size(size)
            page.evaluate(PLACE)
            badge = page.locator(f"{browser.BADGE}:visible").first
            badge.wait_for()
            page.wait_for_timeout(250)  # Vue nodes are laid out after the canvas was drawn
            box = badge.bounding_box()
            if still is None:
                assert browser.serious(page, browser.BADGE) == [], f"{state}: {name}"
            else:
                assert still(badge.inner_text()), f"{state} is over: {badge.inner_text()}"
            assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"], f"{state} is not in the window: {name}"
            around = {"x": box["x"] - MARGIN, "y": box["y"] - MARGIN}
            around |= {"width": box["width"] + 2 * MARGIN, "height": box["height"] + 2 * MARGIN}
            self.rows[name].append(shot(page, around))
        browser.set_value(page, "Comfy.VueNodes.Enabled", False)
        browser.set_value(page, "Comfy.ColorPalette", "dark")
        page.set_viewport_size(browser.VIEWPORT)

    def keep(self) -> None:
        """Write the sheets, where a folder is named for them."""
        shots = os.environ.get("NEXFORT_TEST_SHOTS")
        for name, rows in self.rows.items() if shots else ():
            sheet = Image.new(
                "RGB", (max(row.width for row in rows), sum(row.height for row in rows)), rows[0].getpixel((0, 0))
            )
            top = 0
            for row in rows:
                sheet.paste(row, (0, top))
                top += row.height
            sheet.save(Path(str(shots)) / f"states_{name}.png", optimize=True)


class Movie:
    """Frames of the node, each with how long it is shown."""

    def __init__(self, page: Any) -> None:
        self.page, self.around = page, clip(page)
        self.frames: list[Image.Image] = []
        self.times: list[int] = []
        self._since = time.monotonic()
        self._said: str | None = None

    def look(self) -> None:
        """Take a frame, if the node says another thing than in the last."""
        said, now = self.page.evaluate(SAID), time.monotonic()
        if said == self._said:
            return
        browser.settle(self.page)
        frame, self._said = shot(self.page, self.around), said
        if self.frames:
            self.times.append(min(LONGEST, max(SHORTEST, round(1000 * (now - self._since)))))
        self.frames.append(frame)
        self._since = now

    def watch(self, state: str = "") -> None:
        """Take frames until the run that was queued is over, and the node says this."""
        while not self.page.evaluate("() => window.finished") or state not in str(self._said):
            self.look()
            time.sleep(LOOK_EVERY)
        self.page.wait_for_timeout(300)
        self.look()

    def write(self, file: Path) -> int:
        """Write them as an animated WebP that is shown without end; its bytes."""
        first, *others = self.frames
        times = [*self.times, LAST]
        first.save(file, save_all=True, append_images=others, duration=times, loop=0, quality=80, method=6)
        return file.stat().st_size
