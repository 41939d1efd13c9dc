"""`zeroshard generate` and `evaluate`: what a sharded model writes and scores is what a plain one does."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import zeroshard as zs
from zeroshard.testing import run_ranks
from zeroshard.train.config import SettingsError, load_config
from zeroshard.train.loop import train
from zeroshard.train.models.gpt import GPT, GPTConfig
from zeroshard.train.tokenizer import train_tokenizer
from zeroshard.train.using import check_run, continue_prompt, describe_scores, load_run, read_questions, score

from .test_cli import _main

CONTEXT = 16
TEXT = "The class statement defines a class; a class is an object. " * 9
QUESTIONS = [
    {"question": "The class ", "choices": ["statement", "zq"], "answer": 0},
    {"question": "a class is an ", "choices": ["xx", "object", "yy"], "answer": 1},
    {"question": "defines ", "choices": ["a class", "0"], "answer": 1},
]


class _Nobody:
    """A reporter that listens to nothing."""

    def started(self, *told):
        pass

    stepped = evaluated = saving = saved = finished = started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run, with a text and questions beside it."""
    root = tmp_path_factory.mktemp("using")
    settings = [
        "model.depth=1", f"model.context={CONTEXT}", "train.steps=30", "train.eval_bytes=200", "run.sample_bytes=0",
        "run.ranks=1", f"run.folder={root}",
    ]  # fmt: skip
    train(load_config(overrides=settings), _Nobody())
    (root / "text.txt").write_text(TEXT)
    (root / "questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in QUESTIONS))
    return root / "default"


def plain(folder: Path) -> GPT:
    """Return the run's model in this process, without shards."""
    model = GPT(GPTConfig(1, CONTEXT))
    zero = zs.shard(model, stage=0)
    zero.load(zs.latest(folder), model_only=True)
    zero.detach()
    return model.eval()


@torch.no_grad()
def nats_of(model: GPT, text: bytes, count: int) -> float:
    """Return the nats of the last `count` bytes of a text, one forward a byte."""
    tokens, total = torch.tensor(list(text)), 0.0
    for place in range(len(tokens) - count, len(tokens)):
        logits = model(tokens[None, max(0, place - CONTEXT) : place])[0, -1]
        total += float(F.cross_entropy(logits, tokens[place]))
    return total


def use(folder: str, stage: int) -> tuple[str, dict[str, float]]:
    """Return what a run's model writes, and what it scores. Runs on a rank."""
    root = Path(folder).parent
    with load_run(Path(folder), stage=stage) as loaded:
        text = continue_prompt(loaded, "The ", tokens=24, temperature=0.7, seed=3)
        return text, dict(score(loaded, str(root / "text.txt"), str(root / "questions.jsonl"), column="text"))


@torch.no_grad()
def expected(folder: Path) -> tuple[str, dict[str, float]]:
    """Return the same from a plain model."""
    model, draw, tokens = plain(folder), torch.Generator().manual_seed(3), torch.tensor(list(b"The "))
    for _ in range(24):
        probabilities = torch.softmax(model(tokens[None, -CONTEXT:])[0, -1] / 0.7, -1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=draw)])
    text, data = bytes(tokens.tolist()).decode(errors="replace"), torch.tensor(list(TEXT.encode()))
    nats = 0.0
    for start in range(0, len(data) - 1, CONTEXT):  # windows without an overlap
        inputs, targets = data[start : start + CONTEXT], data[start + 1 : start + CONTEXT + 1]
        nats += float(F.cross_entropy(model(inputs[None, : len(targets)])[0], targets, reduction="sum"))
    scored = len(data) - 1
    right = []
    for one in QUESTIONS:
        sums = [_choice_nats(model, one["question"], choice) for choice in one["choices"]]
        by_byte = [total / len(choice) for total, choice in zip(sums, one["choices"], strict=True)]
        right.append([each.index(min(each)) == one["answer"] for each in (sums, by_byte)])
    return text, {
        "step": 30,
        "nats_per_token": nats / scored,
        "perplexity": math.exp(nats / scored),
        "bits_per_byte": nats / scored / math.log(2),
        "tokens": scored,
        "bytes": scored,
        "accuracy": sum(first for first, _ in right) / len(right),
        "accuracy_by_byte": sum(second for _, second in right) / len(right),
        "questions": len(right),
    }


def _choice_nats(model: GPT, question: str, choice: str) -> float:
    tokens = torch.tensor(list((question + choice).encode()))[-CONTEXT - 1 :]
    logits = model(tokens[None, :-1])[0]
    return float(F.cross_entropy(logits[-len(choice) :], tokens[-len(choice) :], reduction="sum"))


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.rotates) for n in (0, 1, 2))])
def test_two_ranks_write_and_score_as_a_plain_loop(stage: int, folder: Path) -> None:
    text, scores = expected(folder)
    for told_text, told in run_ranks(use, 2, str(folder), stage):
        assert told_text == text
        assert told == pytest.approx(scores, rel=1e-5)


def test_the_commands_print_what_the_functions_return(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, scores = expected(folder)
    asked = ["--prompt", "The ", "--tokens", "24", "--seed", "3"]
    assert _main(monkeypatch, capsys, "generate", str(folder), *asked) == (0, f"{text}\n", "")
    data = ["--data", str(folder.parent / "text.txt"), "--choices", str(folder.parent / "questions.jsonl"), "--json"]
    status, out, _ = _main(monkeypatch, capsys, "evaluate", str(folder), *data)
    assert (status, json.loads(out)) == (0, pytest.approx(scores, rel=1e-5))
    page = tmp_path / "curves.html"
    assert _main(monkeypatch, capsys, "plot", str(folder), "-o", str(page)) == (0, f"{page}: written\n", "")
    assert "polyline" in page.read_text()
    status, out, _ = _main(monkeypatch, capsys, "plot", str(folder))
    assert status == 0 and "training loss, nats a token" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "{run}"], "evaluate needs --data TEXT, --choices FILE.jsonl, or both"),
        (["evaluate", "{run}", "--data", "/nowhere"], "there is no file or folder '/nowhere'"),
        (["generate", "/nowhere"], "/nowhere is not the folder of a run"),
        (["generate", "{run}s"], "{run}s is not the folder of a run: this folder does not exist; did you mean {run}?"),
        (["plot", "/nowhere"], "/nowhere is not the folder of a run"),
        (["report", "/nowhere"], "/nowhere: there is no such file or folder; give runs/NAME"),
    ],
)
def test_mistakes_end_with_one_line(
    arguments: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _main(monkeypatch, capsys, *(one.format(run=folder) for one in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("zeroshard: ") and words.format(run=folder) in err and err.count("\n") == 1


def test_scores_are_told() -> None:
    scores = {"step": 3, "nats_per_token": 1.0, "perplexity": math.e, "bits_per_byte": 1.5, "tokens": 10, "bytes": 12}
    text = describe_scores({**scores, "accuracy": 0.5, "accuracy_by_byte": 0.25, "questions": 4})
    assert "1.5000 bits per byte, perplexity 2.718, loss 1.0000 nats a token, on 10 tokens of 12 bytes" in text
    assert "50.0% right, 25.0% by probability a byte, of 4 questions" in text
    assert json.loads(describe_scores(scores, as_json=True)) == scores
    diverged = scores | {"nats_per_token": math.nan, "perplexity": math.inf}
    known = scores | {"nats_per_token": None, "perplexity": None}
    assert json.loads(describe_scores(diverged, as_json=True), parse_constant=pytest.fail) == known


def score_without_numbers(folder: str) -> tuple[str, dict[str, float]]:
    """Return why a model of which a parameter is NaN has no accuracy, and its score of a text. Runs on a rank."""
    root = Path(folder).parent
    with load_run(Path(folder), stage=0) as loaded:
        with torch.no_grad():
            next(loaded.language.module.parameters()).fill_(math.nan)
        with pytest.raises(ValueError, match="--choices") as told:
            score(loaded, "", str(root / "questions.jsonl"), column="text")
        return str(told.value), dict(score(loaded, str(root / "text.txt"), "", column="text"))


def test_a_model_that_diverged_has_no_accuracy(folder: Path) -> None:
    for told, scores in run_ranks(score_without_numbers, 2, str(folder)):
        assert "the choices of 3 of 3 questions have probabilities of NaN, after step 30" in told
        assert math.isnan(scores["nats_per_token"])
        assert json.loads(describe_scores(scores, as_json=True), parse_constant=pytest.fail)["perplexity"] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ('{"question": "q", "choices": ["a"]}', "answer"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "answer=2 must be a place among its 2 choices"),
        ('{"question": "q", "choices": {"a": "b", "c": "d"}, "answer": 1}', "choices is .*, and must be a list"),
        ('{"question": "q", "choices": "yes", "answer": 1}', "choices is 'yes', and must be a list"),
        ('{"question": "q", "choices": ["a", "b", "c"], "answer": 2.9}', "answer is 2.9, and must be an integer"),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', "answer is True, and must be an integer"),
        ('{"question": "", "choices": ["a", "b"], "answer": 0}', "no text may be empty"),
        ("", "has no question"),
    ],
)
def test_what_is_no_question_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        read_questions(str(path))


def test_an_answer_may_be_digits(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q", "choices": ["a", "b"], "answer": "1"}')
    assert read_questions(str(path))[0].answer == 1


def _train_with(tokens: Path) -> None:
    """Make a file of a tokenizer, and a run of one step with it beside."""
    train_tokenizer([TEXT], 270, tokens)
    settings = [
        "model.depth=1", f"model.context={CONTEXT}", "train.steps=1", "train.eval_bytes=200", "run.sample_bytes=0",
        "run.ranks=1", f"run.folder={tokens.parent}", f"data.tokenizer={tokens}",
    ]  # fmt: skip
    train(load_config(overrides=settings), _Nobody())


def test_another_tokenizer_in_the_file_of_the_run_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    _train_with(tokens)
    with load_run(tmp_path / "default", stage=0) as loaded:
        assert loaded.step == 1
    train_tokenizer([TEXT[::-1]], 270, tokens)
    told = pytest.raises(SettingsError, match=r"step-00000001 was trained with another tokenizer than '.*tokens\.json'")
    with told, load_run(tmp_path / "default", stage=0):
        pass


def test_a_text_of_one_character_in_several_tokens_has_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, text = tmp_path / "tokens.json", tmp_path / "text.txt"
    _train_with(tokens)
    text.write_text("\N{GRINNING FACE}")
    arguments = ("evaluate", str(tmp_path / "default"), "--data", str(text))
    for limit in ((), ("--bytes", "5")):
        status, out, err = _main(monkeypatch, capsys, *arguments, *limit)
        assert (status, out) == (2, "")
        assert f"the first of 4 tokens of {str(text)!r} covers its one character of 4 bytes" in err
        assert err.count("\n") == 1
    text.write_text("\N{GRINNING FACE}a")
    assert _main(monkeypatch, capsys, *arguments)[0] == 0


def test_what_is_no_run_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no config\.toml"):
        check_run(tmp_path, 3)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        check_run(tmp_path, 3)
    with pytest.raises(ValueError, match=r"stage must be one of \[0, 1, 2, 3\]"):
        check_run(folder, 4)
    assert check_run(zs.latest(folder), 3)[1] == zs.latest(folder)
    with pytest.raises(SettingsError, match="has no token"), load_run(folder, stage=0) as loaded:
        continue_prompt(loaded, "", tokens=1, temperature=0, seed=1)
    with pytest.raises(SettingsError, match="--prompt is not text"), load_run(folder, stage=0) as loaded:
        continue_prompt(loaded, "\udcff", tokens=1, temperature=0, seed=1)
    longest = tmp_path / "questions.jsonl"
    longest.write_text(json.dumps({"question": "q", "choices": ["a", "b" * 1000], "answer": 0}))
    told = pytest.raises(SettingsError, match=r"question 1: a choice has 1000 tokens, and model\.context is")
    with told, load_run(folder, stage=0) as loaded:
        score(loaded, "", str(longest), column="text")
