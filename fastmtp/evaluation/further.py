"""What an evaluation measures beside acceptance with the job's own K: losslessness, the cross-check, K, speed."""

from __future__ import annotations

import time

from fastmtp.checkpoint import open_checkpoint
from fastmtp.errors import FastMTPError
from fastmtp.evaluation.report import Arm, Head, Losslessness, Reference, SpeedReport, Sweep
from fastmtp.evaluation.session import PLAIN, Session
from fastmtp.evaluation.speed import measure_speed
from fastmtp.evaluation.sweep import draft_cost, sweep
from fastmtp.progress import Reporter
from fastmtp.serving import has_gpu

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


def speed(session: Session, reporter: Reporter) -> SpeedReport | None:
    """Speed on the first set, where the job asks for it."""
    config = session.config
    if config.speed is None:
        return None
    heads: dict[Arm, str] = {"none": PLAIN, "base": "base", "tuned": "tuned"}
    begun, k = time.monotonic(), config.num_speculative_tokens
    found = measure_speed(
        {arm: session.arm(head) for arm, head in heads.items() if session.can_start(head)},
        session.sets[0].name, session.sets[0].ids, config.speed,
        max_tokens=config.max_tokens, temperature=config.temperatures[0], num_speculative_tokens=k,
        # A GPU seldom holds three.
        together=not session.starts_servers or not has_gpu(), directory=session.logs / "speed", reporter=reporter,
    )  # fmt: skip
    session.seconds["speed"] += time.monotonic() - begun
    return found
