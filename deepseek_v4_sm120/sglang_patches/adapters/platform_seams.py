"""DSV4_SM120_FORCE=seams: the platform predicates of single SGLang modules, made to answer as on SM120.

A validation switch: the seams that SM120 users hit are run on another GPU. The table (table.py) says which
modules are told so and which are left at the truth; nothing here is used without the switch.
"""

import functools

SM120_FACTS = {"is_sm120": True, "is_sm90": False, "is_sm100": False}


def replace_predicate(original):
    """For `is_sm120_supported` as one module imported it."""

    @functools.wraps(original)
    def is_sm120_supported(*args, **kwargs):
        return True

    return is_sm120_supported


def replace_flag(original: bool) -> bool:
    """For a module global frozen from the predicate at import."""
    return True


def replace_get_platform(original):
    """For `get_platform` as one module imported it: the three facts of SM120, the others of the machine."""

    @functools.wraps(original)
    def get_platform():
        return _Sm120Platform(original())

    return get_platform


class _Sm120Platform:
    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, fact):
        return SM120_FACTS[fact] if fact in SM120_FACTS else getattr(self._platform, fact)
