"""Which GPUs our operators serve: asked by the adapters at call time, of the tensor's own device.

SGLang's `is_sm120_supported()` is "compute capability 12.x"; so is ours. Nothing here touches CUDA before the first
call: the answer is looked up once per device index and kept. In a process that serves another model than ours
(models_served.py) no device is served.
"""

from collections.abc import Callable

from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import models_served

SM120_MAJOR = 12
FORCED_CAPABILITY = (9, 0)  # DSV4_SM120_FORCE opens the gate from here on: what the artifact's validation cubins run on

_answers: dict[int, bool] = {}
_first_served: list[Callable[[], None]] = []


def serves_capability(capability: tuple[int, int], force: str | None) -> bool:
    """The rule itself, without a GPU."""
    return capability[0] == SM120_MAJOR or (force is not None and capability >= FORCED_CAPABILITY)


def serves(device) -> bool:
    """True if our operators serve this torch.device; False for any device that is not CUDA."""
    if device.type != "cuda" or not models_served.serves_this_process():
        return False
    return _answers[device.index] if device.index in _answers else _ask(device.index)


def serves_current_device() -> bool:
    """The same for a call that carries no tensor: the current CUDA device, False where there is none."""
    if not models_served.serves_this_process():
        return False
    import torch

    # where a device has answered, there is one
    return (bool(_answers) or torch.cuda.is_available()) and _ask(torch.cuda.current_device())


def on_first_served(callback: Callable[[], None]) -> None:
    """Call back once, when a device is first found to be served (the audit of late by-name imports hangs here)."""
    _first_served.append(callback)


def answers() -> dict[int, bool]:
    """Device index -> served, for the devices that were asked about so far."""
    return dict(_answers)


def _ask(index: int | None) -> bool:
    import torch

    if index is None:
        index = torch.cuda.current_device()
    if index not in _answers:
        _answers[index] = serves_capability(torch.cuda.get_device_capability(index), settings().force)
    if _answers[index]:
        while _first_served:
            _first_served.pop()()
    return _answers[index]
