"""Who may import whom, and what importing must not load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Package -> top-level names it must not import.
FORBIDDEN = {
    "fastmtp": {"prefect", "fastapi", "sqlalchemy", "alembic", "flows", "api", "deploy", "vllm"},
    "flows": {"api", "deploy", "sqlalchemy", "fastapi", "torch", "transformers", "vllm"},
    "api": {"flows", "deploy", "torch", "transformers", "vllm"},
}
# What starts a process; the name of a type may be used anywhere.
STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_\w+)\(|os\.(system|popen|exec\w+|spawn\w+|fork)\(|multiprocessing"
)
# What the API may use of fastmtp: modules that load no torch.
API_MAY_IMPORT = {"fastmtp.config", "fastmtp.errors", "fastmtp.preflight", "fastmtp.protocol", "fastmtp"}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_rules(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        bad = {name for name in imports_of(path) if name.split(".")[0] in FORBIDDEN[package]}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_the_api_uses_only_the_light_part_of_fastmtp() -> None:
    for path in (ROOT / "api").rglob("*.py"):
        bad = {name for name in imports_of(path) if name.split(".")[0] == "fastmtp"} - API_MAY_IMPORT
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


@pytest.mark.parametrize(
    "module", ["api.main", "flows.finetune", "fastmtp.pipeline", "fastmtp.preflight", "fastmtp.__main__"]
)
def test_importing_loads_no_torch(module: str) -> None:
    check = "sys.exit(' '.join({'torch', 'transformers'}.intersection(sys.modules)) or 0)"
    program = f"import sys, {module}; {check}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_processes_start_in_one_place() -> None:
    for package in FORBIDDEN | {"deploy": set()}:
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "fastmtp" / "procs.py":
                assert not STARTS.search(path.read_text(encoding="utf-8")), path.relative_to(ROOT)


def test_no_pickle() -> None:
    for package in FORBIDDEN | {"deploy": set()}:
        for path in (ROOT / package).rglob("*.py"):
            assert not imports_of(path) & {"pickle", "dill", "cloudpickle", "joblib"}, path.relative_to(ROOT)
            assert "torch.load(" not in path.read_text(encoding="utf-8"), path.relative_to(ROOT)
