"""The stack of another thread is read at any moment, whatever the garbage collector finds then."""

import gc
import subprocess
import sys
import threading

import pytest

from zeroshard.watch.stacks import stack_of
from zeroshard.watch.whereabouts import line_of_program

PROGRAM = """
import gc, os, sys, threading
from zeroshard.watch.stacks import stack_of

class Garbage:
    def __del__(self):
        # A thread that begins waits for a lock which sys._current_frames() holds while it makes frames.
        one = threading.Thread(target=lambda: None)
        one.start()
        one.join()

main = threading.main_thread().ident
for count in range(60):
    gc.collect()
    garbage = Garbage()
    garbage.itself = garbage
    del garbage
    # The collection comes after so many objects more: sooner or later inside the calls that make frames.
    gc.set_threshold(gc.get_count()[0] + count)
    names = [frame.f_code.co_name for frame in stack_of(main)]
    gc.set_threshold(700)
    assert names[-1] == "<module>", names
print("read", flush=True)
os._exit(0)
"""
LIMIT_S = 60.0


def test_a_collection_meanwhile_neither_hangs_nor_crashes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr[-2000:]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_on_or_off_afterwards_as_before(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        assert any(frame.f_code.co_name == "pytest_cmdline_main" for frame in stack_of(threading.get_ident()))
        assert not any(stack_of(0))
        line_of_program()
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
