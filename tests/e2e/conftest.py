"""Scripts of stages as forks of a Python that has what they import."""

from pathlib import Path

import pytest

from tests.loaded_python import CHILDREN, Loaded

HERE = Path(__file__).resolve().parent
# by the names that scripts have for them, whose folder is first on their path, and by those of a package
IMPORTED = ("stages", "collect", "prefill_beside", "features_engine", "shared_cards", "asyncio")
IMPORTED += ("tests.e2e.served", "tests.e2e.shortage_stage", "http.server")


@pytest.fixture(scope="session")
def stage_python(tmp_path_factory):
    """() -> (words in front of a script or -c and code, variables by which what it starts is a fork too). torch is not
    in it: a fork of so much costs more than all that these do."""
    path = (str(HERE), str(HERE.parents[1]))
    loaded = Loaded(tmp_path_factory.mktemp("stages"), *IMPORTED, path=path)
    yield lambda: (loaded.command, {CHILDREN: loaded.python})
    loaded.close()
