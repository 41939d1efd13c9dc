"""The command line: its messages, its launcher, torchrun, and Ctrl-C."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from rich.console import Console

from tests.processes import is_running
from zeroshard.cli import main
from zeroshard.peers import COMMANDS
from zeroshard.terminal import Terminal
from zeroshard.train.config import Config, load_config
from zeroshard.train.launch import launch_ranks
from zeroshard.train.metrics import EvalRecord, RankBytes, Start, StepRecord, Summary

ROOT = Path(__file__).parents[2]
TOML = "[train]\nsteps = 7\nclip = 0.5\n"
SMALL = ["--depth", "1", "model.context=32", "train.eval_bytes=200", "run.sample_bytes=4", "run.log_every=1"]


def _main(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return its exit status and what it wrote."""
    monkeypatch.setattr(sys, "argv", ["zeroshard", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    written = capsys.readouterr()
    return end.value.code or 0, written.out, written.err


def _start(*command, cwd, env=None, stdout=subprocess.PIPE):
    """Start a Python process that finds this repository and does not find torchrun's variables."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=_heed,
    )


def _heed():
    """Have a process heed signals that those who run the tests may ignore, such as `nohup`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_for_steps(folder, count):
    """Wait until the run in `folder` has written that many steps."""
    metrics, end_s = folder / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count('"kind": "step"') < count:
        assert time.monotonic() < end_s, "the run made no steps"
        time.sleep(0.05)


def test_dry_run_prints_the_resolved_configuration(monkeypatch, capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TOML, "utf-8")
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 100, "utf-8")
    options = [
        "--config",
        str(path),
        "--depth",
        "3",
        "--ranks",
        "4",
        "--stage",
        "2",
        "--data",
        str(text),
        "--name",
        "n",
    ]
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}", "utf-8")
    status, out, _ = _main(
        monkeypatch, capsys, "train", *options, "--steps", "9", "--seed", "5", "--model", f"hf:{model}",
        "--precision", "bf16", "--dry-run", "--profile", "--compile", "zero.no_sync=true",
    )  # fmt: skip
    assert status == 0
    path.write_text(out, "utf-8")
    config = load_config(path)
    assert (config.model.depth, config.run.ranks, config.zero.stage, config.data.path) == (3, 4, 2, str(text))
    assert (config.run.name, config.train.steps, config.run.seed, config.zero.no_sync) == ("n", 9, 5, True)
    assert (config.run.profile_steps, config.train.compile_blocks) == (3, True)
    assert (config.train.clip, config.train.precision, config.model.source) == (0.5, "bf16", f"hf:{model}")
    assert f"\n# data: {text}, 1,100 bytes in 1 file(s)\n" in out
    assert "# plan: none, since " in out


def test_dry_run_prints_the_plan_as_comments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)  # where no profile is
    status, out, _ = _main(monkeypatch, capsys, "train", "--depth", "1", "--ranks", "2", "--stage", "2", "--dry-run")
    settings, _, plan = out.partition("\n# plan of a rank: ")
    assert status == 0 and plan
    settings, text, model = settings.partition("\n# data: ")
    assert text and "model: " in model and " parameters, " in model and "iB in fp32" in model
    assert all(line.startswith("# ") for line in plan.splitlines()[1:])
    assert "from torch's allocator (backward)" in plan and "time is not predicted" in plan
    path = tmp_path / "config.toml"
    path.write_text(out, "utf-8")
    with_plan = load_config(path)
    path.write_text(settings, "utf-8")
    assert with_plan == load_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\xff\xfe" * 2000, "is not text in UTF-8"),
        (b"short", "has 5 bytes; with model.context=128"),
    ],
)
def test_a_dry_run_reads_the_text(content, message, monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    status, _, err = _main(monkeypatch, capsys, "train", "--data", str(text), "--ranks", "1", "--dry-run")
    assert status == 2 and "zeroshard: data.path: " in err and message in err


@pytest.mark.parametrize("name", ["latin-1", "ascii"])
def test_output_of_any_encoding_is_written(name, tmp_path):
    """A character that the encoding lacks is replaced, and the run ends well."""
    settings = ["--depth", "1", "--context", "16", "--steps", "2", "--ranks", "1", "run.sample_bytes=40"]
    run = _start("-m", "zeroshard", "train", *settings, cwd=tmp_path, env={"PYTHONIOENCODING": name})
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "score " in out and "next   zeroshard generate" in out


def test_a_full_disk_below_the_output_does_not_end_a_run(tmp_path):
    settings = ["--depth", "1", "--context", "16", "--steps", "2", "--ranks", "1", "run.sample_bytes=0"]
    with open("/dev/full", "w") as full:
        run = _start("-m", "zeroshard", "train", *settings, cwd=tmp_path, stdout=full)
        _, err = run.communicate(timeout=120)
    assert run.returncode == 0
    assert err == "zeroshard: standard output cannot be written (No space left on device); the run continues\n"
    assert (tmp_path / "runs" / "default" / "summary.json").exists()


def test_an_error_of_one_rank_is_one_block(tmp_path):
    settings = ["--depth", "1", "--context", "16", "--steps", "20", "--ranks", "1", "--lr", "1e30"]
    run = _start("-m", "zeroshard", "train", *settings, cwd=tmp_path)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 1
    assert err.startswith("zeroshard: RuntimeError: [rank 0/1] The gradient of '") and "Traceback" not in err
    assert err.rstrip().endswith("shows all frames.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=1"], "zeroshard: unknown key 'train.stepz'; did you mean 'train.steps'?\n"),
        (["--data", "/nowhere"], "zeroshard: data.path: there is no file or folder '/nowhere'"),
        (["--stage", "7"], "zeroshard: zero.stage must be one of [0, 1, 2, 3]"),
        (["--data", "/nowhere", "--dry-run"], "zeroshard: data.path: there is no file or folder '/nowhere'"),
        (["--ranks", "9"], "zeroshard: train.batch=8 is below run.ranks=9"),
        (["--model", "hf:/nowhere"], "zeroshard: model.source: there is no folder '/nowhere'"),
        (["--model", "hf:/nowhere", "--stage", "auto"], "zeroshard: model.source: there is no folder '/nowhere'"),
        (["data.tokenizer=/nowhere"], "zeroshard: data.tokenizer: there is no file or folder '/nowhere'"),
        (["--config", "/nowhere.toml"], "zeroshard: --config: cannot read '/nowhere.toml'"),
        (["--config", "/\x1b[2J.toml"], "zeroshard: --config: cannot read '/\\x1b[2J.toml'"),
        (["--name", "\x1b[2J"], "zeroshard: run.name='\\x1b[2J': must be one plain folder name"),
        (["--offload", "/nowhere"], "zeroshard: zero.offload: there is no folder '/nowhere'"),
        (["--offload", "/nowhere", "--dry-run"], "zeroshard: zero.offload: there is no folder '/nowhere'"),
        (["run.folder=/etc/hostname/x"], "zeroshard: run.folder: '/etc/hostname' is a file"),
        (["--log-to", "tensorbaord"], "zeroshard: run.log_to='tensorbaord': there is no tracker 'tensorbaord'"),
        (["--lora", "rank=4"], "zeroshard: model.lora=rank=4 is for models of transformers: give --model hf:DIR"),
        (["--replicas", "3"], "zeroshard: run.replicas=3 does not divide run.ranks=2"),
        (["--outer", "50", "--staleness", "4"], "zeroshard: run.staleness=4 needs run.mailbox, the address"),
        (["--mailbox", "h:1"], "zeroshard: run.mailbox=h:1 needs run.outer, the steps between exchanges"),
        (["--mailbox", "h:1", "--outer", "5"], "zeroshard: run.mailbox=h:1 needs run.secret_file"),
        (
            ["--mailbox", "h:1", "--outer", "5", "--secret-file", "s", "--island", "3/2"],
            "zeroshard: run.island='3/2': with run.mailbox, give the number of this island",
        ),
        (
            ["--mailbox", "h:1", "--outer", "5", "--secret-file", "s", "--island", "1/2", "--replicas", "2"],
            "zeroshard: run.replicas=2 with run.mailbox",
        ),
        (
            ["--mailbox", "h:1", "--outer", "5", "--secret-file", "/nowhere", "--island", "1/2"],
            "zeroshard: run.secret_file: there is no file '/nowhere'",
        ),
        (
            ["--mailbox", "h", "--outer", "5", "--secret-file", "/nowhere", "--island", "1/2"],
            "zeroshard: run.mailbox: ",
        ),
        (["--outer", "50", "--ranks", "1"], "zeroshard: run.outer=50 needs at least two islands"),
        (
            ["--outer", "50", "--batch", "3"],
            "zeroshard: train.batch=3 windows cannot be divided equally over run.replicas=2 islands; set train.batch "
            "to a multiple of 2",
        ),
        (["hf:models/llama"], "zeroshard: a model is an option: write --model hf:models/llama"),
        (["--learning-rate", "0.1"], "zeroshard: No such option: --learning-rate; write --lr VALUE"),
        (["--weight-decay", "0.1"], "zeroshard: No such option: --weight-decay"),
        (["--frobnicate"], "zeroshard: No such option: --frobnicate; zeroshard train --list shows all settings"),
        (["--lr", "fast"], "zeroshard: Invalid value for '--lr': "),
    ],
)
def test_mistakes_end_with_one_message(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # here may be runs
    status, out, err = _main(monkeypatch, capsys, "train", *arguments)
    assert status == 2
    assert err.startswith(message)
    assert "Traceback" not in err + out
    assert ("write weight_decay=VALUE" in err) == ("--weight-decay" in arguments)


@pytest.mark.parametrize(("command", "remedy"), COMMANDS.items())
def test_commands_of_other_programs_are_answered(command, remedy, monkeypatch, capsys):
    status, out, err = _main(monkeypatch, capsys, command)
    assert (status, out, err) == (2, "", f"zeroshard: unknown command {command!r}; write {remedy}\n")


@pytest.mark.rotates
def test_settings_that_ranks_refuse_end_with_their_message(tmp_path):
    # A model of one block has no unit below the root, which recomputation would be of.
    settings = ["--depth", "1", "--activations", "recompute", "--ranks", "2", f"run.folder={tmp_path}"]
    ended = _start("-m", "zeroshard", "train", *settings, cwd=tmp_path)
    out, err = ended.communicate(timeout=120)
    assert ended.returncode == 2, err
    assert err.count("zeroshard: activations='recomputed' recomputes modules of units, but no selected unit") == 1
    assert "Traceback" not in out + err


def test_the_usual_flags_are_settings(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    flags = [
        "--lr", "0.5", "--batch-size", "12", "--context", "64", "--gradient-accumulation-steps", "2", "--precision",
        "bfloat16", "--replicas", "2", "--ranks", "4",
    ]  # fmt: skip
    status, out, err = _main(monkeypatch, capsys, "train", *flags, "--dry-run")
    assert status == 0, err
    path = tmp_path / "config.toml"
    path.write_text(out, "utf-8")
    config = load_config(path)
    assert (config.train.learning_rate, config.train.batch, config.model.context) == (0.5, 12, 64)
    assert (config.train.accumulation, config.train.precision) == (2, "bf16")
    assert (config.run.replicas, config.run.ranks) == (2, 4)


def test_all_settings_are_listed_with_types_and_limits(monkeypatch, capsys):
    status, out, _ = _main(monkeypatch, capsys, "train", "--list")
    assert status == 0
    for section, values in Config().model_dump().items():
        assert all(f"  {section}.{key} = " in out for key in values)
    assert "train.learning_rate = 0.0  (number, at least 0)" in out and "Also: lr." in out
    assert 'train.precision = "fp32"  (fp32 | bf16 | fp16)' in out
    status, out, _ = _main(monkeypatch, capsys, "train", "--json-schema")
    assert json.loads(out)["$defs"]["Train"]["properties"]["steps"]["minimum"] == 1


@pytest.mark.rotates
def test_an_error_of_a_rank_is_one_block_at_the_end(tmp_path):
    # A disk that refuses a line of metrics is found by the ranks: the folder goes while they train.
    settings = [*SMALL, "--steps", "100000", "--ranks", "2"]
    run = _start("-m", "zeroshard", "train", *settings, cwd=tmp_path)
    _wait_for_steps(tmp_path / "runs" / "default", 2)
    (tmp_path / "runs" / "default").rename(tmp_path / "elsewhere")
    _, err = run.communicate(timeout=60)
    lines = err.splitlines()
    assert run.returncode == 1
    assert lines[0].startswith("zeroshard: RuntimeError: [rank ") and "cannot be written" in lines[0]
    assert lines[-1].startswith("This was rank ") and "--verbose shows all frames" in lines[-1]
    assert "Traceback" not in err and len(lines) < 6


def _told(is_terminal):
    """Return what a terminal shows of a run of two steps and one evaluation."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120, _environ={})
    held = {"states": 2_000_000, "gradients": 500_000, "parameters": 500_000, "padding": 64, "transient": 7}
    sent = {"gather": 4_321, "reduce": 1_234, "agree": 56}
    with Terminal(log_every=100, console=console, is_verbose=True) as terminal:
        cells = {"states": "sharded", "gradients": "replicated", "parameters": "replicated", "activations": "kept"}
        changes = ("train.steps is 2, and was 1",)
        start = Start("a model", "2 ranks", "a text", "stage 1", cells, [held, held], 2, 0, Path("runs/x"), changes)
        terminal.started(start)
        for step in (1, 2):
            terminal.stepped(StepRecord(step, 3.25 - step, 0.1, 1.0, 90.0, 1000.0, held, held, mfu=0.375))
        terminal.evaluated(EvalRecord(2, 1.5, 2.125, 999, 0.5))
        of_rank = RankBytes(
            held, held, held | {"transient": 9}, {"gather": 4_321, "reduce": 1_234}, sent, {"gather": 8}
        )
        terminal.finished(
            Summary(
                "x", "a model", False, 2, [], 1, 10, 2, 1, "stage 1", 3.25, 1.5, 2.125, 20, 1000.0, 180.0, 185.0,
                [of_rank, of_rank], {}, "[b]sample", {}, "[rank 0/2] a profile", pipe=2, schedule="1f1b",
                micro_batches=4, idle=[0.25, 0.5], mfu=0.36,
            )
        )  # fmt: skip
    return out.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_person_sees(is_terminal):
    told = _told(is_terminal)
    assert ("\x1b[" in told) == is_terminal
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", told)
    for text in ("a model", "2 ranks", "a text", "runs/x/", "stage 1", "replicated", "rank 1, predicted bytes"):
        assert text in plain
    assert "loss 1.2500  lr 1.00e-01  norm 1.00  1,000 tokens/s  MFU 38%  2.9 MiB/rank" in plain
    assert "eval after step 2: 2.1250 bits per byte on 999 held-out bytes" in plain
    assert "[b]sample" in plain
    assert "[rank 0/2] a profile" in plain
    assert [line.rstrip() for line in plain.rstrip().splitlines()][-7:] == [
        "score  2.1250 bits per byte held out, loss 1.5000; 2 steps, 3:05 in all",
        "loss   2.250 to 1.250  \u2588\u2581",
        "speed  1,000 tokens/s, 36.0% of the devices' peak (MFU)",
        "memory 2.9 MiB a rank predicted, 2.9 MiB measured: model states and buffers",
        "run    runs/x/",
        "next   zeroshard generate runs/x --prompt 'The '",
        "       zeroshard report runs/x",
    ]
    assert "new    train.steps is 2, and was 1" in plain
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in plain.splitlines() if line.startswith("│")]
    assert ["rank 1 predicted", "2,000,000", "500,000", "500,000", "64", "7"] in rows
    assert ["measured", "2,000,000", "500,000", "500,000", "64", "9"] in rows
    assert ["rank 0 predicted", "4,321", "1,234", "-"] in rows
    assert ["measured", "4,321", "1,234", "56"] in rows
    assert ["outside steps", "8", "0", "0"] in rows
    assert "Places of the pipeline: 1f1b, 4 micro-batches a step" in plain
    assert ["place 1, rank 1", "-", "50.0%", "3,000,071", "3,000,071"] in rows
    if is_terminal:
        assert "step 2/2" in plain
        assert told.count("\x1b[?25h") == told.count("\x1b[?25l") == 1
    else:
        assert "step     1/2" in plain
        assert "1:30 left" in plain


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_and_samples_do_not_steer_the_terminal(is_terminal):
    evil, shown = "\x1b[2J\u202e[bold]x[/y]:warning:\udcff", "\\x1b[2J\\u202e[bold]x[/y]:warning:\\udcff"
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120, _environ={})
    held = {"states": 1, "gradients": 1, "parameters": 1, "padding": 1, "transient": 1}
    of_rank = RankBytes(held, held, held, {"gather": 1}, {"gather": 1}, {})
    with Terminal(log_every=1, console=console) as terminal:
        terminal.started(Start(evil, evil, evil, "stage 1", {"states": "sharded"}, [held], 2, 1, Path(evil)))
        terminal.saved(2, Path(evil))
        terminal.finished(
            Summary(
                evil, evil, False, 2, [], 1, 10, 1, 1, "stage 1", 3.25, 1.5, 2.125, 20, 1.0, 1.0, 1.0,
                [of_rank], {}, f"{evil}\n\ta\u00a0b", {}, evil,
            )
        )  # fmt: skip
    told = out.getvalue()
    assert told.count(shown) == 10
    assert "\x1b[2J" not in told
    assert "\u202e" not in told
    assert "a\u00a0b" in told


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version(argument, monkeypatch, capsys):
    status, out, _ = _main(monkeypatch, capsys, argument)
    assert status == 0
    assert out.startswith("zeroshard ")
    assert out.split()[1][0].isdigit()


def test_help_has_choices_and_defaults_and_needs_no_torch():
    hide = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_module('zeroshard', run_name='__main__')"
    run = _start("-c", hide, "train", "--help", cwd=ROOT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    words = " ".join(out.replace("\u2502", " ").split())
    for text in ("fp32|bf16|fp16", "0|1|2|3|auto", "Default: 1500.", "Default: gpt.", "Default: adamw."):
        assert text in words, out


@pytest.mark.parametrize("name", ["typer", "pydantic"])
def test_missing_extra_is_named(name):
    hide = f"import sys; sys.modules[{name!r}] = None; from zeroshard.cli import main; main()"
    run = _start("-c", hide, "train", cwd=ROOT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2
    assert f"needs '{name}" in err
    assert 'pip install "zeroshard[cli]"' in err
    assert "Traceback" not in err


def test_learned_tokens_of_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [topics[key] for key in sorted(topics)]
    Path("docs.jsonl").write_text("".join(f"{json.dumps({'body': text})}\n" for text in texts), "utf-8")
    told = _main(
        monkeypatch, capsys, "tokenizer", "docs.jsonl", "--out", "t.json", "--vocab", "400", "--column", "body"
    )
    assert told[0] == 0, told[2]
    assert told[1].startswith("400 tokens, from ")
    settings = ["--ranks", "1", "--data", "docs.jsonl", "data.column=body", "data.tokenizer=t.json"]
    status, out, err = _main(monkeypatch, capsys, "train", *SMALL, "--steps", "2", *settings)
    assert status == 0, err
    assert "docs.jsonl, " in out
    summary = json.loads(Path("runs/default/summary.json").read_text("utf-8"))
    data = summary["data"]
    assert data["train_bytes"] + data["heldout_bytes"] == sum(len(text.encode()) for text in texts)
    assert (data["vocabulary"], data["tokenizer"]) == (400, "t.json")
    assert data["train_tokens"] < data["train_bytes"] / 1.5
    scored = json.loads(Path("runs/default/metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert 195 <= scored["scored_bytes"] <= 200
    assert summary["bits_per_byte"] < summary["final_heldout_loss"] / math.log(2) / 1.2
    assert len(list(Path("runs/.cache").iterdir())) == 1


def test_a_complete_run_of_another_text_is_no_run_of_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", *SMALL, "--ranks", "1", "--steps", "1", "--data", "text.txt"]
    Path("text.txt").write_text("one two three " * 400)
    assert _main(monkeypatch, capsys, *command)[0] == 0
    assert "runs/default is complete: all 1 steps are done" in _main(monkeypatch, capsys, *command)[1]
    Path("text.txt").write_text("four five six " * 400)
    told = "zeroshard: data.path: runs/default was trained on another text or other tokens: sha256 differs\n"
    assert _main(monkeypatch, capsys, *command) == (2, "", told)


def test_tokenizer_mistakes_end_with_one_message(monkeypatch, capsys, tmp_path):
    out = str(tmp_path / "t.json")
    for arguments, message in (
        (["/nowhere", "--out", out], "zeroshard: data.path: there is no file or folder '/nowhere'"),
        (["--out", out, "--vocab", "9"], "zeroshard: --vocab must be at least 257 "),
    ):
        status, _, err = _main(monkeypatch, capsys, "tokenizer", *arguments)
        assert status == 2
        assert err.startswith(message)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, _, err = _main(monkeypatch, capsys, "tokenizer", "--out", out)
    assert (status, err.count("\n")) == (2, 1)
    assert "needs 'tokenizers'; install it with: pip install \"zeroshard[data]\"" in err


def test_ranks_may_take_as_long_to_stop_as_others_wait(monkeypatch):
    seen = []

    def launch(config, entrypoint):
        seen.append(config.shutdown_timeout)
        return lambda *arguments: {}

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    os.environ.pop("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None)
    assert launch_ranks(2, [], patience_s=77.5) == (0, "")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    assert launch_ranks(2, [], patience_s=77.5) == (0, "")
    assert seen == [78, 5]


@pytest.mark.rotates
def test_two_ranks_through_the_launcher(tmp_path):
    options = ["--steps", "3", "--name", "two", "--verbose"]
    run = _start("-m", "zeroshard.cli", "train", *SMALL, *options, cwd=tmp_path)
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert err == ""
    folder = tmp_path / "runs" / "two"
    assert {"config.toml", "metrics.jsonl", "summary.json", "step-00000003"} < {path.name for path in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"], len(summary["ranks"])) == (2, 3, 2)
    assert out.count("step     3/3") == 1
    assert f"{summary['bits_per_byte']:.4f} bits per byte" in out
    for heading in ("Residency", "Bytes in memory", "Bytes sent in training steps", "sample"):
        assert heading in out
    for of_rank in summary["ranks"]:
        assert f"{of_rank['predicted_bytes']['states']:,}" in out
        assert f"{of_rank['sent_bytes']['gather']:,}" in out
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][:3]
    assert [one["tokens"] for one in steps] == [128, 256, 384]
    assert steps[0]["time"] < steps[1]["time"] < steps[2]["time"] <= time.time()
    assert summary["wall_s"] > summary["train_s"]


def _launch(folder, rank, launcher="pass"):
    """Launch two ranks whose command line is `rank`, in a copy of the package that the launcher alone knows."""
    package = folder / "here" / "zeroshard"
    package.mkdir(parents=True)
    for path in (ROOT / "zeroshard").iterdir():
        (package / path.name).symlink_to(path)
    (package / "cli.py").unlink()
    (package / "cli.py").write_text(f"import os, signal, time\ndef main():\n    {rank}\n")
    text = f"""
import signal, sys
sys.path.insert(0, "here")
from zeroshard.train.launch import launch_ranks
{launcher}
print(*launch_ranks(2, [], patience_s=9))
"""
    return _start("-P", "-c", text, cwd=folder).communicate(timeout=90)


def test_ranks_import_from_where_their_launcher_does(tmp_path):
    """Not from the current folder, with a module named like one of Python's."""
    (tmp_path / "signal.py").write_text("raise SystemExit(0)")
    assert _launch(tmp_path, "os.write(1, b'here\\n')") == ("here\nhere\n0 \n", "")


def test_ignored_signals_stay_ignored_by_launcher_and_ranks(tmp_path):
    kill = "[os.kill(one, signal.SIGHUP) for one in (os.getppid(), os.getpid())]"
    rank = f"{kill}; time.sleep(1); os.write(1, b'went on\\n')"
    ignores = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert _launch(tmp_path, rank, ignores) == ("went on\nwent on\n0 \n", "")


@pytest.mark.rotates
def test_torchruns_ranks_join(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zeroshard.cli"]
    run = _start(*torchrun, "train", *SMALL, "--steps", "2", "--ranks", "1", cwd=tmp_path)
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert out.count("step     2/2") == 1
    assert json.loads((tmp_path / "runs" / "default" / "summary.json").read_text())["world_size"] == 2


@pytest.mark.product
@pytest.mark.parametrize(("ranks", "is_all"), [("1", False), ("2", True)])
def test_a_run_whose_output_is_closed_trains_to_its_end(tmp_path, ranks, is_all):
    run = _start("-m", "zeroshard.cli", "train", *SMALL, "--ranks", ranks, "--steps", "6", cwd=tmp_path)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    if is_all:
        run.stderr.close()
    else:
        assert run.stderr.read() == "zeroshard: standard output is closed; the run continues\n"
    assert run.wait(60) == 0
    folder = tmp_path / "runs" / "default"
    assert (folder / "metrics.jsonl").read_text().count('"kind": "step"') == 6
    assert [path.name for path in folder.glob("step-*")] == ["step-00000006"]


def test_streams_that_the_parent_closed_drop_their_texts(tmp_path):
    """And no file that is opened later gets their numbers."""
    (tmp_path / "program.py").write_text("""
import sys
from zeroshard.cli import main
try:
    main()
finally:
    sys.stdout.write("x"), sys.stderr.write("x")
    with open("first", "w") as first:
        first.write(f"{first.fileno() > 2} {sys.stdin.read()!r}")
""")
    closing = "os.closerange(0, 3); os.execv(sys.executable, [sys.executable, 'program.py', 'version'])"
    run = _start("-c", f"import os, sys; {closing}", cwd=tmp_path)
    assert run.communicate(timeout=60) == ("", "")
    assert run.returncode == 0
    assert (tmp_path / "first").read_text() == "True ''"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--lr"], "zeroshard: Option '--lr' requires an argument\n"),
        (
            ["generate", "runs/x", "--tokens", "0"],
            "zeroshard: Invalid value for '--tokens': Input should be greater than or equal to 1\n",
        ),
        (["plot", "runs/x", "-o", "a.png"], "zeroshard: --out writes .svg or .html; got 'a.png'\n"),
    ],
)
def test_options_are_refused_in_one_line(monkeypatch, capsys, arguments, said):
    assert _main(monkeypatch, capsys, *arguments) == (2, "", said)


@pytest.mark.product
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_saves_and_the_same_command_goes_on(number, tmp_path):
    command = ["-m", "zeroshard.cli", "train", *SMALL, "--steps", "40", "checkpoint.every_s=0"]
    run = _start(*command, cwd=tmp_path)
    folder = tmp_path / "runs" / "default"
    _wait_for_steps(folder, 3)
    ranks = _children(run.pid)
    assert len(ranks) == 2
    run.send_signal(number)
    out, err = run.communicate(timeout=25)
    assert run.returncode == 128 + number
    assert err == ""
    assert not any(is_running(rank) for rank in ranks)
    summary = json.loads((folder / "summary.json").read_text())
    made = summary["steps"]
    assert (summary["is_interrupted"], made < 40) == (True, True)
    assert made == (folder / "metrics.jsonl").read_text().count('"kind": "step"')
    assert f"interrupted after step {made}" in out
    assert [path.name for path in folder.glob("step-*")] == [f"step-{made:08d}"]
    assert f"saved after step {made}: runs/default/step-{made:08d}" in out

    if number != signal.SIGINT:
        return  # the folder is as SIGINT leaves it
    again = _start(*command, cwd=tmp_path)
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err) == (0, "")
    assert f"start  after step {made} of 40, from its checkpoint" in out
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 41), 40]  # the last step, and its evaluation
    assert json.loads((folder / "summary.json").read_text())["resumed_at"] == [made]


def test_what_the_command_line_says_of_a_run_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", *SMALL, "--ranks", "1", "--steps", "2"]
    assert _main(monkeypatch, capsys, *command, "--fresh")[0] == 0
    status, out, err = _main(monkeypatch, capsys, *command)
    assert (status, err) == (0, "")
    assert out == (
        "runs/default is complete: all 2 steps are done. Continue with more --steps, or start a new run with another "
        "--name.\n"
    )
    for extra, text in (
        (
            ["--fresh"],
            "zeroshard: --fresh: runs/default holds a run, and runs are not overwritten; give another --name",
        ),
        (["--seed", "7"], "zeroshard: run.name: runs/default/config.toml is of a run with other settings:\n  run.seed"),
    ):
        status, out, err = _main(monkeypatch, capsys, *command, *extra)
        assert (status, out) == (2, "")
        assert err.startswith(text)
        assert "Traceback" not in err


@pytest.mark.rotates
def test_signal_while_ranks_start_leaves_none(tmp_path):
    run = _start("-m", "zeroshard.cli", "train", *SMALL, "--steps", "100000", cwd=tmp_path)
    end_s = time.monotonic() + 60
    while len(ranks := _children(run.pid)) < 2:
        assert time.monotonic() < end_s, "no ranks were started"
        time.sleep(0.01)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert err == ""
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.rotates
def test_no_rank_outlives_its_launcher(tmp_path):
    run = _start("-m", "zeroshard.cli", "train", *SMALL, "--steps", "100000", cwd=tmp_path)
    _wait_for_steps(tmp_path / "runs" / "default", 2)
    ranks, end_s = _children(run.pid), time.monotonic() + 10
    run.kill()
    _, err = run.communicate(timeout=20)
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < end_s, "a rank goes on 10 s after its launcher was killed"
        time.sleep(0.05)
    # Without C++ frames of the store that went with the launcher.
    assert err == f"zeroshard: the launcher (process {run.pid}) ended, so its ranks end; the same command resumes\n"


@pytest.mark.rotates
def test_death_of_one_rank_ends_the_others(tmp_path):
    run = _start("-m", "zeroshard.cli", "train", *SMALL, "--steps", "100000", cwd=tmp_path)
    _wait_for_steps(tmp_path / "runs" / "default", 2)
    ranks = _children(run.pid)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = run.communicate(timeout=45)
    assert run.returncode == 128 + signal.SIGKILL
    assert "zeroshard: rank 1 of 2 was ended by SIGKILL; the others were ended\n" in err
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.product
@pytest.mark.parametrize("presses", [0, 1, 2])
def test_a_rank_that_is_late_at_the_start(presses, tmp_path):
    """Rank 1 is stopped before it comes, and rank 0 waits: Ctrl-C ends all, and so does the death of rank 1."""
    run = _start("-m", "zeroshard.cli", "train", *SMALL, "--steps", "100000", cwd=tmp_path)
    end_s = time.monotonic() + 60
    while len(ranks := _children(run.pid)) < 2:
        assert time.monotonic() < end_s, "no ranks were started"
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGSTOP)
    # By then rank 0 has imported all, and waits; its handlers are those of the training.
    while "libtorch_python" not in Path(f"/proc/{ranks[0]}/maps").read_text():
        time.sleep(0.1)
    time.sleep(3.0)
    for _ in range(presses):
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
    if not presses:
        os.kill(ranks[1], signal.SIGKILL)
    begin_s = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert time.monotonic() - begin_s < 5.0
    # A launcher that a second Ctrl-C ends, ends by it; a shell tells 130 then, too.
    assert run.returncode in ((130, -signal.SIGINT) if presses else (128 + signal.SIGKILL,))
    assert presses or "zeroshard: rank 1 of 2 was ended by SIGKILL; the others were ended\n" in err
    assert not any(is_running(rank) for rank in ranks)
