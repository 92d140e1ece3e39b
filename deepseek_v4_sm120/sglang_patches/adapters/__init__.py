"""SGLang's calls -> our operators: one module per operator, each with `replace_*(original) -> function`.

The words, one for each question that decides whether something is ours:

    serves    this GPU, and the model of this process (device_gate.py, models_served.py)
    keeps     this layer, decided when it is made or loaded and fixed from then on
    takes     this call, or its sizes: the operator computes it; asked at each call, by shapes and kinds only
    may_wait  this call may be put off to another of ours (waiting.py)
    is, has   facts about SGLang's objects, from which the answers are made

All else is the original's, with the very arguments.
"""

from deepseek_v4_sm120.sglang_patches.adapters import torch_compile

torch_compile.keep_out()
