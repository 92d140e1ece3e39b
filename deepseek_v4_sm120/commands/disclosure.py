"""What may be written and printed: no key, token or password, no escape of a terminal. Standard library only.

`redacted` is the one place that knows what a secret looks like: a value under a name that says so, in commands (strings
with shell quoting and lists of words), environments, headers, URLs, JSON and logs. It rather hides too much than too
little; numbers under names that count tokens stay.
"""

from __future__ import annotations

import re

HIDDEN = "***"
# of a server, in the environment of our commands: a command line is seen by every user of the machine
API_KEY = "SGLANG_API_KEY"  # a variable of ours for a key of theirs: SGLang itself takes --api-key
NO_SECRETS = {"", "0", "1", "true", "false", "on", "off", "yes", "no", "none", "null", HIDDEN}  # whatever the name

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALWAYS = {
    *("secret", "secrets", "credential", "credentials", "authorization", "cookie", "auth", "passcode"),
    *("apikey", "apikeys", "authtoken", "accesstoken", "accesskey", "secretkey", "privatekey"),
}
_PASSWORDS = {"password", "passwords", "passwd", "passphrase"}  # wherever they stand in a name
_NO_KEYS = {"public", "sort", "cache"}  # a public key, a sort key
_NO_TOKENS = {  # tokens of a text
    *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "stop", "start", "begin", "end", "think", "image"),
    *("video", "audio", "text", "per", "first", "next", "last", "prev", "output", "input", "prompt", "draft", "new"),
    *("max", "min", "each", "accepted", "verified", "generated", "sampled", "bonus", "target", "one", "by"),
}
_OF_ACCESS = {"api", "access", "auth", "admin", "refresh", "bearer", "secret", "private", "hf", "ssh", "id", "session"}
# names that a colon alone makes no assignment of, as in "no token: the file is empty"
_PROSE = {"token", "key", "secret", "auth", "credential", "credentials", "secrets"}
# argparse takes the beginning of a flag for the flag; the shortest that is not another one
_ABBREVIATED = {"api_key": 3, "admin_api_key": 5, "ssl_keyfile_password": 13, "watermark_key": 10}

_NAME = re.compile(
    r"""(?<![\w.-])(?P<dashes>-{0,2})(?P<name>[A-Za-z_][\w.-]*)(?P<quote>\\*["'])?"""
    r"""(?P<separator>\s+=\s+|=|\s*:\s*|,?(?:\s|\\\n)+)"""
)
_VALUE = re.compile(
    r"""(?P<escaped>\\+["']).*?(?P=escaped)"""
    r"""|(?:'(?:[^'\\]|\\.)*'|'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s"'\\;|&<>()`])+"""
    r"""|\\?["'].*""",  # a quote that nothing closes
    re.DOTALL,
)
_HEADERS = {"authorization", "proxy-authorization", "cookie", "set-cookie"}  # values of several words
_TO_END = re.compile(r"""[^"'\\\r\n]*""")  # of the quote that it stands in, or of the line
# Where no @ is left each scheme of a word would be searched for one to the word's end
_WORD = re.compile(r"""[^\s"'<>]+""")
_URL = re.compile(
    r"""(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)[^\s"'<>/@:]*(?::(?!\d+/)(?:[^\s"'<>/]*|[^\s"'<>]*?))?@"""
)
_FORMS = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"(?i)\b(bearer)((?:\s|%20)+)[^\s\"'\\,;]+", rf"\1\2{HIDDEN}"),
        (
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
            r"|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
            r"|eyJ[\w-]{8,999}\.[\w-]{8,}\.[\w-]*)",
            HIDDEN,
        ),
        (r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", rf"\1{HIDDEN}\2"),
    )
)
# controls, line separators, marks that turn the direction of writing, half characters
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def redacted(value):
    """A copy of JSON-able data or text in which secrets are `HIDDEN`."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        found = {redacted(key): _under(key, item) for key, item in value.items()}
        if isinstance(value.get("name"), str) and "value" in value:  # a flag or variable as a record
            found["value"] = _under(value["name"], value["value"])
        return found
    if isinstance(value, list | tuple):
        found = list(_words(value))
        return found if isinstance(value, list) else tuple(found)
    return value


def is_secret(name: str) -> bool:
    """Whether what stands under this name (of a variable, flag, field or header) is a secret, going by the name."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if set(words) & _PASSWORDS or words[-3:] == ["access", "key", "id"]:
        return True
    while words and (len(words[-1]) == 1 or words[-1].isdigit()):  # API_KEY_2, watermark_key_b
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else None
    if last == "key":
        return before not in _NO_KEYS if before else name == "KEY"
    if last == "token":
        return before not in _NO_TOKENS
    if last in ("keys", "tokens"):
        return before in _OF_ACCESS
    return last in _ALWAYS or (last == "pwd" and before is not None)


def _is_secret_flag(name: str) -> bool:
    plain = name.replace("-", "_").lower()
    return is_secret(name) or any(
        len(plain) >= least and whole.startswith(plain) for whole, least in _ABBREVIATED.items()
    )


def _under(name, value):
    """What stands under a name in a mapping. Numbers stay where the name is of tokens, which are counted."""
    if not isinstance(name, str) or not is_secret(name):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(key): _under(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_under(name, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and "token" in name.lower():
        return value
    return value if str(value).lower() in NO_SECRETS else HIDDEN


def _words(words):
    """A list. Where it is a command, a secret is the word behind its flag, or all that stands behind an equals sign."""
    before = ""
    for word in words:
        yield _word(before, word) if isinstance(word, str) else redacted(word)
        before = word if isinstance(word, str) else ""


def _word(before: str, word: str) -> str:
    if re.fullmatch(r"--?[A-Za-z][\w-]*", before) and _is_secret_flag(before.lstrip("-")) and word[:2] != "--":
        return word if word.lower() in NO_SECRETS else HIDDEN
    if re.fullmatch(r"-\w*c|--(\w-)?cmd|--command", before):  # a line for a shell: bash -c "KEY=... python3 ..."
        return _text(word)
    begin = re.match(r"(?:-*[A-Za-z_][\w.-]*=)+", word)  # --env=HF_TOKEN=...
    names = begin[0].split("=")[:-1] if begin else []
    for i, name in enumerate(names):
        if _is_secret_flag(name.lstrip("-")):
            is_none = word.rpartition("=")[2].lower() in NO_SECRETS
            return word if is_none else "=".join([*names[: i + 1], HIDDEN])
    header = re.match(r"([A-Za-z][\w-]*):\s*", word)
    if header and is_secret(header[1]) and header[1].lower() not in _PROSE:
        return header[0] + HIDDEN
    return _text(word)


def _without_user(word: re.Match) -> str:
    """An address without its user and password."""
    end = word[0].rfind("@") + 1
    return _URL.sub(rf"\1{HIDDEN}@", word[0][:end]) + word[0][end:]


def _text(text: str) -> str:
    if "://" in text:
        text = _WORD.sub(_without_user, text)
    for pattern, replacement in _FORMS:
        text = pattern.sub(replacement, text)
    parts, kept = [], 0
    for found in _NAME.finditer(text):
        if found.start() < kept or not _assigns(found):
            continue
        is_header = found["name"].lower() in _HEADERS and text[found.end() : found.end() + 1] not in ("'", '"', "\\")
        value = (_TO_END if is_header else _VALUE).match(text, found.end())
        inner = value[0].rstrip(",)]}") if value else ""
        is_flag = found["dashes"] and not found["separator"].strip(", \\\n\t")
        if inner.strip("\\\"' ").lower() in NO_SECRETS or (is_flag and inner.startswith("--")):
            continue
        quote = re.match(r"\\*[\"']", inner)
        around = quote[0] if quote else ""
        parts += [text[kept : found.end()], around, HIDDEN, around]
        kept = found.end() + len(inner)
    return "".join([*parts, text[kept:]])


def _assigns(found: re.Match) -> bool:
    """Whether a name with what stands behind it gives a secret its value."""
    name, separator = found["name"], found["separator"]
    if "=" in separator:
        return _is_secret_flag(name) if found["dashes"] else is_secret(name)
    if ":" in separator:
        return is_secret(name) and (found["quote"] is not None or name.lower() not in _PROSE)
    return bool(found["dashes"]) and _is_secret_flag(name)


def printable(text: str) -> str:
    """Text in which what a terminal would obey is written out (\\x1b); line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(text: str) -> str:
    """Text as it may be printed: without secrets, without controls."""
    return printable(redacted(text))
