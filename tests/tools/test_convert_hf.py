"""The converter: what goes in comes out byte by byte, and everything else is one line and exit code 2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from jax_ppo import job
from jax_ppo.data import arithmetic
from jax_ppo.models import hf
from jax_ppo.runtime import checkpoint
from jax_ppo.types import Params

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
TOOL = ROOT / "tools" / "convert_hf.py"
MODELS = ("qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3")


def converted(convert, *words):
    assert convert.main([str(word) for word in words]) == 0


def refused(convert, capsys, *words) -> str:
    """The one line with which a command line is refused."""
    capsys.readouterr()
    assert convert.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err.removeprefix("error: ").strip()


def assert_same_bytes(one: Path, other: Path, dtype=None):
    """Every tensor of two directories; the first one in another dtype where it is given."""
    before, after = (load_file(path / "model.safetensors") for path in (one, other))
    assert set(before) == set(after)
    for name, x in before.items():
        x = x.astype(dtype or x.dtype)
        assert (x.dtype, x.shape) == (after[name].dtype, after[name].shape)
        assert x.tobytes() == after[name].tobytes(), name


def described(path: Path) -> Path:
    """A directory in bfloat16 with a tokenizer and what else stands beside weights."""
    config = tiny.model(vocab_size=384)
    hf.save_params(tiny.redrawn(0, config), config, path, dtype="bfloat16")
    arithmetic.tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return path


def run_of(workdir: Path, actor: Params, critic: Params, config=tiny.MODEL, iteration: int = 5) -> Path:
    """What a run leaves: a checkpoint and the description of its model, stated to be bfloat16."""
    hf.write_description(config, workdir / "model", dtype="bfloat16")
    saved = checkpoint.Checkpoints(workdir, keep_last=5, keep_best=0)
    states = [checkpoint.TrainState(p, {"mu": p}, jnp.int32(1), jnp.int32(0)) for p in (actor, critic)]
    saved.save(iteration, *states, {}, None)
    saved.close()
    return workdir


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_are_byte_equal(convert, tmp_path, name):
    converted(convert, "import", GOLDENS / name, tmp_path / "run")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.parent in (tmp_path, tmp_path / "run")) == [
        "checkpoints",
        "model",
        "run",
    ]
    converted(convert, "export", tmp_path / "run", tmp_path / "export")
    assert_same_bytes(GOLDENS / name, tmp_path / "export")
    assert hf.load_config(tmp_path / "export") == hf.load_config(GOLDENS / name)


@pytest.mark.parametrize("through", [[], ["--dtype=float32"], ["--dtype=bfloat16"]])
def test_bfloat16_comes_back_as_bfloat16(convert, tmp_path, through):
    """With all that stood beside the weights, and the dtype that config.json states."""
    source = described(tmp_path / "source")
    converted(convert, "import", source, tmp_path / "run", *through)
    converted(convert, "export", tmp_path / "run" / "checkpoints" / "0", tmp_path / "export")
    assert_same_bytes(source, tmp_path / "export")
    assert {p.name for p in (tmp_path / "export").iterdir()} == {p.name for p in source.iterdir()}
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "export" / file).read_text() == (source / file).read_text()
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10_000.0


def test_a_single_precise_tensor_is_not_rounded(convert, tmp_path):
    source = described(tmp_path / "source")
    precise = np.full(32, 1 + 2**-20, np.float32)
    save_file(load_file(source / "model.safetensors") | {"model.norm.weight": precise}, source / "model.safetensors")
    converted(convert, "import", source, tmp_path / "run")
    converted(convert, "export", tmp_path / "run", tmp_path / "export", "--dtype=float32")
    assert_same_bytes(source, tmp_path / "export", np.float32)
    assert load_file(tmp_path / "export" / "model.safetensors")["model.norm.weight"][0] == precise[0]


def test_a_head_that_differs_survives(convert, tmp_path):
    source = Path(shutil.copytree(GOLDENS / "qwen2_tied", tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, source / "model.safetensors")
    with pytest.warns(UserWarning, match="keeping the separate head"):
        convert.import_model(source, tmp_path / "run")
    converted(convert, "export", tmp_path / "run", tmp_path / "export")
    assert_same_bytes(source, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_critic(convert, tmp_path, capsys):
    """A directory with a score is one; it has no actor."""
    hf.save_params(tiny.redrawn(1, head="score"), tiny.MODEL, tmp_path / "source", dtype="float32")
    converted(convert, "import", tmp_path / "source", tmp_path / "run")
    said = refused(convert, capsys, "export", tmp_path / "run", tmp_path / "export")
    assert "checkpoint 0 is broken: it has no actor, only a critic" in said
    converted(convert, "export", tmp_path / "run", tmp_path / "export", "--which=critic")
    assert_same_bytes(tmp_path / "source", tmp_path / "export")
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen2ForSequenceClassification"] and raw["num_labels"] == 1


def test_both_networks_of_a_run(convert, tmp_path):
    """Float32 in the checkpoint, rounded only in the file; the optimizer stays behind."""
    actor, critic = tiny.redrawn(1), tiny.redrawn(2, head="score")
    workdir = run_of(tmp_path / "run", actor, critic)
    for which, params in (("actor", actor), ("critic", critic)):
        hf.save_params(params, tiny.MODEL, tmp_path / f"expected-{which}", dtype="float32")
        converted(convert, "export", workdir, tmp_path / which, f"--which={which}")
        assert_same_bytes(tmp_path / f"expected-{which}", tmp_path / which, ml_dtypes.bfloat16)
        converted(convert, "export", workdir, tmp_path / f"{which}-exact", f"--which={which}", "--dtype=float32")
        assert_same_bytes(tmp_path / f"expected-{which}", tmp_path / f"{which}-exact")


def test_a_critic_of_another_shape_is_exported_by_its_own_description(convert, tmp_path):
    other = tiny.model(hidden_size=64, head_dim=16, num_hidden_layers=1)
    critic = tiny.redrawn(2, other, "score")
    workdir = run_of(tmp_path / "run", tiny.redrawn(1), critic)
    hf.write_description(other, workdir / "critic", dtype="float32", critic=True)
    converted(convert, "export", workdir, tmp_path / "critic", "--which=critic")
    hf.save_params(critic, other, tmp_path / "expected", dtype="float32")
    assert_same_bytes(tmp_path / "expected", tmp_path / "critic")


def test_a_head_on_the_actor_is_exported_with_its_trunk(convert, tmp_path):
    actor, head = tiny.redrawn(1), {"score": tiny.redrawn(2, head="score")["score"]}
    workdir = run_of(tmp_path / "run", actor, head)
    converted(convert, "export", workdir, tmp_path / "critic", "--which=critic", "--dtype=float32")
    hf.save_params({"model": actor["model"], **head}, tiny.MODEL, tmp_path / "expected", dtype="float32")
    assert_same_bytes(tmp_path / "expected", tmp_path / "critic")


def test_the_newest_whole_checkpoint_or_a_certain_one(convert, tmp_path, capsys):
    critic = tiny.redrawn(0, head="score")
    for seed in (1, 2, 3):
        run_of(tmp_path / "run", tiny.redrawn(seed), critic, iteration=seed)
        hf.save_params(tiny.redrawn(seed), tiny.MODEL, tmp_path / str(seed), dtype="float32")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "3" / "actor" / "_METADATA").write_text("")
    converted(convert, "export", tmp_path / "run", tmp_path / "newest")
    assert "checkpoint 3 is broken" in capsys.readouterr().out
    assert_same_bytes(tmp_path / "2", tmp_path / "newest", ml_dtypes.bfloat16)
    converted(convert, "export", checkpoints / "1", tmp_path / "first")
    assert_same_bytes(tmp_path / "1", tmp_path / "first", ml_dtypes.bfloat16)
    assert "checkpoint 3 is broken" in refused(convert, capsys, "export", checkpoints / "3", tmp_path / "x")
    assert "no checkpoint 9; there are 1, 2, 3" in refused(convert, capsys, "export", checkpoints / "9", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_work_is_spread_over_all_devices(convert, tmp_path, monkeypatch):
    seen = []
    save = hf.save_params
    monkeypatch.setattr(hf, "save_params", lambda params, *args, **kwargs: (seen.append(params), save(params, *args, **kwargs)))
    write = checkpoint.save_params
    monkeypatch.setattr(checkpoint, "save_params", lambda *args: (seen.append(args[1]), write(*args)))
    converted(convert, "import", GOLDENS / "qwen2_untied", tmp_path / "run")
    converted(convert, "export", tmp_path / "run", tmp_path / "export")
    for params in seen:
        kernel = params["model"]["layers"]["mlp"]["up_proj"]["kernel"]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 4, 48)}
    assert len(seen) == 2


def test_an_import_is_not_a_run_to_continue(convert, tmp_path):
    converted(convert, "import", GOLDENS / "qwen2_tied", tmp_path / "run")
    with pytest.raises(job.InputError, match="not a run to continue"):
        job._before(job.Config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: {import,export}; usage: "),
        (["import", "a"], "the following arguments are required: CKPT_DIR; usage: "),
        (["improt", "a", "b"], "invalid choice: 'improt'"),
        (["import", "a", "b", "--dtype=float16"], "argument --dtype: invalid choice: 'float16'"),
        (["import", "a", "b", "--which=critic"], "unrecognized arguments: --which=critic"),
        (["export", "a", "b", "--which=both"], "argument --which: invalid choice: 'both'"),
        (["import", "/nowhere", "b"], "/nowhere: no such directory"),
        (["export", "/nowhere", "b"], "/nowhere: neither a workdir with checkpoints nor one of its checkpoints"),
        (["export", str(GOLDENS / "qwen3"), "b"], "qwen3: neither a workdir with checkpoints nor one of its checkpoints"),
        (["import", str(GOLDENS / "qwen3"), str(GOLDENS)], "goldens: is not empty; nothing is overwritten"),
        (["export", str(GOLDENS / "qwen3"), str(TOOL)], "convert_hf.py: is a file; nothing is overwritten"),
    ],
)
def test_a_wrong_command_line(convert, capsys, words, said):
    assert said in refused(convert, capsys, *words)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: whole[:-9], "model.safetensors: cannot be read, the download may be incomplete"),
        (lambda whole: b"", "model.safetensors: cannot be read, the download may be incomplete"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer, not the file itself"),
    ],
)
def test_a_damaged_file_leaves_nothing_behind(convert, capsys, tmp_path, damage, said):
    file = Path(shutil.copytree(GOLDENS / "qwen2_tied", tmp_path / "source")) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert said in refused(convert, capsys, "import", tmp_path / "source", tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_mesh_that_does_not_divide(convert, capsys, tmp_path):
    config = tiny.model(hidden_size=36)
    hf.save_params(tiny.redrawn(0, config), config, tmp_path / "source", dtype="float32")
    said = refused(convert, capsys, "import", tmp_path / "source", tmp_path / "run")
    assert "36 is not divisible by mesh axis fsdp=8" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


# A process of its own, because it limits the size of its files: that of a description passes, that of weights does not.
FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.path.insert(0, sys.argv.pop(1))
import convert_hf
sys.exit(convert_hf.main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_nothing_appears(convert, tmp_path):
    source, run, target = GOLDENS / "qwen2_untied", tmp_path / "run", tmp_path / "target"
    converted(convert, "import", source, run)
    for words in (["import", source, target], ["export", run, target]):
        line = [sys.executable, "-c", FULL, str(TOOL.parent), *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=100)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("failed: ") and done.stderr.count("\n") == 1 and "File too large" in done.stderr
        assert not target.exists()
    converted(convert, "export", run, target)
    assert_same_bytes(source, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "target"], "what the failures left is gone"


def test_the_program_itself(tmp_path):
    line = [sys.executable, str(TOOL)]
    done = subprocess.run(
        [*line, "import", str(GOLDENS / "qwen3"), "run"], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "run: actor in float32\n", "")
    done = subprocess.run([*line, "import", "nothing", "x"], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: nothing: no such directory\n")
    done = subprocess.run([*line, "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0 and "python tools/convert_hf.py import HF_DIR CKPT_DIR" in done.stdout
