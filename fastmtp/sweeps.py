"""How losses go over the vocabulary: tiles of logits, small enough to stay in the cache while they are used.

Each logit is computed once, exponentiated once, and taken back through the output head while it is there.
`fastmtp.losses` says what is computed; this module is its own and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("ce", "kl", "tv")
_MARGIN = 8.0  # a logit this far above the reference raises it; exp(8) is small enough even for fp16
_TINY = torch.finfo(torch.float32).tiny
# Tokens and vocabulary entries of a tile. On a CPU a tile (2 MiB) stays in the cache while it is used.
_CPU_TILE = (512, 1024)
_GPU_TILE = (4096, 8192)


class Found:
    """What the sweeps find for N tokens, and the targets' logits as their tiles pass.

    Attributes:
        each: kind -> [N] fp32 losses.
        labels: [N] fp32, the targets' logits.
        highest: [N] fp32, the highest logit.
        slope: [N, H] fp32, d (mixed loss) / d state; None where no gradient is asked for.
    """

    def __init__(self, mixture: Mapping[str, float], targets: Tensor, slope: Tensor | None) -> None:
        self.mixture, self.targets, self.slope = mixture, targets, slope
        kinds = dict.fromkeys(("ce", *mixture))
        self.each = {kind: torch.zeros(len(targets), device=targets.device) for kind in kinds}
        self.labels = torch.zeros(len(targets), device=targets.device)
        self.highest = torch.full((len(targets),), -torch.inf, device=targets.device)

    def see(self, logits: Tensor, part: slice, begin: int) -> tuple[Tensor, Place]:
        """Read a tile: logits [n, w] fp32 of the tokens in `part`, vocabulary entries from `begin` on.

        Returns:
            [n], the highest logit of each row of the tile, and where the targets are in it.
        """
        place = Place.of(self.targets[part] - begin, logits.shape[1])
        self.labels[part] = torch.where(place.inside, place.read(logits), self.labels[part])
        highest = logits.amax(1)
        self.highest[part] = torch.maximum(self.highest[part], highest)
        return highest, place


@dataclass(frozen=True)
class Place:
    """Where targets lie in a tile: column [n, 1] int64 within it, which means something only where inside [n] bool."""

    column: Tensor
    inside: Tensor

    @classmethod
    def of(cls, offset: Tensor, width: int) -> Place:
        return cls(offset.clamp(0, width - 1)[:, None], (offset >= 0) & (offset < width))

    def read(self, tile: Tensor) -> Tensor:
        return tile.gather(1, self.column)[:, 0]

    def clear(self, tile: Tensor) -> None:
        """Put 0 where a target is."""
        tile.scatter_(1, self.column, self.read(tile).masked_fill(self.inside, 0.0)[:, None])

    def add(self, tile: Tensor, value: float) -> None:
        """Add a value where a target is."""
        tile.scatter_add_(1, self.column, (self.inside * value).to(tile.dtype)[:, None])


def compute_type(weight: Tensor) -> torch.dtype:
    """A CPU multiplies in fp32, tile by tile, whatever the stored type; a GPU in the stored type, summed in fp32."""
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


def one_sweep(found: Found, states: Tensor, weight: Tensor, chunk_bytes: int) -> None:
    """Cross-entropy, by the formula above.

    Exponentials are taken against a reference per token, raised when a logit is far above it: what was summed so far
    is then scaled down, as in online softmax, but hardly ever.
    """
    count, vocabulary = len(states), weight.shape[0]
    targets = weight[found.targets]
    reference = torch.linalg.vecdot(states, targets.to(states.dtype)).float()
    norm, sums = torch.zeros_like(reference), found.slope
    size, width = _tile_of(states, vocabulary, chunk_bytes)
    # One buffer for all tiles, so that it stays in a CPU's cache; on a GPU the allocator does as well.
    buffer = torch.empty(size * width) if states.device.type == "cpu" else None
    for begin in range(0, vocabulary, width):
        rows = weight[begin : begin + width].to(states.dtype)
        for part in _slices(count, size):
            tile = _logits(states[part], rows, buffer)
            highest, place = found.see(tile, part, begin)
            # A GPU would have to wait for the answer, so there it is done every time.
            if buffer is None or bool((highest > reference[part] + _MARGIN).any()):
                raised = torch.maximum(reference[part], highest)
                shrink = (reference[part] - raised).exp_()
                reference[part] = raised
                norm[part] *= shrink
                if sums is not None:
                    sums[part] *= shrink[:, None]
            place.clear(tile.sub_(reference[part, None]).exp_())
            norm[part] += tile.sum(1)
            if sums is not None:
                _add_product(sums[part], tile, rows)
    above = norm.log() + reference - found.labels  # log of (the others' probability / the target's)
    found.each["ce"] = F.softplus(above)
    if sums is not None:
        miss = above.sigmoid_().mul_(found.mixture["ce"])  # 1 - p_target
        sums.div_(norm.clamp_min_(_TINY)[:, None]).sub_(targets).mul_(miss[:, None])


def two_sweeps(found: Found, states: Tensor, teacher: Tensor, weight: Tensor, chunk_bytes: int) -> None:
    """Any mixture, a chunk of tokens at a time: first the normalisers, then the gradient."""
    vocabulary = weight.shape[0]
    size = max(1, min(len(states), chunk_bytes // (2 * 4 * vocabulary)))
    buffers = torch.empty(2, size * vocabulary, device=states.device)
    for part in _slices(len(states), size):
        chunk = _Chunk(found, part, weight, buffers)
        chunk.exponentiate(states[part], teacher[part])
        above = chunk.compare() if "tv" in found.mixture else None
        if found.slope is not None:
            chunk.differentiate(found.slope[part], above)


@dataclass(frozen=True)
class _Tile:
    """A stretch of the vocabulary, for the n tokens of a chunk.

    Attributes:
        own, other: [n, w] fp32, the head's and the teacher's: logits, then exponentials, then probabilities.
        scratch: [n, w] fp32.
    """

    span: slice
    own: Tensor
    other: Tensor
    scratch: Tensor


class _Chunk:
    """Losses of the n tokens in `part` against the teacher; `buffers` is [2, at least n * V] fp32."""

    def __init__(self, found: Found, part: slice, weight: Tensor, buffers: Tensor) -> None:
        self.found, self.part, self.weight = found, part, weight
        count, device = part.stop - part.start, weight.device
        width = (_CPU_TILE if device.type == "cpu" else _GPU_TILE)[1]
        scratch = torch.empty(count * min(width, len(weight)), device=device)

        def view(flat: Tensor, span: slice, start: int) -> Tensor:
            return flat[count * start : count * (start + span.stop - span.start)].view(count, -1)

        self.tiles = [
            _Tile(span, view(buffers[0], span, span.start), view(buffers[1], span, span.start), view(scratch, span, 0))
            for span in _slices(len(weight), width)
        ]

    def exponentiate(self, states: Tensor, teacher: Tensor) -> None:
        """Logits, and their exponentials against each tile's own highest; ends with the factors that normalise them."""
        tops, norms, dots = [], [], []
        for tile in self.tiles:
            rows = self.weight[tile.span].to(states.dtype)
            own, other = _logits(states, rows, tile.own), _logits(teacher, rows, tile.other)
            highest, _ = self.found.see(own, self.part, tile.span.start)
            pair = torch.stack([highest, other.amax(1)])
            if "kl" in self.found.mixture:
                torch.sub(other, own, out=tile.scratch)
            own.sub_(pair[0, :, None]).exp_()
            other.sub_(pair[1, :, None]).exp_()
            tops.append(pair)
            norms.append(torch.stack([own.sum(1), other.sum(1)]))
            if "kl" in self.found.mixture:
                dots.append(tile.scratch.mul_(other).sum(1))
        top = torch.stack(tops)
        lse = (top + torch.stack(norms).log()).logsumexp(0)
        self.factors = (top - lse).exp_()[..., None]  # [tiles, 2, n, 1]
        each, part = self.found.each, self.part
        each["ce"][part] = lse[0] - self.found.labels[part]
        if dots:
            each["kl"][part] = (self.factors[:, 1, :, 0] * torch.stack(dots)).sum(0) + lse[0] - lse[1]

    def compare(self) -> Tensor:
        """Total variation, on probabilities. Returns [n, 1]: the sum of p where p > q."""
        above = torch.zeros(self.part.stop - self.part.start, device=self.weight.device)
        variation = self.found.each["tv"][self.part]
        for tile, (own_factor, other_factor) in zip(self.tiles, self.factors, strict=True):
            torch.sub(tile.own.mul_(own_factor), tile.other.mul_(other_factor), out=tile.scratch)
            variation += tile.scratch.clamp_min_(0).sum(1)
            above += tile.scratch.gt_(0).mul_(tile.own).sum(1)
        self.factors.fill_(1.0)
        return above[:, None]

    def differentiate(self, slope: Tensor, above: Tensor | None) -> None:
        """d loss / d state. By logit: ce: p - onehot; kl: p - q; tv: p * ([p > q] - sum of p where p > q)."""
        ce, kl, tv = (self.found.mixture.get(kind, 0.0) for kind in KINDS)
        for tile, (own_factor, other_factor) in zip(self.tiles, self.factors, strict=True):
            if above is None:
                tile.own.mul_(own_factor * (ce + kl))
            else:
                torch.gt(tile.own, tile.other, out=tile.scratch)
                tile.own.mul_(tile.scratch.mul_(tv).add_(ce + kl - tv * above))
            if kl:
                tile.own.addcmul_(tile.other, other_factor, value=-kl)
            if ce:
                place = Place.of(self.found.targets[self.part] - tile.span.start, tile.own.shape[1])
                place.add(tile.own, -ce)
            _add_product(slope, tile.own, self.weight[tile.span].to(compute_type(self.weight)))


def _slices(count: int, size: int) -> list[slice]:
    return [slice(begin, min(count, begin + size)) for begin in range(0, count, size)]


def _tile_of(states: Tensor, vocabulary: int, chunk_bytes: int) -> tuple[int, int]:
    size, width = _CPU_TILE if states.device.type == "cpu" else _GPU_TILE
    size = max(1, min(size, len(states), chunk_bytes // 4))
    return size, max(1, min(width, vocabulary, chunk_bytes // (4 * size)))


def _logits(states: Tensor, rows: Tensor, out: Tensor | None) -> Tensor:
    """states [n, H] @ rows.T [H, w] in fp32, into `out` where given: [n, w], or flat with room for as much."""
    if out is not None and out.dim() == 1:
        out = out[: len(states) * len(rows)].view(len(states), len(rows))
    if rows.dtype == torch.float32:
        return torch.mm(states, rows.T, out=out)
    made = torch.mm(states, rows.T, out_dtype=torch.float32)
    return made if out is None else out.copy_(made)


def _add_product(sums: Tensor, tile: Tensor, rows: Tensor) -> None:
    """sums [n, H] fp32 += tile [n, w] fp32 @ rows [w, H]."""
    if rows.dtype == torch.float32:
        sums.addmm_(tile, rows)
    else:
        sums += torch.mm(tile.to(rows.dtype), rows, out_dtype=torch.float32)
