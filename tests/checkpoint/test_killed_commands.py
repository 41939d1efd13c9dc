"""An import or an export that is killed leaves nothing under the final name, and the next one starts by itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source import REPOSITORY
from zeroshard.checkpoint.attempt import new_attempt, temporary_folder
from zeroshard.checkpoint.folders import FolderReader, export
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import verify

from . import small

# One process is forked for each operation that a command is killed at; a package without torch starts quickly.
KILLED_AT_EACH = """
import json, os, signal, sys, types
package = types.ModuleType("zeroshard")
package.__path__ = [{package!r}]
sys.modules["zeroshard"] = package
from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import export
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import verify

OPERATIONS = ("create", "write", "sync", "rename", "sync_folder", "make_folder")
command = {command}
source, target = {source!r}, {target!r}

def killed_at(number):
    count = 0
    def wrapped(original):
        def operation(*args):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)
        return operation
    for name in OPERATIONS:
        setattr(files, name, wrapped(getattr(files, name)))
    command(source, target)

states = []
for number in range(1, 60):
    child = os.fork()
    if not child:
        killed_at(number)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    states.append([os.WIFSIGNALED(status), os.path.exists(target), sorted(os.listdir(os.path.dirname(target)))])
    if not os.WIFSIGNALED(status) or os.path.exists(target):
        break
print(json.dumps(states))
"""


@pytest.mark.product
@pytest.mark.parametrize("command", ["import_checkpoint", "export"])
def test_a_killed_command_is_started_again(command: str, tmp_path: Path) -> None:
    checkpoint = small.write(tmp_path)
    source = checkpoint if command == "export" else export(checkpoint, tmp_path / "source")
    target = tmp_path / "place" / "new"
    target.parent.mkdir()
    program = KILLED_AT_EACH.format(
        package=str(REPOSITORY / "zeroshard"), command=command, source=str(source), target=str(target)
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    # Every start but the last was killed before its rename, and found what the one before it had left.
    assert len(states) > 10
    assert [exists for _, exists, _ in states[:-1]] == [False] * (len(states) - 1)
    assert max(len(names) for _, _, names in states) == 1
    # The last one was killed between the rename and the flush of the folder above: what it made is whole.
    assert states[-1][1]
    if command == "export":
        assert FolderReader(target).specs.keys() == {"bias", "count", "weight"}
    else:
        verify(target)
    assert os.listdir(target.parent) == ["new"]


@pytest.mark.rotates
def test_what_a_running_command_writes_is_left_alone(tmp_path: Path) -> None:
    checkpoint = small.write(tmp_path)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        export(checkpoint, tmp_path / "hf")
        attempt = attempt_of(sleeper.pid, tmp_path / "new")
        attempt.mkdir()
        import_checkpoint(tmp_path / "hf", tmp_path / "new")
        assert attempt.exists()
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
    (tmp_path / "new").rename(tmp_path / "moved")
    import_checkpoint(tmp_path / "hf", tmp_path / "new")
    assert not attempt.exists()


def attempt_of(process: int, path: Path) -> Path:
    """Return where another process of this host would fill a folder."""
    host, _, number = new_attempt().split("-")
    return temporary_folder(path, f"{host}-{process}-{number}")
