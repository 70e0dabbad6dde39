"""`python -m tests.benchmarks [NAME ...]`: run all benchmarks, or those named, and write `.bench/NAME.json`.

A benchmark is a module `bench_NAME.py` beside this one with `run() -> dict[str, Metric]`. Its first docstring line says
what is compared with what.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

OUT = Path(".bench")


def main(names: list[str]) -> int:
    """Run and print, goals met or missed; exit status 2 for an unknown name."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    package = importlib.import_module("tests.benchmarks")
    known = {
        module.name.removeprefix("bench_"): f"tests.benchmarks.{module.name}"
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.startswith("bench_")
    }
    unknown = sorted(set(names) - known.keys())
    if unknown:
        print(f"no benchmark is named {unknown[0]}; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    OUT.mkdir(exist_ok=True)
    for name in names or sorted(known):
        module = importlib.import_module(known[name])
        print(f"{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
        metrics = module.run()
        (OUT / f"{name}.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        for label, found in metrics.items():
            good = found["goal"] is None or found["ratio"] <= found["goal"]
            verdict = "" if found["goal"] is None else f"  goal <= {found['goal']:g} {'met' if good else 'MISSED'}"
            against = f"peer {found['peer']:.4g}" if found["peer"] is not None else f"limit {found['limit']:.4g}"
            print(
                f"  {label}: ours {found['ours']:.4g} {found['unit']}, {against}, ratio {found['ratio']:.3f}{verdict}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main([name for name in sys.argv[1:] if name]))
