"""The native MTP head of a checkpoint, found and judged from headers alone.

`examine` says everything that does not fit; `find_head` refuses where an error is among it. Loads no torch, reads no
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastmtp.checkpoint import CONFIG, Checkpoint, Fault, require
from fastmtp.errors import CheckpointError
from fastmtp.families import family_of
from fastmtp.families.base import Config, Family, Layout, Shapes, text_config
from fastmtp.headers import TensorEntry

FLOATS = ("BF16", "F16", "F32")
_CONFIG_MEND = "Take the original config.json."
_ORIGINAL = "Take the original checkpoint: tools that quantise or re-save often drop, rename or change the head."
# What quantisers put beside, or in the place of, a weight.
_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_(packed|scale|scale_inv|zero_point|shape)|input_scale)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Fields of config.json that say how large a model is; what every model has; how many of anything no model has.
_SIZE = re.compile(
    r"(hidden|vocab|intermediate|moe_intermediate|shared_expert_intermediate)_size|num_(hidden_layers|experts)"
    r"|num_(attention|key_value)_heads|n_(routed|shared)_experts|\w*head_dim|(q|kv)_lora_rank"
)
_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers")
_TOO_MANY = 1 << 16
_TOO_WIDE = 1 << 24


@dataclass(frozen=True)
class HeadInfo:
    """The native head of a checkpoint, as its headers describe it.

    Attributes:
        layout: how experts are stored: `split` (one by one), `fused` (stacked), or `dense` when there are none.
        tensors: native key -> entry. An entry's own key has `wrapper` before that.
        copies: like `tensors`, for copies of the embedding or output head inside the head; they are left as they are.
        wrapper: prefix that some tool put before the family's own names; empty as a rule.
        embedding, output: entries of the token embedding and the output head (the same when tied).
    """

    family: Family
    layout: Layout
    tensors: dict[str, TensorEntry]
    copies: dict[str, TensorEntry]
    wrapper: str
    embedding: TensorEntry
    output: TensorEntry

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def files(self) -> list[str]:
        return sorted({entry.file for entry in self.tensors.values()})


def find_head(checkpoint: Checkpoint) -> HeadInfo:
    """The checkpoint's MTP head. Raises CheckpointError when it is lost, incomplete, undeclared or not supported."""
    head, faults = examine(checkpoint)
    require(faults)
    assert head is not None
    return head


def examine(checkpoint: Checkpoint) -> tuple[HeadInfo | None, list[Fault]]:
    """The head, and what is wrong with it and with what it shares; None where an error keeps it from being used."""
    where, config = checkpoint.files.name, text_config(checkpoint.config)
    try:
        family = family_of(checkpoint.config)
    except CheckpointError as error:
        return None, [Fault("error", "family_unknown", f"{where}/{CONFIG}: {error.what}", error.mend, CONFIG)]
    wrong = _config_fault(where, family, config)
    if wrong:
        return None, [wrong]
    try:
        prefix = family.head_prefix(config)
        wrapper, found = _head_tensors(checkpoint, prefix)
        copies = {key: found.pop(key) for key in family.copy_shapes(config) if key in found}
        layout = _layout(found)
        shapes = family.shapes(config, layout)
    except KeyError as error:
        return None, [_lacking(where, family, str(error.args[0]))]
    except (TypeError, ValueError, ArithmeticError):
        what = f"{where}/{CONFIG} does not describe a {family.title} model: a field is null or zero, or no number."
        return None, [Fault("error", "config_wrong", what, _CONFIG_MEND, CONFIG)]
    faults = list(_count(checkpoint, family, config, found, wrapper))
    if found:
        faults += _compare(where, found, copies, shapes, family.copy_shapes(config))
        faults += _serving(checkpoint, prefix, wrapper, found)
    embedding, output = _shared(checkpoint, config, wrapper + prefix, faults)
    if any(fault.level == "error" for fault in faults) or embedding is None or output is None:
        return None, faults
    return HeadInfo(family, layout, found, copies, wrapper, embedding, output), faults


def _lacking(where: str, family: Family, name: str) -> Fault:
    what = f"{where}/{CONFIG} lacks {name}, which {family.title} needs."
    return Fault("error", "config_incomplete", what, _CONFIG_MEND, CONFIG, name)


def _config_fault(where: str, family: Family, config: Config) -> Fault | None:
    """The first size that is missing, or is no number that a model can have."""
    for name in _NEEDED:
        if config.get(name) is None:
            return _lacking(where, family, name)
    for name, value in config.items():
        if value is None or not (_SIZE.fullmatch(name) or name == family.layers_field):
            continue
        largest = _TOO_WIDE if name.endswith(("size", "dim", "rank")) else _TOO_MANY
        if type(value) is not int or not (name in _NEEDED) <= value <= largest:
            what = f"{where}/{CONFIG}: {name} is {value!r:.50}, which no model has."
            return Fault("error", "config_wrong", what, _CONFIG_MEND, CONFIG, name)
    return None


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json's quantization_config, of the model or of its text part."""
    for part in (config, text_config(config)):
        found = part.get("quantization_config")
        if isinstance(found, dict):
            return found
    return None


def _head_tensors(checkpoint: Checkpoint, prefix: str) -> tuple[str, dict[str, TensorEntry]]:
    """Wrapper and tensors of the head by native key, sorted; the wrapper is what stands before `prefix`."""
    found = checkpoint.below(prefix)
    if found:
        return "", found
    nested = next((key for key in checkpoint.tensors if f".{prefix}" in key), None)
    if nested is None:
        return "", {}
    wrapper = nested[: nested.index(f".{prefix}") + 1]
    return wrapper, {key.removeprefix(wrapper): entry for key, entry in checkpoint.below(wrapper + prefix).items()}


def _count(
    checkpoint: Checkpoint, family: Family, config: Config, found: Mapping[str, TensorEntry], wrapper: str
) -> Iterator[Fault]:
    """Exactly one layer, declared and there."""
    where, field, prefix = checkpoint.files.name, family.layers_field, family.head_prefix(config)
    declared = family.layers_declared(config)
    layers = family.layers_default if declared is None else declared
    if not found:
        says = f"has no {field}" if declared is None else f"says {field}: {declared}"
        states = f"though {CONFIG} {says}" if declared else f"and {CONFIG} {says}"
        what = f"{where} has {'lost its' if declared else 'no'} MTP head: no tensor is named {prefix}*, {states}."
        yield Fault("error", "head_lost" if declared else "head_none", what, _ORIGINAL)
    elif layers == 0:
        what = f"{where} holds an MTP head, but config.json " + (
            f"says {field}: 0" if declared == 0 else f"has no {field}"
        )
        yield Fault("error", "head_undeclared", what + ": vLLM would not use it.", f"Set {field}: 1 in config.json.")
    several = _several(checkpoint, family, config, wrapper)
    if layers > 1 or several:
        what = f"{where}: {several or f'config.json says {field}: {layers}'}; exactly one MTP layer is supported."
        yield Fault("error", "head_several", what, "Take a model whose head has one layer.")
    if found and declared is None and layers:
        yield Fault(
            "warning", "head_default", f"{where}/config.json has no {field}; vLLM takes {layers}, and so do we."
        )


def _several(checkpoint: Checkpoint, family: Family, config: Config, wrapper: str) -> str:
    """A key of a second MTP layer, said in words; empty when there is none."""
    prefix = family.head_prefix(config)
    if family.layer:
        second = prefix + family.layer.replace("0", "1")
    elif "{num_hidden_layers}" in family.prefix:
        second = family.prefix.format(num_hidden_layers=config["num_hidden_layers"] + 1)
    else:
        second = prefix.replace(".0.", ".1.")
    key = next((key for key in checkpoint.tensors if key.startswith(wrapper + second)), None)
    return f"there is a second layer, {key}" if key else ""


def _layout(found: Mapping[str, TensorEntry]) -> Layout:
    if not any(".experts." in key for key in found):
        return "dense"
    return "fused" if any(key.endswith("experts.gate_up_proj") for key in found) else "split"


def _compare(
    where: str, found: Mapping[str, TensorEntry], copies: Mapping[str, TensorEntry], shapes: Shapes, copy_shapes: Shapes
) -> Iterator[Fault]:
    """Keys, dtypes and shapes against the family's."""
    quantised = next((key for key in found if _QUANTISED.search(key) or found[key].dtype not in FLOATS), None)
    if quantised:
        entry = found[quantised]
        what = f"{where}/{entry.file}: the head is quantised: {quantised} is {entry.dtype}."
        mend = (
            f"A head in {', '.join(FLOATS)} is supported, whatever the rest is in: take a checkpoint that kept it so."
        )
        yield Fault("error", "head_quantised", what, mend, entry.file, quantised)
        return
    missing, unexpected = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing:
        what = f"{where}: the head lacks {len(missing)} of its {len(shapes)} tensors, {missing[0]} first."
        yield Fault("error", "head_incomplete", what + _experts_there(found, missing[0]), _ORIGINAL, key=missing[0])
    if unexpected:
        key = unexpected[0]
        what = f"{where}/{found[key].file}: no head of this family has {key}"
        what += f" and {len(unexpected) - 1} more." if unexpected[1:] else "."
        yield Fault("error", "head_unexpected", what + _experts_there(found, key), _ORIGINAL, found[key].file, key)
    for key, entry in {**found, **copies}.items():
        expected = shapes.get(key) or copy_shapes.get(key)
        if expected is not None and entry.shape != expected:
            what = f"{where}/{entry.file}: {key} is {list(entry.shape)}, config.json means {list(expected)}."
            yield Fault("error", "head_shape", what, "Take config.json and shards of one checkpoint.", entry.file, key)
    # A bias that corrects a router is kept in F32 by its family.
    dtypes = {entry.dtype for key, entry in found.items() if not key.endswith("bias")}
    if len(dtypes) > 1:
        what = f"{where}: the head mixes {', '.join(sorted(dtypes))}; each tensor keeps its own."
        yield Fault("warning", "head_mixed", what)


def _experts_there(found: Mapping[str, TensorEntry], key: str) -> str:
    """Which experts there are, said where an expert's tensor is at fault."""
    if not _EXPERT.search(key):
        return ""
    there = sorted({int(match[1]) for key in found if (match := _EXPERT.search(key))})
    return f" Experts found: {len(there)}, numbered {there[0]} to {there[-1]}." if there else ""


def _serving(checkpoint: Checkpoint, prefix: str, wrapper: str, found: Mapping[str, TensorEntry]) -> Iterator[Fault]:
    """Why vLLM would not load a head that is whole."""
    where = checkpoint.files.name
    mend = "`fastmtp stitch --mend` writes a checkpoint that vLLM loads."
    if wrapper:
        what = f"{where}: the head is named {wrapper}{prefix}*; vLLM reads only {prefix}* and skips the rest silently."
        yield Fault("serving", "head_nested", what, mend)
    unlisted = set(checkpoint.unlisted)
    lost = [entry for entry in found.values() if entry.key in unlisted]
    unread = {fault.file for fault in checkpoint.faults if fault.code == "file_unlisted"}
    hidden = next((entry for entry in lost if entry.file in unread), None)
    if hidden:
        what = f"{where}: the index lists no tensor of {hidden.file}, which holds {hidden.key}: vLLM does not read it."
        yield Fault("serving", "head_unlisted", what, mend, hidden.file, hidden.key)
    elif lost:
        what = f"{where}: the index omits {lost[0].key}" + (f" and {len(lost) - 1} more" if lost[1:] else "")
        what += f" of the head, found in {lost[0].file}, which it lists."
        yield Fault("warning", "head_unlisted", what, "", lost[0].file, lost[0].key)
    quantisation = quantisation_of(checkpoint.config)
    exceptions = repr(quantisation).replace("\\", "")
    if quantisation is not None and "mtp" not in exceptions and prefix.strip(".") not in exceptions:
        method = quantisation.get("quant_method", "an unnamed method")
        what = f"{where}/{CONFIG}: quantised by {method}; the head is not, but no exception in quantization_config "
        what += "names it."
        mend = f"If vLLM drafts nothing, add {prefix.strip('.')} to the modules left as they are."
        yield Fault("warning", "head_not_exempt", what, mend, CONFIG)


def _shared(
    checkpoint: Checkpoint, config: Config, head: str, faults: list[Fault]
) -> tuple[TensorEntry | None, TensorEntry | None]:
    """Token embedding and output head of the verifier, whatever prefix a wrapper gave them."""
    tied = config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))
    embedding = _one(checkpoint, "embed_tokens.weight", head, config, faults)
    if tied:
        return embedding, embedding
    return embedding, _one(checkpoint, "lm_head.weight", head, config, faults)


def _one(checkpoint: Checkpoint, suffix: str, head: str, config: Config, faults: list[Fault]) -> TensorEntry | None:
    where = checkpoint.files.name
    entries = [
        entry for key, entry in checkpoint.tensors.items()
        if key.endswith(suffix) and key[: -len(suffix)][-1:] in ("", ".") and not key.startswith(head)
        and "visual" not in key
    ]  # fmt: skip
    if not entries:
        mend = "Set tie_word_embeddings: true if they are tied." if suffix.startswith("lm_head") else _ORIGINAL
        faults.append(Fault("error", "shared_missing", f"{where} has no tensor named *{suffix}.", mend))
        return None
    if len(entries) > 1:
        first, second = entries[:2]
        what = f"{where} has {len(entries)} tensors named *{suffix}: {first.key} in {first.file}, {second.key} in "
        what += f"{second.file}."
        faults.append(Fault("error", "shared_twice", what, _ORIGINAL, second.file, second.key))
        return None
    entry = entries[0]
    shape = (config.get("vocab_size"), config.get("hidden_size"))
    if entry.dtype not in FLOATS:
        what = (
            f"{where}/{entry.file}: {entry.key} is {entry.dtype}; the head is trained with it in {', '.join(FLOATS)}."
        )
        faults.append(Fault("error", "shared_quantised", what, _ORIGINAL, entry.file, entry.key))
    elif entry.shape != shape:
        what = f"{where}/{entry.file}: {entry.key} is {list(entry.shape)}, config.json means {list(shape)}."
        mend = "Take config.json and shards of one checkpoint."
        faults.append(Fault("error", "shared_shape", what, mend, entry.file, entry.key))
    return entry
