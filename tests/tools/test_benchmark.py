"""The benchmark runs, and its numbers are about what they say; how large they are is no business of a test."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jax_ppo.data import arithmetic
from jax_ppo.models import hf, qwen

ROOT = Path(__file__).parents[2]


def lines(*words):
    """What the tool prints, as a user starts it: on one device."""
    run = subprocess.run([sys.executable, "tools/benchmark.py", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_a_whole_iteration():
    (line,) = lines("iteration", "--repeat=1")
    assert line["new_tokens"] == 32 * 64  # nothing ends early
    # Both networks have four layers of width 128; the actor's unembedding is used, and 6 x weights x tokens is the most of it.
    assert 29 < line["update_gflop"] < 30
    assert line["stages"].keys() == {"gen", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic"}
    assert 0.9 * line["s_per_iteration"] < sum(line["stages"].values()) < line["s_per_iteration"]
    assert 0 < line["share_of_floor"] < 1


@pytest.mark.slow
def test_an_update_packed_and_padded(tmp_path):
    described, model, data = tmp_path / "described", tmp_path / "model", tmp_path / "data.jsonl"
    described.mkdir()
    (described / "config.json").write_text(json.dumps(arithmetic.MODEL))
    arithmetic.tokenizer().save_pretrained(described)
    config = hf.load_config(described)
    hf.save_params(qwen.init(jax.random.key(0), config), config, model, dtype="float32", source=described)
    rows = [{"question": p.question, "answer": p.solution} for p in arithmetic.problems("train", 8, 0)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("update", f"--model={model}", f"--data={data}", "--layers=1", "--problems=8", "--repeat=1")
    packed, padded = lines(*words)
    assert (packed["update"], padded["update"]) == ("packed", "padded")
    assert packed["tokens"] == padded["tokens"] > 0
    # The same tokens: 8 rows of 1,536 against as few rows as they need.
    assert padded["fill"] == pytest.approx(packed["tokens"] / (8 * 1536), rel=1e-6)
    assert packed["fill"] > padded["fill"]
    assert packed["tokens_per_s"] == pytest.approx(packed["tokens"] / packed["s"])
    (alone,) = lines(*words, "--only=packed")
    assert alone["update"] == "packed" and alone["fill"] == packed["fill"]
