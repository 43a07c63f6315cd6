"""What is said before a run: bytes as they turn out to be, and a table that fits into a terminal."""

import io
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType
from rich.console import Console

from jax_ppo import sharding
from jax_ppo.config import default_config, resolve
from jax_ppo.runtime import forecast
from jax_ppo.runtime.display import start_table
from jax_ppo.steps import Steps

MODEL = tiny.MODEL
MESHES = [(1, 1, 1), (1, 8, 1), (2, 2, 2)]


def mesh(*sizes):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def steps(sizes=(1, 1, 1), **changes):
    raw = default_config()
    raw.rollout.batch, raw.rollout.max_response_tokens, raw.data.max_prompt_tokens = 16, 32, 24
    raw.model.compute_dtype = "bfloat16"
    raw.update_from_flattened_dict(changes)
    config = resolve(raw)
    return config, Steps(config, MODEL, MODEL, mesh(*sizes))


def held(tree):
    """Bytes on the first device."""
    first = jax.devices()[0]
    return sum(shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards if shard.device == first)


def zeros(shapes, shardings):
    return jax.tree.map(lambda x, s: jax.device_put(np.zeros(x.shape, x.dtype), s), shapes, shardings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", MESHES)
def test_networks_take_the_bytes_that_were_said(sizes, dtype):
    config, made = steps(sizes, **{"model.param_dtype": dtype})
    parts = forecast.memory(config, made, (8, 56), 24)
    for name, network in (("actor", made.actor), ("critic", made.critic)):
        state = network.start(zeros(network.typed_shapes(dtype), network.shardings))
        assert parts[name] == held(state)
    actor = zeros(made.actor.typed_shapes(dtype), made.actor.shardings)
    assert parts["reference"] == held(actor)
    assert parts["gradients"] == held(made.actor.zeros(actor)) + held(actor)  # the actor is larger by its head
    cache = made.rollout.empty(16, 24 + 32)
    assert parts["rollout"] == held(made.decode_weights(actor)) + held(cache) + held(cache[0])


def test_half_the_bytes_in_bfloat16_and_an_eighth_on_eight_devices():
    counters = 2 * 4 + 2 * 4  # of Adam, of the schedule; updates and skipped
    whole = forecast.memory(*steps(), (8, 56), 24)["actor"] - counters
    assert whole == 3 * 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(steps()[1].actor.shapes))
    half = forecast.memory(*steps(**{"model.param_dtype": "bfloat16"}), (8, 56), 24)["actor"] - counters
    assert half == whole / 2
    eighth = forecast.memory(*steps((1, 8, 1)), (8, 56), 24)["actor"] - counters
    assert whole / 8 < eighth < whole / 8 * 1.3  # norms and biases are whole everywhere


def test_no_reference_without_a_kl():
    assert forecast.memory(*steps(**{"ppo.kl_coef": 0.0}), (8, 56), 24)["reference"] == 0
    assert forecast.memory(*steps(**{"ppo.kl_coef": 0.0, "ppo.kl_loss_coef": 0.1}), (8, 56), 24)["reference"] > 0


def test_adapters_stand_on_one_frozen_copy():
    parts, whole = forecast.memory(*steps(**{"model.lora.rank": 2}), (8, 56), 24), forecast.memory(*steps(), (8, 56), 24)
    _, made = steps(**{"model.lora.rank": 2})
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(made.actor.shapes))
    assert parts["actor"] == 3 * 4 * count + 16 and count < sum(math.prod(x.shape) for x in jax.tree.leaves(made.actor.plain)) / 3
    assert parts["base"] == 2 * sum(math.prod(x.shape) for x in jax.tree.leaves(made.actor.plain)) and parts["reference"] == 0
    assert parts["gradients"] < whole["gradients"] / 3 and whole["base"] == 0
    assert parts["rollout"] == whole["rollout"]


def test_slots_bound_the_cache_and_micro_tokens_the_activations():
    parts = forecast.memory(*steps(), (8, 56), 24)
    fewer = forecast.memory(*steps(**{"rollout.slots": 8}), (8, 56), 24)
    shorter = forecast.memory(*steps(), (4, 56), 24)
    assert fewer["rollout"] < parts["rollout"] and fewer | {"rollout": 0} == parts | {"rollout": 0}
    assert shorter["activations"] * 2 == parts["activations"] and shorter | {"activations": 0} == parts | {"activations": 0}


def test_only_xla_stores_scores():
    """Of two blocks of queries at most, where a row is read in blocks; cuDNN has a mask instead, and splash nothing."""
    network, shape = steps()[1].actor, (2, 4096)
    parts = {}
    for network.method in ("full", "blockwise", "auto", "cudnn", "splash"):
        parts[network.method] = forecast.activations(network, shape)
    stored = {method: count - parts["splash"] for method, count in parts.items()}
    heads = network.model.num_attention_heads
    assert stored["full"] == 2 * 2 * heads * 4096 * 4096 * 4
    assert stored["blockwise"] == stored["auto"] == stored["full"] // 4
    assert stored["cudnn"] == 3 * 2 * 4096 * 4096 * 2


def test_the_peak_counts_what_exists_together():
    parts = {"actor": 1000, "critic": 500, "base": 100, "reference": 200, "gradients": 40, "rollout": 50, "activations": 7}
    assert forecast.peak(parts) == 1850
    assert forecast.peak(parts | {"activations": 20}) == 1860


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MB"),
        (4e5, "0.4 MB"),
        (9.94e6, "9.9 MB"),
        (37.4e6, "37 MB"),
        (999e6, "999 MB"),
        (1e9, "1.0 GB"),
        (5.93e9, "5.9 GB"),
    ],
)
def test_bytes_for_people(count, text):
    assert forecast.size(count) == text


def test_changed_keys_are_those_that_differ():
    raw = default_config()
    assert forecast.changed(resolve(raw)) == []
    raw.critic_optim.lr, raw.rollout.n = 1e-6, 2
    assert forecast.changed(resolve(raw)) == ["rollout.n=2", "critic_optim.lr=1e-06"]


def test_the_table_fits_into_80_columns():
    config, made = steps(**{"ppo.epochs": 2, "actor_optim.lr": 2e-6})
    task = SimpleNamespace(name="gsm8k", prompt_width=24, end_ids=(9, 8), train=[0] * 7473, test=[0] * 1319)
    console = Console(file=io.StringIO(), width=80)
    rows = forecast.overview(config, made, task, (8, 56))
    start_table(rows, "jax_ppo: checkpoints/x", console=console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and max(len(name) for name, _ in rows) <= 12
    assert text.splitlines()[len(rows)].startswith("changed keys ")  # no row above it needs a second line
    flat = " ".join(text.split())
    for part in (
        "mesh data=1 fsdp=1 tensor=1",
        "parameters: 2 layers, width 32, vocabulary 64",
        "weights float32, compute bfloat16",
        "gsm8k: 7,473 training and 1,319 held-out problems",
        "up to 32 tokens, ended by 9 or 8",
        "16 prompts x 1 = 16 responses an iteration",
        "2 epochs x 4 minibatches of 4 = 8 updates",
        "100 iterations, 800 updates",
        "attention full",
        "8 rows x 56 tokens",
        "MB a device at the peak, forecast",
        "always: actor 0.2 MB, critic 0.2 MB, reference",
        "ppo.epochs=2, actor_optim.lr=2e-06",
    ):
        assert part in flat, part


def test_a_device_that_is_too_small_is_told(monkeypatch):
    config, made = steps()
    task = SimpleNamespace(name="gsm8k", prompt_width=24, end_ids=(9,), train=[], test=[])
    device = SimpleNamespace(platform="gpu", device_kind="tiny", memory_stats=lambda: {"bytes_limit": 100_000})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    row = dict(forecast.overview(config, made, task, (8, 56)))["memory"]
    assert "it has 0.1 MB: too little; lower ppo.micro_tokens or rollout.slots" in row
    device.memory_stats = lambda: {"bytes_limit": 10**9}
    assert "too little" not in dict(forecast.overview(config, made, task, (8, 56)))["memory"]


def test_operations_of_an_update_by_hand():
    """Every matrix counts 6 a weight and token, but an embedding that is only looked up; causal attention 6 a pair of tokens."""
    lengths = np.array([3, 5])
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    attended = 6 * 2 * 4 * 8 * (3**2 + 5**2)
    actor, critic = steps()[1].actor, steps()[1].critic
    assert forecast.update_flops(actor, lengths) == 6 * (2 * layer + 32 * 64) * 8 + attended
    assert forecast.update_flops(critic, lengths) == 6 * (2 * layer + 32) * 8 + attended
    adapted = steps(**{"model.lora.rank": 2, "model.lora.targets": "q_proj"})[1].actor
    assert forecast.update_flops(adapted, lengths) == (4 * (2 * layer + 32 * 64) + 6 * 2 * 2 * (32 + 32)) * 8 + attended
    head = steps(**{"critic.trunk": "actor"})[1].critic
    assert forecast.update_flops(head, lengths) == (2 * (2 * layer + 32) + 4 * 32) * 8 + attended / 3


@pytest.mark.parametrize(("kind", "rate"), [("NVIDIA H200", 989e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("cpu", None)])
def test_peak_rates(kind, rate):
    assert forecast.peak_flops(kind) == rate
