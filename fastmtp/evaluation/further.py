"""What an evaluation measures beside acceptance with the job's own K: losslessness, the cross-check, further K."""

from __future__ import annotations

import time

from fastmtp.checkpoint import open_checkpoint
from fastmtp.errors import FastMTPError
from fastmtp.evaluation.report import Head, Losslessness, Reference, Sweep
from fastmtp.evaluation.session import PLAIN, Session
from fastmtp.evaluation.sweep import draft_cost, sweep
from fastmtp.progress import Reporter

_NOT_COMPARED = "Greedy answers were not compared with those of vLLM without speculation"


def losslessness(session: Session) -> list[Losslessness]:
    """Greedy answers with and without speculation, where the job asks for it and there is a server for it."""
    if not session.config.lossless:
        session.warnings.append(f"{_NOT_COMPARED}: evaluate.lossless is off.")
        return []
    if not session.can_start(PLAIN):
        session.warnings.append(f"{_NOT_COMPARED}: no --plain-url was given.")
        return []
    return session.compare_with_plain()


def cross_check(session: Session, reporter: Reporter) -> Reference | None:
    """The walk over the greedy answers, where the job asks for it and some are greedy. An alarm is a warning."""
    k = session.config.num_speculative_tokens
    greedy = {
        (head, name): found
        for (head, name, temperature, tokens), found in session.found.items()
        if (temperature, tokens) == (0.0, k)
    }
    if not session.config.reference or not greedy:
        return None
    # Imported here: it loads the whole of training.
    from fastmtp.evaluation.reference import reference

    prompts = {one.name: one.ids for one in session.sets}
    answered = {
        key: [(ids, answer.token_ids) for ids, answer in zip(prompts[key[1]], found.answers, strict=True)]
        for key, found in greedy.items()
    }
    counted = {key: found.figures.measurement() for key, found in greedy.items()}
    begun = time.monotonic()
    try:
        walked = reference(session.heads["base"], session.heads, answered, counted, k, reporter)
    except FastMTPError as error:
        # vLLM's figures stand without it.
        session.warnings.append(f"No cross-check: {error}")
        return None
    finally:
        session.seconds["reference"] += time.monotonic() - begun
    session.warnings += [
        f"The walk over {walk.head}'s answers to {walk.set} parts from vLLM's counters by up to"
        f" {max(map(abs, walk.apart)):.3f} at a position; {walked.tolerance} is expected. One of them is wrong."
        for walk in walked.walks
        if walk.alarm
    ]
    return walked


def sweeps(session: Session, walked: Reference | None) -> list[Sweep]:
    """Measure the further K of the job, and find the best for each head and set. A published head is left out."""
    config = session.config
    others = [k for k in dict.fromkeys(config.sweep) if k != config.num_speculative_tokens]
    if not others:
        return []
    if not session.starts_servers:
        session.warnings.append("No further K: servers that run already have theirs.")
        return []
    lengths = {(walk.head, walk.set): walk.lengths for walk in walked.walks} if walked else {}
    swept: list[Head] = [head for head in session.heads if head != "incumbent"]
    for head in swept:
        for k in others:
            session.measure(head, k, config.temperatures[:1])
    found = []
    for head in swept:
        cost = draft_cost(open_checkpoint(session.heads[head]))
        for prompts in session.sets:
            keys = [(head, prompts.name, config.temperatures[0], k) for k in (config.num_speculative_tokens, *others)]
            best = sweep([session.found[key].figures for key in keys], cost, measured=config.speed is not None)
            by_walk = lengths.get((head, prompts.name), {}) if best.temperature == 0 else {}
            found.append(best.model_copy(update={"walked": by_walk}))
    return found
