# SPDX-License-Identifier: Apache-2.0
"""Where the plugin and a ComfyUI lie on this machine, and whether that ComfyUI was tried. It imports neither."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import sys
from pathlib import Path

NEWEST_TRIED = "0.33.0"  # ComfyUI on which the tests ran; docs/troubleshooting.md names it too


class ComfyError(RuntimeError):
    """ComfyUI is not where it should be, did not start, died, or refused a request."""


def plugin_root() -> Path | None:
    """The folder of this plugin, or None if only the engine is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "__init__.py").is_file() and (root / "nodes").is_dir() else None


def is_comfyui(path: Path) -> bool:
    """Whether `path` is the root of a ComfyUI."""
    return (path / "main.py").is_file() and (path / "comfy").is_dir()


def find_comfyui() -> tuple[Path, str] | None:
    """(root, how it was found) of a ComfyUI on this machine; ComfyError if COMFYUI_PATH names something else.

    Looked for in this order: COMFYUI_PATH, the ComfyUI in whose custom_nodes this plugin lies, the default
    workspace of comfy-cli, the workspaces in comfy-cli's configuration, ComfyUI in the home folder.
    """
    if chosen := os.environ.get("COMFYUI_PATH"):
        path = Path(chosen).expanduser().absolute()
        if not is_comfyui(path):
            raise ComfyError(
                f"COMFYUI_PATH is {path}, which has no main.py and comfy/: set it to the root of a ComfyUI"
            )
        return path, "COMFYUI_PATH"
    around = comfyui_around()
    places = [] if around is None else [(around, "the plugin lies in it")]
    places += [(path, "comfy-cli's default workspace") for path in _default_workspaces()]
    places += [(path, "comfy-cli's configuration") for path in _configured_workspaces()]
    places += [(path, "it lies in the home folder") for path in _home_folders()]
    return next(((path, how) for path, how in places if is_comfyui(path)), None)


def comfyui_around() -> Path | None:
    """The ComfyUI in whose custom_nodes this plugin lies, if any."""
    # Not resolved: a plugin that is linked into custom_nodes lies elsewhere in truth.
    plugin = Path(os.path.abspath(__file__)).parents[2]
    root = plugin.parent.parent
    return root if plugin.parent.name == "custom_nodes" and is_comfyui(root) else None


def base_around() -> Path | None:
    """The directory in whose custom_nodes this plugin lies: a ComfyUI, or what one has as its --base-directory."""
    plugin = Path(os.path.abspath(__file__)).parents[2]
    root = plugin.parent.parent
    is_base = is_comfyui(root) or any((root / name).is_dir() for name in ("models", "user", "output"))
    return root if plugin.parent.name == "custom_nodes" and is_base else None


def comfyui_cache(root: Path) -> Path:
    """Where the plugin keeps its artefacts in a ComfyUI or its base directory, unless the user directory was moved."""
    return Path(root).absolute() / "user" / "__cache" / "nexfort"


def comfyui_version(root: Path) -> str | None:
    """The version a ComfyUI states in its source, without importing it."""
    try:
        text = (root / "comfyui_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # older than that file, or damaged
        return None
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return found[1] if found else None


def untried(version: str | None) -> str | None:
    """What the report says of a ComfyUI that is newer than any that was tried; None where it is not, or is unknown."""
    try:
        from packaging.version import InvalidVersion, Version
    except ImportError:  # of other packages, which ComfyUI asks for
        return None
    try:
        is_newer = version is not None and Version(version) > Version(NEWEST_TRIED)
    except InvalidVersion:
        return None
    return f"ComfyUI {version} was not tried; the newest that was is {NEWEST_TRIED}" if is_newer else None


def _home() -> Path | None:
    with contextlib.suppress(RuntimeError):  # no home directory
        return Path.home()
    return None


def _default_workspaces() -> list[Path]:
    if (home := _home()) is None:
        return []
    return [home / "comfy" / "ComfyUI", home / "Documents" / "comfy" / "ComfyUI"]


def _home_folders() -> list[Path]:
    home = _home()
    return [] if home is None else [home / "ComfyUI", home / "Documents" / "ComfyUI"]


def _configured_workspaces() -> list[Path]:
    if (home := _home()) is None:
        return []
    folders = {
        "win32": home / "AppData" / "Local" / "comfy-cli",
        "darwin": home / "Library" / "Application Support" / "comfy-cli",
    }
    file = folders.get(sys.platform, home / ".config" / "comfy-cli") / "config.ini"
    config = configparser.ConfigParser(interpolation=None)
    try:
        config.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # somebody else's file: as good as none
        return []
    names = ("default_workspace", "recent_workspace")
    return [Path(value).expanduser() for name in names if (value := config.defaults().get(name))]
