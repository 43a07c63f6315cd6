"""How fast is it, and how far from what the machine could do? One JSON line a repetition.

    python tools/benchmark.py rollout [--model=HF_DIR] [--workload=small|equal|ragged] [--repeat=3]
    python tools/benchmark.py iteration [--repeat=3]
    python tools/benchmark.py tpu [--topology=v5e:2x4] [--tensor=1] [--rows=32] [--length=2048] [--attention=...]
    python tools/benchmark.py update --model=HF_DIR --data=GSM8K [--layers=4] [--micro-tokens=4096] [--problems=16]
        [--only=packed] [--repeat=3]

    small    16 prompts of 32 tokens, 64 new ones each, a random model of 4 layers and width 256
    equal    16, then 32 prompts of 128 random tokens, 64 new ones each, of the model in HF_DIR
    ragged   --problems problems of --data (JSONL) x 4 samples, as long as they come out, at most 256 tokens, of the model in HF_DIR
    peer     the workload `ragged` through `generate` of transformers, for which torch is needed
    update   one update of the actor on --problems problems with their solutions as responses, of random weights in the shape of the
             model in HF_DIR: packed, and then as one sequence a row of 1,536 tokens, in turns
    iteration  whole iterations, from prompts to both updated networks: 32 prompts of 5 to 16 tokens, 64 new ones each, with a
             reference, 1 epoch of 1 minibatch, of a random model of 4 layers, width 128 and vocabulary 256
    tpu      no time but memory: a micro-batch of the actor's update in the shape of Qwen2.5-0.5B, compiled for the TPUs of a
             topology, none of which need be here; install jax[tpu], and set JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1

The floor is the time that the matrix products of the workload would take at the rate measured for that number of rows, or
the reading of the weights at the measured bandwidth, whichever is longer, token by token; everything else would be free.
Compare programs only within one sitting, in turns, by the ratio of their medians.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jax_ppo import sharding
from jax_ppo.config import Config, DataConfig, ModelConfig, OptimConfig, PPOConfig, RolloutConfig
from jax_ppo.data import dataset, prompts
from jax_ppo.evaluate import make_engine
from jax_ppo.learner import Learner, row_shape
from jax_ppo.models import hf, qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.ppo import packing
from jax_ppo.runtime import forecast
from jax_ppo.steps import Steps
from jax_ppo.types import Experience, PackedBatch, Params, Problem, Prompts, Rollout

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SMALL = QwenConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)
HALF_BILLION = dataclasses.replace(
    SMALL,
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Workload:
    """What to sample.

    ends: end ids; an id outside of the vocabulary where nothing ends early.
    """

    name: str
    model: QwenConfig
    params: Params
    prompts: Prompts
    limit: int
    ends: tuple[int, ...]


def seconds(function: Any, repeat: int = 5) -> float:
    """The shortest of several calls, in seconds."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return min(times[1:])


class Machine:
    """What this machine can do, measured once for each size.

    bandwidth: bytes a second, reading.
    """

    def __init__(self, dtype: Any):
        """Measures the bandwidth; products in `dtype`."""
        self.dtype, self._rates = dtype, dict[int, float]()
        x = jnp.ones(2**28 // jnp.dtype(dtype).itemsize, dtype)
        total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
        self.bandwidth = x.nbytes / seconds(lambda: total(x))

    def rate(self, rows: int) -> float:
        """Flops a second of [rows, 4096] x [4096, 4096], over matrices that do not fit into a cache; rows are rounded up to a power of 2."""
        rows = 2 ** math.ceil(math.log2(rows))
        if rows not in self._rates:
            keys = jax.random.split(jax.random.key(0), 5)
            x, *matrices = [jax.random.normal(k, (n, 4096), self.dtype) for k, n in zip(keys, [rows] + [4096] * 4, strict=True)]
            products = jax.jit(lambda x, m: [x @ w for w in m])
            self._rates[rows] = 4 * 2 * rows * 4096**2 / seconds(lambda: products(x, matrices))
        return self._rates[rows]


def floor(machine: Machine, model: QwenConfig, prompt_lengths: np.ndarray, lengths: np.ndarray) -> float:
    """Seconds that a workload would take if only its matrix products, or the reading of the weights, cost time.

    Args:
      machine:        what was measured.
      model:          of the workload.
      prompt_lengths: of the prompts that are read.
      lengths:        of the responses, all begun together.
    """
    heads = model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    layer = 2 * model.hidden_size * heads + 3 * model.hidden_size * model.intermediate_size
    body, head = model.num_hidden_layers * layer, model.hidden_size * model.vocab_size
    read = (body + head) * jnp.dtype(machine.dtype).itemsize / machine.bandwidth
    prefill = 2 * body * int(prompt_lengths.sum()) / machine.rate(1024)
    live = (np.arange(lengths.max())[:, None] < lengths[None]).sum(axis=1)
    return prefill + sum(max(2 * (body + head) * int(n) / machine.rate(int(n)), read) for n in live)


def workloads(arguments: argparse.Namespace) -> Iterator[Workload]:
    """Those that were asked for."""
    rng = np.random.default_rng(0)
    nothing = (10**6,)

    def random_prompts(count: int, length: int, low: int, high: int) -> Prompts:
        tokens = [rng.integers(low, high, length).astype(np.int32) for _ in range(count)]
        return Prompts([Problem("", "")] * count, tokens, np.arange(count))

    if arguments.workload == "small":
        yield Workload("small", SMALL, qwen.init(jax.random.key(0), SMALL), random_prompts(16, 32, 3, 253), 64, nothing)
        return
    model = hf.load_config(arguments.model)
    params = hf.load_params(arguments.model, model, dtype="float32")
    if arguments.workload == "equal":
        for count in (16, 32):
            yield Workload(f"equal {count}", model, params, random_prompts(count, 128, 1000, 20000), 64, nothing)
        return
    tokenizer, problems, tokens = gsm8k(arguments)
    some = Prompts([p for p in problems for _ in range(4)], [t for t in tokens for _ in range(4)], np.arange(4 * len(tokens)))
    yield Workload("ragged", model, params, some, 256, prompts.end_ids(arguments.model, tokenizer))


def gsm8k(arguments: argparse.Namespace) -> tuple[Any, list[Problem], list[np.ndarray]]:
    """Tokenizer, --problems problems and their prompts."""
    tokenizer = prompts.load_tokenizer(arguments.model)
    problems, tokens, _ = prompts.encode(
        dataset.load(arguments.data, "test", limit=arguments.problems),
        tokenizer,
        instruction=INSTRUCTION,
        max_prompt_tokens=512,
        overlong="error",
    )
    return tokenizer, problems, tokens


def rollout(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Samples each workload, again and again, after everything is compiled."""
    for work in workloads(arguments):
        count, width = len(work.prompts.tokens), -(-int(work.prompts.lengths.max()) // 8) * 8
        config = Config(
            model=ModelConfig(), rollout=RolloutConfig(batch=count, max_response_tokens=work.limit, segment=arguments.segment)
        )
        mesh = sharding.make_mesh(1, -1, 1)
        with jax.set_mesh(mesh):
            steps = Steps(config, work.model, None, mesh)
            machine = Machine(steps.actor.dtype)
            params = jax.device_put(work.params, steps.actor.shardings)
            engine = make_engine(config, steps, prompt_width=width, end_ids=work.ends, pad_id=0)
            weights = steps.decode_weights(params)
            start = time.perf_counter()
            engine.compile(params, weights)
            compiled = time.perf_counter() - start
            engine.generate(params, weights, work.prompts, jax.random.key(0), temperature=1.0, limit=2)
            for repetition in range(arguments.repeat):
                start = time.perf_counter()
                out: Rollout = engine.generate(params, weights, work.prompts, jax.random.key(repetition), temperature=1.0)
                took = time.perf_counter() - start
                read = np.array([len(t) for t in {x.tobytes(): x for x in work.prompts.tokens}.values()])
                least = floor(machine, work.model, read, out.lengths)
                yield {
                    "workload": work.name,
                    "new_tokens": int(out.lengths.sum()),
                    "longest": int(out.lengths.max()),
                    "s": took,
                    "new_tokens_per_s": int(out.lengths.sum()) / took,
                    "floor_s": least,
                    "share_of_floor": least / took,
                    "compile_s": compiled,
                }


def update(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One update of the actor, packed and padded, with the share of the product rate that useful flops reach.

    Useful are 6 x parameters of the matrices x real tokens, and the products of attention within each sequence; what
    rematerialisation computes again is not.
    """
    count, padded_to, limit = arguments.problems, 1536, 512
    tokenizer, problems, prompt_tokens = gsm8k(arguments)
    answers = [prompts.encode_solution(tokenizer, p.solution, 0)[:limit] for p in problems]
    lengths = np.array([len(a) for a in answers], np.int32)
    responses = np.stack([np.pad(a, (0, limit - len(a))) for a in answers])
    model = dataclasses.replace(hf.load_config(arguments.model), num_hidden_layers=arguments.layers)
    config = Config(rollout=RolloutConfig(batch=count, max_response_tokens=limit))
    mesh, rng = sharding.make_mesh(1, -1, 1), np.random.default_rng(0)
    with jax.set_mesh(mesh):
        steps = Steps(config, model, None, mesh)
        machine = Machine(steps.actor.dtype)
        state = steps.actor.start(jax.device_put(qwen.init(jax.random.key(0), model), steps.actor.shardings))
        mask = (np.arange(limit)[None] < lengths[:, None]).astype(np.float32)
        noise = [jnp.asarray(rng.normal(size=mask.shape) * mask, jnp.float32) for _ in range(5)]
        experience = Experience(jnp.asarray(mask), jnp.asarray(mask), *noise)
        length = -(-(max(map(len, prompt_tokens)) + limit) // 8) * 8
        everything = np.arange(count)
        packed = packing.layout(
            prompt_tokens, responses, lengths, everything, rows=max(arguments.micro_tokens // length, 1), row_length=length
        )
        alone = [packing.layout(prompt_tokens, responses, lengths, [b], rows=1, row_length=padded_to)[0] for b in everything]
        some = max(arguments.micro_tokens // padded_to, 1)
        padded = [jax.tree.map(lambda *x: np.concatenate(x), *alone[i : i + some]) for i in range(0, count, some)]
        tokens = np.array([len(p) for p in prompt_tokens]) + lengths
        flops = forecast.update_flops(steps.actor, tokens)
        total = jnp.float32(lengths.sum())
        for repetition in range(arguments.repeat + 1):
            for name, batches in {"packed": packed, "padded": padded}.items():
                if arguments.only not in ("", name):
                    continue
                start = time.perf_counter()
                grads = steps.actor.zeros(state.params)
                for batch in batches:
                    grads, _ = steps.update_actor(state.params, grads, {}, batch, experience, total, total)
                state, _ = steps.actor.apply(state, grads)
                jax.block_until_ready(state.params)
                took = time.perf_counter() - start
                if repetition:
                    yield {
                        "update": name,
                        "tokens": int(tokens.sum()),
                        "fill": packing.fill(batches),
                        "micro_batches": len(batches),
                        "s": took,
                        "tokens_per_s": int(tokens.sum()) / took,
                        "share_of_product_rate": flops / took / machine.rate(1024),
                    }


def iteration(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Samples, scores on the host, values, estimates and updates, again and again, after two iterations that compile."""
    model = dataclasses.replace(
        SMALL, vocab_size=256, hidden_size=128, intermediate_size=512, head_dim=32, tie_word_embeddings=True
    )
    count, width, limit = 32, 16, 64
    config = Config(
        model=ModelConfig(remat=True),
        data=DataConfig(max_prompt_tokens=width),
        rollout=RolloutConfig(batch=count, max_response_tokens=limit, segment=arguments.segment),
        ppo=PPOConfig(kl_coef=0.05, minibatches=1, micro_tokens=count * (width + limit)),
        actor_optim=OptimConfig(lr=1e-3),
    )
    tokens = [np.array([3 + (i * 7 + j) % 200 for j in range(5 + i % 12)], np.int32) for i in range(count)]
    prompts, mesh = Prompts([Problem("", "")] * count, tokens, np.arange(count)), sharding.make_mesh(1, -1, 1)
    with jax.set_mesh(mesh):
        steps = Steps(config, model, model, mesh)
        machine = Machine(steps.actor.dtype)
        start = lambda network, head: network.start(  # noqa: E731
            jax.device_put(qwen.init(jax.random.key(0), model, head=head), network.shardings)
        )
        actor, critic = start(steps.actor, "lm_head"), start(steps.critic, "score")
        reference = jax.tree.map(jnp.array, actor.params)
        learner = Learner(config, steps, row_shape(config, width, sharding.row_shards(mesh)), actor, critic, reference)
        engine = make_engine(config, steps, prompt_width=width, end_ids=(10**6,), pad_id=0)
        engine.compile(learner.policy, steps.decode_weights(learner.policy))
        for i in range(1, arguments.repeat + 3):
            times: dict[str, float] = {}

            @contextmanager
            def clock(stage, times=times):
                begun = time.perf_counter()
                yield
                times[stage] = time.perf_counter() - begun

            begun = time.perf_counter()
            with clock("gen"):
                weights, key = steps.decode_weights(learner.policy), jax.random.fold_in(jax.random.key(0), i)
                out: Rollout = engine.generate(learner.policy, weights, prompts, key, temperature=1.0)
            with clock("reward"):
                texts = [" ".join(f"t{t}" for t in row) for row in out.tokens]
                scores = np.array([float(text.split().count("t7")) for text in texts], np.float32)
            experience, _ = learner.experience(prompts, out, scores, config.ppo.kl_coef, clock)
            learner.update(prompts, out, experience, i, clock)
            took = time.perf_counter() - begun
            lengths = prompts.lengths + out.lengths
            flops = [forecast.update_flops(network, lengths) for network in (steps.actor, steps.critic)]
            # Scoring is the forward third: of the actor twice, for the old policy and for the reference, and of the critic.
            products = flops[0] * (1 + 2 / 3) + flops[1] * (1 + 1 / 3)
            least = floor(machine, model, prompts.lengths, out.lengths) + products / machine.rate(2048)
            if i > 2:
                yield {
                    "workload": "iteration",
                    "new_tokens": int(out.lengths.sum()),
                    "s_per_iteration": took,
                    "floor_s": least,
                    "share_of_floor": least / took,
                    "update_gflop": sum(flops) / 1e9,
                    "stages": times,
                }


def tpu(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compiles one micro-batch of the actor's update for all chips of a topology, with each attention, with remat and without.

    `memory` is what XLA's `memory_analysis` says of one chip; weights, gradients and batch are the arguments, and `gb` is all
    of it at once; `kernels` counts the calls of Pallas in the program. A program that does not fit is told by the compiler, with what it would need.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=arguments.topology).devices
    mesh = Mesh(np.reshape(devices, (1, -1, arguments.tensor)), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    shape = (arguments.rows, arguments.length)
    rows, everywhere = sharding.rows(mesh), sharding.replicated(mesh)
    typed = lambda shape, dtype, place: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    batch = PackedBatch(*[typed(shape, jnp.int32, rows)] * 6)
    experience = Experience(*[typed((256, 1024), jnp.float32, everywhere)] * 7)
    total = typed((), jnp.float32, everywhere)
    for method in arguments.attention.split(","):
        for remat in (True, False):
            config = Config(model=ModelConfig(compute_dtype="bfloat16", remat=remat))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                steps = Steps(config, HALF_BILLION, None, mesh)
                # Past the probe, which would ask the machine that this runs on.
                steps.actor.method = method
                params = jax.tree.map(
                    lambda x, s: typed(x.shape, x.dtype, s), steps.actor.typed_shapes("float32"), steps.actor.shardings
                )
                lowered = steps.update_actor.lower(params, params, {}, batch, experience, total, total)
            start = time.perf_counter()
            said: dict[str, Any] = {
                "topology": arguments.topology,
                "mesh": dict(mesh.shape),
                "rows": shape[0],
                "length": shape[1],
            }
            said |= {"attention": method, "remat": remat}
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                yield said | {"error": str(error)}
                continue
            memory = compiled.memory_analysis()
            parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
            whole = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
            took, kernels = time.perf_counter() - start, compiled.as_text().count('custom_call_target="tpu_custom_call"')
            yield said | {"gb": whole / 1e9, "memory": parts, "kernels": kernels, "compile_s": took}


def peer(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The ragged workload through transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    tokenizer, _, tokens = gsm8k(arguments)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    ends = list(prompts.end_ids(arguments.model, tokenizer))
    width = max(len(t) for t in tokens)
    ids = torch.tensor([[0] * (width - len(t)) + t.tolist() for t in tokens])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in tokens])
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    for repetition in range(arguments.repeat):
        torch.manual_seed(repetition)
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=256,
            num_return_sequences=4,
            eos_token_id=ends,
            pad_token_id=0,
            **sampling,
        )
        took = time.perf_counter() - start
        new = out[:, width:].numpy()
        first = np.where(np.isin(new, ends).any(axis=1), np.isin(new, ends).argmax(axis=1) + 1, new.shape[1])
        yield {
            "peer": "transformers",
            "workload": "ragged",
            "new_tokens": int(first.sum()),
            "longest": int(first.max()),
            "s": took,
            "new_tokens_per_s": int(first.sum()) / took,
        }


WORK = {"rollout": rollout, "update": update, "iteration": iteration, "peer": peer, "tpu": tpu}


def main() -> None:
    """Parses the command line and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WORK))
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--data", default="", help="directory or JSONL of GSM8K")
    parser.add_argument("--workload", choices=["small", "equal", "ragged"], default="small")
    parser.add_argument("--segment", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-tokens", type=int, default=4096)
    parser.add_argument("--problems", type=int, default=16, help="of --data, for ragged, peer and update")
    parser.add_argument("--only", choices=["", "packed", "padded"], default="", help="of the two updates")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--topology", default="v5e:2x4", help="of TPUs, for tpu")
    parser.add_argument("--tensor", type=int, default=1, help="chips over which heads are split; the rest split rows and weights")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--attention", default="splash,blockwise", help="methods to compare, for tpu")
    arguments = parser.parse_args()
    for line in WORK[arguments.what](arguments):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
