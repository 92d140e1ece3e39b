"""Tools in a namespace reach the model over /v1/responses: those of Codex's MCP servers.

Codex sends the tools of each MCP server as one entry, `{"type": "namespace", "name": .., "tools": [..]}`, whatever
server it talks to. SGLang takes such an entry from 0.5.14 on and leaves it out of the prompt without a word: the model
has none of these tools, and says so. 0.5.23 knows how to hand them over, for another model: each is a function
`namespace__name` in the prompt and in turns that come back, and a call of it is told with its namespace and its own
name, by which Codex finds it.

Here that way is taken for DeepSeek-V4, by requests that bring a namespace; all others go the way they went. This runs
in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

NAMESPACE, SHELL = "namespace", "shell"  # with the second SGLang refuses, by a word of its own


def replace_create(original: Callable) -> Callable:
    """For OpenAIServingResponses.create_responses(self, request, raw_request=None) -> an answer, its events or an
    error. `_translates_tools` of self: whether namespaces are translated, asked once for each request."""

    @functools.wraps(original)
    async def create_responses(self, request, raw_request=None):
        kinds = {tool.type for tool in request.tools}
        if NAMESPACE in kinds and SHELL not in kinds and answers_for_ours(self):
            self = copy.copy(self)
            self._translates_tools = True
        return await original(self, request, raw_request)

    return create_responses
