"""The peer that benchmarks compare with: speculators, in an environment of its own under `.bench/`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

VERSION = "0.9.0"
_HOME = Path(".bench/speculators")
# What speculators asks for, without torchaudio and torchvision: text models need neither, and their pins pull another
# torch. The releases are those we measure ourselves with.
_NEEDS = (
    "torch==2.13.0", "transformers==5.19.0", "datasets<=5.1.0", "numpy<=2.5.4", "aiohttp", "click", "httpx",
    "huggingface-hub", "loguru<=0.7.3", "openai>=2", "protobuf", "psutil", "pydantic", "pydantic-settings", "rich",
    "safetensors", "tqdm<=4.70.1", "typer>=0.12",
)  # fmt: skip
_PACKAGES = (f"speculators=={VERSION}", "hs-connectors==0.9.0")


def speculators_python() -> Path:
    """The interpreter (absolute) of an environment with speculators; made once, in about two minutes and 1.5 GB.

    `PIP_TORCH` in the environment is passed to pip as for `make setup`.

    Raises:
        CalledProcessError: pip could not install; its own message is on stderr.
    """
    python, marker = (_HOME / "bin" / "python").absolute(), _HOME / ".installed"
    wanted = "\n".join((*_NEEDS, *_PACKAGES))
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return python
    print(f"  making {_HOME} with speculators {VERSION}, about two minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(_HOME)], check=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off"]
    subprocess.run([*install, *shlex.split(os.environ.get("PIP_TORCH", "")), *_NEEDS], check=True)
    subprocess.run([*install, "--no-deps", *_PACKAGES], check=True)
    marker.write_text(wanted, encoding="utf-8")
    return python
