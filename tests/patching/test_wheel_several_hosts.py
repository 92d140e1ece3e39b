"""SGLang's arguments by which hosts are compared are there in every release, or came later."""

import re

from deepseek_v4_sm120.sglang_patches import several_hosts
from tests.patching.wheels import content, every_release, fetch, members, since

# argument -> the first release that has it
CAME = {
    "prefill_decode_interval": "0.5.19",
    "prefill_decode_interval_min_bs": "0.5.23",
    "speculative_dspark_block_size": "0.5.16",
    "swa_prefix_tails": "0.5.21",
}


@every_release()
def test_what_decides_on_batches_is_an_argument(version):
    wheel = fetch(version)
    places = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/")
    files = [name for name in members(wheel) if name.startswith(places) and name.endswith(".py")]
    known = set(re.findall(r"^    (\w+):", "\n".join(content(wheel, name) for name in sorted(files)), re.MULTILINE))
    expected = {name for name in several_hosts.DECIDING if name not in CAME or since(version, CAME[name])}
    assert known.intersection(several_hosts.DECIDING) == expected
