"""A tool is in the prompt with the fields, and in the order, in which DeepSeek's own service writes it.

DeepSeek's encoder writes a tool as it is given: its name, its description, its parameters. Up to 0.5.22 SGLang gives it
the fields of its own record: the description first, and behind all `"strict": false`, which no client said; what was
left out is null. deepseek-recipe, which makes the prompts from 0.5.23 on, writes those three fields, whatever else a
tool has and in what order. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_render_tools(original: Callable) -> Callable:
    """For render_tools(tools) of DeepSeek-V4's encoder -> the part of the prompt that tells of the tools."""

    @functools.wraps(original)
    def render_tools(tools):
        if models_served.has_served_card():
            tools = [
                {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("parameters") or {},
                }
                for tool in tools
            ]
        return original(tools)

    return render_tools
