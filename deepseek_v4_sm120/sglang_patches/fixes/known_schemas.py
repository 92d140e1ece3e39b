"""The schemas of an agent's tools are judged once, not with each of its requests.

Each request over the chat API and /v1/messages has the schema of each of its tools judged against JSON Schema's own, by
jsonschema in plain Python, in the loop that answers over HTTP: some 0.5 ms for each part of a schema, whatever of it
was judged before. An agent brings all its tools with every turn, and all streams stand still meanwhile. No thread of
SGLang's is known.

Here a schema that was right is known by its text, and is not judged again; a wrong one is, with SGLang's own words.
This runs where no GPU is asked.
"""

from __future__ import annotations

import hashlib
import json

from deepseek_v4_sm120.sglang_patches import models_served

KEPT = 8192  # schemas that are known; 16 bytes of each


def replace_validator(original):
    """For jsonschema's class Draft202012Validator, by its name in SGLang's module, which asks it for
    check_schema(schema) -> None, or an error."""
    return Validator(original)


class Validator:
    def __init__(self, original):
        self.original, self.known = original, {}

    def __getattr__(self, name):
        return getattr(self.original, name)

    def check_schema(self, schema):
        if not models_served.has_served_card():
            return self.original.check_schema(schema)
        text = json.dumps(schema).encode()  # tells 1, 1.0 and true apart, which schemas do, too
        hashed = hashlib.blake2b(text, digest_size=16)
        digest = hashed.digest()
        if digest not in self.known:
            self.original.check_schema(schema)
            self.known[digest] = None
            if len(self.known) > KEPT:
                del self.known[next(iter(self.known))]
        return None
