"""The recipes of docs/launch.md as far as a machine without a cluster can check them: syntax, options, keys, and the table."""

import re
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType

from jax_ppo import config as configuration
from jax_ppo import schema, sharding
from jax_ppo.runtime import forecast
from jax_ppo.steps import Steps

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
SCRIPTS = [text for kind, text in BLOCKS if kind == "bash"]
DOCUMENTS = [document for kind, text in BLOCKS if kind == "yaml" for document in yaml.safe_load_all(text)]


@pytest.fixture(scope="module")
def memory(tool):
    """The script tools/memory.py as a module."""
    return tool("memory")


def test_all_code_is_marked_as_shell_or_yaml():
    assert {kind for kind, _ in BLOCKS} == {"bash", "yaml"} and TEXT.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("script", [*SCRIPTS, *(d[k] for d in DOCUMENTS for k in ("setup", "run") if k in d)])
def test_a_shell_can_read_the_scripts(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_keys_and_files_exist():
    for name in re.findall(r"--config\.([\w.]+)=", TEXT):
        schema.check_key(configuration.keys(), name, "")
    for file in re.findall(r"(?:configs|tools)/\w+\.py", TEXT):
        assert (ROOT / file).is_file(), file


def test_the_pods_of_the_job_find_each_other():
    service, job = (next(d for d in DOCUMENTS if d.get("kind") == kind) for kind in ("Service", "Job"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    variables = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    name, port = variables["JAX_COORDINATOR_ADDRESS"].split(":")
    assert name == f"{job['metadata']['name']}-0.{service['metadata']['name']}" and port.isdigit()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert variables["JAX_NUM_PROCESSES"] == str(spec["completions"])


def test_the_table_is_what_the_command_prints(memory, capsys):
    memory.work([])
    assert capsys.readouterr().out in TEXT


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (2, 4)])
def test_devices_that_are_not_there_count_like_those_that_are(memory, fsdp, tensor):
    config, model = configuration.Config(), memory.MODELS["Qwen2.5-7B"]
    devices = np.array(jax.devices()).reshape(1, fsdp, tensor)
    steps = Steps(config, model, model, jax.sharding.Mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * 3))
    parts = forecast.memory(config, steps, (fsdp, 1024), 512)
    assert memory.bytes_per_device(config, model, fsdp, tensor) == {**parts, "peak": forecast.peak(parts)}


def test_the_shapes_are_those_of_the_published_models(memory):
    """Parameters by hand: embedding and head, and per layer attention with its biases, MLP and two norms; and one norm."""
    for name, count in (("Qwen2.5-0.5B", 494_032_768), ("Qwen2.5-7B", 7_615_616_512), ("Qwen2.5-32B", 32_763_876_352)):
        mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
        shapes = Steps(configuration.Config(), memory.MODELS[name], None, mesh).actor.shapes
        assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes)) == count
