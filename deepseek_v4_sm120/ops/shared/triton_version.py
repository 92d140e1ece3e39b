"""The Triton that is installed, for what hangs on its version."""


def is_at_least(major: int, minor: int) -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (major, minor)
