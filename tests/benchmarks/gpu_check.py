"""`make gpu-check`: head and losses on a CUDA device against the CPU, a step against the card's own limits, a minute's
training. Some five minutes in all; without a device it says so and ends well.

Limits are measured in the same run: a large bf16 matrix product, and a copy inside the device's memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from fastmtp.data.rows import PackedRows
from fastmtp.training.objective import Objective
from tests.benchmarks.steps import Made, Recursion, Sizes, make

SMALL = Sizes(tokens=512, vocabulary=4096, hidden=256, rows=4)
LARGE = Sizes(tokens=8192, vocabulary=151_936, hidden=2048, rows=8)
LOSSES = ("ce", "kl", "tv")
TRAIN_SECONDS = 60.0
# bf16 keeps 8 bits: what the CPU computes in fp32 comes back to about a hundredth.
CLOSE, ALIKE = 0.02, 0.995


def on(made: Made, device: str, dtype: torch.dtype, loss: str) -> tuple[Objective, PackedRows]:
    """The same step elsewhere: fp32 master weights, the rest in a compute type, as training has them."""
    config = made.objective.config.model_copy(update={"loss": loss})
    embedding, output = (part.to(device, dtype) for part in made.objective.verifier)
    objective = Objective(made.objective.head.to(device), embedding, output, config)
    return objective, made.rows.to(torch.device(device), dtype)


def step(objective: Objective, rows: PackedRows, dtype: torch.dtype) -> float:
    """Forward and backward; gradients are left in place. Returns the loss."""
    totals = [float(rows.counted(k).sum()) for k in range(objective.config.num_steps)]
    device = rows.input_ids.device.type
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss, _ = objective(rows, totals)
    loss.backward()
    return float(loss.detach())


def gradient(objective: Objective) -> torch.Tensor:
    return torch.cat([p.grad.detach().float().cpu().flatten() for p in objective.parameters() if p.grad is not None])


def compare(loss: str, recursion: Recursion) -> tuple[float, float]:
    """Relative difference of the losses, and cosine of the gradients, between CPU in fp32 and device in bf16."""
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        objective, rows = on(make(SMALL, recursion), device, dtype, loss)
        found.append((step(objective, rows, dtype), gradient(objective)))
    (ours, slope), (theirs, other) = found
    cosine = torch.nn.functional.cosine_similarity(slope.double(), other.double(), dim=0)
    return abs(theirs - ours) / abs(ours), float(cosine)


def timed(call: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds of a call on the device, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def limits() -> tuple[float, float]:
    """bf16 TFLOP/s of a large product, and GB/s of a copy (read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / timed(lambda: a @ b) / 1e12
    block = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(block)
    return rate, 2 * block.numel() / timed(lambda: other.copy_(block)) / 1e9


def large_step(table: Table) -> None:
    """A step at full size against the two products per supervised token and step that nobody can avoid."""
    rate, bandwidth = limits()
    objective, rows = on(make(LARGE), "cuda", torch.bfloat16, "ce")
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: step(objective, rows, torch.bfloat16))
    targets = sum(int(rows.counted(k).sum()) for k in range(LARGE.steps))
    needed = 4 * targets * LARGE.hidden * LARGE.vocabulary / (rate * 1e12)
    table.add_row("bf16 product, TFLOP/s", f"{rate:.0f}", "measured limit")
    table.add_row("copy in memory, GB/s", f"{bandwidth:.0f}", "measured limit")
    table.add_row(f"step, T={LARGE.tokens}, V={LARGE.vocabulary}, H={LARGE.hidden}", f"{1e3 * seconds:.1f} ms", "")
    table.add_row("its two products at the limit", f"{1e3 * needed:.1f} ms", f"ratio {seconds / needed:.2f}")
    table.add_row("peak memory", f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB", "embedding and head included")


def minute(table: Table) -> bool:
    """Train on one batch for a minute: the loss must fall."""
    sizes = replace(LARGE, tokens=2048, vocabulary=32_768, hidden=1024)
    objective, rows = on(make(sizes), "cuda", torch.bfloat16, "ce")
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-4)
    begun, losses = time.monotonic(), []
    while time.monotonic() - begun < TRAIN_SECONDS:
        losses.append(step(objective, rows, torch.bfloat16))
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    fell = losses[-1] < 0.9 * losses[0]
    note = "falls" if fell else "DOES NOT FALL"
    table.add_row(f"{len(losses)} optimizer steps in a minute", f"loss {losses[0]:.2f} to {losses[-1]:.2f}", note)
    return fell


def main() -> int:
    """Print the table; exit status 1 when something is not as it should be."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check: torch finds no CUDA device here; nothing was checked.")
        return 0
    table = Table("what", "found", "", title=torch.cuda.get_device_name())
    good = True
    for recursion in ("serving", "plain"):
        for loss in LOSSES:
            difference, cosine = compare(loss, recursion)
            fine = difference <= CLOSE and cosine >= ALIKE
            good &= fine
            what = f"loss off by {difference:.2%}, gradients' cosine {cosine:.4f}"
            table.add_row(f"{recursion}, {loss}: bf16 here, fp32 on the CPU", what, "" if fine else "TOO FAR APART")
    large_step(table)
    good &= minute(table)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
