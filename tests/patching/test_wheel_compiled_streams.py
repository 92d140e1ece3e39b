"""The default `compiled_streams` against the real wheels: whose it is, and what it switches."""

import re

from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS
from tests.patching.wheels import content, every_release


@every_release()
def test_a_compiled_step_is_on_one_stream_where_torch_is_2_11(version, sglang_wheel):
    """The releases of the row, SGLang's own switch, and that its attention does not ask whether it is compiled."""
    wheel = sglang_wheel(version)
    row = next(row for row in DEFAULTS if row.name == "compiled_streams")
    pinned = re.search(
        r"^Requires-Dist: torch==(\d+\.\d+)", content(wheel, f"sglang-{version}.dist-info/METADATA"), re.M
    )
    assert SpecifierSet(row.sglang, prereleases=True).contains(version) == (pinned[1] == "2.11")
    if pinned[1] != "2.11":
        return
    (switch,) = row.environment
    model = content(wheel, "sglang/srt/models/deepseek_v4.py")
    forks = re.search(r"enable_multi_stream = \(\n(.*?)\n        \)\n", model, re.S)[1]
    assert f"envs.{switch}.get()" in forks and "compile" not in forks
    assert f"{switch} = EnvBool(True)" in content(wheel, "sglang/srt/environ.py")
