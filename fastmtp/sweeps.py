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
    buffers = torch.empty(2, size, vocabulary, device=states.device)
    for part in _slices(len(states), size):
        own, other = buffers[:, : len(states[part])]
        _Chunk(found, part, own, other).run(states[part], teacher[part], weight)


class _Chunk:
    """Losses of a chunk of n tokens against the teacher.

    Args:
        part: which of the tokens.
        own, other: [n, V] fp32 buffers for the head's and the teacher's logits, which become probabilities.
    """

    def __init__(self, found: Found, part: slice, own: Tensor, other: Tensor) -> None:
        self.found, self.part, self.own, self.other = found, part, own, other
        width = (_CPU_TILE if own.device.type == "cpu" else _GPU_TILE)[1]
        self.tiles = _slices(own.shape[1], width)

    def run(self, states: Tensor, teacher: Tensor, weight: Tensor) -> None:
        self._exponentiate(states, teacher, weight)
        above = self._compare()
        if self.found.slope is not None:
            self._differentiate(self.found.slope[self.part], above, weight, states.dtype)

    def _exponentiate(self, states: Tensor, teacher: Tensor, weight: Tensor) -> None:
        """Logits, and their exponentials against each tile's own highest; ends with the factors that normalise them."""
        tops, norms, dots = [], [], []
        for tile in self.tiles:
            rows = weight[tile].to(states.dtype)
            own, other = _logits(states, rows, self.own[:, tile]), _logits(teacher, rows, self.other[:, tile])
            highest, _ = self.found.see(own, self.part, tile.start)
            gap = other - own if "kl" in self.found.mixture else None
            pair = torch.stack([highest, other.amax(1)])
            own.sub_(pair[0, :, None]).exp_()
            other.sub_(pair[1, :, None]).exp_()
            tops.append(pair)
            norms.append(torch.stack([own.sum(1), other.sum(1)]))
            if gap is not None:
                dots.append(gap.mul_(other).sum(1))
        top = torch.stack(tops)
        lse = (top + torch.stack(norms).log()).logsumexp(0)
        self.factors = (top - lse).exp()  # [tiles, 2, n]
        each, part = self.found.each, self.part
        each["ce"][part] = lse[0] - self.found.labels[part]
        if dots:
            each["kl"][part] = (self.factors[:, 1] * torch.stack(dots)).sum(0) + lse[0] - lse[1]

    def _compare(self) -> Tensor:
        """Normalise both to probabilities; total variation. Returns [n]: sum of p where p > q, 0 unless `tv` counts."""
        above = torch.zeros(self.own.shape[0], device=self.own.device)
        for tile, (own_factor, other_factor) in zip(self.tiles, self.factors[..., None], strict=True):
            own, other = self.own[:, tile].mul_(own_factor), self.other[:, tile].mul_(other_factor)
            if "tv" in self.found.mixture:
                gap = own - other
                above += (own * (gap > 0)).sum(1)
                self.found.each["tv"][self.part] += gap.clamp_min_(0).sum(1)
        return above

    def _differentiate(self, slope: Tensor, above: Tensor, weight: Tensor, compute: torch.dtype) -> None:
        """d loss / d state. By logit: ce: p - onehot; kl: p - q; tv: p * ([p > q] - sum of p where p > q)."""
        ce, kl, tv = (self.found.mixture.get(kind, 0.0) for kind in KINDS)
        for tile in self.tiles:
            own, other = self.own[:, tile], self.other[:, tile]
            share = (ce + kl - tv * above)[:, None]
            if tv:
                share = share + tv * (own > other)
            own.mul_(share).sub_(other, alpha=kl)
            place = Place.of(self.found.targets[self.part] - tile.start, own.shape[1])
            place.add(own, -ce)
            _add_product(slope, own, weight[tile].to(compute))


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
