"""Who may import whom, read from the source: see CONTRIBUTING.md, "Where things live"."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import REPOSITORY

# Any part may import itself and these, which import nothing of the package but each other.
COMMON = {"errors", "files", "folders", "units", "version"}
ALLOWED = {
    "": {"blas", "config", "chat", "loader"},
    "__main__": {"cli"},
    "blas": set(),
    "config": set(),
    "errors": set(),
    "files": set(),
    "folders": set(),
    "units": set(),
    "version": set(),
    "bench": {"kernels", "models", "config"},
    "checkpoint": {"config"},
    "kernels": set(),
    "models": {"kernels", "config"},
    "experts": {"checkpoint", "config", "models.bank", "media.processor"},
    "eyes": {"models", "media", "checkpoint", "config"},
    "loader": {"kernels", "models", "experts", "checkpoint", "config", "eyes"}
    | {"chat.tokenizer", "convert.source"},
    "convert": {"checkpoint", "config"},
    "convert.prune": {"loader"},
    "chat": {"loader", "media", "models", "config", "checkpoint", "experts.usage"},
    "media": {"config"},
    "nano": {"convert"},
    "tasks": set(),
    "evaluation": {"tasks", "chat", "models", "config", "media"},
    "training": {"loader", "models", "kernels", "config", "chat", "checkpoint", "tasks", "media"}
    | {"convert.tokenizer", "convert.stream"},
    "server": {"loader", "chat", "media", "config"},
    "cli": {"server", "chat", "convert", "evaluation", "training", "loader", "media"}
    | {"bench", "blas", "checkpoint", "config", "experts", "kernels", "nano", "tasks.talk"},
}
# These never load MLX, so that commands which need no arithmetic answer at once.
WITHOUT_MLX = {
    "blas",
    "checkpoint",
    "config",
    "errors",
    "files",
    "folders",
    "media",
    "nano",
    "tasks",
    "units",
    "version",
}
WITH_MLX_LM = {"bench", "chat", "evaluation", "loader", "models", "server"}


def _modules() -> dict[str, Path]:
    """Dotted name inside the package ('' is the package itself) -> file."""
    found = {}
    for root, prefix in ((REPOSITORY / "mlx_k3", ""), (REPOSITORY / "convert", "convert")):
        for path in root.rglob("*.py"):
            parts = [prefix] if prefix else []
            parts += path.relative_to(root).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = _modules()


def _part(module: str) -> str:
    return module.split(".")[0]


def _imports(module: str, *, top_level: bool = False) -> Iterator[str]:
    """Absolute dotted names that ``module`` imports, anywhere or when it is loaded."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["mlx_k3", *(module.split(".") if module else [])]
    if path.name != "__init__.py":
        package.pop()
    for node in _when_loaded(tree) if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield ".".join(base)
            # `from . import units` imports a module; `from .units import x` does not.
            names = (".".join([*base, alias.name]) for alias in node.names)
            yield from (name for name in names if name.removeprefix("mlx_k3.") in MODULES)


def _when_loaded(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _when_loaded(node)


def _loads(module: str, library: str, *, top_level: bool = False) -> bool:
    names = _imports(module, top_level=top_level)
    return any(name == library or name.startswith(f"{library}.") for name in names)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_part_imports_only_what_it_may(module: str) -> None:
    part = _part(module)
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    allowed = COMMON | {part} | ALLOWED[part] | ALLOWED.get(module, set())
    for name in _imports(module):
        if not name.startswith("mlx_k3."):
            continue
        target = name.removeprefix("mlx_k3.")
        assert _part(target) in allowed or target in allowed, f"{module} imports {target}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if _part(m) in WITHOUT_MLX))
def test_no_mlx_at_all(module: str) -> None:
    assert not _loads(module, "mlx")


@pytest.mark.parametrize("module", sorted(m for m in MODULES if _part(m) in {"", "cli"}))
def test_no_mlx_when_loaded(module: str) -> None:
    assert not _loads(module, "mlx", top_level=True)
    assert not _loads(module, "mlx_lm", top_level=True)


@pytest.mark.parametrize("module", sorted(m for m in MODULES if _part(m) not in WITH_MLX_LM))
def test_mlx_lm_stays_in_its_parts(module: str) -> None:
    assert not _loads(module, "mlx_lm")


def test_help_loads_neither_mlx_nor_transformers() -> None:
    code = (
        "import sys, mlx_k3, mlx_k3.cli; mlx_k3.K3Config;"
        "print(*sorted({'mlx', 'mlx_lm', 'numpy', 'transformers', 'torch'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) <= {"numpy"}


def test_nothing_unsafe_is_used() -> None:
    for module, path in MODULES.items():
        for library in ("pickle", "marshal", "shelve"):
            assert not _loads(module, library), f"{module} imports {library}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, module
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) == "Exception"
                assert not broad, f"{module}:{node.lineno} catches everything"


def test_the_repository_names_no_ones_folders() -> None:
    """Paths of the machine it was written on mean nothing elsewhere."""
    private = re.compile(r"(?<![\w.])/(?:root|work|home|Users)/\w")
    folders = ("mlx_k3", "convert", "scripts", "tests", "docs", "examples", ".github", ".ci")
    suffixes = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".json", ""}
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files += REPOSITORY.glob("*.*")
    seen = 0
    for path in files:
        if not path.is_file() or path.suffix not in suffixes or "golden" in path.parts:
            continue
        seen += 1
        match = private.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path} has {match}"
    assert seen > 30
