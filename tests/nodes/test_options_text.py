# SPDX-License-Identifier: Apache-2.0
"""What is said of an options text while it is typed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import served

from nexfort_engine.config.options import OPTIONS


@pytest.fixture
def told(comfyui: object) -> Any:
    """The function as the plugin's package has it."""
    served.plugin_nodes()
    return sys.modules["custom_nodes/Nexfort.nodes.options_text"].told


def test_a_word_is_completed_and_a_whole_one_is_left(told: Any) -> None:
    assert told("max-aut") == {"problem": told("max-aut")["problem"], "words": ["max-autotune"], "typed": 7}
    assert "did you mean 'max-autotune'?" in told("max-aut")["problem"]
    assert told("max-autotune") == {"problem": "", "words": [], "typed": 12}
    assert told("O3:bench")["words"] == ["benchmark", "overrides.conv_benchmark"]
    assert told("") == {"problem": "", "words": [], "typed": 0}


def test_a_name_is_found_by_any_of_its_parts_and_the_problem_is_one_sentence(told: Any) -> None:
    option = next(one for one in OPTIONS if one.startswith("quant."))
    part = option.split(".")[1]
    assert option in told('{"options": {"' + part[:-1])["words"]
    wrong = told('{"options": {"' + option + 'x": true}}')
    assert f"did you mean '{option}'?" in wrong["problem"] and "Valid" not in wrong["problem"]
    assert not told('{"options": {"' + option + '": true}}')["problem"]
