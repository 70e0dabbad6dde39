"""The prompt sets of an evaluation as token ids, rendered as training's prompts are, and the room they need."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import EvaluateConfig
from fastmtp.data.prompts import first_conversations
from fastmtp.data.rendering import Rejected, Renderer
from fastmtp.errors import DataError
from fastmtp.evaluation.measure import Prompts
from fastmtp.families.base import text_config
from fastmtp.stage import digest_of


def load_sets(model: Path, config: EvaluateConfig) -> tuple[list[Prompts], list[str]]:
    """Read and render every set.

    Returns:
        The sets in the job's order, and warnings: a sentence for each set that lost prompts, too long for the model or
        refused by its chat template, and one where prefix caching may spoil answers.

    Raises:
        DataError: a set has no usable prompt.
    """
    renderer = Renderer.of(model, config.template_args)
    shape = text_config(open_checkpoint(model).config)
    room = int(shape.get("max_position_embeddings") or 1 << 40) - beyond(config)
    found, warnings = [], []
    if config.prefix_caching and "linear_attention" in (shape.get("layer_types") or ()):
        warnings.append("Prefix caching is on: with MTP on hybrid models vLLM has given wrong answers under it.")
    for name, source in config.sets.items():
        conversations = first_conversations(config.reading(source), config.num_prompts)
        rejected: Counter[str] = Counter()
        kept: list[tuple[int, ...]] = []
        for ids in renderer.prompts_ids([(one.prompt(), one.tools) for one in conversations]):
            if isinstance(ids, Rejected):
                rejected[ids.reason] += 1
            elif len(ids) > room:
                rejected[f"longer than the {room} tokens that evaluate.max_tokens leaves"] += 1
            else:
                kept.append(tuple(ids))
        why = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common())
        if not kept:
            raise DataError(
                f"{source} has no usable prompt: {why}.", mend="Lower evaluate.max_tokens, or name other prompts.",
                pointer="/evaluate/prompts",
            )  # fmt: skip
        if rejected:
            warnings.append(f"{name}: {rejected.total()} of {len(conversations)} prompts left out: {why}.")
        found.append(Prompts(name, source, tuple(kept), digest_of(kept)))
    return found, warnings


def beyond(config: EvaluateConfig) -> int:
    """Positions that are needed after a prompt, whatever K is measured.

    Room for a whole draft after the last token: where vLLM must cut a draft short at its length limit the rates would
    sink, and 0.32's CPU kernel for gated delta nets fails.
    """
    return config.max_tokens + max(config.num_speculative_tokens, *config.sweep, 0) + 1


def max_model_len(sets: list[Prompts], config: EvaluateConfig) -> int:
    """What vLLM is started with: the longest prompt, its answer and a draft."""
    return max(len(ids) for prompts in sets for ids in prompts.ids) + beyond(config)
