"""The configuration: what each key takes, how keys fit together, and that every key is read by something."""

import ast
import dataclasses
import functools
import json
import math
from pathlib import Path

import ml_collections
import pytest

from jax_ppo import config as configuration
from jax_ppo import schema
from jax_ppo.config import Config, default_config, resolve, to_dict
from jax_ppo.job import CHANGEABLE
from jax_ppo.types import InputError

PACKAGE = Path(configuration.__file__).parent
KEYS = configuration.keys()


def changed(**changes):
    """The defaults with "section.key" set, whatever the type."""
    raw = to_dict(Config())
    for name, value in changes.items():
        section, _, last = name.rpartition(".")
        functools.reduce(dict.__getitem__, section.split("."), raw)[last] = value
    return raw


def refusal(**changes):
    with pytest.raises(InputError) as caught:
        resolve(changed(**changes))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_defaults_are_allowed_typed_and_plain():
    config = resolve(default_config())
    assert config == Config() == resolve({}) == resolve(to_dict(config))
    assert resolve(ml_collections.ConfigDict(json.loads(json.dumps(to_dict(config))))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ppo.gamma = 0.5
    assert (config.actor_optim.lr, config.critic_optim.lr) == (1e-6, 1e-5)


def test_every_key_says_what_it_means_and_what_it_takes():
    assert list(KEYS) == [name for name, _ in schema.flat(to_dict(Config()))]
    for name, key in KEYS.items():
        assert len(key.meaning) > 5 and key.allowed.startswith(("true or", "a whole", "a finite", "text", "one of")), name
    for name, section in schema.sections(Config()):
        assert type(section).__doc__ and not type(section).__doc__.startswith(type(section).__name__), name


# Key -> values it takes, and values of its type that it does not.
EDGES = {
    "model.path": (["a", "builtin"], [""]),
    "model.param_dtype": (["float32", "bfloat16"], ["float16", ""]),
    "model.compute_dtype": (["auto", "float32", "bfloat16"], ["fp32"]),
    "model.attention": (["auto", "full", "blockwise", "cudnn", "splash"], ["flash"]),
    "model.lora.rank": ([0, 8], [-1]),
    "model.lora.alpha": ([0.5, 32.0], [0.0, -1.0]),
    "model.lora.targets": (["q_proj", "q_proj,down_proj"], ["", "q_proj,", "lm_head", "q_proj, v_proj"]),
    "data.path": (["a"], [""]),
    "data.eval_path": (["", "a"], []),
    "data.eval_limit": ([0, 1], [-1]),
    "data.train_limit": ([0, 1], [-1]),
    "data.max_prompt_tokens": ([1], [0, -1]),
    "data.overlong": (["drop", "error"], ["truncate"]),
    "rollout.batch": ([4], [0, -4]),
    "rollout.n": ([1], [0, -1]),
    "rollout.max_response_tokens": ([1], [0, -1]),
    "rollout.temperature": ([0.1, 2.0], [0.0, -1.0]),
    "rollout.top_k": ([0], [1, -1]),
    "rollout.top_p": ([1.0], [0.9, 0.0, 1.5]),
    "rollout.slots": ([0, 1], [-1]),
    "rollout.segment": ([1], [0]),
    "reward.method": (["strict", "flexible", "verl"], ["loose"]),
    "reward.format_score": ([-1.0, 0.0, 0.1], []),
    "reward.missing_end_penalty": ([0.0, 0.5], [-0.5]),
    "reward.overlong_buffer": ([0, 512], [-1]),
    "critic.trunk": (["own", "actor"], ["both"]),
    "ppo.estimator": (["gae", "reinforce"], ["ppo"]),
    "ppo.lam_length": ([0.0, 0.05], [-0.05]),
    "ppo.clip_advantage": ([0.0, 5.0], [-5.0]),
    "ppo.gamma": ([0.0, 1.0], [-0.1, 1.1]),
    "ppo.lam_actor": ([0.0, 1.0], [-0.1, 1.1]),
    "ppo.lam_critic": ([0.0, 1.0], [-0.1, 1.1]),
    "ppo.clip_low": ([0.2], [0.0, 1.0, -0.1]),
    "ppo.clip_high": ([0.2, 3.0], [0.0, -0.1]),
    "ppo.dual_clip": ([0.0, 1.5], [1.0, 0.5, -3.0]),
    "ppo.clip_value": ([0.0, 0.2], [-0.2]),
    "ppo.kl_coef": ([0.0, 0.1], [-0.1]),
    "ppo.kl_kind": (["k1", "k2", "k3", "abs"], ["kl"]),
    "ppo.kl_target": ([0.0, 0.1], [-0.1]),
    "ppo.kl_loss_coef": ([0.0, 0.1], [-0.1]),
    "ppo.entropy_coef": ([0.0, 0.1, -0.1], []),
    "ppo.old_logprobs": (["recompute", "rollout"], ["sampler"]),
    "ppo.epochs": ([1], [0]),
    "ppo.minibatches": ([1, 256], [0, -4]),
    "ppo.micro_tokens": ([1024], [0, -1]),
    "ppo.aggregation": (["seq-mean-token-sum-norm"], ["mean"]),
    "ppo.truncated": (["terminal", "bootstrap", "mask"], ["drop"]),
    "ppo.target_kl": ([0.0, 0.1], [-0.1]),
    "ppo.critic_warmup": ([0, 5], [-1]),
    "actor_optim.lr": ([0.0, 1e-3], [-1e-3]),
    "critic_optim.lr": ([0.0, 1e-3], [-1e-3]),
    "actor_optim.warmup": ([0, 5], [-1]),
    "critic_optim.schedule": (["constant", "linear", "cosine"], ["step"]),
    "actor_optim.weight_decay": ([0.0, 0.1], [-0.1]),
    "actor_optim.clip_norm": ([0.0, 1.0], [-1.0]),
    "actor_optim.b1": ([0.0, 0.9], [1.0, -0.1]),
    "critic_optim.b2": ([0.0, 0.9], [1.0, -0.1]),
    "mesh.data": ([1, -1, 8], [0, -2]),
    "mesh.fsdp": ([1, -1, 8], [0, -2]),
    "mesh.tensor": ([1, -1, 8], [0, -2]),
    "train.iterations": ([1], [0]),
    "train.seed": ([0, 2**31 - 1], [-1, 2**31]),
    "train.resume": (["auto", "never", "./run", "/runs/x/checkpoints/7"], ["yes", ""]),
    "train.max_skipped": ([1], [0]),
    "train.heartbeat_seconds": ([5], [4]),
    "warmstart.steps": ([0, 1], [-1]),
    "warmstart.batch": ([1], [0]),
    "warmstart.lr": ([1e-3], [0.0]),
    "warmstart.b2": ([0.0, 0.9], [1.0]),
    "eval.every": ([0, 1], [-1]),
    "eval.limit": ([0, 1], [-1]),
    "eval.samples": ([0, 1], [-1]),
    "checkpoint.every": ([1], [0]),
    "checkpoint.keep_last": ([1], [0]),
    "checkpoint.keep_best": ([0, 1], [-1]),
    "log.samples": ([0, 1], [-1]),
    "log.profile": ([-1, 0, 3], [-2]),
}


def test_every_rule_has_its_edges_tried():
    twins = {name.replace("actor_optim", "critic_optim") for name in EDGES} | {
        name.replace("critic_optim", "actor_optim") for name in EDGES
    }
    assert {name for name, key in KEYS.items() if key.rule} <= twins


@pytest.mark.parametrize("name", EDGES)
def test_the_edges_of_what_a_key_takes(name):
    good, bad = EDGES[name]
    for value in good:
        assert schema.read(resolve(changed(**{name: value})), name) == value
    for value in bad:
        line = refusal(**{name: value})
        assert line == f"config.{name}={value if value != '' else repr('')}: must be {KEYS[name].allowed}"


@pytest.mark.parametrize("name", KEYS)
def test_values_of_another_type_are_refused(name):
    default = KEYS[name].default
    others = {bool: True, int: 3, float: 0.25, str: "x"} | {type(None): None, list: [1], dict: {"a": 1}}
    for kind, value in others.items():
        if kind is type(default) or (kind is int and type(default) is float):
            continue
        assert refusal(**{name: value}) == f"config.{name}={value!r}: must be {KEYS[name].allowed}"
    if isinstance(default, float):
        for value in (math.nan, math.inf, -math.inf):
            assert refusal(**{name: value}) == f"config.{name}={value}: must be {KEYS[name].allowed}"


def test_a_whole_number_is_a_number_and_becomes_one():
    gamma = resolve(changed(**{"ppo.gamma": 1})).ppo.gamma
    assert gamma == 1.0 and type(gamma) is float


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"ppo": {"gama": 0.9}}, "config.ppo.gama: no such key; did you mean gamma?"),
        ({"ppo": {"zzz": 0.9}}, "config.ppo.zzz: no such key; ppo has estimator, gamma, lam_actor, "),
        ({"pp": {"gamma": 0.9}}, "config.pp.gamma: no such key; did you mean ppo.gamma?"),
        ({"lr": 1e-6}, "config.lr: no such key; did you mean actor_optim.lr or critic_optim.lr or warmstart.lr?"),
        ({"model": {"lora": {"rnk": 8}}}, "config.model.lora.rnk: no such key; did you mean rank?"),
        ({"model": {"lora": 8}}, "config.model.lora=8: is a section; set its keys one by one: model.lora.rank, "),
        ({"ppo": 3}, "config.ppo=3: is a section; set its keys one by one: ppo.estimator, ppo.gamma, "),
    ],
)
def test_what_is_no_key(raw, line):
    for kind in (dict, ml_collections.ConfigDict):
        with pytest.raises(InputError) as caught:
            resolve(kind(raw))
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout.batch": 10}, "config.ppo.minibatches=4: must divide rollout.batch x rollout.n = 10 x 1 = 10"),
        (
            {"rollout.batch": 4, "rollout.n": 2, "ppo.minibatches": 16},
            "config.ppo.minibatches=16: must divide rollout.batch x rollout.n = 4 x 2 = 8",
        ),
        (
            {"ppo.micro_tokens": 1023},
            "config.ppo.micro_tokens=1023: must hold one sequence, data.max_prompt_tokens + rollout.max_response_tokens"
            " = 512 + 512 = 1024",
        ),
        ({"reward.overlong_buffer": 513}, "config.reward.overlong_buffer=513: must be at most rollout.max_response_tokens = 512"),
        (
            {"ppo.kl_coef": 0.0, "ppo.kl_target": 0.1},
            "config.ppo.kl_target=0.1: must be 0 where ppo.kl_coef is 0, which it would scale",
        ),
        (
            {"ppo.estimator": "rloo"},
            "config.ppo.estimator=rloo: must be gae or reinforce where rollout.n is 1: there is no other response to compare with",
        ),
        (
            {"ppo.estimator": "reinforce", "ppo.truncated": "bootstrap"},
            "config.ppo.truncated=bootstrap: must be terminal or mask where ppo.estimator is 'reinforce', which has no critic",
        ),
        (
            {"ppo.estimator": "reinforce", "ppo.critic_warmup": 3},
            "config.ppo.critic_warmup=3: must be 0 where ppo.estimator is 'reinforce', which has no critic",
        ),
        (
            {"critic.trunk": "actor", "critic.path": "elsewhere"},
            "config.critic.path=elsewhere: must be empty where critic.trunk is 'actor'",
        ),
        (
            {"critic_optim.schedule": "cosine", "critic_optim.warmup": 800, "ppo.epochs": 2},
            "config.critic_optim.warmup=800: must be below the updates of the critic, iterations x epochs x minibatches"
            " = 100 x 2 x 4 = 800",
        ),
        (
            {"actor_optim.schedule": "linear", "actor_optim.warmup": 360, "ppo.critic_warmup": 10},
            "config.actor_optim.warmup=360: must be below the updates of the actor, iterations x epochs x minibatches"
            " = 90 x 1 x 4 = 360",
        ),
    ],
)
def test_keys_that_do_not_fit_together(changes, line):
    assert refusal(**changes) == line


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.batch": 10, "ppo.minibatches": 5},
        {"rollout.batch": 2, "rollout.n": 2, "ppo.minibatches": 4},
        {"ppo.micro_tokens": 1024},
        {"reward.overlong_buffer": 512},
        {"ppo.kl_target": 0.1},
        {"ppo.estimator": "reinforce"},
        {"ppo.estimator": "grpo", "rollout.n": 2},
        {"critic_optim.schedule": "cosine", "critic_optim.warmup": 399},
        {"actor_optim.warmup": 5000},  # a constant schedule has no end that the rise could miss
        {"actor_optim.schedule": "linear", "ppo.critic_warmup": 200},  # the actor is not trained at all
    ],
)
def test_keys_that_just_fit_together(changes):
    resolve(changed(**changes))


def test_sizes_that_follow():
    config = resolve(changed(**{"rollout.batch": 32, "rollout.n": 3, "ppo.epochs": 2, "train.iterations": 7}))
    assert (config.sequences, config.max_sequence_tokens, config.updates_per_iteration, config.total_updates) == (96, 1024, 8, 56)


# How modules call a section where they do not call it by its name.
ALIASES = {
    "model.lora": ("adapters",),
    "actor_optim": ("optim",),
    "critic_optim": ("optim",),
    "reward": ("config",),
    "rollout": ("sampling", "config"),  # Config.slots
    "warmstart": ("warm",),
}


def reads(sources):
    """Every pair of a name and an attribute that is taken of it: config.ppo.gamma is ("config", "ppo") and ("ppo", "gamma")."""
    found = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                found.add((node.value.id if isinstance(node.value, ast.Name) else node.value.attr, node.attr))
    return found


def test_every_key_is_read_by_something():
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "config.py"]
    found = reads(path.read_text("utf-8") for path in paths)
    unread = []
    for name in KEYS:
        section, _, key = name.rpartition(".")
        if not {(owner, key) for owner in (section.rpartition(".")[2], *ALIASES.get(section, ()))} & found:
            unread.append(name)
    assert unread == []
    assert ("ppo", "gama") not in found and ("ppo", "gamma") in found


def test_keys_that_a_resumed_run_may_change_exist():
    for entry in CHANGEABLE:
        assert entry in KEYS or (entry.endswith(".") and any(name.startswith(entry) for name in KEYS)), entry
