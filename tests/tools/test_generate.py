"""The generator: what it says is what the model says, and everything wrong is one line and exit code 2."""

import json

import jax
import numpy as np
import pytest

from jax_ppo.data import arithmetic, prompts
from jax_ppo.models import hf, qwen

QUESTION = "Tom has 12 apples and buys 5 more. How many apples does Tom have?"


@pytest.fixture(scope="module")
def generate(tool):
    """The script as a module."""
    return tool("generate")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of the built-in task with random weights, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("model")
    described = folder / "described"
    described.mkdir()
    (described / "config.json").write_text(json.dumps(arithmetic.MODEL))
    arithmetic.tokenizer().save_pretrained(described)
    config = hf.load_config(described)
    hf.save_params(qwen.init(jax.random.key(3), config), config, folder / "hf", dtype="float32", source=described)
    return folder / "hf"


def said(generate, capsys, *words):
    assert generate.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def greedy(model, question, count):
    """The text of a loop without a cache."""
    config, tokenizer = hf.load_config(model), prompts.load_tokenizer(model)
    params = hf.load_params(model, config, dtype="float32")
    _, (tokens,), _ = prompts.encode(
        [prompts.Problem(question, "")], tokenizer, instruction="", max_prompt_tokens=99, overlong="error"
    )
    sequence, ends = tokens.tolist(), prompts.end_ids(model, tokenizer)
    full = jax.jit(qwen.logits, static_argnums=1)
    while len(sequence) < len(tokens) + count and sequence[-1] not in ends:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(sequence)] = sequence
        sequence.append(int(np.asarray(full(params, config, padded))[0, len(sequence) - 1].argmax()))
    return tokenizer.decode(sequence[len(tokens) :], skip_special_tokens=True)


def test_greedy_text_is_that_of_the_uncached_model(generate, model, capsys):
    text = said(generate, capsys, f"--checkpoint={model}", f"--prompt={QUESTION}", "--temperature=0", "--max-tokens=12")
    assert text == greedy(model, QUESTION, 12) + "\n"


def test_many_prompts_come_in_order_and_the_same_again(generate, model, capsys, tmp_path):
    lines, objects = tmp_path / "some.txt", tmp_path / "some.jsonl"
    lines.write_text(f"{QUESTION}\n\nHow many?\n")
    objects.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in (QUESTION, "How many?")))
    words = (f"--checkpoint={model}", "--n=2", "--max-tokens=6", "--seed=4")
    text = said(generate, capsys, *words, f"--prompts-file={lines}")
    assert [line for line in text.splitlines() if line.startswith(">>> ")] == [f">>> {QUESTION}"] * 2 + [">>> How many?"] * 2
    assert said(generate, capsys, *words, f"--prompts-file={objects}") == text
    assert said(generate, capsys, *words[:-1], "--seed=5", f"--prompts-file={objects}") != text


def test_one_response_is_written_as_it_comes(generate):
    """Half a character waits for its other half."""
    tokenizer = arithmetic.tokenizer()
    writer = generate.Writer(tokenizer, ["?"])
    pieces = []
    writer_out = generate.sys.stdout
    generate.sys.stdout = type("Out", (), {"write": staticmethod(pieces.append), "flush": staticmethod(lambda: None)})
    try:
        tokens = tokenizer.encode("Tom has \N{SNOWMAN}", add_special_tokens=False)
        for token in tokens:
            writer(0, [token])
        writer.finish()
    finally:
        generate.sys.stdout = writer_out
    assert "".join(pieces) == tokenizer.decode(tokens) + "\n"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) > 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "the following arguments are required: --checkpoint"),
        (("--checkpoint=MODEL",), "one of the arguments --prompt --prompts-file is required"),
        (("--checkpoint=MODEL", "--prompt=a", "--temperature=-1"), "must be a number of at least 0, not '-1'"),
        (("--checkpoint=MODEL", "--prompt=a", "--top-p=1.5"), "must be a number from 0 to 1, not '1.5'"),
        (("--checkpoint=MODEL", "--prompt=a", "--n=some"), "must be a whole number of at least 1, not 'some'"),
        (("--checkpoint=MODEL", "--prompt=a", "--min-tokens=9", "--max-tokens=8"), "must be at most --max-tokens=8"),
        (("--checkpoint=/no/such", "--prompt=a"), "checkpoint='/no/such': no such directory"),
        (("--checkpoint=MODEL", "--prompts-file=/no/such"), "cannot be read"),
        (("--checkpoint=MODEL", "--prompt=", "--raw"), "prompt 1 has no token"),
    ],
)
def test_what_is_wrong_is_one_line(generate, model, capsys, words, line):
    assert generate.main([word.replace("MODEL", str(model)) for word in words]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "has no prompt"),
        ('{"question": "a"}\n{"q": 1}\n', 'some.jsonl:2: must be an object with a "question"'),
        ("[1]\n", ":1: "),
    ],
)
def test_a_file_without_prompts_names_the_line(generate, model, capsys, tmp_path, text, line):
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    assert generate.main([f"--checkpoint={model}", f"--prompts-file={file}"]) == 2
    assert line in capsys.readouterr().err
