"""What vLLM's log says, on lines that vLLM 0.32 wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastmtp.servers.logs import Effective, cause, effective, explained, hopeless, left_out, mend, of_config

ENGINE = (
    "(EngineCore pid=6632) INFO 11-30 20:35:14 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config:"
    " model='/m', speculative_config=SpeculativeConfig(method='mtp', model='/m', num_spec_tokens=3), tokenizer='/m',"
    " dtype=torch.bfloat16, max_seq_len=267, seed=0, served_model_name=checkpoint, enable_prefix_caching=False,"
    " enable_chunked_prefill=True\n"
)
PLAIN = ENGINE.replace(
    "SpeculativeConfig(method='mtp', model='/m', num_spec_tokens=3)", "None"
).replace("caching=False", "caching=True")  # fmt: skip
CORE = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
# Line of the cause -> words of its mend.
FAILURES = {
    "(Worker pid=2) ERROR 12-01 [x.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": (
        "CUDA out of memory", "does not fit"
    ),
    "(EngineCore pid=2) ERROR 12-01 [core.py:9] ValueError: No available memory for the cache blocks. Try increasing"
    " `gpu_memory_utilization`": ("No available memory", "VLLM_CPU_KVCACHE_SPACE"),
    "ValueError: To serve at least one request with the model's max seq len (9), (2.1 GiB KV cache is needed, which is"
    " larger than the available KV cache memory (1 GiB).": ("To serve at least one", "does not fit"),
    "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization"
    " (0.9, 71.2 GiB).": ("Free memory on device", "does not fit"),
    "OSError: [Errno 98] Address already in use": ("Address already in use", "Its port is taken."),
    "ModuleNotFoundError: No module named 'vllm'": ("No module named", "`make setup`"),
    "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: [...]": (
        "FooForCausalLM", "install a version that does"
    ),
    "ValueError: Following weights were not initialized from checkpoint: {'model.fc.weight'}": (
        "model.fc.weight", "fastmtp inspect"
    ),
}  # fmt: skip


def test_what_runs_is_read_back() -> None:
    assert effective("noise\n" + ENGINE) == Effective("0.32.0", "mtp", 3, prefix_caching=False)
    assert effective(PLAIN) == Effective("0.32.0", "none", 0, prefix_caching=True)


def test_nothing_is_concluded_from_other_lines() -> None:
    assert effective("INFO engine ready\n") == Effective()
    assert of_config("9", "something else").prefix_caching is None


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_named_with_its_mend(line: str, tmp_path: Path) -> None:
    words, helps = FAILURES[line]
    log = tmp_path / "log"
    log.write_text(f"Traceback (most recent call last):\n  File x\n{line}\n{CORE}")
    text = explained(log)
    assert words in text and helps in text and str(log) in text
    assert "Engine core initialization failed" not in text and "Traceback" not in text


def test_an_engine_that_gave_up_is_not_waited_for() -> None:
    assert hopeless(CORE) and hopeless("(EngineCore pid=2) ERROR [core.py:1] EngineCore failed to start.\n")
    assert not hopeless(ENGINE)


def test_a_worker_that_could_not_allocate() -> None:
    text = (
        "(EngineCore pid=1) RuntimeError: Worker failed with error 'Available memory on node 0 (19.0/23.54 GiB) on kv"
        " cache allocation is less than requested memory for kv (4000.0 GiB). Decrease VLLM_CPU_KVCACHE_SPACE.', please"
        " check the stack trace above for the root cause\n"
    )
    assert cause(text).endswith("Decrease VLLM_CPU_KVCACHE_SPACE.'") and "does not fit" in mend(text)


def test_a_validation_error_keeps_its_reason() -> None:
    text = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
        "  Value error, max_num_batched_tokens (1) must be greater than or equal to max_num_seqs (64).\n"
        "    For further information visit https://errors.pydantic.dev\n"
    )
    assert "max_num_batched_tokens (1) must be" in cause(text)


def test_an_unknown_flag_is_shown_by_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("usage: api_server.py\napi_server.py: error: unrecognized arguments: --new-flag\n")
    text = explained(log)
    assert "unrecognized arguments: --new-flag" in text and "evaluate.server_args" in text


def test_a_dead_engine_is_the_cause_only_where_there_is_no_other() -> None:
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    assert cause(f"RuntimeError: the kernel failed\n{dead}") == "RuntimeError: the kernel failed"
    assert cause(dead).startswith("EngineDeadError")
    assert cause("INFO nothing\n") == "" and mend("INFO nothing\n") == ""


@pytest.mark.parametrize(
    "line",
    [
        "(Worker pid=3) WARNING 12-01 00:00:00 [x.py:9] Parameter mtp.fc.weight not found in params_dict, skip loading",
        "WARNING 12-01 00:00:00 [x.py:9] Some weights of the draft model were not initialized: model.fc.weight",
        "(Worker pid=3) WARNING 12-01 00:00:00 [utils.py:9] Skipping mtp.layers.0.mlp.gate.weight",
    ],
)  # fmt: skip
def test_tensors_that_were_left_out(line: str) -> None:
    """Case V1: vLLM only warns, and serves the answers without the head."""
    assert len(left_out(f"{ENGINE}{line}\n{line}\n")) == 1


def test_a_good_start_left_nothing_out() -> None:
    lines = (
        "(Worker pid=1) WARNING 11-30 20:35:49 [__init__.py:211] min_p and logit_bias parameters won't work with"
        " speculative decoding.\n"
        "(Worker pid=1) WARNING 11-30 20:35:49 [cpu_worker.py:114] libtcmalloc is not found in LD_PRELOAD.\n"
        "(Worker pid=1) INFO 11-30 20:35:54 [llm_base_proposer.py:1469] Detected MTP model. Sharing target model"
        " embedding weights with the draft model.\n"
    )
    assert left_out(lines) == []
