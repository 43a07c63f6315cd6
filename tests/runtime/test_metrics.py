"""The files of a run: strict, whole, and every iteration in them once."""

import json
import os
import signal
import struct
import subprocess
import sys
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_ppo.runtime import metrics
from jax_ppo.types import InputError


def strict(text):
    """What a parser makes of `text` that knows no NaN and takes no key twice."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def once(pairs):
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def lines(workdir):
    data = (workdir / "metrics.jsonl").read_bytes().decode("utf-8")
    assert data == "" or data.endswith("\n")
    return [strict(line) for line in data.split("\n")[:-1]]


def writer(workdir, resume_after=0, tensorboard=False, wandb="", config=None):
    return metrics.Writer(workdir, resume_after=resume_after, tensorboard=tensorboard, wandb=wandb, config=config or {})


def test_numbers_of_every_kind_become_plain_numbers(tmp_path):
    given = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "minus": jnp.float32(-jnp.inf),
        "none": None,
        "jax": jnp.float32(0.25),
        "jax_one": jnp.array([3], jnp.int32),
        "bf16": jnp.bfloat16(1.5),
        "np_bf16": np.array(1.5, ml_dtypes.bfloat16),
        "np": np.float32(-0.5),
        "int": np.int64(2**40),
        "flag": np.bool_(True),
        "python": 7,
    }
    writer(tmp_path).write(1, given)
    assert lines(tmp_path) == [
        {"iteration": 1, "nan": None, "inf": None, "minus": None, "none": None, "jax": 0.25, "jax_one": 3}
        | {"bf16": 1.5, "np_bf16": 1.5, "np": -0.5, "int": 1099511627776, "flag": True, "python": 7}
    ]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"iteration": 1, ')


@pytest.mark.parametrize("value", [jnp.zeros(2), "0.5", np.array([]), {"a": 1}, 1j, np.datetime64("2020-01-01")])
def test_what_is_not_one_number_is_named_and_nothing_is_written(tmp_path, value):
    log = writer(tmp_path)
    with pytest.raises(TypeError, match="critic/score/mean"):
        log.write(1, {"actor/lr": 1e-6, "critic/score/mean": value})
    assert lines(tmp_path) == []


def test_a_resumed_run_has_each_iteration_once(tmp_path):
    first = writer(tmp_path)
    for i in range(9):  # 0 is the evaluation before training
        first.write(i, {"x": 10 * i})
        metrics.write_samples(tmp_path, i, [])
        metrics.write_eval(tmp_path, i, {"count": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 9, "x": 9')
    (tmp_path / "eval" / "final.json").write_text("{}")

    second = writer(tmp_path, resume_after=5)
    assert [record["iteration"] for record in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
    for i in (6, 7):
        second.write(i, {"x": -i})
    assert [(r["iteration"], r["x"]) for r in lines(tmp_path)] == [(i, 10 * i) for i in range(6)] + [(6, -6), (7, -7)]
    assert sorted(os.listdir(tmp_path / "samples")) == [f"00000{i}.jsonl" for i in range(6)]
    assert sorted(os.listdir(tmp_path / "eval")) == [f"00000{i}.json" for i in range(6)] + ["final.json"]

    writer(tmp_path, resume_after=0)
    assert lines(tmp_path) == []
    assert not list(tmp_path.rglob("*.partial"))


def test_a_broken_line_costs_itself_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"iteration": 1, "x": NaN}\n\x00\x00\xff\n[1]\n{"iteration": 2}\n{"iteration": 2, "x": 5}\n{"iteration": 3, "t": "\xe2'
    )
    assert [r["iteration"] for r in metrics.read(tmp_path)] == [1, 2]
    writer(tmp_path, resume_after=3)
    assert lines(tmp_path) == [{"iteration": 1, "x": None}, {"iteration": 2, "x": 5}]


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    first = writer(tmp_path)
    first.write(1, {"x": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        writer(tmp_path, resume_after=1)
    assert lines(tmp_path) == [{"iteration": 1, "x": 1}]


def test_a_killed_run_keeps_its_last_line(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from jax_ppo.runtime.metrics import Writer\n"
        "log = Writer(sys.argv[1], resume_after=0, tensorboard=False, wandb='', config={})\n"
        "log.write(1, {'x': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert lines(tmp_path) == [{"iteration": 1, "x": 0.5}]


def test_read_without_a_run_is_empty(tmp_path):
    assert metrics.read(tmp_path / "nowhere") == []


def test_import_loads_neither_matplotlib_nor_trackers():
    program = "import sys, jax_ppo.runtime.metrics\nprint({'matplotlib', 'tensorboardX', 'wandb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip() == "set()"


def test_config_is_written(tmp_path):
    writer(tmp_path, config={"ppo": {"gamma": 1.0, "kl_kind": "k1"}})
    assert strict((tmp_path / "config.json").read_text()) == {"ppo": {"gamma": 1.0, "kl_kind": "k1"}}


SAMPLE = {"prompt": "p", "response": "r", "answer": "18", "score": 1.0, "finish": "eos", "prompt_length": 3, "response_length": 5}


def test_samples_are_valid_utf8_with_one_line_a_response(tmp_path):
    texts = ["half \ud83d an emoji \ude00", "whole \ud83d\ude00", "line\nends \x85\u2028\u2029\r\x0b", "né 数 \x00", "\ud83d"]
    right = ["half � an emoji �", "whole 😀", texts[2], texts[3], "�"]
    path = metrics.write_samples(tmp_path, 7, [SAMPLE | {"response": t, "score": np.float32(0.5)} for t in texts])
    assert path == tmp_path / "samples" / "000007.jsonl"
    rows = [strict(line) for line in path.read_bytes().decode("utf-8", "strict").splitlines()]
    assert [row["response"] for row in rows] == right
    assert all(list(row) == list(SAMPLE) and row["score"] == 0.5 for row in rows)


@pytest.mark.parametrize("change", [{"finish": "stop"}, {"extra": 1}, {"answer": ...}])
def test_a_sample_with_other_keys_is_refused(tmp_path, change):
    row = {key: value for key, value in (SAMPLE | change).items() if value is not ...}
    with pytest.raises(ValueError, match="prompt, response, answer"):
        metrics.write_samples(tmp_path, 1, [row])
    assert not list(tmp_path.rglob("*.jsonl"))


def test_eval_result_is_strict_json(tmp_path):
    result = {
        "accuracy": {"strict": np.float32(0.5), "verl": jnp.float32(jnp.nan)},
        "count": np.int32(8),
        "rows": [np.array([1, 2])],
    }
    path = metrics.write_eval(tmp_path, 120, result)
    assert path == tmp_path / "eval" / "000120.json"
    right = {"iteration": 120, "accuracy": {"strict": 0.5, "verl": None}, "count": 8, "rows": [[1, 2]]}
    assert strict(path.read_text(encoding="utf-8")) == right


def events(folder):
    """(file, step, tag, value) of every TensorBoard event, and the steps at which a session started, read record by record."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars, starts = [], []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            starts += [event.step] if event.session_log.status == SessionLog.START else []
    return scalars, starts


def test_tensorboard_purges_what_is_written_again(tmp_path):
    with writer(tmp_path, tensorboard=True) as first:
        for i in range(1, 4):
            first.write(i, {"x": i, "gone": float("nan")})
    with writer(tmp_path, resume_after=2, tensorboard=True) as second:
        second.write(3, {"x": 30})
    scalars, starts = events(tmp_path / "tensorboard")
    assert sorted(scalars) == [(1, "x", 1.0), (2, "x", 2.0), (3, "x", 3.0), (3, "x", 30.0)]
    assert sorted(starts) == [0, 3]  # from 3 on, what the first file says no longer counts


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.axes, self.finished = options, [], {}, False

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.runs = []

    def init(**options):
        if options["project"] == "refused":
            raise module.Error("no key\n  configured")
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_continues_its_run_with_the_iteration_as_axis(tmp_path, wandb):
    for resume_after in (0, 1, 0):
        with writer(tmp_path, resume_after, wandb="ppo", config={"train": {"seed": 3}}) as log:
            log.write(resume_after + 1, {"x": 0.5, "y": float("nan")})
    first, second, third = wandb.runs
    assert first.options["project"] == "ppo" and first.options["config"] == {"train": {"seed": 3}}
    assert first.options["id"] == second.options["id"] != third.options["id"]
    assert (first.axes["*"], first.logged, second.logged) == (
        "iteration",
        [{"iteration": 1, "x": 0.5}],
        [{"iteration": 2, "x": 0.5}],
    )
    assert all(run.finished for run in wandb.runs)


def test_wandb_continues_the_run_that_the_checkpoint_names(tmp_path, wandb):
    options = {"resume_after": 3, "tensorboard": False, "wandb": "ppo", "config": {}}
    for folder in ("one", "other"):  # where the file beside the checkpoints is gone, too
        with metrics.Writer(tmp_path / folder, tracker="abc123", **options) as log:
            assert log.tracker == "abc123"
    assert [run.options["id"] for run in wandb.runs] == ["abc123", "abc123"]
    with metrics.Writer(tmp_path / "one", tracker="", **options) as log:  # a checkpoint that knows of none
        assert log.tracker == "abc123"


def test_wandb_that_refuses_is_one_line_and_changes_nothing(tmp_path, wandb):
    writer(tmp_path).write(1, {"x": 1})
    with pytest.raises(InputError, match=r"^config\.log\.wandb='refused': no key configured$"):
        writer(tmp_path, wandb="refused")
    assert lines(tmp_path) == [{"iteration": 1, "x": 1}]


def test_missing_wandb_is_one_line(tmp_path, monkeypatch):
    writer(tmp_path).write(1, {"x": 1})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError) as caught:
        writer(tmp_path, wandb="ppo")
    assert "pip install jax_ppo[wandb]" in str(caught.value) and "\n" not in str(caught.value)
    assert lines(tmp_path) == [{"iteration": 1, "x": 1}]


DOCUMENTED = """
    actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/ppo_kl_k3 actor/entropy actor/grad_norm actor/lr actor/kl_loss
    actor/reward_kl_penalty actor/reward_kl_penalty_coeff critic/vf_loss critic/vf_clipfrac critic/vf_explained_var
    critic/vpred_mean critic/grad_norm critic/lr critic/score/mean critic/rewards/max critic/advantages/min critic/returns/mean
    critic/values/max response_length/mean response_length/clip_ratio prompt_length/min timing_s/gen timing_s/reward
    timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv timing_s/update_actor timing_s/update_critic
    timing_s/testing timing_s/save_checkpoint timing_s/step perf/throughput perf/mfu/actor perf/mfu/critic
    perf/update_tflop/actor perf/update_tflop/critic
    perf/max_memory_allocated_gb training/global_step training/epoch training/rollout_probs_diff_mean
    training/rollout_probs_diff_max actor/update_ratio actor/skipped critic/skipped actor/ratio/min actor/ratio/max
    training/first_ratio_dev_max training/truncated_frac perf/packing_fill training/updates time/wall_s warmstart/loss
    warmstart/grad_norm val-core/gsm8k/acc/mean@1 val-core/openai/gsm8k/acc/mean@1 val-core/my-set.v2/acc_flexible/mean@1
    val-core/gsm8k/acc_verl/mean@1 val-core/gsm8k/acc/mean@16 val-core/gsm8k/acc/best@8 val-aux/gsm8k/truncated_frac
""".split()
UNKNOWN = """
    actor/pg_los actor/pg_loss/mean xactor/pg_loss critic/score/std timing_s/sleep val-core/gsm8k/acc/mean@0
    val-core/gsm8k/acc/mean@ val-core/gsm8k/acc_verl/best@4 val-core//acc/mean@1 val-core/acc/mean@1 val-aux/gsm8k/acc/mean@1
    iteration {actor,critic}/skipped
""".split()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_logged_names_are_documented(name):
    assert metrics.is_documented(name)


@pytest.mark.parametrize("name", [*UNKNOWN, ""])
def test_other_names_are_not(name):
    assert not metrics.is_documented(name)


def test_the_table_explains_every_metric():
    rows = metrics.describe().splitlines()[2:]
    assert all(row.replace("\\|", "").count("|") == 3 for row in rows)  # two cells; a | inside one is escaped
    assert all(meaning and "\n" not in meaning for meaning in metrics.METRICS.values())
    assert "| `critic/score/{mean,max,min}` | score of a response |" in rows
    assert {"critic/score/min", "actor/skipped", "critic/skipped"} <= set(metrics.METRICS)
    assert not any(set("{},") & set(name) for name in metrics.METRICS)
