"""An answer in JSON that is no object and no list arrives, instead of a blank in its place.

0.5.23 has deepseek-recipe look for the JSON in an answer to a request with `response_format`, and write blanks for what
is around it. To recipe (0.2.0) JSON is what is in braces or brackets: of a schema for a string, one of several words, a
number or true and false, whose answer SGLang's grammar has made, nothing is left, streamed or not.

Here recipe looks where the schema is for an object or a list alone. This runs in the process that answers over HTTP,
where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_our_encoding

IN_BRACKETS = ("object", "array")


def replace_new_output_parser(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter._new_output_parser(self, request) -> what reads an answer of the request's;
    it asks response_format for nothing else."""

    @functools.wraps(original)
    def _new_output_parser(self, request):
        if is_our_encoding(self._spec) and may_be_no_container(request.response_format):
            request = copy.copy(request)
            request.response_format = None
        return original(self, request)

    return _new_output_parser


def may_be_no_container(response_format) -> bool:
    if response_format is None or response_format.type != "json_schema":
        return False
    asked = response_format.json_schema
    schema = None if asked is None else asked.schema_
    return not isinstance(schema, dict) or schema.get("type") not in IN_BRACKETS
