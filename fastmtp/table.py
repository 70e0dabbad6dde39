"""The acceptance table, as Markdown: for files, Prefect artifacts and the terminal alike. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from fastmtp.protocol import Measurement


def acceptance_table(figures: Mapping[str, Measurement]) -> str:
    """A row per head: acceptance per position, mean acceptance length, drafts; then the gain of `tuned` over `base`."""
    positions = max(len(found.acceptance) for found in figures.values())
    header = ["head", *(f"position {place}" for place in range(positions)), "mean acceptance length", "drafts"]
    rows = [
        [name, *(f"{rate:.3f}" for rate in found.acceptance), f"{found.mean_acceptance_length:.3f}", str(found.drafts)]
        for name, found in figures.items()
    ]
    if "base" in figures and "tuned" in figures:
        base, tuned = figures["base"], figures["tuned"]
        gains = [after - before for before, after in zip(base.acceptance, tuned.acceptance, strict=True)]
        length = tuned.mean_acceptance_length - base.mean_acceptance_length
        rows.append(["gain", *(f"{gain:+.3f}" for gain in gains), f"{length:+.3f}", ""])
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
