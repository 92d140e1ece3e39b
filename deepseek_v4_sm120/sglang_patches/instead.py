"""What is handed to SGLang in place of an object of its own."""


class Instead:
    """An object, some of whose attributes are others."""

    def __init__(self, original, **others):
        vars(self).update(others, _original=original)

    def __getattr__(self, name):
        return getattr(self._original, name)
