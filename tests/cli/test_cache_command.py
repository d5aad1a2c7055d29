# SPDX-License-Identifier: Apache-2.0
"""The command `cache`: what each action prints, in text and JSON, what it changes on disk, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import key
from nexfort_engine.cache.entry import Entry
from nexfort_engine.cache.store import Store
from nexfort_engine.cli import main as cli
from nexfort_engine.hosts import comfy_install

ROOT = Path(cli.__file__).parents[2]
HERE = "a" * 32


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NEXFORT_CACHE_BASE", raising=False)
    return tmp_path / "cache"


def fill(root: Path, count: int, fingerprint: str = HERE) -> list[Entry]:
    made = []
    for number in range(count):
        store = Store(root)
        info = {"region": f"blocks.{number}", "kind": "Block", "family": "Flux", "fingerprint": fingerprint}
        machine = {"device": "Test Device", "torch": "2.11.0"}
        with store.stage() as staged:
            (staged / "payload" / "code.py").write_bytes(b"x" * 1000)
            made.append(store.commit(f"{number:032x}", staged, {"info": {**info, "machine": machine}}))
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, what was printed: on the standard output if it went well, else on the standard error)."""
    code = cli.main(["cache", *arguments])
    captured = capsys.readouterr()
    return code, captured.out if code == 0 else captured.err


def both(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["cache", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- which cache ---------------------------------------------------------------------------------------------


def test_path(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "path") == (0, f"{cache}\n")
    assert json.loads(run(capsys, "path", "--json")[1]) == {"path": str(cache)}
    (tmp_path / "other").mkdir()
    assert run(capsys, "path", "--dir", str(tmp_path / "other")) == (0, f"{tmp_path / 'other'}\n")
    assert not cache.exists(), "looking creates nothing"


def test_the_cache_of_a_comfyui(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEXFORT_CACHE_DIR", raising=False)
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").touch()
    expected = root / "user" / "__cache" / "nexfort"
    assert run(capsys, "path", "--comfyui", str(root)) == (0, f"{expected}\n")
    code, error = run(capsys, "path", "--comfyui", str(tmp_path))
    assert code == 1 and "found no ComfyUI" in error and "expected" in error
    monkeypatch.setattr(comfy_install, "base_around", lambda: root)
    assert run(capsys, "path") == (0, f"{expected}\n")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "chosen"))
    assert run(capsys, "path") == (0, f"{tmp_path / 'chosen'}\n")


@pytest.mark.parametrize("action", ["list", "verify", "prune", "clear", "path"])
def test_every_action_takes_a_directory_a_comfyui_and_json(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").touch()
    fill(comfy_install.comfyui_cache(root), 1)
    found = json.loads(run(capsys, action, "--comfyui", str(root), "--json")[1])
    assert found["path"] == str(comfy_install.comfyui_cache(root))
    assert json.loads(run(capsys, action, "--dir", str(tmp_path), "--json")[1])["path"] == str(tmp_path)


# -- list and show -------------------------------------------------------------------------------------------


def test_list(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "list")
    assert code == 0 and "0 artefacts" in text and str(cache) in text and not cache.exists()
    made = fill(cache, 3)
    Store(cache).note_shape(made[1], "2x4096x1536")
    Store(cache).note_shape(made[1], "1x1024x1536")
    Store(cache).pin(made[2].id)
    code, text = run(capsys, "list")
    lines = text.splitlines()
    assert code == 0 and lines[-1].startswith("3 artefacts, 2.9 KiB, in ")
    assert lines[0].split("  ")[0] == "id" and "last used" in lines[0] and "state" in lines[0]
    assert "blocks.1" in lines[2] and "Flux" in lines[2] and "1x1024x1536 (+1)" in lines[2] and "1000 B" in lines[2]
    assert "ready" in lines[1] and "pinned" in lines[3] and "never" in lines[1]
    assert len({line.index("Flux") for line in lines[1:4]}) == 1, "the columns are aligned"
    listed = json.loads(run(capsys, "list", "--json")[1])
    assert listed["path"] == str(cache) and listed["bytes"] == 3000
    assert [row["info"]["region"] for row in listed["entries"]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [row["pinned"] for row in listed["entries"]] == [False, False, True]


def test_ids_may_be_shortened_to_what_the_list_shows(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(cache, 3)
    shown = [line.split()[0] for line in run(capsys, "list")[1].splitlines()[1:4]]
    for entry, short in zip(made, shown, strict=True):
        assert entry.id.startswith(short) and len(short) < len(entry.id)
        (found,) = json.loads(run(capsys, "show", short, "--json")[1])["entries"]
        assert found["id"] == entry.id


@pytest.mark.parametrize("action", ["show", "verify", "pin", "unpin", "clear"])
@pytest.mark.parametrize("text", ["abc", "ffffffffffff", "../../etc/passwd", "", "*"])
def test_an_id_that_names_nothing_is_one_sentence(
    cache: Path, action: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(cache, 2)
    code, error = run(capsys, action, text)
    assert code == 1 and error.startswith("nexfort: ") and error.count("\n") == 1 and "Traceback" not in error
    assert len(Store(cache).entries()) == 2


def test_show_tells_all_that_is_known(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = fill(cache, 1)
    code, text = run(capsys, "show", made.id[:6])
    assert code == 0
    for word in (made.id, "blocks.0", "Flux", "Test Device", "1000 B in 1 files", "torch", "ready", str(made.path)):
        assert word in text
    (facts,) = json.loads(run(capsys, "show", made.id, "--json")[1])["entries"]
    assert facts["machine"]["device"] == "Test Device" and facts["fingerprint"] == HERE
    assert facts["files"]["code.py"][0] == 1000 and facts["problem"] is None


def test_show_names_the_altered_file(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = fill(cache, 1)
    (made.payload / "code.py").write_bytes(b"y" * 1000)
    assert "code.py" in run(capsys, "show", made.id)[1]


def test_what_is_damaged_can_be_seen_and_taken_away(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(cache, 2)
    (made[0].path / "manifest.json").write_text("{")
    code, text = run(capsys, "show", made[0].id)
    assert code == 0 and made[0].id in text and "manifest" in text
    code, text = run(capsys, "list")
    assert code == 0 and "blocks.1" in text
    assert run(capsys, "clear", made[0].id)[0] == 0
    assert [entry.id for entry in Store(cache).entries()] == [made[1].id]


def test_text_of_others_cannot_steer_a_terminal(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an entry says of itself may come from a bundle that nobody has trusted yet."""
    store = Store(cache)
    with store.stage() as staged:
        (staged / "payload" / "code.py").write_bytes(b"x")
        info = {"region": "\x1b[2Jblocks\n.0", "family": "Fl\u202eux", "machine": {"device\r": "\x07" * 500}}
        made = store.commit("0" * 32, staged, {"info": info})
    for arguments in (["list"], ["show", made.id]):
        text = run(capsys, *arguments)[1]
        assert "blocks" in text and not set(text.replace("\n", "")) & set("\x1b\r\x07\u202e")
    assert run(capsys, "list")[1].count("\n") == 3


def test_the_base_cache_is_listed_below(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (below,) = fill(tmp_path / "base", 1)
    monkeypatch.setenv("NEXFORT_CACHE_BASE", str(tmp_path / "base"))
    listed = json.loads(run(capsys, "list", "--json")[1])
    assert listed["base"] == str(tmp_path / "base")
    if listed["base_problem"] is None:  # who may own a base cache is the store's business
        assert [(row["id"], row["base"]) for row in listed["entries"]] == [(below.id, True)]
        assert "base cache: " in run(capsys, "list")[1]
        code, error = run(capsys, "pin", below.id)
        assert code == 1 and "base cache" in error and "Errno" not in error
    cache.mkdir(mode=0o700)
    assert "base" not in json.loads(run(capsys, "list", "--json", "--dir", str(cache))[1])


def test_listing_loads_no_torch(cache: Path) -> None:
    fill(cache, 1)
    command = [sys.executable, "-X", "importtime", "-m", "nexfort_engine", "cache", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(json.loads(done.stdout)["entries"]) == 1
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "triton", "comfy", "diffusers"}


# -- verify --------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte_and_changes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(cache, 3)
    assert run(capsys, "verify")[1].startswith("3 artefacts checked, none with a problem")
    file = made[1].payload / "code.py"
    file.write_bytes(b"x" * 999 + b"y")
    code, text, _ = both(capsys, "verify")
    assert code == 1 and made[1].id in text and "code.py" in text and "1 with a problem" in text
    code, text, _ = both(capsys, "verify", "--json")
    found = json.loads(text)
    assert code == 1 and found["checked"] == 3 and list(found["problems"]) == [made[1].id]
    assert file.read_bytes().endswith(b"y") and (cache / "entries").is_dir()
    assert both(capsys, "verify", made[0].id)[0] == 0, "only the one that was named"
    assert both(capsys, "verify", made[1].id)[0] == 1


# -- prune, pin, clear ---------------------------------------------------------------------------------------


def test_prune_and_clear(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache, 4)
    code, text = run(capsys, "prune", "--max-size", "2KiB")
    assert code == 0 and text.startswith("2 artefacts removed")
    assert run(capsys, "prune")[1].startswith("0 artefacts removed")
    removed = json.loads(run(capsys, "clear", "--json")[1])
    assert removed == {"path": str(cache), "removed": 2, "bytes": 2000, "pinned": 0}
    assert Store(cache).entries() == []
    assert run(capsys, "clear")[0] == 0


def test_pinned_artefacts_stay_until_they_are_meant(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(cache, 3)
    assert run(capsys, "pin", made[0].id[:8], made[1].id)[1] == f"{made[0].id} pinned\n{made[1].id} pinned\n"
    assert json.loads(run(capsys, "unpin", made[1].id, "--json")[1])["unpinned"] == [made[1].id]
    assert "1 pinned ones stay" in run(capsys, "prune", "--max-size", "0")[1]
    assert [entry.id for entry in Store(cache).entries()] == [made[0].id]
    assert run(capsys, "clear")[1].startswith("0 artefacts removed")
    assert run(capsys, "clear", "--pinned")[1].startswith("1 artefacts removed")


def test_clear_takes_exactly_what_is_named(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(cache, 3)
    run(capsys, "pin", made[1].id)
    assert run(capsys, "clear", made[1].id[:10])[1].startswith("1 artefacts removed")
    assert {entry.id for entry in Store(cache).entries()} == {made[0].id, made[2].id}


def test_the_old_name_of_clear(cache: Path) -> None:
    fill(cache, 2)
    done = subprocess.run(
        [sys.executable, "-m", "nexfort_engine.clear_cache", "--json"],
        capture_output=True, text=True, cwd=ROOT, check=True, env={**os.environ, "NEXFORT_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert json.loads(done.stdout)["removed"] == 2 and Store(cache).entries() == []


def test_a_cache_that_cannot_be_changed_is_one_sentence(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(mode=0o700)
    (cache / "staging").write_text("in the way")
    (cache / "staging").chmod(0o600)
    code, error = run(capsys, "clear")
    assert code == 1 and "cannot be written" in error and "NEXFORT_CACHE_DIR" in error and "Traceback" not in error
    assert f"found a file at {cache / 'staging'}, expected a directory" in error
    assert (cache / "staging").read_text() == "in the way"
    assert run(capsys, "list")[0] == 0


# -- export and import ---------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose fingerprint is HERE."""
    monkeypatch.setattr(key, "fingerprints", lambda: {HERE: "Test Device"})


def test_export_and_import_carry_artefacts(
    cache: Path, tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fill(cache, 3)
    bundle = tmp_path / "warm.nexfort"
    told = json.loads(run(capsys, "export", str(bundle), made[0].id[:8], made[2].id, "--json")[1])
    assert told["file"] == str(bundle) and told["entries"] == 2 and told["bytes"] == 2000 and bundle.is_file()
    other = str(tmp_path / "other")
    code, text = run(capsys, "import", str(bundle), "--trust", "--dir", other)
    assert code == 0 and "2 artefacts" in text and "it fits" in text and "imported" in text
    assert {entry.id for entry in Store(other).entries()} == {made[0].id, made[2].id}
    assert both(capsys, "verify", "--dir", other)[0] == 0
    again = json.loads(run(capsys, "import", str(bundle), "--trust", "--dir", other, "--json")[1])
    assert again["kept"] == 2, "those that are there stay"


def test_without_trust_it_only_shows(cache: Path, tmp_path: Path, here: None, capsys: Any) -> None:
    fill(cache, 2)
    bundle, other = tmp_path / "warm.nexfort", tmp_path / "other"
    assert run(capsys, "export", str(bundle))[0] == 0
    code, text, error = both(capsys, "import", str(bundle), "--dir", str(other))
    assert code == 1 and not other.exists()
    assert "blocks.0" in text and "blocks.1" in text and "Test Device" in text and "2 artefacts" in text
    assert "--trust" in error and "A bundle is code" in error and "Errno" not in error
    code, text, error = both(capsys, "import", str(bundle), "--dir", str(other), "--json")
    shown = json.loads(text)
    assert code == 1 and "--trust" in error
    assert shown["imported"] == 0 and shown["this_machine"] is True and len(shown["entries"]) == 2


def test_a_bundle_for_another_machine_is_refused(cache: Path, tmp_path: Path, here: None, capsys: Any) -> None:
    fill(cache, 1, fingerprint="b" * 32)
    bundle, other = tmp_path / "warm.nexfort", tmp_path / "other"
    assert run(capsys, "export", str(bundle))[0] == 0
    code, text, _ = both(capsys, "import", str(bundle), "--dir", str(other))
    assert code == 1 and "does NOT fit" in text
    code, _, error = both(capsys, "import", str(bundle), "--trust", "--dir", str(other))
    assert code == 1 and "Test Device" in error and "Traceback" not in error
    assert not Store(other).entries()


@pytest.mark.parametrize("content", [b"", b"no tar", b"\0" * 10240])
def test_what_is_no_bundle_is_one_sentence(tmp_path: Path, here: None, capsys: Any, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    code, _, error = both(capsys, "import", str(tmp_path / "bad"), "--trust", "--dir", str(tmp_path / "other"))
    assert code == 1 and error.count("\n") == 1 and error.startswith("nexfort: ")
    assert both(capsys, "import", str(tmp_path / "missing"), "--dir", str(tmp_path / "other"))[0] == 1


def test_an_altered_byte_is_never_imported(cache: Path, tmp_path: Path, here: None, capsys: Any) -> None:
    fill(cache, 1)
    bundle, other = tmp_path / "warm.nexfort", tmp_path / "other"
    run(capsys, "export", str(bundle))
    with tarfile.open(bundle) as opened:
        place = opened.getmembers()[-1].offset_data
    whole = bytearray(bundle.read_bytes())
    whole[place] ^= 1
    bundle.write_bytes(whole)
    assert both(capsys, "import", str(bundle), "--trust", "--dir", str(other))[0] == 1
    assert not Store(other).entries()


def test_fingerprints_of_this_machine_are_asked_for(cache: Path, tmp_path: Path, capsys: Any) -> None:
    fill(cache, 1, fingerprint=next(iter(key.fingerprints())))
    bundle, other = tmp_path / "warm.nexfort", tmp_path / "other"
    run(capsys, "export", str(bundle))
    assert both(capsys, "import", str(bundle), "--trust", "--dir", str(other))[0] == 0
    assert len(Store(other).entries()) == 1
