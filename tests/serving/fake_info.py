"""What the fake server tells of itself: /server_info, /model_info and /v1/models, in the shape of its release.

tests/serving/test_server_info.py holds the names against the wheels.
"""

from __future__ import annotations

import random
import re
import time

CONTEXT, MAX_TOKENS = 131_072, 100_000
FLAGS = {"model_path": "fake/model", "tp_size": 2, "attention_backend": "dsv4"}
# what not every release tells, and what is beside the server's arguments: since which release
SINCE = {
    "status": (0, 5, 12),
    "max_total_num_tokens": (0, 5, 12),
    "max_req_input_len": (0, 5, 12),
    "internal_states": (0, 5, 12),
    "version": (0, 5, 12),
    "kv_events": (0, 5, 13),
    "grpc_port": (0, 5, 16),
    "startup_time": (0, 5, 17),
    "launch_command": (0, 5, 20),
    "frontend": (0, 5, 21),
    "hicache_object_layout": (0, 5, 23),
}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def arguments(flags: dict, port: int) -> dict:
    """Those that tools look at, and those that differ between equal servers."""
    found = {"host": "127.0.0.1", "port": port, "nccl_port": None, "dist_init_addr": None, "api_key": None}
    found |= {"random_seed": random.randrange(1 << 30), "served_model_name": FLAGS["model_path"]}
    # the context is the model's where it is not given: then this stays null
    found |= {"context_length": None, "disaggregation_bootstrap_port": port}  # as the Rust front has it
    return found | {"crash_dump_folder": None, "tokenizer_worker_num": 1} | FLAGS | flags


def server_info(version: str, flags: dict, port: int, state: dict) -> dict:
    """`state`: of the first scheduler; `flags`: arguments that were given, and what a test wants told otherwise."""
    seconds = round(random.uniform(20, 90), 2)
    told = {
        "status": "ready",
        "max_total_num_tokens": MAX_TOKENS,
        "max_req_input_len": MAX_TOKENS - 6,
        "internal_states": [{"startup_time": seconds, "last_gen_throughput": 0.0} | state],
        "version": version,
        "kv_events": None,
        "grpc_port": port + 10_000,  # as --smg-grpc-mode has it
        "startup_time": seconds,
        "launch_command": f"launch_server --port {port}",
        "frontend": "python",
        "hicache_object_layout": {"enabled": False, "reason": "Hierarchical cache is disabled"},
    }
    told = {name: value for name, value in told.items() if number(version) >= SINCE[name]}
    return told | arguments(flags, port)


def model_info(model: str) -> dict:
    return {"model_path": model, "tokenizer_path": model, "is_generation": True, "weight_version": "default",
            "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}  # fmt: skip


def models(model: str) -> dict:
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": model}
    return {"object": "list", "data": [card | {"parent": None, "max_model_len": CONTEXT}]}
