"""The configuration: names, types, limits, TOML there and back."""

from pathlib import Path

import pytest

from zeroshard.train.config import ALIASES, Config, load_config, to_toml


def test_defaults_are_valid_and_resolved():
    config = load_config()
    assert config.run.ranks == 2
    assert config.train.batch == config.gpt.batch
    assert config.train.learning_rate == config.gpt.learning_rate


def test_transformers_models_have_values_of_their_own():
    config = load_config(overrides=["model.source=hf:/models/a"])
    assert (config.hf_folder, config.tokenizer) == ("/models/a", "")  # bytes, where the folder holds no tokenizer
    assert (config.train.batch, config.train.learning_rate) == (8, 3e-4)
    assert load_config(overrides=["model.source=hf:a", "data.tokenizer=b"]).tokenizer == "b"
    assert (load_config().hf_folder, load_config().tokenizer) == ("", "")


def test_cache_is_beside_the_runs_unless_said_otherwise():
    assert load_config(overrides=["run.folder=/r"]).cache == Path("/r/.cache")
    assert load_config(overrides=["run.folder=/r", "data.cache=/c"]).cache == Path("/c")


def test_toml_round_trip_keeps_every_value(tmp_path):
    text = 'a "quoted" \\ path\twith ünïcode \x7f and\nlines'
    config = load_config(overrides=["model.depth=3", "train.learning_rate=1e-5", "zero.no_sync=true"])
    config = config.model_copy(update={"run": config.run.model_copy(update={"prompt": text})})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), "utf-8")
    assert load_config(path) == config


def test_file_overrides_defaults_and_overrides_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[train]\nsteps = 7\nclip = 0.5\n", "utf-8")
    config = load_config(path, ["train.steps=8", "train.steps=9"])
    assert (config.train.steps, config.train.clip, config.model.depth) == (9, 0.5, Config().model.depth)


def test_what_follows_from_the_depth_can_be_set():
    config = load_config(overrides=["model.depth=2", "train.batch=6", "train.learning_rate=0.25"])
    assert (config.train.batch, config.train.learning_rate) == (6, 0.25)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("steps=3", "train", "steps", 3),
        ("max_steps=3", "train", "steps", 3),
        ("lr=0.25", "train", "learning_rate", 0.25),
        ("train.lr=0.25", "train", "learning_rate", 0.25),
        ("batch_size=6", "train", "batch", 6),
        ("seq_len=16", "model", "context", 16),
        ("stage=1", "zero", "stage", 1),
    ],
)
def test_names_without_a_section_and_of_other_programs(override, section, key, value, tmp_path):
    assert getattr(getattr(load_config(overrides=[override]), section), key) == value
    path = tmp_path / "config.toml"
    path.write_text("[train]\nlr = 0.5\n", "utf-8")
    assert load_config(path).train.learning_rate == 0.5


def test_no_two_settings_share_a_key():
    keys = [key for section in Config().model_dump().values() for key in section]
    assert len(keys) == len({*keys}) and not {*keys} & ALIASES.keys()


def test_ranks_are_as_many_as_devices(monkeypatch):
    assert load_config().run.ranks == 2
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert load_config().run.ranks == 3
    assert load_config(overrides=["ranks=2"]).run.ranks == 2


def test_a_file_of_an_earlier_run_is_read(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[zero]\nstage = 2\ncut = "row"\n', "utf-8")
    assert load_config(path) == load_config(overrides=["zero.stage=2"])
    with pytest.raises(ValueError, match=r"zero\.cut"):
        load_config(overrides=["zero.cut=row"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", r"unknown key 'train\.stepz'; did you mean 'train\.steps'\?"),
        ("trian.steps=3", r"unknown section 'trian'; did you mean 'train'\?"),
        ("train.depth=3", r"unknown key 'train\.depth'; did you mean 'model\.depth'\?"),
        ("train.qqqqqqqq=3", r"unknown key 'train\.qqqqqqqq'; there are: .*train\.steps"),
    ],
)
def test_unknown_names_are_errors_with_a_suggestion(override, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=[override])
    section, rest = override.split(".", 1)
    path = tmp_path / "config.toml"
    path.write_text(f"[{section}]\n{rest.replace('=', ' = ')}\n", "utf-8")
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_key_outside_a_section_is_an_error(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("qqqqqqqq = 3\n", "utf-8")
    with pytest.raises(ValueError, match=r"^qqqqqqqq=3 is outside a section"):
        load_config(path)
    path.write_text("train = 3\n", "utf-8")
    with pytest.raises(ValueError, match=r"^train=3 is outside a section"):
        load_config(path, ["train.steps=4"])


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=5", "train", "steps", 5),
        ("train.clip=2", "train", "clip", 2.0),
        ("train.clip=1e-2", "train", "clip", 0.01),
        ("zero.no_sync=true", "zero", "no_sync", True),
        ("run.name=123", "run", "name", "123"),
        ("run.name=true", "run", "name", "true"),
        ('run.prompt="a = b"', "run", "prompt", "a = b"),
        ("run.prompt=a = b", "run", "prompt", "a = b"),
        ("data.path=/a/b c.txt", "data", "path", "/a/b c.txt"),
    ],
)
def test_overrides_are_typed(override, section, key, value):
    got = getattr(getattr(load_config(overrides=[override]), section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"run.seed={2**63}", r"^run\.seed=\d+: must be less than 2\*\*63"),
        ("train.steps=2.5", r"^train\.steps=2\.5: .*integer"),
        ("train.steps=many", r"^train\.steps='many': .*integer"),
        ("train.steps=0", r"^train\.steps=0: .*greater than or equal to 1"),
        ("zero.no_sync=1", r"^zero\.no_sync=1: .*boolean"),
        ("train.clip=nan", r"^train\.clip=nan: .*finite"),
        ("zero.stage=4", r"^zero\.stage must be one of"),
        ("run.name=a/b", r"^run\.name='a/b': must be one plain folder name"),
        ("run.name=..", r"^run\.name='\.\.': must be one plain folder name"),
        ("run.name=.cache", r"^run\.name='\.cache': must be .* without a dot before them, .*where \.cache is that of"),
        ("train.batch=1", r"^train\.batch=1 is below run\.ranks=2 .* set train\.batch to 2 or"),
        ("model.source=gpt3", r"^model\.source='gpt3': must be 'gpt', or hf:DIR"),
        ("model.source=hf:", r"^model\.source='hf:': must be 'gpt', or hf:DIR"),
        ("train.precision=fp8", r"^train\.precision='fp8': .*'fp32', 'bf16' or 'fp16'"),
        ("train.steps", r"an override reads key=value"),
        ("=3", r"an override reads key=value"),
        ("stepz=3", r"unknown setting 'stepz'; did you mean 'steps'\?"),
        ("zero.lr=3", r"unknown key 'zero\.lr'"),
    ],
)
def test_wrong_values_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=[override])


def test_every_wrong_value_is_told_at_once():
    with pytest.raises(ValueError, match=r"train\.steps=0.*\n.*train\.clip=-1"):
        load_config(overrides=["train.steps=0", "train.clip=-1"])


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*missing\.toml.*No such file"):
        load_config(tmp_path / "missing.toml")
    path = tmp_path / "broken.toml"
    path.write_text("[train\n", "utf-8")
    with pytest.raises(ValueError, match=r"broken\.toml.* is not TOML: .*line 1"):
        load_config(path)


def test_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config().train.steps = 3
