"""vLLM's hidden states: how it is started, what is made of what it hands over. The extraction itself needs a GPU."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig
from fastmtp.data.engines.extraction import FinalNorm, checked, extracting, extraction_launch, take
from fastmtp.data.engines.loading import Loader
from fastmtp.data.states import disagreement, forward_states
from fastmtp.errors import DataError
from tests.fastmtp.fixtures import MODEL_TYPES, VOCAB, write_checkpoint

DATA = DataConfig(prompts="p.jsonl", max_length=100)


@pytest.fixture(scope="module", params=[*MODEL_TYPES, "wrapped"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wrapped = request.param == "wrapped"
    place = tmp_path_factory.mktemp("m") / "m"
    return write_checkpoint(place, "qwen3.5" if wrapped else request.param, wrapped=wrapped)


def before_the_norm(model: Path, ids: list[int]) -> Tensor:
    """[n, H] after the last layer, as vLLM dumps it."""
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    found: list[Tensor] = []
    norm = verifier.base_model.get_submodule("norm")
    norm.register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0][0]))
    with torch.inference_mode():
        verifier.base_model(input_ids=torch.tensor([ids]))
    return found[0]


def test_the_final_norm_is_applied(model: Path, tmp_path: Path) -> None:
    """Case T2: what is handed over is from before the norm, what is stored from after it."""
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    raw = before_the_norm(model, ids)
    (fresh,) = forward_states(Loader(model, tmp_path, "auto").get(), [ids], 64)
    assert disagreement(FinalNorm(open_checkpoint(model))(raw), fresh) < 0.01
    assert disagreement(raw, fresh) > 0.05


def test_states_that_are_not_the_verifiers_are_refused(model: Path, tmp_path: Path) -> None:
    loader = Loader(model, tmp_path, "auto")
    rows = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26]]
    norm = FinalNorm(open_checkpoint(model))
    good = [norm(before_the_norm(model, row)) for row in rows]
    source = checked(lambda _rows, _on_done: good, loader)
    assert source(rows, lambda _tokens: None) is good
    for bad in (good[::-1], [before_the_norm(model, row) * 3 for row in rows], [states[:-1] for states in good]):
        with pytest.raises(DataError, match="that vLLM gave for row 0 are not those of a pass"):
            checked(lambda _rows, _on_done, bad=bad: bad, loader)(rows, lambda _tokens: None)  # type: ignore[misc]


def test_how_vllm_is_started(model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model)
    command = extraction_launch(checkpoint, DATA, tmp_path).command(Path("python"), 1, gpu=True)
    speculation = json.loads(command[command.index("--speculative-config") + 1])
    assert speculation["method"] == "extract_hidden_states" and speculation["num_speculative_tokens"] == 1
    # The output of the last layer: layers are counted from 0, and 0 is the embedding.
    assert speculation["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2]}
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}


def test_a_file_is_read_when_vllm_has_written_it(tmp_path: Path) -> None:
    """vLLM answers before the file is there, and keeps a second one locked until it is."""
    path, lock = tmp_path / "r.safetensors", tmp_path / "r.safetensors.lock"
    states = torch.randn(7, 1, 16).bfloat16()
    locked = threading.Event()

    def write() -> None:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            locked.set()
            time.sleep(0.2)
            save_file({"hidden_states": states, "token_ids": torch.arange(7)}, path)

    writer = threading.Thread(target=write)
    writer.start()
    locked.wait()
    found, tokens = take(path)
    writer.join()
    assert torch.equal(found, states[:, 0]) and tokens == list(range(7))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"on a GPU only.*data\.states_from: transformers"),
        extracting(Loader(model, tmp_path, "auto"), DATA, tmp_path),
    ):
        pass
