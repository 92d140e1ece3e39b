"""The FP8 page, by four witnesses: a page spelt by hand, the reference, the binary, and SGLang's writer."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.reference import kv_pages

SGLANG_PAGE = Path(__file__).parent / "data" / "sglang_0_5_17_page.json"


def raw_bytes(pages: torch.Tensor) -> torch.Tensor:
    """[pages, page bytes]: the memory behind a pool."""
    return pages.as_strided((pages.shape[0], pages.stride(0)), (pages.stride(0), 1))


def hand_made_rows() -> torch.Tensor:
    """Two tokens whose bytes one can work out on paper. Values repeat over a tile; 448 * s fixes the tile's scale s."""
    rows = torch.zeros(2, 512)
    rows[0, 0:4] = torch.tensor([448.0, 1.0, -1.5, 2.0**-9])  # scale 1: byte 127
    rows[0, 64:67] = torch.tensor([449.0, 1.0, -448.0])  # just above 448: scale 2, byte 128
    rows[0, 128:130] = torch.tensor([7.0, -0.015625])  # 7 = 448 / 64: scale 2^-6, byte 121
    rows[0, 192] = 1e-4  # the floor: 1e-4 / 448 = 2.23e-7 -> 2^-22, byte 105
    rows[0, 320:324] = torch.tensor([448.0, 17.0, 19.0, 25.0])  # ties to even: 17 -> 16, 19 -> 20, 25 -> 24
    rows[0, 384:386] = torch.tensor([3.5 * 2.0**20, 2.0**20])  # 448 * 2^13: byte 140
    rows[0, 448:451] = torch.tensor([1.0, -2.0, 0.333984375])  # bf16 0x3F80, 0xC000, 0x3EAB
    rows[1, 0:2] = torch.tensor([-448.0, 2.0**-10])  # half of the least subnormal: ties to even, zero
    rows[1, 511] = 3.0
    return rows


def hand_made_page() -> torch.Tensor:
    """The 1,728 bytes of a two-token page that holds hand_made_rows(), written on 0xEE."""
    page = torch.full((1728,), 0xEE, dtype=torch.uint8)
    page[0:1152] = 0

    def put(offset: int, text: str) -> None:
        data = bytes.fromhex(text)
        page[offset : offset + len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    put(0, "7E 38 BC 01")  # 448 = 1111.110, 1 = 0111.000, -1.5, least subnormal
    put(64, "76 30 F6")  # 449/2 = 224.5 -> 224, 1/2, -224
    put(128, "7E B8")  # 448, -1
    put(192, "7D")  # 1e-4 * 2^22 = 419.43 -> 416
    put(320, "7E 58 5A 5C")  # 448, 16, 20, 24
    put(384, "7E 70")  # 448, 128
    put(448, "80 3F 00 C0 AB 3E")  # rope, little-endian
    put(576, "FE 00")  # -448, 0
    put(576 + 574, "40 40")  # bf16 3.0 in the last rope place
    put(1152, "7F 80 79 69 69 7F 8C")  # token 0's exponents; a zero tile has the floor's
    put(1160, "7F 69 69 69 69 69 69")  # token 1's; bytes 1159, 1167 and 1168.. stay 0xEE
    return page


def test_golden_page():
    pages = kv_pages.new_pages(1, 2, fill=0xEE)
    kv_pages.write_rows(pages, torch.tensor([0, 1]), hand_made_rows())
    expected = hand_made_page()
    wrong = (raw_bytes(pages)[0] != expected).nonzero().flatten().tolist()
    assert not wrong, [(at, int(raw_bytes(pages)[0, at]), int(expected[at])) for at in wrong[:8]]


def test_golden_page_reads_back():
    pages = hand_made_page().as_strided((1, 2, 1, 584), (1728, 584, 584, 1))
    rows = kv_pages.read_rows(pages, torch.tensor([0, 1]))
    expected = hand_made_rows().double()
    expected[0, 64:67] = torch.tensor([448.0, 1.0, -448.0])  # 449 -> 224 * 2
    expected[0, 192] = 416 * 2.0**-22
    expected[0, 321:324] = torch.tensor([16.0, 20.0, 24.0])
    expected[1, 1] = 0
    assert torch.equal(rows, expected)


def test_exponents_0_and_255_read_as_zero_and_nan():
    pages = kv_pages.pack_rows(torch.ones(1, 512), 2)
    raw_bytes(pages)[0, 1152:1154] = torch.tensor([0, 255], dtype=torch.uint8)
    row = kv_pages.read_rows(pages, torch.tensor([0]))[0]
    assert (row[:64] == 0).all() and row[64:128].isnan().all() and (row[128:] == 1).all()


@pytest.mark.parametrize(("page_size", "expected"), [(256, 149_760), (128, 74_880), (64, 37_440), (2, 1_728)])
def test_page_bytes_as_sglang_allocates(page_size, expected):
    assert kv_pages.page_bytes(page_size) == expected


@pytest.mark.parametrize("page_size", [1, 2, 3, 48, 64, 256])
@pytest.mark.parametrize("extra_pad", [0, 576])
def test_round_trip_touches_its_own_bytes_only(page_size, extra_pad):
    stride = kv_pages.page_bytes(page_size) + extra_pad
    pages = kv_pages.new_pages(5, page_size, fill=0xAB, stride=stride)
    slots = torch.randperm(5 * page_size)[: max(2, page_size)]
    rows = torch.randn(slots.numel(), 512) * torch.exp2(torch.randint(-8, 9, (slots.numel(), 1)).float())
    kv_pages.write_rows(pages, slots, rows)
    back = kv_pages.read_rows(pages, slots)
    coarse = rows.double().abs() * 2.0**-4 + rows.abs().amax(dim=1, keepdim=True).double() * 2.0**-17
    assert ((back - rows.double()).abs() <= coarse).all()
    touched = torch.zeros(5, stride, dtype=torch.bool)
    for slot in slots.tolist():
        page, entry = divmod(slot, page_size)
        touched[page, entry * 576 : entry * 576 + 576] = True
        touched[page, page_size * 576 + entry * 8 : page_size * 576 + entry * 8 + 7] = True
    assert (raw_bytes(pages)[~touched] == 0xAB).all()
    assert (raw_bytes(pages)[touched] != 0xAB).float().mean() > 0.9


def test_page_written_by_sglang():
    recorded = json.loads(SGLANG_PAGE.read_text())

    def bytes_of(name):
        return torch.frombuffer(bytearray(base64.b64decode(recorded[name])), dtype=torch.uint8)

    rows = bytes_of("rows_bf16").view(torch.bfloat16).reshape(-1, 512)
    theirs = bytes_of("pages").reshape(-1, recorded["page_bytes"])
    slots, page_size = torch.tensor(recorded["slots"]), recorded["page_size"]
    pages = kv_pages.new_pages(theirs.shape[0], page_size, fill=recorded["fill"])
    kv_pages.write_rows(pages, slots, rows)
    assert torch.equal(raw_bytes(pages), theirs)
    view = theirs.as_strided(pages.shape, pages.stride())
    assert torch.equal(kv_pages.read_rows(view, slots), rows.double())


def test_binary_agrees_with_the_reference():
    if extension.find() is None:
        pytest.skip(f"no compiled module to compare with: {extension.explain()}")
    layout = kv_page_layout()
    assert (layout.nope_dim, layout.rope_dim, layout.head_dim) == (
        kv_pages.NOPE_DIM,
        kv_pages.ROPE_DIM,
        kv_pages.HEAD_DIM,
    )
    assert (layout.data_bytes, layout.scale_bytes, layout.token_bytes) == (
        kv_pages.DATA_BYTES,
        kv_pages.SCALE_BYTES,
        kv_pages.TOKEN_BYTES,
    )
    assert (layout.tile_dim, layout.page_align) == (kv_pages.TILE_DIM, kv_pages.PAGE_ALIGN)
    for page_size in (1, 2, 48, 64, 128, 256, 1000):
        assert layout.page_bytes(page_size) == kv_pages.page_bytes(page_size), page_size


if importlib.util.find_spec("sglang") is not None:  # elsewhere the recorded page above stands in

    @pytest.mark.gpu
    @pytest.mark.parametrize("page_size", [256, 64, 2])
    def test_sglang_kernel_writes_the_same_page(device, page_size):
        """SGLang's own Triton writer on the GPU, rounding included. Its floor is 1e-8: no tile here is near ours."""
        from sglang.kernels.ops.attention.dsv4.index_buf_accessor import _set_k_and_s_triton
        from sglang.kernels.ops.attention.dsv4.quant_k_cache import quant_to_nope_fp8_rope_bf16_pack_triton

        exponents = torch.randint(-3, 12, (1000, 1), device=device)
        rows = (torch.randn(1000, 512, device=device) * torch.exp2(exponents.float())).to(torch.bfloat16)
        ours = raw_bytes(kv_pages.pack_rows(rows, page_size, fill=0xAB))
        theirs = torch.full_like(ours, 0xAB)
        pack = quant_to_nope_fp8_rope_bf16_pack_triton(rows)
        _set_k_and_s_triton(theirs, torch.arange(1000, device=device), pack, page_size)
        assert torch.equal(ours, theirs)
