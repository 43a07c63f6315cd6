"""Meshes and tables: every parameter has its place, what does not divide is refused by name, and a mesh changes no number."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ppo import sharding, steps
from jax_ppo.models import hf, qwen
from jax_ppo.models.tensor_files import TensorFiles
from jax_ppo.types import InputError

GOLDENS = Path(__file__).parent / "goldens"
MODELS = ("qwen2_tied", "qwen2_untied", "qwen3")


def shapes(config, head="lm_head"):
    return jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=head))


def paths(tree):
    return {"/".join(str(p.key) for p in path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


# --- Meshes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((8, 1, 1), (8, 1, 1)), ((2, 2, 2), (2, 2, 2)), ((-1, 2, 1), (4, 2, 1)), ((1, -1, 2), (1, 4, 2)), ((2, 4, -1), (2, 4, 1))],
)
def test_sizes_that_fit_eight_devices(sizes, expected):
    mesh = sharding.make_mesh(*sizes)
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor"), expected, strict=True))
    assert set(mesh.devices.flat) == set(jax.devices())
    assert sharding.row_shards(mesh) == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((2, 2, 1), "the product must be the number of devices, 8, not 4"),
        ((4, 4, 1), "the product must be the number of devices, 8, not 16"),
        ((3, 3, 1), "the product must be the number of devices, 8, not 9"),
        ((-1, 3, 1), "the product must be the number of devices, 8, not 6"),
        ((-1, 16, 1), "the product must be the number of devices, 8, not 16"),
        ((8, 0, 1), "each must be at least 1"),
        ((8, 1, -2), "each must be at least 1"),
        ((-1, -1, 1), "at most one may be -1"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    """Without the check JAX would take four of the eight devices for (2, 2, 1) and say nothing."""
    with pytest.raises(InputError) as caught:
        sharding.make_mesh(*sizes)
    message = str(caught.value)
    assert message.startswith("config.mesh: data={}, fsdp={}, tensor={}: ".format(*sizes))
    assert words in message
    assert "\n" not in message


# --- Tables ---------------------------------------------------------------------------------------------------------------


def families():
    """Every parameter tree there is: actor and critic of Qwen2, tied and untied, and of Qwen3, also with biases."""
    configs = [hf.load_config(GOLDENS / name) for name in MODELS]
    configs.append(dataclasses.replace(configs[-1], attention_bias=True, tie_word_embeddings=False))
    return [shapes(config, head) for config in configs for head in ("lm_head", "score")]


def test_the_tables_name_the_parameters_and_nothing_else():
    every = set().union(*(paths(tree) for tree in families()))
    assert len(every) == 18
    assert {path.removeprefix("model/").removeprefix("layers/") for path in every} == set(sharding.PARAMETER_AXES)
    assert set(hf.TABLE) == every


def test_every_parameter_gets_its_place():
    """On a mesh that splits everything: each mesh axis at most once an array, and exactly the axes of the tables."""
    mesh = sharding.make_mesh(2, 2, 2)
    for tree in families():
        specs = sharding.parameter_specs(tree, mesh)
        assert paths(specs) == paths(tree)
        for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
            assert spec.mesh == mesh
            assert len(spec.spec) == len(leaf.shape)
            used = [axis for axis in spec.spec if axis]
            assert len(used) == len(set(used))
    critic = sharding.parameter_specs(families()[1], mesh)
    layer = critic["model"]["layers"]
    assert critic["model"]["embed_tokens"]["weight"].spec == PartitionSpec("tensor", "fsdp")
    assert layer["self_attn"]["q_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert layer["self_attn"]["q_proj"]["bias"].spec == PartitionSpec(None, "tensor")
    assert layer["self_attn"]["o_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert layer["mlp"]["down_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert layer["input_layernorm"]["weight"].spec == PartitionSpec(None, None)
    assert critic["score"]["kernel"].spec == PartitionSpec(None, None)


def test_decoding_weights_are_whole_over_fsdp():
    mesh = sharding.make_mesh(2, 2, 2)
    tree = families()[2]
    specs = sharding.parameter_specs(tree, mesh)
    for training, decoding in zip(jax.tree.leaves(specs), jax.tree.leaves(sharding.decode_specs(tree, mesh)), strict=True):
        assert decoding.spec == PartitionSpec(*(None if axis == "fsdp" else axis for axis in training.spec))


def refusal(tree, mesh) -> str:
    with pytest.raises(InputError) as caught:
        sharding.parameter_specs(tree, mesh)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_parameter_without_a_row():
    mesh = sharding.make_mesh(8, 1, 1)
    tree = {"model": {"layers": {"self_attn": {"gate": {"kernel": jnp.ones((2, 4))}}}}}
    assert (
        refusal(tree, mesh) == "parameter model/layers/self_attn/gate/kernel (2, 4): no row of rank 2 in sharding.PARAMETER_AXES"
    )


def test_a_parameter_of_another_rank():
    mesh = sharding.make_mesh(8, 1, 1)
    assert "parameter model/norm/weight (2, 4): no row of rank 2" in refusal(
        {"model": {"norm": {"weight": jnp.ones((2, 4))}}}, mesh
    )


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((1, 1, 8), "parameter model/embed_tokens/weight (60, 32): 60 is not divisible by mesh axis tensor=8"),
        ((1, 8, 1), "parameter model/embed_tokens/weight (64, 36): 36 is not divisible by mesh axis fsdp=8"),
    ],
)
def test_a_dimension_that_does_not_divide(mesh, words):
    config = hf.load_config(GOLDENS / "qwen2_tied")
    config = dataclasses.replace(config, vocab_size=60) if mesh[2] == 8 else dataclasses.replace(config, hidden_size=36)
    assert refusal(shapes(config), sharding.make_mesh(*mesh)) == words


# --- Placement ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head", ["lm_head", "score"])
def test_weights_go_to_their_shards_unchanged(name, head):
    config, mesh = hf.load_config(GOLDENS / name), sharding.make_mesh(2, 2, 2)
    places = sharding.parameter_specs(shapes(config, head), mesh)
    plain = hf.load_params(GOLDENS / name, config, dtype="float32", head=head)
    placed = hf.load_params(GOLDENS / name, config, dtype="float32", head=head, shardings=places)
    assert paths(placed) == paths(plain)
    for one, other, place in zip(*map(jax.tree.leaves, (plain, placed, places)), strict=True):
        assert other.sharding == place
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for shard in other.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(one)[shard.index])


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (1, 4, 2), (2, 2, 2)])
def test_every_number_is_read_once(monkeypatch, sizes):
    """However many devices hold a slice, it comes from disk once, and a slice is read without the rest of its tensor."""
    config = hf.load_config(GOLDENS / "qwen2_untied")
    plain = TensorFiles.slice
    read = 0

    class Counting:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getitem__(self, index):
            nonlocal read
            part = self.tensor[index]
            read += part.size
            return part

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    monkeypatch.setattr(TensorFiles, "slice", lambda self, name: Counting(plain(self, name)))
    places = sharding.parameter_specs(shapes(config), sharding.make_mesh(*sizes))
    params = hf.load_params(GOLDENS / "qwen2_untied", config, dtype="float32", shardings=places)
    assert read == sum(x.size for x in jax.tree.leaves(params))


def test_fsdp_halves_what_a_device_holds():
    """Of everything but norms and biases, which are small, whole on every device, and counted here."""
    config = hf.load_config(GOLDENS / "qwen2_untied")

    def held(*sizes):
        places = sharding.parameter_specs(shapes(config), sharding.make_mesh(*sizes))
        params = hf.load_params(GOLDENS / "qwen2_untied", config, dtype="float32", shardings=places)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        small = sum(
            x.nbytes for path, x in leaves if "norm" in jax.tree_util.keystr(path) or "bias" in jax.tree_util.keystr(path)
        )
        return [sum(x.addressable_shards[i].data.nbytes for _, x in leaves) - small for i in range(8)]

    whole = held(8, 1, 1)
    assert whole[0] > 70_000
    assert held(4, 2, 1) == [size // 2 for size in whole]
    assert held(2, 4, 1) == [size // 4 for size in whole]


def test_rows_and_copies():
    mesh = sharding.make_mesh(2, 2, 2)
    rows = jax.device_put(np.arange(16).reshape(8, 2), sharding.rows(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 2)}
    copies = jax.device_put(np.arange(16).reshape(8, 2), sharding.replicated(mesh))
    assert {shard.data.shape for shard in copies.addressable_shards} == {(8, 2)}


def test_activations_are_pinned_where_a_mesh_is_set():
    """On CPU as well; without a mesh the array is the same object."""
    x = jnp.ones((8, 2, 4))
    assert sharding.constrain(x, "rows", None, None) is x
    mesh = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: sharding.constrain(2 * x, "rows", None, "heads"))(x)
    assert pinned.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor")), 3)


# --- Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2_untied", (1, 4, 2)),
        ("qwen3", (1, 4, 2)),
        # Two key-value heads over four devices: half a head on each. A run refuses that mesh, since its cache is split by heads;
        # the forward pass is right all the same.
        ("qwen2_tied", (2, 1, 4)),
    ],
)
def test_a_mesh_changes_no_logit(name, sizes):
    config, mesh = hf.load_config(GOLDENS / name), sharding.make_mesh(*sizes)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 24)).astype(np.int32)
    run = jax.jit(qwen.logits, static_argnames="config")
    one = np.asarray(run(hf.load_params(GOLDENS / name, config, dtype="float32"), config, tokens))
    places = sharding.parameter_specs(shapes(config), mesh)
    with jax.set_mesh(mesh):
        params = hf.load_params(GOLDENS / name, config, dtype="float32", shardings=places)
        result = run(params, config, jax.device_put(tokens, sharding.rows(mesh)))
    assert len(result.sharding.device_set) == 8
    assert result.addressable_shards[0].data.shape[0] == 8 // sharding.row_shards(mesh)
    assert np.max(np.abs(np.asarray(result) - one)) < 1e-5 * one.std()


def test_programs_do_not_pile_up_on_virtual_devices():
    """There XLA would end the process; on one device the host runs ahead."""
    many, one = sharding.make_mesh(1, 8, 1), jax.make_mesh((1, 1, 1), sharding.AXES, devices=jax.devices()[:1])
    waits, runs_ahead = (steps.jit(mesh, lambda x, *, times: x * times, static_argnames="times") for mesh in (many, one))
    assert isinstance(waits, steps.Waiting) and not isinstance(runs_ahead, steps.Waiting)
    assert waits(jnp.float32(2.0), times=3).is_ready()
    assert float(waits(jnp.float32(2.0), times=3)) == float(runs_ahead(jnp.float32(2.0), times=3)) == 6.0
    assert waits.lower(jnp.float32(2.0), times=3).compile()
