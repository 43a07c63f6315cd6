"""Every way to mistype a command ends in one line and exit code 2; what is right has its effect."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jax_ppo import config as configuration
from jax_ppo.runtime import cli
from jax_ppo.types import InputError, RunError

ROOT = Path(__file__).parents[2]
HEAD = "from jax_ppo.config import default_config\ndef get_config():\n    config = default_config()\n"


@pytest.fixture(autouse=True)
def program_wide_hooks_are_put_back(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with configs/tiny.py, which changes a batch, and configs/other.py."""
    monkeypatch.chdir(tmp_path)
    write("configs/tiny.py", "    config.rollout.batch = 8\n    config.model.remat = False\n    return config\n")
    write("configs/other.py", "    return config\n")
    return tmp_path


def write(name, body, head=HEAD):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(head + body, encoding="utf-8")


def parsed(*words, strings=None):
    return cli.parse(["program", *words], module="jax_ppo.main", strings=strings or {})


def refused(capsys, *words, strings=None):
    """The one line that a wrong command line gets."""
    code = cli.main(["program", *words], lambda *_: pytest.fail("must not start"), module="jax_ppo.main", strings=strings)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    return line.removeprefix("error: ")


TINY = "--config=configs/tiny.py"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # Words and flags that would otherwise be dropped without a word.
        (
            [TINY, "config.actor_optim.lr=2e-6"],
            "config.actor_optim.lr=2e-6: not a flag; did you mean --config.actor_optim.lr=2e-6?",
        ),
        ([TINY, "train"], "train: not a flag; flags are written --name=value"),
        ([TINY, "-workdir=x"], "-workdir=x: not a flag; did you mean --workdir=x?"),
        ([TINY, "--"], "--: not a flag; flags are written --name=value"),
        ([TINY, "--wordir=x"], "--wordir: no such flag; did you mean --workdir?"),
        ([TINY, "--confg=x"], "--confg: no such flag; did you mean --config?"),
        ([TINY, "--rollout.batch=4"], "--rollout.batch: no such flag; did you mean --config.rollout.batch?"),
        ([TINY, "--flagfile=x"], "--flagfile: no such flag; there are --config, --workdir, --config.SECTION.KEY"),
        ([TINY, "--norollout.batch"], "--norollout.batch: no such flag; did you mean --config.rollout.batch?"),
        ([TINY, "--workdir"], "--workdir: has no value; write --workdir=VALUE"),
        (
            [TINY, "--config.rollout.batch", "--workdir=x"],
            "--config.rollout.batch: has no value; write --config.rollout.batch=VALUE",
        ),
        ([TINY, TINY], "--config: given twice, as 'configs/tiny.py' and 'configs/tiny.py'; give it once"),
        (
            [TINY, "--config.train.seed=1", "--config.train.seed", "2"],
            "--config.train.seed: given twice, as '1' and '2'; give it once",
        ),
        ([TINY, "--config.model.remat", "--noconfig.model.remat"], "--config.model.remat: given twice, as 'true' and 'false'"),
        # Keys that do not exist.
        ([TINY, "--config.ppo.gama=.9"], "config.ppo.gama: no such key; did you mean gamma?"),
        ([TINY, "--config.lr=1"], "config.lr: no such key; did you mean actor_optim.lr or critic_optim.lr or warmstart.lr?"),
        (
            [TINY, "--config.ppo.lr=1"],
            "config.ppo.lr: no such key; did you mean actor_optim.lr or critic_optim.lr or warmstart.lr?",
        ),
        ([TINY, "--config.batch=8.5"], "config.batch: no such key; did you mean rollout.batch or warmstart.batch?"),
        ([TINY, "--config.rolout.batch=8"], "config.rolout.batch: no such key; did you mean rollout.batch?"),
        ([TINY, "--config.mesh.zzz=8"], "config.mesh.zzz: no such key; mesh has data, fsdp, tensor"),
        ([TINY, "--config.zzz=8"], "config.zzz: no such key; the sections are model, model.lora, critic, data,"),
        ([TINY, "--config.ppo.gamma.x=8"], "config.ppo.gamma.x: no such key"),
        ([TINY, "--config.mesh=2"], "config.mesh=2: is a section; set its keys one by one: mesh.data, mesh.fsdp, mesh.tensor"),
        ([TINY, "--config.mesh={'data': 2}"], "config.mesh={'data': 2}: is a section"),
        # Values of the wrong type, or not allowed.
        ([TINY, "--config.rollout.batch=8.5"], "config.rollout.batch=8.5: must be a whole number, at least 1"),
        ([TINY, "--config.rollout.batch=1e3"], "config.rollout.batch=1e3: must be a whole number, at least 1"),
        ([TINY, "--config.rollout.batch="], "config.rollout.batch='': must be a whole number, at least 1"),
        ([TINY, "--config.rollout.batch=-8"], "config.rollout.batch=-8: must be a whole number, at least 1"),
        ([TINY, "--config.ppo.gamma=much"], "config.ppo.gamma=much: must be a finite number, between 0 and 1"),
        ([TINY, "--config.ppo.gamma=1.5"], "config.ppo.gamma=1.5: must be a finite number, between 0 and 1"),
        ([TINY, "--config.actor_optim.lr=nan"], "config.actor_optim.lr=nan: must be a finite number, at least 0"),
        ([TINY, "--config.actor_optim.lr=inf"], "config.actor_optim.lr=inf: must be a finite number, at least 0"),
        ([TINY, "--config.model.remat=maybe"], "config.model.remat=maybe: must be true or false"),
        ([TINY, "--config.reward.method=stict"], "config.reward.method=stict: must be one of strict, flexible, verl"),
        ([TINY, "--config.data.path="], "config.data.path='': must be text, not empty"),
        ([TINY, "--config.ppo.minibatches=3"], "config.ppo.minibatches=3: must divide rollout.batch x rollout.n = 8 x 1 = 8"),
        # Files and folders.
        (
            [],
            "--config is missing; usage: python -m jax_ppo.main --config=configs/X.py [--workdir=DIR] [--config.SECTION.KEY=VALUE ...]",
        ),
        (["--config="], "--config is missing; usage: "),
        (["--config.train.seed=1"], "--config is missing; usage: "),
        (["--config=configs/tinny.py"], "--config=configs/tinny.py: no such file; configs/ has other.py, tiny.py"),
        (["--config=nowhere/tiny.py"], "--config=nowhere/tiny.py: no such file"),
        (["--config=configs"], "--config=configs: is a directory"),
        ([TINY, "--workdir=configs/tiny.py/x"], "--workdir={here}/configs/tiny.py/x: {here}/configs/tiny.py is not a directory"),
    ],
)
def test_a_wrong_command_line_is_one_line(folder, capsys, words, line):
    assert refused(capsys, *words).startswith(line.replace("{here}", str(folder)))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def get_config(:\n    pass\n", "configs/x.py:1: invalid syntax"),
        ("\n\nx = (1,\n", "configs/x.py:3: '(' was never closed"),
        ("x = '\0'\n", "configs/x.py:1: source code string cannot contain null bytes"),
        ("import no_such_module\n", "configs/x.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", "configs/x.py: has no function get_config()"),
        ("get_config = 1\n", "configs/x.py: has no function get_config()"),
        (
            "def get_config():\n    return {'ppo': {}}\n",
            "configs/x.py: get_config() must return default_config() with changes, not dict",
        ),
        ("def get_config():\n    pass\n", "configs/x.py: get_config() must return default_config() with changes, not NoneType"),
        ("def get_config(x):\n    pass\n", "configs/x.py: TypeError: get_config() missing 1 required positional argument: 'x'"),
        (
            "def f():\n    return 1 / 0\n\ndef get_config():\n    return f()\n",
            "configs/x.py:2: ZeroDivisionError: division by zero",
        ),
        ("def get_config():\n    raise KeyError\n", "configs/x.py:2: KeyError"),
        ("def get_config():\n    raise ValueError('two\\nlines')\n", "configs/x.py:2: ValueError: two lines"),
        (
            HEAD + "    config.rollout.batch = 8.5\n    return config\n",
            "configs/x.py:4: TypeError: Could not override field 'batch'",
        ),
        (HEAD + "    config.ppo = 3\n    return config\n", "configs/x.py:4: TypeError: Could not override field 'ppo'"),
        (HEAD + "    config.ppo.gama = 0.9\n    return config\n", "config.ppo.gama: no such key; did you mean gamma?"),
        (HEAD + "    config.lr = 0.9\n    return config\n", "config.lr: no such key; did you mean actor_optim.lr"),
        (
            HEAD + "    config.rollout.slots = -1\n    return config\n",
            "config.rollout.slots=-1: must be a whole number, at least 0",
        ),
    ],
)
def test_a_wrong_config_file_is_one_line(folder, capsys, source, line):
    write("configs/x.py", source, head="")
    assert refused(capsys, "--config=configs/x.py").startswith(line)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--config.actor_optim.lr=1"], "actor_optim.lr", 1.0),
        (["--config.actor_optim.lr=2e-6"], "actor_optim.lr", 2e-6),
        (["--config.rollout.batch=16"], "rollout.batch", 16),
        (["--config.rollout.batch", "16"], "rollout.batch", 16),
        (["--config.mesh.fsdp", "-1"], "mesh.fsdp", -1),
        (["--config.model.remat"], "model.remat", True),
        (["--config.model.remat", "--config.train.seed=1"], "model.remat", True),
        (["--config.model.remat=true"], "model.remat", True),
        (["--config.model.remat=True"], "model.remat", True),
        (["--config.model.remat=1"], "model.remat", True),
        (["--config.eval.at_start=false"], "eval.at_start", False),
        (["--config.eval.at_start=0"], "eval.at_start", False),
        (["--noconfig.eval.at_start"], "eval.at_start", False),
        (["--config.data.instruction=a=b, --c"], "data.instruction", "a=b, --c"),
        (["--config.data.instruction="], "data.instruction", ""),
        (["--config.log.wandb=7"], "log.wandb", "7"),
        ([], "rollout.batch", 8),
        ([], "model.remat", False),
        ([], "ppo.gamma", 1.0),
    ],
)
@pytest.mark.parametrize("config_first", [True, False])
def test_a_right_flag_has_its_effect(folder, words, key, value, config_first):
    config, _ = parsed(*([TINY, *words] if config_first else [*words, TINY]))
    section, _, name = key.partition(".")
    found = getattr(getattr(config, section), name)
    assert found == value and type(found) is type(value)


def test_flags_can_mend_what_the_file_alone_would_not_allow(folder):
    write("configs/x.py", "    config.rollout.batch = 10\n    config.ppo.minibatches = 4\n    return config\n")
    with pytest.raises(InputError, match=r"must divide rollout.batch x rollout.n = 10 x 1 = 10"):
        parsed("--config=configs/x.py")
    assert parsed("--config=configs/x.py", "--config.ppo.minibatches=5")[0].ppo.minibatches == 5


def test_a_file_may_leave_out_sections_or_freeze_and_its_references_follow_the_flags(folder):
    write(
        "configs/part.py",
        "import ml_collections\ndef get_config():\n    return ml_collections.FrozenConfigDict({'ppo': {'gamma': 1}})\n",
        head="",
    )
    config, _ = parsed("--config=configs/part.py", "--config.ppo.lam_actor=0.5", "--config.train.seed=3")
    assert (config.ppo.gamma, config.ppo.lam_actor, config.train.seed, config.rollout.batch) == (1.0, 0.5, 3, 256)
    write("configs/ref.py", "    config.rollout.slots = config.rollout.get_ref('batch')\n    return config\n")
    assert parsed("--config=configs/ref.py", "--config.rollout.batch=64")[0].rollout.slots == 64


def test_a_file_that_was_just_changed_is_read_anew(folder):
    for seed in range(3, 6):  # three files of one size within one second, which a compiled copy could not tell apart
        write("configs/x.py", f"    config.train.seed = {seed}\n    return config\n")
        assert parsed("--config=configs/x.py")[0].train.seed == seed
    assert not list(folder.rglob("__pycache__"))


def test_workdir_and_further_flags(folder):
    _, values = parsed(TINY)
    assert (values.config_path, values.workdir) == (Path("configs/tiny.py"), folder / "checkpoints" / "tiny")
    _, values = parsed(TINY, "--workdir=~/runs/a", "--checkpoint", "x y", strings={"checkpoint": "what"})
    assert (values.workdir, values.checkpoint) == (Path.home() / "runs" / "a", "x y")


def test_further_flags_are_required(folder, capsys):
    line = refused(capsys, TINY, strings={"checkpoint": "what"})
    assert line.startswith(
        "--checkpoint is missing; usage: python -m jax_ppo.main --config=configs/X.py --checkpoint=CHECKPOINT "
    )


def test_a_workdir_that_cannot_be_written_to(folder, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert refused(capsys, TINY, "--workdir=a/b") == f"--workdir={folder}/a/b: {folder} cannot be written to"


def raising(error):
    def job(config, values):
        raise error

    return job


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("data.jsonl:3:\n  half  a line"), 2, "error: data.jsonl:3: half  a line\n"),
        (RunError("disk full"), 1, "failed: disk full\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(folder, capsys, error, code, line):
    assert cli.main(["program", TINY], raising(error), module="m") == code
    assert capsys.readouterr() == ("", line)


def test_what_nobody_foresaw_keeps_its_traceback(folder):
    with pytest.raises(ZeroDivisionError):
        cli.main(["program", TINY], raising(ZeroDivisionError()), module="m")


def test_success_and_warnings_are_lines(folder, capsys):
    def job(config, values):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("took the head\nfrom x", stacklevel=1)
            warnings.warn("took the head\nfrom x", stacklevel=2)

    assert cli.main(["program", TINY], job, module="m") == 0
    assert capsys.readouterr() == ("", "warning: took the head from x\n")


def test_help_explains_every_key(capsys):
    assert cli.main(["program", "--nonsense", "--help"], raising(AssertionError()), module="m", strings={"which": "of them"}) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("usage: python -m m --config=configs/X.py --which=WHICH [--workdir=DIR] ")
    assert max(map(len, out.splitlines()[1:])) <= 120
    flat = " ".join(out.split())
    assert "--which=WHICH of them" in flat and "model: The actor." in flat
    sections = re.split(r"\n\n(?=[\w.]+: )", out)[1:]
    texts = {section.partition(":")[0]: " ".join(section.split()) for section in sections}
    for name, key in configuration.keys().items():
        section, _, last = name.rpartition(".")
        default = str(key.default).lower() if isinstance(key.default, bool) else str(key.default) or "''"
        assert f" {last}={default} {key.meaning}" in texts[section], name
        assert key.rule in texts[section], name


@pytest.mark.parametrize("columns", ["0", "7", "300"])
def test_help_in_any_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    cli.main(["program", "-h"], raising(AssertionError()), module="m")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert max(map(len, lines)) <= 120


def command(*words, **environment):
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "30", **environment}
    line = [sys.executable, "-m", "jax_ppo.main", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100)


def test_the_program_itself():
    done = command("--config=configs/gsm8k.py", "--config.ppo.gama=.9", "--config.train.seed=1")
    # Neither wrapped nor coloured, whatever the environment says.
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: config.ppo.gama: no such key; did you mean gamma?\n")
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "") and "max_response_tokens=512" in done.stdout
