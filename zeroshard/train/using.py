"""The model of a run, sharded over ranks, to continue prompts and to score texts and questions.

Owns loading a run's newest checkpoint without its optimizer, and what is computed with it. It must not know the loop or
the terminal. Read `load_run` first.

Note: no whole model
    The ranks make equal forwards of the sharded model: at stage 3 each unit is gathered for its own forward, and
    released. All ranks continue a prompt alike, each token drawn on the first one; texts and questions are divided over
    the ranks, of which each makes as many forwards as the others.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

import zeroshard as zs
from zeroshard.table.stages import row_of_stage
from zeroshard.train.config import Config, SettingsError, load_config
from zeroshard.train.corpus import tokenize
from zeroshard.train.data import IGNORED, count_scored, heldout_batches
from zeroshard.train.inputs import read_input
from zeroshard.train.models.language import LanguageModel, generate
from zeroshard.train.run import make_model
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Loaded", "check_run", "continue_prompt", "describe_scores", "load_run", "score"]

_WINDOWS: Final = 8
_MOST_NATS: Final = 700.0
"""What is beyond has an exponential that no float can hold."""
_EXPORT: Final = "export"
_SHOWN: Final = 12
"""Characters of a hash in an error."""
_MOST_QUESTION_BYTES: Final = 1 << 28


@final
@dataclass(frozen=True)
class Loaded:
    """The model of a run on one rank.

    Args:
        step: the number of steps that its checkpoint has made.
    """

    config: Config
    tokenizer: Tokenizer
    language: LanguageModel
    mesh: zs.Mesh
    step: int


def check_run(path: Path, stage: int) -> tuple[Config, Path]:
    """Return the settings of a run, and its newest checkpoint or the one that the path names.

    Raises:
        ValueError: the folder is not of a run with a checkpoint, or there is no such stage.
    """
    row_of_stage(stage)
    is_checkpoint = (path / "manifest.json").is_file()
    folder = path.absolute().parent if is_checkpoint else path
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{path} is not the folder of a run: it has no config.toml")
    found = path if is_checkpoint else zs.latest(folder)
    if found is None:
        raise ValueError(f"{path} has no checkpoint yet; a run saves one at its end, or every checkpoint.every_steps")
    config = load_config(folder / "config.toml")
    if config.hf_folder and (folder / _EXPORT / "config.json").is_file():
        # What the run has kept, since its model's folder may have changed.
        kept = {"source": f"hf:{folder / _EXPORT}"}
        config = config.model_copy(update={"model": config.model.model_copy(update=kept)})
    return config, found


@contextmanager
def load_run(path: Path, *, stage: int) -> Iterator[Loaded]:
    """Load the model of a run on the ranks of this launch.

    Args:
        path: the folder of a run, or one of its checkpoints.

    Raises:
        ValueError: as `check_run` does, or the tokenizer is not that of the checkpoint.
        CheckpointError: the checkpoint is damaged.

    Collective: joins the process group, and a load; every rank must call.
    """
    config, checkpoint = check_run(path, stage)
    is_joined = torch.distributed.is_initialized()
    mesh = zs.init(config.run.seed, watchdog_s=config.zero.watchdog_s)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        language = make_model(config, tokenizer, reads=False)
        settings = zs.Settings(watchdog_s=config.zero.watchdog_s)
        choice: Any = stage  # one of the numbers, which `check_run` has seen
        zero = zs.shard(
            language.module,
            stage=choice,
            precision=config.train.precision,
            weights=language.weights,
            settings=settings,
        )
        loaded = zero.load(checkpoint, model_only=True)
        if (trained := loaded.extra.get("data", {}).get("tokenizer_sha256", tokenizer.sha256)) != tokenizer.sha256:
            raise ValueError(
                f"data.tokenizer: {checkpoint} was trained with another tokenizer than {tokenizer.name!r} is now: its "
                f"hash is {trained[:_SHOWN]}, and now {tokenizer.sha256[:_SHOWN]}; restore the file or folder of before"
            )
        language.module.eval()
        yield Loaded(config, tokenizer, language, mesh, loaded.step)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    finally:
        if torch.distributed.is_initialized() and not is_joined:
            torch.distributed.destroy_process_group()


def continue_prompt(loaded: Loaded, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return a prompt and its continuation.

    Args:
        tokens: number of tokens to add.
        temperature: of the draws; 0 for the likeliest token.

    Raises:
        ValueError: the prompt is empty.

    Collective: forwards, and an all-gather of 8 bytes a token; every rank must call, with the same arguments.
    """
    try:
        [(ids, _)] = loaded.tokenizer.encode([prompt])
    except UnicodeEncodeError as error:
        raise ValueError(f"--prompt is not text: {error}") from None
    if not len(ids):
        raise ValueError("--prompt has no token; give some text")
    start = torch.from_numpy(ids).to(loaded.mesh.device)
    made = generate(loaded.language, start, numel=tokens, temperature=temperature, seed=seed, share=_token_of_first)
    return loaded.tokenizer.decode(made.tolist())


def _token_of_first(token: Tensor) -> Tensor:
    """Return rank 0's token: kernels may round differently on other ranks. Collective: all-gather of 8 bytes."""
    return zs.gather_across_ranks(token)[0]


def score(loaded: Loaded, data: str, choices: str, *, column: str, limit_bytes: int = 0) -> Mapping[str, Any]:
    """Return what the model scores on a text, on questions, or on both.

    Args:
        data: path of a text; empty for none.
        choices: path of questions; empty for none.
        column: of the text in files with columns.
        limit_bytes: bytes of the text to score at most; 0 for all.

    Returns:
        `step`; for a text `nats_per_token`, `perplexity`, `bits_per_byte`, `tokens` and `bytes`; for questions
        `accuracy`, `accuracy_by_byte` (of choices by their probability a byte) and `questions`.

    Raises:
        ValueError: the text is too short, a line is not a question, or the model's score of a choice is not a number.

    Collective: forwards, and a mean of some numbers; every rank must call, with the same arguments.
    """
    found: dict[str, Any] = {"step": loaded.step}
    with torch.no_grad():
        if data:
            found |= _score_text(loaded, data, column, limit_bytes)
        if choices:
            found |= _score_choices(loaded, choices)
    return found


def _score_text(loaded: Loaded, path: str, column: str, limit_bytes: int) -> Mapping[str, Any]:
    source, mesh = open_source(path, column), loaded.mesh
    tokens, ends, _ = tokenize((document.decode() for document in source.documents()), loaded.tokenizer)
    if tokens.numel() < 2:
        raise ValueError(f"--data: {path!r} has {tokens.numel()} tokens, and a score needs two at least")
    if ends[0] == ends[-1]:
        raise ValueError(
            f"--data: the first of {tokens.numel()} tokens of {path!r} covers its one character of {ends[-1]} bytes, "
            "and a score needs text after the first token; give a longer text"
        )
    scored, scored_bytes = count_scored(ends, limit_bytes)
    batches = heldout_batches(
        tokens,
        batch=_WINDOWS,
        context=loaded.config.model.context,
        scored=scored,
        rank=mesh.rank,
        world_size=mesh.world_size,
    )
    nats = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for inputs, targets in batches:
        logits = loaded.language.compute_logits(inputs.to(mesh.device)).flatten(0, 1)
        there = targets.to(mesh.device).flatten()
        nats += F.cross_entropy(logits, there, ignore_index=IGNORED, reduction="sum")
    total = float(zs.mean_across_ranks(nats)) * mesh.world_size
    return {
        "nats_per_token": total / scored,
        "perplexity": math.exp(total / scored) if total / scored < _MOST_NATS else math.inf,
        "bits_per_byte": total / scored_bytes / math.log(2),
        "tokens": scored,
        "bytes": scored_bytes,
    }


@final
@dataclass(frozen=True)
class Question:
    """A question, its choices, and which of them is right."""

    question: str
    choices: Sequence[str]
    answer: int


def read_questions(path: str) -> list[Question]:
    """Return the questions of a `.jsonl` file.

    Raises:
        ValueError: a line is not a question; the message has its number.
    """
    found = []
    for number, line in enumerate(read_input(path, "--choices", _MOST_QUESTION_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            question = Question(str(one["question"]), _texts(one["choices"]), _place(one["answer"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"--choices: {path!r}, line {number}: {error!r:.100}; a line is "
                '{"question": "...", "choices": ["...", "..."], "answer": 0}'
            ) from None
        if not 0 <= question.answer < len(question.choices) or not all([question.question, *question.choices]):
            raise ValueError(
                f"--choices: {path!r}, line {number}: answer={question.answer} must be a place among its "
                f"{len(question.choices)} choices, counted from 0, and no text may be empty"
            )
        found.append(question)
    if not found:
        raise ValueError(f"--choices: {path!r} has no question")
    return found


def _texts(choices: object) -> list[str]:
    """Return the choices; the letters of a text and the keys of an object are none."""
    if not isinstance(choices, list):
        raise TypeError(f"choices is {choices!r:.30}, and must be a list")
    return [str(choice) for choice in choices]


def _place(answer: object) -> int:
    """Return the place of the right choice, an integer or its digits; true, false and fractions are none."""
    if isinstance(answer, bool) or not (isinstance(answer, int) or (isinstance(answer, str) and answer.isdecimal())):
        raise TypeError(f"answer is {answer!r:.30}, and must be an integer")
    return int(answer)


def _score_choices(loaded: Loaded, path: str) -> Mapping[str, Any]:
    """Return how often the right choice is the most probable one after its question."""
    questions, mesh = read_questions(path), loaded.mesh
    _check_lengths(loaded, path, questions)
    counts = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    most = max(len(one.choices) for one in questions)
    for first in range(0, len(questions), mesh.world_size):
        # Every rank makes as many forwards; what it makes twice does not count.
        mine = first + mesh.rank
        one = questions[min(mine, len(questions) - 1)]
        nats = [_nats_of(loaded, one.question, one.choices[min(k, len(one.choices) - 1)]) for k in range(most)]
        nats = nats[: len(one.choices)]
        sizes = [len(choice.encode()) for choice in one.choices]
        best = min(range(len(nats)), key=nats.__getitem__)
        by_byte = min(range(len(nats)), key=lambda place: nats[place] / sizes[place])
        if mine < len(questions):
            found = [best == one.answer, by_byte == one.answer, any(map(math.isnan, nats))]
            counts += torch.tensor(found).to(counts)
    right, right_by_byte, without = (zs.mean_across_ranks(counts) * mesh.world_size).tolist()
    if without:
        raise ValueError(
            f"--choices: {path!r}: the choices of {without:.0f} of {len(questions)} questions have probabilities of "
            f"NaN, after step {loaded.step}; give a checkpoint of before the loss was NaN"
        )
    count = len(questions)
    return {"accuracy": right / count, "accuracy_by_byte": right_by_byte / count, "questions": count}


def _nats_of(loaded: Loaded, question: str, choice: str) -> float:
    """Return minus the log-probability of a choice after its question, in nats."""
    encoded = loaded.tokenizer.encode([question, choice])
    before, after = (torch.from_numpy(ids) for ids, _ in encoded)
    tokens = torch.cat([before, after])[-(loaded.config.model.context + 1) :].to(loaded.mesh.device)
    logits = loaded.language.compute_logits(tokens[None, :-1])[0]
    count = len(after)
    return float(F.cross_entropy(logits[-count:], tokens[-count:], reduction="sum"))


def _check_lengths(loaded: Loaded, path: str, questions: Sequence[Question]) -> None:
    """Raise ValueError if the model's context cannot hold a choice, of which every token is scored."""
    for number, one in enumerate(questions, 1):
        longest = max(len(ids) for ids, _ in loaded.tokenizer.encode([*one.choices]))
        if longest > loaded.config.model.context:
            raise ValueError(
                f"--choices: {path!r}, question {number}: a choice has {longest} tokens, and model.context is "
                f"{loaded.config.model.context}; shorten it, or give a run with a longer context"
            )


def describe_scores(scores: Mapping[str, Any], *, as_json: bool = False) -> str:
    """Return the scores as text, or as JSON, in which what is not finite is null."""
    if as_json:
        return json.dumps({name: value if math.isfinite(value) else None for name, value in scores.items()})
    lines = [f"after step {scores['step']}"]
    if "perplexity" in scores:
        lines.append(
            f"text     {scores['bits_per_byte']:.4f} bits per byte, perplexity {scores['perplexity']:.3f}, loss "
            f"{scores['nats_per_token']:.4f} nats a token, on {scores['tokens']:,} tokens of {scores['bytes']:,} bytes"
        )
    if "accuracy" in scores:
        lines.append(
            f"choices  {scores['accuracy']:.1%} right, {scores['accuracy_by_byte']:.1%} by probability a byte, of "
            f"{scores['questions']:,} questions"
        )
    return "\n".join(lines)
