"""The numbers of a run: what each one means, and the files they are written to.

    WORKDIR/config.json          resolved configuration
    WORKDIR/metrics.jsonl        one object an iteration, key "iteration" first
    WORKDIR/samples/NNNNNN.jsonl responses of an iteration
    WORKDIR/eval/NNNNNN.json     result of an evaluation
    WORKDIR/tensorboard/         the same numbers for TensorBoard
    WORKDIR/wandb_id             which wandb run a resumed run continues

All of it is strict JSON in valid UTF-8: what is not finite is null, and text that is not Unicode shows U+FFFD.
Where several processes train together, one of them writes.
"""

import importlib
import itertools
import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_ppo.types import InputError

# Braces stand for one name each, DATASET for the name of a data set, K for a number of samples.
_MEANINGS = {
    "actor/pg_loss": "clipped policy loss, over the iteration's updates",
    "actor/pg_clipfrac": "share of tokens whose ratio was clipped",
    "actor/pg_clipfrac_lower": "share of tokens at the dual clip",
    "actor/ppo_kl": "mean of old minus new log-probability: how far the updates moved the policy; of a few tokens it may be negative",
    "actor/ppo_kl_k3": "the same by ratio - 1 - log ratio, which is never negative; `ppo.target_kl` is compared with it",
    "actor/entropy": "entropy of the policy at a token, in nats",
    "actor/grad_norm": "norm of the actor's gradient before clipping",
    "actor/lr": "learning rate of the actor",
    "actor/kl_loss": "KL term of the actor's loss, before its coefficient",
    "actor/reward_kl_penalty": "KL to the reference policy a token, as the rewards see it, before the coefficient",
    "actor/reward_kl_penalty_coeff": "coefficient of that KL in this iteration's rewards",
    "{actor,critic}/update_ratio": "norm of an update of the network, divided by the norm of its parameters",
    "actor/ratio/{min,max}": "probability of a token under the new policy divided by that under the old",
    "{actor,critic}/skipped": "updates of the network that this iteration skipped for a non-finite gradient",
    "critic/vf_loss": "value loss, over the iteration's updates",
    "critic/vf_clipfrac": "share of tokens where the clipped value loss was the larger one",
    "critic/vf_explained_var": "1 - Var(returns - values) / Var(returns) before the update; 1 is perfect, 0 knows nothing",
    "critic/vpred_mean": "mean value predicted during the update",
    "critic/grad_norm": "norm of the critic's gradient before clipping",
    "critic/lr": "learning rate of the critic",
    "critic/score/{mean,max,min}": "score of a response",
    "critic/rewards/{mean,max,min}": "sum of a response's token rewards: the score minus the KL penalty",
    "critic/advantages/{mean,max,min}": "advantage of a token, as the policy learns from it: whitened over the batch, or within a prompt",
    "critic/returns/{mean,max,min}": "target of the critic at a token",
    "critic/values/{mean,max,min}": "value of a token before the update",
    "response_length/{mean,max,min}": "tokens of a response, the end token included",
    "response_length/clip_ratio": "share of responses as long as the limit allows",
    "prompt_length/{mean,max,min}": "tokens of a prompt",
    "timing_s/gen": "seconds: sampling the responses",
    "timing_s/reward": "seconds: scoring the responses",
    "timing_s/old_log_prob": "seconds: log-probabilities under the sampling policy",
    "timing_s/ref": "seconds: log-probabilities under the reference policy",
    "timing_s/values": "seconds: values of the critic",
    "timing_s/adv": "seconds: token rewards and advantages",
    "timing_s/update_actor": "seconds: updates of the actor",
    "timing_s/update_critic": "seconds: updates of the critic",
    "timing_s/testing": "seconds: evaluation on held-out problems",
    "timing_s/save_checkpoint": "seconds: waiting for a checkpoint",
    "timing_s/step": "seconds: the whole iteration",
    "time/wall_s": "seconds of the run so far",
    "perf/throughput": "tokens of prompts and responses a second and device, over the whole iteration",
    "perf/update_tflop/{actor,critic}": "10^12 floating-point operations that the updates need; what is computed twice counts once",
    "perf/mfu/{actor,critic}": "those a second, as share of the devices' peak in bfloat16; absent where the peak is not known",
    "perf/max_memory_allocated_gb": "largest device memory in use so far, in GB",
    "perf/packing_fill": "share of real tokens in the packed rows",
    "training/global_step": "the iteration, under verl's name",
    "training/epoch": "pass over the training problems, from 0",
    "training/updates": "optimizer updates of the actor so far",
    "training/truncated_frac": "share of responses without an end token",
    "training/rollout_probs_diff_{mean,max}": "|probability when sampled - probability recomputed| of a token",
    "training/scored_frac": "share of tokens that were scored again; below 1 where the sampler's log-probabilities are taken",
    "training/first_ratio_dev_max": "largest |ratio - 1| in the first minibatch: 0 but for rounding",
    "val-core/DATASET/acc/mean@1": "held-out accuracy, greedy, by the run's own scoring rule",
    "val-core/DATASET/acc_flexible/mean@1": "the same responses by the rule `flexible`",
    "val-core/DATASET/acc_verl/mean@1": "the same responses by the rule `verl`",
    "val-core/DATASET/acc/mean@K": "mean accuracy of K sampled responses a problem",
    "val-core/DATASET/acc/best@K": "share of problems that at least one of K sampled responses solves",
    "val-aux/DATASET/truncated_frac": "share of held-out responses without an end token",
    "warmstart/loss": "cross-entropy a token of the supervised start",
    "warmstart/grad_norm": "norm of the gradient of the supervised start",
}


def _expand(pattern: str) -> list[str]:
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


METRICS: dict[str, str] = {name: meaning for pattern, meaning in _MEANINGS.items() for name in _expand(pattern)}

# A data set may carry its owner: "openai/gsm8k".
_PLACEHOLDERS = {"DATASET": r"[^/\s]+(?:/[^/\s]+)?", "@K": r"@[1-9]\d*"}
_PATTERN = re.compile(
    "|".join(re.sub("|".join(_PLACEHOLDERS), lambda m: _PLACEHOLDERS[m[0]], re.escape(name)) for name in METRICS)
)


def is_documented(name: str) -> bool:
    """True if METRICS explains this name, either as it stands or with a data set and a number in place of DATASET and K."""
    return _PATTERN.fullmatch(name) is not None


def describe() -> str:
    """The metrics as a Markdown table, with families such as {mean,max,min} in one row."""
    rows = [f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in _MEANINGS.items()]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows]) + "\n"


def plain(name: str, value: Any) -> int | float | bool | None:
    """A metric as a number that JSON knows.

    Args:
      name: what the value is called, for the error.
      value: a number, or anything numpy can read as one: a numpy scalar, a jax array with one element.

    Returns:
      int, float or bool; None for None, NaN and the infinities.

    Raises:
      TypeError: `value` is not one number.
    """
    if value is None:
        return None
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "USOcMm":
        raise TypeError(f"metric {name}: must be one real number, is {type(value).__name__} of shape {array.shape}")
    number = array.item()
    return None if isinstance(number, float) and not math.isfinite(number) else number


def clean_text(text: str) -> str:
    """The text with surrogate pairs joined and each lone surrogate, which UTF-8 cannot express, replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# JSON may leave these three as they are, but tools that split text into lines take them for line ends.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def _dump(value: Any, indent: int | None = None) -> str:
    text = json.dumps(_strict("", value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.translate(_LINE_ENDS)


def _strict(name: str, value: Any) -> Any:
    """Nested mappings, sequences, texts and numbers as strict JSON knows them."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(k)): _strict(f"{name}.{k}".lstrip("."), v) for k, v in value.items()}
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
        return [_strict(f"{name}[{i}]", v) for i, v in enumerate(value)]
    return plain(name, value)


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is there either as a whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; lines that are no object, such as one half written, are left out. [] without a file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """The records of a run, in the order of their iterations; null is None.

    Args:
      workdir: folder of the run. Without a metrics.jsonl the answer is [].
    """
    records = [r for r in read_lines(Path(workdir) / "metrics.jsonl") if isinstance(r.get("iteration"), int)]
    by_iteration = {record["iteration"]: record for record in records}
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


SAMPLE_KEYS = ("prompt", "response", "answer", "score", "finish", "prompt_length", "response_length")


def write_samples(workdir: str | Path, iteration: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes WORKDIR/samples/NNNNNN.jsonl, a line a response.

    Args:
      workdir: folder of the run.
      iteration: whose responses these are.
      rows: mappings with exactly the SAMPLE_KEYS: texts prompt, response, answer; score; finish "eos" or "length";
        prompt_length and response_length in tokens.

    Returns:
      The path of the file.

    Raises:
      ValueError: a row has other keys, or another finish.
    """
    lines = []
    for row in rows:
        if set(row) != set(SAMPLE_KEYS) or row["finish"] not in ("eos", "length"):
            raise ValueError(f'a sample has the keys {", ".join(SAMPLE_KEYS)} and finish "eos" or "length", not {dict(row)}')
        lines.append(_dump({key: row[key] for key in SAMPLE_KEYS}) + "\n")
    path = Path(workdir) / "samples" / f"{iteration:06d}.jsonl"
    replace_file(path, "".join(lines))
    return path


def write_eval(workdir: str | Path, iteration: int, result: Mapping[str, Any]) -> Path:
    """Writes WORKDIR/eval/NNNNNN.json.

    Args:
      workdir: folder of the run.
      iteration: how many iterations the evaluated policy has been trained for.
      result: what was found, nested as one likes. The report reads the key "count", the number of problems.

    Returns:
      The path of the file.
    """
    path = Path(workdir) / "eval" / f"{iteration:06d}.json"
    replace_file(path, _dump({"iteration": iteration, **result}, indent=2) + "\n")
    return path


def _forget_after(workdir: Path, iteration: int) -> None:
    """Removes what a run that is continued after `iteration` will write again, so that nothing is there twice.

    With 0 every record goes, that of an evaluation before the first iteration included: it is made again.
    """
    kept = [record for record in read(workdir) if iteration > 0 and record["iteration"] <= iteration]
    replace_file(workdir / "metrics.jsonl", "".join(_dump(record) + "\n" for record in kept))
    for path in itertools.chain((workdir / "samples").glob("*.jsonl"), (workdir / "eval").glob("*.json")):
        if re.fullmatch(r"\d{6,}", path.stem) and int(path.stem) > iteration:
            path.unlink()


def require_wandb() -> Any:
    """The wandb module.

    Raises:
      InputError: it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise InputError("config.log.wandb is set but wandb is not installed: pip install jax_ppo[wandb]") from error


def _start_wandb(module: Any, workdir: Path, project: str, resume_after: int, config: Mapping[str, Any], known: str) -> Any:
    remembered = workdir / "wandb_id"
    if not known and resume_after and remembered.exists():
        known = remembered.read_text().strip()
    run_id = known or uuid.uuid4().hex[:8]
    options = {"project": project, "id": run_id, "name": workdir.resolve().name, "dir": str(workdir), "config": dict(config)}
    try:
        run = module.init(resume="allow", **options)
    except module.Error as error:
        raise InputError(f"config.log.wandb={project!r}: {' '.join(str(error).split())}") from error
    replace_file(remembered, run_id + "\n")
    # wandb's own step only counts up; after a resume the iteration is the axis that stays true.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run


class Writer:
    """Writes the metrics of a run, each iteration exactly once even if the run was killed and continued.

    Args:
      workdir: folder of the run; made if missing. Its config.json is written.
      resume_after: the last iteration that stays. Iterations are counted from 1; 0 starts a fresh file. Records, samples
        and evaluations of later iterations are removed, as is a half-written last line.
      tensorboard: also write WORKDIR/tensorboard.
      wandb: also report to this wandb project; "" does not.
      config: the resolved configuration as nested plain values.
      tracker: id of the wandb run to continue, as the checkpoint has it; "" takes the one that WORKDIR/wandb_id names, or a new one.

    Attributes:
      tracker: id of the wandb run, or "".

    Raises:
      InputError: wandb is asked for but is not installed, or refuses to start. The files are then as they were.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        resume_after: int,
        tensorboard: bool,
        wandb: str,
        config: Mapping[str, Any],
        tracker: str = "",
    ):
        self._workdir = Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._run = _start_wandb(require_wandb(), self._workdir, wandb, resume_after, config, tracker) if wandb else None
        self.tracker = (self._workdir / "wandb_id").read_text().strip() if self._run is not None else tracker
        _forget_after(self._workdir, resume_after)
        replace_file(self._workdir / "config.json", _dump(config, indent=2) + "\n")
        self._board: Any = None
        if tensorboard:
            board = importlib.import_module("tensorboardX")
            # TensorBoard drops what earlier files say from `purge` on. The suffix keeps apart two files of one second.
            purge = resume_after + 1 if resume_after else 0
            folder = str(self._workdir / "tensorboard")
            self._board = board.SummaryWriter(logdir=folder, purge_step=purge, filename_suffix=f".{uuid.uuid4().hex[:8]}")

    def write(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record. A run that is killed afterwards keeps it.

        Args:
          iteration: from 1; 0 for what was measured before the first one.
          metrics: name -> number; NaN and the infinities become null.

        Raises:
          TypeError: a value is not one number; nothing is written.
        """
        numbers = {name: plain(name, value) for name, value in metrics.items() if name != "iteration"}
        with open(self._workdir / "metrics.jsonl", "a", encoding="utf-8", newline="\n") as file:
            file.write(_dump({"iteration": int(iteration), **numbers}) + "\n")
        finite = {name: number for name, number in numbers.items() if number is not None}
        if self._board is not None:
            for name, number in finite.items():
                self._board.add_scalar(name, number, iteration)
            self._board.flush()
        if self._run is not None:
            self._run.log({"iteration": int(iteration), **finite})

    def close(self) -> None:
        """Ends the TensorBoard file and the wandb run. The JSON files need no end."""
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()
        self._board = self._run = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
