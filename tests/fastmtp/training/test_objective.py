"""What the head would draft on rows: also at a row's end, where vLLM verifies on beyond it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.training.headfiles import HeadFiles
from tests.fastmtp.fixtures import VOCAB, write_checkpoint


@torch.inference_mode()
def test_a_draft_across_the_end_is_judged_by_what_the_verifier_would_say(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    extract(model, tmp_path / "head", Reporter("extract", quiet=True))
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    files = HeadFiles(open_checkpoint(model), tmp_path / "head")
    objective = files.objective(TrainConfig(num_steps=3), torch.device("cpu"))
    torch.manual_seed(0)
    rows, longer, lengths = [], [], []
    for length in torch.randint(6, 14, (40,)).tolist():
        ids = torch.randint(VOCAB, (length,))
        states = verifier.base_model(input_ids=ids[None]).last_hidden_state[0]
        ids_on = torch.cat([ids, verifier.lm_head(states[-1:]).argmax(-1)])
        states_on = verifier.base_model(input_ids=ids_on[None]).last_hidden_state[0]
        rows.append((ids, states, torch.arange(length) >= 2))
        longer.append((ids_on, states_on, torch.arange(length + 1) >= 2))
        lengths.append(length)
    _, hits = objective(PackedRows.pack(rows))
    _, hits_on = objective(PackedRows.pack(longer))
    across = 0
    for length, own, on in zip(lengths, hits.split(lengths), hits_on.split([n + 1 for n in lengths]), strict=True):
        for origin in range(length - 2):
            reach = min(3, length - 1 - origin)
            assert own[origin, :reach].tolist() == on[origin, :reach].tolist()
            assert not own[origin, reach:].any()
            across += int(own[origin, reach - 1]) if origin + reach + 1 == length else 0
    assert across > 0, "no draft across an end was accepted: the test shows nothing"
