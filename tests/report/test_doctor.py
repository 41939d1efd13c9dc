"""The doctor: profiles, and the line that a collective's times are near."""

import dataclasses
import json
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.machine.profiles import device_for, host_device, profile_path, read_profile, write_profile
from zeroshard.report import doctor
from zeroshard.report.doctor import fit_line, measure_device, measure_ranks
from zeroshard.testing import run_ranks


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "device.json"
    write_profile(DEVICES["h100-80"], path)
    found = read_profile(path)
    for one in dataclasses.fields(found):
        assert getattr(found, one.name) == getattr(DEVICES["h100-80"], one.name)
    assert device_for(str(path)).name == "h100-80"
    for device in (found, str(path)):
        assert zs.plan("gpt2", world_size=2, device=device).total_bytes == zs.plan("gpt2", world_size=2).total_bytes


def test_what_is_no_profile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "device.json"
    for text in ("", "[]", "{}", json.dumps({"version": 1, "device": {}}), json.dumps({"version": 2, "device": {}})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"device\.json is (not )?a profile of"):
            read_profile(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".cache" / "zeroshard" / "device.json"
    with pytest.raises(ValueError, match=r"device='this': .*device\.json does not exist; run `zeroshard doctor`"):
        device_for("this")
    with pytest.raises(ValueError, match="device must be one of"):
        device_for("that")


def test_a_line_is_found_through_noise() -> None:
    sizes = [2.0**n for n in range(10, 28)]
    times = [(5e-5 + size / 2e9) * (1 + 0.05 * (-1) ** n) for n, size in enumerate(sizes)]
    start_s, bytes_per_s = fit_line(sizes, times)
    assert start_s == pytest.approx(5e-5, rel=0.05)
    assert bytes_per_s == pytest.approx(2e9, rel=0.05)


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rates of products as large as the doctor's take a minute in bf16 on one core.
    monkeypatch.setattr(doctor, "PRODUCT", {"cpu": 256, "cuda": 8192})
    device = measure_device()
    assert 1e9 < device.peak_flops["float32"] < 1e15
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert device.memory_bytes > 1 << 30
    assert device.is_cpu or device.multiprocessors > 1
    assert measure_ranks(device, 1) is device


def measured_ranks() -> tuple[float, float]:
    mesh = zs.init()
    device = measure_ranks(host_device(), mesh.world_size)
    return device.hop_s, device.link_bytes_per_s


def test_ranks_agree_on_their_collectives() -> None:
    found = run_ranks(measured_ranks, 2)
    assert found[0] == found[1]
    hop_s, bytes_per_s = found[0]
    assert 0 <= hop_s < 1
    assert 1e6 < bytes_per_s < 1e12
