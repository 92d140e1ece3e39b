"""Arguments of a required call may have the names that their tool has for them, whatever these are.

Where a call is required (`tool_choice` "required", a named tool, "any" over /v1/messages), and where any of a request's
tools is strict, XGrammar holds calls to DeepSeek-V4's syntax. Of a tool that is not strict it knows no names, and lets
[a-zA-Z_][a-zA-Z0-9_]* be written alone (XGrammar 0.2.1 and 0.2.7; SGLang 0.5.13 to 0.5.23; no thread is known). `-A`
of Claude Code's Grep, "user-id", "filter[name]" and "姓名" have no token there: the model writes another name, and the
tool lacks its argument.

Here such a call has any names but for quotes, angles and line ends, and values as before, which is also less for
XGrammar to compile. Strict tools have theirs from their schemas, as before. This runs in the process that answers over
HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

OURS = "deepseek_v4"  # what XGrammar calls our model's syntax; V3.2 and V4.1 have others
BEGIN, END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
NAME = '[^"<>\\n]+" string="(true|false)">'
INSIDE = ("format", "content", "tags", "elements")


def replace_tag(original: Callable) -> Callable:
    """For BaseFormatDetector.get_structural_tag(self, ..) -> XGrammar's StructuralTag of a request's tools, or None."""

    @functools.wraps(original)
    def get_structural_tag(self, *args, **more):
        made = original(self, *args, **more)
        if made is not None and self.get_structural_tag_name() == OURS and models_served.has_served_card():
            _free(made, any_arguments(sys.modules[type(made).__module__]))
        return made

    return get_structural_tag


def any_arguments(formats):
    """Any arguments of a call, by XGrammar's module of formats."""
    value = formats.SequenceFormat(elements=[formats.RegexFormat(pattern=NAME), formats.AnyTextFormat()])
    argument = formats.TagFormat(begin=BEGIN, content=value, end=END)
    line = formats.SequenceFormat(elements=[argument, formats.ConstStringFormat(value="\n")])
    return formats.StarFormat(content=line)


def _free(node, arguments) -> None:
    """Puts `arguments` wherever a call may have any."""
    if isinstance(node, list):
        for one in node:
            _free(one, arguments)
        return
    content = getattr(node, "content", None)
    if getattr(content, "json_schema", None) is True:
        node.content = arguments
        return
    for name in INSIDE:
        if hasattr(node, name):
            _free(getattr(node, name), arguments)
