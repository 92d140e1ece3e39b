"""Stand-in."""

from json import loads  # noqa: F401
