# SPDX-License-Identifier: Apache-2.0
"""The translations: every language says everything, English says what the code says, and no name goes astray."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served

from nexfort_engine.dispatch import speed

LOCALES = served.ROOT / "locales"
WEB = served.ROOT / "web"
# Calls that are given the reason why a block runs uncompiled, or why a request is refused.
REASONS = re.compile(
    r"(^|\.)(Refused|Ineligible|Unsupported|RefusedError|eager|decline|latch|_instead|_Errors)$"
    r"|refusals\.add$|ForGood\.of$"
)
REFUSED = re.compile(r"\._refused\[.*\]$")  # what such a reason is assigned to
LANGUAGES = ("en", "zh", "ja", "ko", "de", "fr", "es")
FILES = ("main", "nodeDefs", "commands", "settings")
# What is the same in every language: choices of the widgets, options, model names and commands.
TOKENS = re.compile(
    r"\{\w+\}|\{\"mode\".*\}\}|O3:benchmark|• [A-Za-z0-9_-]+(?::[a-z-]+)*|`[^`]+`"
    r"|SDXL|SD1\.5|SD3|Flux|PixArt|Wan|Qwen|H200|T2I|VAE|LoRA"
)

ONE_FORM = ("zh", "ja", "ko")  # languages whose nouns have no plural
_HAN = r"[\u3040-\u30ff\u3400-\u9fff]"
# What each language writes otherwise: marks of half the width beside its characters, quotes of another one, in French a
# mark of two parts without the space before it.
WRONG_SIGNS = {
    "en": re.compile(r"[«»„、。，：；（）！？]"),
    "zh": re.compile(rf"{_HAN} ?[,;:!?()]|[,;:!?()] ?{_HAN}|{_HAN}\.|[«»„「」]"),
    "ja": re.compile(rf"{_HAN} ?[,;:!?()]|[,;:!?()] ?{_HAN}|{_HAN}\.|[«»„“”，]"),
    "ko": re.compile(r"[«»„、。，：；（）！？]"),
    "de": re.compile(r"[«»”]|\s[:;!?]|'[a-z]*'"),
    "fr": re.compile(r"[„“”]|(?<=[^\W\d])[;!?»]|[^\W\d]:(?=\s|$)|«(?!\s)|\d%"),
    "es": re.compile(r"[„“”]|\s[:;!?]|^[^¿]*\?|^[^¡]*!"),
}

# English word -> how each language says it, as ComfyUI's own translation does where it has the word.
GLOSSARY = {
    "sampler": {
        "zh": "采样器",
        "ja": "サンプラー",
        "ko": "샘플러",
        "de": "sampler",
        "fr": "échantillonneur",
        "es": "muestreador",
    },
    "artefacts?": {"zh": "产物", "ja": "成果物", "ko": "결과물", "de": "artefakt", "fr": "artefact", "es": "artefacto"},
    "workflows?": {
        "zh": "工作流",
        "ja": "ワークフロー",
        "ko": "워크플로",
        "de": "workflow",
        "fr": "workflow",
        "es": "flujo",
    },
    "nodes?": {"zh": "节点", "ja": "ノード", "ko": "노드", "de": "node", "fr": "nœud", "es": "nodo"},
    "cache": {"zh": "缓存", "ja": "キャッシュ", "ko": "캐시", "de": "cache", "fr": "cache", "es": "caché"},
    "steps?": {"zh": "步", "ja": "ステップ", "ko": "스텝", "de": "schritt", "fr": "étape", "es": "paso"},
    "blocks?": {"zh": "块", "ja": "ブロック", "ko": "블록", "de": "bl[oö]ck", "fr": "bloc", "es": "bloque"},
}


def content(language: str, name: str) -> dict[str, Any]:
    return dict(json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8")))


def texts(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of everything in a tree."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from texts(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_there_is_a_folder_for_each_language_and_no_other() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == sorted(LANGUAGES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_language_says_everything(language: str, name: str) -> None:
    ours, english = dict(texts(content(language, name))), dict(texts(content("en", name)))
    assert [key for key in ours if not key.endswith(".one")] == [key for key in english if not key.endswith(".one")]
    assert not [key for key, text in ours.items() if not text.strip()]
    for key, text in english.items():
        if key in ours:
            assert set(TOKENS.findall(text)) == set(TOKENS.findall(ours[key])), key


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_with_a_singular_has_it_wherever_there_is_a_plural(language: str) -> None:
    keys = dict(texts(content(language, "main"))).keys()
    plural = {key.removesuffix(".other") for key in keys if key.endswith(".other")}
    singular = {key.removesuffix(".one") for key in keys if key.endswith(".one")}
    assert len(plural) > 2 and singular == (set() if language in ONE_FORM else plural)


@pytest.mark.parametrize("language", LANGUAGES)
def test_punctuation_is_that_of_the_language(language: str) -> None:
    wrong = WRONG_SIGNS[language]
    for name in FILES:
        found = {key: wrong.findall(TOKENS.sub("X", text)) for key, text in texts(content(language, name))}
        assert not {key: signs for key, signs in found.items() if signs}, name


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_the_front_end_formats_holds_none_of_its_signs(language: str) -> None:
    formatted = [text for name in ("commands", "settings") for _, text in texts(content(language, name))]
    formatted += [
        node[key] for node in content(language, "nodeDefs").values() for key in ("display_name", "description")
    ]
    assert not [text for text in formatted if set(text) & set("{}@|")]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_menu_calls_commands_by_their_names(language: str) -> None:
    """Without the plugin's name, which the menu above has."""
    english, ours = content("en", "commands"), content(language, "commands")
    wanted = {_bare(english[key]["label"]): _bare(ours[key]["label"]) for key in english}
    assert content(language, "main")["menuLabels"] == wanted
    assert not [label for key, label in wanted.items() if "Nexfort" in key + label]
    code = (WEB / "nexfort.js").read_text(encoding="utf-8")
    assert set(re.findall(r"menubarLabel: '([^']+)'", code)) == wanted.keys()


def _bare(label: str) -> str:
    bare = re.sub(r"^Nexfort\s?[:：]\s*", "", label)
    return bare[0].upper() + bare[1:]


def test_words_of_the_engine_are_not_those_of_the_nodes() -> None:
    """They are under Details of the report alone."""
    words = re.compile(r"\b(artefacts?|regions?|eager|distance)\b", re.IGNORECASE)
    for name in ("nodeDefs", "commands", "settings", "main"):
        said = {key: text for key, text in texts(content("en", name)) if not key.startswith("nexfort.report.")}
        found = {key: text for key, text in said.items() if words.search(TOKENS.sub("", text))}
        assert found.keys() <= {"nexfort.cache.region"}, found


def test_nor_are_they_those_of_reasons() -> None:
    """What is given as the reason why a block runs uncompiled, or why a request is refused."""
    words = re.compile(r"\b(artefacts?|regions?|eager|distance)\b", re.IGNORECASE)
    given, found = 0, []
    for path in sorted([*(served.ROOT / "nexfort_engine").rglob("*.py"), *(served.ROOT / "nodes").glob("*.py")]):
        said = list(_reasons_in(ast.parse(path.read_text(encoding="utf-8"))))
        given += len(said)
        found += [f"{path.name}: {text}" for text in said if words.search(text)]
    assert given > 100 and not found, found


def _reasons_in(tree: ast.AST) -> Iterator[str]:
    """The texts of what a file gives as a reason, also by a name that it assigns them to."""
    assigned: dict[str, list[str]] = {}
    given: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).extend(_sentences(node.value))
                elif REFUSED.search(ast.unparse(target)):
                    given.append(node.value)
        elif isinstance(node, ast.Call) and REASONS.search(ast.unparse(node.func)):
            given += [*node.args, *(one.value for one in node.keywords)]
    for value in given:
        yield from _sentences(value)
        for name in (one.id for one in ast.walk(value) if isinstance(one, ast.Name)):
            yield from assigned.get(name, ())


def _sentences(value: ast.expr) -> Iterator[str]:
    for one in ast.walk(value):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and " " in one.value:
            yield one.value


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_a_translation_is_one(language: str) -> None:
    english = dict(texts(content("en", "nodeDefs")))
    ours = dict(texts(content(language, "nodeDefs")))
    same = [key for key in english if not key.endswith(".name") and ours[key] == english[key]]
    assert not same


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_a_word_of_the_glossary_is_said_in_one_way(language: str, name: str) -> None:
    english, ours = dict(texts(content("en", name))), dict(texts(content(language, name)))
    other = [
        f"{key}: {word}"
        for key in english.keys() & ours.keys()
        for word, said in GLOSSARY.items()
        if re.search(rf"\b{word}\b", english[key], re.IGNORECASE)
        and not re.search(said[language], ours[key], re.IGNORECASE)
    ]
    assert not other


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui")
def test_english_says_what_the_nodes_say() -> None:
    shown = {node.define_schema().node_id: node.define_schema() for node in served.plugin_nodes().NODES}
    english = content("en", "nodeDefs")
    assert set(english) == set(shown)
    for name, schema in shown.items():
        assert english[name] == {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {one.id: {"tooltip": one.tooltip} for one in schema.inputs},
            "outputs": {
                str(slot): {"name": one.display_name, "tooltip": one.tooltip} for slot, one in enumerate(schema.outputs)
            },
        }


def test_english_says_what_the_front_end_registers() -> None:
    code = (WEB / "nexfort.js").read_text(encoding="utf-8")
    named = dict(re.findall(r"const (\w+) = '(Nexfort\.[\w.]+)'", code + (WEB / "cache_tab.js").read_text("utf-8")))
    settings = re.findall(r"id: ([\w'.]+),\s+category: .*\s+name: '([^']*)',\s+tooltip:\s+'([^']*)'", code)
    found = {
        named.get(one, one).strip("'").replace(".", "_"): {"name": name, "tooltip": tip} for one, name, tip in settings
    }
    assert found == content("en", "settings")
    commands = re.findall(r"id: '(Nexfort\.\w+)',\s+label: '([^']*)'", code)
    assert {one.replace(".", "_"): {"label": label} for one, label in commands} == content("en", "commands")


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui")
def test_the_setting_offers_the_modes_of_the_compile_nodes() -> None:
    code = (WEB / "nexfort.js").read_text(encoding="utf-8")
    (offered,) = re.findall(r"^const MODE_NAMES = \{\n(.*?)^\}$", code, re.MULTILINE | re.DOTALL)
    schemas = [node.define_schema() for node in served.plugin_nodes().NODES]
    modes = [tuple(one.options) for schema in schemas for one in schema.inputs if one.id == "mode"]
    assert len(modes) == 3
    assert re.findall(r"^  '?([\w:-]+)'?: '", offered, re.MULTILINE) == list(max(modes, key=len))


def test_every_text_of_the_panels_is_there_and_used() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted(WEB.glob("*.js")))
    keys = {re.sub(r"\.(one|other)$", "", key) for key, _ in texts(content("en", "main")["nexfort"])}
    groups = "|".join(content("en", "main")["nexfort"])
    plain = set(re.findall(rf"'((?:{groups})\.\w+)'", code)) | set(re.findall(r"\btext\('([^']+)'", code))
    assert not plain - keys, "a text without a translation"
    states = ["waiting", "compiling", "background", "warm", "compiled", "eager", "off", "disabled", "bypassed"]
    composed = {f"badge.{state}" for state in (*states, "faster", "slowerHere", "alike", "unmeasured", "slower")}
    composed |= {f"benchmark.{one}" for one in ("faster", "slower", "alike", "few")}
    composed |= {f"speed.{one}" for one in ("faster", "slower", "alike")}
    composed |= {f"speed.source.{one}" for one in (speed.VERIFIED, speed.BYPASSED, speed.FIRST_STEPS)}
    composed |= {f"cache.is.{state}" for state in ("ready", "pinned", "base")}
    composed |= {f"cache.{one}" for one in re.findall(r"'(\w+)'", code.split("const ORDERS = ")[1].split("]")[0])}
    composed |= {
        "report.loaded",
        "report.compiled",
        *(f"cache.{one}" for one in ("artefact", "sizeAndUse", "actions", "pin", "unpin", "delete")),
    }
    assert keys - plain <= composed, "a translation that nobody shows"
    assert composed <= keys


def test_how_few_steps_say_too_little_by_themselves_is_as_the_engine_counts() -> None:
    assert speed.FIRST_EAGER + speed.LEAST == 4, "of uncompiled steps, the first of which does not count"
    pages = [served.ROOT / "docs" / "nodes.md", WEB / "docs" / "NexfortCompileModel.md"]
    told = [content("en", "main")["nexfort"]["speed"]["how"], *(page.read_text(encoding="utf-8") for page in pages)]
    assert all("fewer than four" in one.lower().replace("\n", " ") for one in told)


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_file_is_written_in_one_way(language: str) -> None:
    for name in FILES:
        text = Path(LOCALES / language / f"{name}.json").read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), ensure_ascii=False, indent=2) + "\n"
