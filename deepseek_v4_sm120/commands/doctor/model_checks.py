"""Which operators serve the model of a running server: what its files or its answers tell, by models_served.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from deepseek_v4_sm120.commands.doctor.finding import Finding, not_run, ok, warn
from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.patching.json_file import JsonFileError
from deepseek_v4_sm120.sglang_patches import models_served

CHECK = "model"


def findings(model_path: str | None, model_type: str | None, tp: int | None) -> Iterator[Finding]:
    """From config.json, where the server's path is a folder that is here too; else from the type that it tells."""
    try:
        config = _config(model_path, model_type)
    except JsonFileError as error:
        yield warn(CHECK, str(error), "which operators serve it is not known", "look at what the server was given")
        return
    if config is None:
        yield not_run(CHECK, f"the server does not tell its model_type; there is no config.json in {model_path} here")
        return
    other = models_served.other_model(config["model_type"])
    if other:
        cost = "SGLang's own code serves it as it would without us"
        yield warn(CHECK, f"none of the operators is for this model: {other}", cost, "")
        return
    if models_served.sees_images(config):
        yield warn(CHECK, models_served.SEES_IMAGES, "who sends images gets answers about the text", "")
    verdicts = models_served.verdicts(config, tp or 1)
    without = [f"{verdict.operator} ({verdict.why})" for verdict in verdicts if not verdict.served]
    if without:
        yield warn(CHECK, f"SGLang's own code runs in place of {'; '.join(without)}", "the time that they save", "")
    elif "hidden_size" in config:
        yield ok(CHECK, f"{config['model_type']}: {len(LIMITS)} of {len(LIMITS)} operators have its sizes")
    else:
        yield ok(CHECK, f"{config['model_type']}; its config.json is not here, so its sizes are not checked")


def _config(model_path: str | None, model_type: str | None) -> Mapping | None:
    if model_path and os.path.isfile(os.path.join(model_path, "config.json")):
        return models_served.read_config(model_path)[1]
    return {"model_type": model_type} if isinstance(model_type, str) else None
