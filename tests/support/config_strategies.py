# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for modes, options and whole configurations. No test lives here."""

from __future__ import annotations

from hypothesis import strategies as st

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.options import MEMORY_FORMATS, OPTIONS, TOKENS

token_lists = st.lists(st.sampled_from(sorted(TOKENS)), min_size=1, max_size=16)
mappings = st.fixed_dictionaries(
    {"mode": token_lists.map(":".join)},
    optional={
        "dynamic": st.booleans(),
        "fullgraph": st.booleans(),
        "disable": st.booleans(),
        "memory_format": st.none() | st.sampled_from(MEMORY_FORMATS),
        "options": st.dictionaries(st.sampled_from(sorted(OPTIONS)), st.booleans()),
    },
)
configs = mappings.map(CompileConfig.parse)
