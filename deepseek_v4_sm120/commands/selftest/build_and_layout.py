"""Self-test of the compiled module and of the page layout that SGLang writes."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("build", "compiled module", _check_build, ("module",))
    yield Check("build", "kernels on this GPU", _check_kernels, ON_GPU)
    yield Check("kv_page_layout", "compiled against reference", _check_layout, ("torch", "module"))
    yield Check("kv_page_layout", "golden page", _check_golden_page)


def _check_build() -> str:
    info = extension.build_info()
    source = f"version {info['version']}, commit {info['git_commit']}"
    return f"{source}, CUDA {info['cuda_version']}, for {' '.join(info['archs'])}"


def _check_kernels() -> str:
    import torch

    kernels = extension.load().kernel_attributes()
    if not kernels:
        raise Failure("the module names no kernel")
    spilled = [kernel["name"] for kernel in kernels if kernel["local_bytes"]]
    if spilled:
        raise Failure(f"kernels with local memory (spills): {', '.join(spilled)}")
    unfit = [kernel["name"] for kernel in kernels if kernel["blocks_per_sm"] < 1]
    if unfit:
        raise Failure(f"kernels of which not one block fits a multiprocessor: {', '.join(unfit)}")
    blocks = min(kernel["blocks_per_sm"] for kernel in kernels)
    registers = max(kernel["registers"] for kernel in kernels)
    return (
        f"{torch.cuda.get_device_name()}: {len(kernels)} kernels, <= {registers} registers, >= {blocks} blocks per SM"
    )


def _check_layout() -> str:
    from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
    from deepseek_v4_sm120.reference import kv_pages

    layout = kv_page_layout()
    own_reading = {
        "nope_dim": kv_pages.NOPE_DIM,
        "rope_dim": kv_pages.ROPE_DIM,
        "head_dim": kv_pages.HEAD_DIM,
        "data_bytes": kv_pages.DATA_BYTES,
        "scale_bytes": kv_pages.SCALE_BYTES,
        "token_bytes": kv_pages.TOKEN_BYTES,
        "tile_dim": kv_pages.TILE_DIM,
        "page_align": kv_pages.PAGE_ALIGN,
    }
    wrong = [
        f"{name} {getattr(layout, name)}, not {value}"
        for name, value in own_reading.items()
        if getattr(layout, name) != value
    ]
    for page_size in (256, 64, 2):
        if layout.page_bytes(page_size) != kv_pages.page_bytes(page_size):
            wrong.append(
                f"page_bytes({page_size}) {layout.page_bytes(page_size)}, not {kv_pages.page_bytes(page_size)}"
            )
    if wrong:
        raise Failure("; ".join(wrong))
    return f"{layout.token_bytes} bytes a token, 256-token pages of {layout.page_bytes(256)} bytes"


GOLDEN_VALUES = (
    (0, 448.0),
    (1, 1.0),
    (64, 449.0),
    (65, -1.0),
    (128, 1e-4),
    (192, 17.0),
    (193, 448.0),
    (448, 1.0),
    (449, -2.0),
)
GOLDEN_BYTES = (
    (0, "7E 38"),
    (64, "76 B0"),
    (128, "7D"),
    (192, "58 7E"),
    (448, "80 3F 00 C0"),
    (576, "7F 80 69 7F 69 69 69 EE"),
)


def _check_golden_page() -> str:
    """A one-token page worked out by hand: rounding to even, round-up scales, the floor, untouched pad bytes."""
    import torch

    from deepseek_v4_sm120.reference import kv_pages

    row = torch.zeros(1, kv_pages.HEAD_DIM)
    for column, value in GOLDEN_VALUES:
        row[0, column] = value
    expected = bytearray(576) + bytearray([0xEE]) * 576
    for offset, text in GOLDEN_BYTES:
        expected[offset : offset + len(bytes.fromhex(text))] = bytes.fromhex(text)
    page = kv_pages.pack_rows(row, 1, fill=0xEE)
    got = bytes(page.as_strided((page.stride(0),), (1,)).tolist())
    wrong = [
        f"byte {at}: {got[at]:02X}, not {expected[at]:02X}" for at in range(len(expected)) if got[at] != expected[at]
    ]
    if wrong:
        raise Failure("; ".join(wrong[:4]))
    back = kv_pages.read_rows(page, torch.tensor([0]))[0, [0, 64, 192, 448, 449]].tolist()
    if back != [448.0, 448.0, 16.0, 1.0, -2.0]:
        raise Failure(f"reads back as {back}")
    return f"{len(expected)} bytes as worked out by hand"
