"""Prompts are what Hugging Face makes of them; end ids come from all files; no response breaks the decoding."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jax_ppo.data import arithmetic, dataset, prompts
from jax_ppo.types import InputError, Problem

WORDS = ["<pad>", "<s>", "</s>", "user", "assistant", "other", "one", "two", "three", "x", "n't", ","]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
OTHER = "{{ bos_token }}other {{ messages[0].content }}"


@pytest.fixture
def directory(tmp_path):
    """A tokenizer of a dozen words that adds a start token by itself, and has no chat template."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="x"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="x"
    )
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def qwen(request):
    return prompts.load_tokenizer(request.getfixturevalue("shared") / "qwen2.5_tokenizer")


def encode(tokenizer, *questions, instruction="", limit=512, overlong="drop"):
    problems = [Problem(question, "1") for question in questions]
    return prompts.encode(problems, tokenizer, instruction=instruction, max_prompt_tokens=limit, overlong=overlong)


def configure(directory, file, **values):
    path = directory / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


def refusal(function, *args, **options) -> str:
    with pytest.raises(InputError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# Loading


def test_loading_is_quiet(directory, capfd):
    assert prompts.load_tokenizer(directory).convert_tokens_to_ids("two") == 7
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", ["/no/such/place", "owner/name"])
def test_only_directories_are_read(path):
    assert refusal(prompts.load_tokenizer, path).startswith(f"{path}: no such directory")


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    configure(tmp_path, "config.json", **arithmetic.MODEL)
    assert (
        refusal(prompts.load_tokenizer, tmp_path)
        == f"{tmp_path}: no tokenizer; needs tokenizer.json or vocab.json and merges.txt"
    )


@pytest.mark.parametrize("content", ["{", "{}", "[]", ""])
def test_a_broken_tokenizer_is_refused(directory, content):
    (directory / "tokenizer.json").write_text(content)
    assert refusal(prompts.load_tokenizer, directory).startswith(f"{directory}: the tokenizer cannot be read: ")


def test_no_code_of_the_directory_is_run(directory):
    (directory / "own.py").write_text("raise SystemExit('ran')")
    configure(directory, "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    assert "custom code" in refusal(prompts.load_tokenizer, directory)


# Templates


def test_exactly_one_start_token(directory):
    configure(directory, "tokenizer_config.json", chat_template=TEMPLATE)
    tokenizer = prompts.load_tokenizer(directory)
    assert tokenizer.encode("one") == [1, 6]  # it does add one where nobody stops it
    _, (tokens,), _ = encode(tokenizer, "one two")
    assert tokens.tolist() == [1, 3, 6, 7, 4]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("in_file", "in_config", "expected"),
    [
        (TEMPLATE, None, [1, 3, 6, 4]),
        (None, TEMPLATE, [1, 3, 6, 4]),
        (TEMPLATE, OTHER, [1, 3, 6, 4]),
        (OTHER, TEMPLATE, [1, 5, 6]),
    ],
)
def test_the_template_file_wins(directory, in_file, in_config, expected):
    if in_file:
        (directory / "chat_template.jinja").write_text(in_file)
    if in_config:
        configure(directory, "tokenizer_config.json", chat_template=in_config)
    _, (tokens,), _ = encode(prompts.load_tokenizer(directory), "one")
    assert tokens.tolist() == expected


def test_no_template_is_an_error_that_helps(directory):
    message = refusal(encode, prompts.load_tokenizer(directory), "one")
    assert message.startswith(f"{directory}: no chat template; ")
    assert "chat_template.jinja" in message


@pytest.mark.parametrize("template", ["{{ raise_exception('no such turn') }}", "{% if %}", "{{ messages[3].content }}"])
def test_a_failing_template_is_an_input_error(directory, template):
    (directory / "chat_template.jinja").write_text(template)
    assert refusal(encode, prompts.load_tokenizer(directory), "one").startswith(f"{directory}: the chat template fails: ")


def test_an_empty_prompt_is_refused(directory):
    (directory / "chat_template.jinja").write_text("{{ '' }}")
    assert (
        refusal(encode, prompts.load_tokenizer(directory), "one")
        == f"{directory}: the chat template leaves nothing of a question"
    )


def test_qwen_prompts_have_the_default_system_turn(qwen):
    _, (tokens,), _ = encode(qwen, "What is 1+1?", instruction="Be brief.")
    assert qwen.decode(tokens) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1? Be brief.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens[0] == 151644
    assert 151643 not in tokens


def test_qwen_prompts_are_those_of_hugging_face(shared, qwen):
    problems = dataset.load(str(shared / "gsm8k"), "train")
    kept, tokens, dropped = prompts.encode(problems, qwen, instruction="", max_prompt_tokens=512, overlong="error")
    assert kept == problems
    assert (len(tokens), dropped) == (7473, 0)
    for problem, ids in list(zip(problems, tokens, strict=True))[::150]:
        turn = [{"role": "user", "content": problem.question}]
        assert ids.tolist() == qwen.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        text = qwen.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert ids.tolist() == qwen.encode(text, add_special_tokens=False)


# Lengths


def test_long_prompts_are_dropped_and_counted():
    # A token for each digit, and one for the newline of the template.
    kept, tokens, dropped = encode(arithmetic.tokenizer(), "1" * 40, "2" * 15, "3" * 16, "4" * 5, limit=16)
    assert [p.question for p in kept] == ["2" * 15, "4" * 5]
    assert [len(t) for t in tokens] == [16, 6]
    assert dropped == 2


def test_long_prompts_can_be_refused():
    message = refusal(encode, arithmetic.tokenizer(), "1" * 5, "1" * 40, limit=16, overlong="error")
    assert message.startswith("1 of 2 prompts over 16 tokens, the longest has 41: ")
    assert 'config.data.overlong="drop"' in message


def test_nothing_left_is_an_error():
    message = refusal(encode, arithmetic.tokenizer(), "1" * 10000, "2" * 17, limit=16)
    assert message == "2 of 2 prompts over 16 tokens, the longest has 10001: raise config.data.max_prompt_tokens"


# End and pad


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (9, 8, (2, 9, 8)),
        ([9, 8], 8, (2, 9, 8)),
        ([9, 9], [9], (2, 9)),
        (None, 2, (2,)),
        (..., 7, (2, 7)),
        (..., ..., (2,)),
        ([], None, (2,)),
    ],
)
def test_end_ids_are_a_union(directory, generation, model, expected):
    for file, value in (("generation_config.json", generation), ("config.json", model)):
        if value is not ...:
            configure(directory, file, eos_token_id=value, temperature=0.7)
        elif file == "config.json":
            configure(directory, file, model_type="qwen2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    assert prompts.end_ids(directory, tokenizer) == expected
    assert prompts.end_ids(str(directory), tokenizer) == expected


def test_end_ids_without_files_or_without_the_tokenizer(directory):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    assert prompts.end_ids(None, tokenizer) == (2,)
    tokenizer.eos_token = None
    configure(directory, "config.json", eos_token_id=[9])
    assert prompts.end_ids(directory, tokenizer) == (9,)
    configure(directory, "config.json", eos_token_id=None)
    assert "no end token" in refusal(prompts.end_ids, directory, tokenizer)


@pytest.mark.parametrize("value", ["</s>", True, 1.5, -1, [2, "x"], {"id": 2}])
def test_end_ids_must_be_ids(directory, value):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    configure(directory, "generation_config.json", eos_token_id=value)
    message = refusal(prompts.end_ids, directory, tokenizer)
    assert message.startswith(f"{directory / 'generation_config.json'}: eos_token_id is {json.dumps(value)}; must be")


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_end_ids_of_a_broken_file(directory, content):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    (directory / "config.json").write_text(content)
    assert refusal(prompts.end_ids, directory, tokenizer).startswith(f"{directory / 'config.json'}: cannot be read: ")


def test_end_and_pad_of_qwen(shared, qwen, tmp_path):
    for file in (shared / "qwen2.5_tokenizer").iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    configure(tmp_path, "generation_config.json", eos_token_id=[151645, 151643], pad_token_id=151643)
    configure(tmp_path, "config.json", eos_token_id=151645, vocab_size=151936, model_type="qwen2")
    ends = prompts.end_ids(tmp_path, prompts.load_tokenizer(tmp_path))
    assert ends == (151645, 151643)
    assert prompts.pad_id(qwen, ends) == 151643


@pytest.mark.parametrize(("pad", "ends", "expected"), [("<pad>", (2,), 0), (None, (2,), 0), ("</s>", (2, 0, 1), 3)])
def test_pad_is_never_the_end_token_of_the_tokenizer(directory, pad, ends, expected):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.pad_token = pad
    assert prompts.pad_id(tokenizer, ends) == expected


# Responses


def test_decode_stops_at_the_length_and_leaves_out_special_tokens(directory):
    tokenizer = prompts.load_tokenizer(directory)
    tokens = np.array([[6, 7, 2, 8], [2, 6, 6, 6], [8, 8, 8, 8], [6, 99, 7, 0]], np.int32)
    assert prompts.decode(tokenizer, tokens, np.array([3, 1, 0, 3])) == ["one two", "", "", "one two"]


def test_half_an_emoji_survives_the_log(qwen):
    for tokenizer in (qwen, arithmetic.tokenizer()):
        ids = tokenizer.encode("7 \U0001f9ee")
        tokens = np.array([ids, ids], np.int32)
        whole, half = prompts.decode(tokenizer, tokens, np.array([len(ids), len(ids) - 1]))
        assert whole == "7 \U0001f9ee"
        assert half == "7 \ufffd"
        assert json.loads(json.dumps({"response": half}).encode("utf-8").decode("utf-8"))["response"] == half


def test_text_is_not_cleaned_up(directory):
    configure(directory, "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = prompts.load_tokenizer(directory)
    ids = np.array([[6, 10, 11, 7]], np.int32)
    assert tokenizer.decode(ids[0]) == "onen't, two"  # it would
    assert prompts.decode(tokenizer, ids, np.array([4])) == ["one n't , two"]


def test_ids_that_the_text_would_not_give(qwen):
    # "he" has an id of its own; the sampled pair reads the same and stays a pair.
    pair = qwen.convert_tokens_to_ids(["h", "e"])
    assert len(qwen.encode("he")) == 1
    assert prompts.decode(qwen, np.array([pair], np.int32), np.array([2])) == ["he"]


def test_a_solution_ends_in_the_end_id_and_has_no_other_special_token(directory, qwen):
    tokenizer = prompts.load_tokenizer(directory)
    tokens = prompts.encode_solution(tokenizer, "one two", 2)
    assert tokens.tolist() == [6, 7, 2]
    assert tokens.dtype == np.int32
    assert qwen.decode(prompts.encode_solution(qwen, "1+1=2\n#### 2", 151645)) == "1+1=2\n#### 2<|im_end|>"


def test_the_builtin_task_goes_the_same_way():
    problems = dataset.load("builtin", "test", limit=50)
    tokenizer = arithmetic.tokenizer()
    kept, tokens, dropped = prompts.encode(problems, tokenizer, instruction="", max_prompt_tokens=33, overlong="error")
    assert (kept, dropped) == (problems, 0)
    assert [tokenizer.decode(t) for t in tokens] == [p.question + "\n" for p in problems]
    responses = [prompts.encode_solution(tokenizer, p.solution, tokenizer.eos_token_id) for p in problems]
    padded = np.zeros((50, 30), np.int32)
    for row, response in zip(padded, responses, strict=True):
        row[: len(response)] = response
    lengths = np.array([len(r) for r in responses])
    assert prompts.decode(tokenizer, padded, lengths) == [p.solution for p in problems]
