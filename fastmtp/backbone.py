"""Is the rest of the checkpoint whole? Judged from names and shapes alone, without knowing the family's modules.

A writer that drops a shard and rebuilds the index leaves files that look right, each by itself. But layers of one kind
are alike: one that has less than its siblings has lost something, and one whose shapes differ is of another model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from fastmtp.checkpoint import Checkpoint, Fault
from fastmtp.families.base import text_config
from fastmtp.headers import TensorEntry
from fastmtp.native import HeadInfo, quantisation_of

_MEND = "Take the original shards."
_Layer = dict[str, TensorEntry]


def check_backbone(checkpoint: Checkpoint, head: HeadInfo) -> list[Fault]:
    """Layers that are missing, incomplete beside their siblings, or of other shapes; a missing final norm."""
    where, config = checkpoint.files.name, text_config(checkpoint.config)
    base = head.embedding.key.removesuffix("embed_tokens.weight")
    count = int(config["num_hidden_layers"])
    layers = _layers(checkpoint, base, head, count)
    faults: list[Fault] = []
    missing = [index for index in range(count) if index not in layers]
    if missing:
        what = f"{where} lacks {len(missing)} of {count} layers: no tensor is named {base}layers.{missing[0]}.*"
        faults.append(Fault("error", "layer_missing", f"{what}.", _MEND))
    if f"{base}norm.weight" not in checkpoint.tensors:
        what = f"{where} lacks {base}norm.weight, the final norm."
        faults.append(Fault("error", "norm_missing", what, _MEND, key=f"{base}norm.weight"))
    kinds = config.get("layer_types")
    groups: dict[str, dict[int, _Layer]] = defaultdict(dict)
    for index, layer in layers.items():
        kind = kinds[index] if isinstance(kinds, list) and index < len(kinds) else ""
        groups[str(kind)][index] = layer
    # Quantisers spare single layers, which then have other names and types than their siblings.
    if quantisation_of(checkpoint.config) is None:
        for group in groups.values():
            faults += _unlike(where, f"{base}layers.", group)
    return faults


def _layers(checkpoint: Checkpoint, base: str, head: HeadInfo, count: int) -> dict[int, _Layer]:
    own = {entry.key for entry in (*head.tensors.values(), *head.copies.values())}
    layers: dict[int, _Layer] = defaultdict(dict)
    prefix = f"{base}layers."
    begin, numbers = len(prefix), {str(index): index for index in range(count)}
    for key, entry in checkpoint.tensors.items():
        if key.startswith(prefix) and key not in own:
            number, _, name = key[begin:].partition(".")
            if number in numbers:
                layers[numbers[number]][name] = entry
    return layers


def _unlike(where: str, prefix: str, group: Mapping[int, _Layer]) -> Iterator[Fault]:
    """The first layer that has less than a sibling, and the first tensor of another shape than its siblings'."""
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    for index, layer in sorted(group.items()):
        # A layer of another make (dense among experts) has names of its own; one that lost something has not.
        fuller = next((one for one in group if len(group[one]) > len(layer) and layer.keys() < group[one].keys()), None)
        if fuller is not None:
            lost = sorted(group[fuller].keys() - layer.keys())
            what = f"{where} lacks {prefix}{index}.{lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else "")
            what += f", which layer {fuller} has."
            yield Fault("error", "layer_incomplete", what, _MEND, key=f"{prefix}{index}.{lost[0]}")
            return
        for name, entry in layer.items():
            first, shape = shapes.setdefault(name, (index, entry.shape))
            if entry.shape != shape:
                what = f"{where}/{entry.file}: {prefix}{index}.{name} is {list(entry.shape)}, layer {first}'s is "
                what += f"{list(shape)}."
                yield Fault("error", "layer_shape", what, _MEND, entry.file, f"{prefix}{index}.{name}")
                return
