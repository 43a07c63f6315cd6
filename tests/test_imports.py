"""The shape of the package, read from its source: imports point down, mathematics touches nothing outside, jit has one place.

Everything here works on source text, so the checks themselves are tested on small bad modules.
"""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "jax_ppo"


class Layer(NamedTuple):
    """Modules and packages on one level. They may import each other, without a cycle, and whatever stands on an earlier level."""

    members: tuple[str, ...]
    pure: bool


# From the ground up. "" is the package itself; a module belongs to the longest entry that is its name or a package around it.
LAYERS = (
    Layer(("", "types"), pure=True),
    Layer(("sharding", "models", "ppo", "rollout"), pure=True),
    # Above the mathematics, which takes scalars and never the configuration.
    Layer(("config", "schema"), pure=True),
    Layer(("rewards",), pure=True),
    Layer(("probe",), pure=False),
    Layer(("steps",), pure=False),
    Layer(("learner", "warmstart", "data", "runtime", "rollout.engine"), pure=False),
    Layer(("evaluate", "job", "networks"), pure=False),
    Layer(("train",), pure=False),
    Layer(("main",), pure=False),
)

# All that a pure module may import from outside: nothing here opens a file or a connection, reads a clock or writes a log.
PURE_IMPORTS = frozenset(
    "abc chex collections contextlib dataclasses difflib enum flax fractions functools itertools jax math ml_collections ml_dtypes numbers"
    " numpy operator optax re string types typing unicodedata".split()
)
IMPURE_CALLS = frozenset({"open", "print", "input", "__import__", "breakpoint"})

# (module, import) -> why this pure module may all the same.
EXCEPTIONS = {
    ("models.hf", "pathlib"): "reads and writes a model directory",
    ("models.hf", "shutil"): "copies tokenizer files beside exported weights",
    ("models.hf", "warnings"): "tells which of two contradicting tensors it took, and which it ignored",
    ("models.hf_config", "json"): "reads and writes config.json",
    ("models.hf_config", "pathlib"): "reads and writes config.json",
    ("models.tensor_files", "json"): "reads and writes the index of the shards",
    ("models.tensor_files", "pathlib"): "reads and writes the files of a model directory",
    ("models.tensor_files", "safetensors"): "reads and writes the weights",
    ("rewards.custom", "inspect"): "checks the signature of the user's function",
    ("rewards.custom", "pathlib"): "loads the user's file",
    ("rewards.custom", "sys"): "registers the user's module",
    ("rewards.custom", "traceback"): "names the line of the user's file that failed",
}


def layer_of(module: str) -> int | None:
    """Index into LAYERS of a module named without the package, for instance "ppo.losses"; None where no entry fits."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        for index, layer in enumerate(LAYERS):
            if ".".join(parts[:length]) in layer.members:
                return index
    return None if parts else 0


def imports(module: str, is_package: bool, tree: ast.Module) -> Iterator[str]:
    """Every absolute name that a module imports, also inside functions; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *module.split(".")] if module else [PACKAGE]
                above = here[: len(here) - node.level + is_package]
                base = ".".join([*above, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with a package, one line each.

    Args:
      sources: path within the package, for instance "ppo/losses.py" or "ppo/__init__.py" -> source text.
    """
    found = []
    names = {path: path.removesuffix(".py").replace("/", ".").removesuffix("__init__").rstrip(".") for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        module, tree = names[path], ast.parse(source, path)
        layer = layer_of(module)
        if layer is None:
            found.append(f"{path}: has no layer; give it a place in LAYERS")
            continue
        if not ast.get_docstring(tree):
            found.append(f"{path}: has no docstring")
        graph[module] = set()
        for name in imports(module, path.endswith("__init__.py"), tree):
            top, _, rest = name.partition(".")
            if top == "torch":
                found.append(f"{path}: imports torch, which belongs in tests and benchmarks")
            elif top == PACKAGE:
                graph[module].add(_known(rest, set(names.values())))
                target = layer_of(rest)
                if target is not None and target > layer:
                    found.append(f"{path}: imports {rest}, which stands above it")
            elif LAYERS[layer].pure and top not in PURE_IMPORTS and (module, top) not in EXCEPTIONS:
                found.append(f"{path}: imports {top}, and a pure module touches no file, network, clock or log")
        found += [f"{path}:{line}: {what}" for line, what in _uses(tree, pure=LAYERS[layer].pure, jit=module == "steps")]
    try:
        graphlib.TopologicalSorter({module: targets - {module} for module, targets in graph.items()}).prepare()
    except graphlib.CycleError as error:
        found.append("imports go round in a circle: " + " -> ".join(error.args[1]))
    return found


def _known(name: str, modules: set[str]) -> str:
    """The module that an imported name comes from: the longest prefix that is one, or else the package itself."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _uses(tree: ast.Module, *, pure: bool, jit: bool) -> Iterator[tuple[int, str]]:
    """Line and complaint for each impure call, and for each jit where it does not belong."""
    compilers = {"jit", "pjit", "pmap"}
    for node in ast.walk(tree):
        if pure and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield node.lineno, f"calls {node.func.id}() in a pure module"
        taken = isinstance(node, ast.ImportFrom) and compilers & {alias.name for alias in node.names}
        if not jit and (taken or (isinstance(node, ast.Attribute) and node.attr in compilers)):
            yield node.lineno, "compiles; jax.jit belongs in steps.py"


def package() -> dict[str, str]:
    """The sources of jax_ppo as they are."""
    folder = ROOT / PACKAGE
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


def test_package_keeps_the_rules():
    sources = package()
    assert "types.py" in sources
    assert violations(sources) == []


def test_every_exception_is_needed():
    sources = package()
    for module, name in EXCEPTIONS:
        tree = ast.parse(sources[module.replace(".", "/") + ".py"])
        assert name in {found.partition(".")[0] for found in imports(module, False, tree)}, f"{module} does not import {name}"


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("ppo/losses.py", "import jax", "has no docstring"),
        ("surprise.py", "'''D.'''", "no layer"),
        ("rollout/sampling.py", "'''D.'''\nfrom jax_ppo.rollout import engine", "imports rollout.engine, which stands above"),
        ("rollout/sampling.py", "'''D.'''\nfrom . import engine", "imports rollout.engine, which stands above"),
        ("rollout/__init__.py", "'''D.'''\nfrom .engine import run", "imports rollout.engine.run, which stands above"),
        ("models/hf.py", "'''D.'''\nimport jax_ppo.data.prompts as p", "imports data.prompts, which stands above"),
        ("ppo/losses.py", "'''D.'''\nfrom ..config import PPOConfig", "imports config.PPOConfig, which stands above"),
        ("steps.py", "'''D.'''\nfrom jax_ppo import train", "imports train, which stands above"),
        ("data/prompts.py", "'''D.'''\ndef f():\n  from jax_ppo.main import main", "imports main.main, which stands above"),
        ("types.py", "'''D.'''\nif TYPE_CHECKING:\n  import jax_ppo.config", "imports config, which stands above"),
        ("sharding.py", "'''D.'''\nimport os.path", "imports os,"),
        ("ppo/update.py", "'''D.'''\nfrom time import monotonic", "imports time,"),
        ("rewards/gsm8k.py", "'''D.'''\nimport pathlib", "imports pathlib,"),
        ("rewards/gsm8k.py", "'''D.'''\nprint(1)", "calls print()"),
        ("models/hf.py", "'''D.'''\ndef f(p):\n  with open(p): pass", "calls open()"),
        ("ppo/update.py", "'''D.'''\nimport jax\n@jax.jit\ndef f(): pass", "py:3: compiles"),
        (
            "train.py",
            "'''D.'''\nfrom functools import partial\nimport jax as j\nf = partial(j.jit, donate_argnums=0)",
            "py:4: compiles",
        ),
        ("evaluate.py", "'''D.'''\nfrom jax import jit", "compiles"),
        ("train.py", "'''D.'''\nimport torch.nn", "imports torch"),
        ("runtime/report.py", "'''D.'''\ndef f():\n  from torch import nn", "imports torch"),
    ],
)
def test_a_bad_module_is_found(path, source, complaint):
    found = violations({path: source})
    assert len(found) == 1
    assert found[0].startswith(path)
    assert complaint in found[0]


def test_a_circle_is_found():
    sources = {
        "ppo/a.py": "'''D.'''\nfrom jax_ppo.ppo import b",
        "ppo/b.py": "'''D.'''\nfrom jax_ppo.ppo.c import something",
        "ppo/c.py": "'''D.'''\ndef f():\n  from .a import something",
    }
    (found,) = violations(sources)
    assert "circle" in found
    assert {"ppo.a", "ppo.b", "ppo.c"} <= set(found.removeprefix("imports go round in a circle: ").split(" -> "))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("steps.py", "'''D.'''\nimport jax\nfrom jax_ppo.config import Config\nf = jax.jit(abs)"),
        ("models/hf.py", "'''D.'''\nfrom pathlib import Path\nfrom jax_ppo.models import qwen\nfrom jax_ppo import __version__"),
        ("rewards/__init__.py", "'''D.'''\nfrom . import gsm8k\nfrom ..config import RewardConfig"),
        ("train.py", "'''D.'''\nimport os, time\nfrom jax_ppo import evaluate, steps\nprint(open('x'))"),
        ("models/layers.py", "'''jax.jit and torch, only spoken of: import os.'''\n# import time\nimport flax.linen as nn"),
    ],
)
def test_a_good_module_passes(path, source):
    assert violations({path: source}) == []
