"""The experiments in configs/: each loads, fits together, and says at its head how it is run, on what, and what comes out."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from jax_ppo.config import Config, default_config, resolve, to_dict
from jax_ppo.runtime import cli

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.py"))


def test_there_are_configs():
    assert {"gsm8k", "quickstart"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_resolves_and_says_only_what_the_command_line_can_say(path):
    raw = cli.load_config(path)
    config = resolve(raw)
    assert isinstance(config, Config)
    assert {name: set(keys) for name, keys in raw.to_dict().items()} == {
        name: set(keys) for name, keys in default_config().to_dict().items()
    }
    assert resolve(to_dict(config)) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_head_says_command_hardware_and_result(path, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    head = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert head and head.splitlines()[0].endswith(".")
    said = {word: re.search(rf"^{word}\s+\S.*", head, re.M) for word in ("command", "hardware", "expect")}
    assert all(said.values()), said
    commands = re.findall(r"python -m jax_ppo\.main (--config=\S+)", head)
    assert f"--config=configs/{path.name}" in commands
    for command in commands:
        cli.parse(["program", *shlex.split(command)], module="jax_ppo.main", strings={})
    # Flags that the head mentions exist, whatever value or wildcard follows.
    for flag in re.findall(r"--config\.([a-z_0-9.]+)", head):
        section, _, key = flag.rstrip(".").partition(".")
        assert not key or key in to_dict(Config())[section], flag


def test_gsm8k_is_the_reference_job():
    config = resolve(cli.load_config(FOLDER / "gsm8k.py"))
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.data.path == "openai/gsm8k"
    assert (config.rollout.batch, config.rollout.n, config.rollout.max_response_tokens) == (256, 1, 512)
    assert (config.ppo.epochs, config.ppo.minibatches) == (1, 4)
    assert config.reward.method == "strict" and config.warmstart.steps == 0
    assert "####" in config.data.instruction


def test_quickstart_needs_no_download():
    config = resolve(cli.load_config(FOLDER / "quickstart.py"))
    assert (config.model.path, config.critic.path, config.data.path, config.data.eval_path) == ("builtin", "", "builtin", "")
