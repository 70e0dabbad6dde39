"""speculators' side of bench_train_step: run by its own interpreter, with JSON of the sizes as its argument.

Prints JSON: seconds of one training step (forward and backward) after a short one to warm up, and megabytes by which
the process grew at its peak, weights included.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.core import compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig


def peak_megabytes() -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) / 1024


def build(layer: dict[str, object], steps: int) -> MTPDraftModel:
    config = MTPSpeculatorConfig(
        transformer_layer_config=AutoConfig.for_model(str(layer.pop("model_type")), **layer),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = MTPDraftModel(config)
    # As its own loading does: embedding and output head are frozen, and a second copy of the latter is dropped.
    del model.verifier_lm_head
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_("mtp_layers" in name)
    return model


def step(model: MTPDraftModel, length: int, sizes: dict[str, int]) -> float:
    ids = torch.randint(sizes["vocabulary"], (1, length))
    hidden = torch.randn(1, length, sizes["hidden"])
    mask = torch.arange(length)[None] >= length // 2
    begun = time.perf_counter()
    _, loss, _ = model(ids, hidden, loss_mask=mask, step_weights=compute_step_weights(0.6, sizes["steps"]))
    loss.backward()
    return time.perf_counter() - begun


def main(arguments: dict[str, dict[str, int]]) -> None:
    torch.manual_seed(0)
    before, sizes = peak_megabytes(), arguments["sizes"]
    model = build(dict(arguments["layer"]), sizes["steps"])
    step(model, 64, sizes)
    model.zero_grad()
    seconds = step(model, sizes["tokens"], sizes)
    print(json.dumps({"seconds": seconds, "megabytes": peak_megabytes() - before}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
