"""A tokenizer for a harness that has none."""

import json
import string
from pathlib import Path

# those that a chat's encoder asks for when a server of 0.5.23 starts; in the places of the vocabulary's last words
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜System｜>", "<｜User｜>")
SPECIAL += ("<｜Assistant｜>", "<｜latest_reminder｜>", "｜DSML｜", "<｜image｜>")
# what JSON can be spelled with, for grammars; not what begins a made word, so that a grammar of such has one spelling.
# In the places before those
SIGNS = tuple((string.ascii_letters + string.digits + string.punctuation).replace("w", ""))


def write_tokenizer(model: Path, vocabulary: int) -> None:
    """One made word a token: bench_serving counts tokens by the text that the server sends, and grammars spell it."""
    words = vocabulary - len(SPECIAL) - len(SIGNS)
    spelled = {text: number for number, text in enumerate((*(f"w{i}" for i in range(words)), *SIGNS))}
    special = {text: len(spelled) + i for i, text in enumerate(SPECIAL)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for text, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": spelled | special, "unk_token": "w3"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1", "unk_token": "w3"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
