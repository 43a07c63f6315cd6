"""Files that are missing, damaged or at odds are refused in one line; what is written comes back, also in shards."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_ppo.models import tensor_files
from jax_ppo.models.tensor_files import Tensor, TensorFiles
from jax_ppo.types import InputError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def model(directory):
    return directory("qwen2_tied")


@pytest.fixture
def sharded(model):
    """The same model in two shards; returns it and what each shard holds."""
    tensors = model.tensors
    names = sorted(tensors)
    halves = {FIRST: names[:12], SECOND: names[12:]}
    for file, part in halves.items():
        model.write({name: tensors[name] for name in part}, file)
    write_index(model, {name: file for file, part in halves.items() for name in part})
    (model.path / "model.safetensors").unlink()
    return model, halves


def write_index(model, where):
    (model.path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def refusal(path) -> str:
    """The one line with which opening is refused; it begins with the directory."""
    with pytest.raises(InputError) as caught:
        TensorFiles(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_shards_read_as_one_file(model, sharded, golden):
    with TensorFiles(sharded[0].path) as shards, TensorFiles(golden("qwen2_tied")) as whole:
        assert set(shards.where) == set(whole.where)
        for name in whole.where:
            np.testing.assert_array_equal(shards.slice(name)[:], whole.slice(name)[:])


def test_released_files_are_read_again(sharded, golden):
    """Released, they are no longer mapped into memory."""
    maps = Path("/proc/self/maps")
    with TensorFiles(sharded[0].path) as files, TensorFiles(golden("qwen2_tied")) as whole:
        for name in files.where:
            np.testing.assert_array_equal(files.slice(name)[:], whole.slice(name)[:])
            if maps.exists():
                assert str(sharded[0].path) in maps.read_text()
            files.release()
            if maps.exists():
                assert str(sharded[0].path) not in maps.read_text()


def test_a_missing_shard(sharded):
    model, _ = sharded
    (model.path / SECOND).unlink()
    message = refusal(model.path)
    assert SECOND in message
    assert "download may be incomplete" in message


def test_an_index_that_names_other_files(sharded):
    """All tensors are there, but not where the index says."""
    model, halves = sharded
    write_index(model, {name: f"old-{file}" for file, part in halves.items() for name in part})
    assert f"old-{FIRST}" in refusal(model.path)


def test_a_tensor_in_two_shards(sharded):
    model, halves = sharded
    twice = halves[SECOND][0]
    first = load_file(model.path / FIRST)
    model.write(first | {twice: 1 + load_file(model.path / SECOND)[twice]}, FIRST)
    message = refusal(model.path)
    assert twice in message
    assert FIRST in message
    assert SECOND in message


def test_a_tensor_that_its_shard_lacks(sharded):
    model, halves = sharded
    write_index(model, {name: file for file, part in halves.items() for name in part} | {"model.extra": FIRST})
    assert "does not hold model.extra" in refusal(model.path)


def test_a_tensor_that_the_index_lacks(sharded):
    model, halves = sharded
    write_index(model, {name: file for file, part in halves.items() for name in part if name != halves[FIRST][0]})
    assert f"holds {halves[FIRST][0]}, which {INDEX} places in no file" in refusal(model.path)


def test_one_file_beside_shards_counts(sharded):
    """As in transformers; the shards, here damaged, are not even opened."""
    model, _ = sharded
    (model.path / FIRST).write_bytes(b"")
    model.write({"model.norm.weight": np.full(3, 7.0, np.float32)})
    with TensorFiles(model.path) as files:
        assert set(files.where) == {"model.norm.weight"}
        assert files.where["model.norm.weight"].name == "model.safetensors"


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{}", "version https://git-lfs"])
def test_an_unusable_index(sharded, text):
    model, _ = sharded
    (model.path / INDEX).write_text(text)
    assert "not a usable index" in refusal(model.path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "cannot be read, the download may be incomplete"),
        (lambda whole: whole[:300], "cannot be read, the download may be incomplete"),
        (lambda whole: b"", "cannot be read, the download may be incomplete"),
        (lambda whole: LFS, "a git-lfs pointer, not the file itself"),
        (lambda whole: b"<html>" + whole, "cannot be read"),
        (lambda whole: whole + b"\0", "cannot be read"),
    ],
    ids=["a byte short", "header cut", "empty", "git-lfs pointer", "a web page", "a byte too many"],
)
def test_damaged_files(model, damage, words):
    file = model.path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert words in refusal(model.path)


def test_a_folder_in_place_of_the_file(model):
    (model.path / "model.safetensors").unlink()
    (model.path / "model.safetensors").mkdir()
    assert "cannot be read" in refusal(model.path)


def test_no_weights(model):
    (model.path / "model.safetensors").unlink()
    message = refusal(model.path)
    assert "no weights" in message
    assert INDEX in message
    # Not the weights of a model, so it says nothing about what is missing.
    (model.path / "training_args.bin").touch()
    assert "no weights" in refusal(model.path)


# --- Writing --------------------------------------------------------------------------------------------------------------


def tensors(*shapes):
    rng = np.random.default_rng(0)
    return {f"t{i}": rng.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}


def write(arrays, dtype, path):
    tensor_files.write({name: Tensor(x.size, lambda x=x: x) for name, x in arrays.items()}, np.dtype(dtype), path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_strides_do_not_reach_the_file(tmp_path, dtype):
    """The writer dumps memory as it lies: of the transposed view of a square matrix it would make another matrix."""
    square = tensors((6, 6))["t0"].astype(dtype)
    write({"plain": square, "transposed": square.T, "strided": square[::2], "column": square[:, 1]}, dtype, tmp_path)
    back = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(back["plain"], square)
    np.testing.assert_array_equal(back["transposed"], [[square[j, i] for j in range(6)] for i in range(6)])
    np.testing.assert_array_equal(back["strided"], [square[0], square[2], square[4]])
    np.testing.assert_array_equal(back["column"], [row[1] for row in square])
    assert {x.dtype for x in back.values()} == {np.dtype(dtype)}


def test_shards_hold_at_most_their_size(tmp_path, monkeypatch):
    """Room for 100 floats: 60 + 40 fill a shard, 130 has one to itself, and so has what follows."""
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 400)
    arrays = tensors((60,), (8, 5), (130,), (3, 3), (1,))
    write(arrays, np.float32, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    file = "model-{}-of-00003.safetensors".format
    assert index["weight_map"] == {
        "t0": file("00001"), "t1": file("00001"), "t2": file("00002"), "t3": file("00003"), "t4": file("00003")
    }  # fmt: skip
    assert index["metadata"] == {"total_size": 4 * 240}
    (tmp_path / "config.json").write_text("{}")
    with TensorFiles(tmp_path) as files:
        for name, x in arrays.items():
            np.testing.assert_array_equal(files.slice(name)[:], x)


def test_others_may_read_what_the_users_mask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        write(tensors((4, 4)), np.float32, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_one_file_has_no_index(tmp_path):
    write(tensors((4, 4), (2,)), np.float32, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_shard_at_a_time_is_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 400)
    present = []

    def fetch():
        present.append(len(list(tmp_path.glob("*.safetensors"))))
        return np.ones(100, np.float32)

    tensor_files.write({f"t{i}": Tensor(100, fetch) for i in range(3)}, np.dtype(np.float32), tmp_path)
    assert present == [0, 1, 2]
