"""The passes of EAGLE's draft in each release: what each one's attention reads and what they guess, with ours and
without; the model's own steps are as they were."""

import dataclasses
import json

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.fixes.draft_chain import replace_decode_metadata
from tests.patching.wheels import every_release

STOCK_IS_WRONG = {"stock: each pass reads its own window": False, "stock: drafts are the recurrence's": False}


@every_release()
def test_each_pass_sees_its_own_token_and_the_drafts_before_it(version, python_interpreting):
    """Beside the recurrence computed without SGLang; without ours no pass behind the first draft has its window."""
    code = f"import json; from tests.patching.draft_passes import main; print(json.dumps(main({version!r})))"
    found = json.loads(python_interpreting(code, env={"TRITON_INTERPRET": "1"}).stdout)
    assert {name: holds for name, holds in found.items() if not holds} == STOCK_IS_WRONG and len(found) == 7


@dataclasses.dataclass
class Raw:
    seq_lens: torch.Tensor


class Backend:
    def __init__(self, steps, number=0):
        self.speculative_num_steps, self.speculative_step_id = steps, number

    def metadata(self, raw_metadata):
        return raw_metadata

    ours = replace_decode_metadata(metadata)


@pytest.mark.parametrize("case", ["the model's own step", "one draft", "another card"])
def test_it_stays_sglangs(case, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: case != "another card")
    raw = Raw(torch.tensor([5, 700]))
    assert Backend({"the model's own step": 0, "one draft": 1}.get(case, 3)).ours(raw) is raw


def test_a_graphs_lengths_are_read_not_written(monkeypatch):
    """The metadata's lengths are a buffer that all passes share, refilled before each replay."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    shared = torch.tensor([5, 700])
    told = [Backend(4, number).ours(Raw(shared)).seq_lens.tolist() for number in range(3)]
    assert told == [[6, 701], [7, 702], [8, 703]] and shared.tolist() == [5, 700]
    assert Backend(2, 0).ours(Raw(shared)).seq_lens.tolist() == [6, 701]
