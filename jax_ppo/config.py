"""The configuration: every key, its default, what is allowed, and the sizes that follow from it.

`configs/*.py` start from `default_config()` and say only what differs; `resolve` turns the result into frozen dataclasses and
refuses what cannot work, with one line that names the key, its value and what is allowed.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from jax_ppo.types import InputError


@dataclass(frozen=True)
class ModelConfig:
    """The actor.

    path: hub id, local Hugging Face directory, or "builtin" for the small model of the built-in task.
    param_dtype: dtype of the master weights and of the optimizer moments.
    compute_dtype: dtype of matmuls and of the cache; "auto" is bfloat16 on accelerators and float32 on a CPU.
    attention: "full" scores a row against itself at once, "blockwise" in blocks of queries, "auto" chooses by size.
    remat: recompute layer activations in the backward pass.
    """

    path: str = "Qwen/Qwen2.5-0.5B-Instruct"
    param_dtype: str = "float32"
    compute_dtype: str = "auto"
    attention: str = "auto"
    remat: bool = True


@dataclass(frozen=True)
class CriticConfig:
    """The critic. path: directory of its own backbone; empty means the actor's. Its scalar head starts at zero."""

    path: str = ""


@dataclass(frozen=True)
class DataConfig:
    """The problems.

    path: hub id, a directory with train.jsonl and test.jsonl, one JSONL file, or "builtin".
    eval_path: held-out problems; empty means the test split of `path`.
    eval_limit: keep the first problems of the held-out set only; 0 keeps all.
    train_limit: the same for the training set.
    instruction: text appended to every question.
    max_prompt_tokens: longest prompt. overlong: what happens to longer ones, "drop" (counted and printed) or "error".
    """

    path: str = "openai/gsm8k"
    eval_path: str = ""
    eval_limit: int = 0
    train_limit: int = 0
    instruction: str = ""
    max_prompt_tokens: int = 512
    overlong: str = "drop"


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling.

    batch: prompts an iteration. n: responses a prompt. slots: rows decoded at once; 0 means all.
    temperature: must be positive in training; evaluation is greedy.
    top_k, top_p: filters of the distribution (0 and 1 are off); refused in training, where they would make the sampled
    distribution another than the trained one.
    segment: tokens between two looks of the host at the rows that are done.
    """

    batch: int = 256
    n: int = 1
    max_response_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    slots: int = 0
    segment: int = 64


@dataclass(frozen=True)
class RewardConfig:
    """The score of a response.

    method: rule for the answer, "strict", "flexible" or "verl".
    format_score: score of a wrong answer in the right form.
    missing_end_penalty: subtracted where no end token was drawn.
    overlong_buffer: the last tokens before the limit, over which a penalty grows linearly from 0 to 1; 0 is off.
    custom: "path/to/file.py:function", called as function(prompt, response, answer) -> float instead of the rule.
    """

    method: str = "strict"
    format_score: float = 0.0
    missing_end_penalty: float = 0.0
    overlong_buffer: int = 0
    custom: str = ""


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm; the mathematics stands in `jax_ppo.ppo`.

    gamma, lam_actor, lam_critic: discount, and one lambda each for the policy's advantages and the critic's targets.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. dual_clip: bound for negative advantages; 0 is off.
    clip_value: clip range of the value loss; 0 is off.
    kl_coef: weight of the KL penalty inside the reward; kl_kind: its estimate, "k1", "k2", "k3" or "abs".
    kl_target: KL to hold by adapting kl_coef; 0 keeps kl_coef fixed.
    kl_loss_coef, entropy_coef: weights of terms in the actor's loss.
    epochs, minibatches: passes over a rollout, and updates a pass. micro_tokens: tokens of one forward and backward pass.
    aggregation: how token losses are averaged. truncated: "terminal", "bootstrap" or "mask".
    target_kl: ends the epochs of an iteration once the policy has moved this far; 0 is off.
    critic_warmup: first iterations, which train the critic alone.
    """

    gamma: float = 1.0
    lam_actor: float = 0.95
    lam_critic: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    clip_value: float = 0.0
    kl_coef: float = 0.001
    kl_kind: str = "k1"
    kl_target: float = 0.0
    kl_loss_coef: float = 0.0
    entropy_coef: float = 0.0
    epochs: int = 1
    minibatches: int = 4
    micro_tokens: int = 8192
    aggregation: str = "token-mean"
    truncated: str = "terminal"
    target_kl: float = 0.0
    critic_warmup: int = 0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW of one network. warmup is counted in updates; schedule is "constant", "linear" or "cosine" (to 0 at the last
    update); clip_norm 0 turns gradient clipping off."""

    lr: float = 1e-6
    warmup: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes the rest. The product is the device count."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclass(frozen=True)
class TrainConfig:
    """iterations: how many in all. resume: "auto" continues a workdir that has checkpoints, "never" refuses one.
    max_skipped: non-finite gradients in a row that end the run."""

    iterations: int = 100
    seed: int = 0
    resume: str = "auto"
    max_skipped: int = 5


@dataclass(frozen=True)
class WarmstartConfig:
    """Supervised start on worked solutions. steps: updates of `batch` sequences each; 0 is off."""

    steps: int = 0
    batch: int = 64
    lr: float = 1e-3
    b2: float = 0.95


@dataclass(frozen=True)
class EvalConfig:
    """every: iterations between evaluations; 0 is off. limit: problems of one evaluation during training; 0 means all.
    at_start: evaluate before the first iteration. samples: sampled responses a problem beside the greedy one."""

    every: int = 10
    limit: int = 0
    at_start: bool = True
    samples: int = 0


@dataclass(frozen=True)
class CheckpointConfig:
    """every: iterations between checkpoints (the last iteration is always saved). keep_last, keep_best: how many stay."""

    every: int = 10
    keep_last: int = 1
    keep_best: int = 1


@dataclass(frozen=True)
class LogConfig:
    """samples: responses an iteration that go into WORKDIR/samples. profile: an iteration whose device trace is written to
    WORKDIR/profile; -1 is off. wandb: name of the project; empty is off."""

    tensorboard: bool = False
    wandb: str = ""
    samples: int = 16
    profile: int = -1


@dataclass(frozen=True)
class Config:
    """A whole run. See the section classes for the meaning of each key."""

    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    actor_optim: OptimConfig = field(default_factory=OptimConfig)
    critic_optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def sequences(self) -> int:
        """B: responses an iteration."""
        return self.rollout.batch * self.rollout.n

    @property
    def max_sequence_tokens(self) -> int:
        """S: the longest prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer updates of one network in one iteration."""
        return self.ppo.epochs * self.ppo.minibatches

    @property
    def total_updates(self) -> int:
        """Optimizer updates of one network in the whole run; the length of the learning-rate schedule."""
        return self.train.iterations * self.updates_per_iteration


def default_config() -> ml_collections.ConfigDict:
    """Every key with its default, as the ConfigDict that `configs/*.py` change and the command line overrides."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


POSITIVE = "a whole number of at least 1"
UNSIGNED = "a whole number of at least 0"

# Key -> (test, what is allowed). Keys that are free text or a switch have no row.
ALLOWED: dict[str, tuple[Any, str]] = {
    "data.max_prompt_tokens": (lambda v: v >= 1, POSITIVE),
    "data.eval_limit": (lambda v: v >= 0, UNSIGNED),
    "data.train_limit": (lambda v: v >= 0, UNSIGNED),
    "rollout.batch": (lambda v: v >= 1, POSITIVE),
    "rollout.n": (lambda v: v >= 1, POSITIVE),
    "rollout.max_response_tokens": (lambda v: v >= 1, POSITIVE),
    "rollout.temperature": (lambda v: v > 0, "above 0: training needs a distribution (evaluation is always greedy)"),
    "rollout.top_k": (lambda v: v == 0, "0: a truncated distribution would be sampled but another one trained"),
    "rollout.top_p": (lambda v: v == 1, "1.0: a truncated distribution would be sampled but another one trained"),
    "rollout.slots": (lambda v: v >= 0, "a whole number of at least 0 (0 decodes all rows at once)"),
    "rollout.segment": (lambda v: v >= 1, POSITIVE),
    "reward.overlong_buffer": (lambda v: v >= 0, UNSIGNED),
    "reward.missing_end_penalty": (lambda v: v >= 0, "at least 0 (it is subtracted)"),
    "ppo.gamma": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "ppo.lam_actor": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "ppo.lam_critic": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "ppo.clip_low": (lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    "ppo.clip_high": (lambda v: v > 0, "above 0"),
    "ppo.dual_clip": (lambda v: v == 0 or v > 1, "0 (off) or above 1"),
    "ppo.clip_value": (lambda v: v >= 0, "at least 0 (0 is off)"),
    "ppo.kl_coef": (lambda v: v >= 0, "at least 0"),
    "ppo.kl_loss_coef": (lambda v: v >= 0, "at least 0"),
    "ppo.kl_target": (lambda v: v >= 0, "at least 0 (0 keeps kl_coef fixed)"),
    "ppo.target_kl": (lambda v: v >= 0, "at least 0 (0 is off)"),
    "ppo.epochs": (lambda v: v >= 1, POSITIVE),
    "ppo.minibatches": (lambda v: v >= 1, POSITIVE),
    "ppo.micro_tokens": (lambda v: v >= 1, POSITIVE),
    "ppo.critic_warmup": (lambda v: v >= 0, UNSIGNED),
    "train.iterations": (lambda v: v >= 1, POSITIVE),
    "train.max_skipped": (lambda v: v >= 1, POSITIVE),
    "train.seed": (lambda v: 0 <= v < 2**31, "a whole number from 0 to 2147483647"),
    "warmstart.steps": (lambda v: v >= 0, UNSIGNED),
    "warmstart.batch": (lambda v: v >= 1, POSITIVE),
    "warmstart.lr": (lambda v: v > 0, "above 0"),
    "warmstart.b2": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "eval.every": (lambda v: v >= 0, UNSIGNED),
    "eval.limit": (lambda v: v >= 0, UNSIGNED),
    "eval.samples": (lambda v: v >= 0, UNSIGNED),
    "checkpoint.every": (lambda v: v >= 1, POSITIVE),
    "checkpoint.keep_last": (lambda v: v >= 1, POSITIVE),
    "checkpoint.keep_best": (lambda v: v >= 0, UNSIGNED),
    "log.samples": (lambda v: v >= 0, UNSIGNED),
    "log.profile": (lambda v: v >= -1, "an iteration, or -1 (off)"),
} | {
    f"{network}.{key}": rule
    for network in ("actor_optim", "critic_optim")
    for key, rule in {
        "lr": (lambda v: v >= 0, "at least 0"),
        "warmup": (lambda v: v >= 0, UNSIGNED),
        "weight_decay": (lambda v: v >= 0, "at least 0"),
        "clip_norm": (lambda v: v >= 0, "at least 0 (0 is off)"),
        "b1": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
        "b2": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    }.items()
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.param_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("auto", "float32", "bfloat16"),
    "model.attention": ("auto", "full", "blockwise"),
    "data.overlong": ("drop", "error"),
    "reward.method": ("strict", "flexible", "verl"),
    "ppo.kl_kind": ("k1", "k2", "k3", "abs"),
    "ppo.aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "ppo.truncated": ("terminal", "bootstrap", "mask"),
    "actor_optim.schedule": ("constant", "linear", "cosine"),
    "critic_optim.schedule": ("constant", "linear", "cosine"),
    "train.resume": ("auto", "never"),
}


def resolve(raw: ml_collections.ConfigDict) -> Config:
    """Checks a ConfigDict and returns it as frozen dataclasses.

    Args:
      raw: the sections and keys of `default_config()`, with any values of the same types.

    Returns:
      The configuration, whose every value is allowed and whose values fit together.

    Raises:
      InputError: naming the key, its value, and what is allowed.
    """
    sections = {f.name: f.default_factory() for f in dataclasses.fields(Config)}  # type: ignore[misc]
    for name in raw:
        if name not in sections:
            raise InputError(f"config.{name}: no such section; there are {', '.join(sections)}")
    config = Config(**{name: _section(name, default, raw.get(name, {})) for name, default in sections.items()})
    _check_together(config)
    return config


def _section(name: str, default: Any, given: Any) -> Any:
    known = {f.name: f for f in dataclasses.fields(default)}
    values = {}
    for key, value in dict(given).items():
        full = f"{name}.{key}"
        if key not in known:
            raise InputError(f"config.{full}: no such key; {name} has {', '.join(known)}")
        values[key] = _typed(full, value, type(getattr(default, key)))
    result = dataclasses.replace(default, **values)
    for key in known:
        _check_alone(f"{name}.{key}", getattr(result, key))
    return result


def _typed(full: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise InputError(f"config.{full}={value!r}: must be {kind.__name__}, is {type(value).__name__}")
    return value


def _check_alone(full: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"config.{full}={value}: must be finite")
    if full in CHOICES and value not in CHOICES[full]:
        raise InputError(f"config.{full}={value!r}: must be one of {', '.join(CHOICES[full])}")
    if full in ALLOWED and not ALLOWED[full][0](value):
        raise InputError(f"config.{full}={value}: must be {ALLOWED[full][1]}")


def _check_together(config: Config) -> None:
    """The relations between keys, each refused with its numbers."""
    ppo, rollout, optim = config.ppo, config.rollout, (config.actor_optim, config.critic_optim)
    if ppo.minibatches > config.sequences:
        raise InputError(
            f"config.ppo.minibatches={ppo.minibatches}: must be at most rollout.batch x rollout.n = {rollout.batch} x {rollout.n} = {config.sequences}"
        )
    if config.sequences % ppo.minibatches:
        raise InputError(
            f"config.ppo.minibatches={ppo.minibatches}: must divide rollout.batch x rollout.n = {rollout.batch} x {rollout.n} = {config.sequences}"
        )
    if ppo.micro_tokens < config.max_sequence_tokens:
        raise InputError(
            f"config.ppo.micro_tokens={ppo.micro_tokens}: must hold one sequence, data.max_prompt_tokens + rollout.max_response_tokens"
            f" = {config.data.max_prompt_tokens} + {rollout.max_response_tokens} = {config.max_sequence_tokens}"
        )
    if config.reward.overlong_buffer > rollout.max_response_tokens:
        raise InputError(
            f"config.reward.overlong_buffer={config.reward.overlong_buffer}: must be at most rollout.max_response_tokens = {rollout.max_response_tokens}"
        )
    for name, o in zip(("actor_optim", "critic_optim"), optim, strict=True):
        if o.schedule != "constant" and o.warmup >= config.total_updates:
            raise InputError(
                f"config.{name}.warmup={o.warmup}: must be below the updates of the run, iterations x epochs x minibatches = {config.total_updates}"
            )


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as nested plain values, as `WORKDIR/config.json` stores it."""
    return dataclasses.asdict(config)
