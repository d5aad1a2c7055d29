# SPDX-License-Identifier: Apache-2.0
"""What somebody who can help needs, as one Markdown text: the reports, the machine, versions, the plugin's commit.

It holds nothing private: no path but its last part, and no name of a host. Nothing is compiled or sent for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .told import without_paths

ROOT = Path(__file__).resolve().parents[1]
ISSUES = "https://github.com/nexfort/nexfort/issues/new"
PAGE = "https://github.com/nexfort/nexfort/blob/main/docs/troubleshooting.md"
_PRIVATE = ("NEXFORT_ALLOWED_HOSTS",)  # settings that name hosts
_LONGEST = 200  # characters of a line of a file of git's


def markdown() -> str:
    """The whole text."""
    from nexfort_engine.cli import doctor
    from nexfort_engine.hosts.comfy.model import reports

    facts = doctor.collect(check=False)
    facts["settings"] = {name: value for name, value in facts["settings"].items() if name not in _PRIVATE}
    facts = {"commit": commit(ROOT) or "none: not a clone", **facts}
    told = [f"**{name}**\n{_fenced(str(report))}" for name, report in reports()]
    parts = ["## Nexfort", *(told or ["Nothing has run yet."]), "**Machine**\n" + _fenced(doctor.as_text(facts))]
    return str(without_paths("\n\n".join(parts))) + "\n"


def told() -> dict[str, Any]:
    """The text, and where it may go: the form of the repository, and the page of symptoms and cures."""
    return {"markdown": markdown(), "issues": ISSUES, "page": PAGE}


def commit(root: Path) -> str | None:
    """The commit that is checked out in a clone, read from its files; None where there is no clone."""
    folder = root / ".git"
    try:
        if folder.is_file():  # a worktree or a submodule
            folder = (root / _line(folder).removeprefix("gitdir: ")).resolve()
        head = _line(folder / "HEAD")
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = (folder / _line(folder / "commondir")).resolve() if (folder / "commondir").is_file() else folder
        if (common / name).is_file():
            return _line(common / name)
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, ValueError, IndexError):
        return None


def _line(file: Path) -> str:
    return file.read_text(encoding="utf-8").splitlines()[0][:_LONGEST]


def _fenced(text: str) -> str:
    return f"```\n{text.replace('```', '` ` `')}\n```"
