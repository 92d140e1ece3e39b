"""Of a stage's file: the device, and the commit of the patch."""

import json
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def device():
    import torch

    if not torch.cuda.is_available():
        return {"name": "none", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def commit(patch):
    """Of the patch that ran, by its build; else of this checkout; None where neither says (collect.py --commit)."""
    built = read_json(patch / "deepseek_v4_sm120" / "build_info.json")
    if built:
        return built["git_commit"]
    if not (REPO / ".git").exists() or not shutil.which("git"):
        return None
    line = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True).stdout.strip() or None
