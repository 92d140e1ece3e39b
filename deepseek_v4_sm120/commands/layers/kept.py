"""A checkpoint's weights on the device that judges, and what they make of a request's inputs, as long as a sublayer is
judged."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.commands.layers.record import Unjudged
from deepseek_v4_sm120.reference import model, mxfp4_moe

MOST_DRAFTS = 16  # a pass has no more rows behind the last one whose inputs stay


class Kept(model.Weights):
    """Weights on a device, whose dequantised tensors stay until `let_go`, but for the experts'; and their products with
    the requests' inputs, of which the next pass has some more, and each fault the same."""

    def __init__(self, tensors, prefix="", kept=None, device="cpu", made=None):
        super().__init__(tensors, prefix)
        self.kept, self.made, self.device = {} if kept is None else kept, {} if made is None else made, device

    def under(self, prefix):
        return Kept(self.tensors, self.prefix + prefix, self.kept, self.device, self.made)

    def product(self, name, x):
        every = self.made.setdefault(self.prefix + name, [])
        for one in every:
            rows = rows_alike(one[0], x)
            if rows == len(x):
                return one[1][:rows]
            if rows:
                one[:] = x, torch.cat([one[1][:rows], super().product(name, x[rows:])])
                return one[1]
        every.append([x, super().product(name, x)])
        return every[-1][1]

    def raw(self, name):
        if self.prefix + name not in self.tensors:
            raise Unjudged(f"the checkpoint has no {self.prefix}{name}")
        return super().raw(name).to(self.device)

    def rows(self, name, which):
        """Of a table that is large: those rows alone go to the device."""
        if self.prefix + name not in self.tensors:
            raise Unjudged(f"the checkpoint has no {self.prefix}{name}")
        if int(which.max()) >= len(self.tensors[self.prefix + name]) or int(which.min()) < 0:
            raise Unjudged("a token is none of the checkpoint's")
        return self.tensors[self.prefix + name][which.cpu()].to(self.device)

    def of_expert(self, name):
        """In float32: dequantising them was nine tenths of a layer's time, and FP4 and FP8 are exact there."""
        weight = self.raw(f"{name}.weight")
        if f"{name}.scale" not in self or weight.dtype == torch.float8_e4m3fn:
            return super().__call__(name).float()
        return mxfp4_moe.dequantize_float32(weight.view(torch.uint8), self.raw(f"{name}.scale").view(torch.uint8))

    def let_go(self) -> None:
        self.kept.clear()
        self.made.clear()

    def __call__(self, name):
        if ".experts." in self.prefix:
            return self.of_expert(name)
        if self.prefix + name not in self.kept:
            self.kept[self.prefix + name] = super().__call__(name)
        return self.kept[self.prefix + name]


def rows_alike(old: torch.Tensor, new: torch.Tensor) -> int:
    """At the beginning of both; all, all but those of the last drafts, or none."""
    if old is new:
        return len(new)
    most = min(len(old), len(new))
    tried = (most, most - MOST_DRAFTS)
    return next((rows for rows in tried if rows > 0 and torch.equal(old[:rows], new[:rows])), 0)
