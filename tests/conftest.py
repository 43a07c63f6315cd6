"""What all tests share: eight virtual CPU devices, strict JAX, no network, and the folder of shared data."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import pytest

# Tests of sharding need devices; eight of them exist on any CPU. Programs that tests start inherit only the environment.
os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")
# Eight devices on two busy cores may wait long for each other; by default that ends the process after 40 seconds.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# [B] + [B, 1] is a [B, B] array and, here, always a mistake. So is a key that is used twice.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

ROOT = Path(__file__).parents[1]
SHARED_FILES = (
    "gsm8k/train.jsonl",
    "gsm8k/test.jsonl",
    "qwen2.5_tokenizer/tokenizer.json",
    "qwen2.5_tokenizer/tokenizer_config.json",
    "reward_cases.jsonl",
)


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """Loads the script tools/NAME.py as a module, by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def convert(tool: Callable[[str], ModuleType]) -> ModuleType:
    """The script tools/convert_hf.py as a module."""
    return tool("convert_hf")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with gsm8k/, qwen2.5_tokenizer/ and reward_cases.jsonl: JAX_PPO_SHARED, or else ../shared.

    Without it the test is skipped, or fails if JAX_PPO_REQUIRE_SHARED=1 says that the data is there.
    """
    folder = Path(os.environ.get("JAX_PPO_SHARED") or Path(__file__).parents[2] / "shared")
    missing = [name for name in SHARED_FILES if not (folder / name).is_file()]
    if not missing:
        return folder
    reason = f"{folder} has no {', '.join(missing)}; JAX_PPO_SHARED can name another folder"
    if os.environ.get("JAX_PPO_REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
