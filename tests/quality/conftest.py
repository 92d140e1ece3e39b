"""The fake server, as in tests/serving."""

from tests.serving.conftest import endpoint_of, serve  # noqa: F401
