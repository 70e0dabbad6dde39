"""`fastmtp stitch` against `speculators stitch-mtp` and plain copies: an 8 GB checkpoint, sharded, with a 2 % head.

The model has Qwen3-Next's names and tensor sizes, fewer experts and layers. The head is put back twice: into a
checkpoint that keeps it in its last shard of 1 GB, and into one that keeps it in a file of its own. Both tools get the
same tuned head, speculators in its own format, made by its own converter; both results must hold the same tensors.

Every command is a child process and runs in turns with the others, on a warm page cache (the kindest case for whoever
reads most). Seconds are medians, from start to exit; `on disk` until the result is durable as well: ours has called
fsync by the time it exits, the others have not, so that their files are synced after them, on the same clock. Bytes
written are dirtied pages. Peak memory is the child's peak resident set, mapped files included, less a bare
interpreter's. Starting either tool is timed as its `--help`: for speculators that is mostly importing torch.
"""

from __future__ import annotations

import json
import shutil
import statistics
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from fastmtp.extract import HEAD_FILE
from tests.benchmarks.child import Usage, bare_peak, warm
from tests.benchmarks.child import run as run_child
from tests.benchmarks.measure import Metric, metric
from tests.benchmarks.peer import speculators_python
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import large_config

ROOT = Path(".bench/stitch")
LAYERS, SHARDS, ROUNDS = 44, 8, 3
PEAK_LIMIT = 300.0  # MB
_MEGA = 1e6
_COPY = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
_TO_SPECULATORS = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from speculators.convert.mtp import MTPConverter
save_file(MTPConverter().convert_to_state_dict(Path(sys.argv[1])), sys.argv[2], metadata={"format": "pt"})
"""

Place = Literal["last shard", "own file"]
Commands = Mapping[str, Callable[[Path], list[str | Path]]]


def run(layers: int = LAYERS, rounds: int = ROUNDS) -> dict[str, Metric]:
    """Both places in turn: about a quarter of an hour; the disk needs room for the checkpoint and one result, 17 GB."""
    speculators = speculators_python()
    metrics: dict[str, Metric] = {}
    for place in ("last shard", "own file"):
        shutil.rmtree(ROOT, ignore_errors=True)
        try:
            metrics |= _measure(place, layers, rounds, speculators)
        finally:
            shutil.rmtree(ROOT, ignore_errors=True)
    return metrics


def _measure(place: Place, layers: int, rounds: int, speculators: Path) -> dict[str, Metric]:
    # 16 of the 512 experts make layers of 173 MB.
    config = large_config(layers=layers, num_experts=16, vocab_size=65536)
    model = write(ROOT / "model", family="qwen3-next", config=config, plan=Plan(shards=SHARDS, head=place))
    head, converted = _tuned_heads(model, speculators)
    commands: Commands = {
        "ours": lambda out: [sys.executable, "-m", "fastmtp", "stitch", model, "--head", head, "--out", out],
        "speculators": lambda out: [
            speculators, "-m", "speculators", "stitch-mtp", converted, model, "--output-path", out
        ],
        "shutil.copytree": lambda out: [sys.executable, "-c", _COPY, model, out],
        "cp -r": lambda out: ["cp", "-r", model, out],
    }  # fmt: skip
    _require_same_result(model, head, commands)
    if place == "own file":  # plain copies do not care where the head lies
        commands = {name: commands[name] for name in ("ours", "speculators")}
    runs: dict[str, list[Usage]] = {name: [] for name in commands}
    starts: dict[str, list[float]] = {"ours": [], "speculators": []}
    for number in range(1, rounds + 1):
        for name, command in commands.items():
            warm(model)
            runs[name].append(run_child(command(ROOT / "out"), leaves=ROOT / "out"))
            shutil.rmtree(ROOT / "out")
            print(f"  head in {place}, round {number} of {rounds}: {name} {runs[name][-1].seconds:.1f} s", flush=True)
            if name in starts:
                starts[name].append(run_child([*command(ROOT / "out")[:4], "--help"]).seconds)
    touched = sum((model / name).stat().st_size for name in {t.file for t in _tensors(model).values() if t.of_head})
    bare = {"ours": bare_peak(Path(sys.executable)), "speculators": bare_peak(speculators)}
    return _metrics(
        f"head in {place}", runs, {name: statistics.median(found) for name, found in starts.items()}, touched, bare
    )


def _metrics(
    label: str, runs: Mapping[str, list[Usage]], starts: Mapping[str, float], touched: int, bare: Mapping[str, int]
) -> dict[str, Metric]:
    def median(name: str, what: Callable[[Usage], float]) -> float:
        return statistics.median(what(usage) for usage in runs[name])

    seconds = {name: median(name, lambda usage: usage.seconds) for name in runs}
    durable = {name: median(name, lambda usage: usage.durable) for name in runs}
    written = {name: median(name, lambda usage: usage.written / _MEGA) for name in runs}
    peak = {name: (median(name, lambda usage: usage.peak) - bare[name]) / _MEGA for name in bare}
    found = {
        "time against speculators": metric(seconds["ours"], "s", peer=seconds["speculators"], goal=0.1),
        "the same, less the time of --help": metric(
            seconds["ours"] - starts["ours"], "s", peer=seconds["speculators"] - starts["speculators"]
        ),
        "time on disk against speculators": metric(durable["ours"], "s", peer=durable["speculators"], goal=0.1),
        "written against the files that hold the head": metric(written["ours"], "MB", limit=touched / _MEGA, goal=1.01),
        "written against speculators": metric(written["ours"], "MB", peer=written["speculators"]),
        "peak memory": metric(peak["ours"], "MB", limit=PEAK_LIMIT, goal=1.0),
        "peak memory against speculators": metric(peak["ours"], "MB", peer=peak["speculators"]),
    }
    for name in sorted(runs.keys() - bare.keys()):
        found[f"time against {name}"] = metric(seconds["ours"], "s", peer=seconds[name])
        found[f"time on disk against {name}"] = metric(durable["ours"], "s", peer=durable[name])
    return {f"{label}: {name}": value for name, value in found.items()}


def _tuned_heads(model: Path, speculators: Path) -> tuple[Path, Path]:
    """A head of which every value differs from the model's: our file, and a directory in the format of speculators."""
    native, converted = ROOT / "native", ROOT / "converted"
    run_child([sys.executable, "-m", "fastmtp", "extract", model, "--out", ROOT / "head"])
    content = bytearray((ROOT / "head" / HEAD_FILE).read_bytes())
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    # The lowest bit of each BF16: as small a change as there is, and the values stay finite.
    content[begin::2] = content[begin::2].translate(bytes(byte ^ 1 for byte in range(256)))
    for directory in (native, converted):
        directory.mkdir()
        shutil.copyfile(model / "config.json", directory / "config.json")
    (native / "model.safetensors").write_bytes(content)
    run_child([speculators, "-c", _TO_SPECULATORS, native, converted / "model.safetensors"])
    return native / "model.safetensors", converted


class Tensor(NamedTuple):
    """Where a tensor's bytes lie, read by this module's own few lines rather than by what is being measured."""

    file: str
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    of_head: bool


def _tensors(root: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file of a directory."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        with path.open("rb") as file:
            start = 8 + struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(start - 8))
        for key, value in header.items():
            if key != "__metadata__":
                begin, end = (start + offset for offset in value["data_offsets"])
                shape = tuple(value["shape"])
                found[key] = Tensor(path.name, begin, end, value["dtype"], shape, key.startswith("mtp."))
    return found


def _require_same_result(model: Path, head_file: Path, commands: Commands) -> None:
    """Both tools once, not timed. Raises RuntimeError unless both results hold the model with the tuned head."""
    head = _tensors(head_file.parent)
    for name in ("ours", "speculators"):
        out = ROOT / "out"
        run_child(commands[name](out))
        source, made = _tensors(model), _tensors(out)
        if source.keys() != made.keys():
            raise RuntimeError(f"{name}: {sorted(source.keys() ^ made.keys())[0]} is in one checkpoint only")
        for key, tensor in made.items():
            root, expected = (head_file.parent, head[key]) if tensor.of_head else (model, source[key])
            if tensor[3:] != expected[3:] or _bytes(out, tensor) != _bytes(root, expected):
                raise RuntimeError(f"{name}: {key} is not what it should be")
        shutil.rmtree(out)


def _bytes(root: Path, tensor: Tensor) -> bytes:
    with (root / tensor.file).open("rb") as file:
        file.seek(tensor.begin)
        return file.read(tensor.end - tensor.begin)
