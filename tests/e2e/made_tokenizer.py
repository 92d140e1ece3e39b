"""A tokenizer for a harness that has none."""

import json
from pathlib import Path


def write_tokenizer(model: Path, vocabulary: int) -> None:
    """One made word a token: bench_serving counts tokens by the text that the server sends, and grammars spell it."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocabulary)}, "unk_token": "w3"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1", "unk_token": "w3"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
