"""What `--help` says of a command's arguments."""

from __future__ import annotations

import argparse


def tell_defaults(parser: argparse.ArgumentParser) -> None:
    """Have the help of each argument say its default, where it has one and its help does not name one."""
    for action in parser._actions:
        said = action.help or ""
        none = action.default is False or action.default in (None, argparse.SUPPRESS, [])  # 0 is one
        if not none and said is not argparse.SUPPRESS and "default" not in said:
            action.help = f"{said} (default: %(default)s)".strip()
