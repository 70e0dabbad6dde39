"""Prompts as token ids: rendered once by the model's own chat template. Training and evaluation use the same ids."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from fastmtp.data.prompts import Prompt
from fastmtp.errors import DataError


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids up to where the assistant begins, one list per prompt.

    Raises:
        DataError: the tokenizer has no chat template, or it refuses a conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{tokenizer.name_or_path} has no chat template.", mend="Add chat_template.jinja to the model.")
    try:
        texts = [
            tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            for prompt in prompts
        ]
    except Exception as error:  # jinja raises whatever a template's author chose
        raise DataError(f"The chat template refuses a conversation: {' '.join(str(error).split())}") from error
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
