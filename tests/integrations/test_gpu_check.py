"""The GPU script runs from end to end on a CPU, and what it is made to find is found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_check
from benchmarks.gpu_check import Job
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.wire.comm import Pending
from zeroshard.wire.nccl import NcclComm


@pytest.mark.rotates
def test_it_starts_and_writes_its_file(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    low = "check_parity Job(device='cpu', stage=2, precision='fp16'"
    others = [f"{name} Job(device='cpu', stage=3" for name in ("check_delays", "check_meta", "check_state")]
    assert gpu_check.main(["--device", "cpu", "--only", low, *others, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["failed"], report["passed"]) == (0, len(report["checks"]))
    found = [f"{one['name']} {one['job']['ranks']}" for one in report["checks"]]
    ranks = {"check_parity": (1, 2), "check_delays": (2,), "check_meta": (1, 2), "check_state": (2,)}
    assert found == [f"{name} {count}" for name, counts in ranks.items() for count in counts]
    assert all(one["passed"] and one["wall_s"] > 0 for one in report["checks"])
    assert report["versions"]["torch"] == torch.__version__
    assert len(report["commit"].split()[0]) == 40
    assert report["command"].startswith("python -m benchmarks.gpu_check --device cpu --only ")


@pytest.mark.rotates
def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    asked = ["--device", "cpu", "--only", "check_no_synchronization", "--out", str(out)]
    assert gpu_check.main([*asked, "--minutes", "0"]) == 1, "no check has time"
    assert gpu_check.main(asked) == 0
    report = json.loads(out.read_text())
    report["checks"][0]["wall_s"], report["checks"][1]["passed"] = -1.0, False
    out.write_text(json.dumps(report))
    assert gpu_check.main([*asked, "--resume"]) == 0
    walls = {one["job"]["stage"]: one["wall_s"] for one in json.loads(out.read_text())["checks"]}
    assert walls.pop(0) == -1.0
    assert len(walls) == 3 and all(wall_s > 0 for wall_s in walls.values())


def test_the_plan_has_every_stage_and_precision() -> None:
    for gpus, ranks in ((0, {1, 2}), (4, {1, 2, 4})):
        jobs = [job for check, job in gpu_check.plan("cuda", 2, gpus) if check is gpu_check.check_parity]
        plain = [job for job in jobs if job == Job("cuda", job.stage, job.precision, job.ranks, is_nccl=job.is_nccl)]
        kinds = {(job.stage, job.precision, job.ranks, job.is_nccl) for job in plain}
        alone = {(s, "bf16", 1, True) for s in gpu_check.STAGES}
        assert kinds == alone | {(s, p, n, n == 4) for s in gpu_check.STAGES for p in gpu_check.DTYPES for n in ranks}
        assert {check for check, _ in gpu_check.plan("cuda", 2, gpus)} == set(gpu_check.CHECKS)


def test_a_failure_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job) -> dict[str, Any]:
        raise RuntimeError("nothing works")

    monkeypatch.setattr(gpu_check, "plan", lambda *arguments: [(broken, Job("cpu"))])
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path / "x.json")]) == 1
    (one,) = json.loads((tmp_path / "x.json").read_text())["checks"]
    assert not one["passed"]
    assert "nothing works" in one["error"]


def test_no_check_at_all_is_a_failure(tmp_path: Path) -> None:
    assert gpu_check.main(["--device", "cpu", "--only", "nothing of the kind", "--out", str(tmp_path / "x.json")]) == 1


def without_waiting(job: Job) -> dict[str, Any]:
    """Train with an engine that does not wait for what is reduced."""
    late = NcclComm.reduce

    def reduce(self: NcclComm, full: Tensor | None, own: Tensor, *rest: Any, **options: Any) -> Pending:
        late(self, full, own, *rest, **options)
        own.zero_()
        return Pending(lambda: None)

    NcclComm.reduce = reduce  # type: ignore[method-assign]
    return gpu_check.train_engine(job)


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_does_not_wait_is_found(stage: int) -> None:
    job = Job("cpu", stage, ranks=2)
    _, expected = gpu_check.train_plain(job)
    with pytest.raises(RankFailure, match=r"reduce-scatter of \d+ torch.float32 on communicator \d: "):
        run_ranks(without_waiting, 2, job)
    assert gpu_check.difference(expected, gpu_check.join(gpu_check.run(job))) <= gpu_check.TOLERANCE["fp32"]


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_everything_passes_on_the_gpu(tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "gpu.json")]) == 0, (tmp_path / "gpu.json").read_text()
