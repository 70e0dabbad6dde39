"""Greedy answers with and without speculation, token for token.

Speculation changes how a token is computed (several positions in one pass), so that rounding may decide between two
tokens that are nearly alike. Where answers part, the server without speculation is asked how far apart the two tokens'
logits are: within rounding of the dtype either token is right, and anything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastmtp.evaluation.report import FirstDifference, Head, Losslessness

# (prompt ids, first token, second token) -> how much larger the first one's logit is, nats; none: not known.
Margin = Callable[[Sequence[int], int, int], "float | None"]

# Largest difference of logits that rounding may turn round, nats. Two units in the last place of logits between 16 and
# 32, where large models have them; float32 is bounded by the order of its sums instead.
TIE_MARGIN = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-3}


def tie_margin(dtype: str) -> float:
    """Of a dtype as vLLM names it; `auto` is the checkpoint's, which is bfloat16 for the models this is about."""
    return TIE_MARGIN.get(dtype, TIE_MARGIN["bfloat16"])


def compare(
    head: Head,
    name: str,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    margin: Margin,
    largest_tie: float,
) -> Losslessness:
    """Compare the answers of one head to one prompt set.

    Args:
        name: of the set.
        prompts: token ids.
        plain: answers without speculation, token ids.
        speculative: answers with the head drafting.
        largest_tie: margin up to which a difference is a tie, nats.
    """
    differences = [
        _first(place, prompt, one, other, margin, largest_tie)
        for place, (prompt, one, other) in enumerate(zip(prompts, plain, speculative, strict=True))
        if list(one) != list(other)
    ]
    # The worst first: errors before ties, then by margin; one that is not known is worse than any that is.
    differences.sort(key=lambda one: (one.tie, -(float("inf") if one.margin is None else one.margin)))
    return Losslessness(
        head=head, set=name, prompts=len(prompts), identical=len(prompts) - len(differences),
        ties=sum(one.tie for one in differences), tie_margin=largest_tie, differences=differences,
    )  # fmt: skip


def _first(
    place: int,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    margin: Margin,
    largest_tie: float,
) -> FirstDifference:
    """The first token at which two answers part, and whether that is a tie."""
    shorter = min(len(plain), len(speculative))
    position = next((at for at in range(shorter) if plain[at] != speculative[at]), shorter)
    one = plain[position] if position < len(plain) else None
    other = speculative[position] if position < len(speculative) else None
    # An answer that only ends earlier has no token of its own to ask about.
    apart = None if one is None or other is None else margin([*prompt, *plain[:position]], one, other)
    return FirstDifference(
        prompt=place, position=position, plain=one, speculative=other,
        margin=apart, tie=apart is not None and abs(apart) <= largest_tie,
    )  # fmt: skip


def describe(found: Losslessness) -> str:
    """What people read: how many are the same, and the worst difference."""
    text = f"{found.identical} of {found.prompts} greedy answers of {found.head} on {found.set} are those of vLLM"
    text += " without speculation"
    if found.ties:
        text += f", {found.ties} part at a tie (at most {found.tie_margin} nats)"
    if not found.errors:
        return text
    worst = found.differences[0]
    apart = "an unknown margin" if worst.margin is None else f"{worst.margin:.3f} nats"
    return (
        f"{text}, {found.errors} part by more: answer {worst.prompt}, token {worst.position}: {worst.plain} without,"
        f" {worst.speculative} with speculation, {apart} apart"
    )
