"""Hidden states by vLLM's own extraction, on a GPU: it writes what it computes for a prompt into files, which are read.

What vLLM 0.32 hands over is the residual stream after the last layer, before the final norm; the norm is applied here,
and a few rows are held against a forward pass of transformers before any is used. Each file names the tokens it is of,
which are compared with the row's. vLLM's connector needs CUDA.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastmtp.checkpoint import Checkpoint, open_checkpoint
from fastmtp.config import DataConfig
from fastmtp.data.engines.loading import Loader
from fastmtp.data.states import COMPARED_ROWS, StateSource, require_agreement
from fastmtp.errors import DataError, IntegrityError, ServingError
from fastmtp.families import family_of
from fastmtp.families.base import text_config
from fastmtp.native import find_head
from fastmtp.norms import floats
from fastmtp.serving import Launch, Server, serve

_POINTER = "/data/states_from"


class FinalNorm:
    """The RMSNorm after a verifier's last layer, read from its checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        base = find_head(checkpoint).embedding.key.removesuffix("embed_tokens.weight")
        entry = checkpoint.tensors[f"{base}norm.weight"]
        weight = torch.from_numpy(floats(checkpoint.read(entry), entry.dtype)).float()
        self._gain = weight + 1 if family_of(checkpoint.config).norm == "1 + w" else weight
        self._epsilon = float(text_config(checkpoint.config)["rms_norm_eps"])

    def __call__(self, states: Tensor) -> Tensor:
        """[n, H] before the norm -> [n, H] bf16 after it."""
        wide = states.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon) * self._gain).bfloat16()


def extraction_launch(checkpoint: Checkpoint, config: DataConfig, folder: Path) -> Launch:
    """How vLLM is started so that it writes the states after its last layer into `folder`."""
    layers = int(text_config(checkpoint.config)["num_hidden_layers"])
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder.resolve())},
    }  # fmt: skip
    return Launch(
        checkpoint=checkpoint.root, max_model_len=config.max_length + 1, concurrency=config.concurrency, dtype="auto",
        num_speculative_tokens=1,
        speculation={
            "method": "extract_hidden_states",
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layers]}},
        },
        server_args=("--kv-transfer-config", json.dumps(connector), *config.server_args),
    )  # fmt: skip


@contextlib.contextmanager
def extracting(loader: Loader, config: DataConfig, directory: Path) -> Iterator[StateSource]:
    """Yield who computes states; vLLM ends on leaving.

    Args:
        directory: for vLLM's log and the files it hands over.

    Raises:
        DataError: there is no GPU.
        ServingError: vLLM does not start.
    """
    if not torch.cuda.is_available():
        raise DataError(
            "vLLM hands hidden states over on a GPU only, and there is none.",
            mend="Use data.states_from: transformers.", pointer=_POINTER,
        )  # fmt: skip
    checkpoint = open_checkpoint(loader.path)
    folder = directory / "extracted"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with serve(extraction_launch(checkpoint, config, folder), directory / "vllm-states.log") as server:
            yield checked(functools.partial(extract, server, FinalNorm(checkpoint), config.concurrency), loader)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checked(source: StateSource, loader: Loader) -> StateSource:
    """A source whose first rows are held against a forward pass. It raises DataError where they differ."""
    compared = False

    def compute(rows: Sequence[Sequence[int]], on_done: Callable[[int], None]) -> list[Tensor]:
        nonlocal compared
        states = source(rows, on_done)
        if not compared:
            require_agreement(dict(enumerate(states[:COMPARED_ROWS])), loader.get(), rows, "vLLM")
            compared = True
        return states

    return compute


def extract(
    server: Server,
    norm: FinalNorm,
    concurrency: int,
    rows: Sequence[Sequence[int]],
    on_done: Callable[[int], None],
) -> list[Tensor]:
    """States [n, H] bf16 after the final norm of each row of token ids, in the order of the rows.

    Raises:
        ServingError: vLLM does not answer, or hands nothing over.
        IntegrityError: what it handed over is of other tokens.
    """
    found: dict[int, Tensor] = {}
    with (
        httpx.Client(base_url=server.url, timeout=3600, trust_env=False) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        jobs = {pool.submit(_one, client, server.model, row): place for place, row in enumerate(rows)}
        try:
            for job in as_completed(jobs):
                place = jobs[job]
                found[place] = norm(job.result())
                on_done(len(rows[place]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[place] for place in range(len(rows))]


def _one(client: httpx.Client, model: str, row: Sequence[int]) -> Tensor:
    body = {"model": model, "prompt": list(row), "max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
    try:
        reply = client.post("/v1/completions", json=body)
        reply.raise_for_status()
        path = Path((reply.json().get("kv_transfer_params") or {})["hidden_states_path"])
        states, tokens = take(path)
    except (httpx.HTTPError, KeyError, OSError, SafetensorError, ValueError) as error:
        raise ServingError(f"vLLM hands no hidden states over: {error!r}.") from error
    if tokens != list(row):
        raise IntegrityError(f"vLLM's hidden states in {path.name} are of other tokens than the row that was asked.")
    return states


def take(path: Path) -> tuple[Tensor, list[int]]:
    """States [n, H] and the n token ids that they are of, out of a file of vLLM's, which is deleted.

    Beside it lies a file that vLLM keeps locked until the states are written.
    """
    lock = path.with_name(f"{path.name}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        data = load_file(path)
    path.unlink()
    lock.unlink()
    # One layer was asked for.
    return data["hidden_states"].flatten(1), data["token_ids"].tolist()
